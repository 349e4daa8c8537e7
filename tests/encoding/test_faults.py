"""Whatever happens to workers, GPUs, nodes, disk or network: the bytes of an undisturbed run."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import wdsprep
from tests.kit.encode_work import Making
from tests.kit.encodes import in_this_process
from tests.kit.faultproxy import FaultProxy
from tests.kit.packs import (
    SCRIPT,
    children,
    jpeg,
    manifest_of,
    pack,
    temporaries,
    tree,
    upload,
    wait_gone,
    write_files,
)
from tests.kit.paths import FIND_TESTS
from tests.kit.runs import wait_until
from tests.kit.s3 import S3Server
from wdsprep.dataset.manifest import Manifest
from wdsprep.runners.job import JobListener
from wdsprep.runners.run import Outcome
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes

SIZES = ((64, 80), (100, 90), (72, 64), (120, 70))
SHARDS = 12
WHITE, BLACK = 65, 145  # the samples that do harm
BAD_SHARD, RAISING_SHARD = "64/000003", "64/000007"  # where they are
COMMAND = f"""
{FIND_TESTS}
from tests.kit.encode_work import command; command(*sys.argv[1:])
"""
INTERRUPTED = "wdsprep: interrupted: run the same command to go on from here"
LOST = r"\d+ of 12 shards are kept, and the work on \d+ images? of others is lost: "

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve shards of twenty; one image is white, one black."""
    root = tmp_path_factory.mktemp("images")
    files: dict[str, bytes | str] = {}
    for number in range(SHARDS * 20):
        files[f"{number:04d}.jpg"] = jpeg(number, SIZES[number % 4])
        files[f"{number:04d}.txt"] = f"photo {number} of a noise" * (number % 5 != 0)
    write_files(root / "in", files)
    for number, colour in ((WHITE, "white"), (BLACK, "black")):
        Image.new("RGB", (64, 64), colour).save(root / f"in/{number:04d}.jpg")
    return pack(root / "in", root / "out", "--buckets", "64,256", "--samples-per-shard", "20")


@pytest.fixture(scope="module")
def undisturbed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    outcome = encode(images, out, workers=1)
    assert (outcome.samples, outcome.quarantined) == (SHARDS * 20, ())
    found = tree(out)
    assert len(found) == SHARDS * 5 + 2
    return found


def encode(
    images: Path | str,
    out: Path | str,
    making: Making | None = None,
    *,
    listener: JobListener | None = None,
    **wish: Any,
) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wdsprep.encoding.encode.make_encoder", making or Making())
        return wdsprep.encode(
            str(images),
            str(out),
            resolution=64,
            model="tiny",
            batch_size=4,
            listener=listener,
            **{"runner": "local", "device": "cpu", "workers": 2, **wish},
        )


def go_on(images: Path | str, out: Path | str) -> Outcome:
    with in_this_process():
        return encode(images, out)


