"""Sources: whatever people have on disk comes out as samples and named refusals."""

import csv
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit import corpus
from tests.kit.packs import (
    BUCKETS,
    by_source,
    jpeg,
    manifest_of,
    pack,
    rows_of,
    samples_of,
    source_of,
    tar_bytes,
    tars,
    upload,
    write_files,
)
from wdsprep.cli import main
from wdsprep.errors import SourceError, UsageError
from wdsprep.samples import Code, Sample
from wdsprep.sources import Item, LeftOut, Refusal
from wdsprep.tar.write import header

HOSTILE = ("../../x", "/etc/y", "a/./b", "..", "c//d", "~/e", "f\\g")


def sample(url: Path, name: str, **options: Any) -> Sample:
    found = by_source(url, **options)[name]
    assert isinstance(found, Sample), found
    return found


def codes(url: Path, **options: Any) -> dict[str, str]:
    rows = by_source(url, **options).items()
    return {name: row.code.value for name, row in rows if isinstance(row, Refusal)}


# --- folders


def test_caption_comes_from_txt_then_json_then_metadata(tmp_path: Path) -> None:
    rows = [{"file_name": f"{name}.jpg", "caption": "of metadata", "n": 1} for name in "abcd"]
    write_files(
        tmp_path,
        {
            "a.jpg": jpeg(1), "a.txt": " of txt\n", "a.json": '{"caption": "of json", "m": 2}',
            "b.jpg": jpeg(2), "b.json": '{"caption": "of json"}',
            "c.jpg": jpeg(3), "c.txt": " \n", "c.json": '{"text": "the text"}',
            "d.jpg": jpeg(4), "d.json": '{"m": 2}',
            "e.jpg": jpeg(5),
            "metadata.jsonl": "\n".join(map(json.dumps, rows)),
        },
    )  # fmt: skip
    captions = {name[0]: sample(tmp_path, name).caption for name in by_source(tmp_path)}
    assert captions == {"a": "of txt", "b": "of json", "c": "the text", "d": "of metadata", "e": ""}
    assert sample(tmp_path, "a.jpg").facts["m"] == 2
    assert sample(tmp_path, "a.jpg").facts["n"] == 1


def test_folders_nest_and_equal_names_stay_apart(tmp_path: Path) -> None:
    names = ["x.jpg", "a/x.jpg", "a/b/c/d/x.jpg", "a.b/x.jpg", "a/x.b/x.jpg"]
    for number, name in enumerate(names):
        stem = name.removesuffix(".jpg")
        write_files(tmp_path, {name: jpeg(number), f"{stem}.txt": f"caption of {name}"})
    found = by_source(tmp_path)
    assert sorted(found) == sorted(names)
    for number, name in enumerate(names):
        assert sample(tmp_path, name).caption == f"caption of {name}"
        assert sample(tmp_path, name).image == jpeg(number)


@pytest.mark.parametrize(
    "stem",
    ["two words", "v1.2.final", "a.b", "köln ☃ 猫", "#1?&%20", "-n", 'it\'s "x"', "a\tb", "é"],
)
def test_any_file_name_meets_its_caption(tmp_path: Path, stem: str) -> None:
    write_files(
        tmp_path,
        {
            f"{stem}.jpg": jpeg(1), f"{stem}.txt": "mine",
            f"{stem}.x.jpg": jpeg(2), f"{stem}.x.txt": "not mine",
            "a.jpg": jpeg(3), "a.txt": "other", f"{stem} .png": jpeg(4, kind="PNG"),
        },
    )  # fmt: skip
    assert sample(tmp_path, f"{stem}.jpg").caption == "mine"
    assert sample(tmp_path, f"{stem}.x.jpg").caption == "not mine"
    assert sample(tmp_path, f"{stem} .png").caption == ""
    assert not codes(tmp_path)


