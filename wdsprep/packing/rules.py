"""What the user decides about packing: which samples are kept, and what their shards look like."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wdsprep.errors import UsageError
from wdsprep.images import Limits, Recode
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.packing import HASHES
from wdsprep.text import at_least, names, one_of

if TYPE_CHECKING:
    from wdsprep.packing.filters import Filter


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """A column that has the digests of the images' bytes, and by which hash."""

    column: str
    hash: str

    @classmethod
    def parse(cls, given: Any) -> "Digest":
        """`md5`, `COLUMN:md5`, or img2dataset's `["COLUMN","md5"]`."""
        if isinstance(given, cls):
            return given
        pair = names(given) if not isinstance(given, str) or given.startswith(("[", "(")) else ()
        column, _, kind = str(given).rpartition(":")
        column, kind = pair if len(pair) == 2 else (column or kind, kind)
        if kind not in HASHES:
            raise UsageError(f"{given!r}: write COLUMN:HASH, with one of {', '.join(HASHES)}")
        return cls(column=column, hash=kind)


@dataclass(frozen=True, kw_only=True)
class PackRules:
    """What decides which samples are kept and what their shards look like. `kept` names the facts
    that go into a shard (None: all of them)."""

    buckets: tuple[int, ...] = (256, 512)
    samples_per_shard: int = 10_000
    max_shard_nbytes: int = 2_000_000_000
    full_check: bool = True
    min_size: int = 0
    max_area: int = MAX_AREA
    max_nbytes: int = MAX_NBYTES
    max_aspect_ratio: float = 0.0
    min_caption: int = 0
    max_caption: int = 0
    filter: "Filter | None" = None
    recode: Recode | None = None
    kept: tuple[str, ...] | None = None
    verify: Digest | None = None
    compute_hash: str = ""

    def __post_init__(self) -> None:
        at_least(1, samples_per_shard=self.samples_per_shard, max_area=self.max_area)
        at_least(1, max_shard_size=self.max_shard_nbytes)
        at_least(0, min_size=self.min_size, max_aspect_ratio=self.max_aspect_ratio)
        at_least(0, min_caption=self.min_caption, max_caption=self.max_caption)
        one_of(("", *HASHES), compute_hash=self.compute_hash)

    @property
    def limits(self) -> Limits:
        return Limits(
            min_side=max(self.buckets[0], self.min_size),
            max_area=self.max_area,
            max_aspect_ratio=self.max_aspect_ratio,
        )
