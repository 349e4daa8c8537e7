"""Tars: whoever made them, their samples come out, and what is damaged is refused by name."""

import gzip
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit.packs import (
    BUCKETS,
    by_source,
    codes,
    jpeg,
    manifest_of,
    pack,
    packing_here,
    peak_of_reading,
    photos,
    rows_of,
    sample,
    source_of,
    tar_bytes,
    upload,
    write_files,
)
from wdsprep.cli import main
from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.tar.write import header
from wdsprep.errors import SourceError
from wdsprep.sources.base import Columns
from wdsprep.sources.patterns import ALL_TARS
from wdsprep.sources.tars import TarsSource

HOSTILE = ("../../x", "/etc/y", "a/./b", "..", "c//d", "~/e", "f\\g")


def test_tars_of_shardwriter_come_out_as_they_went_in(tmp_path: Path) -> None:
    import webdataset as wds

    (tmp_path / "in").mkdir()
    with wds.ShardWriter(f"{tmp_path}/in/%06d.tar", maxcount=4, verbose=0) as writer:
        for number in range(10):
            facts = {"n": number, "caption": "of json"}
            writer.write(
                {"__key__": f"s/{number}", "jpg": jpeg(number), "txt": f"c {number}", "json": facts}
            )
    rows = rows_of(tmp_path / "in")
    assert [type(row) for row in rows] == [Sample] * 10
    for number, row in enumerate(rows):
        assert isinstance(row, Sample)
        assert (row.image, row.caption, row.facts["n"]) == (jpeg(number), f"c {number}", number)


def img2dataset_shard(root: Path, shard: int, count: int, *, json_in_tar: bool = True) -> None:
    """What img2dataset writes with output_format webdataset."""
    members, table = [], []
    for number in range(count):
        key = f"{shard:05d}{number:04d}"
        caption = f"caption {number}" if number else None
        facts = {"url": f"http://x/{number}", "caption": caption, "key": key, "sha256": "0",
                 "status": "success", "error_message": None, "similarity": number / 4}  # fmt: skip
        members += [(f"{key}.jpg", jpeg(number))]
        if json_in_tar:
            members += [(f"{key}.json", json.dumps(facts).encode())]
        members += [(f"{key}.txt", (caption or "").encode())]
        table.append(facts)
    table.append({**table[-1], "key": f"{shard:05d}9999", "status": "failed_to_download"})
    write_files(
        root, {f"{shard:05d}.tar": tar_bytes(members), f"{shard:05d}_stats.json": '{"count": 2}'}
    )
    pq.write_table(pa.Table.from_pylist(table), root / f"{shard:05d}.parquet")


@pytest.mark.parametrize("json_in_tar", [True, False])
def test_what_img2dataset_writes_is_packed_with_its_facts(
    tmp_path: Path, json_in_tar: bool
) -> None:
    for shard in range(2):
        img2dataset_shard(tmp_path, shard, 3, json_in_tar=json_in_tar)
    found = by_source(tmp_path)
    assert sorted(found) == [f"0000{s}.tar/0000{s}000{n}" for s in range(2) for n in range(3)]
    last = sample(tmp_path, "00001.tar/000010002")
    assert (last.captions, last.facts["similarity"]) == (("caption 2",), 0.5)
    assert "error_message" not in last.facts
    assert sample(tmp_path, "00001.tar/000010000").captions == ()


def test_tars_are_found_by_folder_glob_braces_and_name(tmp_path: Path) -> None:
    for name in ("000.tar", "001.tar", "002.tar", "x/003.tar", "x/other.tar"):
        write_files(tmp_path, {name: tar_bytes([("a.jpg", jpeg(1)), ("a.txt", b"c")])})
    write_files(tmp_path, {"._000.tar": b"\0\5\x16\7"})

    def names(pattern: str) -> list[str]:
        return [item.name for item in source_of(f"{tmp_path}/{pattern}").items()]

    for pattern, stems in {
        "": "000 001 002 x/003 x/other",
        "{000..002}.tar": "000 001 002",
        "00[01].tar": "000 001",
        "x/{003,other}.tar": "003 other",
        "x/0*.tar": "003",
        "001.tar": "001",
    }.items():
        assert names(pattern) == [f"{stem}.tar" for stem in stems.split()]
    with pytest.raises(SourceError, match=r"003.tar does not exist \(3 of 6 tars missing\)"):
        names("{000..005}.tar")
    with pytest.raises(SourceError, match="stands for over"):
        names("{0..99999999}.tar")


