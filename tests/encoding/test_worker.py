"""A worker, with a stand-in for the models: shards at once, and what may fail."""

import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.encode_work import Making
from tests.kit.encodes import Broken, Means, encode_here, members
from tests.kit.gpus import pretend_cuda
from tests.kit.packs import temporaries, tree
from wdsprep.cli import main
from wdsprep.dataset.npy_arrays import layout
from wdsprep.dataset.stored_dataset import read_receipt
from wdsprep.encoding.engine import Engine
from wdsprep.encoding.image_shards import ImageShard, find_image_shards, tars_of
from wdsprep.encoding.models.base import Encoded, Part
from wdsprep.encoding.worker import EncodeWorker
from wdsprep.encoding.worker_plan import EncodeJob, EncodeWorkerPlan
from wdsprep.images.crop import crop
from wdsprep.runners.base import BrokenWorkerError
from wdsprep.runners.run import JointUnit
from wdsprep.store import open_store


def worker(
    images: Path, out: Path, encoder: Any, also: Mapping[Path, int] | None = None, **changes: Any
) -> EncodeWorker:
    """`also` are further datasets, with the resolution of each."""
    options: dict[str, Any] = {"batch_size": 8, **changes}
    settings = {"layout": layout(encoder.fields), "seed": 0}
    places = {out: encoder.resolution, **(also or {})}
    job = EncodeJob(
        tars=tars_of(str(images), 1 << 30),
        datasets=[
            (str(place), {**settings, "resolution": resolution}, "")
            for place, resolution in places.items()
        ],
        make_encoder=lambda: encoder,
        worker_plan=EncodeWorkerPlan(device="cpu", runner="local", workers=1),
        max_area=10**8,
        **options,
    )
    return EncodeWorker(job)


def do(call: EncodeWorker, shard: ImageShard | JointUnit, errors: list[Exception]) -> None:
    try:
        for _ in call(shard if isinstance(shard, JointUnit) else alone(shard)):
            pass
    except Exception as error:  # noqa: BLE001  looked at by the test
        errors.append(error)


def alone(shard: ImageShard) -> JointUnit:
    return JointUnit(parts={0: shard})


