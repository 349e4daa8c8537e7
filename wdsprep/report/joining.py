"""The latent sample that was made of an image sample, found without a search.

A latent shard has the keys of its image shard, in the same order, but for its rejects. So its
number is the image's, less the rejects before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

from wdsprep.rejects import read_rejects, rejects_name
from wdsprep.report.given import Given
from wdsprep.report.picking import DAMAGE, Place, Sample, read_sample
from wdsprep.samples import Reject


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """The latent sample of a key, or why there is none."""

    latents: Given
    sample: Sample | None
    reason: str = ""


class Joiner:
    """Finds samples of one dataset of latents; the rejects of a shard are read once."""

    def __init__(self, latents: Given) -> None:
        self._latents, self._lock = latents, Lock()
        self._rejects: dict[str, Mapping[str, Reject]] = {}

    def find(self, image: Sample) -> Joined:
        try:
            return self._find(image)
        except (*DAMAGE, ValueError) as error:
            return self._none(str(error))

    def _find(self, image: Sample) -> Joined:
        unit = image.place.shard.name.removesuffix(".tar")
        receipt = self._latents.units.get(unit)
        if receipt is None:
            return self._none("its shard has not been encoded")
        made_of, _, taken = receipt.input.partition(":")
        if made_of != image.place.shard.sha256:
            return self._none("these latents were made of another shard of that name")
        if taken and image.place.number >= int(taken):
            return self._none("left out by --limit")
        rejects = self._rejects_of(unit) if receipt.rejects else {}
        if reject := rejects.get(image.key):
            return self._none(f"rejected: {reject.code}")
        before = sum((len(key), key) < (len(image.key), image.key) for key in rejects)
        number = image.place.number - before
        shard = next((shard for shard in receipt.shards if number < shard.samples), None)
        if shard is None:
            return self._none("its latent shard has no such sample")
        found = read_sample(self._latents.store, Place(shard=shard, number=number))
        if found.problem or found.key != image.key:
            return self._none(found.problem or f"{shard.name} has {found.key} in its place")
        return Joined(latents=self._latents, sample=found)

    def _none(self, reason: str) -> Joined:
        return Joined(latents=self._latents, sample=None, reason=reason)

    def _rejects_of(self, unit: str) -> Mapping[str, Reject]:
        with self._lock:
            if unit not in self._rejects:
                data = self._latents.store.read(rejects_name(unit))
                self._rejects[unit] = {reject.key: reject for reject in read_rejects(data)}
            return self._rejects[unit]
