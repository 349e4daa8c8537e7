"""Ask tables which of their rows meet a condition.

`column_conditions` answers for whole columns, and the closures of the condition for the rows that
are left to them. DuckDB gets Arrow and gives Arrow: it has no files, network, extensions,
variables of Python or settings to change, and no threads of its own, so a process that is forked
from this one ends as any other.

`WantedTexts` finds the rows that have one of a list of texts.
"""

import ast
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from wdsprep.dataset.condition_syntax import Condition
from wdsprep.dataset.removed_samples import MARK_NBYTES, Marks, mark_of
from wdsprep.dataset.sample_table import REST, ROW
from wdsprep.dataset.samples import META, PathParts, parse_json, value_at_path
from wdsprep.sources.tables.parquet import OpenParquet
from wdsprep.tables.column_conditions import (
    FALSE,
    ColumnCondition,
    Mask,
    RowsOfSource,
    is_present,
    mask_of,
    whole_numbers,
)

MOST_ROWS = 50_000
"""Rows that are asked at once: DuckDB takes some milliseconds before it parses any JSON."""
MOST_NBYTES = 64 << 20
PARSED_ROWS = 4096
"""Rows that Python holds at a time."""
Settings = dict[str, str | bool | int | float | list[str]]
NO_THREADS: Settings = {"threads": 1, "async_threads": 0}
"""Threads of DuckDB would end a process that is forked from this one, such as a DataLoader's."""
CONFIG: Settings = {
    **NO_THREADS,
    "python_enable_replacements": False,
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "temp_directory": "",
    "memory_limit": "500MB",
    "arrow_large_buffer_size": True,  # the texts of a batch may have more than 2 GB
}
Facts = dict[str, Any]
Value = TypeVar("Value")


def open_engine() -> duckdb.DuckDBPyConnection:
    """Return a connection to a DuckDB without any data, for one thread at a time."""
    engine = duckdb.connect(":memory:", config=CONFIG)
    engine.execute("SET enable_progress_bar = false")  # which Jupyter would show
    engine.execute("SET lock_configuration = true")
    return engine


class Query:
    """A condition to ask tables. `unseen` are the names that no row so far has a value for."""

    def __init__(self, condition: Condition, engine: duckdb.DuckDBPyConnection) -> None:
        self.condition = condition
        self.unseen = set(condition.names)
        self._engine = engine
        self._tree = ast.parse(condition.plain, mode="eval").body
        self._wanted = {META, REST, *(str(path[0]) for path in condition.names)}

    def masks(self, tables: Iterable[Sequence[pa.Table]]) -> Iterator[Mask]:
        """Yield which rows meet the condition, of tables that stand side by side.

        Tables that stand side by side have the same rows in the same order. A name has the value
        that the first of them with a value for it has. Those of the same columns that follow one
        another are asked together.
        """
        waiting: list[pa.Table] = []
        for rows in map(self._join_sides, tables):
            several = [*waiting, rows]
            is_full = (
                sum(map(len, several)) > MOST_ROWS
                or sum(table.nbytes for table in several) > MOST_NBYTES
            )
            if waiting and (is_full or rows.schema != waiting[0].schema):
                yield from self._ask_together(waiting)
                waiting = []
            waiting.append(rows)
        if waiting:
            yield from self._ask_together(waiting)

    def _join_sides(self, tables: Sequence[pa.Table]) -> pa.Table:
        """Return one table of the columns that matter; names have the numbers of their tables."""
        columns: dict[str, pa.ChunkedArray] = {}
        for number, table in enumerate(tables):
            names = [name for name in table.column_names if name in self._wanted]
            columns |= {f"{number} {name}": table.column(name) for name in names}
        if not columns:  # any column tells how many rows there are
            columns = dict(zip([""], chain.from_iterable(t.columns for t in tables), strict=False))
        return pa.Table.from_arrays([*columns.values()], [*columns])

    def _ask_together(self, tables: Sequence[pa.Table]) -> Iterator[Mask]:
        rows = pa.concat_tables(tables)
        fitting = MOST_NBYTES * len(rows) // max(rows.nbytes, 1)
        step = max(1, min(fitting, MOST_ROWS))
        slices = [rows.slice(start, step) for start in range(0, len(rows), step)]
        found = np.concatenate([np.zeros(0, np.bool_), *map(self._ask, slices)])
        yield from np.split(found, np.cumsum([len(table) for table in tables])[:-1])

    def _ask(self, rows: pa.Table) -> Mask:
        columns = {
            name: values
            for name, values in zip(rows.column_names, rows.columns, strict=True)
            if values.null_count < len(values)
        }
        names = self.condition.names
        evaluated = ColumnCondition(
            [RowsOfSource(own, names, self._engine) for own in _by_source(columns)]
        )
        found, left = _split_truth(evaluated.truth(self._tree), len(rows))
        for path in self.unseen & {*names}:
            is_seen, unknown = _split_truth(is_present(evaluated.path(path)), len(rows))
            if is_seen.any() or any(
                _first_value(f, path) is not None for f in _facts(rows, unknown)
            ):
                self.unseen.discard(path)

        def holds(facts: Sequence[Facts]) -> bool:
            values = [_first_value(facts, path) for path in names]
            if self.unseen:
                pairs = zip(names, values, strict=True)
                self.unseen.difference_update(path for path, value in pairs if value is not None)
            return self.condition.holds(values)

        if len(left):
            found[left] = np.fromiter(map(holds, _facts(rows, left)), np.bool_, len(left))
        return found


