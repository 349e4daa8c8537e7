"""`inspect --where`: the samples that meet a condition, by tables alone."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from wdsprep.loading.options import Places
from wdsprep.text import Counting, NotebookTable, plural

SHOWN = ("key", "width", "height", "caption")


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
    dataset: str, *, where: str, join: Places, limit: int, heard: Counting
) -> MatchingSamples:
    """Return how many samples meet a condition, and the first `limit` of them.

    The condition may name columns of what is joined. `heard` gets the number of shards searched,
    and of all.
    """
    # DuckDB takes 0.2 s, which few need
    from wdsprep.changes.joined_columns import select_samples
    from wdsprep.loading.open_datasets import join_places

    subset = select_samples(dataset, join_places(join), where)
    search = subset.search()
    shards = search.tables.shards
    numbers: dict[int, list[int]] = {}
    matching = 0
    for count, selected in enumerate(search.run()):
        heard(count + 1, len(shards))
        if (left := limit - matching) > 0 and (some := selected.mask.nonzero()[0][:left].tolist()):
            numbers[count] = some
        matching += int(selected.mask.sum())
    shown = search.tables.columns(SHOWN, [shards[number] for number in numbers])
    first = [
        SampleRow(shard=shards[shard].name, number=number, **{**dict.fromkeys(SHOWN), **row})
        for (shard, some), table in zip(numbers.items(), shown, strict=True)
        for number, row in zip(some, table.take(some).to_pylist(), strict=True)
    ]
    return MatchingSamples(
        dataset=subset.whole.store.url,
        where=where,
        matching=matching,
        samples=subset.whole.samples,
        first=tuple(first),
    )
