"""Join the rows of a table with samples, by a name that both have: a key, a URL or the like.

DuckDB keeps the names and the columns of the rows, and the names of the samples, in bounded memory.
What has no room there waits in a folder of TMPDIR. That folder is the only one that DuckDB can
reach, and is deleted at the end; one that a killed process left is deleted by a later join.

Names are bytes, and are compared as such. Of several rows with one name, the first counts. Rows
without a name, and rows without a number that they need, are counted and left out.
"""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.errors import FullError, WorkError
from wdsprep.store.spool import spool_folder
from wdsprep.tables.column_conditions import numbers_of, whole_numbers
from wdsprep.tables.query import CONFIG, open_engine

NAME, SAMPLE, CHOICE = "name", "sample", "choice"
"""The columns of samples that are joined: a name, a number, and the rank of the name if any."""
NAMES = pa.large_binary()
SAMPLES = pa.schema([(NAME, NAMES), (SAMPLE, pa.int64()), (CHOICE, pa.int64())])
HASH = "CAST(hash(name) >> 1 AS BIGINT)"
READ_ROWS = 1 << 14
ROWS_AT_ONCE = 1 << 23
"""Rows that are compared, or sorted, at a time: DuckDB may fail if all do not fit into memory."""
PREFIX = "wdsprep-join-"
YOUNG_S = 60
"""Until a folder is so old, it may have no lock yet."""
FULL = "No space left on device", "Disk quota exceeded", "max_temp_directory_size"
"""What DuckDB says where a disk is full: it has no class for these errors."""
OUT_OF_MEMORY = "memory_limit"
"""The setting that DuckDB advises to raise, in errors of several classes."""


Matches = tuple[Ints, Ints, dict[str, pa.Array]]
"""Samples that have a row: their numbers, the numbers of their rows, and columns of these."""


