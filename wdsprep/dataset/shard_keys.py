"""The index and the keys of a shard, for those that hold no reader of it."""

from collections.abc import Iterable, Sequence

from wdsprep.dataset.shard_reader import NamedShard, ShardReader, ShardSize
from wdsprep.dataset.thread_map import read_each
from wdsprep.store.base import Store


def offsets_of(store: Store, shard: ShardSize) -> Sequence[int]:
    """Return where the samples of a shard begin, and where the last one ends."""
    return ShardReader(store, shard).offsets


def keys_at(store: Store, tar: str, offsets: Iterable[int], *, at_once: bool = True) -> list[str]:
    """Return the keys of the samples that begin at these bytes of a tar.

    Over a network many are read `at_once`.
    """
    with ShardReader(store, NamedShard(tar, 0)) as reader:
        return read_each(reader.key_at, offsets, 1 if store.root or not at_once else store.readers)
