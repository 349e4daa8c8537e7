"""The loader under kills, in ranks, in workers of other loaders and behind webdataset."""

import itertools
import json
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import wdsprep
from tests.kit.cache_processes import forked
from tests.kit.latent_sets import keys, write_latents
from tests.kit.packs import pack, photos
from tests.kit.paths import ROOT
from wdsprep.errors import UsageError

WORK = (sys.executable, "-m", "tests.kit.trainers")
BATCH = 32
KILLS = 100


def load(url: Any, **options: Any) -> Any:
    return wdsprep.load(url, **({"global_batch": BATCH, "rank": 0, "world_size": 1} | options))


def work(*arguments: object) -> None:
    subprocess.run([*WORK, *map(str, arguments)], cwd=ROOT, check=True, timeout=300)


@pytest.mark.system
def test_a_hundred_killed_processes_lose_and_repeat_nothing(data: str, tmp_path: Path) -> None:
    """Each resumes from the last written state, with another world size and other threads. The
    state is written after the batch is used, so at most its last batch comes again."""
    work("kills", data, tmp_path, KILLS)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    served: dict[int, list[str]] = {}
    for step, found in lines:
        assert served.setdefault(step, found) == found
    assert sorted(served) == list(range(1, len(served) + 1))
    assert len(served) >= KILLS
    assert len(lines) - len(served) <= KILLS
    whole = keys(load(data, epochs=None), len(served))
    assert [served[step] for step in sorted(served)] == whole


@pytest.mark.system
def test_torch_distributed_ranks_end_together(data: str, tmp_path: Path) -> None:
    work("ranks", data, tmp_path, 1, 2, 4)
    whole = keys(load(data, epochs=2))
    for world in (1, 2, 4):
        found = [json.loads((tmp_path / f"{world}-{r}.json").read_text()) for r in range(world)]
        together = [[k for share in shares for k in share] for shares in zip(*found, strict=True)]
        assert together == whole


@pytest.mark.system
def test_persistent_workers_go_on_with_the_next_epoch(data: str) -> None:
    loader = DataLoader(load(data), batch_size=None, num_workers=2, persistent_workers=True)
    found = keys(loader) + keys(loader) + keys(loader)
    assert found == keys(load(data, epochs=3))


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("stateful", [False, True])
def test_workers_that_outlive_a_broken_iteration_do_not_guess(data: str, stateful: bool) -> None:
    """They have read ahead, and only the trainer knows how far it came."""
    kind = StatefulDataLoader if stateful else DataLoader
    loader = kind(load(data), batch_size=None, num_workers=2, persistent_workers=True)
    for _ in itertools.islice(loader, 3):
        pass
    with pytest.raises(UsageError, match="was stopped early"):
        keys(loader)


def whole_of(url: str, epochs: int) -> dict[str, torch.Tensor]:
    return {
        key: emb
        for batch in load(url, epochs=epochs)
        for key, emb in zip(batch["key"], batch["emb"], strict=True)
    }


def right(batch: dict[str, Any], wanted: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(emb, wanted[key]) for key, emb in zip(batch["key"], batch["emb"], strict=True)
    )


class Halves(IterableDataset[dict[str, Any]]):
    """A user's own dataset around a loader, which sends parts of its batches."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in load(self.url, epochs=8, threads=1):
            for half in (slice(0, BATCH // 2), slice(BATCH // 2, None)):
                yield {name: batch[name][half] for name in ("key", "emb")}


class Echoes(IterableDataset[dict[str, Any]]):
    """One that sends each batch again, four later: its worker keeps what the trainer may not."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __iter__(self) -> Iterator[dict[str, Any]]:
        kept: deque[dict[str, Any]] = deque()
        for batch in load(self.url, epochs=8, threads=1):
            yield batch
            kept.append(batch)
            if len(kept) > 4:
                yield kept.popleft()


@pytest.mark.system
def test_what_workers_send_stays_as_long_as_it_is_kept(data: str) -> None:
    """Though most memory is used again: of each three batches, one is kept."""
    wanted, kept = whole_of(data, 2), []
    loader = DataLoader(load(data, epochs=20, threads=1), batch_size=None, num_workers=2)
    for number, batch in enumerate(loader):
        assert type(batch) is dict
        assert right(batch, wanted)
        if number % 3 == 0:
            kept.append({"key": batch["key"], "emb": batch["emb"][::2]})
            kept[-1]["key"] = batch["key"][::2]
    assert len(kept) == 60
    assert all(right(batch, wanted) for batch in kept)
    parts = list(DataLoader(Halves(data), batch_size=None, num_workers=1))
    assert len(parts) == 2 * 8 * 9
    assert all(right(part, wanted) for part in parts)
    echoed = DataLoader(Echoes(data), batch_size=None, num_workers=1)
    assert [right(batch, wanted) for batch in echoed] == [True] * (2 * 8 * 9 - 4)