class Done:
    """The shards that were finished at some time: none of them is ever written again."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._seen: dict[str, tuple[int, int]] = {}

    def look(self) -> int:
        for receipt in (self._out / "receipts").glob("*/*.json"):
            name = str(receipt.relative_to(self._out / "receipts").with_suffix(".tar"))
            stat = (self._out / name).stat()
            now = (stat.st_ino, stat.st_mtime_ns)
            assert self._seen.setdefault(name, now) == now, f"{name} was done again"
        return len(self._seen)


OPTIONS = ("--resolution", "64", "--model", "tiny", "--runner", "local", "--device", "cpu")


# --- workers


def test_shards_that_break_every_worker_are_left_out_and_only_they_are_retried(
    images: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """By the command, with exit code 3."""
    out = tmp_path / "out"
    words = ["encode", str(images), str(out), *OPTIONS, "--batch-size", "4", "-v", "--workers", "2"]
    command = [sys.executable, "-c", COMMAND, *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said, errors = run.stdout, run.stderr
    assert run.returncode == 3, errors
    reasons = {
        BAD_SHARD: "worker was killed (signal 9), most often for lack of memory: fewer",
        RAISING_SHARD: "BrokenWorkerError: RuntimeError: an illegal memory access was encountered",
    }
    for shard, reason in reasons.items():
        assert f"shard {shard} is left out: {reason}" in said
        assert f"{shard} is tried again: " in errors  # the first time it was lost among others
    assert said.strip().endswith("run the same command again to retry what is left out")
    assert "Traceback" not in errors
    check_left_out(out, undisturbed, *reasons)
    rerun(images, out, undisturbed, *reasons)


def check_left_out(out: Path | str, undisturbed: dict[str, bytes], *shards: str) -> None:
    there = tree(out)
    assert not Manifest.from_bytes(there["wdsprep.json"], "manifest").complete
    left_out = (*shards, "wdsprep.json")
    wanted = {n: d for n, d in undisturbed.items() if not any(name in n for name in left_out)}
    assert {n: d for n, d in there.items() if n != "wdsprep.json"} == wanted


def rerun(images: Path | str, out: Path | str, undisturbed: dict[str, bytes], *shards: str) -> None:
    """A run that has these shards left to do."""
    outcome = go_on(images, out)
    assert (outcome.samples, outcome.quarantined) == (20 * len(shards), ())
    assert tree(out) == undisturbed


# --- Ctrl-C


def test_ctrl_c_of_the_command_is_one_line_and_the_rerun_completes(
    images: Path, tmp_path: Path
) -> None:
    """Begun with the tiny model, and so with bytes of its own."""
    out = tmp_path / "out"
    done = Done(out)
    words = [str(SCRIPT), "encode", str(images), str(out), *OPTIONS, "--workers", "1"]
    run = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(lambda: done.look() >= 1, within_s=60)
    running = children(run.pid)
    os.killpg(run.pid, signal.SIGINT)
    said, errors = run.communicate(timeout=20)
    assert run.returncode == 130
    assert said == ""
    (line,) = (line for line in errors.splitlines() if "wdsprep:" in line)
    assert re.sub(LOST, "", line) == INTERRUPTED
    assert errors.splitlines()[-1] == line
    assert "Traceback" not in errors
    wait_gone(running, timeout_s=1.0)
    assert not temporaries(out)
    assert len(manifest_of(out).receipts) == done.look() < SHARDS
    go_on(images, out)
    assert done.look() == SHARDS
    assert manifest_of(out).complete
    assert len(tree(out)) == SHARDS * 5 + 2


# --- S3, and sources that change


def test_an_s3_shard_that_is_replaced_while_it_is_read_is_refused_and_the_others_are_done(
    images: Path,
    undisturbed: dict[str, bytes],
    s3_server: S3Server,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Head and tail are then of different tars."""
    source, out = f"s3://{bucket}/images", f"s3://{bucket}/latents"
    upload(images, source)
    store = open_store(source)
    whole = (images / f"{BAD_SHARD}.tar").read_bytes()
    other = b"".join(path.read_bytes() for path in sorted(images.glob("64/*.tar"))[4:6])[
        : len(whole)
    ]
    reads: list[str] = []

    def replace(method: str, path: str, _n: int, headers: Any) -> None:
        if method == "GET" and path.partition("?")[0].endswith(f"{BAD_SHARD}.tar"):
            reads.append(headers["Range"])
            if len(reads) == 2:
                write_bytes(store, f"{BAD_SHARD}.tar", other)

    with FaultProxy(s3_server.url, replace) as proxy, monkeypatch.context() as patch:
        assert list(store.list("64/"))  # by a client for the server itself
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        outcome = encode(source, out, Making(chunk_nbytes=50_000), workers=1)
    assert len(reads) >= 2
    (failed,) = outcome.quarantined
    assert (failed.unit.name, failed.attempts) == (BAD_SHARD, 1)
    assert failed.reason.startswith(
        f'{BAD_SHARD}.tar is not what was packed (another BLAKE3): run "wdsprep repair '
    )
    check_left_out(out, undisturbed, BAD_SHARD)
    write_bytes(store, f"{BAD_SHARD}.tar", whole)
    rerun(source, out, undisturbed, BAD_SHARD)
