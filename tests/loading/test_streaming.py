"""Streams on Ray: the batches of stored latents, for several trainers, while workers are killed."""

import contextlib
import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import ray
from PIL import Image

import wdsprep
from tests.kit.batches import assert_same
from tests.kit.clusters import LEAN, object_store
from tests.kit.encode_work import Making
from tests.kit.encodes import encode_here, packed, pictures
from tests.kit.packs import tars, tree, write_files
from wdsprep import errors
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.recipe_options import Encode
from wdsprep.encoding.sample_arrays import fields
from wdsprep.errors import FingerprintError, UsageError
from wdsprep.loading.streaming.stages import FILL, PIECE, Pieces, piece_limit, samples_in_store

# What Ray Data says to itself when it makes its own context, and its threads when they end:
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
COUNT, BATCH, WORLD, EPOCHS, STOP = 42, 8, 2, 6, 3
CORES = 8
STORE = 75 << 20  # the smallest object store that Ray allows
NAMES = ("latent", "emb", "key", "txt", "json")
ORDER = {"global_batch": BATCH, "epochs": EPOCHS, "fields": NAMES, "drop_text": 0.2}
HOW = {"resolution": 64, "model": "tiny", "device": "cpu"}
FEW = {"decoders": (1, 1), "encoders": (1, 1)}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """More cores than there are: here most workers wait."""
    ray.init(
        "local",
        num_cpus=CORES,
        object_store_memory=STORE,
        log_to_driver=False,
        logging_level="ERROR",
        **LEAN,
    )
    with patch("wdsprep.encoding.encode.make_encoder", Making()):
        yield
    ray.shutdown()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stream")
    packed(pictures(root / "photos", range(COUNT)), root / "images")
    encode_here(root / "images", root / "latents")
    return root / "images"


def load(url: Path, **options: Any) -> Any:
    return wdsprep.load(str(url), **(ORDER | {"rank": 0, "world_size": 1} | options))


def stream(images: Path, **options: Any) -> Any:
    pools = {"decoders": (1, 2), "encoders": (1, 2)}
    own = {n: options.pop(n) for n in {"resolution", "device", "text"} & options.keys()}
    how = Encode(**(HOW | own | options.pop("how", {})))
    return wdsprep.stream(str(images), encode=how, **(ORDER | pools | options))


ABANDONED = """
import itertools, sys, wdsprep
from torch.utils.data import DataLoader
images, latents = sys.argv[1:]
few = {"decoders": (1, 1), "encoders": (1, 1)}
stored = wdsprep.load(latents, global_batch=4, epochs=None)
begun = iter(stored)
inside = iter(DataLoader(wdsprep.load(latents, global_batch=4), batch_size=None, num_workers=1))
how = wdsprep.Encode(resolution=64, model="tiny", device="cpu")
feed = wdsprep.stream(images, encode=how, global_batch=4, epochs=None, **few)
trainer = iter(feed.trainers[0])
for batches in (begun, inside, trainer):
    print(sum(len(batch["key"]) for batch in itertools.islice(batches, 2)))
print(stored, feed.trainers[0], sep="\\n")
"""


@pytest.mark.system
def test_a_program_may_end_in_the_middle_of_everything(images: Path) -> None:
    """Nothing is printed at its exit, and nothing hangs."""
    words = [sys.executable, "-c", ABANDONED, str(images), str(images.parent / "latents")]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    what = f"{COUNT} samples, {COUNT // 4} steps of 4 an epoch"
    assert done.stdout.splitlines() == [
        *["8"] * 3,
        f"<Loader '{images.parent}/latents': {what}; at step 2>",
        f"<Trainer '{images}': {what}; at step 2>",
    ]


