"""Finished samples that wait on a local disk (in TMPDIR) for their turn in a shard.

Each takes some hundred bytes of memory; its members lie in a file without a name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from wdsprep.dataset.tar.write import Data, nbytes_of, pieces_of
from wdsprep.store.spool import Spool

Members = Sequence[tuple[str, Data]]
"""The members of a sample, with their names and in their order."""


@dataclass(frozen=True, slots=True)
class SpooledSample:
    """A sample that waits on disk: names and sizes of its members, and their place in a file."""

    key: str
    members: Sequence[tuple[str, int]]
    place: tuple[int, int]


class SampleSpool:
    """A file on disk that holds finished samples, and is deleted when it is closed."""

    def __init__(self) -> None:
        self._spool = Spool()

    def put(self, key: str, members: Members) -> SpooledSample:
        pieces = chain.from_iterable(pieces_of(data) for _, data in members)
        place = self._spool.put(b"".join(pieces))
        sizes = tuple((name, nbytes_of(data)) for name, data in members)
        return SpooledSample(key, sizes, place)

    def members(self, one: SpooledSample) -> list[tuple[str, bytes]]:
        data, start = self._spool.get(one.place), 0
        members = []
        for name, nbytes in one.members:
            members.append((name, data[start : start + nbytes]))
            start += nbytes
        return members

    def close(self) -> None:
        self._spool.close()
