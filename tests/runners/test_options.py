"""Who works where nobody has said so."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from wdsprep.errors import UsageError
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