def test_a_stream_of_many_shapes_and_mirror_images_is_that_of_stored_ones(
    images: Path, tmp_path: Path
) -> None:
    """With shards that are kept: each batch is of one shape for all."""
    how = {"shapes": "nearest:8,3", "max_crop": 0.4, "flip": True}
    stored, kept = tmp_path / "stored", tmp_path / "kept"
    encode_here(images, stored, **how)
    some = {"flip": 0.5, "epochs": 2, "fields": (*NAMES, "shape")}
    with (
        stream(images, how=how, trainers=WORLD, tee=str(kept), **some, **FEW) as feed,
        ThreadPoolExecutor(WORLD) as pool,
    ):
        served = list(pool.map(list, feed.trainers))
    for rank in range(WORLD):
        assert_same(served[rank], list(load(stored, rank=rank, world_size=WORLD, **some)))
    whole = tars(kept)
    assert whole
    assert whole.items() <= tars(stored).items()
    assert {*tree(kept)} <= {*tree(stored)}


def test_text_that_is_joined_is_read_by_the_trainer_and_a_stream_ends_with_its_pace(
    images: Path,
) -> None:
    latents, texts = images.parent / "latents-alone", images.parent / "texts"
    encode_here(images, latents, text="none")
    encode_here(images, texts, latents="none")
    some = {"join": texts, "where": "source != 'photo-0001.jpg'"}
    wanted = list(load(latents, epochs=1, **some))
    with stream(images, how={"text": "none"}, epochs=100, **some, **FEW) as feed:
        batches = iter(feed.trainers[0])
        assert_same(list(itertools.islice(batches, len(wanted))), wanted)
        ray.kill(feed.trainers[0].actors[1])
        with pytest.raises(errors.WorkError, match="the stream has failed"):
            list(batches)


def test_killed_workers_lose_and_repeat_nothing_and_the_state_goes_on_anywhere(
    images: Path, tmp_path: Path
) -> None:
    """A run begins on stored latents, goes on in a stream for two trainers, of which a decoder and
    an encoder are killed, then on the trainer's own device. The stream keeps what passes, and has
    so few pieces under way that those who come after the dead have a part in what is looked at."""
    stored, kept = images.parent / "latents", tmp_path / "kept"
    begun = load(stored)
    list(itertools.islice(begun, STOP))
    state = json.loads(json.dumps(begun.state_dict()))
    with (
        patch.multiple("wdsprep.loading.streaming.stream", PER_WORKER=1, PER_TRAINER=1),
        stream(images, state=state, trainers=WORLD, tee=str(kept)) as feed,
    ):
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
    seed = random.randrange(1 << 32)
    print(f"{victim}: seed {seed}")  # noqa: T201  shown where the test fails
    moment = random.Random(seed).randrange(1, steps // 2)
    found, is_killed = [], False
    for batch in itertools.islice(trainer, steps):
        found.append(batch)
        if len(found) >= moment and not is_killed:
            (stage,) = (stage for stage in trainer.stages() if stage.name == victim)
            is_killed = killed_one(int(name.partition(":")[2]) for name in stage.workers)
    return found


def killed_one(processes: Iterable[int]) -> bool:
    """Whether one of them was there to be killed: a busy machine may have replaced some before."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            return True
    return False


def test_closing_lets_all_go_even_where_a_trainer_cannot_be_closed(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a Ray that goes on. Here workers run in other folders, and a step's last pieces are
    shorter than the others."""
    monkeypatch.chdir(images.parent)
    with patch("wdsprep.loading.streaming.stream.piece_limit", return_value=2):
        feed = stream(Path("images"), trainers=WORLD, global_batch=10, **FEW)
    with ThreadPoolExecutor(WORLD) as pool:
        ranks = list(pool.map(lambda trainer: list(itertools.islice(trainer, 3)), feed.trainers))
    for rank, batches in enumerate(ranks):
        wanted = load(Path("latents"), rank=rank, world_size=WORLD, global_batch=10)
        assert_same(batches, list(itertools.islice(wanted, 3)))
    with (
        patch.object(feed.trainers[0], "close", side_effect=OSError("no space")),
        pytest.raises(OSError, match="no space"),
    ):
        feed.close()
    for actor in feed.trainers[0].actors:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.__ray_ready__.remote())
    until = time.monotonic() + 60
    while ray.available_resources().get("CPU") != CORES:
        assert time.monotonic() < until, "its workers are still there"
        time.sleep(0.1)
    feed.trainers[0].close()


