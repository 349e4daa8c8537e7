"""What strangers wrote never reaches the terminal as it is, whatever command prints it."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import wdsprep
from tests.kit.packs import BUCKETS, jpeg, manifest_of, tar_bytes, write_files
from tests.kit.sites import FAST
from tests.kit.terminals import draw_at_once
from wdsprep.cli import main
from wdsprep.errors import UsageError, WdsprepError
from wdsprep.text import LogFormatter, escape_controls, one_line

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp.\r\t\x7f\u2066\u2028\nforged: done"
NAME = HOSTILE + "é"
OF_CONTROL = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufffd]"
)


class Said:
    """What commands print, on both ways out; progress lines come at once and all the time."""

    def __init__(self, capture: pytest.CaptureFixture[bytes]) -> None:
        self._capture = capture

    def by(self, *arguments: str | Path, code: int = 0) -> str:
        found = main([str(word) for word in arguments])
        both = b"\n".join(self._capture.readouterr()).decode()
        assert found == code, both
        assert not OF_CONTROL.search(both), both.encode("unicode_escape")
        assert not re.search(r"^forged", both, re.MULTILINE), both
        return both


@pytest.fixture
def said(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Said:
    draw_at_once(monkeypatch, on_pipes=True)
    return Said(capfdbinary)


def packed(said: Said, root: Path) -> Path:
    """A dataset in a folder of a hostile name, of files with hostile names, captions and json."""
    meta = json.dumps({"caption": HOSTILE, HOSTILE: HOSTILE, "source": HOSTILE})
    files: dict[str, bytes | str] = {
        f"{NAME}.jpg": jpeg(0),
        f"{NAME}.json": meta,
        f"b{NAME}.jpg": b"no image",
    }
    source, out = write_files(root / f"in{NAME}", files), root / f"out{NAME}"
    pack = ("pack", source, out, *BUCKETS, "--workers", "1")
    assert "1 reject (not_an_image 1)" in said.by(*pack)
    return out


def test_names_captions_and_facts_of_a_folder_are_harmless(said: Said, tmp_path: Path) -> None:
    out = packed(said, tmp_path)
    for more in ((), ("--json",), ("--urls",), ("--urls", "--json")):
        assert said.by("inspect", out, *more)
    keys = ["000000000000", "000000000001"]
    for key in keys:
        text = said.by("inspect", out, key)
        assert r"\u001b[2J" in text
        assert json.loads(said.by("inspect", out, key, "--json"))
    facts = json.loads(said.by("inspect", out, keys[0], "--json"))
    assert facts["json"]["source"] == f"{NAME}.jpg"  # to a program, they are what they were
    said.by("inspect", out, keys[0], "-o", tmp_path / f"members{NAME}")
    said.by("inspect", out, f"9{HOSTILE}", code=1)
    said.by("rebuild", out)
    said.by("plan", out, "--resolution", "32")
    said.by("report", out, "-o", tmp_path / f"page{NAME}.html")


def test_what_verify_finds_and_repair_means_to_do_is_harmless(said: Said, tmp_path: Path) -> None:
    out = packed(said, tmp_path)
    (tar,) = out.glob("*/*.tar")
    tar.with_name(f"x{NAME}.tar").write_bytes(b"x")
    tar.write_bytes(tar.read_bytes()[:1_000])
    receipt = out / "receipts/000000.json"
    receipt.with_name(f"{NAME}.json").write_bytes(receipt.read_bytes())
    for more in ((), ("--json",), ("--quick",)):
        assert "forged" in said.by("verify", out, *more, code=3)
    said.by("repair", out, code=3)
    said.by("repair", out, "--json", code=3)


def test_hosts_columns_and_names_of_tables_are_harmless(said: Said, tmp_path: Path) -> None:
    urls = [f"s3://{HOSTILE}/x", f"http://{HOSTILE}/x", f"s3://{HOSTILE}/y", HOSTILE]
    table = tmp_path / "in.parquet"
    pq.write_table(pa.table({"url": urls, f"caption{HOSTILE}": urls}), table)
    text = said.by(
        *("pack", table, tmp_path / "out", *BUCKETS, *FAST, "--workers", "1"),
        *("--caption-col", f"caption{HOSTILE}"),
        code=3,
    )
    assert r"worst hosts: \u001b[2J" in text
    said.by("pack", table, tmp_path / "more", "--caption-col", "x", code=2)
    said.by("pack", table, tmp_path / "more", "--filter", HOSTILE, code=2)
    said.by("pack", tmp_path / f"in/nowhere{NAME}", tmp_path / "more", code=1)
    said.by("pack", f"--{HOSTILE}", code=2)
    said.by("pack", f"--{HOSTILE}", "--debug", code=2)
    pq.write_table(pa.table({HOSTILE: urls}), tmp_path / f"{NAME}.parquet")
    said.by("pack", tmp_path / f"{NAME}.parquet", tmp_path / "more", code=1)


def test_members_and_settings_of_a_strangers_dataset_are_harmless(
    said: Said, tmp_path: Path
) -> None:
    members = [(f"a{end}", data) for end, data in ((".jpg", jpeg(0)), (".txt", HOSTILE.encode()))]
    tar = tar_bytes([*members, (f"a.{NAME}", b"x"), (f"{NAME}.jpg", b"no image")])
    write_files(tmp_path / "tars", {f"x{NAME}.tar": tar})
    said.by("index", tmp_path / "tars")
    out = tmp_path / "out"
    said.by("pack", tmp_path / "tars", out, *BUCKETS, "--workers", "1")
    manifest = manifest_of(out)
    settings = {**manifest.settings, HOSTILE: HOSTILE}
    (out / "wdsprep.json").write_bytes(replace(manifest, settings=settings).to_bytes())
    assert "forged" in said.by("inspect", out)
    said.by("pack", tmp_path / "tars", out, *BUCKETS, "--workers", "1", code=1)


def test_nothing_is_printed_but_through_the_one_function() -> None:
    """The owner of the terminal, and one line without any data in it."""
    package = Path(wdsprep.__file__).parent
    prints = re.compile(r"click\.echo\(|\bprint\(|std(?:out|err)\.write\(|print_exc\(")
    found = {
        str(path.relative_to(package)): len(prints.findall(path.read_text()))
        for path in package.rglob("*.py")
        if prints.search(path.read_text())
    }
    assert found == {
        "terminal.py": 1,
        "__main__.py": 1,
        "cli/demo/steps.py": 3,
        "reporting/card.py": 2,  # in the lines that load a dataset, which stand on its card
    }


def test_text_is_escaped_as_json_writes_it() -> None:
    assert json.loads(f'"{one_line(HOSTILE)}"') == HOSTILE
    assert one_line("\ud83d café 日本 \U0001f600") == r"\ud83d café 日本 😀"
    assert escape_controls("a\nb\x1b\n") == "a\nb\\u001b\n"
    record = logging.LogRecord("x", logging.WARNING, "", 0, "%s", ("\x1b",), None)
    assert LogFormatter().format(record) == "\\u001b"


def test_an_error_is_not_longer_than_anybody_reads() -> None:
    """Both ends stay: what is at fault, and the next step."""
    short = f"{'a' * 1000}: fetch it again"
    assert str(WdsprepError(short)) == short
    for middle in ("x" * 100_000, "http://u:PASSWORD@host/x?sig=SECRET " * 1000):
        text = str(UsageError(f"a.parquet names {middle}: fetch it again"))
        assert len(text) < 2000
        assert text.startswith("a.parquet names ")
        assert text.endswith(": fetch it again")
        assert "PASSWORD" not in text
        assert "SECRET" not in text
