"""What is particular to a local folder: links, leftovers of the dead, races, full disks."""

import concurrent.futures
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.kit.stores import FORKING, names, one_line_error, writing
from wdsprep.errors import (
    AccessError,
    ExistsError,
    FullError,
    NotAFileError,
    NotFoundError,
    StoreError,
    UsageError,
)
from wdsprep.store import open_store, split_url
from wdsprep.store.base import absolute, write_bytes
from wdsprep.store.local import HOST, LocalStore


def files_of(folder: Path) -> list[str]:
    """Everything in the folder, hidden or not."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "data")


@pytest.mark.parametrize("url", ["file://{}", "FILE://{}", "file:{}", "{}", "{}/"])
def test_local_paths_open_a_local_store(tmp_path: Path, url: str) -> None:
    (tmp_path / "f").write_bytes(b"x")
    assert open_store(url.format(tmp_path)).read("f") == b"x"


def test_a_folder_may_have_a_colon_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a:b", "12:30", "c:/d"):
        write_bytes(open_store(name), "f", b"x")
        assert (tmp_path / name / "f").read_bytes() == b"x"
        assert absolute(name) == str(tmp_path / name)


@pytest.mark.parametrize("path", [r"C:\Users\me\photos", r"\\server\share\photos"])
def test_a_path_of_windows_is_refused_and_not_made_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for take in (open_store, absolute, split_url):
        with pytest.raises(UsageError, match=r"is a path of Windows.* in WSL give .* /mnt"):
            take(path)
    assert files_of(tmp_path) == []


def test_other_places_are_refused() -> None:
    for url in ("pipe:cat x", "ftp://h/x", "s3:/b", "HTTPS:/h", "A+b://h", "s3://", "gs://"):
        with one_line_error(UsageError, url):
            open_store(url)
    with pytest.raises(UsageError, match="hf://models/a/b: only datasets"):
        open_store("hf://models/a/b")


def test_links_to_folders_are_entered_and_other_links_listed_once(
    local: LocalStore, tmp_path: Path
) -> None:
    """A circle ends, and who reads a link that leads nowhere learns it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/f").write_bytes(b"x")
    write_bytes(local, "a/b/f", b"x")
    (local.root / "link").symlink_to(tmp_path / "elsewhere")
    (local.root / "a/b/up").symlink_to(local.root / "a")
    (local.root / "self").symlink_to("self")
    (local.root / "gone.jpg").symlink_to("nowhere")
    assert names(local) == ["a/b/f", "gone.jpg", "link/f", "self"]
    assert local.read("link/f") == b"x"
    with pytest.raises(NotFoundError):
        local.read("gone.jpg")


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "loop"])
def test_what_stands_in_the_place_of_a_file_is_to_be_moved_away(
    local: LocalStore, tmp_path: Path, kind: str
) -> None:
    place = tmp_path / "data/a"
    place.parent.mkdir()
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(place))
    else:
        place.symlink_to("a")
    with pytest.raises(NotAFileError, match=r"data/a: .*not a file: move it away, then"):
        local.read("a")
    assert names(local) == (["a"] if kind == "loop" else [])
    if kind == "folder":
        write_bytes(local, "a/f", b"x")
        with pytest.raises(NotAFileError, match="data/a: is a folder, not a file: move it away"):
            write_bytes(local, "a", b"x")
        assert files_of(local.root) == ["a/f"]


@pytest.mark.parametrize("exclusive", [False, True])
def test_file_in_the_way_of_a_folder_is_named(local: LocalStore, exclusive: bool) -> None:
    write_bytes(local, "a", b"x")
    with one_line_error(StoreError, f"{local.url}/a is not a folder"):
        write_bytes(local, "a/b/f", b"y", exclusive=exclusive)
    assert files_of(local.root) == ["a"]


def test_name_that_is_no_utf8_is_listed_and_read(local: LocalStore) -> None:
    local.root.mkdir()
    Path(os.fsdecode(os.fsencode(local.root) + b"/\xff")).write_bytes(b"x")
    [name] = names(local)
    assert local.read(name) == b"x"


def test_sweep_removes_the_leftovers_of_the_dead_only(local: LocalStore) -> None:
    roots = [local.root / "dead", local.root / "alive"]
    with writing(local, b"halfhalf", "dead/f", "alive/f") as (dead, alive):
        assert names(local) == []
        assert [len(files_of(root)) for root in roots] == [1, 1]
        assert local.sweep() == (0, 2)
        dead[0].kill()
        dead[0].join()
        assert local.sweep() == (1, 1)
        assert [len(files_of(root)) for root in roots] == [0, 1]
        alive[1].set()
        alive[0].join()
    assert files_of(roots[1]) == ["f"]
    assert local.read("alive/f") == b"halfhalf"


