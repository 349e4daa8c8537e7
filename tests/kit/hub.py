"""A small hub on loopback, and fixtures that point the hub's library at it.

It has what reading datasets and models takes: the head of a branch, listings in pages, and ranges
of files, of large ones behind the address of another server. Its tests talk to it through the
library alone, so what it answers is what that takes.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.kit.webserver import Connection, Request, WebServer, range_of, response

TOKEN = "hf_of_the_tests"
PAGE = 5  # files of a listing
END = b"\r\n\r\n"  # of a head
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


class Hub:
    """`before` is called with each request, and may answer it."""

    def __init__(self) -> None:
        self.server = WebServer(self.serve)
        self.url = self.server.url
        self.far = f"http://localhost:{self.server.port}/far"  # another origin, as of a CDN
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.before: Rule = _as_ever
        self.pause_s = 0.0
        """before each tenth of a file of weights"""

    def make(self, name: str) -> Repository:
        self.repositories[name] = Repository()
        self.repositories[name].commit({})
        return self.repositories[name]

    def serve(self, connection: Connection, request: Request) -> bool:
        self.requests.append(f"{request.method} {unquote(request.path)}")
        answer = self.before(request.method, request.path)
        data = said(*answer) if answer else self.reply(request)
        if request.method == "HEAD":
            data = data.partition(END)[0] + END
        pause_s = self.pause_s if ".safetensors" in request.path else 0
        piece = -(-len(data) // 10) if pause_s else len(data)
        for start in range(0, len(data), piece):
            time.sleep(pause_s)
            connection.send(data[start : start + piece])
        return True

    def reply(self, request: Request) -> bytes:
        parts = urlsplit(request.path)
        way = [unquote(part) for part in parts.path.strip("/").split("/")]
        wanted = request.headers.get("range", "")
        if way[0] == "far":  # who hands the token on has told it to a stranger
            is_told = "authorization" in request.headers
            return (
                said(400, {}, b"a token!")
                if is_told
                else range_of(self.large_files[way[1]], wanted)
            )
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return error(401, "RepoNotFound", "Invalid username or password.")
        at = 2 if way[0] == "api" else int(way[0] == "datasets")
        name = "/".join(way[at : at + 2])
        if name not in self.repositories:
            return error(404, "RepoNotFound", "Repository not found")
        repository = self.repositories[name]
        call, revision, *rest = way[at + 2 :] or ("revision", "main")
        commit = repository.head if revision in ("main", "other/branch") else revision
        if commit not in repository.trees:
            return error(404, "RevisionNotFound", "Invalid rev id")
        files, path = repository.trees[commit], "/".join(rest)
        if call == "revision":
            siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
            return listed({"id": name, "sha": commit, "siblings": siblings})
        if call == "tree":
            below = sorted(file for file in files if not path or file.startswith(f"{path}/"))
            start = int(parse_qs(parts.query).get("cursor", ["0"])[0])
            more = f"{self.url}{parts.path}?recursive=true&cursor={start + PAGE}"
            link = {"Link": f'<{more}>; rel="next"'} if start + PAGE < len(below) else {}
            if below or not path:
                return listed(
                    [entry(file, files[file]) for file in below[start : start + PAGE]], **link
                )
        elif path in files and is_large(path):
            digest = hashlib.sha256(files[path]).hexdigest()
            self.large_files[digest] = files[path]
            return said(302, {"Location": f"{self.far}/{digest}?signature=secret"}, b"")
        elif path in files:
            known = {"X-Repo-Commit": commit, "ETag": f'"{oid_of(files[path])}"'}
            return range_of(files[path], wanted, **known)
        return error(404, "EntryNotFound", f"{path} does not exist")


def said(status: int, headers: dict[str, str], data: bytes) -> bytes:
    return response(status, data, **headers)


def listed(value: object, **headers: str) -> bytes:
    return said(200, {"Content-Type": "application/json", **headers}, json.dumps(value).encode())


def error(status: int, code: str, message: str) -> bytes:
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    return said(status, headers, json.dumps({"error": message}).encode())


def entry(name: str, data: bytes) -> dict[str, Any]:
    """What a listing says of a file."""
    plain = {"type": "file", "path": name, "size": len(data), "oid": oid_of(data)}
    if not is_large(name):
        return plain
    lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return plain | {"oid": oid_of(pointer(data)), "lfs": lfs}


@pytest.fixture(scope="session")
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    with hub.server:
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
