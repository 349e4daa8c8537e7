"""The tables beside the shards of a dataset, and which of all its samples meet a condition.

A table of up to WHOLE_NBYTES is read whole, by one request, and must have the digest that the
receipt of its unit states. Of a larger one, only the columns that are needed are read, and it must
have as many rows as its shard has samples.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from wdsprep.dataset.condition_syntax import Condition, format_path
from wdsprep.dataset.damage import UNLIKE_RECEIPT
from wdsprep.dataset.digests import hex_digest
from wdsprep.dataset.file_names import table_name
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.receipts import Shard
from wdsprep.dataset.sample_table import COLUMNS, REST, check_schema
from wdsprep.dataset.samples import META, PathParts, parse_object
from wdsprep.dataset.stored_dataset import check_not_rewritten, read_receipt, read_shard
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import DamageError, NotFoundError, SourceError, UsageError
from wdsprep.sources.tables.parquet import OpenParquet
from wdsprep.store.base import Store
from wdsprep.tables.query import Mask, Query, open_engine
from wdsprep.text import command, nearest_name

WHOLE_NBYTES = 1 << 20
NAMED_ROWS = 1_000
"""Rows whose fields are suggested for a name that no sample has."""
Read = TypeVar("Read")


class StoredTables:
    """The tables of a dataset of images, one for each of its `shards`."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        """Check that the tables are there."""
        if manifest.dataset != "images":
            raise UsageError(
                f"{store.url} has {manifest.kind}, which have no tables to ask: give a dataset of "
                "images"
            )
        self._store, self.shards = store, manifest.shards
        buckets = {shard.bucket for shard in self.shards}
        listed = chain.from_iterable(store.list(f"{bucket}/") for bucket in buckets)
        self._nbytes = {entry.name: entry.nbytes for entry in listed}
        lacking = [shard for shard in self.shards if table_name(shard.name) not in self._nbytes]
        if lacking:
            first, more = lacking[0], len(lacking) - 1
            check_not_rewritten(store, first.name, first.digest)
            raise NotFoundError(
                f"{store.url}/{table_name(first.name)}{f' and {more:,} more' if more else ''} is "
                f"missing: run {command('index', store.url)}, which makes tables"
            )
        self._units = {
            shard.name: (receipt.unit, receipt.files.get(table_name(shard.name)))
            for receipt in manifest.receipts
            for shard in receipt.shards
        }

    def masks(self, condition: Condition) -> Iterator[tuple[Shard, Mask]]:
        """Yield for each shard which of its samples meet the condition.

        At the end, raise UsageError if the condition has a name that no sample has.
        """
        with open_engine() as engine:
            query = Query(condition, engine)
            with closing(self.read(query.read, self.shards)) as tables:
                yield from zip(self.shards, query.masks(tables), strict=True)
        for path in condition.names:
            if path in query.unseen and self.shards:
                raise UsageError(
                    f"{self._store.url}: no sample has {format_path(path)}, which "
                    f"{condition.option}{condition.plain!r} asks for; {self._way_on(path)}"
                )

    def read(
        self, read: Callable[[OpenParquet], Read], shards: Iterable[Shard]
    ) -> Generator[Read, None, None]:
        """Yield what `read` returns for the table of each of these shards, in their order."""
        threads = self._store.readers
        return map_ahead(partial(self._read, read), shards, threads, most=threads)

    def _read(self, read: Callable[[OpenParquet], Read], shard: Shard) -> Read:
        (value,) = read_shard(self._store, shard, self._open(read, shard))
        return value

    def _open(self, read: Callable[[OpenParquet], Read], shard: Shard) -> Iterator[Read]:
        """Yield what `read` returns for the table of a shard, and close it."""
        name = table_name(shard.name)
        place, content = f"{self._store.url}/{name}", None
        if self._nbytes[name] <= WHOLE_NBYTES:
            content = self._store.read(name)
            if not self._is_stated(shard, hex_digest(content)):
                raise DamageError(place, UNLIKE_RECEIPT)
        try:
            with closing(OpenParquet(self._store, name, content)) as file:
                check_schema(file.schema, place)
                if file.rows != shard.samples:
                    rows = f"it has {file.rows:,} rows, and its shard {shard.samples:,} samples"
                    raise DamageError(place, rows)
                yield read(file)
        except SourceError as error:
            raise DamageError(place, "it is no sound Parquet file") from error

    def _is_stated(self, shard: Shard, digest: str) -> bool:
        """Return whether a receipt states this digest of the table of a shard.

        The manifest may be older than the receipt of a table that was made again.
        """
        unit, stated = self._units[shard.name]
        if digest == stated:
            return True
        receipt = read_receipt(self._store, unit)
        return shard in receipt.shards and digest == receipt.files.get(table_name(shard.name))

    def _way_on(self, unknown: PathParts) -> str:
        """Return what to do about a name that no sample has."""
        wrong = next(part for part in reversed(unknown) if isinstance(part, str))
        names = {*COLUMNS} - {REST}
        for texts in self.read(_read_named, self.shards[:1]):
            names.update(*(parse_object(text) or {} for text in texts))
        if near := nearest_name(wrong, names - {wrong}):
            return f"did you mean {near}?"
        return '"wdsprep inspect DATASET KEY" shows the json of a sample'


def _read_named(file: OpenParquet) -> Sequence[str]:
    """Return the JSON of `meta` and of the rest of the first rows of a table."""
    (batch,) = islice(file.batches(NAMED_ROWS, columns=(META, REST)), 1)
    return [text for column in batch.columns for text in column.to_pylist() if text is not None]
