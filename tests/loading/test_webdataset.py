"""webdataset's own stages behind our loader: our order, state and sharing out, its decoders."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from torch.utils.data import DataLoader

import wdsprep
from tests.kit.latent_sets import write_latents
from tests.kit.packs import pack, photos

BATCH = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Seven batches of 8 and a rest."""
    return write_latents(str(tmp_path_factory.mktemp("latents")), (20, 20, 18))


@pytest.fixture(scope="module")
def order(data: str) -> list[str]:
    return [key for batch in wdsprep.load(data, global_batch=BATCH) for key in batch["key"]]


def raw(data: Any, **options: Any) -> Any:
    return wdsprep.load(data, **{"global_batch": BATCH, "raw": True, **options})


def behind(loader: Any) -> Any:
    return wds.FluidWrapper(loader).decode().to_tuple("__key__", "latent.npy")


def keys(batches: Any) -> list[str]:
    return [key for batch_keys, _latents in batches for key in batch_keys]


def test_stages_of_a_pipeline_follow_our_order(data: str, order: list[str]) -> None:
    stages = wds.decode(), wds.to_tuple("__key__", "latent.npy"), wds.batched(BATCH)
    batches = list(wds.DataPipeline(raw(data), *stages))
    assert keys(batches) == order
    stored = {key: a for part in wdsprep.load(data, global_batch=1) for key, a in pairs(part)}
    for batch_keys, latents in batches:
        for key, latent in zip(batch_keys, latents, strict=True):
            assert (latent == stored[key].numpy()).all()


def pairs(batch: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(zip(batch["key"], batch["latent"], strict=True))


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_a_state_between_batches_goes_on_with_the_next(
    data: str, order: list[str], stop: int
) -> None:
    loader = raw(data)
    batches = iter(DataLoader(behind(loader), batch_size=BATCH))
    assert keys(itertools.islice(batches, stop)) == order[: stop * BATCH]
    state = json.loads(json.dumps(loader.state_dict()))
    assert "row" not in state  # between steps, so any number of ranks may go on
    again = raw(data)
    again.load_state_dict(state)
    assert keys(DataLoader(behind(again), batch_size=BATCH)) == order[stop * BATCH :]


def test_a_filter_loses_nothing_over_a_resume(data: str, order: list[str]) -> None:
    def even(loader: Any) -> Any:
        chosen = wds.FluidWrapper(loader).select(lambda sample: int(sample["__key__"]) % 2 == 0)
        return DataLoader(chosen.decode().to_tuple("__key__", "latent.npy"), batch_size=5)

    loader, again = raw(data), raw(data)
    before = keys(itertools.islice(even(loader), 3))
    again.load_state_dict(loader.state_dict())
    assert before + keys(even(again)) == [key for key in order if int(key) % 2 == 0]


def test_batched_has_read_one_sample_more(data: str) -> None:
    """As the page warns; once it has not, that sentence can go."""
    loader = raw(data)
    next(iter(behind(loader).batched(BATCH)))
    assert loader.state_dict()["row"] == [1, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_keep_the_order_and_steps_can_be_counted(
    data: str, order: list[str], workers: int
) -> None:
    def batches(**options: Any) -> Any:
        samples = behind(raw(data, **options))
        return wds.WebLoader(samples, batch_size=None, num_workers=workers).batched(BATCH)

    assert keys(batches()) == order
    assert keys(batches(step=3)) == order[3 * BATCH :]


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
