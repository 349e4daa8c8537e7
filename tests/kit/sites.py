"""A web site of pictures, some of which fail, tables that name them, and runs that are killed."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.packs import jpeg, write_table
from tests.kit.webserver import Connection, Request, WebServer, ok, status

FAST = ("--allow-private-hosts", "--retries", "0", "--check", "header")
KINDS = ["ok", "busy", "gone", "ok", "busy", "busy", "ok", "html", "busy", "ok"]
MENDED = {"ok": "packed", "busy": "packed", "gone": "http_4xx", "html": "not_an_image"}


class Site:
    """Paths say what comes: /ok/3.jpg, /html/3, /busy/3 until it is mended; all else is 404."""

    def __init__(self) -> None:
        self.is_mended = False

    def __call__(self, connection: Connection, request: Request) -> bool:
        _, kind, *rest = request.path.split("/")
        behave: Callable[[Connection, Request], bool] = status(404)
        if kind == "ok" or (kind == "busy" and self.is_mended):
            behave = ok(jpeg(int(rest[0])))
        elif kind == "busy":
            behave = status(503)
        elif kind == "html":
            behave = ok(b"<!doctype html><html></html>", Content_Type="text/html")
        return behave(connection, request)


@contextlib.contextmanager
def open_site() -> Iterator[tuple[Site, WebServer]]:
    behaviour = Site()
    with WebServer(behaviour) as server:
        yield behaviour, server


@pytest.fixture
def site() -> Iterator[tuple[Site, WebServer]]:
    with open_site() as opened:
        yield opened


def table_of(root: Path, server: WebServer, kinds: list[str], **extra: list[Any]) -> Path:
    rows = [
        {"url": f"{server.url}/{kind}/{n}", "caption": f"c {n}", "n": n}
        | {name: values[n] for name, values in extra.items()}
        for n, kind in enumerate(kinds)
    ]
    return write_table(root / "urls.parquet", rows)


def kill_when_asked(words: list[str], server: WebServer, count: int) -> None:
    """Start the command, and kill it with all that it has started after so many requests, unless it
    ends before."""
    asked = len(server.paths()) + count
    run = subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL)
    while run.poll() is None and len(server.paths()) < asked:
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()
