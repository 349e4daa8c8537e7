"""A file that somebody made oddly is one line that names it, and takes no more than it has."""

import bz2
import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit.laid_out import lay_out
from tests.kit.mds import write_mds, zip_shard
from tests.kit.packs import jpeg, rows_of, write_files
from wdsprep.cli import main
from wdsprep.dataset.rejects import Reject
from wdsprep.encoding.captions.table import CaptionTable
from wdsprep.errors import SourceError, WdsprepError
from wdsprep.sources.parsing import parsing_file
from wdsprep.sources.tables.parquet import read_rows
from wdsprep.store import open_store

COLUMNS = {"image": "jpeg", "caption": "str"}
ROWS = [[jpeg(n), b"a picture"] for n in range(3)]
DEEP = "[" * 100_000 + "]" * 100_000


def mds(place: Path) -> Path:
    return write_mds(place, COLUMNS, ROWS)


def changed_index(place: Path, change: Callable[[Any], Any]) -> Path:
    mds(place)
    index = json.loads((place / "index.json").read_bytes())
    change(index["shards"][0])
    (place / "index.json").write_text(json.dumps(index))
    return place


def put(*path: Any, value: Any) -> Callable[[Any], Any]:
    def change(shard: Any) -> None:
        for name in path[:-1]:
            shard = shard[name]
        shard[path[-1]] = value

    return change


ODD_INDEXES = {
    "samples-text": put("samples", value="3"),
    "samples-nan": put("samples", value=float("nan")),
    "samples-huge": put("samples", value=10**18),
    "no-samples": lambda shard: shard.pop("samples"),
    "raw-none": put("raw_data", value=None),
    "bytes-huge": put("raw_data", "bytes", value=10**18),
    "name-number": put("raw_data", "basename", value=7),
    "name-outside": put("raw_data", "basename", value="../../etc/passwd"),
    "name-nul": put("raw_data", "basename", value="\0"),
    "name-long": put("raw_data", "basename", value="x" * 1_000_000),
    "hashes-shake": put("raw_data", "hashes", value={"shake_128": "00"}),
    "names-fewer": put("column_names", value=["image"]),
    "names-twice": put("column_names", value=["image", "image"]),
    "encodings-lists": put("column_encodings", value=[["jpeg"], ["str"]]),
    "sizes-negative": put("column_sizes", value=[-5, None]),
    "sizes-huge": put("column_sizes", value=[10**30, None]),
    "format-number": put("format", value=1),
    "compression-number": put("compression", value=7),
}


