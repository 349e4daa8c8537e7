"""Where the samples of a shard begin, by its index, and the key of each, by its first header."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from wdsprep.dataset.ahead import read_each
from wdsprep.dataset.names import index_name
from wdsprep.dataset.tar import BLOCK, END
from wdsprep.dataset.tar.index import decode_index
from wdsprep.dataset.tar.members import name_of
from wdsprep.dataset.tar.read import split_member
from wdsprep.errors import DamageError, NotFoundError
from wdsprep.store.base import Store


class ShardSize(Protocol):
    """A shard, or what one was."""

    @property
    def name(self) -> str: ...
    @property
    def samples(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


def offsets_of(store: Store, shard: ShardSize) -> Sequence[int]:
    """Where the samples begin, and where the last one ends; refused where that cannot be so."""
    name = index_name(shard.name)
    try:
        offsets = decode_index(store.read(name), f"{store.url}/{name}")
    except (NotFoundError, DamageError):
        offsets = ()
    if len(offsets) != shard.samples + 1 or offsets[-1] + len(END) != shard.nbytes:
        raise DamageError(f"{store.url}/{shard.name}", f"{name} is not its index")
    return offsets


@contextmanager
def key_reader(store: Store, tar: str) -> Iterator[Callable[[int], str]]:
    """Tells the key of the sample that begins at an offset. A local file is opened once, for
    thousands of them."""

    what = f"{store.url}/{tar}"
    if store.root is None:
        yield lambda offset: key_in(store.read(tar, start=offset, nbytes=BLOCK), what, offset)
        return
    store.read(tar, nbytes=0)  # says it if there is none
    with (store.root / tar).open("rb", buffering=0) as file:
        yield lambda offset: key_in(os.pread(file.fileno(), BLOCK, offset), what, offset)


def key_in(header: bytes, what: str, offset: int) -> str:
    """Return the key that the first header of a sample of the tar `what` has."""
    split = split_member(name_of(header)) if len(header) == BLOCK else None
    if split is None:
        raise DamageError(what, f"no sample begins at byte {offset:,}")
    return split[0]


def keys_at(store: Store, tar: str, offsets: Iterable[int], *, at_once: bool = True) -> list[str]:
    """Of the samples that begin there; over a network many are asked for `at_once`."""
    with key_reader(store, tar) as key_at:
        return read_each(key_at, offsets, 1 if store.root or not at_once else store.readers)
