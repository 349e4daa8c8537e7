"""The fixed part of a latent sample: what to read where, and headers checked for many at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import eq

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from wdsprep.dataset.arrays import Field, layout
from wdsprep.dataset.tar import BLOCK, padded
from wdsprep.dataset.tar.write import header
from wdsprep.loading.order.chance import Words
from wdsprep.loading.worker_memory import Bytes

_DIGITS = 8 ** np.arange(5, -1, -1)
_NAME = slice(100)
_SUM = slice(148, 154)


class Grid:
    """Where the arrays of a sample lie, as far as the last one wanted. Between them lie *heads*:
    the padding of the array before, a tar header, and the header of the `.npy`."""

    def __init__(self, fields: Sequence[Field], wanted: Sequence[str]) -> None:
        last = max((n for n, f in enumerate(fields) if short(f.name) in wanted), default=0)
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
        self._usual = [_usual(item) for item in self.fields]

    def columns(self, heads: Bytes, arrays: Mapping[str, Bytes]) -> list[Bytes]:
        """The heads and arrays of many samples, as they lie there. An array that nobody wants goes
        where all rows are one."""
        columns = []
        for item, place in zip(self.fields, self.heads, strict=True):
            columns.append(heads[:, place])
            into = arrays.get(short(item.name))
            if into is None:
                into = as_strided(
                    np.empty(item.array_nbytes, np.uint8), (len(heads), item.array_nbytes), (0, 1)
                )
            columns.append(into)
        return columns

    def keys(self, heads: Bytes) -> list[str | None]:
        """The key of each row, or None where a head is not what it should be."""
        good = np.ones(len(heads), np.bool_)
        names = []
        for item, place, usual in zip(self.fields, self.heads, self._usual, strict=True):
            own = heads[:, place.stop - len(item.header) - BLOCK : place.stop]
            sound = usual.fits(own)
            if not sound.all():
                sound[~sound] = _sound(own[~sound], item)
            good &= sound
            names.append(_names(own))
        ends = [f".{item.name}".encode() for item in self.fields]
        stems = [name[: -len(ends[0])] for name in names[0]]
        for own_names, end in zip(names, ends, strict=True):
            if own_names != (expected := [stem + end for stem in stems]):
                good &= np.fromiter(map(eq, own_names, expected), np.bool_)
        return [
            stem.decode("utf-8", "surrogateescape") if fine and stem else None
            for fine, stem in zip(good.tolist(), stems, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class _Usual:
    """What we write before an array: the same bytes but for a name, which is short, and its sum."""

    words: Words
    mask: Words
    rest_sum: int

    def fits(self, heads: Bytes) -> NDArray[np.bool_]:
        others = (heads.view(np.uint64) ^ self.words) & self.mask
        total = heads[:, _NAME].sum(axis=1, dtype=np.uint32) + self.rest_sum
        same: NDArray[np.bool_] = (_stated_sums(heads) == total) & ~others.any(axis=1)
        return same


def _usual(item: Field) -> _Usual:
    tar = header(item.name, item.nbytes)
    mask = np.full(BLOCK + len(item.header), 255, np.uint8)
    mask[_NAME] = mask[_SUM] = 0
    return _Usual(
        words=_bytes(tar + item.header).view(np.uint64),
        mask=mask.view(np.uint64),
        rest_sum=int(tar[_SUM], 8) - sum(tar[_NAME]),
    )


@lru_cache(64)
def grid_of(fields: tuple[Field, ...], wanted: tuple[str, ...]) -> Grid:
    return Grid(fields, wanted)


def short(member: str) -> str:
    """What a batch calls a member: latent for latent.npy."""
    return member.removesuffix(".npy")


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _sound(heads: Bytes, item: Field) -> NDArray[np.bool_]:
    """Whether others may have written them: they state the size and their own checksum."""
    tar = heads[:, :BLOCK]
    size = header(item.name, item.nbytes)[124:136]
    field_sum = tar[:, 148:156].sum(axis=1, dtype=np.int64)
    total = tar.sum(axis=1, dtype=np.uint32) - field_sum + 8 * ord(" ")
    same: NDArray[np.bool_] = _stated_sums(tar) == total
    same &= (tar[:, 124:136] == _bytes(size)).all(axis=1)
    same &= (heads[:, BLOCK:] == _bytes(item.header)).all(axis=1)
    return same


def _stated_sums(tar: Bytes) -> NDArray[np.int64]:
    sums: NDArray[np.int64] = (tar[:, _SUM].astype(np.int64) - ord("0")) @ _DIGITS
    return sums


def _names(tar: Bytes) -> list[bytes]:
    names: list[bytes] = np.ascontiguousarray(tar[:, _NAME]).view("S100").ravel().tolist()
    if tar[:, 345].any():
        folders = np.ascontiguousarray(tar[:, 345:500]).view("S155").ravel().tolist()
        names = [f + b"/" + n if f else n for f, n in zip(folders, names, strict=True)]
    return names
