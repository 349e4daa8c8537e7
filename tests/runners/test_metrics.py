"""A real Ray of one node, whose metrics are read as Prometheus reads them."""

from __future__ import annotations

import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.kit.runner_work import Number
from wdsprep.runners.base import Finished
from wdsprep.runners.make_runner import make_runner
from wdsprep.runners.runner_settings import RunnerSettings


@dataclass(frozen=True)
class Told:
    """Progress such as `encode` has it."""

    samples: int
    nbytes: int
    rejects: dict[str, int] = field(default_factory=dict)
    device: str = "NVIDIA A10G"
    busy_s: float = 3.0
    wall_s: float = 4.0


@dataclass(frozen=True)
class Counts:
    """Ten images in two steps and two rejects; unit 1 fails once in each worker."""

    def open(self) -> Any:
        failed = set()

        def call(unit: Number) -> Generator[Told, None, int]:
            yield Told(4, 400)
            if unit.value == 1 and not failed:
                failed.add(unit.value)
                raise ValueError("once")
            yield Told(10, 1_000, {"truncated": 2})
            return unit.value

        return call


@pytest.fixture
def endpoint() -> Any:
    import ray

    for package in ("aiohttp", "prometheus_client"):
        pytest.importorskip(package, reason="metrics are exported by ray[default]")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    ray.init(
        "local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _metrics_export_port=port,
        _system_config={"metrics_report_interval_ms": 200},
    )
    (node,) = ray.nodes()
    assert node["MetricsExportPort"] == port
    yield f"http://{node['NodeManagerAddress']}:{port}/metrics"
    ray.shutdown()


def scraped(endpoint: str) -> dict[str, float]:
    """By name, the values of a run's metrics, those of all tags summed; none before Ray answers."""
    try:
        with urllib.request.urlopen(endpoint, timeout=10) as answer:
            text = answer.read().decode()
    except urllib.error.URLError:
        return {}
    found: dict[str, float] = {}
    for name, tags, value in re.findall(r"^ray_wdsprep_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        assert 'command="encode"' in tags
        assert 'phase="256"' in tags
        found[name] = found.get(name, 0.0) + float(value)
    return found


def test_prometheus_sees_images_rejects_attempts_and_what_is_left(endpoint: str) -> None:
    runner = make_runner("ray", RunnerSettings(workers=1, name="encode", phase="256", units=3))
    events = runner.run(Counts(), map(Number, range(3)))
    assert sum(isinstance(event, Finished) for event in events) == 3
    wanted = {
        "images_total": 34.0,  # four were counted at the attempt that failed
        "bytes_total": 3_400.0,
        "rejects_total": 6.0,
        "busy_share": 0.75,
        "unit_seconds_count": 4.0,
        "attempts_total": 4.0,
        "units_total": 3.0,
        "units_left": 0.0,
        "workers": 0.0,
    }
    deadline = time.monotonic() + 60
    while not wanted.items() <= (found := scraped(endpoint)).items():
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
