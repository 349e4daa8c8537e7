"""The runner on Ray: nodes that go, and addresses where no Ray is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.runner_work import Slow
from tests.kit.runs import numbers
from wdsprep.runners import make_runner
from wdsprep.runners.base import Finished, Quarantined

pytestmark = pytest.mark.system


@pytest.mark.parametrize(("graceful", "count"), [(True, 1), (False, 1), (False, 2)])
def test_a_removed_node_costs_no_attempt(
    cluster: Any, graceful: bool, count: int, tmp_path: Path
) -> None:
    nodes = [cluster.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]
    runner = make_runner(
        "ray", workers=2, gpus_per_worker=1, max_attempts=1, units_per_worker=count
    )
    lost: set[str] = set()
    finished = []
    for event in runner.run(Slow(str(tmp_path)), numbers(4)):
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


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("ray://head:10001", "give HOST:PORT"),
    ],
)
def test_an_address_where_no_ray_is_gives_one_clear_line(address: str, message: str) -> None:
    code = f"""
from wdsprep.errors import WorkError
from wdsprep.runners import make_runner
try:
    list(make_runner("ray", address={address!r}).run(object(), []))
except WorkError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert message in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


MENDED = """
import logging, os, sys
from wdsprep.errors import WorkError
from wdsprep.runners.ray.cluster import connected
class Mend(logging.Handler):
    def emit(self, record):
        print(record.getMessage())
        if sys.argv[2] == "mend":
            del os.environ["RAY_TMPDIR"]
logging.getLogger("wdsprep").addHandler(Mend())
os.environ["RAY_TMPDIR"] = sys.argv[1]
try:
    with connected("local", cpus=1, dashboard=False):
        print("it runs")
except WorkError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("then", "last"),
    [
        ("mend", "it runs"),
        ("leave", r"Ray does not start on this machine \(.*AF_UNIX path length .*\): run the same"),
    ],
)
def test_a_ray_that_does_not_start_is_started_once_more(
    tmp_path: Path, then: str, last: str
) -> None:
    """Here since its sockets would have too long a name."""
    words = [sys.executable, "-c", MENDED, str(tmp_path / ("long" * 30)), then]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    told, end = done.stdout.splitlines()
    assert re.match(r"Ray did not start \(.*AF_UNIX path length .*\): trying once more", told)
    assert re.match(last, end)
    assert done.stderr == ""
