"""The tables of samples of opened datasets, and of what is joined to one, shard by shard."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from wdsprep.dataset.file_names import MANIFEST
from wdsprep.dataset.shard_reader import NamedShard
from wdsprep.dataset.stored_dataset import read_manifest, rewritten_error
from wdsprep.errors import UsageError
from wdsprep.loading.served_datasets import Dataset, JoinedDataset
from wdsprep.sources.tables.parquet import OpenParquet
from wdsprep.store.base import RemoteStore
from wdsprep.store.schemes import ANY_PLACE
from wdsprep.tables.query import whole_numbers
from wdsprep.tables.stored_tables import ForeignTables, ShardTables, StoredTables


class TablesBeside:
    """The tables of a joined dataset, read by the shards of the dataset that it is joined to."""

    def __init__(self, joined: JoinedDataset) -> None:
        self.tables, self._positions = open_tables(joined.dataset.whole), joined.positions

    def read(
        self, read: Callable[[OpenParquet], pa.Table], shard: int, count: int
    ) -> pa.Table | None:
        """Return what `read` returns for the samples of a shard, or None if there are none.

        `count` is the number of these samples. Rows of lacking samples are null.
        """
        shards, places = self._positions.locate(np.full(count, shard), np.arange(count))
        if not count or shards[0] < 0:
            return None
        table = self.tables.read_shard(read, self.tables.shards[int(shards[0])])
        if np.array_equal(places, np.arange(len(table))):
            return table
        is_lacking = places >= len(table)
        return table.take(whole_numbers(np.where(is_lacking, 0, places), is_lacking))


def open_tables(dataset: Dataset) -> ShardTables[Any]:
    """Return the tables of the shards of an opened dataset."""
    store = dataset.store
    if not (store.root or isinstance(store, RemoteStore)):
        raise UsageError(f"{store.url} cannot be loaded: give {ANY_PLACE}")
    if dataset.kind == "tars":
        sizes = zip(dataset.names, dataset.sizes.tolist(), strict=True)
        return ForeignTables(store, [NamedShard(name, count) for name, count in sizes])
    manifest = read_manifest(store)
    if manifest is None:
        raise rewritten_error(store, MANIFEST)
    shards = {shard.name: shard for shard in manifest.shards}
    for name, content in zip(dataset.names, dataset.contents, strict=True):
        if name not in shards or shards[name].digest != content:
            raise rewritten_error(store, name)
    return StoredTables(store, manifest, [shards[name] for name in dataset.names])
