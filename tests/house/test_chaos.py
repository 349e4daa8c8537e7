"""A cluster on which everything happens that happens to spot machines: the bytes of a quiet run.

After each fault all files are those of an undisturbed run, `verify` finds nothing, the log says
what happened, and nothing was done twice but what the struck workers had in hand.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.kit.chaos import Stage, encode_job, faults_of, hit, pack_job, undisturbed
from tests.kit.command_lines import ran
from tests.kit.encodes import pictures
from tests.kit.packs import tree
from tests.kit.paths import ROOT
from wdsprep.errors import AccessError
from wdsprep.store.s3.failures import explain

pytestmark = pytest.mark.system

SLICE, SLICES = 8, 14
UNITS = {"pack": 1, "encode": 3}  # that a worker has in hand
ONCE = ("--max-attempts", "1")
"""A death by its machine costs no attempt."""
CASES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "machine dies": ("encode", ONCE, "a worker was lost with"),
    "spot notice": ("pack", ONCE, "its machine was taken back"),
    "worker hangs": ("pack", (), "made no progress for 4 s, and was ended"),
    "clocks": ("pack", (), ""),
    "full": ("pack", (), ""),
}
"""The job that goes through each fault, its options, and what the log says then."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """A head and one node that stays."""
    stage = Stage()
    stage.add()
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    job = pack_job(pictures(root / "in", range(SLICE * SLICES)), per_shard=SLICE, pause_s=0)
    undisturbed(job, root / "out")
    return root / "out"


@pytest.mark.parametrize("name", CASES)
def test_after_a_fault_the_bytes_are_those_of_an_undisturbed_run(
    name: str, stage: Stage, images: Path, tmp_path: Path
) -> None:
    """An unknown machine writes there too."""
    kind, options, said = CASES[name]
    job, whole = pack_job(images.parent / "in", per_shard=SLICE, pause_s=0.03), tree(images)
    if kind == "encode":
        job = encode_job(images, pause_s=0.1)
        whole = undisturbed(job, tmp_path / "quiet")
    out = tmp_path / "out"
    foreign = out / "64/.wdsprep-elsewhere.0123456789abcdef.tmp"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"it is at work")
    result = hit(stage, replace(job, words=(*job.words, *options)), name, str(out))
    assert foreign.read_bytes() == b"it is at work"
    foreign.unlink()
    assert faults_of(result, str(out), whole) == []
    assert result.units == SLICES
    assert result.again.total() <= UNITS[kind] * result.struck
    assert result.struck == 1 or name != "machine dies"
    assert any(said in line for line in result.log) or not said, result.log


def can_cut_links() -> bool:
    has_programs = all(map(shutil.which, ("unshare", "nsenter", "ip")))
    return has_programs and not subprocess.run(["unshare", "--net", "true"], check=False).returncode


@pytest.mark.skipif(not can_cut_links(), reason="network namespaces are for root")
def test_a_cut_link_leaves_two_that_do_the_same(images: Path, tmp_path: Path) -> None:
    """The far worker is out of reach and works on: here a shared folder is all that is left."""
    words = [images.parent / "in", images, tmp_path / "out", str(SLICE)]
    program = "unshare", "--net", sys.executable, "-m", "tests.kit.cut_link"
    own = {**os.environ, "RAY_AUTH_MODE": "disabled"}  # a Ray that ran here has set what it had
    said = ran(*program, *words, cwd=ROOT, env=own).stdout
    assert "a worker was lost with 1 unit" in said


def test_where_s3_refuses_a_wrong_clock_the_error_names_the_machine() -> None:
    answer: Any = {
        "Error": {"Code": "RequestTimeTooSkewed"},
        "ResponseMetadata": {"HTTPStatusCode": 403},
    }
    error = explain(ClientError(answer, "GetObject"), "s3://bucket/key", "s3://bucket")
    assert isinstance(error, AccessError)
    assert f"the clock of {socket.gethostname()} is wrong" in str(error)
