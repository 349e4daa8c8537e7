"""What strangers wrote reaches no terminal as it is, and what opens a file reaches no log."""

import inspect
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import wdsprep
from tests.kit.command_lines import CommandLine, ran
from tests.kit.packs import BUCKETS, jpeg, manifest_of, packing_here, tar_bytes, write_files
from tests.kit.paths import ROOT
from tests.kit.sites import FAST
from tests.kit.terminals import draw_at_once
from tests.kit.webserver import (
    Behaviour,
    Connection,
    Request,
    WebServer,
    ok,
    ranges_of,
    raw,
    refused_port,
    status,
)
from wdsprep.cli import main
from wdsprep.errors import (
    StoreError,
    UsageError,
    WdsprepError,
    values_without_secrets,
    without_secrets,
)
from wdsprep.runners.ray import cluster
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes
from wdsprep.store.web import WebStore
from wdsprep.terminal import LogLines
from wdsprep.text import escape_controls, one_line

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp.\r\t\x7f\u2066\u2028\nforged: done"
NAME = HOSTILE + "é"
OF_CONTROL = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufffd]"
)


class Said(CommandLine):
    """What commands print, on both ways out; progress lines come at once and all the time."""

    def by(self, *arguments: str | Path, code: int = 0) -> str:
        with packing_here():
            both = "\n".join(self(*arguments, code=code))
        assert not OF_CONTROL.search(both), both.encode("unicode_escape")
        assert not re.search(r"^forged", both, re.MULTILINE), both
        return both


@pytest.fixture
def prints(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    draw_at_once(monkeypatch, on_pipes=True)
    return Said(capfd)


def packed(prints: Said, root: Path) -> Path:
    """A dataset in a folder of a hostile name, of files with hostile names, captions and json."""
    meta = json.dumps({"caption": HOSTILE, HOSTILE: HOSTILE, "source": HOSTILE})
    files: dict[str, bytes | str] = {
        f"{NAME}.jpg": jpeg(0),
        f"{NAME}.json": meta,
        f"b{NAME}.jpg": b"no image",
    }
    source, out = write_files(root / f"in{NAME}", files), root / f"out{NAME}"
    pack = ("pack", source, out, *BUCKETS, "--workers", "1")
    assert "1 reject (not_an_image 1)" in prints.by(*pack)
    return out


def test_names_captions_and_facts_of_a_folder_are_harmless(prints: Said, tmp_path: Path) -> None:
    out = packed(prints, tmp_path)
    for more in ((), ("--json",), ("--urls",), ("--urls", "--json")):
        assert prints.by("inspect", out, *more)
    keys = ["000000000000", "000000000001"]
    for key in keys:
        text = prints.by("inspect", out, key)
        assert r"\u001b[2J" in text
        assert json.loads(prints.by("inspect", out, key, "--json"))
    facts = json.loads(prints.by("inspect", out, keys[0], "--json"))
    assert facts["json"]["source"] == f"{NAME}.jpg"  # to a program, they are what they were
    prints.by("inspect", out, keys[0], "-o", tmp_path / f"members{NAME}")
    prints.by("inspect", out, f"9{HOSTILE}", code=1)
    prints.by("rebuild", out)
    prints.by("plan", out, "--resolution", "32")
    prints.by("report", out, "-o", tmp_path / f"page{NAME}.html")


def test_what_verify_finds_and_repair_means_to_do_is_harmless(prints: Said, tmp_path: Path) -> None:
    out = packed(prints, tmp_path)
    (tar,) = out.glob("*/*.tar")
    tar.with_name(f"x{NAME}.tar").write_bytes(b"x")
    tar.write_bytes(tar.read_bytes()[:1_000])
    receipt = out / "receipts/000000.json"
    receipt.with_name(f"{NAME}.json").write_bytes(receipt.read_bytes())
    for more in ((), ("--json",), ("--quick",)):
        assert "forged" in prints.by("verify", out, *more, code=3)
    prints.by("repair", out, code=3)
    prints.by("repair", out, "--json", code=3)


def test_hosts_columns_and_names_of_tables_are_harmless(prints: Said, tmp_path: Path) -> None:
    urls = [f"s3://{HOSTILE}/x", f"http://{HOSTILE}/x", f"s3://{HOSTILE}/y", HOSTILE]
    table = tmp_path / "in.parquet"
    pq.write_table(pa.table({"url": urls, f"caption{HOSTILE}": urls}), table)
    text = prints.by(
        *("pack", table, tmp_path / "out", *BUCKETS, *FAST, "--workers", "1"),
        *("--caption-col", f"caption{HOSTILE}"),
        code=3,
    )
    assert r"worst hosts: \u001b[2J" in text
    prints.by("pack", table, tmp_path / "more", "--caption-col", "x", code=2)
    prints.by("pack", table, tmp_path / "more", "--filter", HOSTILE, code=2)
    prints.by("pack", tmp_path / f"in/nowhere{NAME}", tmp_path / "more", code=1)
    prints.by("pack", f"--{HOSTILE}", code=2)
    prints.by("pack", f"--{HOSTILE}", "--debug", code=2)
    pq.write_table(pa.table({HOSTILE: urls}), tmp_path / f"{NAME}.parquet")
    prints.by("pack", tmp_path / f"{NAME}.parquet", tmp_path / "more", code=1)


def test_members_and_settings_of_a_strangers_dataset_are_harmless(
    prints: Said, tmp_path: Path
) -> None:
    members = [(f"a{end}", data) for end, data in ((".jpg", jpeg(0)), (".txt", HOSTILE.encode()))]
    tar = tar_bytes([*members, (f"a.{NAME}", b"x"), (f"{NAME}.jpg", b"no image")])
    write_files(tmp_path / "tars", {f"x{NAME}.tar": tar})
    prints.by("index", tmp_path / "tars")
    out = tmp_path / "out"
    prints.by("pack", tmp_path / "tars", out, *BUCKETS, "--workers", "1")
    manifest = manifest_of(out)
    settings = {**manifest.settings, HOSTILE: HOSTILE}
    (out / "wdsprep.json").write_bytes(replace(manifest, settings=settings).to_bytes())
    assert "forged" in prints.by("inspect", out)
    prints.by("pack", tmp_path / "tars", out, *BUCKETS, "--workers", "1", code=1)


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
        "cli/demo.py": 3,
        "reporting/card.py": 2,  # in the lines that load a dataset, which stand on its card
    }


