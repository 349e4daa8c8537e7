"""Samples on their way through the engine: what is fed, its rows in batches, and its results.

A block is a few samples that are fed, decoded and taken back together: threads that hand over one
sample at a time spend more time on that than on the samples.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain

import torch

from wdsprep.dataset.arrays import FLIPPED, LATENT
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.encoding.models.base import Part, Tokens
from wdsprep.encoding.models.device import Arrays
from wdsprep.images.crop import NO_PIXELS, Crop, CropResult
from wdsprep.images.shapes import Fit

CAPTION = -1
"""Stands for a caption in place of the number of a crop."""
NO_TOKENS = Tokens("")
NO_CROP = Crop(pixels=NO_PIXELS, width=0, height=0, fit=Fit(0, 0, 0, 0))
"""The crop of a sample whose caption alone is fed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a sample: an array for each field of the models, in storage dtype."""

    crop: Crop
    tokens: Tokens
    arrays: Arrays


Results = list[Result | RejectedError]
"""The results of a sample: for each way to crop it a result, or why there is none."""


@dataclass(frozen=True, slots=True)
class SampleInput:
    """A sample to be encoded; `cuts` are the numbers of the ways to cut its image, None for all."""

    key: str
    image: bytes
    caption: str
    cuts: Sequence[int] | None = None


@dataclass(slots=True, eq=False)
class SampleUnderWay:
    """A sample in the engine.

    It is done when no part of it is `missing`: each of its cuts, and its caption where something is
    made of that.
    """

    key: str
    caption: str
    parts: Sequence[Part]
    """The part of the sample that each crop is for; where that is its caption alone, nothing is
    cropped."""
    block: "PendingBlock"
    cuts: list[CropResult]
    missing: int = 0
    number: int = 0
    """The number of the sample in the order in which they came."""
    images: list[Arrays] = field(default_factory=list)
    """The arrays made of each crop."""
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    text: Arrays = field(default_factory=dict)
    refused: dict[int, Code] = field(default_factory=dict)
    """Why nothing was made of a cut, by its number, or of its caption."""

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
    """The results of samples that were fed together, in their order, once they are there.

    The samples take up room in the engine until a block with it ends.
    """

    def __init__(self, leave: Callable[["PendingBlock"], None]) -> None:
        super().__init__()
        self.samples: list[SampleUnderWay] = []
        self.decoded: Future[None] | None = None
        """The decoding of the images; None where nothing is cropped."""
        self.missing = 0
        """The number of samples that are not done."""
        self.nbytes = 0
        """The bytes of the arrays that were made of its samples."""
        self.has_left = False
        self._leave = leave

    def count(self, nbytes: int) -> int:
        """Note that its samples have so much more; 0 where the block is in the engine no longer."""
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
    """A part of a sample in a batch: a cut, by its number, or the caption.

    Of a cut that is mirrored too, the mirrored one comes last.
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
        """Return the name that the noise of its latents is drawn by."""
        key = self.sample.key
        return noise_of_mirrored(key) if self.is_mirrored else key

    def take(self, found: "Arrays | Code") -> int:
        """Note what was made of it, or why nothing was; how many bytes that has."""
        sample = self.sample
        if isinstance(found, Code):
            sample.refused[self.cut] = found
            return 0
        if self.is_mirrored:
            found = {FLIPPED: found[LATENT]}
        into = sample.text if self.cut == CAPTION else sample.images[self.cut]
        into.update(found)
        return sum(array.nbytes for array in found.values())


def noise_of_mirrored(key: str) -> str:
    """Return what the noise of the latents of a mirror image depends on."""
    return f"{key}:flipped"
