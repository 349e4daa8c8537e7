"""Samples that are made, and wait on a local disk (in TMPDIR) for their turn in a shard.

What they are takes some hundred bytes of memory each; their members lie in a file without a name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from wdsprep.store.spool import Spool

Members = Sequence[tuple[str, bytes]]
"""Of a sample, by name and in their order."""


@dataclass(frozen=True, slots=True)
class WaitingSample:
    """Its members by name and size, and where they are. `cut` is whether its caption was."""

    key: str
    members: Sequence[tuple[str, int]]
    place: tuple[int, int]
    cut: bool


class WaitingSamples:
    """All in one file, which is gone when it is closed."""

    def __init__(self) -> None:
        self._spool = Spool()

    def put(self, key: str, members: Members, *, cut: bool = False) -> WaitingSample:
        place = self._spool.put(b"".join(data for _, data in members))
        sizes = tuple((name, len(data)) for name, data in members)
        return WaitingSample(key, sizes, place, cut)

    def members(self, one: WaitingSample) -> list[tuple[str, bytes]]:
        data, start = self._spool.get(one.place), 0
        members = []
        for name, nbytes in one.members:
            members.append((name, data[start : start + nbytes]))
            start += nbytes
        return members

    def close(self) -> None:
        self._spool.close()
