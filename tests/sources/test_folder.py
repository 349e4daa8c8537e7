"""Folders: whatever people have on disk comes out as samples and named refusals."""

import csv
import io
import json
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.kit import corpus
from tests.kit.packs import (
    by_source,
    codes,
    jpeg,
    manifest_of,
    pack,
    rows_of,
    sample,
    samples_of,
    source_of,
    tar_bytes,
    write_files,
    write_table,
)
from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.samples import Sample
from wdsprep.errors import SourceError
from wdsprep.sources.base import Item, count_left_out, left_out_among


def captions_in(place: Path, **options: Any) -> dict[str, str]:
    rows = by_source(place, **options).items()
    return {name: row.caption for name, row in rows if isinstance(row, Sample)}


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
    captions = {"a": "of txt", "b": "of json", "c": "the text", "d": "of metadata", "e": ""}
    assert captions_in(tmp_path) == {f"{name}.jpg": text for name, text in captions.items()}
    facts = sample(tmp_path, "a.jpg").facts
    assert (facts["m"], facts["n"]) == (2, 1)


def test_a_number_is_a_caption_where_it_stands_for_one(tmp_path: Path) -> None:
    facts = ['{"caption": 0}', '{"text": 7.5}', '{"caption": true}', '{"caption": null}']
    for number, text in enumerate(facts):
        write_files(tmp_path, {f"{number}.jpg": jpeg(number), f"{number}.json": text})
    assert [*captions_in(tmp_path).values()] == ["0", "7.5", "", ""]


def test_folders_nest_and_equal_names_stay_apart(tmp_path: Path) -> None:
    names = ["x.jpg", "a/x.jpg", "a/b/c/d/x.jpg", "a.b/x.jpg", "a/x.b/x.jpg"]
    for number, name in enumerate(names):
        stem = name.removesuffix(".jpg")
        write_files(tmp_path, {name: jpeg(number), f"{stem}.txt": f"caption of {name}"})
    assert captions_in(tmp_path) == {name: f"caption of {name}" for name in names}
    assert [sample(tmp_path, name).image for name in names] == [*map(jpeg, range(len(names)))]


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
    captions = {f"{stem}.jpg": "mine", f"{stem}.x.jpg": "not mine", f"{stem} .png": ""}
    assert captions_in(tmp_path).items() >= captions.items()
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
    assert Item.from_line(json.loads(item.to_json())) == item


