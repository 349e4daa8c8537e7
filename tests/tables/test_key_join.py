"""Rows of a table are joined with samples by name, in bounded memory, and leave nothing behind."""

import fcntl
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from wdsprep.errors import FullError, SourceError, WorkError
from wdsprep.tables import key_join, query
from wdsprep.tables.key_join import KeyJoin, open_join

NAMES = [b"\0", b"a\0", b"a", b"\xff", b"\\xFF", b"\xed\xa0\x80", b"07", b"7", b"x" * 70_000]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def samples_of(
    names: Sequence[bytes | None], choices: Sequence[int] | None = None
) -> pa.RecordBatch:
    numbers = range(len(names)) if choices is None else [n // 2 for n in range(len(names))]
    columns = {"name": pa.array(names, pa.binary()), "sample": pa.array([*numbers])}
    return pa.record_batch(columns if choices is None else columns | {"choice": pa.array(choices)})


def read(join: KeyJoin, columns: Sequence[str] = ()) -> list[tuple[object, ...]]:
    return [
        row
        for samples, rows, found in join.read(columns, 7)
        for row in zip(
            samples.tolist(),
            rows.tolist(),
            *(found[name].to_pylist() for name in columns),
            strict=True,
        )
    ]


@pytest.mark.parametrize("rows_at_once", [key_join.ROWS_AT_ONCE, 7])
def test_each_sample_gets_the_first_row_with_its_name_byte_by_byte(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_join, "ROWS_AT_ONCE", rows_at_once)
    rng = random.Random(5)
    rows = [*NAMES, *rng.choices([*NAMES, None, b""], k=60)]
    samples = rng.choices([*NAMES, None, b"", b"lacking"], k=200)
    with open_join() as join:
        for at in range(0, len(rows), 20):
            some = pa.array(rows[at : at + 20], pa.binary())
            join.add(some, {"name": pa.array(range(at, at + len(some)))})
        join.find_first()
        assert join.match([samples_of(samples)]) == len(read(join))
        first = {name: rows.index(name) for name in NAMES}
        assert read(join, ["name"]) == [
            (number, first[name], first[name])
            for number, name in enumerate(samples)
            if name in first
        ]
        unnamed = sum(not name for name in rows)
        assert (join.rows, join.unnamed, join.names) == (len(rows), unnamed, len(NAMES))
        assert join.repeated == len(rows) - unnamed - len(NAMES)
        twice = [name for name in NAMES if rows.count(name) > 1]
        assert join.repeated_names(3) == (len(twice), twice[:3])
        join.match([samples_of([b"7", b"a"])])
        assert join.unused(2) == (len(NAMES) - 2, [b"\0", b"a\0"])


def test_a_row_that_lacks_a_number_leaves_its_name_to_a_later_one() -> None:
    cells = [None, "nan", " +NaN", "0.5", "inf"]
    with open_join() as join:
        join.add(pa.array(["a"] * 2), {"x": pa.array([1.0, 2.0])})
        join.add(pa.array(["a"] * 5), {"cell": pa.array(cells), "x": pa.array([1.0] * 5)})
        join.add(pa.array(["b"] * 3), {"x": pa.array([None, float("nan"), 3.0])})
        join.find_first(["cell", "x"])
        assert (join.names, join.repeated, join.lacking) == (1, 1, 8)
        join.match([samples_of([b"b", b"a", b"a"])])
        assert read(join, ["cell"]) == [(1, 5, "0.5"), (2, 5, "0.5")]


def test_of_several_names_of_a_sample_the_first_that_a_row_has_counts() -> None:
    names = [b"007", b"7", b"08", b"8", b"09", b"9"]
    with open_join() as join:
        join.add(pa.array(["9", "8", "7", "007"]), {})
        join.find_first()
        assert join.match([samples_of(names, [0, 1] * 3)]) == 3
        assert read(join) == [(0, 3), (1, 1), (2, 0)]
        assert join.unused(5) == (1, [b"7"])


@pytest.mark.parametrize("samples", [[], [samples_of([])], [samples_of([b"a", None])]])
def test_a_join_of_nothing_is_empty(samples: list[pa.RecordBatch]) -> None:
    with open_join() as join:
        join.find_first()
        assert (join.match(samples), read(join), join.unused(1)) == (0, [], (0, []))


# --- what has no room in memory
def many(count: int) -> Iterator[pa.RecordBatch]:
    """Samples whose names take 100 bytes each."""
    for at in range(0, count, 10_000):
        names = [b"%099d." % (number * 7 % count) for number in range(at, at + 10_000)]
        yield pa.record_batch({"name": names, "sample": np.arange(at, at + 10_000)})


def join_many(join: KeyJoin, count: int) -> None:
    for batch in many(count):
        join.add(batch["name"], {"double": pa.array(batch["sample"].to_numpy() * 2)})
    join.find_first(["double"])
    assert join.match(many(count)) == count


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(query.CONFIG, "memory_limit", "32MB")


@pytest.mark.usefixtures("small_memory")
def test_what_has_no_room_waits_in_a_folder_that_is_deleted(folder: Path) -> None:
    with open_join() as join:
        join_many(join, 300_000)
        (own,) = folder.iterdir()
        assert sum(file.stat().st_size for file in own.iterdir()) > 4_000_000
        at = 0
        for samples, _, columns in join.read(["double"]):
            assert samples.tolist() == [*range(at, at + len(samples))]
            assert columns["double"].to_numpy().tolist() == (samples * 2).tolist()
            at += len(samples)
        assert at == 300_000
    assert not [*folder.iterdir()]


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize("limited", [True, False])
def test_a_full_disk_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limited: bool
) -> None:
    """DuckDB stops by itself before the disk is full, unless others fill it at the same time."""
    if limited:
        monkeypatch.setitem(query.CONFIG, "max_temp_directory_size", "1MB")
    with pytest.raises(FullError) as caught, open_join() as join:  # noqa: PT012
        if not limited:
            monkeypatch.setattr(join, "_engine", FullEngine(join._engine))
        join_many(join, 300_000)
    assert str(caught.value) == (
        f"{folder} is full, where rows of a table are joined, which takes three times their size: "
        "make room there, or set TMPDIR to another folder"
    )
    assert not [*folder.iterdir()]