class KeyJoin:
    """The rows of a table by name, which may be joined with samples.

    First `add` gets all rows, then `find_first` decides which of them count, then `match` finds
    those of samples, and `read` their columns. `rows` counts the rows, and `unnamed` those of them
    without a name. From `find_first` on, `lacking` counts the others that lack a number, `names`
    the different names, and `repeated` the rows with a name that an earlier row has.
    """

    def __init__(self, engine: duckdb.DuckDBPyConnection, folder: str) -> None:
        self._engine, self._folder = engine, folder
        self._columns: dict[str, tuple[str, pa.DataType]] = {}
        self._matched: Sequence[str] = ()
        self.rows = self.unnamed = self.lacking = self.names = self.repeated = 0
        self._ask("CREATE TABLE rows (name BLOB, number BIGINT)")

    def add(self, names: pa.Array, columns: Mapping[str, pa.Array]) -> None:
        """Add rows: their names, of which null and an empty one are none, and some columns.

        Columns hold numbers, or texts that are UTF-8. One that is not given is null in these rows.
        """
        names = names.cast(NAMES)  # DuckDB would read escapes in texts that become bytes
        is_named = pc.greater(pc.fill_null(pc.binary_length(names), 0), 0)
        numbers = whole_numbers(np.arange(self.rows, self.rows + len(names)))
        values = {self._column(name, column.type): column for name, column in columns.items()}
        rows = pa.table({"name": names, "number": numbers, **values}).filter(is_named)
        self.rows += len(names)
        self.unnamed += len(names) - len(rows)
        with self._registered(rows):
            self._ask("INSERT INTO rows BY NAME SELECT * FROM registered")

    def _column(self, name: str, kind: pa.DataType) -> str:
        """Return what a column is called in DuckDB, which has it from now on."""
        if name not in self._columns:
            own = f"c{len(self._columns)}"
            self._columns[name] = own, kind
            with self._registered(pa.table({own: pa.nulls(0, kind)})):
                (described,) = self._ask("DESCRIBE registered")
            self._ask(f"ALTER TABLE rows ADD COLUMN {own} {described[1]}")
        return self._columns[name][0]

    def find_first(self, needs: Collection[str] = ()) -> None:
        """Find the first row of each name, of those that have a number in all columns of `needs`.

        NaN is no number, also as a text that Python reads as NaN. Few names have several rows: they
        are looked for by the hashes of all.
        """
        tests = [self._has_number(*self._columns[name]) for name in needs]
        good = f"rows WHERE {' AND '.join(['true', *tests])}"
        self._ask("CREATE TABLE repeats (name BLOB, number BIGINT)")
        self._ask("CREATE TABLE later (number BIGINT)")
        parts = self.rows // ROWS_AT_ONCE + 1
        for part in range(parts):
            named = f"SELECT *, {HASH} AS hash FROM {good} AND hash % {parts} = {part}"
            asked = f"SELECT hash FROM ({named})"
            columns = (numbers_of(batch.column(0)) for batch in self._batches(asked, READ_ROWS))
            hashes = np.concatenate([np.zeros(0, np.int64), *columns])
            hashes.sort()
            repeated = hashes[1:][hashes[1:] == hashes[:-1]]
            repeated = repeated[np.diff(repeated, prepend=-1) > 0]
            if len(repeated):
                with self._registered(pa.table({"hash": whole_numbers(repeated)})):
                    self._ask(
                        f"INSERT INTO repeats SELECT name, min(number) FROM ({named}) "
                        "SEMI JOIN registered USING (hash) GROUP BY name HAVING count(*) > 1"
                    )
                self._ask(
                    f"INSERT INTO later SELECT n.number FROM ({named}) n "
                    "JOIN repeats USING (name) WHERE n.number > repeats.number"
                )
        (self.repeated,) = self._numbers("SELECT count(*) FROM later")
        no_later = " AND number NOT IN (FROM later)" if self.repeated else ""
        self._ask(f"CREATE VIEW firsts AS SELECT * FROM {good}{no_later}")
        (self.names,) = self._numbers("SELECT count(*) FROM firsts")
        self.lacking = self.rows - self.unnamed - self.names - self.repeated

    def _has_number(self, column: str, kind: pa.DataType) -> str:
        if pa.types.is_floating(kind):
            return f"{column} IS NOT NULL AND NOT isnan({column})"
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        is_nan = f" AND NOT contains(lower({column}), 'nan')" if is_text else ""
        return f"{column} IS NOT NULL{is_nan}"

    def match(self, samples: Iterable[pa.RecordBatch], columns: Sequence[str] = ()) -> int:
        """Find the rows of samples, which have a `name` and a number (`sample`), in any order.

        Return how many samples have a row. A sample may come more than once, with several names:
        the one with the lowest `choice` that a row has counts. To `read` some of these `columns`
        alone then takes no other join, unless there are choices.
        """
        raised: list[BaseException] = []
        batches = _cast_samples(samples, raised)
        first = next(batches, None)
        has_choices = first is not None and first[CHOICE].null_count < len(first)
        self._matched = [] if has_choices else columns
        pairs = (
            f"s.sample, r.number AS row{self._select('r', self._matched)} "
            "FROM registered s JOIN firsts r ON s.name = r.name"
        )
        if has_choices:
            pairs = (
                f"sample, arg_min(row, choice) AS row FROM (SELECT choice, {pairs}) GROUP BY sample"
            )
        reader = pa.RecordBatchReader.from_batches(
            SAMPLES, chain([first] if first else [], batches)
        )
        with self._registered(reader):
            try:
                self._ask(f"CREATE OR REPLACE TABLE pairs AS SELECT {pairs}")
            except duckdb.Error:
                if raised:  # DuckDB only tells its text
                    raise raised[0] from None
                raise
        (count,) = self._numbers("SELECT count(*) FROM pairs")
        return count

    def read(
        self, columns: Sequence[str] = (), rows: int = READ_ROWS, *, is_ordered: bool = True
    ) -> Iterator[Matches]:
        """Yield the samples that have a row, `rows` at a time.

        They come by number, or if they need not be ordered, `ROWS_AT_ONCE` numbers after the other.
        """
        if {*columns} <= {*self._matched}:
            source, values = "pairs p", self._select("p", columns)
        else:
            source, values = "rows r JOIN pairs p ON r.number = p.row", self._select("r", columns)
        order = " ORDER BY 1" if is_ordered else ""
        (last,) = self._numbers("SELECT max(sample) FROM pairs")
        for start in range(0, last + 1, ROWS_AT_ONCE):
            range_ = f"p.sample BETWEEN {start} AND {start + ROWS_AT_ONCE - 1}"
            asked = f"SELECT p.sample, p.row{values} FROM {source} WHERE {range_}{order}"
            for batch in self._batches(asked, rows):
                samples, numbers, *arrays = batch.columns
                own = dict(zip(columns, arrays, strict=True))
                yield numbers_of(samples), numbers_of(numbers), own

    def _select(self, table: str, columns: Sequence[str]) -> str:
        return "".join(f", {table}.{self._columns[name][0]}" for name in columns)

    def digest(self, column: str) -> str:
        """Return a digest of all names, each with the text that its first row has in a column.

        It does not depend on the order of the rows.
        """
        text = f"encode({self._columns[column][0]})"
        pair = f"CAST(octet_length(name) || ':' AS BLOB) || name || {text}"
        ((number,),) = self._ask(f"SELECT bit_xor(md5_number({pair})) FROM firsts")
        return hex_digest(f"{number or 0:032x}".encode())

    def repeated_names(self, limit: int) -> tuple[int, list[bytes]]:
        """Return how many names several rows have, and the first of them."""
        return self._some("repeats", limit)

    def unused(self, limit: int) -> tuple[int, list[bytes]]:
        """Return how many names no sample has that was matched, and the first of them."""
        return self._some("firsts ANTI JOIN pairs ON firsts.number = pairs.row", limit)

    def _some(self, source: str, limit: int) -> tuple[int, list[bytes]]:
        (count,) = self._numbers(f"SELECT count(*) FROM {source}")
        first = f"SELECT name FROM {source} ORDER BY number LIMIT {limit:d}"
        return count, [name for (name,) in self._ask(first)] if count else []

    def _numbers(self, sql: str) -> tuple[int, ...]:
        (numbers,) = self._ask(sql)
        return tuple(int(number or 0) for number in numbers)

    @contextmanager
    def _registered(self, rows: pa.Table | pa.RecordBatchReader) -> Iterator[None]:
        self._engine.register("registered", rows)
        try:
            yield
        finally:
            self._engine.unregister("registered")

    def _batches(self, sql: str, rows: int) -> Iterator[pa.RecordBatch]:
        with self._explain_limits():
            yield from self._engine.sql(sql).to_arrow_reader(rows)

    def _ask(self, sql: str) -> list[Any]:
        with self._explain_limits():
            return self._engine.execute(sql).fetchall()

    @contextmanager
    def _explain_limits(self) -> Iterator[None]:
        try:
            yield
        except duckdb.Error as error:
            if any(words in str(error) for words in FULL):
                raise _full_error(self._folder) from error
            if OUT_OF_MEMORY in str(error):
                raise WorkError(
                    f"a table with {self.rows:,} rows or more cannot be joined in the "
                    f"{CONFIG['memory_limit']} that DuckDB may take: give one with fewer rows"
                ) from error
            raise