def do_all(call: EncodeWorker, shards: Iterable[ImageShard | JointUnit]) -> list[Exception]:
    """All shards at once, as a runner with several units in each worker does."""
    errors: list[Exception] = []
    threads = [threading.Thread(target=do, args=(call, shard, errors)) for shard in shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a shard hangs"
    return errors


def test_shards_done_at_once_keep_their_samples_apart(images: Path, tmp_path: Path) -> None:
    encoder = Means()
    shards = find_image_shards(str(images), 64).shards
    call = worker(images, tmp_path / "out", encoder)
    assert not do_all(call, shards)
    call.close()
    assert set(encoder.sizes) == {8}
    for shard in shards:
        originals = members(images / f"{shard.name}.tar")
        made = members(tmp_path / "out" / f"{shard.name}.tar")
        assert list(made) == list(originals)
        for key, sample in made.items():
            mean = crop(originals[key]["jpg"], 16).pixels.float().mean().half()
            assert sample["latent.npy"].endswith(mean.numpy().tobytes())


class InTurn(Means):
    """Stands for a GPU that holds what encodes images or captions, and never both."""

    is_split = True

    def __init__(self) -> None:
        super().__init__()
        self.holds = Part.TEXT
        self.brought: list[Part] = []

    def bring(self, part: Part) -> None:
        self.holds = part
        self.brought.append(part)

    def encode_images(self, *arguments: Any, **options: Any) -> Encoded:
        assert self.holds is Part.IMAGE
        return super().encode_images(*arguments, **options)

    def encode_texts(self, *arguments: Any, **options: Any) -> Encoded:
        assert self.holds is Part.TEXT
        return super().encode_texts(*arguments, **options)


def test_two_passes_make_the_same_bytes_and_bring_the_text_to_each_of_several_datasets(
    images: Path, tmp_path: Path
) -> None:
    shards = find_image_shards(str(images), 64).shards[2:5]  # also of bucket 128
    lacking = {shards[0]: [0], shards[1]: [1], shards[2]: [0, 1]}
    units = [JointUnit(parts=dict.fromkeys(n, shard)) for shard, n in lacking.items()]
    encoder = InTurn()
    for name, used in (("one", Means()), ("two", encoder)):
        call = worker(images, tmp_path / name / "16", used, {tmp_path / name / "96": 96})
        assert not do_all(call, units)
        call.close()
    first, then = encoder.brought[:2], encoder.brought[2:]
    assert first == [Part.IMAGE, Part.TEXT]  # batches are sized, and then nothing is encoded
    assert then == [Part.TEXT, Part.IMAGE] * (len(then) // 2)
    assert 1 <= len(then) // 2 <= len(shards)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    for number, place in enumerate(("16", "96")):
        done = (tmp_path / "two" / place / "receipts").rglob("*.json")
        assert {path.stem for path in done} == {
            shard.name[-6:] for shard, numbers in lacking.items() if number in numbers
        }


def test_a_worker_whose_encoder_fails_says_that_it_is_broken(images: Path, tmp_path: Path) -> None:
    call = worker(images, tmp_path / "out", Broken())
    shards = find_image_shards(str(images), 64).shards
    errors = do_all(call, shards)
    call.close()
    assert errors
    assert {type(error) for error in errors} == {BrokenWorkerError}
    assert "a kernel of 3 is wanted" in str(errors[0])
    assert not temporaries(tmp_path / "out")


class OnGpu:
    """The encoder as its worker sees it, on a card that is not there."""

    device = torch.device("cuda")

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes what is computed on this one, for encoders that are `OnGpu`."""
    monkeypatch.setattr(
        EncodeWorker, "engine_class", lambda _worker, encoder, **how: Engine(encoder.own, **how)
    )
    monkeypatch.setattr(
        "wdsprep.encoding.encode.make_encoder", lambda *given: OnGpu(Making()(*given))
    )
    pretend_cuda(monkeypatch, get_device_name="NVIDIA A10G")


class Small(Means):
    """Has memory for batches of two."""

    def encode_images(self, pixels: torch.Tensor, *arguments: Any, **options: Any) -> Encoded:
        if len(pixels) > 2:
            raise MemoryError
        return super().encode_images(pixels, *arguments, **options)


@pytest.mark.parametrize(("encoder", "size"), [(Means(), 8), (Small(), 2)])
@pytest.mark.usefixtures("card")
def test_a_receipt_says_on_which_gpu_and_how_its_shard_was_made(
    images: Path, tmp_path: Path, encoder: Means, size: int
) -> None:
    call = worker(images, tmp_path / "out", OnGpu(encoder))
    shard = find_image_shards(str(images), 64).shards[0]
    assert not do_all(call, [shard])
    call.close()
    counts = read_receipt(open_store(str(tmp_path / "out")), shard.name).counts
    made_on = f"gpu:NVIDIA A10G, batches of {size} images and 8 captions"
    assert {n: c for n, c in counts.items() if n.startswith("gpu:")} == {made_on: 1}


@pytest.mark.usefixtures("card")
def test_a_dataset_made_on_gpus_resumes_verifies_and_is_rebuilt_as_it_was(
    images: Path, tmp_path: Path
) -> None:
    first = encode_here(images, tmp_path / "out", batch_size=4, limit=6)
    assert not first.manifest.complete
    outcome = encode_here(images, tmp_path / "out", batch_size=8)
    counts = {n: c for n, c in outcome.manifest.counts.items() if n.startswith("gpu:")}
    assert sum(counts.values()) == len(outcome.manifest.shards)
    assert {name.partition(" images")[0] for name in counts} == {
        f"gpu:NVIDIA A10G, batches of {size}" for size in (4, 8)
    }
    there = tree(tmp_path / "out")
    assert encode_here(images, tmp_path / "out", batch_size=8).samples == 0
    (tmp_path / "out/wdsprep.json").unlink()
    assert main(["rebuild", str(tmp_path / "out")]) == 0
    rebuilt = json.loads((tmp_path / "out/wdsprep.json").read_bytes())
    assert rebuilt["units"] == json.loads(there["wdsprep.json"])["units"]
    assert main(["verify", str(tmp_path / "out"), "--workers", "1"]) == 0


def test_a_shard_that_is_given_up_leaves_nothing_and_the_next_one_is_done(
    images: Path, tmp_path: Path
) -> None:
    call = worker(images, tmp_path / "out", Means(), batch_size=2)
    first, second, *_ = find_image_shards(str(images), 64).shards
    for _ in range(30):  # more than there are places for what is under way
        steps = call(alone(first))
        next(steps)
        steps.close()
    assert not temporaries(tmp_path / "out")
    assert not list((tmp_path / "out/receipts").rglob("*.*"))
    assert not do_all(call, [first, second])
    call.close()
    assert len(members(tmp_path / "out" / f"{first.name}.tar")) == 4
