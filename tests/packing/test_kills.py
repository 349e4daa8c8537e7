"""Killed or interrupted wherever it was, a rerun leaves the bytes of an undisturbed run."""

import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.packs import (
    TWENTY,
    children,
    command,
    manifest_of,
    pack,
    photos,
    temporaries,
    tree,
    wait_gone,
    write_files,
)

pytestmark = pytest.mark.system

KILLS = 12


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = photos(tmp_path_factory.mktemp("album"), 237)
    return write_files(root, {"0/bad.jpg": b"<html>", "1/lone.txt": "x", "2/bad.jpg": b""})


@pytest.fixture(scope="module")
def undisturbed(album: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return tree(pack(album, tmp_path_factory.mktemp("undisturbed") / "out", *TWENTY))


class Run:
    """A `wdsprep pack` in a process group of its own."""

    def __init__(self, source: Path | str, images: Path | str, *options: str) -> None:
        self._process = subprocess.Popen(
            command(source, images, *TWENTY, *options),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.workers: set[int] = set()
        self.stderr = ""

    @property
    def going(self) -> bool:
        self.workers |= set(children(self._process.pid))
        return self._process.poll() is None

    def wait(self, timeout_s: float = math.inf, *, until: Path | None = None) -> bool:
        """Wait until the time is over, it has ended or there is such a file: is it still going?"""
        deadline = time.monotonic() + timeout_s
        while self.going and time.monotonic() < deadline and not (until and until.exists()):
            time.sleep(0.002)
        return self.going

    def send(self, signum: int, *, whole_group: bool = False) -> None:
        assert self.going
        (os.killpg if whole_group else os.kill)(self._process.pid, signum)

    def kill_a_worker(self) -> bool:
        workers = children(self._process.pid)
        for pid in workers[:1]:
            os.kill(pid, signal.SIGKILL)
        return bool(workers)

    def end(self) -> int:
        self.wait()
        _, self.stderr = self._process.communicate(timeout=20)
        return self._process.returncode


@pytest.fixture
def chance() -> random.Random:
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")  # pytest shows it where the test fails
    return random.Random(seed)


def test_killed_at_twelve_moments_the_bytes_are_those_of_an_undisturbed_run(
    album: Path, undisturbed: dict[str, bytes], tmp_path: Path, chance: random.Random
) -> None:
    """The driver alone, driver and workers, or one worker; a run that ends is compared, and the
    next one starts from nothing."""
    out = tmp_path / "out"
    kills = complete = 0
    workers: set[int] = set()
    while kills < KILLS:
        run = Run(album, out)
        while run.wait(chance.uniform(0.05, 0.9)):
            kind = chance.choice(["driver", "group", "worker"])
            if kind == "worker":
                kills += run.kill_a_worker()
                continue
            run.send(signal.SIGKILL, whole_group=kind == "group")
            kills += 1
        code = run.end()
        workers |= run.workers
        if code == 0:
            wait_gone(workers)
            assert tree(out) == undisturbed
            shutil.rmtree(out)
            complete += 1
        elif chance.random() < 0.5:  # otherwise the next run meets workers that are not gone yet
            wait_gone(run.workers)
    wait_gone(workers)
    pack(album, out, *TWENTY)
    assert tree(out) == undisturbed
    assert not temporaries(out)
    sys.stdout.write(f"{kills} kills, {complete + 1} datasets\n")


def test_the_hold_of_a_killed_worker_goes_where_nothing_else_is_left_to_do(tmp_path: Path) -> None:
    out = pack(photos(tmp_path / "in", 3), tmp_path / "out")
    whole = tree(out)
    (out / "receipts/000000.hold").write_bytes(b"64/.wdsprep-host.0123456789abcdef.tmp")
    assert tree(pack(tmp_path / "in", out)) == whole


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder on a disk: in memory all is packed before a busy machine can send a signal."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("signum", "whole_group"),
    [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGTERM, False)],
)
def test_interrupted_it_leaves_nothing_half_written_and_resumes(
    album: Path, undisturbed: dict[str, bytes], on_disk: Path, signum: int, whole_group: bool
) -> None:
    """Ctrl-C goes to the whole group; a scheduler tells the driver, or everyone."""
    out = on_disk / "out"
    run = Run(album, out, "--workers", "2")
    run.wait(until=out / "receipts/000001.json")
    run.send(signum, whole_group=whole_group)
    assert run.end() == 130
    assert re.fullmatch(
        r"wdsprep: interrupted: (\d+ of \d+ slices are kept, and the work on \d+ images? of others "
        r"is lost: )?run the same command to go on from here",
        run.stderr.split("captions")[1].split("\n", 1)[1].strip(),
    )
    wait_gone(run.workers, timeout_s=0.5)
    assert not temporaries(out)
    done = {name for name in undisturbed if name.startswith("receipts/")}
    there = {name for name in tree(out) if name.startswith("receipts/")}
    assert there < done
    assert {f"receipts/{r.unit}.json" for r in manifest_of(out).receipts} == there
    assert tree(pack(album, out, *TWENTY)) == undisturbed


def test_an_append_that_was_killed_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """It is a run like any other, so it goes on with --append or without."""
    source = photos(tmp_path / "in", 70)
    out = pack(source, tmp_path / "out", *TWENTY)
    shutil.copytree(out, tmp_path / "whole")
    photos(source, 130, first=70)
    whole = pack(source, tmp_path / "whole", *TWENTY, "--append")
    assert manifest_of(whole).generations == (0, 4)
    for _ in range(3):
        run = Run(source, out, "--append", "--workers", "1")
        done = len(list((out / "receipts").iterdir()))
        run.wait(until=out / f"receipts/{done:06d}.json")
        run.send(signal.SIGKILL, whole_group=True)
        run.end()
    assert tree(pack(source, out, *TWENTY)) == tree(whole)


def test_an_overwrite_that_was_killed_starts_over(
    album: Path, undisturbed: dict[str, bytes], tmp_path: Path, chance: random.Random
) -> None:
    out = pack(photos(tmp_path / "in", 90, first=900), tmp_path / "out", "--samples-per-shard", "3")
    for _ in range(3):
        run = Run(album, out, "--overwrite")
        if run.wait(chance.uniform(0.2, 0.6)):
            run.send(signal.SIGKILL, whole_group=True)
        run.end()
    pack(album, out, *TWENTY, "--overwrite")
    (out / "edition").unlink()
    assert tree(out) == undisturbed