def test_a_name_that_is_no_utf8_is_read_and_shown_replaced(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path)
    for kind, data in ((b"jpg", jpeg(1)), (b"txt", b"old name")):
        Path(os.fsdecode(root + b"/caf\xe9." + kind)).write_bytes(data)
    write_files(tmp_path, {"metadata.csv": "file_name,n\ncaf\ufffd.jpg,7\n"})
    found = sample(tmp_path, "caf\ufffd.jpg")
    assert (found.caption, found.facts["n"], found.image) == ("old name", "7", jpeg(1))
    (tmp_path / "metadata.csv").unlink()
    item = next(source_of(tmp_path).items())
    assert Item.from_json(item.to_json()) == item


def test_several_images_of_one_stem_are_samples_each(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jpg": jpeg(1), "a.png": jpeg(2, kind="PNG"), "a.txt": "both"})
    assert {n: sample(tmp_path, n).caption for n in by_source(tmp_path)} == {
        "a.jpg": "both",
        "a.png": "both",
    }


def test_upper_case_extensions_count(tmp_path: Path) -> None:
    write_files(tmp_path, {"DSC1.JPG": jpeg(1), "DSC1.TXT": "a camera's"})
    write_files(tmp_path, {"DSC2.JPG": jpeg(2), "DSC2.JSON": '{"text": "too"}'})
    assert sample(tmp_path, "DSC1.JPG").caption == "a camera's"
    assert sample(tmp_path, "DSC2.JPG").caption == "too"


def test_caption_without_image_is_refused_by_name(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "a.jpg": jpeg(1), "lone.txt": "x", "alone.json": "{}", "both.txt": "",
            "both.json": "{}",
            "metadata.csv": "file_name,caption\na.jpg,here\ngone.jpg,lost\n../../etc/passwd,up\n",
        },
    )  # fmt: skip
    lonely = ["../../etc/passwd", "alone.json", "both.json", "gone.jpg", "lone.txt"]
    assert codes(tmp_path) == dict.fromkeys(lonely, "no_image")
    assert sample(tmp_path, "a.jpg").caption == "here"


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_metadata_tables_speak_of_their_own_folder(tmp_path: Path, kind: str) -> None:
    def table(names: list[str]) -> str:
        rows = [{"file_name": name, "text": f"row of {name}"} for name in names]
        if kind == "jsonl":
            return "\ufeff" + "\n".join(map(json.dumps, rows)) + "\n\n"
        out = io.StringIO()
        writer = csv.DictWriter(out, ["file_name", "text"])
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()

    write_files(
        tmp_path,
        {
            "x.jpg": jpeg(1), "sub/x.jpg": jpeg(2), "sub/deep/x.jpg": jpeg(3), "y.jpg": jpeg(4),
            f"metadata.{kind}": table(["./x.jpg", "sub/deep/x.jpg"]),
            f"sub/metadata.{kind}": table(["x.jpg"]),
        },
    )  # fmt: skip
    captions = {name: sample(tmp_path, name).caption for name in by_source(tmp_path)}
    assert captions == {
        "x.jpg": "row of ./x.jpg",
        "sub/x.jpg": "row of x.jpg",
        "sub/deep/x.jpg": "row of sub/deep/x.jpg",
        "y.jpg": "",
    }


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metadata.jsonl", '{"file_name": "a.jpg"}\n{oops\n', "line 2"),
        ("metadata.jsonl", "[1]\n", "line 1"),
        ("metadata.jsonl", '{"name": "a.jpg"}\n', "no file_name: it has name"),
        ("metadata.csv", "name,caption\na.jpg,x,extra\n", "no file_name: it has name"),
        ("metadata.csv", b"file_name\n\xff\xfe\n", "metadata.csv cannot be read"),
    ],
)
def test_a_broken_metadata_table_is_an_error_that_says_where(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    write_files(tmp_path, {"a.jpg": jpeg(1), name: text})
    with pytest.raises(SourceError, match=message):
        rows_of(tmp_path)


def test_half_a_surrogate_in_metadata_harms_nothing(tmp_path: Path) -> None:
    rows = '{"file_name": "\\ud800.jpg"}\n{"file_name": "a.jpg", "caption": "x\\udfffy"}'
    out = pack(
        write_files(tmp_path / "in", {"a.jpg": jpeg(1), "metadata.jsonl": rows}), tmp_path / "out"
    )
    assert "no_image" in (out / "rejects/000000.jsonl").read_text()


def test_a_loop_of_links_ends_and_links_to_images_are_read(tmp_path: Path) -> None:
    root = write_files(tmp_path / "in", {"a/x.jpg": jpeg(1), "a/x.txt": "real"})
    (root / "a/loop").symlink_to(root)
    (root / "a/self").symlink_to("self")
    (root / "a/y.jpg").symlink_to("x.jpg")
    (root / "a/z.jpg").symlink_to("nowhere")
    found = by_source(root)
    assert sample(root, "a/y.jpg").image == jpeg(1)
    assert codes(root) == {"a/z.jpg": "vanished"}
    assert sorted(found) == ["a/x.jpg", "a/y.jpg", "a/z.jpg"]


def test_hidden_files_and_leftovers_of_other_tools_are_left_out(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "a.jpg": jpeg(1), ".b.jpg": jpeg(2), "._a.jpg": b"\0\5\x16\7", ".git/c.jpg": jpeg(3),
            "d/.e/f.jpg": jpeg(4), ".DS_Store": b"x", ".x/metadata.csv": "file_name\nb.jpg\n",
            ".old.tar": b"x", "Thumbs.db": b"x",
            "notes.md": "# x", "clip.mp4": b"x", "00000_stats.json": "{}",
        },
    )  # fmt: skip
    assert sorted(by_source(tmp_path)) == ["a.jpg"]


