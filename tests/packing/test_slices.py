"""What is left to do where a source or settings changed, and with append, overwrite and limit."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.kit.packs import (
    TWENTY,
    check_dataset,
    command,
    jpeg,
    manifest_of,
    pack,
    photos,
    run,
    samples_of,
    tar_bytes,
    tars,
    touch,
    tree,
    write_files,
    write_table,
)
from wdsprep.errors import FingerprintError, UsageError


def refused(source: Path, out: Path, *options: str) -> str:
    """The message of a run that must end in a FingerprintError and write nothing."""
    before = tree(out)
    with pytest.raises(FingerprintError) as caught:
        pack(source, out, *options)
    assert tree(out) == before
    return str(caught.value)


def test_a_changed_source_is_an_error_that_names_what_changed(tmp_path: Path) -> None:
    """Bytes that changed are told from dates."""
    source = photos(tmp_path / "in", 45)
    out = pack(source, tmp_path / "out", *TWENTY)
    photos(source, 1, first=99)
    assert ": 1 added (0/photo-00099.jpg): --append" in refused(source, out, *TWENTY)
    for kind in ("jpg", "txt"):
        (source / f"0/photo-00099.{kind}").unlink()
    caption = source / "1/photo-00004.txt"
    was = caption.read_text()
    caption.write_text(was.replace("noise", "voice"))
    said = f"{source} has changed since it was packed: 1 changed (1/photo-00004.jpg): --over"
    assert said in refused(source, out, *TWENTY)
    touch(source)
    for options in ((), ("--append",)):
        assert "20 have other dates, and some of them other bytes (0/" in refused(
            source, out, *TWENTY, *options
        )
    caption.write_text("another caption")
    for kind in ("jpg", "txt"):
        (source / f"2/photo-00005.{kind}").rename(tmp_path / f"aside.{kind}")
    message = refused(source, out, *TWENTY)
    assert "1 changed (1/photo-00004.jpg), 1 removed (2/photo-00005.jpg)" in message
    assert "--append" not in message
    assert "1 changed" in refused(source, out, *TWENTY, "--append")


@pytest.mark.parametrize("kind", ["folder", "tars", "table", "urls"])
def test_what_has_another_date_alone_is_what_was_packed(tmp_path: Path, kind: str) -> None:
    """Touched, copied, appended to and touched again: nothing is packed twice."""
    root, out = tmp_path / "in", tmp_path / "out"
    options = (*TWENTY, "--ignore-outage") if kind == "urls" else TWENTY
    more(root, kind, 0)
    pack(root, out, *options)
    before = tree(out)
    touch(root)
    pack(root, out, *options)
    pack(root, out, *options, "--append")
    copy = shutil.copytree(root, tmp_path / "copy", copy_function=shutil.copyfile)
    pack(copy, out, *options)
    assert tree(out) == before
    shards = tars(out)
    more(copy, kind, 1)
    pack(copy, out, *options, "--append")
    assert len(manifest_of(out).generations) == 2
    assert tars(out).items() >= shards.items()
    names, before = tree(out).keys(), tars(out)
    touch(copy)
    pack(copy, out, *options)
    (out / "receipts/000000.json").unlink()  # packed again, with the dates of now
    pack(copy, out, *options)
    assert (tree(out).keys(), tars(out)) == (names, before)
    assert manifest_of(out).complete
    check_dataset(out)


def more(root: Path, kind: str, number: int) -> None:
    """Something of 25 samples, in two slices where it is cut."""
    if kind == "folder":
        photos(root, 25, first=number * 25)
    elif kind == "tars":
        files = [(f"{n}.jpg", jpeg(n)) for n in range(25)]
        write_files(root, {f"{number}.tar": tar_bytes(files)})
    elif kind == "table":
        rows = [{"jpg": jpeg(n), "text": str(n)} for n in range(25)]
        write_table(root / f"{number}.parquet", rows, row_group_size=10)
    else:
        rows = [{"url": f"http://127.0.0.1:1/{number}/{n}.jpg", "text": str(n)} for n in range(25)]
        write_table(root / f"{number}.parquet", rows)


NO_UTF8 = os.fsdecode(b"caf\xe9")


def test_names_of_files_that_are_no_utf8_are_told_and_the_locale_changes_no_byte(
    tmp_path: Path,
) -> None:
    """Of inputs, receipts and all else, so a run goes on in another one."""
    names = ("ü/雪.jpg", f"{NO_UTF8}.jpg", "plain.jpg")
    source = write_files(tmp_path / "ö", {name: jpeg(n) for n, name in enumerate(names)})
    out = pack(source, tmp_path / "out")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = command(source, tmp_path / "ø")[1:]
    done = run(*words, env={**os.environ, **ascii_only}, encoding="utf-8")
    assert (done.returncode, len(samples_of(tmp_path / "ø"))) == (0, 3), done.stderr
    assert "--resolution" in done.stdout
    assert tree(tmp_path / "ø") == tree(out)
    write_files(source, {f"new {NO_UTF8}.jpg": jpeg(3)})
    assert "1 added (new caf\ufffd.jpg)" in refused(source, out)
    pack(source, out, "--append")
    sources = {sample["json"]["source"] for sample in samples_of(out)}
    assert sources == {"ü/雪.jpg", "caf\ufffd.jpg", "plain.jpg", "new caf\ufffd.jpg"}


def test_other_settings_are_an_error_that_names_them(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 3)
    out = pack(source, tmp_path / "out", "--min-caption", "1")
    assert "min-caption: 1, now 0" in refused(source, out)
    message = refused(source, out, "--min-caption", "1", "--buckets", "16", "--filter", "number")
    assert "buckets: 32,64, now 16" in message
    assert "number" in message
    assert "--overwrite" in message
    write_files(tmp_path / "tars", {"a.tar": tar_bytes([("a.jpg", jpeg(1))])})
    assert "source: folder, now tars" in refused(tmp_path / "tars", out, "--min-caption", "1")


def test_overwrite_starts_over_and_removes_its_own_files_alone(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 45)
    out = pack(source, tmp_path / "out", *TWENTY)
    foreign = {
        "README.md": b"mine", "32/notes.txt": b"mine", "receipts/2024/shop.pdf": b"mine",
        "32/mine.tar": b"mine", "other/000000.tar": b"mine", "rejects/list.jsonl": b"mine",
    }  # fmt: skip
    write_files(out, dict(foreign))
    (source / "0/photo-00000.jpg").unlink()
    pack(source, out, "--buckets", "16,48", "--overwrite")
    after = tree(out)
    assert {name: after.pop(name) for name in foreign} == foreign
    fresh = pack(source, tmp_path / "fresh", "--buckets", "16,48")
    assert len(after.pop("edition")) == 17  # a mark that no other beginning has
    assert after == tree(fresh)


@pytest.mark.parametrize(
    "others",
    [
        {"a.jpg": b"x", "b/c.jpg": b"x", "b/d.txt": "mine", "e.jpg": b"x"},
        {"32/000000.tar": b"x", "rejects/000001.jsonl": b"mine"},
        {"LICENSE.md": "mine"},
    ],
)
def test_no_dataset_begins_among_other_things(
    tmp_path: Path, others: dict[str, bytes | str]
) -> None:
    out, source = write_files(tmp_path / "out", others), photos(tmp_path / "in", 5)
    before = tree(out)
    some = ", ".join([*sorted(others)[:3], *(["..."] if len(others) > 3 else [])])
    told = f"{out} holds other things ({some}): give an empty or new folder for the dataset"
    for options in ((), ("--overwrite",), ("--append",)):
        with pytest.raises(UsageError, match=re.escape(told)):
            pack(source, out, *options)
        assert tree(out) == before


def test_a_dataset_begins_where_only_what_is_hidden_or_was_left_by_a_killed_run_lies(
    tmp_path: Path,
) -> None:
    source = photos(tmp_path / "in", 5)
    left = {".git/config": "", ".wdsprep-host.0123456789abcdef.tmp": "", "wdsprep.hold": ""}
    out = write_files(tmp_path / "out", {**left, "lost+found/#1": "of the disk"})
    pack(source, out)
    assert tars(out) == tars(pack(source, tmp_path / "fresh"))
    (out / "wdsprep.json").unlink()  # receipts are there, and so it is a dataset
    write_files(out, {"notes.txt": "mine"})
    pack(source, out)
    assert manifest_of(out).complete


def test_a_limit_takes_the_first_samples_and_can_be_lifted(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 50)
    out = pack(source, tmp_path / "out", *TWENTY, "--limit", "40")
    assert len(samples_of(out)) == 40
    assert not manifest_of(out).complete
    pack(source, out, *TWENTY)
    assert tree(out) == tree(pack(source, tmp_path / "fresh", *TWENTY))
    small = pack(source, tmp_path / "small", *TWENTY, "--limit", "7")
    assert len(samples_of(small)) == 7
    message = refused(source, small, *TWENTY)
    assert "was packed with --limit 7, which is now another or missing: 43 added" in message
    assert "--append" in message
    pack(source, small, *TWENTY, "--append")
    assert len(samples_of(small)) == 50
    check_dataset(small)


def test_output_and_source_must_lie_apart(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 3)
    tar = tar_bytes([("a.jpg", jpeg(1))])
    write_files(tmp_path, {"t/a.tar": tar, "in/deep/a.jpg": jpeg(1)})
    (tmp_path / "link").symlink_to(source)
    before = tree(tmp_path)
    pairs = ["in in", "in in/out", "in/deep in", "link in/out", "in link/x", "t/*.tar t/out"]
    for inner, outer in map(str.split, [*pairs, "t/../in in/x", "t/a.tar t"]):
        with pytest.raises(UsageError, match="write the shards somewhere else"):
            pack(tmp_path / inner, tmp_path / outer, "--overwrite")
    assert tree(tmp_path) == before
    check_dataset(pack(tmp_path / "t/a.tar", tmp_path / "t/out"))
    check_dataset(pack(source, tmp_path / "in-out"))


def test_a_receipt_of_other_settings_is_never_adopted(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 20)
    one, two = tmp_path / "one", tmp_path / "two"
    pack(source, one, "--samples-per-shard", "10")
    pack(source, two, "--samples-per-shard", "10", "--check", "header")
    (two / "receipts/000001.json").replace(one / "receipts/000001.json")
    (one / "wdsprep.json").unlink()
    with pytest.raises(FingerprintError, match=r"\(check: header, now full\)"):
        pack(source, one, "--samples-per-shard", "10")
