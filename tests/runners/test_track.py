"""What a run tells trackers and Prometheus; what goes wrong there stops no run."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import wdsprep
from tests.kit.command_lines import python
from tests.kit.packs import jpeg, manifest_of, write_files
from tests.kit.runner_work import Number
from tests.kit.runs import wait_until
from tests.kit.trackers import curves_of, runs_in
from wdsprep.encoding.progress import EncodeProgress, Stats
from wdsprep.errors import UsageError
from wdsprep.runners import track
from wdsprep.runners.base import Finished, RunnerSettings
from wdsprep.runners.job import JobListener, JobStatus
from wdsprep.runners.make_runner import make_runner
from wdsprep.runners.track import Tracker, track_run


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten to pack, and one that cannot be."""
    monkeypatch.setattr(track, "PACE_S", 0.0)
    monkeypatch.chdir(tmp_path)
    files: dict[str, bytes | str] = {f"{n}.jpg": jpeg(n) for n in range(10)}
    return write_files(tmp_path / "photos", files | {"x.jpg": "no image"})


@pytest.mark.system
def test_tensorboard_reads_what_runs_have_told_and_a_resumed_one_goes_on(photos: Path) -> None:
    options: dict[str, Any] = {"buckets": "32", "samples_per_shard": 4, "track": "tensorboard"}
    told: list[str] = []
    wdsprep.pack(photos, "out", limit=4, listener=JobListener(on_message=told.append), **options)
    assert told == ['--track tensorboard: "tensorboard --logdir runs"']
    (first,) = Path("runs/out").iterdir()
    points, settings = curves_of(first)
    assert points["units_done"][-1] == (4, 1)
    assert "    samples_per_shard: 4\n" in settings
    first = first.rename("first")
    wdsprep.pack(photos, "out", **options)
    (second,) = Path("runs/out").iterdir()
    points, _ = curves_of(second)
    assert min(step for step, _value in points["done"]) >= 4
    assert points["done"][-1] == (10, 1)
    assert points["rejects/not_an_image"][-1] == (10, 1)
    nbytes = manifest_of(Path("out")).nbytes - curves_of(first)[0]["nbytes"][-1][1]
    assert points["nbytes"][-1] == (10, nbytes)
    assert {"left_s", "samples_per_s"} < points.keys()
    wdsprep.pack(photos, "out", **options)
    assert [*Path("runs/out").iterdir()] == [second], "nothing was left to do, so nothing is told"


@pytest.mark.system
def test_encode_tells_of_its_workers_too(photos: Path) -> None:
    from tests.kit.encodes import in_this_process

    wdsprep.pack(photos, "images", buckets="32", workers=1)
    with in_this_process():
        wdsprep.encode("images", "latents", resolution=32, model="tiny", track="tensorboard")
    (folder,) = Path("runs/latents").iterdir()
    points, settings = curves_of(folder)
    assert points["workers"][-1] == (10, 1)
    assert 0 < points["busy"][-1][1] <= 1
    assert "    resolution: 32\n" in settings


PROGRAM = """
import os, wdsprep
from wdsprep.runners import track
from wdsprep.runners.job import JobListener
track.PACE_S = 0.0
options = {"buckets": "32", "samples_per_shard": 4, "track": "wandb", "workers": 1}
wdsprep.pack("photos", "out", limit=4, listener=JobListener(on_message=print), **options)
del os.environ["WANDB_MODE"]
import wandb
wandb.teardown()
wdsprep.pack("photos", "out", **options)
"""


@pytest.mark.system
def test_wandb_writes_runs_without_a_network_and_fails_without_a_key(photos: Path) -> None:
    """The first is told offline; of the second, online, wandb wants a key."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    own = {"WANDB_MODE": "offline", "HOME": str(photos.parent), "NETRC": "none"}
    done = python(PROGRAM, env=env | own)
    (run,) = runs_in(photos.parent)
    assert (run.project, run.group, run.config["samples_per_shard"]) == ("wdsprep", "out", 4)
    assert run.rows[-1].items() >= {"samples": 4, "done": 1, "units_done": 1}.items()
    assert '"wandb sync wandb/offline-run-' in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("--track wandb failed, and the run goes on without: it has no key")
    assert manifest_of(photos.parent / "out").samples == 10


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A function that has the tracker fail, or hang, at a step: `log`, `hang at log`."""
    over = threading.Event()

    def break_at(at: str) -> None:
        def come_to(what: str) -> None:
            if at == f"hang at {what}":
                over.wait()
            if at == what:
                raise ConnectionError(f"cannot {what}")

        def begin(*_arguments: object) -> Tracker:
            come_to("open")
            return "nowhere", lambda _at, _figures: come_to("log"), lambda: come_to("close")

        monkeypatch.setattr(track, "open_tensorboard", begin)

    monkeypatch.setattr(track, "CLOSING_S", 0.2)
    yield break_at
    over.set()


@pytest.mark.parametrize("at", ["open", "log", "close", "hang at open", "hang at log"])
def test_a_tracker_that_fails_or_hangs_is_told_of_once(
    at: str, broken: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    broken(at)
    told: list[str] = []
    listener = JobListener(on_message=told.append)
    with track_run("tensorboard", ["out"], listener, settings={}, before=0) as heard:
        heard(lambda: JobStatus(samples=3, units=1))
    assert not told or at == "hang at log"
    (record,) = caplog.records
    said = "does not end" if at.startswith("hang") else f"goes on without: cannot {at}"
    assert said in record.getMessage()


def test_figures_are_asked_for_at_a_steady_pace(
    broken: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken("nothing")
    monkeypatch.setattr(track, "PACE_S", 0.5)
    asked: list[float] = []

    def more() -> dict[str, float]:
        asked.append(time.monotonic())
        return {}

    def ask_until(times: int) -> bool:
        on_status(JobStatus)
        return len(asked) == times

    with track_run("tensorboard", ["a"], JobListener(), settings={}, before=0, more=more) as (
        on_status
    ):
        for times in (1, 2, 3):
            wait_until(partial(ask_until, times), within_s=60)
    assert all(later - sooner > 0.4 for sooner, later in pairwise(asked[:3]))
    with track_run("", ["a"], JobListener(), settings={}, before=0, more=more) as on_status:
        on_status(JobStatus)
    assert len(asked) == 4, "the last figures of the first run, and none of the second"


def test_what_is_missing_is_said_before_anything_is_done(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="wandb, tensorboard"):
        wdsprep.pack(photos, "out", track="mlflow")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"pip install '\.\[wandb\]'"):
        wdsprep.encode("nowhere", "out", resolution=32, track="wandb")
    assert not Path("out").exists()


def progress_of(samples: int, nbytes: int, rejects: dict[str, int]) -> EncodeProgress:
    return EncodeProgress(
        samples=samples,
        nbytes=nbytes,
        share=0.0,
        rejects=rejects,
        worker="here",
        device="NVIDIA A10G",
        stats=Stats(busy_s=3.0, wall_s=4.0),
    )


@dataclass(frozen=True)
class Counts:
    """Ten images in two steps and two rejects; unit 1 fails once in each worker."""

    def open(self) -> Any:
        failed = set()

        def call(unit: Number) -> Generator[EncodeProgress, None, int]:
            yield progress_of(4, 400, {})
            if unit.value == 1 and not failed:
                failed.add(unit.value)
                raise ValueError("once")
            yield progress_of(10, 1_000, {"truncated": 2})
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
    events = runner.run(Counts().open, map(Number, range(3)))
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
