"""What a driver does for a unit does not grow with their number, nor with that of the workers."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.kit.pretend import (
    PAGE,
    SETTINGS,
    Pretenders,
    PretendRunner,
    PretendS3,
    Shelf,
    manifest_of,
    units,
)
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.dataset.unit_locks import Edition
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.encoding.run_plan import largest_first, pending_shards
from wdsprep.runners.base import Finished, RunnerSettings
from wdsprep.runners.run import Outcome, Run, do_runs, open_dataset_to_write
from wdsprep.runners.schedule import drive


def whole_run(count: int, workers: int) -> tuple[Outcome, Shelf]:
    """`encode` with nobody at work."""
    store = Shelf(count)
    manifest = replace(manifest_of(1), receipts=())
    run = Run(Edition(store=store), manifest, count=count)
    (outcome,) = do_runs([run], PretendRunner(workers), None, largest_first(units(count)))
    return outcome, store


def test_a_run_of_many_shards_publishes_all_of_them() -> None:
    outcome, store = whole_run(1_000, 300)
    assert outcome.manifest.complete
    assert outcome.manifest.receipts == replace(manifest_of(1_000), complete=True).receipts
    assert store.written == {MANIFEST: len(outcome.manifest.to_bytes())}
    assert store.listed == 1_000  # once


def test_a_driver_that_is_killed_leaves_few_receipts_that_its_manifest_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wdsprep.runners.run.CHECKPOINT", 100)
    outcome, store = whole_run(2_000, 10)
    written = store.units_written
    assert written[-1] == len(outcome.manifest.receipts) == 2_000
    assert all(later - sooner <= max(100, sooner // 4) for sooner, later in pairwise(written))
    assert sum(written) < 6 * 2_000


@pytest.mark.parametrize("workers", [10, 1_000])
def test_the_driver_takes_as_many_steps_for_each_unit_however_many_there_are(workers: int) -> None:
    def steps(count: int) -> int:
        crew = Pretenders()
        events = drive(crew, units(count), RunnerSettings(units_per_worker=3), workers=workers)
        assert sum(isinstance(event, Finished) for event in events) == count
        return crew.calls

    few, many = steps(2_000), steps(8_000)
    assert many - few <= 6_000 * 1.05  # giving each, and hearing of some at a time


def test_memory_grows_by_less_than_a_kilobyte_a_shard() -> None:
    def peak(count: int) -> int:
        pending = [unit.to_bytes() for unit in units(count)]
        tracemalloc.start()
        bare = replace(manifest_of(1), receipts=())
        run = Run(Edition(store=Shelf(count)), bare, count=count)
        do_runs([run], PretendRunner(100), None, map(ImageShard.from_bytes, pending))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most + sum(map(len, pending))

    assert (peak(1_200) - peak(400)) / 800 < 1_000


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendS3]:
    count = 3 * PAGE + 500
    pretended = PretendS3(count, manifest_of(count).to_bytes())
    with pretended.server as server:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        settings = {"ENDPOINT_URL": server.url, "DEFAULT_REGION": "us-east-1"}
        settings |= dict.fromkeys(("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"), "pretend")
        for name, value in settings.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield pretended


def test_a_resume_reads_a_page_of_receipts_at_a_time_and_none_that_the_manifest_has(
    s3: PretendS3,
) -> None:
    known = units(s3.count)
    edition, manifest = open_dataset_to_write(
        "s3://bucket/latents", "latents", SETTINGS, overwrite=False
    )
    left = pending_shards(edition.store, manifest, known, known)
    assert left.shards == []
    assert (s3.pages, s3.reads) == (4, 0)