def said_by(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says on its way out, in one line."""
    code = main(arguments)
    said = capsys.readouterr().err.strip()
    assert code in (1, 2), said
    assert "a bug" not in said
    assert "\n" not in said
    assert len(said) < 1000
    return said


@pytest.mark.parametrize("kind", ODD_INDEXES)
def test_an_odd_index_of_mds_is_one_line_that_names_it(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = changed_index(tmp_path / "mds", ODD_INDEXES[kind])
    for command in ("pack", "import"):
        said = said_by([command, str(place), str(tmp_path / command)], capsys)
        assert "index.json" in said


ZEROS = bytes(100 << 20)
PACKED = {
    "gz": lambda data: gzip.compress(data, 1),
    "bz2": bz2.compress,
    "zstd": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    "br": lambda data: pa.Codec("brotli", compression_level=1).compress(data, asbytes=True),
    "snappy": lambda data: pa.compress(data, codec="snappy", asbytes=True),
}


@pytest.mark.parametrize("kind", PACKED)
def test_a_shard_that_unpacks_to_more_than_its_index_says_takes_no_memory(
    tmp_path: Path, kind: str
) -> None:
    place = mds(tmp_path / "mds")
    zip_shard(place, kind, PACKED[kind](ZEROS), 1000)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    with pytest.raises(SourceError, match=rf"shard.00000.mds.{kind} is (damaged|not a valid MDS)"):
        rows_of(place)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 40 << 20
    assert pa.total_allocated_bytes() - before < 40 << 20


@pytest.mark.parametrize("kind", PACKED)
def test_a_shard_that_is_said_to_unpack_to_far_more_is_not_read(tmp_path: Path, kind: str) -> None:
    place = mds(tmp_path / "mds")
    data = (place / "shard.00000.mds").read_bytes()
    zip_shard(place, kind, PACKED[kind](data), 2**31)
    with pytest.raises(SourceError, match=r"a part of it unpacks to 2.1 GB: write it anew"):
        rows_of(place)
    (place / "shard.00000.mds").write_bytes(data)
    index = (place / "index.json").read_text().replace(str(2**31), str(len(data)))
    files: dict[str, bytes | str] = {"index.json": index, "shard.00000.mds": data}
    assert len(rows_of(write_files(tmp_path / "other", files))) == 3


def test_a_sample_whose_lengths_are_not_its_own_is_refused_alone(tmp_path: Path) -> None:
    place = mds(tmp_path / "mds")
    path = place / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    start = int.from_bytes(data[8:12], "little")
    data[start : start + 4] = b"\xff" * 4
    path.write_bytes(data)
    found = rows_of(place)
    assert [isinstance(row, Reject) for row in found] == [False, True, False]
    assert isinstance(found[1], Reject)
    cause = "column image has more bytes than its sample"
    assert found[1].detail == f"the sample cannot be read ({cause})"


# --- tables


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_two_columns_of_one_name_are_one_line(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"t.{kind}"
    if kind == "parquet":
        names = ["url", "caption", "key", "caption"]
        pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 4, names), path)
    else:
        lines = ["url,caption,key,caption", "http://127.0.0.1/1.jpg,a,k,b", ""]
        path.write_text("\n".join(lines).replace(",", "\t" if kind == "tsv" else ","))
    said = said_by(["pack", str(path), str(tmp_path / "out")], capsys)
    assert f"t.{kind} has two columns 'caption': give each a name of its own" in said
    if kind == "parquet":
        assert "two columns" in said_by(["import", str(path), str(tmp_path / "in")], capsys)
    with pytest.raises(SourceError, match="two columns 'caption'"):
        CaptionTable.find(str(path), "key", "caption")
    with pytest.raises(SourceError, match="two columns 'caption'"):
        lay_out(str(path), tmp_path, {"key": ["a"]}, [1])


ODD_TABLES = {
    "t.csv": b"u" * 200_000 + b",caption\n1,2\n",
    "t.tsv": b'"' + b"u" * 200_000,
    "t.parquet": b"PAR1" + bytes(100) + b"PAR1",
    "u.parquet": b"",
    "v.parquet": b"PAR1\xff\xff\xff\x7fPAR1",
}


@pytest.mark.parametrize("name", ODD_TABLES)
def test_a_table_that_cannot_be_opened_is_one_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(ODD_TABLES[name])
    assert name in said_by(["pack", str(tmp_path / name), str(tmp_path / "out")], capsys)
    with pytest.raises(WdsprepError, match=name):
        lay_out(str(tmp_path / name), tmp_path, {"key": ["a"]}, [1])


def test_zero_bytes_and_deep_or_huge_lines_cost_their_rows_alone(tmp_path: Path) -> None:
    lines = [
        '{"url": "http://127.0.0.1/1.jpg", "caption": "a"}',
        DEEP,
        '{"url": 5}',
        "\0",
        "9" * 5000,
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    found = rows_of(tmp_path / "t.jsonl")
    assert [isinstance(row, Reject) for row in found] == [False, True, True, True, True]
    assert not any("a bug" in row.detail for row in found if isinstance(row, Reject))
    (tmp_path / "t.csv").write_bytes(b"url,caption\nhttp://127.0.0.1/1.jpg,a\0b\n,\0\n")
    assert len(rows_of(tmp_path / "t.csv")) == 2


def test_rows_that_a_footer_claims_are_held_against_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, claimed = (tmp_path / "t.parquet", b"\x80\x80\xb4\xcc\xd4\xdf\xc6\x03")  # of 10**15
    pq.write_table(pa.table({"image": [jpeg(1)], "n": [1]}), path, write_statistics=False)
    data = path.read_bytes()
    nbytes = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - nbytes : -8].replace(b"\x16\x02", b"\x16" + claimed)
    path.write_bytes(data[: -8 - nbytes] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    said = said_by(["pack", str(path), str(tmp_path / "out")], capsys)
    assert "t.parquet claims 1,000,000,000,000,000 rows in" in said


def saved(place: Path, images: pa.Array, **options: Any) -> Path:
    """A folder with an Arrow file of one batch, as `datasets` saves it."""
    place.mkdir()
    batch = pa.RecordBatch.from_arrays([images], ["image"])
    written = pa.ipc.IpcWriteOptions(**options)
    with (
        pa.OSFile(str(place / "data.arrow"), "w") as file,
        pa.ipc.new_stream(file, batch.schema, options=written) as writer,
    ):
        writer.write_batch(batch)
    return place


def test_what_unpacks_to_far_more_than_its_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row group by its footer, and lists of one value by what came of them."""
    monkeypatch.setattr("wdsprep.sources.parsing.UNPACKED_NBYTES", 2 << 20)
    zeros = pa.array([bytes(3 << 20)])
    pq.write_table(pa.table({"image": zeros}), tmp_path / "t.parquet", compression="zstd")
    with pytest.raises(SourceError, match=r"t.parquet has .* a part of it unpacks to 3.1 MB"):
        rows_of(tmp_path / "t.parquet")
    place = saved(tmp_path / "saved", zeros, compression="zstd")
    with pytest.raises(SourceError, match=r"data.arrow has .* a part of it unpacks to 3.1 MB"):
        rows_of(place)


def test_damaged_pages_name_their_file(tmp_path: Path) -> None:
    """They cannot be unpacked; the footer is sound."""
    path, image = tmp_path / "t.parquet", pa.array([jpeg(n) * 20 for n in range(8)])
    pq.write_table(pa.table({"image": image}), path, compression="zstd", use_dictionary=False)
    data = path.read_bytes()
    path.write_bytes(data[:200] + bytes(1800) + data[2000:])
    with pytest.raises(SourceError, match=r"t.parquet is not a valid Parquet file \("):
        rows_of(path)


def test_an_arrow_batch_that_points_out_of_itself_is_refused_row_by_row(tmp_path: Path) -> None:
    """Arrow itself would read there."""
    images = pa.array([jpeg(n) for n in range(3)], pa.binary())
    offsets = bytearray(images.buffers()[1].to_pybytes())
    offsets[4:8] = (2**30).to_bytes(4, "little")
    bad = pa.Array.from_buffers(
        pa.binary(), 3, [None, pa.py_buffer(bytes(offsets)), images.buffers()[2]]
    )
    found = rows_of(saved(tmp_path / "saved", bad))
    assert [isinstance(row, Reject) for row in found] == [True, True, False]
    assert not any("a bug" in row.detail for row in found if isinstance(row, Reject))


INDEXES = ["", "[]", "null", "{}", "7", '{"version": 2, "shards": 5}', DEEP]
STATES = ["", "[]", DEEP, '{"_data_files": 5}', '{"_data_files": [{"filename": 5}]}', '{"a": 1}']


@pytest.mark.parametrize(
    ("name", "text"),
    [*(("index.json", text) for text in INDEXES), *(("state.json", text) for text in STATES)],
)
def test_what_is_no_index_and_no_state_is_one_line_that_names_it(
    tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = "data.arrow" if name == "state.json" else "shard.00000.mds"
    place = write_files(tmp_path / "in", {name: text, data: b""})
    assert name in said_by(["pack", str(place), str(tmp_path / "out")], capsys)


def test_a_lack_of_memory_is_not_a_files_fault() -> None:
    """Unless the file asks for far more than any sound one does."""
    for error in (MemoryError(), pa.ArrowMemoryError("malloc of size 65536 failed")):
        with pytest.raises(MemoryError), parsing_file("t", "is not a table", "mend it"):
            raise error
    with (
        pytest.raises(SourceError, match="t is not a table"),
        parsing_file("t", "is not a table", "mend"),
    ):
        raise pa.ArrowMemoryError("malloc of size 68719476736 failed")


def test_a_dictionary_whose_value_is_named_many_times_is_refused_before_it_is_unpacked(
    tmp_path: Path,
) -> None:
    """The page has few bytes, and each row of a batch would have the long text of its own."""
    rows = 300
    text = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array(["x" * 2_000_000]))
    table = pa.table({"key": [f"{n:012d}" for n in range(rows)], "text": text})
    pq.write_table(table, tmp_path / "t.parquet", store_schema=False)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(SourceError, match=r"t.parquet has .* a part of it unpacks to"):
            list(read_rows(open_store(str(tmp_path)), "t.parquet"))
        with pytest.raises(SourceError, match=r"t.parquet has .* a part of it unpacks to"):
            lay_out(str(tmp_path / "t.parquet"), tmp_path, {"key": ["a"]}, [1], "text")
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 50 << 20
