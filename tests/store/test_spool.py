"""What waits is on a disk unless the user says otherwise."""

import os
import tempfile
from pathlib import Path

import pytest

from wdsprep.store import spool
from wdsprep.store.spool import Spool, is_in_memory, spool_folder


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /tmp in memory, and two other folders: the first in memory too, the second on a disk."""
    for name in spool.ASKED_BY:
        monkeypatch.delenv(name, raising=False)
    spool._warn_of_memory.cache_clear()
    memory = str(tmp_path / "memory")
    monkeypatch.setattr(spool, "is_in_memory", lambda folder: folder.startswith(memory))
    monkeypatch.setattr(tempfile, "tempdir", memory)
    monkeypatch.setattr(spool, "ON_DISK", (memory, str(tmp_path)))
    return tmp_path


def test_a_folder_in_memory_is_told_from_one_on_a_disk(tmp_path: Path) -> None:
    assert not is_in_memory(str(Path(__file__).parent))
    assert not is_in_memory("/proc")
    assert is_in_memory("/dev/shm") or not Path("/dev/shm").is_dir()
    assert tmp_path.is_dir()


def test_mounts_whose_names_are_not_utf_8_are_told_apart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev
    mount = f"1 1 {os.major(device)}:{os.minor(device)} / /caf\xe9 rw - tmpfs none rw\n"
    (tmp_path / "mounts").write_bytes(mount.encode("latin-1"))
    monkeypatch.setattr(spool, "MOUNTS", tmp_path / "mounts")
    assert is_in_memory(str(tmp_path))


def test_bytes_do_not_wait_in_memory_unasked(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spool_folder() == str(folders)
    waiting = Spool()
    place = waiting.put(b"some bytes")
    assert waiting.get(place) == b"some bytes"
    waiting.close()
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
    assert spool_folder() == tempfile.gettempdir()


@pytest.mark.usefixtures("folders")
def test_if_there_is_no_disk_the_user_hears_of_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = tempfile.gettempdir()
    monkeypatch.setattr(spool, "ON_DISK", (memory, "/nowhere"))
    assert spool_folder() == spool_folder() == memory
    (line,) = caplog.messages
    assert line == f"what waits on disk waits in memory, where {memory} lies: set TMPDIR to a disk"
