"""The fixed part of a latent sample: what to read where, and headers checked for many at once."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.arrays import Field, layout
from wdsprep.tar import BLOCK, padded
from wdsprep.tar.write import header

_DIGITS = 8 ** np.arange(5, -1, -1)
_SUM = slice(148, 154)
Bytes = NDArray[np.uint8]


class Grid:
    """Where the arrays of a sample lie, as far as the last one wanted. Between them lie *heads*:
    the padding of the array before, a tar header, and the header of the `.npy`."""

    def __init__(self, fields: Sequence[Field], wanted: Sequence[str]) -> None:
        last = max((n for n, f in enumerate(fields) if short(f) in wanted), default=0)
        self.fields = tuple(fields[: last + 1])
        ends = [0]
        self.heads: list[slice] = []
        start = 0
        for line, item in zip(layout(self.fields), self.fields, strict=True):
            nbytes = line["offset"] - ends[-1]
            self.heads.append(slice(start, start + nbytes))
            start += nbytes
            ends.append(line["offset"] + item.array_nbytes)
        self.heads_nbytes = start
        self.padding = padded(ends[-1]) - ends[-1]
        self._parts = [
            (short(item), item.array_nbytes, head)
            for item, head in zip(self.fields, self.heads, strict=True)
        ]

    def buffers(
        self, scratch: memoryview, views: Mapping[str, memoryview], rows: Sequence[int]
    ) -> list[tuple[Any, ...]]:
        """For each row, its heads and arrays as they lie in the sample: the heads one row after
        another in `scratch`, each array as that row of what holds it."""
        columns = []
        for name, nbytes, head in self._parts:
            tops = range(head.start, self.heads_nbytes * len(rows), self.heads_nbytes)
            columns.append([scratch[top : top + head.stop - head.start] for top in tops])
            view = views.get(name)
            if view is None:
                columns.append([memoryview(bytearray(nbytes))] * len(rows))
            else:
                columns.append([view[row * nbytes : (row + 1) * nbytes] for row in rows])
        return list(zip(*columns, strict=True))

    def keys(self, heads: Bytes) -> list[str | None]:
        """The key of each row, or None where a head is not what it should be."""
        good = np.ones(len(heads), np.bool_)
        stems = []
        for item, place in zip(self.fields, self.heads, strict=True):
            npy = len(item.header)
            tar = heads[:, place.stop - npy - BLOCK : place.stop - npy]
            good &= (heads[:, place.stop - npy : place.stop] == _bytes(item.header)).all(axis=1)
            good &= _sound(tar, item)
            stems.append(_stems(tar, f".{item.name}".encode()))
        return [
            stem[0].decode("utf-8", "surrogateescape")
            if fine and stem[0] and stem.count(stem[0]) == len(stem)
            else None
            for fine, stem in zip(good.tolist(), zip(*stems, strict=True), strict=True)
        ]


@lru_cache(64)
def grid_of(fields: tuple[Field, ...], wanted: tuple[str, ...]) -> Grid:
    return Grid(fields, wanted)


def short(item: Field) -> str:
    """What a batch calls a member: latent for latent.npy."""
    return item.name.removesuffix(".npy")


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _sound(tar: Bytes, item: Field) -> NDArray[np.bool_]:
    """Whether the headers state the right size and their own checksum."""
    size = header(item.name, item.nbytes)[124:136]
    digits = tar[:, _SUM].astype(np.int64) - ord("0")
    field_sum = tar[:, 148:156].sum(axis=1, dtype=np.int64)
    total = tar.sum(axis=1, dtype=np.uint32) - field_sum + 8 * ord(" ")
    same: NDArray[np.bool_] = (digits * _DIGITS).sum(axis=1) == total
    same &= (tar[:, 124:136] == _bytes(size)).all(axis=1)
    return same


def _stems(tar: Bytes, suffix: bytes) -> list[bytes]:
    """The names without their suffix; empty where it is another."""
    names = np.ascontiguousarray(tar[:, :100]).view("S100").ravel().tolist()
    if tar[:, 345].any():
        folders = np.ascontiguousarray(tar[:, 345:500]).view("S155").ravel().tolist()
        names = [f + b"/" + n if f else n for f, n in zip(folders, names, strict=True)]
    return [n[: -len(suffix)] if n.endswith(suffix) else b"" for n in names]
