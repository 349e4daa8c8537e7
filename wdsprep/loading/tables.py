"""Small columns in a table beside the shards: `join=["scores.parquet"]`.

A table has a column `key` of texts, and columns of numbers, which batches have as tensors: whole
numbers as int64, others as float32, truths as bool. A condition (`where`) asks for them by their
names, and for columns of texts, which batches do not have. A row whose key or one of whose numbers
is not there, or is NaN, is as good as none; of two rows with a key the first holds.

A table is read once, sorted by key, kept in a file and mapped (`kept`); that takes memory for all
of its keys and numbers, and later loaders take none.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from wdsprep.dataset.chance import Ints
from wdsprep.dataset.kept import KeptFile, KeptWriter, kept
from wdsprep.errors import NotFoundError, UsageError
from wdsprep.loading.shelves.cache import CacheDir, folder_of
from wdsprep.sources.patterns import table_kind
from wdsprep.sources.tables.files import Table, open_table
from wdsprep.store import split_url
from wdsprep.text import examples, plural

if TYPE_CHECKING:
    from wdsprep.sources.tables.parquet import ParquetTable

KEY = "key"
ROWS_AT_ONCE = 1 << 16
LONGEST_NBYTES = 4096
"""Of a key: all of them are held in rows as long as the longest."""
LACKING = -1
DIGITS = 18  # of a number of 64 bits
_log = logging.getLogger("wdsprep")
Columns = dict[str, list[NDArray[Any]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyedTable:
    """An open one. `columns` has the kind of each column of numbers; `texts` names the others that
    were asked for."""

    url: str
    columns: Mapping[str, str]
    texts: tuple[str, ...]
    digest: str
    _file: KeptFile
    _width: int
    """Of keys that are digits, all of so many: they are kept as numbers, which are found sooner."""

    @property
    def rows(self) -> int:
        return len(self._file.arrays[KEY])

    def places(self, keys: Sequence[str]) -> Ints:
        """The rows of these keys; LACKING where there is none."""
        known = self._file.arrays[KEY]
        wanted = _as_numbers(keys, self._width) if self._width else np.array(_packed(keys), "S")
        found = np.searchsorted(known, wanted)
        inside = np.minimum(found, len(known) - 1)
        is_there = (known[inside] == wanted) if len(known) else np.zeros(len(keys), np.bool_)
        return np.where(is_there, inside, LACKING)

    def of_keys(self, keys: Sequence[str]) -> dict[str, NDArray[Any]]:
        """The numbers of rows that are there."""
        places = self.places(keys)
        if (places == LACKING).any():
            lacking = keys[int(np.flatnonzero(places == LACKING)[0])]
            raise UsageError(f"{self.url} has no row with numbers for the key {lacking}")
        return {name: self.column(name)[places] for name in self.columns}

    def column(self, name: str) -> NDArray[Any]:
        return self._file.arrays[f"numbers {name}"]

    def text(self, name: str, places: Ints) -> list[str | None]:
        """Of a column of texts, by rows; None where there is none."""
        ends, data = (self._file.arrays[f"{part} {name}"] for part in ("ends", "texts"))
        found: list[str | None] = []
        for place in places.tolist():
            start, end = (int(ends[place]), int(ends[place + 1])) if place != LACKING else (0, 0)
            found.append(data[start:end].tobytes().decode("utf-8", "replace") or None)
        return found


def is_table(place: str) -> bool:
    """Whether a path or URL names a table, not a dataset."""
    return table_kind(place) not in ("", "txt")


def keyed_table(place: str, cache: CacheDir | None, texts: Sequence[str] = ()) -> KeyedTable:
    """The table, made ready once. `texts` are names that may be columns of texts."""
    store, name = split_url(place)
    entry = next((each for each in store.list(name) if each.name == name), None)
    if entry is None:
        raise NotFoundError(f"{place} is not there: give the path or URL of a table")
    table = open_table(store.url, name)
    named = table.columns()
    if KEY not in named:
        raise UsageError(f"{place} has no column {KEY} (it has {examples(named)}): add one")
    wanted = tuple(sorted({*texts} & {*named} - {KEY}))
    what = "table", f"{store.url}/{name}", entry.stamp, str(entry.nbytes), *wanted
    found = kept(
        folder_of(cache),
        what,
        lambda writer, path: _sort(place, table, wanted, writer, path),
    )
    if not found.facts["rows"]:
        raise UsageError(f"{place} has no row with a key and numbers")
    return KeyedTable(
        url=place,
        columns=found.facts["columns"],
        texts=tuple(found.facts["texts"]),
        digest=found.facts["digest"],
        _file=found,
        _width=found.facts["width"],
    )


def _sort(
    place: str,
    table: Table,
    texts: Sequence[str],
    writer: KeptWriter,
    path: Path,
) -> None:
    _log.info("%s: reading the table; its columns, sorted by key, are kept in %s", place, path)
    keys, found, others = _read(place, table, texts)
    good = keys != b""
    for values in found.values():
        if values.dtype.kind == "f":
            good &= ~np.isnan(values)
    rows = np.flatnonzero(good)
    by_key = rows[np.argsort(keys[rows], kind="stable")]
    is_first = np.ones(len(by_key), np.bool_)
    is_first[1:] = keys[by_key][1:] != keys[by_key][:-1]
    for what, count in (
        ("without a key or a number", len(keys) - len(rows)),
        ("with a key that an earlier one has", int((~is_first).sum())),
    ):
        if count:
            _log.warning("%s: %s %s: passed over", place, plural(count, "row"), what)
    by_key = by_key[is_first]
    digest = blake3(repr(sorted(found)).encode())
    digest.update(keys[by_key].tobytes())
    named = [key.decode("utf-8", "surrogateescape") for key in keys[by_key].tolist()]
    width = len(named[0]) if named and len(named[0]) <= DIGITS else 0
    own = _as_numbers(named, width)
    width = width if len(own) and own.min() > LACKING else 0
    stored = own if width else keys[by_key]
    writer.add(KEY, stored.dtype.str, [stored])
    for name, values in sorted(found.items()):
        writer.add(f"numbers {name}", values.dtype.str, [values[by_key]])
        digest.update(values[by_key].tobytes())
    for name, lines in sorted(others.items()):
        packed = _packed([lines[row] for row in by_key.tolist()])
        ends = np.cumsum([0, *map(len, packed)])
        writer.add(f"ends {name}", "<i8", [ends])
        writer.add(f"texts {name}", "|u1", [np.frombuffer(b"".join(packed), np.uint8)])
        digest.update(b"".join(packed))
    writer.facts |= {
        "columns": {name: values.dtype.str for name, values in found.items()},
        "digest": digest.hexdigest(),
        "rows": len(by_key),
        "texts": sorted(others),
        "width": width,
    }


def _as_numbers(keys: Sequence[str], width: int) -> Ints:
    """Keys of so many digits; LACKING for others. Where all are such, it is done at once, in a
    fifth of the time."""
    whole = "".join(keys)
    if {*map(len, keys)} == {width} and whole.isdecimal() and whole.isascii():
        digits = np.frombuffer(whole.encode(), np.uint8).reshape(-1, width) - ord("0")
        numbers: Ints = digits @ 10 ** np.arange(width - 1, -1, -1, dtype=np.int64)
        return numbers
    return np.fromiter(
        (int(k) if len(k) == width and k.isdecimal() and k.isascii() else LACKING for k in keys),
        np.int64,
        len(keys),
    )


def _packed(texts: Sequence[str]) -> list[bytes]:
    return [*map(_packed_one, texts)]


def _packed_one(text: str) -> bytes:
    """Nothing for what cannot be in a file, as half of a pair of surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return b""


