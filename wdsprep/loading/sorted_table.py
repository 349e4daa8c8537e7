"""Sort a table by key and write it into a kept file, in bounded memory.

Its rows are sorted some megabytes at a time (`sorted_rows`). In the file the columns stand one
after another, so their parts wait on a disk, in TMPDIR, until all have come.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3
from numpy.typing import NDArray

from wdsprep.dataset.kept_file import KeptWriter
from wdsprep.loading.table_keys import DIGITS, KEY, WantedColumns, parse_digits
from wdsprep.loading.table_rows import TableRows, open_rows
from wdsprep.sources.sorted_rows import SORTED_THERE, sorted_rows
from wdsprep.sources.tables.files import Table
from wdsprep.store.spool import Place, Spool
from wdsprep.text import plural

WIDE_NBYTES = 16 << 20
"""The limit on keys that are held at once in rows as long as the longest key."""
_log = logging.getLogger("wdsprep")


def sort_table(
    place: str, table: Table, wanted: WantedColumns, writer: KeptWriter, path: Path
) -> None:
    """Write the first row of each key, sorted by key, with the wanted columns."""
    sort_rows(open_rows(place, table, wanted), writer, path)


def sort_rows(rows: TableRows, writer: KeptWriter, path: Path) -> None:
    """Write the first row of each key, sorted by key.

    Rows without a key or a number are left out; a warning counts these and repeated keys. `path`
    is only logged.
    """
    place = rows.place
    _log.info("%s: reading the table; its columns, sorted by key, are kept in %s", place, path)
    with closing(Spool(SORTED_THERE)) as spool:
        found = _SortedColumns(rows, spool)
        with sorted_rows(rows.batches()) as batches:
            for batch in batches:
                some = max(1, WIDE_NBYTES // rows.width)
                for at in range(0, len(batch), some):
                    found.add(batch.slice(at, some))
        for what, count in (
            ("without a key or a number", rows.count - found.good),
            ("with a key that an earlier row has", found.good - found.count),
        ):
            if count:
                _log.warning("%s: left out %s %s", place, plural(count, "row"), what)
        found.write(writer)


class _SortedColumns:
    """The columns of a table sorted by key, whose parts wait on a disk."""

    def __init__(self, rows: TableRows, spool: Spool) -> None:
        self._rows, self._spool = rows, spool
        self._parts: dict[str, list[Place]] = defaultdict(list)
        self._last: bytes | None = None
        self._digits: int | None = None
        """The number of digits of each key; 0 if keys are not numbers of one length."""
        self.good = self.count = 0

    def add(self, batch: pa.RecordBatch) -> None:
        keys = batch.column(KEY)
        numbers, texts, has_numbers = self._rows.values(batch)
        for values in numbers.values():
            if values.dtype.kind == "f":
                has_numbers = has_numbers & ~np.isnan(values)
        wanted = self._find_first(keys, has_numbers)
        chosen = pa.array(wanted)
        named = _pad_keys(keys.filter(chosen), self._rows.width)
        if not len(named):
            return
        self.count += len(named)
        self._note_digits(named)
        self._put(KEY, named)
        for name, values in numbers.items():
            self._put(f"numbers {name}", values[wanted])
        for name, lines in texts.items():
            lines = lines.filter(chosen)
            self._put(f"ends {name}", pc.binary_length(lines).to_numpy(zero_copy_only=False))
            self._put(f"texts {name}", np.frombuffer(_data(lines), np.uint8))

    def _find_first(self, keys: pa.Array, has_numbers: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return a mask of the rows that have all numbers and a new key.

        A key is new if no earlier row that has all numbers has it.
        """
        is_first_row: NDArray[np.bool_] = has_numbers.copy()
        places = np.flatnonzero(has_numbers)
        self.good += len(places)
        if len(places):
            own = keys if len(places) == len(keys) else keys.take(pa.array(places))
            is_first = np.ones(len(places), np.bool_)
            is_first[0] = own[0].as_py() != self._last
            is_first[1:] = pc.not_equal(own[1:], own[:-1]).to_numpy(zero_copy_only=False)
            self._last = own[-1].as_py()
            is_first_row[places[~is_first]] = False
        return is_first_row

    def _note_digits(self, keys: NDArray[Any]) -> None:
        if self._digits is None:
            self._digits = len(keys[0]) if len(keys[0]) <= DIGITS else 0
        digits = self._digits
        if digits:
            letters = keys.view(np.uint8).reshape(len(keys), -1)
            is_digit = (letters >= ord("0")) & (letters <= ord("9"))
            if not is_digit[:, :digits].all() or letters[:, digits:].any():
                self._digits = 0

    def _put(self, name: str, values: NDArray[Any]) -> None:
        if values.nbytes:
            self._parts[name].append(self._spool.put(values.tobytes()))

    def write(self, writer: KeptWriter) -> None:
        rows, width = self._rows, self._digits or 0
        digest = blake3(repr(sorted(rows.columns)).encode())

        def read_parts(name: str, dtype: str) -> Iterator[NDArray[Any]]:
            for place in self._parts[name]:
                yield np.frombuffer(self._spool.get(place), dtype)

        def hash_parts(some: Iterator[NDArray[Any]]) -> Iterator[NDArray[Any]]:
            for part in some:
                digest.update(part.tobytes())
                yield part

        keys = hash_parts(read_parts(KEY, f"|S{rows.width}"))
        if width:
            own = (parse_digits(some.astype(f"S{width}").tobytes(), width) for some in keys)
            writer.add(KEY, "<i8", own)
        else:
            writer.add(KEY, f"|S{rows.width}", keys)
        for name, dtype in sorted(rows.columns.items()):
            writer.add(f"numbers {name}", dtype, hash_parts(read_parts(f"numbers {name}", dtype)))
        for name in sorted(rows.texts):
            writer.add(f"ends {name}", "<i8", _sum_lengths(read_parts(f"ends {name}", "<i8")))
            writer.add(f"texts {name}", "|u1", hash_parts(read_parts(f"texts {name}", "|u1")))
        writer.facts |= {
            "columns": dict(rows.columns),
            "digest": digest.hexdigest(),
            "offered": sorted(rows.offered),
            "rows": self.count,
            "texts": sorted(rows.texts),
            "width": width,
        }


def _pad_keys(keys: pa.Array, width: int) -> NDArray[Any]:
    """Return keys as an array with rows of `width` bytes; keys of one length convert faster."""
    lengths = pc.min_max(pc.binary_length(keys)).as_py()
    if not lengths["min"] or lengths["min"] != lengths["max"]:
        return np.array(keys.to_pylist(), f"S{width}")
    return np.frombuffer(_data(keys), f"S{lengths['min']}").astype(f"S{width}")


def _data(values: pa.Array) -> memoryview:
    """Return the bytes of all values, one after another."""
    _, ends, data = values.buffers()
    if not len(values) or data is None:
        return memoryview(b"")
    edges = np.frombuffer(ends, np.int64)[[values.offset, values.offset + len(values)]]
    return memoryview(data)[edges[0] : edges[1]]


def _sum_lengths(lengths: Iterator[NDArray[Any]]) -> Iterator[NDArray[np.int64]]:
    end = 0
    yield np.zeros(1, np.int64)
    for some in lengths:
        yield end + np.cumsum(some)
        end += int(some.sum())
