"""A cluster on which everything happens that happens to spot machines: the bytes of a quiet run.

After each fault all files are those of an undisturbed run, `verify` finds nothing, the log says
what happened, and nothing was done twice but what the struck workers had in hand.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from botocore.exceptions import ClientError

from tests.kit.chaos import Job, Result, Stage, encode_job, faults_of, pack_job, undisturbed
from tests.kit.chaos_faults import (
    full_object_stores,
    machine_dies,
    machine_is_taken_back,
    worker_dies,
    worker_hangs,
)
from tests.kit.encodes import pictures
from tests.kit.packs import tree
from tests.kit.paths import ROOT
from wdsprep.errors import AccessError
from wdsprep.store.s3.failures import explain

pytestmark = pytest.mark.system

SLICE, SLICES = 8, 14
DAY_S = 86_400.0
Whole = dict[str, dict[str, bytes]]
"""The files that each job makes where nothing happens, by its name."""
UNITS = {"pack": 1, "encode": 3}  # that a worker has in hand


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """A head and one node that stays."""
    stage = Stage()
    stage.add()
    yield stage
    stage.close()


@pytest.fixture
def leaver(stage: Stage) -> Iterator[Any]:
    """A node that the test may do anything to."""
    stay = stage.nodes[0]
    yield stage.add()
    stage.clear(keep=[stay])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    job = pack_job(pictures(root / "in", range(SLICE * SLICES)), per_shard=SLICE, pause_s=0)
    undisturbed(job, root / "out")
    return root / "out"


@pytest.fixture(params=["encode"])
def job(request: pytest.FixtureRequest, images: Path) -> Job:
    if request.param == "pack":
        return pack_job(images.parent / "in", per_shard=SLICE, pause_s=0.03)
    return encode_job(images, pause_s=0.1)


@pytest.fixture(scope="module")
def quiet(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    latents = tmp_path_factory.mktemp("quiet") / "latents"
    return {"pack": tree(images), "encode": undisturbed(encode_job(images, pause_s=0), latents)}


def check_whole(result: Result, job: Job, out: Path | str, quiet: Whole) -> None:
    assert faults_of(result, str(out), quiet[job.name]) == []
    assert result.units == SLICES
    assert result.again.total() <= UNITS[job.name] * result.struck


def test_machines_that_die_and_machines_that_come(
    stage: Stage, leaver: Any, job: Job, quiet: Whole, tmp_path: Path
) -> None:
    """A death by its machine costs no attempt, of which there is one."""
    job = replace(job, words=(*job.words, "--max-attempts", "1"))
    out = tmp_path / "out"
    result = job.run(stage, str(out), machine_dies(leaver), diary=tmp_path / "diary")
    check_whole(result, job, out, quiet)
    assert result.struck == 1
    assert any("a worker was lost with" in line for line in result.log), result.log


@pytest.mark.parametrize("job", ["pack"], indirect=True)
def test_a_spot_machine_is_taken_back_with_notice(
    stage: Stage, leaver: Any, job: Job, quiet: Whole, tmp_path: Path
) -> None:
    job = replace(job, words=(*job.words, "--max-attempts", "1"))
    out = tmp_path / "out"
    fault = machine_is_taken_back(leaver, notice_s=2.0)
    result = job.run(stage, str(out), fault, diary=tmp_path / "diary")
    check_whole(result, job, out, quiet)
    assert any("its machine was taken back" in line for line in result.log), result.log


def test_a_worker_that_hangs_is_given_up(
    stage: Stage, leaver: Any, images: Path, quiet: Whole, tmp_path: Path
) -> None:
    job = pack_job(images.parent / "in", per_shard=SLICE, pause_s=0.03)
    out = tmp_path / "out"
    result = job.run(
        stage, str(out), worker_hangs(leaver), diary=tmp_path / "diary", patience_s=4.0
    )
    check_whole(result, job, out, quiet)
    assert any("made no progress for 4 s, and was ended" in line for line in result.log)


def test_clocks_that_are_days_apart_change_nothing(
    stage: Stage, leaver: Any, images: Path, quiet: Whole, tmp_path: Path
) -> None:
    """Those of two workers and of the driver; and an unknown machine writes there too."""
    job = pack_job(images.parent / "in", per_shard=SLICE, pause_s=0.03)
    out = tmp_path / "out"
    foreign = out / "64/.wdsprep-elsewhere.0123456789abcdef.tmp"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"it is at work")
    real = time.time
    with patch.object(time, "time", lambda: real() + 2 * DAY_S):
        result = job.run(
            stage,
            str(out),
            worker_dies(leaver),
            diary=tmp_path / "diary",
            skews_s=(-3 * DAY_S, 3 * DAY_S),
        )
    assert foreign.read_bytes() == b"it is at work"
    foreign.unlink()
    check_whole(result, job, out, quiet)


def test_full_object_stores_hinder_nobody(
    stage: Stage, leaver: Any, images: Path, quiet: Whole, tmp_path: Path
) -> None:
    """Neither at the start, nor when a worker is replaced."""
    job = pack_job(images.parent / "in", per_shard=SLICE, pause_s=0.03)
    out = tmp_path / "out"
    with full_object_stores(stage):
        result = job.run(stage, str(out), worker_dies(leaver), diary=tmp_path / "diary")
    check_whole(result, job, out, quiet)


def can_cut_links() -> bool:
    return (
        all(map(shutil.which, ("unshare", "nsenter", "ip")))
        and subprocess.run(
            ["unshare", "--net", "true"], capture_output=True, check=False
        ).returncode
        == 0
    )


@pytest.mark.skipif(not can_cut_links(), reason="network namespaces are for root")
def test_a_cut_link_leaves_two_that_do_the_same(images: Path, quiet: Whole, tmp_path: Path) -> None:
    """The far worker is out of reach and works on: here a shared folder is all that is left."""
    words = [images.parent / "in", images, tmp_path / "out", str(SLICE)]
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", "tests.kit.cut_link", *words],
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},  # a Ray that ran here has set what it had
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["found"], found["struck"]) == ([], 1)
    assert any("a worker was lost with 1 unit" in line for line in found["log"]), found["log"]
    assert tree(tmp_path / "out") == quiet["pack"]


def test_where_s3_refuses_a_wrong_clock_the_error_names_the_machine() -> None:
    answer: Any = {
        "Error": {"Code": "RequestTimeTooSkewed"},
        "ResponseMetadata": {"HTTPStatusCode": 403},
    }
    error = explain(ClientError(answer, "GetObject"), "s3://bucket/key", "s3://bucket")
    assert isinstance(error, AccessError)
    assert f"the clock of {socket.gethostname()} is wrong" in str(error)
