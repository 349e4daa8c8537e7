"""Find the arrays in the bytes of a latent sample, and check the headers of many at once."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import eq

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from wdsprep.dataset.aio import Bytes
from wdsprep.dataset.npy_arrays import Field, layout
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.tar import BLOCK, padded
from wdsprep.dataset.tar.write import header

_DIGITS = 8 ** np.arange(5, -1, -1)
_SIZE_DIGITS = 8 ** np.arange(10, -1, -1)
_NAME = slice(100)
_SIZE = slice(124, 136)
_SUM = slice(148, 154)
_WORD = np.dtype(np.uint64)


class SampleLayout:
    """The offsets of the arrays in a sample, up to the last one that is wanted.

    Between the arrays lie *headers*: the padding of the array before, a tar header, and the
    header of the `.npy`. The last array may be of variable length; each sample says how long it
    is. In memory, the headers of a sample stand in a row, each so that it ends with a whole word.

    Headers that wdsprep wrote are compared with what is expected, all those of a sample at once:
    they differ only in names and checksums, and before a variable array also in its length. All
    members of a sample have one key, so the bytes of the first name tell each checksum.
    """

    def __init__(self, fields: Sequence[Field], wanted: Sequence[str]) -> None:
        last = max((n for n, f in enumerate(fields) if batch_name(f.name) in wanted), default=0)
        self.fields = tuple(fields[: last + 1])
        ends = [0]
        self.headers: list[slice] = []
        start = 0
        for line, item in zip(layout(self.fields), self.fields, strict=True):
            nbytes = line["offset"] - ends[-1]
            start += -(start + nbytes) % _WORD.itemsize
            self.headers.append(slice(start, start + nbytes))
            start += nbytes
            ends.append(line["offset"] + item.array_nbytes)
        self.headers_nbytes = start
        self._end = ends[-1]
        self.last_start: int = line["offset"]
        self.token_nbytes = self.fields[-1].row_nbytes
        self._kinds = [_FieldHeaders(item) for item in self.fields]
        self._tops = [p.stop - k.nbytes for p, k in zip(self.headers, self._kinds, strict=True)]
        self._suffixes = [f".{item.name}".encode() for item in self.fields]
        expected, mask = np.zeros((2, start), np.uint8)
        for place, top, kind in zip(self.headers, self._tops, self._kinds, strict=True):
            mask[top : place.stop] = kind.mask
            expected[top : place.stop] = kind.expected & kind.mask
        self._expected, self._mask = expected.view(_WORD), mask.view(_WORD)
        self._sum_columns = np.add.outer(self._tops, np.arange(_SUM.start, _SUM.stop))
        rest_sums = np.array([kind.rest_sum for kind in self._kinds])
        self._rest_sums = rest_sums + np.array([*map(sum, self._suffixes)]) - sum(self._suffixes[0])

    def columns(self, headers: Bytes, arrays: Mapping[str, Bytes]) -> list[Bytes]:
        """Return the memory to read many samples into: their headers and arrays in file order.

        An array that is not wanted goes to a row that all samples share. If it is of
        variable length, it is left out, with everything after it.
        """
        columns = []
        for item, place in zip(self.fields, self.headers, strict=True):
            columns.append(headers[:, place])
            into = arrays.get(batch_name(item.name))
            if into is None and item.is_variable:
                break
            if into is None:
                into = as_strided(
                    np.empty(item.array_nbytes, np.uint8), (len(headers), item.array_nbytes), (0, 1)
                )
            columns.append(into)
        return columns

    def padding(self, length: int = 0) -> int:
        """Return the number of bytes from the last array to the next member of the tar.

        They are counted from the end of that array, or from its beginning if its length is
        variable.
        """
        if not self.fields[-1].is_variable:
            return padded(self._end) - self._end
        return padded(self.last_start + length * self.token_nbytes) - self.last_start

    def read_headers(self, headers: Bytes) -> tuple[list[str | None], Ints]:
        """Return the key of each sample, or None if one of its headers is wrong.

        Also return the lengths of the variable array, which are 0 for wrong headers, and for all
        samples if there is no such array.
        """
        is_variable = self.fields[-1].is_variable
        lengths = np.zeros(len(headers), np.int64)
        if is_variable:
            lengths = self._kinds[-1].lengths(headers[:, self._tops[-1] :])
        # as wdsprep writes them; the names of members after the first are checked below
        valid: NDArray[np.bool_] = (headers.view(_WORD) & self._mask == self._expected).all(axis=1)
        first_names = headers[:, self._tops[0] :][:, _NAME]
        totals = np.add.outer(first_names.sum(axis=1, dtype=np.int64), self._rest_sums)
        if is_variable:
            totals[:, -1] += headers[:, self._tops[-1] :][:, _SIZE].sum(axis=1, dtype=np.int64)
        valid &= (_octal(headers[:, self._sum_columns]) == totals).all(axis=1)
        is_all_own = bool(valid.all())
        if not is_all_own:  # valid ones, whoever wrote them
            others, places = headers[~valid], zip(self._tops, self.headers, strict=True)
            checks = zip(self._kinds, places, strict=True)
            are_valid = [k.are_foreign(others[:, top : place.stop]) for k, (top, place) in checks]
            valid[~valid] = np.logical_and.reduce(are_valid)
        if is_variable:
            valid &= lengths > 0
        names = [_names(headers[:, top : top + BLOCK], is_all_own) for top in self._tops]
        stems = [name[: -len(self._suffixes[0])] for name in names[0]]
        for own_names, suffix in zip(names, self._suffixes, strict=True):
            if own_names != (expected := [stem + suffix for stem in stems]):
                valid &= np.fromiter(map(eq, own_names, expected), np.bool_)
        keys = [
            stem.decode("utf-8", "surrogateescape") if fine and stem else None
            for fine, stem in zip(valid.tolist(), stems, strict=True)
        ]
        return keys, lengths


class _FieldHeaders:
    """The expected bytes before the array of a field.

    Headers that wdsprep wrote differ only where the mask is 0: in the name and the checksum;
    before a variable array, also in the size and the header of the `.npy`. `rest_sum` is the
    checksum less the bytes of name and size that differ.
    """

    def __init__(self, item: Field) -> None:
        self._item = item
        tar = header(item.name, item.nbytes)
        self.nbytes = BLOCK + len(item.header)
        self.expected = _bytes(tar + item.header)
        self.mask = np.full(self.nbytes, 255, np.uint8)
        self.mask[_NAME] = self.mask[_SUM] = 0
        self.rest_sum = int(tar[_SUM], 8) - sum(tar[_NAME])
        kinds = [item]
        if item.is_variable:
            self.mask[_SIZE] = self.mask[BLOCK:] = 0
            self.rest_sum -= sum(tar[_SIZE])
            kinds = [item.of_length(length) for length in range(1, item.shape[0] + 1)]
        self._npy_headers = _table([kind.header for kind in kinds])
        self._sizes = _table([header(item.name, kind.nbytes)[_SIZE] for kind in kinds])

    def are_foreign(self, headers: Bytes) -> NDArray[np.bool_]:
        """Return a mask of valid headers, whoever wrote them.

        They must state the right size and their own checksum.
        """
        tar = headers[:, :BLOCK]
        field_sum = tar[:, 148:156].sum(axis=1, dtype=np.int64)
        total = tar.sum(axis=1, dtype=np.uint32) - field_sum + 8 * ord(" ")
        same: NDArray[np.bool_] = _octal(tar[:, _SUM]) == total
        return same if self._item.is_variable else same & self._fit(headers, 0)

    def lengths(self, headers: Bytes) -> Ints:
        """Return the length that the size and the shape in each header agree on, or 0."""
        nbytes = (headers[:, _SIZE][:, :11].astype(np.int64) - ord("0")) @ _SIZE_DIGITS
        lengths = (nbytes - len(self._item.header)) // self._item.row_nbytes
        lengths[(lengths < 1) | (lengths > len(self._sizes))] = 0
        lengths[~self._fit(headers, lengths - 1)] = 0
        return lengths

    def _fit(self, headers: Bytes, number: "int | Ints") -> NDArray[np.bool_]:
        """Return a mask of the headers whose size and `.npy` header fit an array of this length.

        `number` is the length less one, for each header or for all; 0 for a field of fixed shape.
        """
        sizes: NDArray[np.bool_] = (headers[:, _SIZE] == self._sizes[number]).all(axis=1)
        npy_headers: NDArray[np.bool_] = (headers[:, BLOCK:] == self._npy_headers[number]).all(
            axis=1
        )
        return sizes & npy_headers


layout_for = lru_cache(512)(SampleLayout)  # of one dataset, as many as it has shapes


def batch_name(member: str) -> str:
    """Return the name that a member of a sample has in a batch: latent for latent.npy."""
    return member.removesuffix(".npy")


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _table(rows: Sequence[bytes]) -> Bytes:
    return _bytes(b"".join(rows)).reshape(len(rows), -1)


def _octal(digits: Bytes) -> NDArray[np.int64]:
    """Return the numbers whose octal digits stand in the last axis, as text."""
    numbers: NDArray[np.int64] = (digits.astype(np.int64) - ord("0")) @ _DIGITS
    return numbers


def _names(tar: Bytes, are_own: bool) -> list[bytes]:
    """Return the names in headers; those that wdsprep wrote have no folder of its own field."""
    names: list[bytes] = np.ascontiguousarray(tar[:, _NAME]).view("S100").ravel().tolist()
    if not are_own and tar[:, 345].any():
        folders = np.ascontiguousarray(tar[:, 345:500]).view("S155").ravel().tolist()
        names = [f + b"/" + n if f else n for f, n in zip(folders, names, strict=True)]
    return names
