"""`inspect --where`: the samples that meet a condition, by the tables of a dataset alone."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from wdsprep.dataset.condition_syntax import Condition
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.receipts import Shard
from wdsprep.store.base import Store
from wdsprep.text import Counting, NotebookTable, plural

SHOWN = ("key", "width", "height", "caption")


class InspectCondition(Condition):
    """A condition of `inspect --where`."""

    option = "--where "


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """The facts of a sample that are shown. `number` is its number in its shard."""

    key: str
    shard: str
    number: int
    width: int | None
    height: int | None
    caption: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchingSamples(NotebookTable):
    """The samples of a dataset that meet a condition: how many of all, and the first of them."""

    dataset: str
    where: str
    matching: int
    samples: int
    first: tuple[SampleRow, ...]

    def table_rows(self) -> Iterator[tuple[str, object]]:
        yield from ((name, getattr(self, name)) for name in ("dataset", "where"))
        yield from ((name, getattr(self, name)) for name in ("matching", "samples"))
        yield from ((row.key, row.caption or "") for row in self.first)

    def __repr__(self) -> str:
        of = f"{self.matching:,} of {plural(self.samples, 'sample')}"
        return f"<MatchingSamples {self.dataset!r}: {of} meet {self.where!r}>"

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "first": [asdict(row) for row in self.first],
            "matching": self.matching,
            "samples": self.samples,
            "where": self.where,
        }


def find_matching(
    store: Store, manifest: Manifest, *, where: str, limit: int, heard: Counting
) -> MatchingSamples:
    """Return how many samples meet a condition, and the first `limit` of them.

    `heard` gets the number of shards asked, and of all.
    """
    from wdsprep.tables.stored_tables import StoredTables  # DuckDB takes 0.2 s, which few need

    condition = InspectCondition(where)
    tables = StoredTables(store, manifest)
    numbers: dict[Shard, list[int]] = {}
    matching = 0
    for count, (shard, mask) in enumerate(tables.masks(condition), 1):
        heard(count, len(tables.shards))
        if left := max(limit - matching, 0):
            numbers[shard] = mask.nonzero()[0][:left].tolist()
        matching += int(mask.sum())
    shards = [shard for shard in numbers if numbers[shard]]
    shown = tables.read(lambda file: file.read(SHOWN), shards)
    first = [
        SampleRow(shard=shard.name, number=number, **row)
        for shard, table in zip(shards, shown, strict=True)
        for number, row in zip(numbers[shard], table.take(numbers[shard]).to_pylist(), strict=True)
    ]
    return MatchingSamples(
        dataset=store.url,
        where=where,
        matching=matching,
        samples=manifest.samples,
        first=tuple(first),
    )