def mapping_of(tensor: torch.Tensor) -> str:
    """The memory that a tensor is in, as the kernel lists it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.partition(" ")[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line
    raise AssertionError


def test_the_tensors_of_a_batch_come_from_a_worker_in_one_block(data: str) -> None:
    """The descriptor of each block is asked of a thread of a worker that is busy."""
    (batch, *_) = DataLoader(load(data), batch_size=None, num_workers=1)
    assert mapping_of(batch["latent"]) == mapping_of(batch["emb"])
    assert batch["latent"].data_ptr() % 64 == batch["emb"].data_ptr() % 64 == 0


@pytest.mark.system
def test_a_trainer_may_keep_more_batches_than_a_worker_has_blocks(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.loading.batch_memory.MOST", 3)
    wanted = whole_of(data, 2)
    kept = list(DataLoader(load(data, epochs=2, threads=1), batch_size=None, num_workers=1))
    assert len(kept) == 18
    assert all(right(batch, wanted) for batch in kept)


@pytest.mark.system
def test_a_fork_of_the_trainer_takes_nothing_from_it(data: str) -> None:
    wanted = whole_of(data, 2)
    loader = iter(DataLoader(load(data, epochs=20, threads=1), batch_size=None, num_workers=1))
    kept = [next(loader) for _ in range(3)]
    child = forked(kept.clear)
    assert os.waitpid(child, 0)[1] == 0
    assert all(right(batch, wanted) for batch in loader)
    assert all(right(batch, wanted) for batch in kept)


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("workers", "stop"), [(0, 5), (2, 5), (2, 12)])
def test_torchdata_resumes_its_workers_in_the_middle_of_an_epoch(
    data: str, workers: int, stop: int
) -> None:

    def made() -> Any:
        return StatefulDataLoader(load(data, epochs=2), batch_size=None, num_workers=workers)

    whole, first = keys(load(data, epochs=2)), made()
    assert keys(first, stop) == whole[:stop]
    resumed = made()
    resumed.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert keys(resumed) == whole[stop:]


SMALL_BATCH = 8


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Seven batches of 8 and a rest."""
    return write_latents(str(tmp_path_factory.mktemp("latents")), (20, 20, 18))


@pytest.fixture(scope="module")
def order(small_data: str) -> list[str]:
    return [
        key for batch in wdsprep.load(small_data, global_batch=SMALL_BATCH) for key in batch["key"]
    ]


def raw(small_data: Any, **options: Any) -> Any:
    return wdsprep.load(small_data, **{"global_batch": SMALL_BATCH, "raw": True, **options})


def behind(loader: Any) -> Any:
    return wds.FluidWrapper(loader).decode().to_tuple("__key__", "latent.npy")


def keys_of(batches: Any) -> list[str]:
    return [key for batch_keys, _latents in batches for key in batch_keys]


def test_stages_of_a_pipeline_follow_our_order(small_data: str, order: list[str]) -> None:
    stages = wds.decode(), wds.to_tuple("__key__", "latent.npy"), wds.batched(SMALL_BATCH)
    batches = list(wds.DataPipeline(raw(small_data), *stages))
    assert keys_of(batches) == order
    stored = {key: a for part in wdsprep.load(small_data, global_batch=1) for key, a in pairs(part)}
    for batch_keys, latents in batches:
        for key, latent in zip(batch_keys, latents, strict=True):
            assert (latent == stored[key].numpy()).all()


def pairs(batch: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(zip(batch["key"], batch["latent"], strict=True))


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_a_state_between_batches_goes_on_with_the_next(
    small_data: str, order: list[str], stop: int
) -> None:
    loader = raw(small_data)
    batches = iter(DataLoader(behind(loader), batch_size=SMALL_BATCH))
    assert keys_of(itertools.islice(batches, stop)) == order[: stop * SMALL_BATCH]
    state = json.loads(json.dumps(loader.state_dict()))
    assert "row" not in state  # between steps, so any number of ranks may go on
    again = raw(small_data)
    again.load_state_dict(state)
    assert keys_of(DataLoader(behind(again), batch_size=SMALL_BATCH)) == order[stop * SMALL_BATCH :]


def test_a_filter_loses_nothing_over_a_resume(small_data: str, order: list[str]) -> None:
    def even(loader: Any) -> Any:
        chosen = wds.FluidWrapper(loader).select(lambda sample: int(sample["__key__"]) % 2 == 0)
        return DataLoader(chosen.decode().to_tuple("__key__", "latent.npy"), batch_size=5)

    loader, again = raw(small_data), raw(small_data)
    before = keys_of(itertools.islice(even(loader), 3))
    again.load_state_dict(loader.state_dict())
    assert before + keys_of(even(again)) == [key for key in order if int(key) % 2 == 0]


def test_batched_has_read_one_sample_more(small_data: str) -> None:
    """As the page warns; once it has not, that sentence can go."""
    loader = raw(small_data)
    next(iter(behind(loader).batched(SMALL_BATCH)))
    assert loader.state_dict()["row"] == [1, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_keep_the_order_and_steps_can_be_counted(
    small_data: str, order: list[str], workers: int
) -> None:
    def batches(**options: Any) -> Any:
        samples = behind(raw(small_data, **options))
        return wds.WebLoader(samples, batch_size=None, num_workers=workers).batched(SMALL_BATCH)

    assert keys_of(batches()) == order
    assert keys_of(batches(step=3)) == order[3 * SMALL_BATCH :]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its open files
def test_plain_webdataset_reads_every_shard_that_inspect_names(tmp_path: Path) -> None:
    images = pack(photos(tmp_path / "photos", 24), tmp_path / "images", "--samples-per-shard", "5")
    found = wdsprep.inspect(str(images))
    assert len(found.facts["buckets"]) == 2
    for given in (found.urls, "::".join(found.patterns)):
        dataset = wds.WebDataset(given, shardshuffle=False).decode("torchrgb8")
        shapes = [tuple(image.shape) for (image,) in dataset.to_tuple("jpg")]
        assert len(shapes) == 24
        assert set(shapes) == {(3, 48, 40), (3, 72, 96), (3, 100, 36), (3, 64, 70)}


def test_webdataset_opens_no_s3() -> None:
    """As the page says, with two ways round it."""
    with pytest.raises(ValueError, match="no gopen handler"):
        wds.gopen("s3://bucket/latents-256/256/000000.tar")
