"""Who works where nobody has said so, and on how many cores."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from wdsprep import cpus
from wdsprep.checks.options import VerifyOptions
from wdsprep.errors import UsageError
from wdsprep.runners.base import Runner
from wdsprep.runners.make_runner import HERE_NBYTES, InProcessRunner, runner_for
from wdsprep.runners.options import (
    THIS_RAY,
    WorkerOptions,
    WorkerRangeOptions,
    choose_runner,
    ray_in_use,
    ray_line,
    with_runner,
)


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Ray is named, and none is in use."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


@pytest.mark.parametrize(
    ("there", "gpus", "runner"),
    [("", 0, "local"), ("", 1, "local"), ("", 2, "ray"), ("head:6379", 0, "ray")],
)
def test_ray_is_for_a_cluster_and_for_several_gpus(there: str, gpus: int, runner: str) -> None:
    assert choose_runner("auto", there=there, gpus=gpus) == runner
    for wanted in ("local", "ray"):
        assert choose_runner(wanted, there=there, gpus=gpus) == wanted


def test_a_cluster_is_named_by_its_address_the_environment_or_a_ray_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ray_in_use(None) == ""
    assert ray_in_use("head:6379") == "head:6379"
    monkeypatch.setenv("RAY_ADDRESS", "other:6379")
    assert (ray_in_use(None), ray_in_use("head:6379")) == ("other:6379", "head:6379")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert ray_in_use(None) == THIS_RAY


def test_a_run_on_ray_says_so_and_one_without_says_nothing() -> None:
    said: list[str] = []
    assert with_runner(WorkerOptions(), said.append) == WorkerOptions(runner="local")
    assert said == []
    assert with_runner(WorkerOptions(runner="ray"), said.append).runner == "ray"
    assert with_runner(WorkerOptions(ray_address="head:6379"), said.append).runner == "ray"
    assert said == ["starting Ray on this machine", "connecting to Ray at head:6379"]
    assert ray_line("local", 4) == "starting Ray on this machine: 4 GPUs"
    assert ray_line(THIS_RAY) == "using the Ray of this process"


def test_a_span_of_workers_is_for_a_cluster_whoever_chose_that() -> None:
    with pytest.raises(UsageError, match="give it with --ray-address"):
        WorkerRangeOptions(workers="2:4")
    wide = WorkerRangeOptions(ray_address="head:6379", workers="2:4")
    assert (wide.least, wide.most) == (2, 4)


def test_nobody_imports_ray_to_find_out_whether_it_is_in_use() -> None:
    code = "import sys, wdsprep.runners.options as b; b.with_runner(b.WorkerOptions(), print); "
    code += "sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def runner(*, workers: int, nbytes: int, is_safe: bool) -> Runner:
    options = VerifyOptions(workers=workers, runner="local")
    return runner_for(
        options, 4, nbytes, on_message=lambda _text: None, name="verify", is_safe=is_safe
    )


@pytest.mark.parametrize("is_safe", [True, False])
def test_little_work_is_done_in_this_process(is_safe: bool) -> None:
    found = runner(workers=2, nbytes=HERE_NBYTES, is_safe=is_safe)
    assert isinstance(found, InProcessRunner)


def test_one_worker_of_safe_work_needs_no_process_of_its_own() -> None:
    much = HERE_NBYTES + 1
    assert isinstance(runner(workers=1, nbytes=much, is_safe=True), InProcessRunner)
    assert not isinstance(runner(workers=2, nbytes=much, is_safe=True), InProcessRunner)
    assert not isinstance(runner(workers=1, nbytes=much, is_safe=False), InProcessRunner)


@pytest.mark.parametrize(
    ("own", "files", "count"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "6400000 100000"}, 8),
        ("0::/pod/box", {"pod/cpu.max": "300000 100000", "pod/box/cpu.max": "max 100000"}, 3),
        ("0::/../of/the/host", {"cpu.max": "300000 100000"}, 3),
        ("4:cpu,cpuacct:/pod", {"cpu,cpuacct/pod/cpu.cfs_quota_us": "400000"}, 4),
        ("4:cpu,cpuacct:/of/the/host", {"cpu,cpuacct/cpu.cfs_quota_us": "400000"}, 4),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1"}, 8),
        ("4:memory:/", {"memory/cpu.cfs_quota_us": "400000"}, 8),
        ("", {}, 8),
    ],
)
def test_a_quota_counts_and_no_limit_does_not(
    own: str, files: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, said = tmp_path / "groups", tmp_path / "own"
    said.write_text(own)
    for name, text in files.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        if name.endswith("quota_us"):
            path.with_name("cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(cpus, "GROUPS", groups)
    monkeypatch.setattr(cpus, "OWN_GROUPS", said)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert cpus.usable_cpus() == count