def test_a_truncated_tar_gives_what_is_whole_and_refuses_the_rest(tmp_path: Path) -> None:
    data = tar_bytes((f"{n}.{kind}", jpeg(n)) for n in range(5) for kind in ("jpg", "txt"))
    write_files(tmp_path, {"a.tar": data[: int(len(data) * 0.5)], "b.tar": b"", "c.tar": b"<html>"})
    found = codes(tmp_path)
    assert found.pop("c.tar") in ("tar_truncated", "tar_bad_header")
    assert (found["a.tar/2"], found["b.tar"]) == ("tar_truncated", "tar_truncated")
    assert "a.tar/3" not in by_source(tmp_path)


def test_repeated_keys_and_fields_are_refused(tmp_path: Path) -> None:
    members = [("a.jpg", jpeg(1)), ("b.jpg", jpeg(2)), ("a.jpg", jpeg(3)), ("c.jpg", jpeg(4)),
               ("c.jpg", jpeg(5)), ("b.txt", b"late"), ("d.jpg", jpeg(6))]  # fmt: skip
    write_files(tmp_path, {"a.tar": tar_bytes(members)})
    kinds = [r.code.value if isinstance(r, Reject) else r.source for r in rows_of(tmp_path)]
    assert kinds == [
        "a.tar/a", "a.tar/b", "tar_repeated_key", "tar_repeated_field", "tar_scattered", "a.tar/d"
    ]  # fmt: skip


def test_hostile_names_in_a_tar_never_become_paths(tmp_path: Path) -> None:
    members = [(f"{name}.jpg", jpeg(n)) for n, name in enumerate(HOSTILE)]
    members += [(f"{name}.txt", b"x") for name in ("lone", "../lone")]
    write_files(tmp_path / "in", {"a.tar": tar_bytes(members)})
    before = set(tmp_path.rglob("*"))
    out = pack(tmp_path / "in", tmp_path / "out")
    strange = {p for p in tmp_path.rglob("*") if p not in before and out not in (p, *p.parents)}
    assert not strange
    for path in out.glob("*/*.tar"):
        with tarfile.open(path) as tar:
            assert all(name.partition(".")[0].isdigit() for name in tar.getnames())


def test_a_tar_sample_without_image_is_refused_and_other_files_are_no_samples(
    tmp_path: Path,
) -> None:
    members = [("a.jpg", jpeg(1)), ("b.txt", b"x"), ("README", b"x"), ("c.cls", b"1"),
               ("d.json", b"{}"), ("e.seg.png", jpeg(2)), ("f.jpg", jpeg(3)), ("f.json", b"[]"),
               ("g.jpg", jpeg(3)), ("g.txt", b"\xff")]  # fmt: skip
    write_files(tmp_path, {"a.tar": tar_bytes(members)})
    refused = {"b": "no_image", "d": "no_image", "f": "bad_json", "g": "bad_caption"}
    assert codes(tmp_path) == {f"a.tar/{key}": code for key, code in refused.items()}
    assert sample(tmp_path, "a.tar/e").image == jpeg(2)


def linked_tar(path: Path, files: dict[str, bytes], links: dict[str, str]) -> None:
    """By GNU tar, of a folder: names begin with ./"""
    folder = write_files(path.with_suffix(".d"), dict(files))
    for name, target in links.items():
        os.link(folder / target, folder / name)
    (folder / "s.jpg").symlink_to("a.jpg")
    (folder / "t.jpg").symlink_to("../../etc/passwd")
    subprocess.run(["tar", "--sort=name", "-cf", path, "-C", folder, "."], check=True)
    shutil.rmtree(folder)