def test_text_is_escaped_as_json_writes_it() -> None:
    assert json.loads(f'"{one_line(HOSTILE)}"') == HOSTILE
    assert one_line("\ud83d café 日本 \U0001f600") == r"\ud83d café 日本 😀"
    assert escape_controls("a\nb\x1b\n") == "a\nb\\u001b\n"
    record = logging.LogRecord("x", logging.WARNING, "", 0, "%s", ("\x1b",), None)
    assert LogLines(logging.INFO).format(record) == "\\u001b"


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


SECRET = "S3CRET"
QUERY = f"?se=2099-01-01&sp=r&sig={SECRET}%2Fx/{SECRET}=&q='{SECRET}'"
COMMANDS = {
    "pack": ["pack", "{}", "{tmp}/out"],
    "pack into it": ["pack", "{tmp}/in", "{}"],
    "plan": ["plan", "{}"],
    "inspect": ["inspect", "{}"],
    "inspect a sample": ["inspect", "{}", "0000000001"],
    "verify": ["verify", "{}"],
    "repair": ["repair", "{}", "--yes"],
    "rebuild": ["rebuild", "{}"],
    "index": ["index", "{}"],
    "report": ["report", "{}", "-o", "{tmp}/report.html"],
    "report into it": ["report", "{tmp}/in", "-o", "{}"],
    "encode": ["encode", "{}", "{tmp}/out", "--model", "tiny", "--resolution", "256"],
    "encode into it": ["encode", "{tmp}/in", "{}", "--model", "tiny", "--resolution", "256"],
    "an option that is none": ["pack", "{tmp}", "--limit={}"],
    "an argument too many": ["rebuild", "{tmp}", "{}"],
}
ANSWERS: dict[str, Behaviour] = {
    "not there": status(404),
    "forbidden": status(403),
    "broken": status(400),
    "without ranges": ok(b"x"),
    "of another kind": raw(
        b"HTTP/1.1 206 So\r\nContent-Range: bytes 0-0/1\r\nContent-Length: 1\r\n\r\n{"
    ),
}


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody answers, a command tries six times: here without long pauses between."""
    monkeypatch.setitem(WebStore.__init__.__kwdefaults__, "first_pause_s", 0.001)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_says_the_query_of_a_url(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    for kind, answer in ANSWERS.items():
        with WebServer(answer) as server:
            for path in ("t.parquet", "t.csv", "folder"):
                url = f"{server.url}/{path}{QUERY}"
                asked = [part.format(url, tmp=tmp_path) for part in COMMANDS[name]]
                assert main(["--debug", *asked]) != 0, kind
                out = "".join(capfd.readouterr())
                assert SECRET not in out, (kind, path)
                assert "a bug" not in out


@pytest.mark.parametrize(
    "url",
    [
        f"s3://KEY:{SECRET}@bucket/data",
        f"s3://KEY:a/{SECRET}@bucket/data",
        f"gs://me:{SECRET}@bucket/data",
        f"ray://me:{SECRET}@host",
        f"https://127.0.0.1:9/a b.csv?sig={SECRET}",
    ],
)
def test_no_command_says_the_password_of_a_place(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    more = [["select", "{tmp}/in", "{tmp}/out", "--keys", "{}"], ["card", "{}"]]
    for words in (*COMMANDS.values(), *more):
        assert main(["--debug", *(part.format(url, tmp=tmp_path) for part in words)]) != 0, words
        out = "".join(capfd.readouterr())
        assert SECRET not in out, words
        assert "a bug" not in out


def test_no_error_of_the_library_has_a_query_nor_has_its_traceback(tmp_path: Path) -> None:
    with WebServer(status(500)) as server:
        for url in (f"{server.url}/d{QUERY}", f"http://127.0.0.1:{refused_port()}/t.csv{QUERY}"):
            for act in (
                lambda url=url: wdsprep.load(url, global_batch=4),
                lambda url=url: wdsprep.encode(
                    url, str(tmp_path / "out"), model="tiny", resolution=256
                ),
                lambda url=url: list(open_store(url).list()),
            ):
                with pytest.raises(WdsprepError) as caught:
                    act()
                assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_signed_url_of_s3_is_in_no_error_nor_in_its_traceback(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.store.remote.ATTEMPTS", 2)
    store = open_store(f"s3://{bucket}/data")
    write_bytes(store, "f", b"x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{refused_port()}")
    with pytest.raises(StoreError, match="check the network or AWS_ENDPOINT_URL") as caught:
        open_store(f"s3://{bucket}/data").read("f")
    said = "".join(traceback.format_exception(caught.value))
    assert "X-Amz" not in said
    assert "Signature" not in said


@pytest.fixture
def site() -> Iterator[WebServer]:
    """A presigned table, and images behind signed URLs, of which one is gone."""
    table = bytearray(b"url,caption\n")

    def behave(connection: Connection, request: Request) -> bool:
        path = request.path.partition("?")[0]
        if path == "/t.csv":
            return ranges_of(bytes(table))(connection, request)
        image = ok(jpeg(3)) if path.startswith("/ok/") else status(404)
        return image(connection, request)

    with WebServer(behave) as server:
        for number in range(4):
            table += f"{server.url}/{'gone' if number == 2 else 'ok'}/{number}{QUERY},a\n".encode()
        yield server


@pytest.fixture(params=["signature", "password"])
def table(request: pytest.FixtureRequest, site: WebServer) -> str:
    if request.param == "signature":
        return f"{site.url}/t.csv{QUERY}"
    return f"{site.url.replace('://', f'://me:{SECRET}@')}/t.csv"


PACK = ("--allow-private-hosts", "--samples-per-shard", "2", "--workers", "1", "--min-size", "8")


def test_a_pack_that_succeeds_keeps_secrets_to_itself(
    table: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, page = str(tmp_path / "out"), tmp_path / "report.html"
    for words in (
        ("pack", "-v", table, out, *PACK),
        ("pack", table, out, *PACK),
        ("pack", "--json", table, out, *PACK),
        ("inspect", out),
        ("inspect", "--json", out),
        ("inspect", out, "000000000001"),
        ("report", out, "-o", str(page)),
        ("card", out),
    ):
        with packing_here():
            assert main([*words]) in (0, 3), words
        said = "".join(capfd.readouterr())
        assert said, words
        assert SECRET not in said, words
    assert SECRET not in page.read_text()
    told = [path for path in (tmp_path / "out").glob("*.*") if SECRET in path.read_text()]
    assert told == []  # rejects and samples hold the URLs of images, to be fetched again


@pytest.mark.system
@pytest.mark.parametrize(
    ("kind", "table"), [("wandb", "signature"), ("tensorboard", "password")], indirect=["table"]
)
def test_a_tracker_is_given_no_secret(kind: str, table: str, tmp_path: Path) -> None:
    words = ["pack", table, "out", *PACK, "--track", kind]
    env = os.environ | {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    program = sys.executable, "-m", "wdsprep"
    done = ran(*program, *words, cwd=tmp_path, env=env | {"PYTHONPATH": str(ROOT)}, exit_code=3)
    assert f"--track {kind}: " in done.stdout + done.stderr
    folder = tmp_path / {"wandb": "wandb", "tensorboard": "runs"}[kind]
    kept = [path for path in folder.rglob("*") if path.is_file()]
    assert kept
    assert [path for path in kept if SECRET.encode() in path.read_bytes()] == []
    if kind == "wandb":
        assert any(b"/t.csv" in path.read_bytes() for path in kept)  # the command line is there


def test_what_a_tracker_is_told_of_is_cut_at_any_depth() -> None:
    url = f"https://me:{SECRET}@h/t?sig={SECRET}"
    given = {"source": url, "more": [{"urls": (url, 7)}], "n": 1.5, "none": None}
    left = {"source": "https://h/t", "more": [{"urls": ("https://h/t", 7)}], "n": 1.5, "none": None}
    assert values_without_secrets(given) == left


@pytest.mark.parametrize(
    "said",
    [
        "https://h/a?x=1",
        'see https://h/a?b="c" now',
        "https://me:pw@h/?a\\b#c, and",
        "ftp://a:b@c/d?e=f",
    ],
)
def test_json_that_is_cut_is_json_still(said: str) -> None:
    value = {"a": [said, said], said: {"url": said}, "n": 1}
    for shown in (json.dumps(value), json.dumps(value, indent=1)):
        cut = json.loads(without_secrets(shown))
        assert (len(cut["a"]), len(cut), cut["n"]) == (2, 3, 1)
        assert "pw" not in json.dumps(cut)


def test_a_ray_job_is_entrypoint_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import utils, worker

    name = f"wdsprep pack https://me:{SECRET}@h/t.csv?sig={SECRET} out"
    monkeypatch.setattr(utils, "get_entrypoint_name", lambda: name)
    assert "ray._private.utils.get_entrypoint_name()" in inspect.getsource(worker.init)
    with cluster.entrypoint_without_secrets():
        assert utils.get_entrypoint_name() == "wdsprep pack https://h/t.csv out"
    assert utils.get_entrypoint_name() == name


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://h/a/t.csv?sig=S: not there", "https://h/a/t.csv: not there"),
        ('Could not reach "http://h:9/b/k?X-Amz=S&y=1".', 'Could not reach "http://h:9/b/k".'),
        ("(https://h/t?a='b'&c=S)", "(https://h/t)"),
        ("HTTPS://me:S@h/t#S, http://h/u?S", "HTTPS://h/t, http://h/u"),
        ("https://h?sig=S/wdsprep.json is damaged", "https://h is damaged"),
        ("s3://b/what?.tar, is it there? a/b?c", "s3://b/what?.tar, is it there? a/b?c"),
        ("https://h/me@home is kept", "https://h/me@home is kept"),
        ("https://me:p@S@h/t", "https://h/t"),
        ("ftp://me:S@h/t, s3://KEY:S@b/t, s3://b@c/t", "ftp://h/t, s3://b/t, s3://b@c/t"),
        ("az://c/b?sv=1&sig=S: no", "az://c/b: no"),
        ("s3://KEY:se/c+r=@b/t: no", "s3://b/t: no"),
        ("ray://h:10001/me@home is kept", "ray://h:10001/me@home is kept"),
        ("https://h/a b.csv?sig=S, or s3://b/k?", "https://h/a b.csv, or s3://b/k?"),
        ("/here/http:/me:S@h/t", "/here/http:/h/t"),
    ],
)
def test_a_url_ends_at_its_path(text: str, left: str) -> None:
    assert without_secrets(text) == str(WdsprepError(text)) == left
    assert without_secrets(left) == left
