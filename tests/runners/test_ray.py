"""The runner on Ray: nodes that come and go, and addresses where no Ray is."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kit.command_lines import python
from tests.kit.runner_work import Calls, Slow, cores_of_a_gpu
from tests.kit.runs import numbers, wait_until
from wdsprep.runners.base import Finished, Quarantined, RunnerSettings, Step
from wdsprep.runners.make_runner import make_runner
from wdsprep.runners.ray.cluster import cluster_resources

pytestmark = pytest.mark.system


@pytest.mark.parametrize(("graceful", "count"), [(True, 1), (False, 2)])
def test_a_removed_node_costs_no_attempt(
    cluster: Any, graceful: bool, count: int, tmp_path: Path
) -> None:
    nodes = [cluster.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]
    runner = make_runner(
        "ray", RunnerSettings(workers=2, gpus_per_worker=1, max_attempts=1, units_per_worker=count)
    )
    lost: set[str] = set()
    finished = []
    for event in runner.run(Slow(str(tmp_path)).open, numbers(4)):
        assert not isinstance(event, Quarantined)
        if isinstance(event, Finished):
            finished.append(event.unit.value)
        elif not lost:
            (node,) = [node for node in nodes if node.node_id == event.value]
            cluster.remove_node(node, allow_graceful=graceful)
            nodes.remove(node)
            lost.add(event.value)
            Path(tmp_path, "go").touch()
    for node in nodes:
        cluster.remove_node(node)
    assert sorted(finished) == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [{"workers": 1, "max_workers": 3}, {"workers": 0}])
def test_a_node_that_joins_is_used_and_one_that_leaves_costs_no_unit_an_attempt(
    cluster: Any, workers: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.runners.ray.cluster.LOOK_S", 0.2)
    runner = make_runner("ray", RunnerSettings(**workers, max_attempts=1))
    joined = None
    finished = []
    for event in runner.run(Slow(str(tmp_path)).open, numbers(6)):
        assert not isinstance(event, Quarantined)
        if isinstance(event, Finished):
            finished.append(event.unit.value)
        elif joined is None:
            joined = cluster.add_node(num_cpus=1)
        elif isinstance(event, Step) and event.value == joined.node_id:
            if not Path(tmp_path, "go").exists():
                cluster.remove_node(joined)
            Path(tmp_path, "go").touch()
    assert sorted(finished) == list(range(6))


def test_a_worker_on_a_gpu_that_comes_later_sees_the_cores_of_its_own_node(cluster: Any) -> None:
    runner = make_runner("ray", RunnerSettings(workers=1, gpus_per_worker=1))
    events: list[Any] = []
    run = runner.run(Calls(cores_of_a_gpu).open, numbers(1))
    thread = threading.Thread(target=lambda: events.extend(run), daemon=True)
    thread.start()
    time.sleep(1.0)  # until it waits
    node = cluster.add_node(num_cpus=6, num_gpus=2)
    thread.join(60)
    cluster.remove_node(node)
    assert [event.result for event in events if isinstance(event, Finished)] == [3.0]


def test_a_run_whose_nodes_have_all_left_says_again_and_again_what_it_waits_for(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("cluster.LOOK_S", "cluster.SILENT_S", "cluster.AGAIN_S", "runner.LOOK_S"):
        monkeypatch.setattr(f"wdsprep.runners.ray.{name}", 0.3)
    runner = make_runner("ray", RunnerSettings(gpus_per_worker=1, max_attempts=1))
    node = cluster.add_node(num_cpus=1, num_gpus=1)
    events: list[Any] = []

    def run() -> None:
        events.extend(runner.run(Slow(str(tmp_path)).open, numbers(2)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(lambda: (tmp_path / "runs").exists(), within_s=60)
    cluster.remove_node(node)
    waits = "the Ray cluster has 1 node, and none with 1 CPU and 1 GPU: waiting for one to join"
    wait_until(lambda: caplog.text.count(waits) > 1, within_s=60)
    (tmp_path / "go").touch()
    node = cluster.add_node(num_cpus=1, num_gpus=1)
    thread.join(60)
    cluster.remove_node(node)
    assert sorted(e.unit.value for e in events if isinstance(e, Finished)) == [0, 1]


ASK = """
import time
from wdsprep.errors import WorkError
from wdsprep.runners.ray.cluster import cluster_resources
began = time.monotonic()
try:
    print(len(cluster_resources({address!r})), "node")
except WorkError as error:
    print(error)
    assert time.monotonic() - began < 5
"""


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("ray://head:10001", "give HOST:PORT"),
    ],
)
def test_an_address_where_no_ray_is_gives_one_clear_line(address: str, message: str) -> None:
    done = python(ASK.format(address=address))
    assert message in done.stdout
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")


def test_ray_is_not_started_to_ask_what_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", refuse)
    monkeypatch.delitem(sys.modules, "ray")  # which this process may use already
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cluster_resources("local") is cluster_resources(None) is None
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert cluster_resources(None) is None


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a cluster that asks for a token, and a home that has it."""
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray/auth_token").write_text("5" * 64)
    environment = {**os.environ, "HOME": str(home)}
    environment.pop("RAY_ADDRESS", None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # of sockets' names
        begin = ["start", "--head", "--block", "--port", address.rpartition(":")[2], "--num-cpus=1"]
        begin += ["--include-dashboard=false", "--disable-usage-stats", "--temp-dir", short]
        head = subprocess.Popen(
            [*ray, *begin], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_until(lambda: is_open(address), within_s=60)
            yield address, home
        finally:
            for process in [*psutil.Process(head.pid).children(recursive=True), head]:
                process.kill()
            head.wait()


def is_open(address: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, r'asks for a token: "export RAY_AUTH_MODE=token" sends the one in ~/.ray/auth_token'),
        ({"RAY_AUTH_MODE": "token"}, "^1 node$"),
        (
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "6" * 64},
            "asks for a token: the one here is another: put its own into",
        ),
    ],
)
def test_a_cluster_that_asks_for_a_token_gets_it_or_that_is_said(
    guarded: tuple[str, Path], environment: dict[str, str], told: str
) -> None:
    address, home = guarded
    unset = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = python(ASK.format(address=address), env={**unset, "HOME": str(home), **environment})
    assert re.search(told, done.stdout)
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")
