"""The loading of models that score, and their run on batches.

Each image is prepared alone by the model's own image processor, and each caption by its tokenizer,
padded to the most tokens that the model takes: so the scores of a sample do not depend on others.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from wdsprep.encoding.models.base import DTYPES
from wdsprep.encoding.models.batch_size import is_out_of_memory
from wdsprep.encoding.models.loading import explain_load_errors, load_weights, silence_libraries
from wdsprep.errors import UsageError
from wdsprep.images.crop import planes_of
from wdsprep.scoring.heads import LinearHead
from wdsprep.scoring.models import Role, ScoreModel
from wdsprep.text import plural

Prepared = Mapping[str, Tensor]
"""An image as a processor gives it, without the dimension of a batch."""
BACKENDS = {"auto": None, "fast": "torchvision", "slow": "pil"}
TOLERANCE = 1e-3
"""The most by which an output may differ, from rounding, if its companions in a batch differ."""
LONGEST = 4096
PROBES = ((96, 64), (72, 88), (130, 60))
"""The sizes of the images by which models are tried."""


@dataclass(frozen=True, slots=True)
class BatchScores:
    """The scores of a batch: numbers by column, and embeddings if they are kept."""

    columns: dict[str, Tensor]
    embeddings: Tensor | None

    @property
    def is_finite(self) -> bool:
        every = [*self.columns.values(), *([] if self.embeddings is None else [self.embeddings])]
        return all(bool(each.isfinite().all()) for each in every)


class DecodedImage:
    """An image in RGB, whose planes are made once."""

    def __init__(self, image: "Image.Image") -> None:
        self.image = image

    @cached_property
    def planes(self) -> Tensor:
        return planes_of(self.image)


class ImageProcessor:
    """The image processor of a model. Two models whose processors are equal share one."""

    def __init__(self, model: ScoreModel) -> None:
        from transformers import AutoImageProcessor

        path = Path(model.folder)
        with explain_load_errors(path, AutoImageProcessor):
            self._own = AutoImageProcessor.from_pretrained(
                str(path),
                backend=BACKENDS[model.processor],
                local_files_only=True,
                trust_remote_code=False,
            )
        self.is_fast = "TorchvisionBackend" in {base.__name__ for base in type(self._own).__mro__}
        self.takes_planes = False
        if model.processor != "auto" and self.is_fast != (model.processor == "fast"):
            raise UsageError(
                f"{model.name} has no {model.processor} image processor: leave --processor out"
            )

    @property
    def known_by(self) -> str:
        """Return all that decides the planes which it makes of an image."""
        return f"{type(self._own).__name__} {self._own.to_json_string()}"

    def __str__(self) -> str:
        """Return its name and kind, as settings have them."""
        return f"{type(self._own).__name__} ({'fast' if self.is_fast else 'slow'})"

    def prepare(self, image: "DecodedImage") -> Prepared:
        """Return what the network is given of an image. May be called by several threads."""
        if self.takes_planes:
            return self._made(image.planes, input_data_format="channels_first")
        return self._made(image.image)

    def _made(self, image: Any, **more: Any) -> Prepared:
        made = self._own(images=[image], return_tensors="pt", **more)
        return {name: value[0] for name, value in made.items() if isinstance(value, Tensor)}

    def choose_planes(self, image: "DecodedImage") -> None:
        """Take pixels as planes from now on, if that gives the same.

        A fast processor takes 2.6 ms for an image of 1024 x 768 as Pillow has it, and 1.1 ms for
        its planes, of which the models of a pass share one copy.
        """
        if not self.is_fast:
            return
        plain = self._made(image.image)
        try:
            found = self._made(image.planes, input_data_format="channels_first")
        except (TypeError, ValueError, RuntimeError, AttributeError):  # it is written for Pillow's
            return
        self.takes_planes = plain.keys() == found.keys() and all(
            torch.equal(own, found[name]) for name, own in plain.items()
        )


class ScoringNetwork:
    """A model that is loaded onto a device and scores batches of images and captions."""

    def __init__(
        self, model: ScoreModel, device: torch.device, dtype: str, processor: ImageProcessor
    ) -> None:
        import transformers

        silence_libraries()
        self.model, self.processor, self._device = model, processor, device
        is_classifier = model.role is Role.CLASSIFIER
        kind = (
            transformers.AutoModelForImageClassification
            if is_classifier
            else transformers.AutoModel
        )
        options = {"dtype": torch.float32, "trust_remote_code": False}
        network = load_weights(kind, model, "", options)
        if wrong := next((n for n, p in network.named_parameters() if not p.isfinite().all()), ""):
            raise UsageError(
                f"{model.name} cannot be used, as its weights are not finite, such as those of "
                f"{wrong}: choose another --model"
            )
        self._network = network.to(device, DTYPES[dtype]).eval().requires_grad_(False)
        self._dtype = DTYPES[dtype]
        self._heads = [LinearHead(head) for head in model.heads]
        self._lock = threading.Lock()
        self._tokenizer: Any = self._load_tokenizer() if model.role is Role.DUAL else None

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        path = Path(self.model.folder)
        with explain_load_errors(path, AutoTokenizer):
            made = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        text = self._network.config.get_text_config()
        most = getattr(text, "max_position_embeddings", None) or made.model_max_length
        self._length = int(min(made.model_max_length, most, LONGEST))
        return made

    def run(self, images: Sequence[Prepared], captions: Sequence[str]) -> BatchScores:
        """Return the scores of a batch of images and captions, on the host.

        A batch that does not fit into memory is halved, and a batch in half precision whose values
        are not finite is computed again in fp32.
        """
        found = self._in_parts(images, captions)
        if self._dtype is torch.float32 or found.is_finite:
            return found
        half = self._dtype
        try:
            self._network, self._dtype = self._network.float(), torch.float32
            return self._in_parts(images, captions)
        finally:
            self._network, self._dtype = self._network.to(half), half

    def _in_parts(self, images: Sequence[Prepared], captions: Sequence[str]) -> BatchScores:
        try:
            return self._run(images, captions)
        except RuntimeError as error:
            if not is_out_of_memory(error, free=0, wanted=1) or len(images) == 1:
                raise
        half = len(images) // 2
        first = self._in_parts(images[:half], captions[:half])
        rest = self._in_parts(images[half:], captions[half:])
        embeddings = None
        if first.embeddings is not None and rest.embeddings is not None:
            embeddings = torch.cat([first.embeddings, rest.embeddings])
        columns = {
            name: torch.cat([own, rest.columns[name]]) for name, own in first.columns.items()
        }
        return BatchScores(columns, embeddings)

    def _run(self, images: Sequence[Prepared], captions: Sequence[str]) -> BatchScores:
        with torch.inference_mode():
            inputs = {name: self._stacked(images, name) for name in images[0]}
            if self.model.role is Role.CLASSIFIER:
                logits = self._network(**inputs).logits.float()
                return BatchScores(self._labelled(logits), None)
            columns: dict[str, Tensor] = {}
            if self.model.role is Role.DUAL:
                output = self._network(**inputs, **self._tokens(captions))
                embeddings = functional.normalize(output.image_embeds.float(), dim=-1)
                texts = functional.normalize(output.text_embeds.float(), dim=-1)
                columns[self.model.column("similarity")] = (embeddings * texts).sum(-1)
            else:
                embeddings = self._pooled(self._network(**inputs))
            columns |= {head.column: head.scores(embeddings) for head in self._heads}
            stored = self.model.embedding
            kept = embeddings.to(DTYPES[stored]).cpu() if stored else None
            return BatchScores({name: own.cpu() for name, own in columns.items()}, kept)

    def _stacked(self, images: Sequence[Prepared], name: str) -> Tensor:
        made = torch.stack([image[name] for image in images]).to(self._device)
        return made.to(self._dtype) if made.is_floating_point() else made

    def _tokens(self, captions: Sequence[str]) -> dict[str, Tensor]:
        with self._lock:  # a tokenizer is told of padding before each call
            made = self._tokenizer(
                list(captions),
                padding="max_length",
                truncation=True,
                max_length=self._length,
                return_tensors="pt",
            )
        return {name: value.to(self._device) for name, value in made.items()}

    def _labelled(self, logits: Tensor) -> dict[str, Tensor]:
        activate = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}
        found = activate.get(self.model.activation, lambda x: x)(logits).cpu()
        return {column: found[:, number] for number, column in self.model.labels.items()}

    def _pooled(self, output: Any) -> Tensor:
        pooled = getattr(output, "pooler_output", None)
        if pooled is None:
            raise UsageError(
                f"{self.model.name} gives no pooled output, so there is no embedding of an image: "
                "choose another --model"
            )
        made: Tensor = pooled.flatten(1).float()
        return made

    def check(self, images: Sequence[DecodedImage]) -> int:
        """Score three images of different sizes, and return the width of embeddings, 0 for none.

        Raise UsageError if the outputs for an image depend on the other images in its batch.
        """
        with explain_load_errors(Path(self.model.folder), type(self._network)):
            one, two, three = map(self.processor.prepare, images)
            shapes = [{name: own.shape for name, own in each.items()} for each in (one, two, three)]
            if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
                raise UsageError(
                    f"the processor of {self.model.name} makes images of different sizes, which do "
                    "not fit into one batch: choose another --model"
                )
            first = self.run([one, two], ["a", "a"])
            other = self.run([three, two], ["b c d", "a"])
        self._check_alike(first, other)
        width = 0 if first.embeddings is None else first.embeddings.shape[1]
        return int(width)

    def _check_alike(self, first: BatchScores, other: BatchScores) -> None:
        """Raise UsageError if the second image, the same in both batches, has other scores."""
        pairs = [(own[1], other.columns[name][1]) for name, own in first.columns.items()]
        if first.embeddings is not None and other.embeddings is not None:
            pairs.append((first.embeddings[1], other.embeddings[1]))
        for one, two in pairs:
            if not (one.isfinite().all() and two.isfinite().all()):
                raise UsageError(
                    f"{self.model.name} gives values that are not finite: try --dtype fp32"
                )
            if not torch.allclose(one, two, rtol=TOLERANCE, atol=TOLERANCE):
                raise UsageError(
                    f"the output of {self.model.name} for an image depends on the others in its "
                    "batch: choose another --model"
                )


def probes() -> list[DecodedImage]:
    """Return noise of different sizes, by which models are tried."""
    random = np.random.default_rng(0)
    noises = (random.integers(0, 256, (*size, 3), np.uint8) for size in PROBES)
    return [DecodedImage(Image.fromarray(noise)) for noise in noises]


def load_networks(
    models: Sequence[ScoreModel], device: str, dtype: str
) -> tuple[ScoringNetwork, ...]:
    """Load models onto a device, with one image processor for all models whose own are equal."""
    place = torch.device(device)
    processors: dict[str, ImageProcessor] = {}
    found = []
    for model in models:
        own = ImageProcessor(model)
        shared = processors.setdefault(own.known_by, own)
        if shared is own:
            own.choose_planes(probes()[0])
        found.append(ScoringNetwork(model, place, dtype, shared))
    return tuple(found)


def check_heads(model: ScoreModel, width: int) -> None:
    """Raise UsageError if a head of a model is for embeddings of another width."""
    for head in model.heads:
        own = LinearHead(head).width
        if own != width:
            raise UsageError(
                f"--head {head.place} is for embeddings of {plural(own, 'number')}, and those of "
                f"{model.name} have {width}: choose the --model that it was made for"
            )