def test_an_epoch_of_four_times_the_object_store_passes_through_it(tmp_path: Path) -> None:
    """In steps of more pieces than are under way at once."""
    side, batch, steps = 512, 64, 7
    colours = {f"{n}.jpg": flat(side, n) for n in range(batch)}
    images = tmp_path / "images"
    packed(write_files(tmp_path / "flat", colours), images, "--buckets", "512")
    encode_here(images, tmp_path / "latents", resolution=side)
    order = {"global_batch": batch, "epochs": None, "epoch_steps": steps, "drop_text": 0.0}
    wanted = load(tmp_path / "latents", **order)
    with stream(images, resolution=side, **order, **FEW) as feed:
        (trainer,) = feed.trainers
        assert trainer._pieces.per_step > 2 * trainer._ready
        for found, known in itertools.islice(zip(trainer, wanted, strict=False), steps):
            assert_same([found], [known])
    passed = object_store()
    assert passed.cumulative_created_bytes > 4 * STORE
    assert passed.spilled_bytes_total == passed.object_store_bytes_fallback == 0


def flat(side: int, number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), (number, 2 * number, 3 * number)).save(out, "JPEG")
    return out.getvalue()


def test_a_cluster_that_is_too_small_is_refused(images: Path) -> None:
    with pytest.raises(UsageError, match=r"needs 1 CPUs and 0\.5 GPUs or more, .* 8 and 0:"):
        stream(images, device="cuda", gpus_per_encoder=0.5)
    with (
        patch("ray.cluster_resources", lambda: {"CPU": 1.0}),
        pytest.raises(UsageError, match=r"needs 2 CPUs and 0 GPUs or more, .* cluster has 1 "),
    ):
        stream(images)


@pytest.mark.parametrize("world", [1, 3])
def test_pieces_of_any_share_hold_each_row_once(world: int) -> None:
    for share, most in itertools.product(range(1, 601), (1, 7, 64)):
        plan: Any = SimpleNamespace(share=share, world=world)
        line = Pieces(plan=plan, encoding=cast(Any, None), most=most)
        numbers = [line.numbers(2, rank) for rank in range(world)]
        dealt = [number for numbers_of in zip(*numbers, strict=True) for number in numbers_of]
        assert dealt == list(range(2 * line.per_step, 3 * line.per_step))
        for rank, own in enumerate(numbers):
            places = [line.place(number) for number in own]
            assert {place[:2] for place in places} == {(2, rank)}
            assert [row for *_, rows in places for row in rows] == list(range(share))
            assert line.parts == -(-share // most), "as few pieces as can be"
            assert all(0 < len(rows) <= most for *_, rows in places)


@pytest.mark.parametrize("text", ["emb", "none"])
@pytest.mark.parametrize("resolution", [256, 512, 1024])
def test_pieces_are_as_large_as_the_object_store_has_room_for(resolution: int, text: str) -> None:
    recipe = Encode(resolution=resolution, text=text)
    arrays = fields(find_model("tiny", text=text), recipe)
    each = max(3 * resolution**2, sum(field.array_nbytes for field in arrays))
    assert piece_limit(samples_in_store(1 << 40, resolution, arrays), 12) == PIECE
    for nbytes, pieces in itertools.product((80e6, 1e9), (12, 100)):
        most = piece_limit(samples_in_store(nbytes, resolution, arrays), pieces)
        assert most * each * pieces <= FILL * nbytes or most == 1
        assert (most + 1) * each * pieces > FILL * nbytes or most == PIECE
    assert piece_limit(samples_in_store(0, resolution, arrays), 12) == 1


def test_a_state_of_another_order_is_refused_before_anything_begins(images: Path) -> None:
    state = load(images.parent / "latents").state_dict()
    with pytest.raises(FingerprintError, match="seed: 0 -> 1"):
        stream(images, state=state, seed=1)
