"""What the driver takes where the cluster is large, and how local workers scale.

Nobody works: workers say at once that their shard is done, or sleep over it. The rest is the real
thing: the schedule, the run with its receipts and its manifest, the store, the client of S3.
"""

import itertools
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tests.kit.pretend import PretendRunner, PretendS3, Shelf, manifest_of, units
from tests.kit.runner_work import Calls, Number
from tools.benches import Group, Rival, Role, call, took
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.dataset.stored_dataset import read_manifest
from wdsprep.dataset.unit_locks import Edition
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.encoding.run_plan import largest_first, pack_shards, pending_shards
from wdsprep.runners.base import Finished, RunnerSettings
from wdsprep.runners.make_runner import make_runner
from wdsprep.runners.run import Run, do_runs, open_dataset_to_write
from wdsprep.store import open_store

SHARDS, OPENED = 1_000_000, 200_000
ASLEEP, ASLEEP_S = 96, 0.5
PAGE_S = 0.1  # what S3 takes over a thousand names
S3 = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def groups(home: Path, scale: float) -> Iterator[Group]:
    count = max(1_000, int(SHARDS * scale))
    for size in (count // 10, count):
        yield Group(
            name=f"driver-{size}",
            title=f"scheduling {size:,} shards",
            unit="shards",
            count=size,
            rivals=[
                Rival(
                    name=f"{workers:,} workers",
                    command=call(schedule, str(size), str(workers)),
                    role=Role.OURS if workers == 10_000 else Role.LIMIT,
                )
                for workers in (10_000, 1_000)
            ],
        )
    yield _opening(home, max(1_000, int(OPENED * scale)))
    yield _resuming(home, count)
    yield from _scaling()


def _opening(home: Path, count: int) -> Group:
    (home / MANIFEST).write_bytes(manifest_of(count).to_bytes())
    return Group(
        name="driver-open",
        title=f"opening a manifest of {count:,} shards",
        rivals=[Rival(name="wdsprep", command=call(open_manifest, home), role=Role.OURS)],
    )


def _resuming(home: Path, count: int) -> Group:
    """All receipts are in the manifest, and in the listing of another process."""
    manifest = home / "resume.json"
    with manifest.open("wb") as sink:
        sink.writelines(manifest_of(count).pieces())
    return Group(
        name="driver-resume",
        title=f"resuming over {count:,} receipts on S3",
        unit="receipts",
        count=count,
        rivals=[
            Rival(
                name=f"{pause_s * 1e3:.0f} ms a page",
                command=call(resume, manifest, str(count), str(pause_s)),
                role=Role.LIMIT if pause_s else Role.OURS,
            )
            for pause_s in (0.0, PAGE_S)
        ],
    )


def _scaling() -> Iterator[Group]:
    for kind in ("local", "ray"):
        yield Group(
            name=f"driver-{kind}",
            title=f"{kind} workers that sleep over each unit for {ASLEEP_S} s",
            unit="units",
            count=ASLEEP,
            rivals=[
                Rival(
                    name=f"{workers} workers",
                    command=call(sleep, kind, str(workers)),
                    role=Role.OURS if workers == 16 else Role.LIMIT,
                )
                for workers in (16, 2, 1)
            ],
            targets={"1 workers": 15.0, "2 workers": 15.0 / 1.9},
        )


def schedule(count: str, workers: str) -> None:
    """A whole run of `encode`, but for the workers and the store."""
    pending, store = largest_first(units(int(count))), Shelf()
    manifest = replace(manifest_of(1), receipts=())
    run = Run(Edition(store=store), manifest, count=len(pending))
    store.count = len(pending)
    started = time.perf_counter()
    shards = map(ImageShard.from_bytes, pack_shards(pending))
    do_runs([run], PretendRunner(int(workers)), None, shards)
    took(time.perf_counter() - started)


def open_manifest(home: str) -> None:
    started = time.perf_counter()
    manifest = read_manifest(open_store(home))
    assert manifest is not None
    assert len(manifest.shards) == len(manifest.receipts)
    took(time.perf_counter() - started)


def resume(manifest: str, count: str, pause_s: str) -> None:
    server = subprocess.Popen(
        call(serve, manifest, count, pause_s),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    known = units(int(count))
    os.environ.update(S3 | {"AWS_ENDPOINT_URL": url})
    try:
        settings = manifest_of(1).settings
        started = time.perf_counter()
        edition, found = open_dataset_to_write(
            "s3://bucket/latents", "latents", settings, overwrite=False
        )
        left = pending_shards(edition.store, found, known, known)
        took(time.perf_counter() - started)
        assert not left.shards
    finally:
        server.terminate()
        server.wait()


def serve(manifest: str, count: str, pause_s: str) -> None:
    """A store of that many receipts, until it is ended."""
    with PretendS3(int(count), Path(manifest).read_bytes(), float(pause_s)).server as server:
        print(server.url, flush=True)
        threading.Event().wait()


def sleep(kind: str, workers: str) -> None:
    """So many units of a crew that is complete: each of it has finished one."""
    size, ready = int(workers), set()
    runner = make_runner(kind, RunnerSettings(workers=size, cpus_per_worker=1, address="local"))
    with closing(runner.run(Calls(unit_s=ASLEEP_S).open, map(Number, itertools.count()))) as events:
        done = (event.result for event in events if isinstance(event, Finished))
        while len(ready) < size:
            ready.add(next(done))
        started = time.perf_counter()
        for _ in range(ASLEEP):
            next(done)
        took(time.perf_counter() - started)
