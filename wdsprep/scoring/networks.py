"""The loading of models that score, and their run on batches.

Each image is prepared alone by the model's own image processor, and each caption by its tokenizer,
padded to the most tokens that the model takes: so the scores of a sample do not depend on others.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wdsprep.encoding.models.base import DTYPES
from wdsprep.encoding.models.batch_size import is_out_of_memory
from wdsprep.encoding.models.load_networks import (
    explain_load_errors,
    load_weights,
    silence_libraries,
)
from wdsprep.errors import UsageError
from wdsprep.scoring.heads import LinearHead
from wdsprep.scoring.image_processors import DecodedImage, ImageProcessor, Prepared, make_probes
from wdsprep.scoring.models import Role, ScoreModel
from wdsprep.text import plural

TOLERANCE = 1e-3
"""The most by which an output may differ, from rounding, if its companions in a batch differ."""
LONGEST = 4096


@dataclass(frozen=True, slots=True)
class BatchScores:
    """The scores of a batch: numbers by column, and embeddings if they are kept."""

    columns: dict[str, Tensor]
    embeddings: Tensor | None

    @property
    def is_finite(self) -> bool:
        every = [*self.columns.values(), *([] if self.embeddings is None else [self.embeddings])]
        return all(bool(each.isfinite().all()) for each in every)


class InputMemory(threading.local):
    """The memory in which a thread stacks the inputs of a batch, kept for its next batches.

    New memory for each batch would cost up to 0.2 ms an image, as the system clears it first.
    """

    def __init__(self) -> None:
        self._stacks: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def stack(self, inputs: Sequence[Tensor]) -> Tensor:
        """Stack inputs of one shape. The next call overwrites what this one returns."""
        kind = inputs[0].shape, inputs[0].dtype
        stack = self._stacks.get(kind)
        if stack is None or len(stack) < len(inputs):
            stack = self._stacks[kind] = torch.empty((len(inputs), *kind[0]), dtype=kind[1])
        return torch.stack(list(inputs), out=stack[: len(inputs)])


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
        self._lock, self._memory = threading.Lock(), InputMemory()
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
        made = self._memory.stack([image[name] for image in images]).to(self._device)
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

        Raise UsageError if the outputs for an image depend on the other images in its batch or are
        not finite, or if the processor makes images of different sizes.
        """
        with explain_load_errors(Path(self.model.folder), type(self._network)):
            one, two, three = self.processor.prepare(images)
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
        """Raise UsageError if the second image, the same in both batches, gets different outputs.

        Raise UsageError too if one of these outputs is not finite.
        """
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


def load_networks(
    models: Sequence[ScoreModel], device: str, dtype: str
) -> tuple[ScoringNetwork, ...]:
    """Load models onto a device, with one image processor for all models whose own are equal."""
    place = torch.device(device)
    processors: dict[str, ImageProcessor] = {}
    found = []
    for model in models:
        own = ImageProcessor(model)
        shared = processors.setdefault(own.identity, own)
        if shared is own:
            own.choose_method(make_probes())
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
