"""Read the samples of a shard of scores, whose tables hold what is json in other datasets.

A shard of scores is a table, or, if embeddings are kept, a tar of arrays with a table beside it.
"""

from collections.abc import Collection, Generator, Iterable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.damage import UNLIKE_RECEIPT
from wdsprep.dataset.file_names import is_table, table_name
from wdsprep.dataset.receipts import Settings, Shard
from wdsprep.dataset.sample_table import KEY, ROW, read_table, table_columns
from wdsprep.dataset.samples import facts_bytes
from wdsprep.dataset.score_columns import is_scored
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.shard_reader import ShardReader, ShardSize
from wdsprep.dataset.tar.read import TarSample
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import DamageError
from wdsprep.store.base import Store

if TYPE_CHECKING:
    import pyarrow as pa

JSON = "json"


class ScoreReader(ShardReader):
    """A reader of a shard of scores. The json of a sample is made of its row."""

    def __init__(self, store: Store, shard: ShardSize, settings: Settings) -> None:
        super().__init__(store, shard)
        self._settings = settings
        self._has_tar = not is_table(shard.name)

    @cached_property
    def table(self) -> "pa.Table":
        """Return the table. Raise DamageError if it is not one of the samples of the shard."""
        place = f"{self.store.url}/{table_name(self.shard.name)}"
        data = self.store.read(table_name(self.shard.name))
        stated = self.shard.digest if isinstance(self.shard, Shard) and not self._has_tar else ""
        if stated and hex_digest(data) != stated:
            raise DamageError(place, UNLIKE_RECEIPT)
        columns, rows = table_columns("latents", self._settings), self.shard.samples
        return read_table(data, columns, what=place, rows=rows)

    def facts(self, numbers: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """Return what the rows of samples say, without nulls and without their positions."""
        import numpy as np

        table = self.table if numbers is None else self.table.take(np.fromiter(numbers, np.int64))
        rows = table.drop_columns([ROW]).to_pylist()
        return [{name: value for name, value in row.items() if value is not None} for row in rows]

    def sample(self, number: int, *, only: Collection[str] = ()) -> TarSample:
        return next(self._read_samples([number], only))

    def samples(self, numbers: Collection[int]) -> Generator[TarSample, None, None]:
        if self._has_tar and numbers:
            _ = self.offsets  # one request before all others
        return self._read_samples(numbers, ())

    def _read_samples(
        self, numbers: Collection[int], only: Collection[str]
    ) -> Generator[TarSample, None, None]:
        facts = self.facts(numbers)
        found: Iterable[TarSample] = (TarSample(key=own[KEY], start=0, fields={}) for own in facts)
        arrays = [name for name in only if name != JSON]
        if self._has_tar and (arrays or not only):
            read = partial(super().sample, only=arrays)
            found = map_ahead(read, numbers, self.threads, most=self.store.readers)
        for one, own in zip(found, facts, strict=True):
            if one.key != own[KEY]:
                raise DamageError(self.place, "its table has another key", one.key)
            one.fields[JSON] = facts_bytes(own)
            yield one


def open_shard(store: Store, shard: ShardSize, settings: Settings) -> ShardReader:
    """Return a reader of a shard of a dataset with these settings."""
    is_of_scores = is_scored(settings)
    return ScoreReader(store, shard, settings) if is_of_scores else ShardReader(store, shard)
