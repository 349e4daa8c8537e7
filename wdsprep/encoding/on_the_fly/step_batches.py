"""The encoding of training steps on one device, several of them under way.

Batches have one fixed size, the last one of a step padded, and on a CPU each is computed by one
core alone: so a sample gets the arrays that `encode` makes. On a GPU the batches run on a separate
stream, beside the trainer's.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from wdsprep.dataset.npy_arrays import FLIPPED, LATENT
from wdsprep.encoding.batching import DeviceBatches, Rows
from wdsprep.encoding.models.base import (
    Encoder,
    Tokens,
    auto_batch_size,
    limit_for_trainer,
    text_size,
)
from wdsprep.encoding.models.device import ImageBatch, Stats, TextBatch
from wdsprep.encoding.models.noise import mirrored_noise_key
from wdsprep.errors import WorkError


@dataclass(frozen=True, slots=True)
class _StepBatch:
    """A batch of a training step, and the numbers of the samples that its rows belong to."""

    places: Sequence[int]
    rows: "Future[Rows]"
    is_mirrored: bool = False

    def wait(self) -> Rows:
        """Wait for the batch to be computed, and return its rows.

        Latents of mirror images get the name of flipped latents.
        """
        rows = self.rows.result()
        if not self.is_mirrored:
            return rows
        return [None if row is None else {FLIPPED: row[LATENT]} for row in rows]


@dataclass(frozen=True, slots=True)
class StepBegun:
    """A training step that is being encoded: the tokens of its captions, and its batches."""

    tokens: Sequence[Tokens]
    parts: Sequence[_StepBatch]
    has_text: bool

    def rows(self) -> Rows:
        """Wait for all batches, and return the arrays of each sample of the step.

        For a sample there is None if its arrays are not finite, or if text is encoded and the
        caption has no tokens.
        """
        found: Rows = [{} if one.count or not self.has_text else None for one in self.tokens]
        for part in self.parts:
            for place, row in zip(part.places, part.wait(), strict=True):
                before = found[place]
                found[place] = None if before is None or row is None else {**before, **row}
        return found


class BatchEncoder:
    """An encoder of training steps, each of at most `most` samples, in batches of one size."""

    def __init__(
        self, encoder: Encoder, *, seed: int, most: int, batch_size: int = 0, lanes: int = 1
    ) -> None:
        if encoder.is_split:
            raise WorkError(
                "this GPU cannot hold the networks for text and for images together: encode with "
                '"wdsprep encode" first, which loads them in turn'
            )
        self.encoder, self._seed = encoder, seed
        is_cuda = encoder.device.type == "cuda"
        self._size = batch_size or auto_batch_size(encoder)
        if is_cuda and not batch_size:
            self._size = even_size(limit_for_trainer(self._size, encoder.resolution), most)
        self._stream = _make_stream(encoder.device) if is_cuda else None
        self._batches = DeviceBatches(encoder, self._size, lanes=lanes, enter=self._enter)

    @property
    def stats(self) -> Stats:
        return self._batches.stats

    def begin(
        self,
        pixels: Tensor,
        captions: Sequence[str],
        keys: Sequence[str],
        *,
        with_mirrored: bool = False,
    ) -> StepBegun:
        """Begin to encode the samples of a training step.

        The pixels are uint8 (N, 3, H, W) on the host, pinned if there is a GPU, and must not change
        before the rows are there. The rows have latents of mirror images too if `with_mirrored`.
        """
        tokens = self.encoder.tokens(captions)
        texts = self._text_batches(tokens) if self.encoder.has_text else []
        parts = [_StepBatch(places, self._batches.submit(batch)) for places, batch in texts]
        parts += self._submit_images(pixels, keys)
        if with_mirrored:
            mirrored = pixels.flip(-1)
            mirrored = mirrored.pin_memory() if pixels.is_pinned() else mirrored
            parts += self._submit_images(
                mirrored, list(map(mirrored_noise_key, keys)), is_mirrored=True
            )
        return StepBegun(tokens, parts, self.encoder.has_text)

    def _submit_images(
        self, pixels: Tensor, keys: Sequence[str], *, is_mirrored: bool = False
    ) -> list[_StepBatch]:
        parts = []
        for number, batch in enumerate(
            _split_batch(ImageBatch.of(pixels, keys, seed=self._seed), self._size)
        ):
            start = number * self._size
            places = range(start, start + batch.count)
            parts.append(_StepBatch(places, self._batches.submit(batch), is_mirrored))
        return parts

    def _text_batches(self, tokens: Sequence[Tokens]) -> list[tuple[Sequence[int], TextBatch]]:
        """Return batches of captions of one shape, each with the numbers of its captions.

        Captions without tokens are left out.
        """
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for place, one in enumerate(tokens):
            if one.count:
                by_shape.setdefault(one.shape, []).append(place)
        usual = self.encoder.text_batch_size or self._size
        batches: list[tuple[Sequence[int], TextBatch]] = []
        for shape, places in by_shape.items():
            size = text_size(shape, usual)
            for start in range(0, len(places), size):
                some = places[start : start + size]
                batch = TextBatch.of([tokens[n] for n in some], size, self.encoder.device)
                batches.append((some, batch))
        return batches

    def empty(self) -> dict[str, Tensor]:
        """Return the arrays of the empty caption, by field."""
        return self._batches.run(self.encoder.empty)

    def close(self) -> None:
        self._batches.close()

    def _enter(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
            torch.cuda.set_stream(self._stream)


def _make_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def even_size(size: int, most: int) -> int:
    """Return the smallest size with which `most` samples make as few batches as with `size`.

    It is for GPUs: on a CPU the size of a batch decides the bytes of its samples.
    """
    return -(-most // -(-most // size))


def _split_batch(whole: ImageBatch, size: int) -> list[ImageBatch]:
    """Split the images of a step into batches of one size.

    Full batches are views of its memory; the last one is copied and padded.
    """
    full = whole.count // size * size
    parts = [
        ImageBatch(size, tuple(each[start : start + size] for each in whole.inputs))
        for start in range(0, full, size)
    ]
    left = range(full, whole.count)
    return parts + ([whole.pick(left, size)] if left else [])
