"""Rows of a table are joined with samples by name, in bounded memory, and leave nothing behind."""

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from wdsprep.errors import FullError, SourceError
from wdsprep.store.spool import Place, Spool
from wdsprep.tables import key_join
from wdsprep.tables.key_join import KeyJoin, open_join

NAMES = [b"\0", b"a\0", b"a", b"\xff", b"\\xFF", b"\xed\xa0\x80", b"07", b"7", b"x" * 70_000]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@pytest.fixture(params=["memory", "disk", "pieces", "one hash", "two hashes"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows wait in memory or on disk, are read at once or in pieces, with few hashes or many."""
    if request.param != "memory":
        monkeypatch.setattr(key_join, "PARTS", 7)
        monkeypatch.setattr(key_join, "MOST_NBYTES", 2_000)
    if request.param == "pieces":
        monkeypatch.setattr(key_join, "READ_NBYTES", 0)
    if "hash" in request.param:
        count = ["one hash", "two hashes"].index(request.param) + 1
        asked = f"SELECT hash(name) % {count} FROM registered"
        monkeypatch.setattr(key_join, "HASHES", asked)


def samples_of(
    names: Sequence[bytes | None], choices: Sequence[int] | None = None
) -> pa.RecordBatch:
    numbers = range(len(names)) if choices is None else [n // 2 for n in range(len(names))]
    columns = {"name": pa.array(names, pa.binary()), "sample": pa.array([*numbers])}
    return pa.record_batch(columns if choices is None else columns | {"choice": pa.array(choices)})


def read(join: KeyJoin, columns: Sequence[str] = ()) -> list[tuple[object, ...]]:
    return [
        row
        for samples, rows, values in join.read(columns)
        for row in zip(
            samples.tolist(),
            rows.tolist(),
            *(values[name].to_pylist() for name in columns),
            strict=True,
        )
    ]


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("seed", [0, 2])
def test_each_sample_gets_the_first_row_with_its_name_byte_by_byte(seed: int) -> None:
    rng = random.Random(seed)
    names = [*NAMES, *(rng.randbytes(rng.choice([1, 2, 40])) for _ in range(seed * 50))]
    rows = [*names, *rng.choices([*names, None, b""], k=60 + 100 * seed)]
    samples = rng.choices([*names, None, b"", b"lacking"], k=200)
    texts = [rng.choice([None, "", "\u00e9\U0001f600", f"{number}"]) for number in range(len(rows))]
    with open_join() as join:
        for start in range(0, len(rows), 20):
            part = slice(start, start + 20)
            columns = {"text": pa.array(texts[part], pa.large_string())}
            if start >= 40:  # the column begins later
                columns["name"] = pa.array([*range(len(rows))[part]])
            join.add(pa.array(rows[part], pa.binary()), columns)
        join.find_first()
        batches = [samples_of(samples[:150]), *number_on(samples[150:], 150)]
        join.match(batches)
        first = {name: rows.index(name) for name in names}
        assert read(join, ["name", "text"]) == [
            (number, row := first[name], row if row >= 40 else None, texts[row])
            for number, name in enumerate(samples)
            if name in first
        ]
        unnamed = sum(not name for name in rows)
        assert (join.rows, join.unnamed, join.names) == (len(rows), unnamed, len(first))
        assert (join.repeated, join.lacking) == (len(rows) - unnamed - len(first), 0)
        twice = sorted((name for name in first if rows.count(name) > 1), key=first.__getitem__)
        assert join.repeated_names(3) == (len(twice), twice[:3])
        join.match([samples_of([b"7", b"a"])])
        unused = [name for name in first if name not in (b"7", b"a")]
        assert join.unused(2) == (len(unused), unused[:2])


def number_on(names: Sequence[bytes | None], start: int) -> Iterator[pa.RecordBatch]:
    """Yield samples with numbers from `start` on, the last ones first."""
    for number in reversed(range(len(names))):
        columns = {"name": pa.array([names[number]], pa.binary())}
        yield pa.record_batch(columns | {"sample": pa.array([start + number])})


@pytest.mark.usefixtures("room")
def test_a_digest_is_that_of_names_and_first_texts_in_any_order() -> None:
    rows = [(name, f"{number}\u00e9") for number, name in enumerate(NAMES)]
    digest = digest_of(rows)
    assert digest_of([*rows[::-1], *rows]) == digest
    changed = [(b"a", "0\u00e9"), *rows[1:]], [(b"7", "7\u00e9x"), *rows]
    assert len({digest, *map(digest_of, changed), digest_of([])}) == 4


def digest_of(rows: Sequence[tuple[bytes, str]]) -> str:
    with open_join() as join:
        for name, text in [(None, ""), *rows]:
            names = pa.array([name], pa.binary())
            join.add(names, {"text": pa.array([text], pa.large_string())})
        join.find_first()
        return join.digest("text")


@pytest.mark.usefixtures("room")
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


@pytest.mark.usefixtures("room")
def test_of_several_names_of_a_sample_the_first_that_a_row_has_counts() -> None:
    names = [name for n in range(300) for name in (b"%03d" % n, b"%d" % n)]
    rows = [*(f"{n}" for n in range(0, 300, 3)), *(f"{n:03d}" for n in range(0, 300, 2))]
    first = {name: rows.index(name) for name in rows}
    matched = {n: first.get(f"{n:03d}", first.get(f"{n}")) for n in range(300)}
    with open_join() as join:
        join.add(pa.array(rows), {})
        join.find_first()
        join.match(samples_of(names, [0, 1] * 300).slice(start, 50) for start in range(0, 600, 50))
        assert read(join) == [(n, row) for n, row in matched.items() if row is not None]
        unused = [name.encode() for name, row in first.items() if row not in matched.values()]
        assert join.unused(3) == (len(unused), unused[:3])


@pytest.mark.parametrize("samples", [[], [samples_of([])], [samples_of([b"a", None])]])
def test_a_join_of_nothing_is_empty(samples: list[pa.RecordBatch]) -> None:
    with open_join() as join:
        join.find_first()
        join.match(samples)
        assert (read(join), join.unused(1)) == ([], (0, []))


# --- what has no room in memory
def many(count: int, names: int) -> Iterator[pa.RecordBatch]:
    """Yield samples with so many different names, which take 100 bytes each."""
    for start in range(0, count, 10_000):
        numbers = range(start, start + 10_000)
        column = [b"%099d." % (number * 7 % names) for number in numbers]
        yield pa.record_batch({"name": column, "sample": np.arange(start, start + 10_000)})


def join_many(join: KeyJoin, count: int, names: int) -> None:
    for batch in many(count, names):
        join.add(batch["name"], {"double": pa.array(batch["sample"].to_numpy() * 2)})
    join.find_first(["double"])
    join.match(many(count, names))


@pytest.mark.parametrize("names", [60_000, 1])
def test_what_has_no_room_waits_in_a_file_without_a_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, names: int
) -> None:
    """Whether names are many or nearly all repeat, a small part of the rows is in memory."""
    monkeypatch.setattr(key_join, "MOST_NBYTES", 1 << 18)
    monkeypatch.setattr(key_join, "READ_NBYTES", 1 << 20)
    usual_put, count, allocated = Spool.put, 60_000, [0]

    def put(spool: Spool, data: memoryview) -> Place:
        allocated.append(pa.total_allocated_bytes())
        return usual_put(spool, data)

    monkeypatch.setattr(Spool, "put", put)
    before = pa.total_allocated_bytes()
    with open_join() as join:
        join_many(join, count, names)
        assert sum(open_files(folder)) > 100 * count
        assert not [*folder.iterdir()]  # so a killed process leaves nothing
        assert (join.names, join.repeated) == (names, count - names)
        seen = 0
        for samples, rows, columns in join.read(["double"]):
            assert samples.tolist() == [*range(seen, seen + len(samples))]
            assert np.array_equal(rows % names, samples % names)
            assert columns["double"].to_numpy().tolist() == (rows * 2).tolist()
            seen += len(samples)
        assert seen == count
    assert not open_files(folder)
    assert max(allocated) - before < 5 << 20


def open_files(folder: Path) -> list[int]:
    """Return the sizes of the files of a folder that this process has open."""
    files = {file: os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.exists()}
    return [file.stat().st_size for file, place in files.items() if place.startswith(str(folder))]


def test_a_full_disk_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_join, "MOST_NBYTES", 1 << 20)
    with open("/dev/full", "r+b", buffering=0) as full:
        monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: full)
        with pytest.raises(FullError) as caught, open_join() as join:
            join_many(join, 30_000, 30_000)
    assert str(caught.value) == (
        f"{folder} is full: rows of a table wait there to be joined, which takes three times their "
        "size: make room, or set TMPDIR to another folder"
    )


def test_a_fault_in_the_samples_comes_as_it_was_raised() -> None:
    def broken() -> Iterable[pa.RecordBatch]:
        yield samples_of([b"a"])
        raise SourceError("a shard is gone: bring it back")

    with open_join() as join:
        join.add(pa.array(["a"]), {})
        join.find_first()
        with pytest.raises(SourceError, match=r"^a shard is gone: bring it back$"):
            join.match(broken())
        join.match([samples_of([b"b", b"a"])])
        assert read(join) == [(1, 0)]
