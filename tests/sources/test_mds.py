"""MDS shards that MosaicML streaming has written: each sample comes out, and damage is one line."""

import io
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.kit.packs import jpeg, pack, rows_of, samples_of, source_of
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.errors import SourceError
from wdsprep.images.raw_pixels import HEAD, png_of_pixels
from wdsprep.sources.tables.mds import value_of

COUNT = 12


def copied(foreign_sets: Path, kind: str, to: Path) -> Path:
    shutil.copytree(foreign_sets / f"images/mds-{kind}", to / "mds")
    return to / "mds"


def pixels(data: bytes) -> bytes:
    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()


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
            assert pixels(row.image) == pixels(jpeg(number))


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
    with pytest.raises(
        SourceError, match=r"index.json lists shard.00001.mds, which does not exist"
    ):
        list(source_of(place).items())


def test_a_compressed_shard_is_held_against_the_digest_of_what_lies_there(
    foreign_sets: Path, tmp_path: Path
) -> None:
    place = copied(foreign_sets, "png", tmp_path)
    shard = next(place.glob("*.gz"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(SourceError, match=r"mds.gz is damaged \(its md5 is not what"):
        rows_of(place)


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