@pytest.mark.parametrize("field", ["captions", "text"])
def test_several_captions_are_all_kept_and_the_first_leads(tmp_path: Path, field: str) -> None:
    texts = ["one", "two ", "", 3, "three"]
    write_files(
        tmp_path,
        {
            "a.jpg": jpeg(1), "a.json": json.dumps({field: texts}),
            "b.jpg": jpeg(2), "b.json": json.dumps({field: texts}), "b.txt": "one",
            "c.jpg": jpeg(2), "c.json": json.dumps({field: texts}), "c.txt": "",
        },
    )  # fmt: skip
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        assert sample(tmp_path, name).captions == ("one", "two", "three")


def test_named_caption_field_is_the_only_one_that_counts(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {"a.jpg": jpeg(1), "a.txt": "txt", "a.json": '{"blip": "a blip", "caption": "no"}'},
    )
    assert sample(tmp_path, "a.jpg", caption="blip").captions == ("a blip",)


@pytest.mark.parametrize(
    "text",
    ["👩🏽‍🚀 on 🌕", "שלום עולם \u202eabc", "one\ntwo\r\nthree", "nul \0 inside", "\\u0041{}\"'"],
)
def test_captions_arrive_as_they_are(tmp_path: Path, text: str) -> None:
    write_files(
        tmp_path,
        {
            "a.jpg": jpeg(1), "a.txt": text,
            "b.jpg": jpeg(2), "b.json": json.dumps({"caption": text}),
            "c.jpg": jpeg(2), "c.txt": b"\xef\xbb\xbf" + text.encode(),
        },
    )  # fmt: skip
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        assert sample(tmp_path, name).caption == text


def test_sidecars_that_cannot_be_read_refuse_their_sample(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "a.jpg": jpeg(1), "a.txt": b"caf\xe9 au lait",
            "b.jpg": jpeg(2), "b.json": "[1, 2]",
            "c.jpg": jpeg(3), "c.json": '{"caption": ',
            "d.jpg": jpeg(4), "d.json": b'{"caption": "\xff"}',
            "e.jpg": jpeg(5), "e.json": "[" * 100_000,
            "f.jpg": jpeg(6), "f.json": "",
            "g.jpg": jpeg(7), "g.json": '{"n": ' + "9" * 10_000 + "}",
        },
    )  # fmt: skip
    found = codes(tmp_path)
    assert found.pop("a.jpg") == "bad_caption"
    assert found == dict.fromkeys((f"{name}.jpg" for name in "bcdefg"), "bad_json")
    refused = by_source(tmp_path)["a.jpg"]
    assert isinstance(refused, Refusal)
    assert refused.detail == "a.txt is not UTF-8 (byte 3): save it as UTF-8"


