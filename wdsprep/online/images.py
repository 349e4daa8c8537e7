"""A sample of an image shard, made ready for the models as a worker of `encode` makes it."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from wdsprep.pixels import Crop, crop
from wdsprep.samples import Reject, RejectedError, Sample
from wdsprep.sources import Columns, Refusal, shown
from wdsprep.sources.tars import TarsSource
from wdsprep.tar.read import TarSample

_SOURCE = TarsSource(url="", pattern="*", columns=Columns())  # knows what members make a sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A sample without the bytes of its image, and the square that was cut out of it."""

    sample: Sample
    crop: Crop

    def without_pixels(self) -> "Prepared":
        """For who has them elsewhere: of the square its side is left."""
        side = self.crop.pixels.shape[-1]
        return replace(self, crop=replace(self.crop, pixels=_nothing(side)))


def prepared(found: TarSample, tar: str, *, resolution: int, max_area: int) -> Prepared:
    """A RejectedError for what `encode` would reject as well."""
    row = next(_SOURCE.rows(found, tar))
    if isinstance(row, Refusal):
        raise RejectedError(row.code, row.detail)
    made = crop(row.image, resolution, max_area=max_area)
    return Prepared(sample=replace(row, image=b""), crop=made)


def reject_of(found: TarSample, tar: str, refused: RejectedError) -> Reject:
    """What `encode` writes down of it."""
    source = shown(f"{tar}/{found.key}")
    return Reject(key=found.key, source=source, code=refused.code, detail=refused.detail)


@cache
def _nothing(side: int) -> torch.Tensor:
    return torch.empty((3, 0, side), dtype=torch.uint8)
