"""A small hub on loopback, and fixtures that point the hub's library at it.

It has what reading datasets and models takes: the head of a branch, listings in pages, and ranges
of files, of large ones behind the address of another server. Its tests talk to it through the
library alone, so what it answers is what that takes.
"""

import hashlib
import http.server
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.kit.serving import serving

TOKEN = "hf_of_the_tests"
PAGE = 5  # files of a listing
LARGE = (".tar", ".parquet", ".bin")
Answer = tuple[int, dict[str, str], bytes]
Rule = Callable[[str, str], Answer | None]


def _as_ever(_method: str, _path: str) -> None:
    pass


def oid_of(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def pointer(data: bytes) -> bytes:
    digest = hashlib.sha256(data).hexdigest()
    lines = ["version https://git-lfs.github.com/spec/v1", f"oid sha256:{digest}"]
    return "\n".join([*lines, f"size {len(data)}", ""]).encode()


def is_large(name: str) -> bool:
    return name.endswith(LARGE)


@dataclass(slots=True)
class Repository:
    """Its commits, the latest last, and what each has in it."""

    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes]) -> str:
        name = secrets.token_hex(20)
        self.trees[name] = files
        return name

    @property
    def head(self) -> str:
        return list(self.trees)[-1]


class Hub(http.server.ThreadingHTTPServer):
    """`before` is called with each request, and may answer it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.far = f"http://localhost:{self.server_port}/far"  # another origin, as of a CDN
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.lock = threading.Lock()
        self.before: Rule = _as_ever
        self.pause_s = 0.0
        """before each tenth of a file of weights"""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # who asked has left
            super().handle_error(request, client_address)

    def make(self, name: str) -> Repository:
        self.repositories[name] = Repository()
        self.repositories[name].commit({})
        return self.repositories[name]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Hub

    def do_any(self) -> None:
        with self.server.lock:
            self.server.requests.append(f"{self.command} {unquote(self.path)}")
        status, headers, data = self.server.before(self.command, self.path) or self.reply()
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.write(b"" if self.command == "HEAD" else data)

    def write(self, data: bytes) -> None:
        pause_s = self.server.pause_s if ".safetensors" in self.path else 0
        piece = -(-len(data) // 10) if pause_s else len(data)
        for start in range(0, len(data), piece or 1):
            time.sleep(pause_s)
            self.wfile.write(data[start : start + piece])

    do_GET = do_HEAD = do_any  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self) -> Answer:
        parts = urlsplit(self.path)
        way = [unquote(part) for part in parts.path.strip("/").split("/")]
        if way[0] == "far":  # who hands the token on has told it to a stranger
            is_told = "Authorization" in self.headers
            return (400, {}, b"a token!") if is_told else self.part(self.server.large_files[way[1]])
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.error(401, "RepoNotFound", "Invalid username or password.")
        at = 2 if way[0] == "api" else int(way[0] == "datasets")
        repository = self.server.repositories.get("/".join(way[at : at + 2]))
        if repository is None:
            return self.error(404, "RepoNotFound", "Repository not found")
        call, revision, *rest = way[at + 2 :] or ("revision", "main")
        commit = repository.head if revision in ("main", "other/branch") else revision
        if commit not in repository.trees:
            return self.error(404, "RevisionNotFound", "Invalid rev id")
        if call == "revision":
            sizes = {name: len(data) for name, data in repository.trees[commit].items()}
            siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            name = "/".join(way[at : at + 2])
            return self.said({"id": name, "sha": commit, "siblings": siblings})
        if call == "tree":
            return self.tree(repository.trees[commit], "/".join(rest), parse_qs(parts.query))
        return self.file(repository.trees[commit], "/".join(rest), commit)

    def said(self, value: object, headers: dict[str, str] | None = None) -> Answer:
        return (
            200,
            {"Content-Type": "application/json", **(headers or {})},
            json.dumps(value).encode(),
        )

    def error(self, status: int, code: str, message: str) -> Answer:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        return status, headers, json.dumps({"error": message}).encode()

    def tree(self, files: dict[str, bytes], path: str, query: dict[str, list[str]]) -> Answer:
        below = sorted(name for name in files if not path or name.startswith(f"{path}/"))
        if path and not below:
            return self.error(404, "EntryNotFound", f"{path} does not exist")
        start = int(query.get("cursor", ["0"])[0])
        some = []
        for name in below[start : start + PAGE]:
            data = files[name]
            one = {"type": "file", "path": name, "size": len(data), "oid": oid_of(data)}
            if is_large(name):
                one["oid"] = oid_of(pointer(data))
                digest = hashlib.sha256(data).hexdigest()
                one["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
            some.append(one)
        here = f"{self.server.url}{urlsplit(self.path).path}"
        more = f'<{here}?recursive=true&cursor={start + PAGE}>; rel="next"'
        return self.said(some, {"Link": more} if start + PAGE < len(below) else {})

    def file(self, files: dict[str, bytes], path: str, commit: str) -> Answer:
        if path not in files:
            return self.error(404, "EntryNotFound", f"{path} does not exist")
        if not is_large(path):
            status, headers, data = self.part(files[path])
            known = {"X-Repo-Commit": commit, "ETag": f'"{oid_of(files[path])}"'}
            return status, {**headers, **known}, data
        digest = hashlib.sha256(files[path]).hexdigest()
        self.server.large_files[digest] = files[path]
        return 302, {"Location": f"{self.server.far}/{digest}?signature=secret"}, b""

    def part(self, data: bytes) -> Answer:
        wanted = self.headers.get("Range")
        if wanted is None:
            return 200, {}, data
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(len(data), int(last or len(data)) + 1)
        if start >= len(data):
            return 416, {"Content-Range": f"bytes */{len(data)}"}, b""
        return 206, {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}, data[start:stop]


@pytest.fixture(scope="session")
def hub_server() -> Iterator[Hub]:
    with serving(Hub()) as hub:
        yield hub


def set_constants(monkeypatch: pytest.MonkeyPatch, **values: str | bool) -> None:
    """Set what the hub's library has read from the environment when it was imported."""
    for name, value in values.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)


@pytest.fixture
def hub(hub_server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub that the environment names, of this process and of those that it starts."""
    settings = {
        "HF_ENDPOINT": hub_server.url,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "hf-home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "0",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    set_constants(monkeypatch, HF_HUB_DISABLE_XET=True, HF_HUB_DISABLE_PROGRESS_BARS=True)
    hub_server.before, hub_server.pause_s = _as_ever, 0.0
    hub_server.requests.clear()
    return hub_server


@pytest.fixture
def hub_dataset(hub: Hub) -> str:
    """The name of a fresh dataset."""
    name = f"tests/set-{secrets.token_hex(6)}"
    hub.make(name)
    return name
