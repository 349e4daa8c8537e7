"""Who encodes on which machines: pure decisions."""

import sys
from pathlib import Path

import pytest

from tests.kit.gpus import pretend_cuda
from wdsprep.encoding import gpus, worker_plan
from wdsprep.encoding.options import EncodeWorkerOptions
from wdsprep.encoding.worker_plan import Machine, plan_workers, settle_runner
from wdsprep.errors import UsageError

TWO_CORES = [Machine(cpus=2)]
ONE_GPU = [Machine(cpus=8, gpus=("0",))]
EIGHT_GPUS = [Machine(cpus=100, gpus=tuple("01234567"))]
MIXED = [
    Machine(cpus=64),
    Machine(cpus=8, gpus=("0",)),
    Machine(cpus=48, gpus=("0", "1", "2", "3")),
]


@pytest.mark.parametrize(("workers", "threads"), [(1, 2), (2, 1), (3, 1)])
def test_workers_on_a_cpu_share_its_cores(workers: int, threads: int) -> None:
    plan = plan_workers(EncodeWorkerOptions(workers=workers), TWO_CORES, is_cluster=False)
    assert (plan.workers, plan.threads) == (workers, threads)


def test_each_gpu_has_a_worker_with_its_share_of_cores() -> None:
    plan = plan_workers(EncodeWorkerOptions(), ONE_GPU, is_cluster=False)
    assert (plan.device, plan.workers, plan.cpus_per_worker) == ("cuda", 1, 8)
    plan = plan_workers(EncodeWorkerOptions(), EIGHT_GPUS, is_cluster=False)
    assert (plan.workers, plan.cpus_per_worker, plan.gpus) == (
        8,
        12,
        tuple("01234567"),
    )


@pytest.mark.parametrize(
    ("nvidia", "amd", "is_asked"),
    [("libnone.so.1", "none", False), ("libnone.so.1", "/", True), ("libc.so.6", "none", True)],
)
def test_without_the_driver_of_a_gpu_torch_is_not_asked(
    nvidia: str, amd: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    pretend_cuda(monkeypatch, is_available=lambda: bool(asked.append("torch")))
    monkeypatch.setattr(gpus, "NVIDIA", nvidia)
    monkeypatch.setattr(gpus, "AMD", Path(amd))
    assert (gpus.visible_gpus(), asked) == ((), ["torch"] * is_asked)


def test_a_gpu_can_be_shared_and_left_alone() -> None:
    plan = plan_workers(EncodeWorkerOptions(gpus_per_worker=0.5), ONE_GPU, is_cluster=False)
    assert (plan.workers, plan.cpus_per_worker, plan.gpus_per_worker) == (
        2,
        4,
        0.5,
    )
    plan = plan_workers(EncodeWorkerOptions(device="cpu"), ONE_GPU, is_cluster=False)
    assert (plan.device, plan.gpus_per_worker, plan.workers) == ("cpu", 0, 1)


@pytest.mark.parametrize(("workers", "share"), [(4, 1), (8, 1), (9, 0.5), (16, 0.5)])
def test_more_workers_than_gpus_share_them_and_their_memory(workers: int, share: float) -> None:
    plan = plan_workers(EncodeWorkerOptions(workers=workers), EIGHT_GPUS, is_cluster=False)
    assert (plan.gpus_per_worker, plan.gpu_share) == (share, share)
    assert plan.threads == int(12.5 * share)


def test_on_a_cluster_every_gpu_machine_has_room() -> None:
    plan = plan_workers(EncodeWorkerOptions(), MIXED, is_cluster=True)
    assert (plan.device, plan.workers, plan.cpus_per_worker) == ("cuda", 0, 8)
    options = EncodeWorkerOptions(device="cpu")
    plan = plan_workers(options, [Machine(cpus=16), Machine(cpus=4)], is_cluster=True)
    assert (plan.device, plan.workers, plan.cpus_per_worker) == ("cpu", 0, 4)


SCALED_TO_ZERO = ([], [Machine(cpus=4)], [Machine(cpus=64), Machine(cpus=8)])


@pytest.mark.parametrize("machines", SCALED_TO_ZERO)
def test_gpus_may_join_a_cluster_later(machines: list[Machine]) -> None:
    plan = plan_workers(EncodeWorkerOptions(device="cuda", workers=4), machines, is_cluster=True)
    assert (plan.device, plan.workers, plan.gpus_per_worker) == ("cuda", 4, 1)
    assert (plan.cpus_per_worker, plan.threads) == (1, 0)  # each node has its own
    with pytest.raises(UsageError, match=r"no GPU now: give --device cuda .* --device cpu"):
        plan_workers(EncodeWorkerOptions(), machines, is_cluster=True)
    assert plan_workers(EncodeWorkerOptions(device="cpu"), machines, is_cluster=True).threads >= 1


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="no GPU"):
        plan_workers(EncodeWorkerOptions(device="cuda"), TWO_CORES, is_cluster=False)
    with pytest.raises(UsageError, match="gpus-per-worker"):
        plan_workers(EncodeWorkerOptions(gpus_per_worker=1), TWO_CORES, is_cluster=False)


LOCALLY = "encoding with local processes: "


@pytest.mark.parametrize(
    ("machine", "options", "runner", "line"),
    [
        (TWO_CORES[0], {}, "local", f"{LOCALLY}no GPU here and no --ray-address"),
        (ONE_GPU[0], {}, "local", f"{LOCALLY}one GPU here and no --ray-address"),
        (TWO_CORES[0], {"device": "cpu"}, "local", f"{LOCALLY}the CPU alone here and no"),
        (EIGHT_GPUS[0], {}, "ray", "starting Ray on this machine: 8 GPUs"),
        (TWO_CORES[0], {"ray_address": "head:6379"}, "ray", "connecting to Ray at head:6379"),
        (ONE_GPU[0], {"runner": "ray"}, "ray", "starting Ray on this machine"),
        (EIGHT_GPUS[0], {"runner": "local"}, "local", ""),
    ],
)
def test_which_runner_is_chosen_and_why_is_one_line(
    machine: Machine,
    options: dict[str, str],
    runner: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(worker_plan, "this_machine", lambda _device: machine)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    said: list[str] = []
    assert settle_runner(EncodeWorkerOptions(**options), said.append).runner == runner  # type: ignore[arg-type]
    assert len(said) == bool(line)
    assert "".join(said).startswith(line)
