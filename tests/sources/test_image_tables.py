"""Tables that hold images, of Parquet, MDS and Arrow: memory is bounded, damage is one line."""

import io
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.kit.packs import (
    jpeg,
    pack,
    peak_of_reading,
    rows_of,
    sample,
    samples_of,
    source_of,
    write_table,
)
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.errors import SourceError, UsageError
from wdsprep.images.formats import HEAD, png_of_pixels
from wdsprep.sources.tables.mds import value_of


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
    assert [r.code for r in rest if isinstance(r, Reject)] == [Code.NO_IMAGE] * 2


def test_slices_of_a_table_are_runs_of_its_row_groups(tmp_path: Path) -> None:
    rows = [{"jpg": jpeg(n)} for n in range(10)]
    write_table(tmp_path / "t.parquet", rows, row_group_size=3)
    write_table(tmp_path / "u.parquet", rows, row_group_size=10)
    found = [(item.name, item.samples) for item in source_of(tmp_path, rows=6).items()]
    assert found == [("t.parquet[0:6]", 6), ("t.parquet[6:10]", 4), ("u.parquet[0:10]", 10)]


def test_a_missing_column_is_an_error_that_names_the_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "t.parquet", [{"pic": jpeg(1), "alt": "x"}])
    write_table(tmp_path / "u/u.parquet", [{"a": 1, "alt": "x"}])
    for columns, said in [
        ({"image": "img"}, "it has pic, alt"),
        ({"caption": "text"}, "it has pic, alt"),
        ({"image": "alt"}, "'alt' holds no image bytes: it has pic"),
    ]:
        with pytest.raises(UsageError, match=said):
            rows_of(tmp_path / "t.parquet", **columns)
    with pytest.raises(SourceError, match=r"no column of image bytes: it has a \(int64\), alt"):
        rows_of(tmp_path / "u")
    assert sample(tmp_path / "t.parquet", "t.parquet#0", image="pic", caption="alt").caption == "x"


def test_a_column_that_a_filter_names_must_be_in_the_table(tmp_path: Path) -> None:
    table = write_table(
        tmp_path / "t.parquet", [{"jpg": jpeg(1), "aesthetic": 5.0, "caption": "x"}]
    )
    with pytest.raises(
        UsageError, match=r"no column 'aestetic' .*\(did you mean aesthetic\?\): it has jpg"
    ):
        pack(table, tmp_path / "out", "--filter", "aestetic > 4 and caption")
    assert not (tmp_path / "out").exists()
    pack(table, tmp_path / "out", "--filter", "aesthetic > 4 and caption")


