"""The models that score, loaded onto a device, and the image processors that make their inputs.

Each image is prepared alone by the model's own image processor, and each caption by its tokenizer,
padded to the most tokens that the model takes: so the scores of a sample do not depend on others.

A fast image processor scales with torch. For an image of 1024 x 768, that of a ViT takes 2.8 ms
from the image of Pillow, and 1 ms from the four channels in which Pillow keeps it, where nothing is
copied first. So an `ImageProcessor` scales the four channels of each image by the model's own
`resize`, and is called for the rest with the small planes of several images: a call takes up to
0.4 ms, however small they are. This is tried on a few images when the processor is loaded. If the
outcome differs in any bit, each image is prepared in a call of its own.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from wdsprep.dataset.npy_arrays import NUMBERS, Field
from wdsprep.encoding.models.base import DTYPES, Encoded, InTwoPrecisions
from wdsprep.encoding.models.config_files import PROCESSORS, unsuitable
from wdsprep.encoding.models.device import Encoder
from wdsprep.encoding.models.encoder import fits, whole_fp32
from wdsprep.encoding.models.load_networks import (
    explain_load_errors,
    load_tokenizer,
    load_tower,
    silence_libraries,
)
from wdsprep.errors import UsageError
from wdsprep.images.crop import copy_planes, view_pixels
from wdsprep.scoring.heads import load_head
from wdsprep.scoring.models import CLASSIFIER, DUAL, ScoreModel

TOLERANCE = 1e-3
"""The most by which an output may differ, from rounding, if its companions in a batch differ."""
LONGEST = 4096
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "": lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
}


Prepared = Mapping[str, Tensor]
"""An image as a processor gives it, without the dimension of a batch."""
BACKENDS = {"auto": None, "fast": "torchvision", "slow": "pil"}
PROBES = ((96, 64), (372, 588), (130, 60))
"""The heights and widths of the images on which models are tried: smaller and larger than the
input of most networks."""
METHOD_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError)
"""The errors of a processor that does not take scaled planes."""


def make_probes() -> list[Image.Image]:
    """Return images of noise of different sizes, on which models are tried."""
    random = np.random.default_rng(0)
    noises = (random.integers(0, 256, (*size, 3), np.uint8) for size in PROBES)
    return [Image.fromarray(noise) for noise in noises]


class ImageProcessor:
    """The image processor of a model. Two models whose processors are equal share one."""

    def __init__(self, model: ScoreModel) -> None:
        from transformers import AutoImageProcessor

        path = Path(model.folder)
        file = next(path / name for name in PROCESSORS if name in model.files)
        with explain_load_errors(file, "an image processor"):
            self._own = AutoImageProcessor.from_pretrained(
                str(path),
                backend=BACKENDS[model.processor],
                local_files_only=True,
                trust_remote_code=False,
            )
        self.is_fast = "TorchvisionBackend" in {base.__name__ for base in type(self._own).__mro__}
        if model.processor != "auto" and self.is_fast != (model.processor == "fast"):
            raise UsageError(
                f"{model.name} has no {model.processor} image processor: leave --processor out"
            )
        images = make_probes()
        with explain_load_errors(file, "an image processor"):
            wanted = [self._call([image])[0] for image in images]
            self.scales_channels = self.is_fast
            """whether images are scaled one by one, and prepared together"""
            if self.is_fast and not self._makes(wanted, images):
                self.scales_channels = False
        self.blank = wanted[0]
        """What it makes of an image: the shape of all that it makes."""

    @property
    def identity(self) -> str:
        """Return its name and all its settings: processors in which these are equal are equal."""
        return f"{type(self._own).__name__} {self._own.to_json_string()}"

    def __str__(self) -> str:
        """Return its name and kind, as settings have them."""
        return f"{type(self._own).__name__} ({'fast' if self.is_fast else 'slow'})"

    def scale(self, image: Image.Image, shared: dict[str, Tensor]) -> Any:
        """Scale an image in RGB, or prepare it as a whole; several threads may call this at once.

        `shared` has what other processors have made of it in the same way, at first nothing.
        """
        if not self.scales_channels:
            return self._call([image])[0]
        size, resample = self._own.size, self._own.resample
        scaling = f"{type(self._own).resize} {size} {resample}"
        if scaling not in shared:
            if "pixels" not in shared:
                shared["pixels"] = view_pixels(image)
            scaled = self._own.resize(shared["pixels"], size=size, resample=resample)
            shared[scaling] = copy_planes(scaled)
        return shared[scaling]

    def finish(self, scaled: Sequence[Any]) -> list[Prepared]:
        """Return the inputs of the network, given what `scale` has made of images."""
        if not self.scales_channels:
            return list(scaled)
        return self._call(scaled, input_data_format="channels_first", do_resize=False)

    def _makes(self, wanted: list[Prepared], images: Sequence[Image.Image]) -> bool:
        """Return whether what is made of images is to the bit what is wanted."""
        try:
            made = self.finish([self.scale(image, {}) for image in images])
        except METHOD_ERRORS:
            return False
        return all(
            one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
            for one, other in zip(wanted, made, strict=True)
        )

    def _call(self, images: Sequence[Any], **more: Any) -> list[Prepared]:
        if not images:
            return []
        outputs = self._own(images=list(images), return_tensors="pt", **more)
        named = {name: value for name, value in outputs.items() if isinstance(value, Tensor)}
        return [
            {name: value[number] for name, value in named.items()} for number in range(len(images))
        ]


class ScoringNetwork:
    """A model on a device, which gives the columns and the embeddings of batches."""

    def __init__(
        self, model: ScoreModel, device: torch.device, dtype: str, processor: ImageProcessor
    ) -> None:
        self.model, self.processor, self._device = model, processor, device
        self._networks = InTwoPrecisions(self._load, dtype)
        self.kind = type(self._networks.get())
        self._heads = [load_head(head, device) for head in model.heads]
        self._tokenizer: Any = None
        self.token_names: tuple[str, ...] = ()
        if model.role != DUAL:
            return
        with explain_load_errors(Path(model.folder), "a tokenizer"):
            from transformers import AutoTokenizer

            self._tokenizer = load_tokenizer(model, AutoTokenizer, "")
            usual = self._tokenizer.model_max_length
            of_text = self._networks.get().config.get_text_config()
            most = getattr(of_text, "max_position_embeddings", None) or usual
            self._length = int(min(usual, most, LONGEST))
            self.token_names = tuple(self.tokens([""]))

    def _load(self, dtype: str) -> Any:
        import transformers

        kind: Any = transformers.AutoModel
        if self.model.role == CLASSIFIER:
            kind = transformers.AutoModelForImageClassification
        network = load_tower(kind, self.model, "", torch.float32)
        if wrong := next((n for n, p in network.named_parameters() if not p.isfinite().all()), ""):
            why = f"its weights are not finite, such as those of {wrong}"
            raise unsuitable(f"{self.model.name} cannot be used, as {why}")
        return network.to(self._device, DTYPES[dtype]).eval().requires_grad_(False)

    def tokens(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return what the network reads of captions; nothing if it reads none."""
        if self._tokenizer is None:
            return {}
        how = {"padding": "max_length", "truncation": True, "max_length": self._length}
        return dict(self._tokenizer(list(captions), return_tensors="pt", **how))

    def run(
        self, inputs: Mapping[str, Tensor], *, exact: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the columns of a batch in fp32, and the embeddings unless it is a classifier."""
        network = self._networks.get(exact=exact)
        floats = {n: tensor for n, tensor in inputs.items() if tensor.is_floating_point()}
        converted = {name: tensor.to(network.dtype) for name, tensor in floats.items()}
        output = network(**{**inputs, **converted})
        if self.model.role == CLASSIFIER:
            values = ACTIVATIONS[self.model.activation](output.logits.float())
            return [values[:, number] for number in self.model.labels], None
        columns = []
        if self.model.role == DUAL:
            embeddings = functional.normalize(output.image_embeds.float(), dim=-1)
            texts = functional.normalize(output.text_embeds.float(), dim=-1)
            columns.append((embeddings * texts).sum(-1))
        else:
            if (pooled := getattr(output, "pooler_output", None)) is None:
                what = "no pooled output, so there is no embedding of an image"
                raise unsuitable(f"{self.model.name} gives {what}")
            embeddings = pooled.flatten(1).float()
        return [*columns, *(head(embeddings) for head in self._heads)], embeddings


class ScoreEncoder(Encoder):
    """All models of a run on a device: a batch of samples becomes their columns and embeddings.

    Models whose image processors are equal share one.
    """

    def __init__(self, models: Sequence[ScoreModel], device: str, dtype: str) -> None:
        silence_libraries()
        self.device, self._is_fp32 = torch.device(device), dtype == "fp32"
        shared: dict[str, ImageProcessor] = {}
        self.networks: list[ScoringNetwork] = []
        for model in models:
            processor = ImageProcessor(model)
            processor = shared.setdefault(processor.identity, processor)
            self.networks.append(ScoringNetwork(model, self.device, dtype, processor))
        self.processors = tuple(shared.values())
        self.blank = [processor.blank for processor in self.processors]
        sides = [tensor.shape[-1] for prepared in self.blank for tensor in prepared.values()]
        self.resolution = max(sides, default=1)
        columns = sum(len(model.columns) for model in models)
        numbers = Field(name=NUMBERS, dtype="<f4", shape=(columns,))
        self.fields: tuple[Field, ...] = (numbers,) if models else ()

    def inputs_of(
        self, images: Sequence[Sequence[Prepared]], captions: Sequence[str]
    ) -> list[Sequence[Tensor]]:
        """Return the rows of each input of `encode_images`.

        `images` has what each processor made of each image.
        """
        inputs: list[Sequence[Tensor]] = []
        for number, blank in enumerate(self.blank):
            inputs += [[image[number][name] for image in images] for name in blank]
        for network in self.networks:
            inputs += [tokens.unbind() for tokens in network.tokens(captions).values()]
        return inputs

    def encode_images(self, *inputs: Tensor, exact: bool = False) -> Encoded:
        """Return the columns and embeddings of a batch, given its inputs on the device."""
        left = iter(inputs)
        images = [{name: next(left) for name in blank} for blank in self.blank]
        numbers: list[Tensor] = []
        arrays: dict[str, Tensor] = {}
        ok = [torch.ones(len(inputs[0]), dtype=torch.bool, device=self.device)]
        is_whole = exact or self._is_fp32
        with whole_fp32() if is_whole else contextlib.nullcontext(), torch.inference_mode():
            for network in self.networks:
                prepared = images[self.processors.index(network.processor)]
                tokens = {name: next(left) for name in network.token_names}
                columns, embeddings = network.run({**prepared, **tokens}, exact=exact)
                numbers += columns
                if network.model.embedding and embeddings is not None:
                    dtype = DTYPES[network.model.embedding]
                    ok.append(fits(embeddings, dtype))
                    arrays[network.model.member] = embeddings.to(dtype)
            if numbers:
                arrays[NUMBERS] = torch.stack(numbers, 1)
                ok.append(fits(arrays[NUMBERS], torch.float32))
            return Encoded(arrays, torch.stack(ok).all(0))


def try_model(model: ScoreModel) -> tuple[str, int]:
    """Score three images of different sizes by a model on the CPU.

    Return the name and kind of its image processor, and the width of its embeddings, 0 for none.
    Raise UsageError if the outputs for an image depend on the other images in its batch or are not
    finite, if the processor makes images of different sizes, or if a head does not fit.
    """
    encoder = ScoreEncoder([replace(model, embedding="fp32")], "cpu", "fp32")
    (network,), (processor,), name = encoder.networks, encoder.processors, model.name
    with explain_load_errors(Path(model.folder), network.kind):
        images = [processor.scale(image, {}) for image in make_probes()]
        one, two, three = prepared = processor.finish(images)
        shapes = [{part: row.shape for part, row in image.items()} for image in prepared]
        if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
            what = "images of different sizes, which do not fit into one batch"
            raise unsuitable(f"the processor of {name} makes {what}")
        batches = ([[one], [two]], ["a", "a"]), ([[three], [two]], ["b c d", "a"])
        inputs = ([torch.stack([*rows]) for rows in encoder.inputs_of(*own)] for own in batches)
        first, other = (encoder.encode_images(*stacked) for stacked in inputs)
    if not (first.ok[1] and other.ok[1]):
        raise UsageError(f"{name} gives values that are not finite: try --dtype fp32")
    for part, made in first.arrays.items():
        if not torch.allclose(made[1], other.arrays[part][1], rtol=TOLERANCE, atol=TOLERANCE):
            what = "for an image depends on the others in its batch"
            raise unsuitable(f"the output of {name} {what}")
    embeddings = first.arrays.get(model.member)
    return str(processor), 0 if embeddings is None else embeddings.shape[1]
