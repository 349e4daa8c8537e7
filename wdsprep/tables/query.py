"""Ask tables which of their rows meet a condition.

DuckDB answers by the SQL of `condition_sql`, and the closures of the condition answer for the rows
that are left to them. DuckDB gets Arrow and gives Arrow: it has no files (but those of a folder in
which a join waits), network, extensions, variables of Python or settings to change, and no threads
of its own, so a process that is forked from this one ends as any other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from wdsprep.dataset.condition_syntax import Condition
from wdsprep.dataset.sample_table import REST, ROW
from wdsprep.dataset.samples import META, PathParts, parse_json, value_at_path
from wdsprep.errors import FormatError
from wdsprep.sources.tables.parquet import OpenParquet
from wdsprep.tables.condition_sql import Column, Selection, compile_condition, kind_of

MOST_ROWS = 50_000
"""Rows of a query: planning it takes some milliseconds, whatever it is asked of."""
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
    "memory_limit": "1GB",
    "arrow_large_buffer_size": True,  # the texts of a batch may have more than 2 GB
}
Mask = NDArray[np.bool_]
Facts = dict[str, Any]
Value = TypeVar("Value")


def open_engine(folder: str = "") -> duckdb.DuckDBPyConnection:
    """Return a connection to a DuckDB without any data, for one thread at a time.

    What has no room in its memory waits in `folder`, if one is given.
    """
    engine = duckdb.connect(":memory:", config={**CONFIG, "temp_directory": folder})
    engine.execute("SET lock_configuration = true")
    return engine


# `pa.array` and `to_numpy` would import pandas, which takes 0.3 s and 40 MB.
def mask_of(truths: pa.ChunkedArray) -> Mask:
    """Return truths without nulls as an array of NumPy."""
    wholes = truths.cast(pa.uint8()).combine_chunks()
    values = np.frombuffer(wholes.buffers()[1], np.uint8, len(wholes), wholes.offset)
    return values.astype(np.bool_)


def whole_numbers(values: NDArray[np.int64], is_null: Mask | None = None) -> pa.Array:
    """Return numbers as an array of Arrow, with nulls where a mask is true."""
    valid = None if is_null is None else pa.py_buffer(np.packbits(~is_null, bitorder="little"))
    return pa.Array.from_buffers(pa.int64(), len(values), [valid, pa.py_buffer(values)])


class Query:
    """A condition to ask tables. `unseen` are the names that no row so far has a value for."""

    def __init__(self, condition: Condition, engine: duckdb.DuckDBPyConnection) -> None:
        self.condition = condition
        self.unseen = set(condition.names)
        self._engine = engine
        self._compiled: dict[tuple[tuple[str, Column], ...], Selection | None] = {}

    @cached_property
    def _wanted(self) -> Set[str]:
        return {str(path[0]) for path in self.condition.names}

    def read(self, file: OpenParquet) -> pa.Table:
        """Return the columns of a table of samples that the condition needs.

        What a row has in no column may be in `rest` or in `meta`, which are read only then.
        """
        if self._wanted <= {*file.schema.names} - {REST, ROW}:
            table = file.read(self._wanted)
            if not any(table.column(name).null_count for name in self._wanted - {META}):
                return table
        return file.read({*self._wanted, META, REST} - {ROW})

    def may_lack(self, table: pa.Table) -> bool:
        """Return whether some row of a table may have no value for a name."""
        return any(
            len(path) > 1
            or path[0] not in table.column_names
            or table.column(path[0]).null_count > 0
            for path in self.condition.names
        )

    def masks(self, tables: Iterable[Sequence[pa.Table]]) -> Iterator[Mask]:
        """Yield which rows meet the condition, of tables that stand side by side.

        Tables that stand side by side have the same rows in the same order. A name has the value
        that the first of them with a value for it has. Those of the same columns that follow one
        another are asked together.
        """
        waiting: list[pa.Table] = []
        for rows in map(self._join_sides, tables):
            is_full = (
                sum(map(len, waiting)) + len(rows) > MOST_ROWS
                or sum(one.nbytes for one in waiting) + rows.nbytes > MOST_NBYTES
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
            names = [name for name in table.column_names if name in {META, REST, *self._wanted}]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise FormatError(f"a table has two columns {twice[0]}: leave one out")
            columns |= {f"{number} {name}": table.column(name) for name in names}
        if not columns:  # any column tells how many rows there are
            columns = dict(zip([""], chain.from_iterable(t.columns for t in tables), strict=False))
        return pa.Table.from_arrays([*columns.values()], [*columns])

    def _ask_together(self, tables: Sequence[pa.Table]) -> Iterator[Mask]:
        rows = pa.concat_tables(tables)
        fitting = MOST_NBYTES * len(rows) // max(rows.nbytes, 1)
        step = max(1, min(fitting, MOST_ROWS))
        slices = [rows.slice(start, step) for start in range(0, max(len(rows), 1), step)]
        found = np.concatenate(list(map(self._ask, slices)))
        yield from np.split(found, np.cumsum([len(table) for table in tables])[:-1])

    def _ask(self, rows: pa.Table) -> Mask:
        everything = np.arange(len(rows))
        if not rows.num_columns:
            return np.zeros(0, np.bool_)
        if (selection := self._compile(rows)) is None:
            return self._decide(rows, everything)
        columns = [f"c{number}" for number in range(rows.num_columns)]
        numbers = whole_numbers(everything)
        self._engine.register("rows", rows.rename_columns(columns).append_column("n", numbers))
        asked = selection.sees if self.unseen else selection.meets
        answer = self._engine.sql(asked).to_arrow_table()
        self._engine.unregister("rows")
        if not answer["n"].equals(pa.chunked_array([numbers])):  # as after a list of many items
            answer = answer.sort_by("n")
        meets, *sees = answer.columns[1:]
        for path, has_value in zip(self.condition.names, sees, strict=False):
            if path in self.unseen and self._is_seen(path, rows, has_value):
                self.unseen.discard(path)
        found = mask_of(pc.and_kleene(meets, meets.is_valid()))
        if meets.null_count:
            left = everything[mask_of(meets.is_null())]
            found[left] = self._decide(rows, left)
        return found

    def _compile(self, rows: pa.Table) -> Selection | None:
        columns = {
            name: Column(f"c{number}", kind_of(values.type), values.null_count > 0)
            for number, (name, values) in enumerate(
                zip(rows.column_names, rows.columns, strict=True)
            )
            if values.null_count < len(values)
        }
        key = tuple(columns.items())
        if key not in self._compiled:
            self._compiled[key] = compile_condition(self.condition, _by_source(columns))
        return self._compiled[key]

    def _is_seen(self, path: PathParts, rows: pa.Table, has_value: pa.ChunkedArray) -> bool:
        """Return whether one of the rows has a value for a name."""
        if pc.any(has_value).as_py():
            return True
        left = np.flatnonzero(mask_of(has_value.is_null()))
        return any(_first_value(facts, path) is not None for facts in _facts(rows, left))

    def _decide(self, rows: pa.Table, numbers: NDArray[np.int64]) -> Mask:
        """Return whether these rows meet the condition, by its closures."""

        def holds(facts: Sequence[Facts]) -> bool:
            values = [_first_value(facts, path) for path in self.condition.names]
            if self.unseen:
                pairs = zip(self.condition.names, values, strict=True)
                self.unseen.difference_update(path for path, value in pairs if value is not None)
            return self.condition.holds(values)

        return np.fromiter(map(holds, _facts(rows, numbers)), np.bool_, len(numbers))


def read_texts(file: OpenParquet, name: str) -> pa.ChunkedArray:
    """Return what a table of samples says of a name as texts: its column, else from the JSON."""
    if name in file.schema.names:
        column = file.read([name]).column(name)
        if not column.null_count:
            return column.cast(pa.string())
    return texts_in(file.read({name, META, REST} - {ROW}), name)


def texts_in(rows: pa.Table, name: str) -> pa.ChunkedArray:
    """Return what rows of tables of samples say of a name as texts: in a column, or in JSON.

    Only the JSON of rows that lack it in the column, and that has the name, is parsed.
    """
    column = rows[name] if name in rows.column_names else pa.chunked_array([pa.nulls(len(rows))])
    texts = column.cast(pa.string())
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
        facts[name] = _parse(facts[name])
    rest = facts.pop(REST, None)
    return {**rest, **facts} if isinstance(rest, dict) else facts


def _first_value(sources: Iterable[Facts], path: PathParts) -> Any:
    values = (value_at_path(facts, path) for facts in sources)
    return next((value for value in values if value is not None), None)


def _parse(text: Any) -> Any:
    """Return what a JSON text says, or None if it is none; anything but a text as it is."""
    try:
        return parse_json(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return None