def test_sweep_leaves_other_hosts_and_other_files_alone(local: LocalStore) -> None:
    local.root.mkdir()
    young, old, mine = (
        local.root / f".wdsprep-{host}.{n:016x}.tmp"
        for n, host in enumerate(["elsewhere", "elsewhere", HOST])
    )
    other = local.root / ".wdsprep-notes.tmp"
    for path in (young, old, mine, other):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    assert local.sweep() == (2, 1)
    assert files_of(local.root) == sorted([young.name, other.name])
    assert names(local) == [other.name]
    an_hour_ago = young.stat().st_mtime - 3600
    os.utime(young, (an_hour_ago, an_hour_ago))
    assert local.sweep() == (0, 0)


def test_sweep_during_writes_harms_none_of_them(local: LocalStore) -> None:
    ended = threading.Event()

    def sweep_on() -> None:
        while not ended.is_set():
            local.sweep()

    local.root.mkdir()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        sweeping = pool.submit(sweep_on)
        try:
            for n in range(200):
                write_bytes(local, f"f{n}", b"x", exclusive=n % 2 == 0)
        finally:
            ended.set()
        sweeping.result()
    assert len(files_of(local.root)) == 200


def write_one(job: tuple[str, bytes, bool]) -> bool:
    root, data, exclusive = job
    try:
        write_bytes(LocalStore(root), "new/folder/f", data, exclusive=exclusive)
    except ExistsError:
        return False
    return True


@pytest.mark.parametrize("exclusive", [False, True])
def test_writers_of_one_name_all_succeed_whole_or_exclusively_one(
    local: LocalStore, exclusive: bool
) -> None:
    wholes = [bytes([n]) * 300_000 for n in range(32)]
    with FORKING.Pool(8) as pool:
        won = pool.map(write_one, [(local.url, data, exclusive) for data in wholes], 1)
        pool.close()
        pool.join()
    winners = [data for data, is_winner in zip(wholes, won, strict=True) if is_winner]
    assert len(winners) == (1 if exclusive else 32)
    assert local.read("new/folder/f") in winners
    assert files_of(local.root) == ["new/folder/f"]


def test_full_disk_is_one_clear_line_and_keeps_the_old_file(small_disk: Path) -> None:
    local = LocalStore(small_disk)
    write_bytes(local, "f", b"old" * 1000)
    for name in ("f", "new"):
        with one_line_error(FullError, f"{local.url}/{name}: the disk is full", "free some"):
            write_bytes(local, name, b"x" * (2 << 20))
    with pytest.raises(FullError), local.write("g") as sink, contextlib.suppress(StoreError):
        sink.write(b"x" * (2 << 20))  # fatal even to a caller that goes on
    assert files_of(local.root) == ["f"]
    assert local.read("f") == b"old" * 1000
    write_bytes(local, "g", b"x" * 500_000)  # the space has come back


def test_read_only_file_system_is_one_clear_line(small_disk: Path) -> None:
    local = LocalStore(small_disk)
    write_bytes(local, "a/f", b"old")
    remount = ["mount", "-o", "remount,ro", local.root]
    if subprocess.run(remount, capture_output=True, check=False).returncode:
        pytest.skip("remounting is not permitted here")
    acts = {
        "a/f": lambda: write_bytes(local, "a/f", b"new"),
        "b/f": lambda: write_bytes(local, "b/f", b"new"),
        "a": lambda: local.delete("a/f"),
    }
    for name, act in acts.items():
        with one_line_error(AccessError, f"{local.url}/{name}", "is read-only: choose another"):
            act()
    assert local.sweep()[0] == 0
    assert files_of(local.root) == ["a/f"]
    assert local.read("a/f") == b"old"


AS_NOBODY = """
import os, sys
from wdsprep.errors import AccessError
from wdsprep.store.base import write_bytes
from wdsprep.store.local import LocalStore
os.setgid(65534); os.setuid(65534)
local = LocalStore(sys.argv[1])
for act in (
    lambda: write_bytes(local, "f", b"new"),
    lambda: write_bytes(local, "new", b"new", exclusive=True),
    lambda: write_bytes(local, "new/f", b"new"),
    lambda: local.delete("f"),
    lambda: local.read("secret"),
    lambda: list(local.list("closed/")),
):
    try:
        act()
    except AccessError as error:
        print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_missing_permission_is_one_clear_line() -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is below a folder that is closed
        Path(folder).chmod(0o755)
        local = LocalStore(folder)
        for name in ("f", "secret", "closed/f"):
            write_bytes(local, name, b"old")
        (local.root / "secret").chmod(0o600)
        (local.root / "closed").chmod(0o700)
        command = [sys.executable, "-c", AS_NOBODY, local.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        denied = ["f", "new", "new/f", "f", "secret", "closed"]
        why = "permission denied: change its mode, or choose another place"
        assert done.stdout.splitlines() == [f"{local.url}/{name}: {why}" for name in denied]
        assert files_of(local.root) == ["closed/f", "f", "secret"]
        assert local.read("f") == b"old"