def test_a_link_in_a_tar_is_the_image_that_it_stands_for(tmp_path: Path) -> None:
    files = {"a.jpg": jpeg(1), "a.txt": b"first", "d.x/b.jpg": jpeg(2), "d.x/b.txt": b"second"}
    links = {"d.x/c.jpg": "a.jpg", "z.jpg": "d.x/b.jpg", "z.txt": "a.txt"}
    linked_tar(tmp_path / "a.tar", files, links)
    found = {
        name: (row.image, row.caption) if isinstance(row, Sample) else row.code.value
        for name, row in by_source(tmp_path / "a.tar").items()
    }
    assert found == {
        "a.tar/./a": (jpeg(1), "first"),
        "a.tar/./d.x/b": (jpeg(2), "second"),
        "a.tar/./d.x/c": (jpeg(1), ""),
        "a.tar/./z": (jpeg(2), "first"),
        "a.tar/./s": (jpeg(1), ""),
        "a.tar/./t": "unreadable",
    }
    zipped = tmp_path / "zipped"
    zipped.mkdir()
    data = gzip.compress((tmp_path / "a.tar").read_bytes())
    write_files(zipped, {"a.tgz": data})
    lost = ["./d.x/c", "./s", "./t", "./z"]
    assert codes(zipped) == {f"a.tgz/{name}": "unreadable" for name in lost}


def test_gzipped_tars_are_read_as_they_are_whatever_their_names(
    tmp_path: Path, bucket: str
) -> None:
    names = ("0.tar", "1.tar.gz", "2.tgz", "3.tar")
    for number, name in enumerate(names):
        data = tar_bytes([("a.jpg", jpeg(number)), ("a.txt", b"c")])
        write_files(tmp_path, {f"in/{name}": gzip.compress(data) if number else data})
    upload(tmp_path / "in", f"s3://{bucket}/in")
    for place in (tmp_path / "in", f"s3://{bucket}/in"):
        rows = rows_of(place)
        assert [row.source for row in rows] == [f"{name}/a" for name in names]
        images = [row.image for row in rows if isinstance(row, Sample)]
        assert images == [jpeg(number) for number in range(4)]
    assert [row.source for row in rows_of(f"{tmp_path}/in/1.tar.gz")] == ["1.tar.gz/a"]
    assert [row.source for row in rows_of(f"{tmp_path}/in/*.tar")] == ["0.tar/a", "3.tar/a"]


@pytest.mark.system
def test_members_of_any_size_take_no_memory(tmp_path: Path) -> None:
    """A tar with holes is 40 kB on disk and 2 GB to read."""
    sizes = {"a.jpg": 600 << 20, "b.json": 300 << 20, "b.jpg": 4, "c.mov": 1 << 30, "d.jpg": 4}
    with (tmp_path / "a.tar").open("wb") as tar:
        for name, nbytes in sizes.items():
            tar.write(header(name, nbytes))
            tar.seek(nbytes + -nbytes % 512, os.SEEK_CUR)
        tar.write(bytes(1024))
    assert peak_of_reading(tmp_path) < 100
    assert [*codes(tmp_path).values()] == ["too_many_bytes"] * 2


@pytest.mark.parametrize("damage", ["truncated", "garbage", "hole"])
def test_a_tar_that_is_not_read_to_its_end_is_damage(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tar = tar_bytes((f"{n}.jpg", jpeg(n)) for n in range(8))
    half = len(tar) // 2 // 512 * 512
    data = {"truncated": tar[:half], "garbage": tar[:half] + b"x" * half,
            "hole": tar[:half] + bytes(2 << 20)}[damage]  # fmt: skip
    write_files(tmp_path / "in", {"a.tar": tar, "b.tar": data})
    for _ in range(2):
        with packing_here():
            assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out"), *BUCKETS]) == 3
        assert "1 tar cannot be read to the end" in capsys.readouterr().out
    assert manifest_of(tmp_path / "out").samples < 16


def test_tables_of_samples_are_no_part_of_a_source(tmp_path: Path) -> None:
    """Neither beside shards of ours nor beside indexed tars, so indexing changes no input."""
    images = pack(photos(tmp_path / "in", 3), tmp_path / "images")
    theirs = tmp_path / "theirs"
    for path in images.glob("*/*.tar"):
        (theirs / path.parent.name).mkdir(parents=True)
        shutil.copy(path, theirs / path.parent.name)
    ours, others = (
        TarsSource(url=str(root), pattern=ALL_TARS, columns=Columns()) for root in (images, theirs)
    )
    before = list(others.items())
    assert main(["index", str(theirs)]) == 0
    assert {path.name for path in theirs.glob("*/*.parquet")} == {"000000.tar.parquet"}
    assert list(others.items()) == before
    assert [*map(list, map(ours.read, ours.items()))] == [*map(list, map(others.read, before))]
