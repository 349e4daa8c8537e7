"""A batch that would hold a sample twice is refused, unless the user asks for repeats."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.kit.latent_sets import write_latents
from wdsprep import Stream
from wdsprep.errors import UsageError
from wdsprep.loading.loader import Loader
from wdsprep.loading.loader import load as load_any


def load(url: Any, global_batch: int, **options: Any) -> Loader:
    return load_any(url, global_batch=global_batch, **({"rank": 0, "world_size": 1} | options))


@pytest.fixture
def small(tmp_path: Path) -> str:
    return write_latents(str(tmp_path / "small"), (20, 19))


@pytest.mark.parametrize(("batch", "world", "fits"), [(50, 1, 39), (200, 1, 39), (48, 4, 36)])
def test_a_batch_of_more_than_all_samples_is_refused_with_one_that_fits(
    small: str, batch: int, world: int, fits: int
) -> None:
    with pytest.raises(UsageError, match=f"39 samples to serve.*give global_batch={fits} or less"):
        load(small, batch, world_size=world)
    assert load(small, fits, world_size=world).steps_per_epoch == 1


@pytest.mark.parametrize("said", [{"repeat": 2}, {"weight": 1}, {"count": 20}])
def test_repeats_that_a_stream_asks_for_are_served(small: str, said: dict[str, Any]) -> None:
    assert len(next(iter(load(Stream(small, **said), 50)))["key"]) == 50


def test_repeats_that_the_steps_of_an_epoch_ask_for_are_served(small: str) -> None:
    loader = load(small, 50, epoch_steps=1)
    assert len(next(iter(loader))["key"]) == 50
    loader.load_state_dict(loader.state_dict())


def test_of_a_mixture_all_samples_count_together(small: str, tmp_path: Path) -> None:
    other = write_latents(str(tmp_path / "other"), (15,), base=1000)
    both = [small, other]
    assert load(both, 50).steps_per_epoch == 1
    with pytest.raises(UsageError, match=r"54 samples to serve.*global_batch=54 or less"):
        load(both, 55)
    with pytest.raises(UsageError, match=r"49 samples to serve"):
        load([Stream(small), Stream(other, count=10)], 50)
    with pytest.raises(UsageError, match="the largest stream has 39 samples"):
        load(both, 40, homogeneous=True)


def test_a_stream_that_cannot_fill_its_own_batches_is_named_in_a_line(
    small: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = write_latents(str(tmp_path / "other"), (15,), base=1000)
    with caplog.at_level(logging.WARNING, "wdsprep"):
        load([small, other], 20, homogeneous=True)
        load([small, Stream(other, repeat=1)], 20, homogeneous=True)
        load([small, other], 20)
    assert caplog.text.count("1 of 2 streams (15 samples in all) have fewer samples than") == 1