@pytest.mark.system
@pytest.mark.parametrize("group", [200, 6000])
def test_tables_are_streamed_in_bounded_memory(group: int, tmp_path: Path) -> None:
    """300 MB, in many row groups or in one: the peak grows by far less."""
    path, image = tmp_path / "t.parquet", os.urandom(50_000)
    rows = pa.table({"jpg": [n.to_bytes(4, "big") + image for n in range(group)]})
    options = {"compression": "none", "use_dictionary": False, "write_batch_size": 100}
    with pq.ParquetWriter(path, rows.schema, **options) as writer:  # whose pages are small
        for _ in range(6000 // group):
            writer.write_table(rows, row_group_size=group)
    assert peak_of_reading(path) < 100


COUNT = 12


def copied(foreign_sets: Path, kind: str, to: Path) -> Path:
    shutil.copytree(foreign_sets / f"images/mds-{kind}", to / "mds")
    return to / "mds"


@pytest.mark.parametrize("kind", ["jpeg", "pil", "bytes", "png"])
def test_images_captions_and_facts_come_out_whatever_holds_and_compresses_them(
    foreign_sets: Path, kind: str
) -> None:
    """Arrays are no facts. A JPEG whose bytes were given is the same to the byte."""
    found = rows_of(foreign_sets / f"images/mds-{kind}")
    assert len(found) == COUNT
    for number, row in enumerate(found):
        assert isinstance(row, Sample)
        assert row.caption == f"picture {number}"
        more = {"more": {"tags": [number]}, "score": number / 2, "width": number}
        assert row.facts == {"caption": f"picture {number}", **more}
        if kind == "bytes":
            assert row.image == jpeg(number)
        elif kind != "jpeg":  # which Pillow has encoded once more
            images = (Image.open(io.BytesIO(data)) for data in (row.image, jpeg(number)))
            assert len({image.convert("RGB").tobytes() for image in images}) == 1


def test_a_slice_is_a_shard_and_packing_makes_a_dataset(foreign_sets: Path, tmp_path: Path) -> None:
    source = foreign_sets / "images/mds-png"
    items = list(source_of(source).items())
    assert sum(item.samples for item in items) == COUNT
    assert [item.name for item in items] == [f"shard.{n:05d}.mds" for n in range(len(items))]
    made = samples_of(pack(source, tmp_path / "out"))
    assert sorted(member["txt"] for member in made) == sorted(f"picture {n}" for n in range(COUNT))


def test_a_shard_that_an_index_names_has_to_be_there_and_whole(
    foreign_sets: Path, tmp_path: Path
) -> None:
    place = copied(foreign_sets, "pil", tmp_path)
    shard = place / "shard.00001.mds"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    size = f"{len(data):,}"
    with pytest.raises(SourceError, match=rf"shard.00001.mds is damaged .*index.json says {size}"):
        list(source_of(place).items())
    shard.write_bytes(bytes([data[0], *data[1:-1], data[-1] ^ 1]))
    with pytest.raises(SourceError, match=r"shard.00001.mds is damaged \(its sha256 is not what"):
        rows_of(place)
    shard.unlink()
    with pytest.raises(SourceError, match=r"index.json lists shard.00001.mds, which does not"):
        list(source_of(place).items())
    shard = next(copied(foreign_sets, "png", tmp_path / "zipped").glob("*.gz"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.raises(SourceError, match=r"mds.gz is damaged \(its md5 is not what"):
        rows_of(shard.parent)


def test_an_index_is_needed_and_has_to_be_one(foreign_sets: Path, tmp_path: Path) -> None:
    place = copied(foreign_sets, "pil", tmp_path)
    index = place / "index.json"
    said = json.loads(index.read_bytes())
    for wrong, why in (({"version": 1}, "is of version 1"), ({"version": 2}, "KeyError: 'shards'")):
        index.write_text(json.dumps(wrong))
        with pytest.raises(SourceError, match=why):
            list(source_of(place).items())
        shutil.copytree(place, tmp_path / why)  # an index is read once
    other = shutil.copytree(place, tmp_path / "other")
    said["shards"][0]["raw_data"]["basename"] = "../../etc/passwd"
    (other / "index.json").write_text(json.dumps(said))
    with pytest.raises(SourceError, match="leads out of the folder"):
        list(source_of(other).items())
    (other / "index.json").unlink()
    with pytest.raises(SourceError, match=r"MDS shards \(shard.00000.mds\) without their index"):
        list(source_of(other).items())


def test_pickles_are_never_read() -> None:
    assert value_of("pkl", b"cos\nsystem\n(S'false'\ntR.") is None


@pytest.mark.parametrize(
    "data", [b"", HEAD.pack(2, 2, 1) + b"L123", HEAD.pack(2, 2, 1) + b"X1234", HEAD.pack(0, 2, 1)]
)
def test_pixels_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(RejectedError, match="no pixels of Pillow"):
        png_of_pixels(data)


@pytest.fixture
def place(foreign_sets: Path, tmp_path: Path) -> Path:
    return shutil.copytree(foreign_sets / "images/datasets", tmp_path / "saved")


def test_all_splits_are_read_by_their_names(place: Path) -> None:
    (place / "train/cache-0123.arrow").write_bytes(b"of a map that was kept")
    items = list(source_of(place).items())
    assert [item.name for item in items] == [
        "test/data-00000-of-00001.arrow",
        "train/data-00000-of-00002.arrow",
        "train/data-00001-of-00002.arrow",
    ]
    found = rows_of(place)
    numbers = [*range(8, 12), *range(8)]
    assert [row.source for row in found][:5] == [
        *(f"test/data-00000-of-00001.arrow#{n}" for n in range(4)),
        "train/data-00000-of-00002.arrow#0",
    ]
    for number, row in zip(numbers, found, strict=True):
        assert isinstance(row, Sample)
        assert (row.image, row.caption) == (jpeg(number), f"picture {number}")
        assert row.facts == {"n": number, "text": f"picture {number}"}
    assert source_of(place).count(items[0]) == 4
    assert len(rows_of(place / "train")) == 8  # one split is a dataset


def test_a_file_that_the_state_names_has_to_be_there_and_sound(place: Path) -> None:
    file, state = place / "train/data-00001-of-00002.arrow", place / "train/state.json"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match=rf"{file.name} is not a valid Arrow stream"):
        rows_of(place)
    for damage, said in [
        (lambda: file.write_bytes(b"not Arrow"), f"{file.name} is not a valid Arrow stream"),
        (file.unlink, "train/state.json lists train/data-00001.* does not exist"),
        (lambda: state.write_text("{}"), "does not name its Arrow files"),
    ]:
        damage()
        with pytest.raises(SourceError, match=said):
            list(source_of(place).items())
