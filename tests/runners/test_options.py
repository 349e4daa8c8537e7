"""Who works where nobody has said so, and on how many cores."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kit.command_lines import python
from wdsprep import cpus
from wdsprep.checks.options import VerifyOptions
from wdsprep.errors import UsageError
from wdsprep.runners.make_runner import HERE_NBYTES, InProcessRunner, runner_for
from wdsprep.runners.options import (
    THIS_RAY,
    WorkerOptions,
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
        WorkerOptions(workers="2:4")
    wide = WorkerOptions(ray_address="head:6379", workers="2:4")
    assert (wide.least, wide.most) == (2, 4)


def test_neither_the_choice_of_a_runner_nor_the_local_one_imports_ray() -> None:
    code = (
        "import sys, wdsprep.runners.make_runner as m\n"
        "options = m.with_runner(m.WorkerOptions(), print)\n"
        "m.make_runner(options.runner, m.RunnerSettings())\n"
        "sys.exit('ray' in sys.modules)"
    )
    python(code)


@pytest.mark.parametrize(
    ("workers", "more", "is_safe", "is_here"),
    [(2, 0, 1, True), (2, 0, 0, True), (1, 1, 1, True), (2, 1, 1, False), (1, 1, 0, False)],
)
def test_little_work_and_one_worker_of_safe_work_need_no_process_of_their_own(
    workers: int, more: int, is_safe: int, is_here: bool
) -> None:
    options = VerifyOptions(workers=workers, runner="local")
    options_of_job = {"on_message": print, "name": "verify", "is_safe": bool(is_safe)}
    runner = runner_for(options, 4, HERE_NBYTES + more, **options_of_job)  # type: ignore[arg-type]
    assert isinstance(runner, InProcessRunner) is is_here


@pytest.mark.parametrize(
    ("own", "files", "count"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
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
