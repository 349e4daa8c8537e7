"""A list of URLs becomes the same dataset wherever it is packed: here, on Ray, and onto S3."""

import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.clusters import LEAN_HEAD
from tests.kit.packs import command, jpeg, pack, tree
from tests.kit.sites import FAST, KINDS, Site, kill_when_asked, open_site
from tests.kit.webserver import Connection, Request, WebServer, ok, status

OPTIONS = (*FAST, "--samples-per-shard", "15")
ON_RAY = ("--runner", "ray")
ROWS = KINDS * 9


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Site, WebServer]]:
    with open_site() as opened:
        yield opened


@pytest.fixture(scope="module")
def table(site: tuple[Site, WebServer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "urls.txt"
    lines = (f"{site[1].url}/{kind}/{n}\n" for n, kind in enumerate(ROWS))
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def wanted(
    site: tuple[Site, WebServer], table: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Packed by one local process while the site is half broken, and then tried again."""
    out = pack(table, tmp_path_factory.mktemp("here") / "out", *OPTIONS)
    before = tree(out)
    site[0].is_mended = True
    after = tree(pack(table, out, *OPTIONS, "--retry-rejected"))
    site[0].is_mended = False
    assert before.keys() < after.keys()
    return before, after


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A cluster of two machines, as Ray takes them for it."""
    from ray.cluster_utils import Cluster

    machine = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=machine | LEAN_HEAD)
    cluster.add_node(**machine)
    yield cluster.address
    cluster.shutdown()


def pack_in_two_attempts(table: Path, out: Path | str, server: WebServer, *options: str) -> None:
    """The first is killed, with all that it has started, when it has asked for some of the rows."""
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")  # pytest shows it where the test fails
    asked = random.Random(seed).randrange(1, len(ROWS))
    kill_when_asked(command(table, out, *OPTIONS, *options), server, asked)
    pack(table, out, *OPTIONS, *options, workers=2)


def test_on_ray_it_is_the_same_after_a_kill_and_after_a_retry(
    table: Path,
    site: tuple[Site, WebServer],
    wanted: tuple[dict[str, bytes], dict[str, bytes]],
    ray_address: str,
    tmp_path: Path,
) -> None:
    behaviour, server = site
    out = tmp_path / "out"
    there = (*ON_RAY, "--ray-address", ray_address)
    pack_in_two_attempts(table, out, server, *there)
    assert tree(out) == wanted[0]
    behaviour.is_mended = True
    pack(table, out, *OPTIONS, *there, "--retry-rejected", workers=2)
    behaviour.is_mended = False
    assert tree(out) == wanted[1]


class Crowd:
    """Answers once `wanted` requests wait at the same time, and then at once."""

    def __init__(self, wanted: int) -> None:
        self._wanted, self._here, self._lock = wanted, 0, threading.Lock()
        self._full = threading.Event()
        self.most = 0

    def __call__(self, connection: Connection, request: Request) -> bool:
        if request.path == "/robots.txt":
            return status(404)(connection, request)
        with self._lock:
            self._here += 1
            self.most = max(self.most, self._here)
            if self._here == self._wanted:
                self._full.set()
        assert self._full.wait(60), f"{self.most} requests at a time, expected {self._wanted}"
        with self._lock:
            self._here -= 1
        return ok(jpeg(0))(connection, request)


def test_each_machine_of_a_cluster_has_its_own_bound_on_requests(
    ray_address: str, tmp_path: Path
) -> None:
    a_machine = 3
    crowd = Crowd(2 * a_machine)
    with WebServer(crowd) as server:
        table = tmp_path / "urls.txt"
        table.write_text("".join(f"{server.url}/{n}.jpg\n" for n in range(60)))
        on = (*ON_RAY, "--ray-address", ray_address, "--per-host", str(a_machine))
        pack(table, tmp_path / "out", *OPTIONS, "--timeout", "60", *on, workers=2)
    assert crowd.most == 2 * a_machine
    assert len(list((tmp_path / "out/receipts").iterdir())) == 4
