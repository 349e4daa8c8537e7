"""Samples on their way through the engine: as inputs, as rows of batches, and as results.

A block is a few samples that are fed, decoded and returned together: threads that hand over one
sample at a time spend more time on that than on the samples. `EngineLimit` bounds the samples, and
their bytes, that are inside at once.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain

import torch

from wdsprep.dataset.npy_arrays import FLIPPED, LATENT
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.encoding.models.base import Part, Tokens
from wdsprep.encoding.models.device import Arrays
from wdsprep.encoding.models.noise import mirrored_noise_key
from wdsprep.images.crop import NO_PIXELS, Crop, CropResult
from wdsprep.images.nearest_shape import Fit

CAPTION = -1
"""The number that stands for a caption, where crops have theirs."""
NO_TOKENS = Tokens("")
NO_CROP = Crop(pixels=NO_PIXELS, width=0, height=0, fit=Fit(0, 0, 0, 0))
"""The crop of a sample whose caption alone is fed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The encoded arrays of a sample, by field and in the dtype in which they are stored."""

    crop: Crop
    tokens: Tokens
    arrays: Arrays


Results = list[Result | RejectedError]
"""The results of a sample: for each crop a result, or the reason why there is none."""


@dataclass(frozen=True, slots=True)
class SampleInput:
    """A sample to be encoded; `cuts` are the numbers of the crops to make, None for all."""

    key: str
    image: bytes
    caption: str
    cuts: Sequence[int] | None = None


@dataclass(slots=True, eq=False)
class SampleUnderWay:
    """A sample that the engine is encoding.

    It is done when none of its results is `missing`: one for each crop, and one for its caption if
    text is encoded.
    """

    key: str
    caption: str
    parts: Sequence[Part]
    """The part of the sample that each crop is for; if it is the caption alone, nothing is
    cropped."""
    block: "PendingBlock"
    cuts: list[CropResult]
    missing: int = 0
    number: int = 0
    """The number of the sample in the order of all samples."""
    images: list[Arrays] = field(default_factory=list)
    """The arrays made of each crop."""
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    text: Arrays = field(default_factory=dict)
    refused: dict[int, Code] = field(default_factory=dict)
    """The codes for which crops, by number, or the caption were rejected."""

    def results(self) -> Results:
        return list(map(self._result, range(len(self.cuts)), self.cuts, self.images))

    def _result(self, number: int, cut: CropResult, made: Arrays) -> Result | RejectedError:
        if isinstance(cut, RejectedError):
            return cut
        has_text = Part.TEXT in self.parts[number]
        code = self.refused.get(number, self.refused.get(CAPTION) if has_text else None)
        if code is not None:
            return RejectedError(code)
        if not has_text:
            return Result(crop=cut, tokens=Tokens(self.caption), arrays=made)
        return Result(crop=cut, tokens=self.tokens, arrays={**made, **self.text})


class PendingBlock(Future[list[Results]]):
    """The future results of samples that were fed together, in their order.

    The samples count against the limits of the engine until the block is left as a context.
    """

    def __init__(self, leave: Callable[["PendingBlock"], None]) -> None:
        super().__init__()
        self.samples: list[SampleUnderWay] = []
        self.decoded: Future[None] | None = None
        """The decoding of the images; None if nothing is cropped."""
        self.missing = 0
        """The number of samples that are not done."""
        self.nbytes = 0
        """The bytes of the arrays that were made from the samples."""
        self.has_left = False
        self._leave = leave

    def count(self, nbytes: int) -> int:
        """Add `nbytes` to the bytes of the block's arrays, and return the number that was added.

        If the block has left the engine, that is 0.
        """
        if self.has_left:
            return 0
        self.nbytes += nbytes
        return nbytes

    @property
    def pixels_nbytes(self) -> int:
        cuts = chain.from_iterable(sample.cuts for sample in self.samples)
        return sum(cut.pixels.nbytes for cut in cuts if isinstance(cut, Crop))

    def __enter__(self) -> "PendingBlock":
        return self

    def __exit__(self, *_: object) -> None:
        self._leave(self)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a batch: a crop of a sample, by its number, or its caption.

    If a crop is mirrored too, its mirrored row comes last.
    """

    sample: SampleUnderWay
    cut: int = CAPTION
    is_mirrored: bool = False
    is_last: bool = True

    @property
    def crop(self) -> Crop:
        cut = self.sample.cuts[self.cut]
        assert isinstance(cut, Crop)  # noqa: S101  for mypy: no other is waiting
        return cut

    @property
    def pixels(self) -> torch.Tensor:
        pixels = self.crop.pixels
        return pixels.flip(-1) if self.is_mirrored else pixels

    @property
    def noise(self) -> str:
        """Return the key that decides the noise of the row's latents."""
        key = self.sample.key
        return mirrored_noise_key(key) if self.is_mirrored else key

    def take(self, found: "Arrays | Code") -> int:
        """Store the arrays that were made of the row, or the code of its reject, in its sample.

        Return the bytes of the arrays, or 0 for a code. The latent of a mirrored row is stored as
        `latent_flipped.npy`.
        """
        sample = self.sample
        if isinstance(found, Code):
            sample.refused[self.cut] = found
            return 0
        if self.is_mirrored:
            found = {FLIPPED: found[LATENT]}
        into = sample.text if self.cut == CAPTION else sample.images[self.cut]
        into.update(found)
        return sum(array.nbytes for array in found.values())


class EngineLimit:
    """A limit on the samples inside the engine, and on the bytes that they take in memory.

    The bytes are those of images that wait to be decoded, of pixels that wait for a batch, and of
    arrays that wait to be written.
    """

    def __init__(self, samples: int, nbytes: int) -> None:
        self._most, self._most_nbytes = samples, nbytes
        self.samples = self.nbytes = 0
        self._changed = threading.Condition()
        self.is_full = False
        """True if a sample waits because of the bytes of those that are inside."""

    def enter(self, samples: int, nbytes: int, timeout_s: float) -> bool:
        """Admit samples if there is room, and return whether they have been admitted.

        If there is no room, wait for one change first, for `timeout_s` at most. When nothing is
        inside, anything is admitted.
        """
        with self._changed:
            if not self._has_room(samples, nbytes):
                self._changed.wait(timeout_s)
            if not self._has_room(samples, nbytes):
                return False
            self.is_full = False
            self.samples += samples
            self.nbytes += nbytes
            return True

    def _has_room(self, samples: int, nbytes: int) -> bool:
        if not self.samples:
            return True
        self.is_full = self.nbytes + nbytes > self._most_nbytes
        return self.samples + samples <= self._most and not self.is_full

    def hold(self, nbytes: int) -> None:
        """Add `nbytes`, which may be negative, to the bytes counted for the samples inside."""
        with self._changed:
            self.nbytes += nbytes
            if nbytes < 0:
                self._changed.notify_all()

    def leave(self, samples: int, nbytes: int) -> None:
        with self._changed:
            self.samples -= samples
            self.nbytes -= nbytes
            self._changed.notify_all()
