"""Pixels of a step to arrays, on one device, while steps before and after it are under way.

Batches have one fixed size, the last one of a step padded, and on a CPU each is computed by one
core alone: what a sample becomes is what `encode` makes of it. On a GPU they run on a stream of
their own, beside the trainer's.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from wdsprep.dataset.arrays import FLIPPED, LATENT
from wdsprep.encoding.device_batches import DeviceBatches, Rows
from wdsprep.encoding.encoded_samples import noise_of_mirrored
from wdsprep.encoding.models.base import Encoder, Tokens
from wdsprep.encoding.models.batch_size import auto_batch_size, beside_a_trainer, text_size
from wdsprep.encoding.models.device import ImageBatch, Stats, TextBatch
from wdsprep.errors import WorkError


@dataclass(frozen=True, slots=True)
class _Part:
    """A batch under way, and which samples of the step its rows are, or are mirror images of."""

    places: Sequence[int]
    rows: "Future[Rows]"
    is_mirrored: bool = False

    def made(self) -> Rows:
        """Return the rows, once all of them are there."""
        rows = self.rows.result()
        if not self.is_mirrored:
            return rows
        return [None if row is None else {FLIPPED: row[LATENT]} for row in rows]


@dataclass(frozen=True, slots=True)
class StepBegun:
    """A step under way: the tokens of its captions, and its batches."""

    tokens: Sequence[Tokens]
    parts: Sequence[_Part]
    has_text: bool

    def rows(self) -> Rows:
        """Wait for the arrays of each sample; None where its numbers are not finite."""
        found: Rows = [{} if one.count or not self.has_text else None for one in self.tokens]
        for part in self.parts:
            for place, made in zip(part.places, part.made(), strict=True):
                before = found[place]
                found[place] = None if before is None or made is None else {**before, **made}
        return found


class BatchEncoder:
    """`most` samples come at a time; batches are as large as is good, but even."""

    def __init__(
        self, encoder: Encoder, *, seed: int, most: int, batch_size: int = 0, lanes: int = 1
    ) -> None:
        if encoder.is_split:
            raise WorkError(
                "this GPU cannot hold what encodes text beside what encodes images: encode with "
                '"wdsprep encode" first, which takes them in turn'
            )
        self.encoder, self._seed = encoder, seed
        is_cuda = encoder.device.type == "cuda"
        self._size = batch_size or auto_batch_size(encoder)
        if is_cuda and not batch_size:
            self._size = even(beside_a_trainer(self._size, encoder.resolution), most)
        self._stream = _stream(encoder.device) if is_cuda else None
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
        """Begin a step.

        Its pixels are uint8 (N, 3, R, R) on the host, pinned where there is a GPU, and not to be
        changed until the rows are there. These have the latents of mirror images too, if they are
        wanted.
        """
        tokens = self.encoder.tokens(captions)
        texts = self._texts(tokens) if self.encoder.has_text else []
        parts = [_Part(places, self._batches.submit(batch)) for places, batch in texts]
        parts += self._images(pixels, keys)
        if with_mirrored:
            mirrored = pixels.flip(-1)
            mirrored = mirrored.pin_memory() if pixels.is_pinned() else mirrored
            parts += self._images(mirrored, list(map(noise_of_mirrored, keys)), is_mirrored=True)
        return StepBegun(tokens, parts, self.encoder.has_text)

    def _images(
        self, pixels: Tensor, keys: Sequence[str], *, is_mirrored: bool = False
    ) -> list[_Part]:
        parts = []
        for number, batch in enumerate(
            _parts(ImageBatch.of(pixels, keys, seed=self._seed), self._size)
        ):
            start = number * self._size
            places = range(start, start + batch.count)
            parts.append(_Part(places, self._batches.submit(batch), is_mirrored))
        return parts

    def _texts(self, tokens: Sequence[Tokens]) -> list[tuple[Sequence[int], TextBatch]]:
        """Batches of captions of one shape, and which these are."""
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
        """Return what the empty caption becomes."""
        return self._batches.run(self.encoder.empty)

    def close(self) -> None:
        self._batches.close()

    def _enter(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
            torch.cuda.set_stream(self._stream)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def even(size: int, most: int) -> int:
    """One that leaves little to pad. On a CPU all have the same size instead."""
    return -(-most // -(-most // size))


def _parts(whole: ImageBatch, size: int) -> list[ImageBatch]:
    """Whole batches are views of the step's memory; what is left is copied, and padded."""
    full = whole.count // size * size
    parts = [
        ImageBatch(size, whole.pixels[start : start + size], whole.noise[start : start + size])
        for start in range(0, full, size)
    ]
    left = range(full, whole.count)
    return parts + ([whole.pick(left, size)] if left else [])
