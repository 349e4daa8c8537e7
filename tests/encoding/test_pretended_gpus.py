"""GPUs that fail: when a worker opens, at its first batch, at its thousandth.

There are none here: workers see numbers in their place, and compute on the CPU. All else is real.
"""

import socket
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

import wdsprep
from tests.kit.encode_work import Making
from tests.kit.packs import pack, tree
from wdsprep.encoding import worker_plan
from wdsprep.encoding.worker_plan import Machine
from wdsprep.runners.run import Outcome

pytestmark = pytest.mark.system

SHARDS, SAMPLES = 11, 200  # of a shard: of two workers one comes to a thousandth image
FAILED = "CUDA error: an illegal memory access was encountered"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    (root / "in").mkdir()
    pixels = numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), numpy.uint8)
    for number in range(SHARDS * SAMPLES):
        colours = numpy.roll(pixels, number, 1)[:, :, :: (-1) ** number]
        Image.fromarray(colours).save(root / f"in/{number:04d}.jpg", quality=50)
    return pack(root / "in", root / "out", "--buckets", "64", "--samples-per-shard", str(SAMPLES))


@pytest.fixture(scope="module")
def undisturbed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    outcome = encode(images, out, Making(), gpus="01")
    assert (outcome.samples, outcome.quarantined) == (SHARDS * SAMPLES, ())
    return tree(out)


def encode(images: Path, out: Path, making: Making, *, gpus: str, **wish: Any) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wdsprep.encoding.encode.make_encoder", making)
        machine = Machine(cpus=len(gpus), gpus=tuple(gpus))
        patch.setattr(worker_plan, "this_machine", lambda _device: machine)
        wanted = {"resolution": 64, "model": "tiny", "batch_size": 1, "dtype": "fp32", **wish}
        return wdsprep.encode(str(images), str(out), runner="local", text="none", **wanted)


def check_done(out: Path, undisturbed: dict[str, bytes], outcome: Outcome) -> None:
    """All that was asked for is there, in the bytes of an undisturbed run."""
    assert not outcome.is_damaged
    made = {name: data for name, data in tree(out).items() if name != "wdsprep.json"}
    assert made == {name: undisturbed[name] for name in made}
    assert outcome.samples == sum(shard.samples for shard in outcome.manifest.shards)


def test_a_gpu_on_which_no_worker_can_open_is_given_up(
    images: Path, undisturbed: dict[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    making = Making(fails_at=0, bad_places=("1",))
    wish = {"gpus": "01", "max_attempts": 1, "limit": 4 * SAMPLES}
    outcome = encode(images, tmp_path / "out", making, **wish)
    assert outcome.samples == 4 * SAMPLES
    check_done(tmp_path / "out", undisturbed, outcome)
    there = f"{socket.gethostname()}, GPU 1: tiny needs 2 GB of a GPU, which has 1 GB free here"
    assert [line for line in caplog.messages if there in line] == [
        f"a worker could not begin on {there}",
        f"a place is given up for now: no worker can begin on {there}",
    ]


@pytest.mark.parametrize("batch", [1, 3])
def test_shards_of_a_gpu_that_soon_fails_are_done_by_others(
    batch: int,
    images: Path,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    making = Making(fails_at=batch, bad_places=("1",), pause_s=0.01)  # so that both get some
    outcome = encode(images, tmp_path / "out", making, gpus="01", limit=4 * SAMPLES)
    assert outcome.samples == 4 * SAMPLES
    check_done(tmp_path / "out", undisturbed, outcome)
    assert FAILED in caplog.text


def test_shards_of_gpus_that_fail_at_their_thousandth_batch_are_all_done(
    images: Path, undisturbed: dict[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Again and again: each worker does some before that."""
    making = Making(fails_at=1000, bad_places=("0", "1"))
    outcome = encode(images, tmp_path / "out", making, gpus="01")
    assert outcome.samples == SHARDS * SAMPLES
    check_done(tmp_path / "out", undisturbed, outcome)
    assert FAILED in caplog.text