def test_captions_of_other_extensions_count_where_they_are_named(tmp_path: Path) -> None:
    members: dict[str, bytes] = {
        "a.jpg": jpeg(1), "a.caption": b"kohya's", "a.txt": b"tags", "a.json": b'{"text": "json"}',
        "b.jpg": jpeg(2), "b.TXT": b"tags alone", "lone.caption": b"x",
        "c.jpg": jpeg(3), "c.caption": b"", "c.txt": b"not read",
    }  # fmt: skip
    folder = write_files(tmp_path / "folder", dict(members))
    both, one = {"caption_ext": (".caption", ".txt")}, {"caption_ext": (".caption",)}
    assert codes(folder, **both) == {"lone.caption": "no_image"}
    parts = next(source_of(folder, **both).items()).parts
    assert [name for name, _, _ in parts] == ["a.jpg", "a.json", "a.caption"]
    assert sample(folder, "a.jpg").caption == "tags"
    write_files(tmp_path / "tars", {"x.tar": tar_bytes(members.items())})
    for place in (folder, tmp_path / "tars"):
        assert [*captions_in(place, **both).values()] == ["kohya's", "tags alone", ""]
        assert [*captions_in(place, **one).values()] == ["kohya's", "", ""]
    left_out, source = Counter[str](), source_of(tmp_path / "tars", **one)
    for item in source.items():
        assert [*source.read(item, partial(count_left_out, left_out))]
    assert left_out_among(left_out) == {".txt": 3}


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
    assert captions_in(tmp_path) == {
        "x.jpg": "row of ./x.jpg",
        "sub/x.jpg": "row of x.jpg",
        "sub/deep/x.jpg": "row of sub/deep/x.jpg",
        "y.jpg": "",
    }


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metadata.jsonl", '{"file_name": "a.jpg"}\n{oops\n', "row 2"),
        ("metadata.jsonl", "[1]\n", "row 1"),
        ("metadata.jsonl", f'{{"file_name": "a.jpg", "b": {"[" * 90_000}', "row 1"),
        ("metadata.jsonl", '{"name": "a.jpg"}\n', "row 1: no file_name"),
        ("metadata.csv", "file_name,caption\na.jpg,x,\n,y\n", "row 2: no file_name"),
        ("metadata.csv", "file_name,caption\na.jpg,x\n./a.jpg,y\n", "a second row for a.jpg: g"),
        ("metadata.csv", "file_name,caption\na.jpg,red, green\n", "row 1: .* 3 cells"),
        ("metadata.csv", b"file_name\n\xff\xfe\n", "row 1: .* not UTF-8"),
        ("metadata.csv", 'file_name,text\na.jpg,"x\nb.jpg,y\n', "a quote opened"),
    ],
)
def test_a_broken_metadata_table_is_an_error_that_says_where(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    write_files(tmp_path, {"a.jpg": jpeg(1), name: text})
    with pytest.raises(SourceError, match=message):
        rows_of(tmp_path)


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
@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_several_captions_are_all_kept_and_the_first_leads(
    tmp_path: Path, kind: str, field: str
) -> None:
    facts = json.dumps({field: ["one", "two ", "", 3, "three"]}).encode()
    texts = {"a": None, "b": b"one", "c": b"", "d": b"other"}
    files = {f"{name}.jpg": jpeg(1) for name in texts} | {f"{name}.json": facts for name in texts}
    files |= {f"{name}.txt": text for name, text in texts.items() if text is not None}
    tar = {"x.tar": tar_bytes(sorted(files.items()))}
    write_files(tmp_path, tar if kind == "tar" else dict(files))
    captions = [row.captions for row in rows_of(tmp_path) if isinstance(row, Sample)]
    assert captions == [("one", "two", "three")] * 3 + [("other",)]


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
    assert captions_in(tmp_path) == dict.fromkeys(("a.jpg", "b.jpg", "c.jpg"), text)


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
    bad_json = dict.fromkeys((f"{name}.jpg" for name in "bcdefg"), "bad_json")
    assert codes(tmp_path) == {"a.jpg": "bad_caption", **bad_json}
    refused = by_source(tmp_path)["a.jpg"]
    assert isinstance(refused, Reject)
    assert refused.detail == "a.txt is not UTF-8 (byte 3): save it as UTF-8"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
@pytest.mark.parametrize(
    ("facts", "kept"),
    [
        ('{"a": null, "b": NaN, "c": 1, "d": 1e999, "e": true}', {"c": 1, "e": True}),
        (
            '{"a": null, "c": {"d": null, "e": 1}, "f": [1, null, -Infinity], "g": ""}',
            {"c": {"e": 1}, "f": [1], "g": ""},
        ),
    ],
)
def test_facts_are_kept_without_what_says_nothing(
    tmp_path: Path, encoding: str, facts: str, kept: object
) -> None:
    write_files(tmp_path, {"a.jpg": jpeg(1), "a.json": facts.encode(encoding)})
    assert sample(tmp_path, "a.jpg").facts == kept


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


@pytest.mark.parametrize("kind", ["folder", "tars", "table"])
def test_the_limit_of_bytes_is_the_users_for_every_source(tmp_path: Path, kind: str) -> None:
    files = {"a.jpg": jpeg(1), "b.jpg": jpeg(2)}
    limit = min(map(len, files.values()))
    if kind == "table":
        write_table(tmp_path / "in/x.parquet", [{"jpg": data} for data in files.values()])
    else:
        tar = {"x.tar": tar_bytes(files.items())}
        write_files(tmp_path / "in", tar if kind == "tars" else dict(files))
    manifest = manifest_of(pack(tmp_path / "in", tmp_path / "out", "--max-bytes", str(limit)))
    assert (manifest.rejects, manifest.samples) == ({"too_many_bytes": 1}, 1)
    assert manifest.settings["max_bytes"] == limit
    assert "max_bytes" not in manifest_of(pack(tmp_path / "in", tmp_path / "o")).settings


def test_every_image_by_its_name_is_packed_or_a_reject(tmp_path: Path) -> None:
    odd = {"m.mpo": corpus.mpo(), "j.jxl": b"\xff\x0a" + bytes(99), "f.fli": bytes(4) + b"\x11\xaf"}
    write_files(tmp_path / "folder", {"a.jpg": jpeg(1), **odd})
    write_files(tmp_path / "tars", {"x.tar": tar_bytes([("a.jpg", jpeg(1)), *odd.items()])})
    for kind in ("folder", "tars"):
        manifest = manifest_of(pack(tmp_path / kind, tmp_path / f"out-{kind}"))
        assert (manifest.samples, manifest.rejects) == (2, {"not_an_image": 1, "unsupported": 1})


def test_what_is_no_input_is_counted_by_its_kind_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"a.mov": b"", "b.MOV": b"", "README": b"", ".hidden.mov": b"", "t.tar.zst": b""}
    tar = tar_bytes(
        [("a.jpg", jpeg(1)), ("a.png", jpeg(2, kind="PNG")), ("c.cls", b"1"), ("LICENSE", b"x"),
         ("d.seg.png", jpeg(2, kind="PNG")), ("d.cls", b"1"), ("d.txt", b"x"), ("._d.jpg", b"x")]
    )  # fmt: skip
    named = {"a.jpg": jpeg(1), "a.txt": "x", "metadata.json": '[{"file_name": "a.jpg"}]'}
    write_files(tmp_path / "folder", {**named, **other, "x.idx": b""})
    write_files(tmp_path / "tars", {"x.tar": tar, "x.tar.idx": b"", "0_stats.json": "{}", **other})
    beside = {".mov": 2, "no extension": 1, ".zst": 1}
    pack(tmp_path / "folder", tmp_path / "out-folder")
    assert manifest_of(tmp_path / "out-folder").extra["left_out"] == beside | {
        ".idx": 1,
        ".json": 1,
    }
    hint = "a list of these images has to be called metadata.jsonl or metadata.csv"
    assert hint in capsys.readouterr().out
    for _ in range(2):  # the second time nothing is left to do
        pack(tmp_path / "tars", tmp_path / "out-tars")
        line = "left out, neither images nor captions of samples by their names: "
        (said,) = [s for s in capsys.readouterr().out.splitlines() if s.startswith(line)]
        parts = {"2 .mov", "2 no extension", "2 .cls", "1 .zst", "1 .png"}
        assert set(said.removeprefix(line).split(", ")) == parts
    pack(tmp_path / "tars", tmp_path / "out-tars", "--json")
    facts = json.loads(capsys.readouterr().out)
    assert facts["left_out"] == {".mov": 2, "no extension": 2, ".cls": 2, ".zst": 1, ".png": 1}
    assert manifest_of(tmp_path / "out-tars").samples == 2