def test_facts_are_kept_without_what_says_nothing(tmp_path: Path) -> None:
    facts = '{"a": null, "b": NaN, "c": {"d": null, "e": 1}, "f": [1, null, -Infinity], "g": ""}'
    write_files(tmp_path, {"a.jpg": jpeg(1), "a.json": facts})
    assert sample(tmp_path, "a.jpg").facts == {"c": {"e": 1}, "f": [1], "g": ""}


@pytest.mark.parametrize("number", ["9" * 400 + ".5", "-1e999", "NaN"])
@pytest.mark.parametrize("kind", ["folder", "metadata", "tar"])
def test_no_number_is_stored_that_json_cannot_hold(tmp_path: Path, kind: str, number: str) -> None:
    facts = f'"a": {number}, "list": [{number}, 1.5], "file_name": "a.jpg"'
    files: dict[str, dict[str, bytes | str]] = {
        "folder": {"a.jpg": jpeg(1), "a.json": f"{{{facts}}}"},
        "metadata": {"a.jpg": jpeg(1), "metadata.jsonl": f"{{{facts}}}"},
        "tar": {"a.tar": tar_bytes([("a.jpg", jpeg(1)), ("a.json", f"{{{facts}}}".encode())])},
    }
    images = pack(write_files(tmp_path / "in", files[kind]), tmp_path / "out")
    (stored,) = samples_of(images)
    assert stored["json"]["meta"] == {"list": [1.5], "file_name": "a.jpg"}


def test_the_same_folder_on_s3_gives_the_same_shards(tmp_path: Path, bucket: str) -> None:
    local = write_files(
        tmp_path / "in",
        {
            "a.jpg": jpeg(1), "a.txt": "one", "a.b.jpg": jpeg(2), "a.b.json": '{"text": "two"}',
            "sub/ü x.png": jpeg(3, kind="PNG"), "sub/metadata.csv": "file_name,text\nü x.png,3\n",
            "a/lone.txt": "alone", "z.jpg": b"<html>", ".hidden.jpg": jpeg(4), "B.JPG": jpeg(5),
        },
    )  # fmt: skip
    upload(local, f"s3://{bucket}/in")
    here = pack(local, tmp_path / "here")
    there = pack(f"s3://{bucket}/in", tmp_path / "there")
    pack(local, f"s3://{bucket}/out/deep")
    assert len(tars(here)) == 4
    assert tars(here) == tars(there) == tars(f"s3://{bucket}/out/deep")
    name = "rejects/000000.jsonl"
    assert (here / name).read_bytes() == (there / name).read_bytes()


@pytest.mark.parametrize("name", ["photos [best]", "{a,b}", "what?", "star*"])
def test_a_folder_with_a_wildcard_in_its_name_is_a_folder(tmp_path: Path, name: str) -> None:
    write_files(tmp_path / name, {"a.jpg": jpeg(1)})
    assert sorted(by_source(tmp_path / name)) == ["a.jpg"]


