"""Join the rows of a table with samples, by a name that both have: a key, a URL or the like.

Rows and samples wait on disk, divided by the hashes of their names into parts that fit into memory.
Arrow finds the equal names of each part. The pairs wait on disk again, divided by the numbers of
their samples. What fits into memory is one part, which does not go to the disk.

For tables of 10 million rows, joins of DuckDB took 1.2 times (by key) and 1.9 times (by URL) the
processor time of all this, and more than twice its memory: they spill whole rows, several times.
Look at that again when they spill hashes and numbers of rows alone.

Names are bytes, and are compared as such. Of several rows with one name, the first counts. Rows
without a name, and rows without a number that they need, are counted and left out.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.store.spool import Place, Spool
from wdsprep.tables.column_conditions import Mask, numbers_of, whole_numbers
from wdsprep.tables.query import open_engine

NAME, SAMPLE, CHOICE = "name", "sample", "choice"
"""The columns of samples that are joined: a name, a number, and the rank of the name if any."""
NAMES = pa.large_binary()
NUMBER = "number"
"""The column of rows that has the number of each, in the order in which they were added."""
ROWS = pa.schema([(NAME, NAMES), (NUMBER, pa.int64())])
SAMPLES = pa.schema([(NAME, NAMES), (SAMPLE, pa.int64())])
PARTS = 256
MOST_NBYTES = 16 << 20
"""The most bytes of rows that wait in memory: more are divided into parts on disk."""
READ_NBYTES = 128 << 20
"""About how many bytes of a part are read at once."""
HASHES = "SELECT hash(name) FROM registered"
XOR_OF_DIGESTS = (
    "SELECT bit_xor(md5_number(CAST(octet_length(name) || ':' AS BLOB) || name || encode(text))) "
    "FROM registered"
)
WAITING = "rows of a table wait there to be joined, which takes three times their size"

Divide = Callable[[pa.Table], NDArray[np.uint8]]
"""What returns the part that each row is in."""
Matches = tuple[Ints, Ints, dict[str, pa.Array]]
"""Samples that have a row: their numbers, the numbers of their rows, and columns of these."""


class _Parts:
    """Rows that wait: on disk, in parts, once they take more than `MOST_NBYTES`."""

    def __init__(self, schema: pa.Schema, divide: Divide) -> None:
        """Prepare for rows with the columns of `schema` at least."""
        self.schema, self._divide = schema, divide
        self._spool = Spool(WAITING)
        self._waiting: list[pa.Table] = []
        self._nbytes = 0
        self._pieces: list[tuple[pa.Schema, list[Place]]] = []

    @property
    def count(self) -> int:
        """Return how many parts there are: one if no rows are on disk."""
        return PARTS if self._pieces else 1

    def put(self, rows: pa.Table) -> None:
        """Add rows. A column that only others have is null in these."""
        self.schema = pa.unify_schemas([self.schema, rows.schema])
        self._waiting.append(rows)
        self._nbytes += rows.nbytes
        if self._nbytes > MOST_NBYTES:
            self.write()

    def write(self) -> None:
        """Divide the rows that wait in memory into parts on disk."""
        rows, self._waiting, self._nbytes = self._concatenate(self._waiting), [], 0
        parts = self._divide(rows)
        order = whole_numbers(np.argsort(parts, kind="stable"))
        columns = [column.combine_chunks().take(order) for column in rows.columns]
        ordered = pa.record_batch(columns, schema=rows.schema)
        ends = np.cumsum(np.bincount(parts, minlength=PARTS)).tolist()
        places = [
            self._spool.put(memoryview(ordered.slice(start, end - start).serialize()))
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
        self._pieces.append((rows.schema, places))

    def read(self, part: int) -> Iterator[pa.Table]:
        """Yield one table of the rows of a part, or several if they are large, in their order."""
        if self._pieces and self._waiting:
            self.write()
        tables, nbytes = [*self._waiting], 0
        for schema, places in self._pieces:
            if nbytes > READ_NBYTES:
                yield self._concatenate(tables)
                tables, nbytes = [], 0
            data = pa.py_buffer(self._spool.get(places[part]))
            tables.append(pa.Table.from_batches([pa.ipc.read_record_batch(data, schema)]))
            nbytes += data.size
        yield self._concatenate(tables)

    def _concatenate(self, tables: Iterable[pa.Table]) -> pa.Table:
        every = [self.schema.empty_table(), *tables]
        return pa.concat_tables(every, promote_options="default")

    def close(self) -> None:
        self._spool.close()


class KeyJoin:
    """The rows of a table by name, which may be joined with samples.

    First `add` gets all rows, then `find_first` decides which of them count, then `match` finds
    those of samples, and `read` their columns. `rows` counts the rows, and `unnamed` those of them
    without a name. From `find_first` on, `lacking` counts the others that lack a number, `names`
    the different names, and `repeated` the rows with a name that an earlier row has.
    """

    def __init__(self, engine: duckdb.DuckDBPyConnection) -> None:
        self._engine = engine
        self._rows = _Parts(ROWS, self._divide_by_names)
        self._pairs = _Parts(SAMPLES, _leave_whole)  # with no rows until samples are matched
        self._needs: Collection[str] = ()
        self._has_all = False  # that each row is known to be a first one
        self.rows = self.unnamed = self.lacking = self.names = self.repeated = 0

    def add(self, names: pa.Array, columns: Mapping[str, pa.Array]) -> None:
        """Add rows: their names, of which null and an empty one are none, and some columns.

        Columns hold numbers, or texts that are UTF-8. One that is not given is null in these rows.
        """
        numbers = whole_numbers(np.arange(self.rows, self.rows + len(names)))
        values = {_column(name): column for name, column in columns.items()}
        rows = _named(pa.table({NAME: names.cast(NAMES), NUMBER: numbers, **values}))
        self.rows += len(names)
        self.unnamed += len(names) - len(rows)
        self._rows.put(rows)

    def find_first(self, needs: Collection[str] = ()) -> None:
        """Find the first row of each name, of those that have a number in all columns of `needs`.

        NaN is no number, also as a text that Python reads as NaN.
        """
        self._needs = needs
        good = 0
        for firsts, times in self._firsts():
            self.names += len(firsts)
            good += int(times.sum())
        self.repeated, self.lacking = good - self.names, self.rows - self.unnamed - good
        self._has_all = not (self.repeated or self.lacking)

    def _firsts(self) -> Iterator[tuple[pa.Table, Ints]]:
        """Yield for each part the first rows of its names, and how many rows have each name."""
        for part in range(self._rows.count):
            if self._has_all:
                rows = pa.concat_tables(self._rows.read(part))
                yield rows, np.ones(len(rows), np.int64)
                continue
            firsts, times = self._rows.schema.empty_table(), np.zeros(0, np.int64)
            for rows in self._rows.read(part):
                for name in self._needs:
                    rows = rows.filter(_has_number(rows[_column(name)]))
                rows = pa.concat_tables([firsts, rows])
                # Names get numbers in the order in which they come first.
                names = rows[NAME].combine_chunks().dictionary_encode()
                numbers = numbers_of(names.indices)
                is_first = np.diff(np.maximum.accumulate(numbers), prepend=-1) > 0
                counts = np.bincount(numbers)
                counts[: len(times)] += times - 1
                firsts, times = _where(rows, is_first), counts
            yield firsts, times

    def match(self, samples: Iterable[pa.RecordBatch]) -> bool:
        """Find the rows of samples, to `read` them in the order of the samples.

        Return whether there is any.

        Samples have a `name` and a number (`sample`). One may come more than once, with several
        names: the one with the lowest `choice` that a row has counts.
        """
        self._pairs.close()
        fields = [field for field in self._rows.schema if field.name != NAME]
        schema = pa.schema([SAMPLES.field(SAMPLE), *fields])
        is_divided, last, is_any = self._rows.count > 1, 0, False

        def divide_by_samples(rows: pa.Table) -> NDArray[np.uint8]:  # in their order
            return (_numbers(rows, SAMPLE) * PARTS // (last + 1)).astype(np.uint8)

        self._pairs = pairs = _Parts(schema, divide_by_samples)
        divide = self._divide_by_names if is_divided else _leave_whole
        with closing(_Parts(SAMPLES, divide)) as waiting:
            for batch in samples:
                names = batch[NAME].cast(NAMES)
                others = {name: batch[name] for name in batch.schema.names if name != NAME}
                waiting.put(_named(pa.table({NAME: names, **others})))
                last = max(last, pc.max(batch[SAMPLE]).as_py() or 0)
            if is_divided:
                waiting.write()
            for part, (firsts, _) in enumerate(self._firsts()):
                names, columns = firsts[NAME].combine_chunks(), firsts.drop_columns(NAME)
                for rows in waiting.read(part):
                    places = pc.index_in(rows[NAME], value_set=names)
                    matched = rows.drop_columns(NAME).filter(places.is_valid())
                    is_any = is_any or bool(len(matched))
                    beside = columns.take(places.drop_null())
                    both = [*matched.column_names, *beside.column_names]
                    pairs.put(pa.table([*matched.columns, *beside.columns], names=both))
        return is_any

    def read(self, columns: Collection[str] = ()) -> Iterator[Matches]:
        """Yield the samples that have a row, by number, with columns of the rows."""
        for part in range(self._pairs.count):
            pairs = pa.concat_tables(self._pairs.read(part))
            samples = _numbers(pairs, SAMPLE)
            if CHOICE in pairs.column_names:
                order = np.lexsort((_numbers(pairs, CHOICE), samples))
                order = order[np.diff(samples[order], prepend=-1) > 0]
            else:
                order = np.argsort(samples)
            pairs = pairs.take(whole_numbers(order))
            values = {name: pairs[_column(name)].combine_chunks() for name in columns}
            yield _numbers(pairs, SAMPLE), _numbers(pairs, NUMBER), values

    def digest(self, column: str) -> str:
        """Return a digest of all names, each with the text that its first row has in a column.

        It does not depend on the order of the rows.
        """
        number = 0
        for firsts, _ in self._firsts():
            rows = pa.table({NAME: firsts[NAME], "text": firsts[_column(column)]})
            digests = self._ask(rows, XOR_OF_DIGESTS).fetchall()
            number ^= int(digests[0][0] or 0)
        return hex_digest(f"{number:032x}".encode())

    def repeated_names(self, limit: int) -> tuple[int, list[bytes]]:
        """Return how many names several rows have, and the first of them."""
        if not self.repeated:
            return 0, []
        return self._names_where(lambda _, times: times > 1, limit)

    def unused(self, limit: int) -> tuple[int, list[bytes]]:
        """Return how many names no sample has that was matched, and the first of them.

        This takes a byte for each row.
        """
        is_unused = np.ones(self.rows, np.bool_)
        for _, numbers, _ in self.read():
            is_unused[numbers] = False
        return self._names_where(lambda numbers, _: is_unused[numbers], limit)

    def _names_where(
        self, is_wanted: Callable[[Ints, Ints], Mask], limit: int
    ) -> tuple[int, list[bytes]]:
        """Return how many names meet a condition on their rows and times, and the first of them."""
        count, lowest = 0, ROWS.empty_table()
        for firsts, times in self._firsts():
            wanted = _where(firsts.select(ROWS.names), is_wanted(_numbers(firsts, NUMBER), times))
            if not len(wanted):
                continue
            count += len(wanted)
            lowest = pa.concat_tables([lowest, wanted]).sort_by(NUMBER).slice(0, limit)
        return count, lowest[NAME].to_pylist()

    def _divide_by_names(self, rows: pa.Table) -> NDArray[np.uint8]:
        hashes = self._ask(rows.select([NAME]), HASHES).to_arrow_table().column(0)
        return (numbers_of(hashes.combine_chunks()) % PARTS).astype(np.uint8)

    def _ask(self, rows: pa.Table, sql: str) -> duckdb.DuckDBPyRelation:
        self._engine.register("registered", rows)
        return self._engine.sql(sql)

    def close(self) -> None:
        self._rows.close()
        self._pairs.close()


def _column(name: str) -> str:
    """Return what a column of a table is called beside those that all rows have."""
    return f"column {name}"


def _numbers(rows: pa.Table, name: str) -> Ints:
    return numbers_of(rows[name].combine_chunks())


def _where(rows: pa.Table, mask: Mask) -> pa.Table:
    return rows if mask.all() else rows.take(whole_numbers(np.flatnonzero(mask)))


def _named(rows: pa.Table) -> pa.Table:
    """Return the rows that have a name."""
    lengths = pc.binary_length(rows[NAME])
    if not lengths.null_count and pc.min(lengths).as_py():
        return rows
    return rows.filter(pc.greater(lengths, 0))  # which leaves out nulls


def _has_number(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_floating(column.type):
        return pc.invert(column.is_null(nan_is_null=True))
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        is_nan = pc.match_substring(column, "nan", ignore_case=True)
        return pc.invert(pc.fill_null(is_nan, True))
    return column.is_valid()


def _leave_whole(rows: pa.Table) -> NDArray[np.uint8]:
    return np.zeros(len(rows), np.uint8)


@contextmanager
def open_join() -> Iterator[KeyJoin]:
    """Yield a join without rows. What it keeps on disk is deleted at the end."""
    with open_engine() as engine, closing(KeyJoin(engine)) as join:
        yield join
