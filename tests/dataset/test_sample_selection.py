"""Some samples of some shards: each operation gives what sets of numbers give."""

import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest

import wdsprep.dataset.sample_selection
from wdsprep.dataset.kept_file import open_or_make
from wdsprep.dataset.sample_selection import (
    SampleSelection,
    ShardSamples,
    digest_of_selected,
    digest_of_shape,
    digest_of_shards,
    keep_selection,
)

SIZES = np.array([5, 0, 9, 1, 30])
GOLDEN = {  # as they stand in states
    "shards": [
        "51e018b9d5064e9a0e6b1df7a14ffcf20e0cdfad0fab8f9c3b82d48df72b551d",
        "98b579d66483e62e330272eda84868565954739200a510914f7f8081e7851e9a",
    ],
    "shape": [
        "b3123f1800982fa5a0805f2284c0256af456660acadbf13505c586087dc8035d",
        "488272fb7aa7573112dfd4adfc651b712666b08a0dd7953fadc28894843b3f07",
    ],
    "selected": "39ffb6b0037a4ba9076c50f3ec3a3b5120575f2a49643d3621b167a5f0f9e483",
}


@pytest.fixture(autouse=True, params=[1 << 20, 4], ids=["at once", "in blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wdsprep.dataset.sample_selection, "SAMPLES_AT_ONCE", request.param)


def numbers_of(rate: float, seed: int) -> list[np.ndarray]:
    chance = np.random.default_rng(seed)
    return [np.flatnonzero(chance.random(size) < rate) for size in SIZES]


def some_of(rate: float, seed: int) -> SampleSelection:
    return SampleSelection.from_numbers(numbers_of(rate, seed))


def pairs(selection: SampleSelection) -> list[tuple[int, int]]:
    return [(shard, n) for shard, own in selection.per_shard() for n in own.tolist()]


def in_file(selection: SampleSelection, folder: Path) -> SampleSelection:
    each = [ShardSamples(*samples) for samples in selection.per_shard()]
    halves = [ShardSamples(n, part) for n, own in each for part in np.array_split(own, 2)]
    found = open_or_make(folder, ["test"], lambda w, _path: keep_selection(w, len(SIZES), halves))
    return SampleSelection.from_file(found)


def test_what_is_selected_is_located_in_its_shards() -> None:
    for selection in (SampleSelection.all_of(SIZES), some_of(0.5, 1)):
        found: list[tuple[int, int]] = []
        for run, count in enumerate(selection.counts.tolist()):
            shards, numbers = selection.locate(np.full(count, run), np.arange(count))
            found += zip(shards.tolist(), numbers.tolist(), strict=True)
        assert found == pairs(selection)
        assert len(found) == selection.samples


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_an_intersection_has_what_both_have(rate: float, tmp_path: Path) -> None:
    other = in_file(some_of(rate, 2), tmp_path)
    assert pairs(other) == pairs(some_of(rate, 2))
    counts = np.array([[2, 3], [0, 0], [9, 0], [0, 1], [10, 15]], np.int32)
    for own in (SampleSelection.all_of(SIZES), some_of(0.6, 1), *some_of(1, 0).split(counts)):
        both = own.intersect(other)
        assert pairs(both) == sorted({*pairs(own)} & {*pairs(other)})
        assert (both.counts > 0).all()
        assert pairs(both.intersect(some_of(0.5, 3))) == sorted(
            {*pairs(both)} & {*pairs(some_of(0.5, 3))}
        )


def test_numbers_that_are_mapped_are_mapped_again_by_another_process(tmp_path: Path) -> None:
    selection = in_file(some_of(0.5, 1), tmp_path).pick(np.array([0, 2, 4]))
    mapped = bytes(ForkingPickler.dumps(selection))
    assert b"arrays" in mapped
    for data in (mapped, pickle.dumps(selection)):
        assert pairs(pickle.loads(data)) == pairs(selection)
    assert pickle.loads(mapped).holds.path == selection.holds.path  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [1, 2])
def test_digests_of_states_stay(count: int) -> None:
    """Never change what is compared here: saved states would not fit any more."""
    lines = [("256/000000.tar", 5, "a" * 64), ("256/000001.tar", 9, "b" * 64)][:count]
    assert digest_of_shards(lines) == GOLDEN["shards"][count - 1]
    shape = digest_of_shape("d", "64x32", np.array([5, 0, 2][:count], np.int32))
    assert shape == GOLDEN["shape"][count - 1]


def test_the_digest_of_samples_says_which_not_where() -> None:
    every, some = SampleSelection.all_of(SIZES), some_of(0.5, 1)
    of_all = digest_of_selected("d", every, every.intersect(some), len(SIZES))
    assert of_all == GOLDEN["selected"]
    behind = SampleSelection.from_numbers(numbers + 7 for numbers in numbers_of(1, 0))
    moved = SampleSelection.from_numbers(numbers + 7 for numbers in numbers_of(0.5, 1))
    both = behind.pick(behind.counts > 0)
    assert digest_of_selected("d", both, both.intersect(moved), len(SIZES)) == of_all
    assert digest_of_selected("d", every, every.intersect(some_of(0.5, 2)), 5) != of_all