@pytest.mark.parametrize("make", [True, False])
def test_an_empty_or_missing_source_is_an_error_and_writes_nothing(
    tmp_path: Path, make: bool
) -> None:
    if make:
        (tmp_path / "in/sub").mkdir(parents=True)
    with pytest.raises(SourceError, match="in is empty or not there"):
        pack(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_with_nothing_of_use_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    write_files(tmp_path / "in", {"README": "x", "a.mp4": b"x"})
    with pytest.raises(SourceError, match="holds nothing to pack"):
        pack(tmp_path / "in", tmp_path / "out")
    with pytest.raises(SourceError, match=r"no tar matches .*/in/\*\.tar"):
        pack(f"{tmp_path}/in/*.tar", tmp_path / "out")
    with pytest.raises(SourceError, match=r"none\.tar is not there"):
        pack(tmp_path / "in/none.tar", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_addresses_that_pack_cannot_read_are_refused(tmp_path: Path) -> None:
    for url in ("https://host/a.tar", "pipe:cat x.tar", "gs://bucket/x"):
        with pytest.raises(UsageError):
            pack(url, tmp_path / "out")


# --- tars


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

    assert names("") == ["000.tar", "001.tar", "002.tar", "x/003.tar", "x/other.tar"]
    assert names("{000..002}.tar") == ["000.tar", "001.tar", "002.tar"]
    assert names("00[01].tar") == ["000.tar", "001.tar"]
    assert names("x/{003,other}.tar") == ["003.tar", "other.tar"]
    assert names("x/0*.tar") == ["003.tar"]
    assert names("001.tar") == ["001.tar"]
    with pytest.raises(SourceError, match=r"003.tar is not there \(3 of 6 tars are missing\)"):
        names("{000..005}.tar")
    with pytest.raises(SourceError, match="stands for over"):
        names("{0..99999999}.tar")


def test_tars_are_found_on_s3(tmp_path: Path, bucket: str) -> None:
    for number in range(3):
        data = tar_bytes([("a.jpg", jpeg(number)), ("a.txt", b"c")])
        write_files(tmp_path, {f"in/{number}.tar": data})
    upload(tmp_path, f"s3://{bucket}/deep")
    here = rows_of(f"{tmp_path}/in/{{0..2}}.tar")
    for pattern in ("", "/{0..2}.tar", "/*.tar"):
        assert rows_of(f"s3://{bucket}/deep/in{pattern}") == here
    assert rows_of(f"s3://{bucket}/deep/in/1.tar") == [here[1]]


def test_a_folder_of_images_and_tars_asks_which(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jpg": jpeg(1), "b.tar": tar_bytes([("b.jpg", jpeg(2))])})
    with pytest.raises(SourceError, match="both images and tars: name the tars as"):
        source_of(tmp_path)


def test_a_truncated_tar_gives_what_is_whole_and_refuses_the_rest(tmp_path: Path) -> None:
    data = tar_bytes((f"{n}.{kind}", jpeg(n)) for n in range(5) for kind in ("jpg", "txt"))
    write_files(tmp_path, {"a.tar": data[: int(len(data) * 0.5)], "b.tar": b"", "c.tar": b"<html>"})
    found = {name: row for name, row in by_source(tmp_path).items() if isinstance(row, Refusal)}
    assert found["a.tar/2"].code == Code.TAR_TRUNCATED
    assert found["b.tar"].code == Code.TAR_TRUNCATED
    assert found["c.tar"].code in (Code.TAR_TRUNCATED, Code.TAR_BAD_HEADER)
    assert "a.tar/3" not in by_source(tmp_path)


def test_repeated_keys_and_fields_are_refused(tmp_path: Path) -> None:
    members = [("a.jpg", jpeg(1)), ("b.jpg", jpeg(2)), ("a.jpg", jpeg(3)), ("c.jpg", jpeg(4)),
               ("c.jpg", jpeg(5)), ("b.txt", b"late"), ("d.jpg", jpeg(6))]  # fmt: skip
    write_files(tmp_path, {"a.tar": tar_bytes(members)})
    kinds = [r.code.value if isinstance(r, Refusal) else r.source for r in rows_of(tmp_path)]
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
    assert codes(tmp_path) == {
        "a.tar/b": "no_image",
        "a.tar/d": "no_image",
        "a.tar/f": "bad_json",
        "a.tar/g": "bad_caption",
    }
    assert sample(tmp_path, "a.tar/e").image == jpeg(2)


def test_tar_captions_follow_the_same_rules_as_folders(tmp_path: Path) -> None:
    several = b'{"captions": ["one", "two"]}'
    members = [("a.jpg", jpeg(1)), ("a.json", several), ("a.txt", b"one"),
               ("b.jpg", jpeg(1)), ("b.json", several), ("b.txt", b""),
               ("c.jpg", jpeg(1)), ("c.json", several), ("c.txt", b"other")]  # fmt: skip
    write_files(tmp_path, {"a.tar": tar_bytes(members)})
    assert [r.captions for r in rows_of(tmp_path) if isinstance(r, Sample)] == [
        ("one", "two"),
        ("one", "two"),
        ("other",),
    ]


def test_a_tar_that_vanishes_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.tar": tar_bytes([("a.jpg", jpeg(1))])})
    source = source_of(tmp_path)
    (item,) = source.items()
    (tmp_path / "a.tar").unlink()
    (row,) = source.read(item)
    assert isinstance(row, Refusal)
    assert (row.source, row.code) == ("a.tar", Code.TAR_VANISHED)


# --- tables


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


SPARSE_PEAK = """
import re, sys
from pathlib import Path
from wdsprep.sources import Columns
from wdsprep.sources.recognise import recognise
source = recognise(sys.argv[1], columns=Columns(), rows_per_item=10_000)
rows = [row for item in source.items() for row in source.read(item)]
print(*[getattr(row, "code", "sample") for row in rows])
status = Path("/proc/self/status").read_text()  # getrusage knows of the parent's memory too
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024)
"""


def test_members_of_any_size_take_no_memory(tmp_path: Path) -> None:
    """A tar with holes is 40 kB on disk and 2 GB to read."""
    sizes = {"a.jpg": 600 << 20, "b.json": 300 << 20, "b.jpg": 4, "c.mov": 1 << 30, "d.jpg": 4}
    with (tmp_path / "a.tar").open("wb") as tar:
        for name, nbytes in sizes.items():
            tar.write(header(name, nbytes))
            tar.seek(nbytes + -nbytes % 512, os.SEEK_CUR)
        tar.write(bytes(1024))
    words = [sys.executable, "-c", SPARSE_PEAK, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found, peak_mb = done.stdout.splitlines()
    assert found == "too_many_bytes too_many_bytes sample"
    assert int(peak_mb) < 200


def test_the_limit_of_bytes_is_the_users_for_every_source(tmp_path: Path) -> None:
    sizes = {"a.jpg": len(jpeg(1)), "b.jpg": len(jpeg(2))}
    limit = min(sizes.values())
    files: dict[str, bytes | str] = {"a.jpg": jpeg(1), "b.jpg": jpeg(2)}
    write_files(tmp_path / "folder", files)
    write_files(tmp_path / "tars", {"x.tar": tar_bytes([(n, bytes(files[n])) for n in sizes])})  # type: ignore[arg-type]
    (tmp_path / "tables").mkdir()
    write_table(tmp_path / "tables/x.parquet", [{"jpg": data} for data in files.values()])
    for kind in ("folder", "tars", "tables"):
        out = pack(tmp_path / kind, tmp_path / f"out-{kind}", "--max-bytes", str(limit))
        assert manifest_of(out).rejects == {"too_many_bytes": 1}
        assert manifest_of(out).samples == 1
        assert manifest_of(out).settings["max_bytes"] == limit
    assert "max_bytes" not in manifest_of(pack(tmp_path / "folder", tmp_path / "o")).settings


def test_every_image_by_its_name_is_packed_or_a_reject(tmp_path: Path) -> None:
    odd = {"m.mpo": corpus.mpo(), "j.jxl": b"\xff\x0a" + bytes(99), "f.fli": bytes(4) + b"\x11\xaf"}
    write_files(tmp_path / "folder", {"a.jpg": jpeg(1), **odd})
    write_files(tmp_path / "tars", {"x.tar": tar_bytes([("a.jpg", jpeg(1)), *odd.items()])})
    for kind in ("folder", "tars"):
        manifest = manifest_of(pack(tmp_path / kind, tmp_path / f"out-{kind}"))
        assert manifest.samples == 2
        assert manifest.rejects == {"not_an_image": 1, "unsupported": 1}


def test_an_image_that_can_be_decoded_goes_before_one_that_cannot(tmp_path: Path) -> None:
    members = [("a.svg", b"<svg/>"), ("a.png", jpeg(1, kind="PNG")), ("a.jpg", jpeg(2))]
    write_files(tmp_path, {"x.tar": tar_bytes(members)})
    assert sample(tmp_path, "x.tar/a").image == jpeg(1, kind="PNG")


def test_what_is_no_input_is_counted_by_its_kind_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"a.mov": b"", "b.MOV": b"", "README": b"", ".hidden.mov": b"", "t.tar.zst": b""}
    tar = tar_bytes(
        [("a.jpg", jpeg(1)), ("a.png", jpeg(2, kind="PNG")), ("c.cls", b"1"), ("LICENSE", b"x"),
         ("d.seg.png", jpeg(2, kind="PNG")), ("d.cls", b"1"), ("d.txt", b"x"), ("._d.jpg", b"x")]
    )  # fmt: skip
    write_files(tmp_path / "folder", {"a.jpg": jpeg(1), "a.txt": "x", **other, "x.idx": b""})
    write_files(tmp_path / "tars", {"x.tar": tar, "x.tar.idx": b"", "0_stats.json": "{}", **other})
    beside = {".mov": 2, "no extension": 1, ".zst": 1}
    pack(tmp_path / "folder", tmp_path / "out-folder")
    assert manifest_of(tmp_path / "out-folder").extra["left_out"] == beside | {".idx": 1}
    capsys.readouterr()
    for _ in range(2):  # the second time nothing is left to do
        pack(tmp_path / "tars", tmp_path / "out-tars")
        line = "left out, neither images nor captions by their names: "
        (said,) = [s for s in capsys.readouterr().out.splitlines() if s.startswith(line)]
        parts = {"2 .mov", "2 no extension", "2 .cls", "1 .zst", "1 .png"}
        assert set(said.removeprefix(line).split(", ")) == parts
    pack(tmp_path / "tars", tmp_path / "out-tars", "--json")
    facts = json.loads(capsys.readouterr().out)
    assert facts["left_out"] == {".mov": 2, "no extension": 2, ".cls": 2, ".zst": 1, ".png": 1}
    assert manifest_of(tmp_path / "out-tars").samples == 2


def test_kinds_of_a_hostile_tar_are_few_and_plain() -> None:
    left_out = LeftOut()
    for number in range(1000):
        left_out.note(f".{number}")
    left_out.note(".\x1b[31m")
    assert len(left_out.kinds) == LeftOut.NAMED + 1
    assert left_out.kinds["others"] == 1001 - LeftOut.NAMED
    assert LeftOut.among(left_out.counts() | {"side<8": 3}) == left_out.kinds


@pytest.mark.parametrize("damage", ["truncated", "garbage", "hole"])
def test_a_tar_that_is_not_read_to_its_end_is_damage(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tar = tar_bytes((f"{n}.jpg", jpeg(n)) for n in range(8))
    half = len(tar) // 2 // 512 * 512
    data = {"truncated": tar[:half], "garbage": tar[:half] + b"x" * half,
            "hole": tar[:half] + bytes(2 << 20)}[damage]  # fmt: skip
    write_files(tmp_path / "in", {"a.tar": tar, "b.tar": data})
    words = ["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--workers", "1", *BUCKETS]
    for _ in range(2):
        assert main(words) == 3
        assert "1 tar cannot be read to the end" in capsys.readouterr().out
    assert manifest_of(tmp_path / "out").samples < 16


def test_joined_tars_lose_nothing(tmp_path: Path) -> None:
    parts = [tar_bytes([(f"{n}.jpg", jpeg(n)), (f"{n}.txt", b"x")]) for n in range(3)]
    write_files(tmp_path / "in", {"a.tar": b"".join(parts)})
    words = ["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--workers", "1", *BUCKETS]
    assert main(words) == 0
    assert manifest_of(tmp_path / "out").samples == 3


def write_table(path: Path, rows: list[dict[str, Any]], **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)


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


def test_a_damaged_table_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_files(tmp_path, {"t.parquet": b"PAR1 and nothing else"})
    with pytest.raises(SourceError, match=r"t.parquet is no sound Parquet file"):
        rows_of(tmp_path)


PEAK = """
import resource, sys
from wdsprep.sources import Columns
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