def lacking_names(names: Iterable[PathParts], table: pa.Table) -> list[PathParts]:
    """Return those names for which some row of a table may have no value."""
    return [
        path
        for path in names
        if len(path) > 1
        or path[0] not in table.column_names
        or table.column(path[0]).null_count > 0
    ]


def read_named(file: OpenParquet, names: Iterable[PathParts]) -> pa.Table:
    """Return the columns of a table of samples that names need.

    What a row has in no column may be in `rest` or in `meta`, which are read only then.
    """
    wanted = {str(path[0]) for path in names}
    if wanted <= {*file.schema.names} - {REST, ROW}:
        table = file.read(wanted)
        if not any(table.column(name).null_count for name in wanted - {META}):
            return table
    return file.read({*wanted, META, REST} - {ROW})


def read_texts(file: OpenParquet, name: str) -> pa.ChunkedArray:
    """Return what a table of samples says of a name as texts: its column, else from the JSON."""
    return texts_in(read_named(file, [(name,)]), name)


def texts_in(rows: pa.Table, name: str) -> pa.ChunkedArray:
    """Return what rows of tables of samples say of a name as texts: in a column, or in JSON.

    Only the JSON of rows that lack it in the column, and that has the name, is parsed.
    """
    column = rows[name] if name in rows.column_names else pa.chunked_array([pa.nulls(len(rows))])
    texts = column.cast(pa.string())
    if not texts.null_count:
        return texts
    is_named = np.zeros(len(rows), np.bool_)
    for json in {META, REST}.intersection(rows.column_names):
        is_named |= mask_of(pc.match_substring(rows[json], f'"{name}"').fill_null(False))
    may_be_there = is_named & mask_of(texts.is_null())
    if not may_be_there.any():
        return texts
    numbered = rows.rename_columns([f"0 {n}" for n in rows.column_names])
    facts = _facts(numbered, np.flatnonzero(may_be_there))
    values = (_first_value(sources, (name,)) for sources in facts)
    others = [None if value is None else str(value).encode("utf-8", "replace") for value in values]
    found = pc.replace_with_mask(
        texts.combine_chunks(),
        pa.array(may_be_there),
        pa.array(others, pa.binary()).cast(pa.string()),
    )
    return pa.chunked_array([found])


