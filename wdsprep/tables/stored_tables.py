"""The tables of the samples of shards, of which columns are read shard by shard.

A table of up to WHOLE_NBYTES is read whole, by one request, and must have the digest that the
receipt of its unit states. Of a larger one, only the columns that are needed are read. Each must
have as many rows as its shard has samples. A tar of another program that has no table, or an older
one, has one made of its json.

`read_positions` and `read_keys` read one column of the table of one shard: a small table whole, of
a larger one that column alone. It is checked by the sums of its pages, not by the digest of the
table, so it may be newer than the manifest. A position is the place of a sample in its image shard,
in the column `row`; it is not read where the receipt tells that no sample moved.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import chain, islice
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wdsprep.cpus import usable_cpus
from wdsprep.dataset.damage import UNLIKE_RECEIPT, naming_next_step
from wdsprep.dataset.file_names import foreign_table_name, index_name, table_name
from wdsprep.dataset.image_positions import DTYPE, are_sound, may_have_moved, plain_positions
from wdsprep.dataset.manifest import Manifest, Receipt, Shard
from wdsprep.dataset.reindex import is_older, make_table, table_step
from wdsprep.dataset.sample_table import (
    IMAGE_COLUMNS,
    KEY,
    REST,
    ROW,
    Columns,
    check_schema,
    read_table,
    table_columns,
)
from wdsprep.dataset.samples import META, names_in, parse_object
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.settings import Settings, is_scored
from wdsprep.dataset.stored_dataset import check_not_rewritten, read_receipt, reading_shard
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import DamageError, NotFoundError, SourceError, UsageError
from wdsprep.sources.tables.parquet import OpenParquet
from wdsprep.store.base import Entry, Store
from wdsprep.text import command

WHOLE_NBYTES = 1 << 20
WHOLE_ROWS = 10_000
"""The rows of a table that takes about a megabyte, with captions of usual length."""
MOST_THREADS = 16
NAMED_ROWS = 1_000
"""Rows whose fields are suggested for a name that no sample has."""
Read = TypeVar("Read")


class ShardTables:
    """The tables of `shards`, one for each, which any number of threads may read.

    `is_foreign` is true for tars that another program packed, which have no manifest.
    """

    def __init__(
        self, store: Store, shards: Sequence[Shard], manifest: Manifest | None = None
    ) -> None:
        """List the folders of the shards. Check that a dataset with a manifest has the tables."""
        self._store, self.shards, self.is_foreign = store, shards, manifest is None
        folders = {shard.name.rpartition("/")[0] for shard in shards}
        listed = chain.from_iterable(store.list(f"{name}/" if name else "") for name in folders)
        self._files: dict[str, Entry] = {entry.name: entry for entry in listed}
        self._columns, self._units = IMAGE_COLUMNS, dict[str, tuple[str, str]]()
        if manifest is None:
            return
        self._columns = table_columns(manifest.dataset, manifest.settings)
        lacking = [shard for shard in shards if table_name(shard.name) not in self._files]
        if lacking:
            first, more = lacking[0], len(lacking) - 1
            check_not_rewritten(store, first.name, first.digest)
            raise NotFoundError(
                f"{store.url}/{table_name(first.name)}{f' and {more:,} more' if more else ''} is "
                f"missing: {table_step(store.url, manifest.dataset, manifest.settings)}"
            )
        self._units |= {
            shard.name: (receipt.unit, receipt.table_digest(shard))
            for receipt in manifest.receipts
            for shard in receipt.shards
        }

    def read(
        self, read: Callable[[OpenParquet], Read], shards: Iterable[Shard] | None = None
    ) -> Generator[Read, None, None]:
        """Yield what `read` returns for the table of each shard, in order; threads read ahead."""
        wanted = self.shards if shards is None else shards
        return map_ahead(partial(self.read_shard, read), wanted, self.threads, most=self.threads)

    @property
    def threads(self) -> int:
        """Return how many threads read tables: on a local disk as many as there are cores.

        More threads than that take memory: to unpack a table takes some 15 MB.
        """
        most = max(2, usable_cpus()) if self._store.root else MOST_THREADS
        return min(self._store.readers, most)

    @property
    def url(self) -> str:
        return self._store.url

    def read_shard(self, read: Callable[[OpenParquet], Read], shard: Shard) -> Read:
        """Return what `read` returns for the table of a shard."""
        if self.is_foreign:
            return self._read_foreign(read, shard)
        name, data = table_name(shard.name), None
        with reading_shard(self._store, shard):
            if self._files[name].nbytes <= WHOLE_NBYTES:
                data = self._store.read(name)
                digest, (unit, stated) = hex_digest(data), self._units[shard.name]
                if digest != stated:  # the table may have been made again since
                    with suppress(NotFoundError):
                        receipt = read_receipt(self._store, unit)
                        stated = receipt.table_digest(shard) if shard in receipt.shards else ""
                if digest != stated:
                    raise DamageError(f"{self._store.url}/{name}", UNLIKE_RECEIPT)
            with _open_table(self._store, name, self._columns, shard.samples, data) as file:
                return read(file)

    def _read_foreign(self, read: Callable[[OpenParquet], Read], shard: Shard) -> Read:
        name, index = foreign_table_name(shard.name), command("index", self.url)
        entry, data = self._files.get(name), None
        if entry is None or is_older(entry, self._files[shard.name]):
            with naming_next_step(f"delete {index_name(shard.name)} and run {index}"):
                data, _ = make_table(self._store, shard.name, is_foreign=True)
        with naming_next_step(f"delete it and run {index}"):
            if entry and not data and entry.nbytes <= WHOLE_NBYTES:
                data = self._store.read(name)
            with _open_table(self._store, name, self._columns, shard.samples, data) as file:
                return read(file)

    def field_names(self) -> set[str]:
        """Return the names of the columns and of the fields in JSON that the first rows fill."""

        def find_names(file: OpenParquet) -> set[str]:
            batch = next(file.batches(NAMED_ROWS))
            columns = zip(batch.schema.names, batch.columns, strict=True)
            names = {name for name, column in columns if column.null_count < len(batch)}
            for column in names & {META, REST}:
                texts = batch.column(column).drop_null().to_pylist()
                names.update(*map(names_in, map(parse_object, texts)))
            return names - {REST, ROW}

        first = islice((shard for shard in self.shards if shard.samples), 1)
        return set[str]().union(*self.read(find_names, first))


@contextmanager
def _open_table(
    store: Store, name: str, columns: Columns, samples: int, data: bytes | None
) -> Iterator[OpenParquet]:
    """Open a table, given its bytes if they are known.

    Raise DamageError if it has other columns, or not a row for each sample, or cannot be read.
    """
    place = f"{store.url}/{name}"
    try:
        with closing(OpenParquet(store, name, data)) as file:
            check_schema(file.schema, columns, what=place)
            if file.rows != samples:
                rows = f"it has {file.rows:,} rows, and its shard {samples:,} samples"
                raise DamageError(place, rows)
            yield file
    except SourceError as error:
        raise DamageError(place, "it is no sound Parquet file") from error


def read_sound_columns(
    store: Store, receipt: Receipt, shard: Shard, names: Collection[str]
) -> pa.Table:
    """Return columns of the rows of a shard, from its table if the receipt states this one.

    If the table is lost, or is not as it was written, they are made of the tar, which lacks the
    positions of samples; of scores, raise DamageError.
    """
    name, columns = table_name(shard.name), table_columns(receipt.dataset, receipt.settings)
    place, data = f"{store.url}/{name}", b""
    with suppress(NotFoundError):
        data = store.read(name)
    if hex_digest(data) != receipt.table_digest(shard):
        if is_scored(receipt.settings):
            raise DamageError(place, UNLIKE_RECEIPT)
        columns = {column: kind for column, kind in columns.items() if column != ROW}
        data, _ = make_table(store, shard.name, columns=columns)
    return read_table(data, columns, what=place, rows=shard.samples, names=names)


# --- one column of the table of one shard, without a listing
def read_positions(store: Store, receipt: Receipt) -> NDArray[np.uint32]:
    """Return for each sample of a latent shard which sample of the image shard it was made of."""
    (shard,) = receipt.shards
    if not may_have_moved(receipt):
        return plain_positions(shard.samples)
    return read_rows(
        store, shard.name, receipt.settings, samples=shard.samples, inputs=receipt.inputs
    )


def read_rows(
    store: Store, tar: str, settings: Settings, *, samples: int, inputs: int
) -> NDArray[np.uint32]:
    """Return the positions in the table of a tar with so many samples of so many inputs.

    Raise UsageError if there is no table, and DamageError if the positions cannot be those.
    """
    rows = _read_column(store, tar, ROW, "latents", settings, samples).to_numpy()
    positions: NDArray[np.uint32] = rows.astype(DTYPE)
    if not np.array_equal(positions, rows) or not are_sound(positions, samples, inputs):
        place = f"{store.url}/{table_name(tar)}"
        raise DamageError(place, "its positions cannot be those of its samples")
    return positions


def read_keys(store: Store, shard: Shard, manifest: Manifest) -> pa.ChunkedArray:
    """Return the keys of the samples of a shard, from its table.

    Raise UsageError if there is no table, and DamageError if it is damaged.
    """
    kind, settings = manifest.dataset, manifest.settings
    return _read_column(store, shard.name, KEY, kind, settings, shard.samples)


def _read_column(
    store: Store, tar: str, column: str, dataset: str, settings: Settings, samples: int
) -> pa.ChunkedArray:
    name, is_small = table_name(tar), samples <= WHOLE_ROWS
    try:
        content = store.read(name, nbytes=None if is_small else 1)  # or learns that it is missing
    except NotFoundError:
        step = table_step(store.url, dataset, settings)
        raise UsageError(f"{store.url}/{name} is missing: {step}") from None
    columns = table_columns(dataset, settings)
    with _open_table(store, name, columns, samples, content if is_small else None) as file:
        return file.read((column,)).column(column)
