"""Workers of Ray that come and go with the nodes of a cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.clusters import ray_cluster
from tests.kit.gpus import pretend_cuda
from tests.kit.runner_work import Number, Shared, Slow
from wdsprep.runners.base import Failure, Finished, Quarantined, RunnerSettings, Step
from wdsprep.runners.make_runner import make_runner
from wdsprep.runners.schedule import Schedule


@pytest.fixture(scope="module")
def growing_cluster() -> Iterator[Any]:
    with ray_cluster(cpus=1) as growing_cluster:
        yield growing_cluster


@pytest.mark.parametrize("workers", [{"workers": 1, "max_workers": 3}, {"workers": 0}])
def test_a_node_that_joins_is_used_and_one_that_leaves_costs_no_unit_an_attempt(
    growing_cluster: Any,
    workers: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wdsprep.runners.ray.cluster.LOOK_S", 0.2)
    runner = make_runner("ray", RunnerSettings(**workers, max_attempts=1))
    joined = None
    finished = []
    for event in runner.run(Slow(str(tmp_path)), map(Number, range(6))):
        assert not isinstance(event, Quarantined)
        if isinstance(event, Finished):
            finished.append(event.unit.value)
        elif joined is None:
            joined = growing_cluster.add_node(num_cpus=1)
        elif isinstance(event, Step) and event.value == joined.node_id:
            if not Path(tmp_path, "go").exists():
                growing_cluster.remove_node(joined)
            Path(tmp_path, "go").touch()
    assert sorted(finished) == list(range(6))


def test_a_worker_on_a_gpu_that_comes_later_sees_the_cores_of_its_own_node(
    growing_cluster: Any,
) -> None:
    runner = make_runner("ray", RunnerSettings(workers=1, gpus_per_worker=1))
    events: list[Any] = []
    run = runner.run(Shared(), [Number(0)])
    thread = threading.Thread(target=lambda: events.extend(run), daemon=True)
    thread.start()
    time.sleep(1.0)  # until it waits
    node = growing_cluster.add_node(num_cpus=6, num_gpus=2)
    thread.join(60)
    growing_cluster.remove_node(node)
    assert [event.result for event in events if isinstance(event, Finished)] == [3.0]


def test_a_run_whose_nodes_have_all_left_says_again_and_again_what_it_waits_for(
    growing_cluster: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in (
        "cluster.LOOK_S",
        "cluster.SILENT_S",
        "cluster.AGAIN_S",
        "runner.LOOK_S",
    ):
        monkeypatch.setattr(f"wdsprep.runners.ray.{name}", 0.3)
    runner = make_runner("ray", RunnerSettings(gpus_per_worker=1, max_attempts=1))
    node = growing_cluster.add_node(num_cpus=1, num_gpus=1)
    events: list[Any] = []

    def run() -> None:
        events.extend(runner.run(Slow(str(tmp_path)), map(Number, range(2))))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_for(lambda: (tmp_path / "runs").exists())
    growing_cluster.remove_node(node)
    waits = "the Ray cluster has 1 node, and none with 1 CPU and 1 GPU: waiting for one to join"
    wait_for(lambda: caplog.text.count(waits) > 1)
    (tmp_path / "go").touch()
    node = growing_cluster.add_node(num_cpus=1, num_gpus=1)
    thread.join(60)
    growing_cluster.remove_node(node)
    assert sorted(e.unit.value for e in events if isinstance(e, Finished)) == [0, 1]


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Started:
    """A crew that only notes which workers are started."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def start(self, slot: int) -> None:
        self.slots.append(slot)

    def give(self, slot: int, order: int, unit: Any) -> None: ...

    def end(self, slot: int) -> None: ...

    def hear(self) -> list[Any]:
        return []

    def stop(self) -> None: ...


def test_beyond_the_least_few_workers_wait_for_a_place_at_a_time() -> None:
    from wdsprep.runners.ray.cluster import AHEAD, ahead_of_open

    crew, least, most = Started(), 20, 100
    schedule = Schedule(
        range(10_000), workers=most, max_attempts=3, allowed=partial(ahead_of_open, least)
    )
    schedule.dispatch(crew)
    assert len(crew.slots) == least
    opened = 0
    while opened < most:
        schedule.heard(crew.slots[opened], 0, ("ready", 0))
        opened += 1
        schedule.dispatch(crew)
        waiting = len(crew.slots) - opened
        assert waiting <= max(least - opened, AHEAD, opened // 4)
    assert len(crew.slots) == most


def test_without_a_number_workers_follow_the_room_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from wdsprep.runners.ray import cluster

    machines: list[Any] = [{"Alive": True, "Resources": {"CPU": 2}}]
    now = {"s": 0.0}
    monkeypatch.setattr(cluster.ray, "nodes", lambda: machines)
    monkeypatch.setattr(cluster.time, "monotonic", lambda: now["s"])
    crew, allowed = Started(), cluster.room_now(RunnerSettings(), 2)
    schedule = Schedule(range(1_000), workers=cluster.MOST, max_attempts=1, allowed=allowed)
    schedule.dispatch(crew)
    assert crew.slots == [0, 1]
    for slot in crew.slots:
        schedule.heard(slot, 0, ("ready", 0))
    machines[0]["Resources"]["CPU"] = 4
    schedule.dispatch(crew)
    assert crew.slots == [0, 1], "the room is not looked at all the time"
    now["s"] += cluster.LOOK_S + 1
    schedule.dispatch(crew)
    assert crew.slots == [0, 1, 2, 3]
    machines[0]["Resources"]["CPU"] = 1
    now["s"] += cluster.LOOK_S + 1
    schedule.heard(0, 0, ("lost", Failure(reason="its node left", costs=False)))
    schedule.dispatch(crew)
    assert crew.slots == [0, 1, 2, 3]


def test_each_kind_of_gpu_gets_a_batch_of_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from wdsprep.encoding.models.base import auto_batch_size

    def size(gigabytes: int, resolution: int) -> int:
        free = gigabytes << 30
        pretend_cuda(monkeypatch, mem_get_info=(free, free))
        encoder: Any = SimpleNamespace(
            device=torch.device("cuda"), itemsize=2, resolution=resolution
        )
        return auto_batch_size(encoder)

    t4, a10g, h200 = (size(gigabytes, 512) for gigabytes in (15, 22, 139))
    assert 1 < t4 < a10g < h200
    assert size(22, 256) > a10g
