"""Datasets of some samples of others: any samples of each shard, as a dataset of their own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdsprep
from tests.kit.latent_sets import flat, keys, write_latents
from tests.kit.shape_sets import write_shapes
from wdsprep.dataset.sample_selection import SampleSelection
from wdsprep.dataset.tar.read import file_tape, read_samples
from wdsprep.errors import FingerprintError
from wdsprep.loading.open_datasets import open_datasets, select
from wdsprep.loading.served_datasets import Dataset

BATCH = 8


def keeping(dataset: Dataset, rate: float, seed: int = 0) -> SampleSelection:
    """Some samples of each shard by chance, none of the second."""
    chance = np.random.default_rng(seed)
    each = [np.flatnonzero(chance.random(size) < rate) for size in dataset.whole.sizes]
    each[1] = each[1][:0]
    return SampleSelection.from_numbers(each)


def load_selected(
    monkeypatch: pytest.MonkeyPatch, url: str, *keeps: SampleSelection, **options: Any
) -> Any:
    """A loader of what is selected of a dataset."""

    def opened(streams: Any, _join: Any) -> tuple[Dataset, ...]:
        found = open_datasets(streams)
        for keep in keeps:
            found = tuple(left for each in found if (left := select(each, keep)) is not None)
        return found

    monkeypatch.setattr("wdsprep.loading.loader.open_datasets", opened)
    return wdsprep.load(url, **({"global_batch": BATCH, "rank": 0, "world_size": 1} | options))


def stored_keys(url: str, keep: SampleSelection | None = None) -> list[str]:
    """The keys of a dataset, or of what is kept, in the order of its tars."""
    (whole,) = {each.whole for each in open_datasets(url)}
    found = []
    kept = list(keep.per_shard()) if keep is not None else []
    for number, name in enumerate(whole.names):
        with file_tape(Path(url, name)) as tape:
            own = [sample.key for sample in read_samples(tape, name)]
        some = range(len(own))
        if keep is not None:
            some = kept[number].numbers.tolist()
        found += [own[place] for place in some]
    return found


@pytest.mark.parametrize("kind", ["squares", "shapes"])
def test_a_part_serves_each_of_its_samples_once_a_pass_and_no_other(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rows hold is what the whole dataset holds under the same keys."""
    url = write_latents(str(tmp_path)) if kind == "squares" else write_shapes(str(tmp_path)).url
    by_key = {
        key: (batch["latent"][row], batch["emb"][row])
        for batch in wdsprep.load(url, global_batch=1, epochs=9)
        for row, key in enumerate(batch["key"])
    }
    (whole,) = {each.whole for each in open_datasets(url)}
    keep = keeping(whole, 0.4)
    wanted = stored_keys(url, keep)
    assert 40 < len(wanted) < whole.samples // 2
    served = []
    for batch in load_selected(monkeypatch, url, keep, global_batch=1, threads=1):
        served += batch["key"]
        for key, latent, emb in zip(batch["key"], batch["latent"], batch["emb"], strict=True):
            assert torch.equal(latent, by_key[key][0])
            assert torch.equal(emb, by_key[key][1])
    if kind == "squares":
        assert sorted(served) == sorted(wanted)
    assert set(served) <= set(wanted)
    raw = [s["__key__"] for s in load_selected(monkeypatch, url, keep, global_batch=1, raw=True)]
    assert raw == served


def test_what_is_selected_of_a_part_is_what_both_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write_shapes(str(tmp_path)).url
    (whole,) = {each.whole for each in open_datasets(url)}
    one, other = keeping(whole, 0.7, 1), keeping(whole, 0.7, 2)
    loader = load_selected(monkeypatch, url, one, other)
    common = set(stored_keys(url, one)) & set(stored_keys(url, other))
    assert sum(stream.samples for stream in loader.plan.order.streams) == len(common)
    assert set(flat(keys(loader, 200))) <= common
    none = SampleSelection.from_numbers([np.empty(0)] * len(whole.sizes))
    assert select(open_datasets(url)[0], none) is None


def test_the_order_of_a_part_is_no_other_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write_latents(str(tmp_path))
    (whole,) = open_datasets(url)
    keep = keeping(whole, 0.5)
    steps = keys(load_selected(monkeypatch, url, keep, epochs=2))
    state = load_selected(monkeypatch, url, keep, epochs=2, step=5).state_dict()
    assert len(json.dumps(state)) < 1024
    resumed = load_selected(monkeypatch, url, keep, epochs=2)
    resumed.load_state_dict(state)
    assert keys(resumed) == steps[5:]
    for other in ([], [keeping(whole, 0.5, 3)]):
        with pytest.raises(FingerprintError, match="stream 0"):
            load_selected(monkeypatch, url, *other).load_state_dict(state)