def test_a_table_that_memory_cannot_hold_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(query.CONFIG, "memory_limit", "1500KB")
    line = "rows or more cannot be joined in the 1500KB that DuckDB may take: give one with fewer"
    with pytest.raises(WorkError, match=line), open_join() as join:
        join_many(join, 100_000)
    assert not [*folder.iterdir()]


class FullEngine:
    """DuckDB over a disk that others have filled."""

    def __init__(self, engine: duckdb.DuckDBPyConnection) -> None:
        self.register, self.unregister = engine.register, engine.unregister

    def execute(self, asked: str) -> None:
        raise duckdb.IOException(f'Could not write file "{asked}": No space left on device')


def test_a_fault_in_the_samples_comes_as_it_was_raised() -> None:
    def broken() -> Iterable[pa.RecordBatch]:
        yield samples_of([b"a"])
        raise SourceError("a shard is gone: bring it back")

    with open_join() as join:
        join.add(pa.array(["a"]), {})
        join.find_first()
        with pytest.raises(SourceError, match=r"^a shard is gone: bring it back$"):
            join.match(broken())
        assert join.match([samples_of([b"b", b"a"])]) == 1


def test_folders_that_killed_processes_left_are_deleted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import os, time\nfrom wdsprep.tables.key_join import open_join\n"
        "with open_join():\n print(1, flush=True)\n time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (other,) = folder.iterdir()
        os.utime(other, (time.time() - 100, time.time() - 100))
        with open_join():
            assert other.exists()  # its process is alive
        process.kill()
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", no_locks)
        with open_join():
            assert other.exists()  # nobody can tell here
    with open_join():
        assert not other.exists()
    assert not [*folder.iterdir()]


def no_locks(*_: object) -> None:
    raise OSError("no locks here")


@pytest.mark.parametrize(
    "asked",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "COPY (SELECT 1) TO '{folder}/made-by-duckdb'",
        "COPY (SELECT 1) TO '{own}/../made-by-duckdb'",
        "ATTACH '{folder}/made-by-duckdb'",
        "SELECT * FROM 'https://example.org/x.parquet'",
        "LOAD httpfs",
        "SET temp_directory = '/tmp'",
        "SET allowed_directories = ['/']",
    ],
)
def test_a_join_reaches_nothing_but_its_own_folder(folder: Path, asked: str) -> None:
    with open_join() as join:
        (own,) = folder.iterdir()
        with pytest.raises(duckdb.Error):
            join._engine.sql(asked.format(folder=folder, own=own)).fetchall()
        assert [*folder.iterdir()] == [own]


def test_the_folder_is_made_where_bytes_wait(folder: Path) -> None:
    with open_join():
        (own,) = folder.iterdir()
        assert own.name.startswith(key_join.PREFIX)
        assert own.stat().st_mode & 0o777 == 0o700