Read = tuple[NDArray[Any], dict[str, NDArray[Any]], dict[str, list[str]]]
"""The keys, the columns of numbers, and those of texts."""


def _read(place: str, table: Table, texts: Sequence[str]) -> Read:
    from wdsprep.sources.tables.parquet import ParquetTable  # pyarrow, which few need

    if isinstance(table, ParquetTable):
        return _read_parquet(place, table, texts)
    every = [row for where, _ in table.parts(ROWS_AT_ONCE) for _, row in table.rows(where)]
    rows: list[Mapping[str, Any]] = [row for row in every if isinstance(row, dict)]
    if count := len(every) - len(rows):
        _log.warning("%s: %s that cannot be read: passed over", place, plural(count, "row"))
    keys = [row.get(KEY) or "" for row in rows]
    _check_keys(place, keys)
    found, others = {}, {}
    names = dict.fromkeys(name for row in rows for name in row if name != KEY)
    for name in names:
        values = [row.get(name) for row in rows]
        if (numbers := _numbers(values)) is not None:
            found[name] = numbers
        elif name in texts:
            others[name] = ["" if value is None else str(value) for value in values]
    return _held(keys), found, others


def _held(keys: Sequence[str]) -> NDArray[Any]:
    """The keys in rows; none in place of one that is longer than any sample's may be."""
    packed = (key if len(key) <= LONGEST_NBYTES else b"" for key in _packed(keys))
    return np.array([*packed], "S")


