"""Streams on Ray: the batches of stored latents, for several trainers, while workers are killed."""

import itertools
import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray
import torch
from encodes import COUNT, encode_here, packed, pictures
from packs import tree
from work_for_encode import Making

import wdsprep
from wdsprep import Encode, errors
from wdsprep.errors import FingerprintError
from wdsprep.streaming.trainer import _reason

# What Ray Data says to itself when it makes its own context, and its threads when they end:
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
BATCH, WORLD, EPOCHS, STOP = 8, 2, 6, 3
NAMES = ("latent", "emb", "key", "txt", "json")
ORDER = {"global_batch": BATCH, "epochs": EPOCHS, "fields": NAMES, "drop_text": 0.2}
HOW = {"resolution": 64, "model": "tiny", "device": "cpu"}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """More cores than there are: here most workers wait."""
    ray.init("local", num_cpus=8, log_to_driver=False, logging_level="ERROR")
    with patch("wdsprep.encoding.make_encoder", Making()):
        yield
    ray.shutdown()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stream")
    packed(pictures(root / "photos"), root / "images")
    encode_here(root / "images", root / "latents")
    return root / "images"


def load(url: Path, **options: Any) -> Any:
    return wdsprep.load(str(url), **(ORDER | {"rank": 0, "world_size": 1} | options))


def stream(images: Path, **options: Any) -> Any:
    pools = {"decoders": (1, 2), "encoders": (1, 2)}
    return wdsprep.stream(str(images), **(HOW | ORDER | pools | options))


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert list(one) == list(other)
        for name, value in other.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, one[name]), name
            else:
                assert value == one[name], name


def test_killed_workers_lose_and_repeat_nothing_and_the_state_goes_on_anywhere(
    images: Path, tmp_path: Path
) -> None:
    """A run begins on stored latents, goes on in a stream for two trainers, of which a decoder and
    an encoder are killed, then on the trainer's own device. The stream keeps what passes."""
    stored, kept = images.parent / "latents", tmp_path / "kept"
    begun = load(stored)
    list(itertools.islice(begun, STOP))
    state = json.loads(json.dumps(begun.state_dict()))
    with stream(images, state=state, trainers=WORLD, tee=str(kept)) as feed:
        with ThreadPoolExecutor(WORLD) as pool:
            ranks = list(pool.map(served, feed.trainers, ("decode", "encode")))
        states = [trainer.state_dict() for trainer in feed.trainers]
        decode, encode = feed.trainers[0].stages()
        assert min(len(decode.workers), len(encode.workers)) >= 2, (
            "one of each was killed, and replaced"
        )
        assert 0 < encode.busy <= 1
    for rank, batches in enumerate(ranks):
        wanted = load(stored, rank=rank, world_size=WORLD, step=STOP)
        assert_same(batches, list(itertools.islice(wanted, len(batches))))
    assert states[0] == states[1]
    own = load(images, encode=Encode(**HOW))
    own.load_state_dict(states[0])
    rest = load(stored, step=states[0]["step"])
    assert_same(list(itertools.islice(own, 2)), list(itertools.islice(rest, 2)))
    there = encode_here(images, kept).units_before
    assert there > 0
    assert tree(kept) == tree(stored)


def served(trainer: Any, victim: str) -> list[Any]:
    """All but two epochs, a worker of a stage being killed at a random moment on the way."""
    steps = (EPOCHS - 2) * (COUNT // BATCH) - STOP
    moment = random.randrange(1, steps // 2)
    found = []
    for batch in itertools.islice(trainer, steps):
        found.append(batch)
        if len(found) == moment:
            (stage,) = (stage for stage in trainer.stages() if stage.name == victim)
            os.kill(int(stage.workers[0].partition(":")[2]), signal.SIGKILL)
    return found


def test_what_a_worker_has_to_say_is_said_by_the_trainer() -> None:
    def fail() -> None:
        raise errors.NotFoundError("shard 7 is gone: bring it back")

    with pytest.raises(ray.exceptions.RayError) as caught:
        ray.get(ray.remote(fail).remote())
    reason = _reason(caught.value)
    assert type(reason) is errors.NotFoundError
    assert str(reason) == "shard 7 is gone: bring it back"


def test_a_state_of_another_order_is_refused_before_anything_begins(images: Path) -> None:
    state = load(images.parent / "latents").state_dict()
    with pytest.raises(FingerprintError, match="seed: 0 -> 1"):
        stream(images, state=state, seed=1)
