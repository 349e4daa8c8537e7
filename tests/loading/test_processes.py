"""The loader under kills, in ranks and in the workers of other loaders: one sequence throughout."""

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
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import wdsprep
from tests.kit.cache_processes import forked
from tests.kit.latent_sets import keys, write_latents
from tests.kit.paths import ROOT
from wdsprep.errors import UsageError

pytestmark = pytest.mark.system

WORK = (sys.executable, "-m", "tests.kit.trainers")
BATCH = 32
KILLS = 100


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """300 samples: 9 steps of 32 and a rest."""
    return write_latents(str(tmp_path_factory.mktemp("latents")))


def load(url: Any, **options: Any) -> Any:
    return wdsprep.load(url, **({"global_batch": BATCH, "rank": 0, "world_size": 1} | options))


def work(*arguments: object) -> None:
    subprocess.run([*WORK, *map(str, arguments)], cwd=ROOT, check=True, timeout=300)


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


def test_torch_distributed_ranks_end_together(data: str, tmp_path: Path) -> None:
    work("ranks", data, tmp_path, 1, 2, 4)
    whole = keys(load(data, epochs=2))
    for world in (1, 2, 4):
        found = [json.loads((tmp_path / f"{world}-{r}.json").read_text()) for r in range(world)]
        together = [[k for share in shares for k in share] for shares in zip(*found, strict=True)]
        assert together == whole


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_dataloader_workers_keep_the_order(data: str, workers: int) -> None:
    whole = keys(load(data, epochs=2))
    found = DataLoader(load(data, epochs=2), batch_size=None, num_workers=workers)
    assert keys(found) == whole
    resumed = DataLoader(load(data, epochs=2, step=7), batch_size=None, num_workers=workers)
    assert keys(resumed) == whole[7:]


def test_persistent_workers_go_on_with_the_next_epoch(data: str) -> None:
    loader = DataLoader(load(data), batch_size=None, num_workers=2, persistent_workers=True)
    found = keys(loader) + keys(loader) + keys(loader)
    assert found == keys(load(data, epochs=3))


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


def test_a_fork_of_the_trainer_takes_nothing_from_it(data: str) -> None:
    wanted = whole_of(data, 2)
    loader = iter(DataLoader(load(data, epochs=20, threads=1), batch_size=None, num_workers=1))
    kept = [next(loader) for _ in range(3)]
    child = forked(kept.clear)
    assert os.waitpid(child, 0)[1] == 0
    assert all(right(batch, wanted) for batch in loader)
    assert all(right(batch, wanted) for batch in kept)


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