def _split_truth(truth: Any, rows: int) -> tuple[Mask, NDArray[np.int64]]:
    """Return which rows a truth is true for, and the numbers of those for which it is null."""
    if isinstance(truth, pa.Scalar):
        is_known = truth.is_valid
        return np.full(rows, bool(truth.as_py())), np.arange(0 if is_known else rows)
    return mask_of(truth.fill_null(FALSE)), np.flatnonzero(mask_of(truth.is_null()))


def _by_source(columns: Mapping[str, Value]) -> list[dict[str, Value]]:
    """Return the columns of each table that stands beside the others, by their own names."""
    found: dict[str, dict[str, Value]] = {}
    for column, value in columns.items():
        number, _, name = column.partition(" ")
        found.setdefault(number, {})[name] = value
    return [*found.values()]


def _facts(rows: pa.Table, numbers: NDArray[np.int64]) -> Iterator[list[Facts]]:
    """Yield what is known of each of these rows: for each source what a json would say."""
    for start in range(0, len(numbers), PARSED_ROWS):
        for row in rows.take(whole_numbers(numbers[start : start + PARSED_ROWS])).to_pylist():
            yield [*map(_source_facts, _by_source(row))]


def _source_facts(row: Facts) -> Facts:
    facts = {name: value for name, value in row.items() if value is not None}
    for name in {META, REST} & facts.keys():
        if isinstance(text := facts[name], str):
            facts[name] = None
            with suppress(ValueError, RecursionError):  # of what is no JSON, nothing is known
                facts[name] = parse_json(text)
    rest = facts.pop(REST, None)
    return {**rest, **facts} if isinstance(rest, dict) else facts


def _first_value(sources: Iterable[Facts], path: PathParts) -> Any:
    values = (value_at_path(facts, path) for facts in sources)
    return next((value for value in values if value is not None), None)


class WantedTexts:
    """Texts to look for in columns: a list of any length, of a kind such as `key` or `url`.

    Of each, 24 bytes are kept: its hash in this process, and its mark (`dataset.removed_samples`).
    Hashes pick out the few texts of a column that may be wanted, in 0.3 us each, and marks decide.
    A semi-join of DuckDB takes as long, but holds the texts: 10 million URLs are 1.6 GB, or a
    folder to spill into. Arrow's `is_in` hashes the list anew for each column.

    `seen` says of each of their `marks` whether a text with it has been found.
    """

    def __init__(self, kind: str, texts: Iterable[str]) -> None:
        hashes = array("q")

        def marks() -> Iterator[bytes]:
            for text in texts:
                hashes.append(hash(text))
                yield mark_of(kind, text)

        self._kind, self.marks = kind, Marks.sort(marks())
        self._hashes = np.array(hashes, np.int64)
        self._hashes.sort()
        self._sorted = np.frombuffer(self.marks.data, f"S{MARK_NBYTES}")
        self.seen = np.zeros(len(self.marks), np.bool_)

    def __len__(self) -> int:
        return len(self.marks)

    def find(self, texts: Sequence[str | None]) -> NDArray[np.int64]:
        """Return the places in `texts` of those that are wanted, and note these in `seen`."""
        hashes = np.fromiter(map(hash, texts), np.int64, len(texts))
        likely = np.flatnonzero(_find_equal(self._hashes, hashes)[0])
        marks = [mark_of(self._kind, texts[number] or "") for number in likely.tolist()]
        is_wanted, places = _find_equal(self._sorted, np.array(marks, self._sorted.dtype))
        self.seen[places[is_wanted]] = True
        return likely[is_wanted]

    def unseen(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield those of some texts that are wanted, and were not seen."""
        missing = Marks(self._sorted[~self.seen].tobytes())
        yield from (text for text in texts if mark_of(self._kind, text) in missing)


def _find_equal(
    ordered: NDArray[Any], values: NDArray[Any]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which values are among `ordered` ones, and the place of each that is."""
    places = np.searchsorted(ordered, values)
    places[places == len(ordered)] = 0
    if not len(ordered):
        return np.zeros(len(values), np.bool_), places
    return ordered[places] == values, places
