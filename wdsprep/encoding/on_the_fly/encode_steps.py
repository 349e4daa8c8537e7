"""The encoding of training steps, as a worker of `encode` does it.

`find_encoding` finds the model that an `Encode` names, and `prepare_image` decodes and crops the
image of a sample for it. `reject_of` makes the reject of a sample that cannot be encoded.

`BatchEncoder` encodes the samples of a step on one device, several steps at a time. From their
crops on they go the way that they go in `encode` (`sample_chain`): into batches of one fixed size,
the last one of a step padded, and on a CPU each is computed by one core alone. So a sample gets the
arrays that `encode` makes. On a GPU the batches run on a separate stream, beside the trainer's.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.tar.read import TarSample
from wdsprep.encoding import encode as encoding
from wdsprep.encoding.batching import Batcher, DeviceBatches, Rows
from wdsprep.encoding.models.base import Part
from wdsprep.encoding.models.device import DeviceBatch, Encoder, auto_batch_size
from wdsprep.encoding.models.find_model import Model, find_model
from wdsprep.encoding.recipe_defaults import settings_of, settle_recipe
from wdsprep.encoding.recipe_options import Encode
from wdsprep.encoding.sample_chain import EncodedSample, EncodingSample, Row
from wdsprep.errors import UsageError, WorkError
from wdsprep.images.crop import Crop, crop
from wdsprep.images.nearest_shape import Shapes
from wdsprep.sources.base import Columns
from wdsprep.sources.folder import check_nbytes
from wdsprep.sources.tars import TarsSource
from wdsprep.text import shown


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The model and the recipe of an `Encode`, picklable, so that workers can load the model."""

    model: Model
    recipe: Encode
    """The recipe with its defaults filled in, and with the device."""
    make: Callable[[Model, Encode, str], Encoder]

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the dataset that `encode` would write."""
        return settings_of(self.model, self.recipe)

    def load(self) -> Encoder:
        return self.make(self.model, self.recipe, self.recipe.device)


def find_encoding(encode: Encode, device: str) -> Encoding:
    """Return the model and the recipe of an `Encode`, or raise an error if they cannot be used.

    Files of the model are downloaded if they are missing; no weights are loaded. `device` is the
    device of the trainer or of the cluster, and is used unless the `Encode` names one.
    """
    if encode.is_of_text:
        raise UsageError(
            'encode= makes latents of images: leave latents="none" out, or make text first, with '
            'wdsprep.encode(latents="none")'
        )
    if encode.roles:
        raise UsageError(
            "encode= makes latents of targets alone: leave roles= out, or make latents of all "
            "roles first, with wdsprep.encode"
        )
    device = device if encode.device == "auto" else encode.device
    model = find_model(encode.model, text=encode.text)
    recipe, model = settle_recipe(encode, model, device.partition(":")[0])
    recipe = replace(recipe, device=device)
    return Encoding(model=model, recipe=recipe, make=encoding.make_encoder)


BESIDE_A_TRAINER = 32 * 256**2
"""The most pixels of a batch on a GPU that a trainer uses too: it wants the memory."""
_SOURCE = TarsSource(url="", pattern="*", columns=Columns())  # knows what members make a sample


def prepare_image(
    found: TarSample, tar: str, *, shapes: Shapes, max_area: int, max_nbytes: int
) -> tuple[Sample, Crop]:
    """Return a sample without its image, and the crop of that.

    Raise RejectedError if `encode` would reject the image.
    """
    row = next(_SOURCE.rows(found, tar))
    if isinstance(row, Reject):
        raise RejectedError(row.code, row.detail)
    check_nbytes("the image", len(row.image), max_nbytes)
    return replace(row, image=b""), crop(row.image, shapes, max_area=max_area)


def reject_of(found: TarSample, tar: str, refused: RejectedError) -> Reject:
    """Return the reject that `encode` would write for a sample."""
    return refused.to_reject(shown(f"{tar}/{found.key}"), found.key)


BatchBegun = tuple[Sequence[Row], DeviceBatch, Future[Rows]]
StepBegun = tuple[Sequence[EncodingSample], Sequence[BatchBegun]]
"""A training step that is being encoded: its samples, and its batches with their rows."""


class BatchEncoder:
    """An encoder of training steps, each of at most `most` samples, in batches of one size."""

    def __init__(
        self, encoding: Encoding, *, most: int, lanes: int = 1, kept: bool = False
    ) -> None:
        """Load the models, and prepare the threads of the device.

        With `kept` samples get all arrays that `encode` would store, also latents of mirror images.
        """
        encoder, batch_size = encoding.load(), int(encoding.recipe.batch_size)
        if encoder.is_split:
            raise WorkError(
                "this GPU cannot hold the networks for text and for images together: encode with "
                '"wdsprep encode" first, which loads them in turn'
            )
        self.encoder = encoder
        self.part = Part.BOTH if encoder.has_text else Part.IMAGE
        self.flips = kept and any(field.mirrors for field in encoder.fields)
        is_cuda = encoder.device.type == "cuda"
        size = batch_size or auto_batch_size(encoder)
        if is_cuda and not batch_size:
            beside = max(1, min(size, BESIDE_A_TRAINER // encoder.resolution**2))
            size = -(-most // -(-most // beside))  # the smallest that makes as few batches
        stream: Any = torch.cuda.Stream  # which torch declares without types
        self._stream = stream(encoder.device) if is_cuda else None
        self.batches = DeviceBatches(encoder, size, lanes=lanes, enter=self._enter)
        self._batcher = Batcher(encoder, self.batches, seed=encoding.recipe.seed, flips=self.flips)
        self._filling = threading.Lock()

    def begin(self, samples: Sequence[EncodingSample]) -> StepBegun:
        """Begin to encode the samples of a training step, whose images have been cropped.

        Their pixels are copied. Several threads may call this.
        """
        begun: list[BatchBegun] = []
        with self._filling:
            for sample in samples:
                self._batcher.add(sample)
            while ready := self._batcher.next_batch(now=True):
                rows, batch = ready
                for row in rows:
                    row.drop_pixels()
                if batch is not None:
                    begun.append((rows, batch, self.batches.submit(batch)))
                else:
                    for row in rows:
                        row.take(Code.NO_TOKENS)
        return samples, begun

    def results(self, begun: StepBegun) -> list[EncodedSample | Code]:
        """Wait for all batches, and return each sample of the step, encoded.

        A sample whose arrays are not finite, or whose caption has no tokens, is a code instead.
        """
        samples, batches = begun
        for rows, batch, made in batches:
            for row, arrays in zip(rows, made.result(), strict=True):
                row.take(Code.NOT_FINITE if arrays is None else arrays)
            self._batcher.keep_memory(batch)
        results: list[EncodedSample | Code] = []
        for sample in samples:
            try:
                results.append(sample.result(0))
            except RejectedError as refused:
                results.append(refused.code)
        return results

    def empty(self) -> dict[str, Tensor]:
        """Return the arrays of the empty caption, by field."""
        return self.batches.run(self.encoder.empty)

    def close(self) -> None:
        self.batches.close()

    def _enter(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
            torch.cuda.set_stream(self._stream)