def _numbers(values: Sequence[Any]) -> NDArray[Any] | None:
    """Numbers and truths, or cells of a CSV that read as numbers; None for other things."""
    there = [value for value in values if value is not None]
    if not there or not {*map(type, there)} <= {int, float, bool, str}:
        return None
    if {*map(type, there)} == {bool} and len(there) == len(values):
        return np.array(values, "|b1")
    try:
        if len(there) == len(values) and not any(type(value) is float for value in there):
            return np.array([int(value) for value in values], "<i8")
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([np.nan if v is None else float(v) for v in values], "<f8")
    except (ValueError, OverflowError):
        return None


def _check_keys(place: str, keys: Sequence[Any]) -> None:
    if wrong := next((key for key in keys if not isinstance(key, str)), None):
        raise UsageError(
            f"{place}: its keys are no texts, as {wrong!r:.40}: write them as the shards have "
            "them, such as '000000000012'"
        )


def _read_parquet(place: str, table: "ParquetTable", texts: Sequence[str]) -> Read:
    from wdsprep.sources.tables.parquet import NUMBERS, values_in

    kinds = table.kinds()
    if kinds[KEY] != "text":
        raise UsageError(
            f"{place}: its column {KEY} is of {kinds[KEY] or 'another kind'}: write keys as texts, "
            "as the shards have them, such as '000000000012'"
        )
    numbers = [name for name, kind in kinds.items() if kind in NUMBERS]
    others: dict[str, list[str]] = {n: [] for n in texts if kinds[n] == "text"}
    columns: Columns = {name: [] for name in numbers}
    keys: list[NDArray[Any]] = []
    for batch in table.batches([KEY, *numbers, *others], ROWS_AT_ONCE):
        keys.append(_held(_texts(values_in(batch[KEY]))))
        good = np.ones(len(keys[-1]), np.bool_)
        for name in numbers:
            columns[name].append(_as_stored(place, name, batch[name], NUMBERS[kinds[name]], good))
        keys[-1][~good] = b""
        for name, lines in others.items():
            lines += _texts(values_in(batch[name]))
    width = max((some.dtype.itemsize for some in keys), default=1)
    joined = [some.astype(f"S{width}") for some in keys]
    empty = np.empty(0, f"S{width}")
    found = {
        name: np.concatenate([np.empty(0, NUMBERS[kinds[name]]), *some])
        for name, some in columns.items()
    }
    return np.concatenate([empty, *joined]), found, others


def _texts(values: Sequence[Any]) -> list[str]:
    """Texts, with nothing in place of a null and of what is not UTF-8."""
    return [value if isinstance(value, str) else "" for value in values]


def _as_stored(
    place: str, name: str, column: Any, dtype: str, good: NDArray[np.bool_]
) -> NDArray[Any]:
    """A column of a batch; rows of which it has nothing are not good."""
    if column.null_count:
        good &= ~column.is_null().to_numpy(zero_copy_only=False)
        column = column.fill_null(False if dtype == "|b1" else 0)
    own = column.to_numpy(zero_copy_only=False)
    if own.dtype == np.uint64 and (own > np.iinfo(np.int64).max).any():
        raise UsageError(
            f"{place}: its column {name} has numbers beyond 2^63, which batches cannot hold: write "
            "them as texts, or leave the column out"
        )
    made: NDArray[Any] = own.astype(dtype)
    return made
