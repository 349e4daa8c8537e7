"""The digest of large weights is computed once on a machine, and anew where a file is another."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wdsprep.dataset.digests import hex_digest
from wdsprep.encoding.models import weights
from wdsprep.encoding.models.weights import weights_digest

FILES = ("a.safetensors", "b/config.json")
SCRIPT = """
import sys, time
from pathlib import Path
from wdsprep.encoding.models import weights
weights.LARGE_NBYTES = 1
hasher = weights.blake3
def slow():
    print("computed")
    time.sleep(0.5)
    return hasher()
weights.blake3 = slow
print(weights.weights_digest(Path(sys.argv[1]), sys.argv[2:]))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are kept, of files of any size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "LARGE_NBYTES", 1)
    return tmp_path / "cache/wdsprep/weights"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights that were written an hour ago."""
    for name in FILES:
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
        _age(path, 3600)
    return tmp_path / "model"


def _age(path: Path, seconds: float) -> None:
    then = time.time_ns() - int(seconds * 1e9)
    os.utime(path, ns=(then, then))


def anew(folder: Path) -> str:
    """With nothing kept."""
    sums = [(hex_digest((folder / name).read_bytes()), name) for name in FILES]
    return hex_digest("".join(f"{found}  {name}\n" for found, name in sums).encode())


def test_what_was_computed_is_read_the_next_time(cache: Path, folder: Path) -> None:
    before = anew(folder)
    assert weights_digest(folder, FILES) == before
    (kept,) = cache.glob("*.json")
    assert set(json.loads(kept.read_bytes())) == set(FILES)
    path = folder / FILES[0]
    mtime = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().upper())  # of which the file system says nothing
    os.utime(path, ns=(mtime, mtime))
    assert weights_digest(folder, FILES) == before != anew(folder)


@pytest.mark.parametrize("change", ["bytes", "time", "inode"])
def test_a_file_that_may_be_another_is_read_again(change: str, cache: Path, folder: Path) -> None:
    before, path = weights_digest(folder, FILES), folder / FILES[0]
    mtime = path.stat().st_mtime_ns
    if change == "inode":  # as long as before, and dated back
        path.rename(folder / "old")
        path.write_bytes(b"A.SAFETENSORS")
        os.utime(path, ns=(mtime, mtime))
    else:
        path.write_bytes(b"A.SAFETENSORS" if change == "time" else b"longer than it was")
    found = weights_digest(folder, FILES)
    assert found == anew(folder) != before
    assert cache.is_dir()


@pytest.mark.parametrize("damage", [b"", b"[]", b"{", b'{"a.safetensors": 7}'])
def test_a_damaged_record_costs_the_time_alone(damage: bytes, cache: Path, folder: Path) -> None:
    weights_digest(folder, FILES)
    (kept,) = cache.glob("*.json")
    kept.write_bytes(damage)
    assert weights_digest(folder, FILES) == anew(folder)
    assert set(json.loads(kept.read_bytes())) == set(FILES)


@pytest.mark.usefixtures("cache")
def test_a_cache_that_cannot_be_written_costs_the_time_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for home in (tmp_path / "file", tmp_path / "file/in/it"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        assert weights_digest(folder, FILES) == anew(folder)


def test_digests_of_models_that_nobody_has_used_for_half_a_year_are_deleted(
    cache: Path, folder: Path, tmp_path: Path
) -> None:
    weights_digest(folder, FILES)
    before = set(cache.iterdir())
    for path in before:
        _age(path, 200 * 86_400)
    assert weights_digest(folder, FILES) == anew(folder)  # which counts as used
    other = folder.rename(tmp_path / "other")
    weights_digest(other, FILES)
    assert before < set(cache.iterdir())
    for path in before:
        _age(path, 200 * 86_400)
    third = other.rename(tmp_path / "third")
    weights_digest(third, FILES)
    assert not before & set(cache.iterdir())


def test_workers_that_begin_at_once_compute_once(folder: Path, tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = [sys.executable, "-c", SCRIPT, str(folder), *FILES]
    workers = [
        subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = [worker.communicate(timeout=60)[0].splitlines() for worker in workers]
    assert {lines[-1] for lines in said} == {anew(folder)}
    assert sorted(len(lines) for lines in said) == [1, 1, 1 + len(FILES)]
