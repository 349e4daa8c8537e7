"""Whoever reads a log learns nothing from it that opens a file: URLs end at their paths."""

import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

import wdsprep
from tests.kit.packs import jpeg
from tests.kit.paths import ROOT
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
from wdsprep.errors import StoreError, WdsprepError, values_without_secrets, without_secrets
from wdsprep.runners.ray import cluster
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes
from wdsprep.store.web import WebStore

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
    monkeypatch.setattr("wdsprep.store.retry.ATTEMPTS", 2)
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
        assert main([*words]) in (0, 3), words
        said = "".join(capfd.readouterr())
        assert said, words
        assert SECRET not in said, words
    assert SECRET not in page.read_text()
    told = [path for path in (tmp_path / "out").glob("*.*") if SECRET in path.read_text()]
    assert told == []  # rejects and samples hold the URLs of images, to be fetched again


@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
def test_a_tracker_is_given_no_secret(kind: str, table: str, tmp_path: Path) -> None:
    words = ["pack", table, "out", *PACK, "--track", kind]
    env = os.environ | {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "wdsprep", *words],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
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
