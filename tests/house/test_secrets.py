"""Whoever reads a log learns nothing from it that opens a file: URLs end at their paths."""

import traceback
from pathlib import Path

import pytest

import wdsprep
from tests.kit.webserver import Behaviour, WebServer, ok, raw, refused_port, status
from wdsprep.cli import main
from wdsprep.errors import StoreError, WdsprepError, without_secrets
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes

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


def test_no_error_of_the_library_has_a_query_nor_has_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.store.web.FIRST_PAUSE_S", 0.001)
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
    monkeypatch.setattr("wdsprep.store.patience.ATTEMPTS", 2)
    store = open_store(f"s3://{bucket}/data")
    write_bytes(store, "f", b"x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{refused_port()}")
    with pytest.raises(StoreError, match="check the network or AWS_ENDPOINT_URL") as caught:
        open_store(f"s3://{bucket}/data").read("f")
    said = "".join(traceback.format_exception(caught.value))
    assert "X-Amz" not in said
    assert "Signature" not in said


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
    ],
)
def test_a_url_ends_at_its_path(text: str, left: str) -> None:
    assert without_secrets(text) == str(WdsprepError(text)) == left
    assert without_secrets(left) == left