def _cast_samples(
    batches: Iterable[pa.RecordBatch], raised: list[BaseException]
) -> Iterator[pa.RecordBatch]:
    """Yield batches of samples with the columns of `SAMPLES`. Note an error of `batches`."""
    try:
        for batch in batches:
            missing = pa.nulls(len(batch), pa.int64())
            columns = {name: batch[name] for name in batch.schema.names}
            arrays = [columns.get(field.name, missing).cast(field.type) for field in SAMPLES]
            yield pa.record_batch(arrays, schema=SAMPLES)
    except BaseException as error:
        raised.append(error)
        raise


@contextmanager
def open_join() -> Iterator[KeyJoin]:
    """Yield a join without rows. What it keeps on disk is deleted at the end."""
    folder = spool_folder()
    with _temporary_folder(folder) as path, open_engine(path, keeps_order=False) as engine:
        yield KeyJoin(engine, folder)


@contextmanager
def _temporary_folder(folder: str) -> Iterator[str]:
    """Make a folder that is deleted afterwards, and delete those of processes that were killed.

    The lock on a folder tells that its process is alive. On a disk without locks none is deleted.
    """
    for left in Path(folder).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > YOUNG_S:
                with _open_folder(str(left)) as fd:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left)
    try:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _full_error(folder) from error
    try:
        with _open_folder(path) as fd:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _open_folder(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)


def _full_error(folder: str) -> FullError:
    return FullError(
        f"{folder} is full, where rows of a table are joined, which takes three times their size: "
        "make room there, or set TMPDIR to another folder"
    )
