"""Tables that hold images: read in bounded memory, and what they lack is told."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit.packs import jpeg, pack, rows_of, sample, source_of, write_table
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Refusal
from wdsprep.dataset.samples import Sample
from wdsprep.errors import SourceError, UsageError


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_a_binary_column_is_packed_whatever_its_row_groups(tmp_path: Path, group: int) -> None:
    rows = [{"jpg": jpeg(n), "caption": f"c {n}", "n": n, "no": None} for n in range(10)]
    write_table(tmp_path / "t.parquet", rows, row_group_size=group)
    for rows_per_item in (1, 4, 100):
        found = rows_of(tmp_path / "t.parquet", rows=rows_per_item)
        assert [row.source for row in found] == [f"t.parquet#{n}" for n in range(10)]
        for number, row in enumerate(found):
            assert isinstance(row, Sample)
            assert (row.image, row.caption) == (jpeg(number), f"c {number}")
            assert row.facts == {"caption": f"c {number}", "n": number}


def test_the_struct_of_hugging_face_is_read_and_null_images_are_refused(tmp_path: Path) -> None:
    images = [{"bytes": jpeg(1), "path": "x.jpg"}, {"bytes": None, "path": "y.jpg"}, None]
    rows = [{"image": image, "text": ["a", "b"], "w": 1.5} for image in images]
    write_table(tmp_path / "data/train-00000-of-00001.parquet", rows)
    first, *rest = rows_of(tmp_path)
    assert isinstance(first, Sample)
    assert (first.image, first.captions, first.facts["w"]) == (jpeg(1), ("a", "b"), 1.5)
    assert [r.code for r in rest if isinstance(r, Refusal)] == [Code.NO_IMAGE] * 2


def test_slices_of_a_table_are_runs_of_its_row_groups(tmp_path: Path) -> None:
    rows = [{"jpg": jpeg(n)} for n in range(10)]
    write_table(tmp_path / "t.parquet", rows, row_group_size=3)
    write_table(tmp_path / "u.parquet", rows, row_group_size=10)
    found = [(item.name, item.samples) for item in source_of(tmp_path, rows=6).items()]
    assert found == [("t.parquet[0:2]", 6), ("t.parquet[2:4]", 4), ("u.parquet[0:1]", 10)]


def test_a_missing_column_is_an_error_that_names_the_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "t.parquet", [{"pic": jpeg(1), "alt": "x"}])
    write_table(tmp_path / "u/u.parquet", [{"a": 1, "alt": "x"}])
    for columns in ({"image": "img"}, {"caption": "text"}):
        with pytest.raises(UsageError, match="it has pic, alt"):
            rows_of(tmp_path / "t.parquet", **columns)
    with pytest.raises(UsageError, match="'alt' holds no image bytes: it has pic"):
        rows_of(tmp_path / "t.parquet", image="alt")
    with pytest.raises(SourceError, match=r"no column of image bytes: it has a \(int64\), alt"):
        rows_of(tmp_path / "u")
    assert sample(tmp_path / "t.parquet", "t.parquet#0", image="pic", caption="alt").caption == "x"


def test_a_column_that_a_filter_names_must_be_in_the_table(tmp_path: Path) -> None:
    write_table(tmp_path / "t.parquet", [{"jpg": jpeg(1), "aesthetic": 5.0, "caption": "x"}])
    with pytest.raises(UsageError, match=r"no column 'aestetic' \(--filter\): it has jpg, aesth"):
        pack(tmp_path / "t.parquet", tmp_path / "out", "--filter", "aestetic > 4 and caption")
    assert not (tmp_path / "out").exists()
    pack(tmp_path / "t.parquet", tmp_path / "out", "--filter", "aesthetic > 4 and caption")


PEAK = """
import resource, sys
from wdsprep.sources.base import Columns
from wdsprep.sources.recognise import recognise
from pathlib import Path
import pyarrow.parquet
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source = recognise(sys.argv[1], columns=Columns(), rows_per_item=10_000)
before = peak()
count = sum(len(row.image) > 0 for item in source.items() for row in source.read(item))
print(count, (peak() - before) // 1024)
"""


@pytest.mark.system
@pytest.mark.parametrize("group", [200, 6000])
def test_tables_are_streamed_in_bounded_memory(group: int, tmp_path: Path) -> None:
    """300 MB, in many row groups or in one: the peak grows by far less."""
    shm = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    path = shm / f"wdsprep-test-{os.getpid()}.parquet"
    schema = pa.schema({"jpg": pa.binary(), "caption": pa.string()})
    image = os.urandom(50_000)
    try:
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for start in range(0, 6000, group):
                rows = [
                    {"jpg": n.to_bytes(4, "big") + image, "caption": f"c {n}"}
                    for n in range(start, start + group)
                ]
                writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=group)
        words = [sys.executable, "-c", PEAK, str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    finally:
        path.unlink()
    count, peak_mb = map(int, done.stdout.split())
    assert count == 6000
    assert peak_mb < 100
