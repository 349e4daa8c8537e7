"""Who encodes on which machine, and how shards take turns on one: pure decisions."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.encodes import Here
from tests.kit.gpus import pretend_cuda
from tests.kit.packs import tree
from wdsprep.encoding import gpus, two_passes, worker_plan
from wdsprep.encoding.encode import encode
from wdsprep.encoding.models import encoder as encoders
from wdsprep.encoding.models.base import Part
from wdsprep.encoding.options import EncodeWorkerOptions
from wdsprep.encoding.two_passes import TextPass, Turns
from wdsprep.encoding.worker_plan import Machine, plan_workers, settle_workers
from wdsprep.errors import UsageError, WorkError

TWO_CORES = [Machine(cpus=2)]
ONE_GPU = [Machine(cpus=8, gpus=("0",))]
EIGHT_GPUS = [Machine(cpus=100, gpus=tuple("01234567"))]
MIXED = [
    Machine(cpus=64),
    Machine(cpus=8, gpus=("0",)),
    Machine(cpus=48, gpus=("0", "1", "2", "3")),
]


SCALED_TO_ZERO = ([], [Machine(cpus=4)], [Machine(cpus=64), Machine(cpus=8)])
LATER = {"device": "cuda", "workers": 4, "gpus_per_worker": 1, "cpus_per_worker": 1, "threads": 0}


@pytest.mark.parametrize(
    ("options", "machines", "is_cluster", "wanted"),
    [
        # Workers on a CPU share its cores.
        ({"workers": 1}, TWO_CORES, False, {"workers": 1, "threads": 2}),
        ({"workers": 2}, TWO_CORES, False, {"workers": 2, "threads": 1}),
        ({"workers": 3}, TWO_CORES, False, {"workers": 3, "threads": 1}),
        # Each GPU has a worker with its share of the cores, or is left alone.
        ({}, ONE_GPU, False, {"device": "cuda", "workers": 1, "cpus_per_worker": 8}),
        ({}, EIGHT_GPUS, False, {"workers": 8, "cpus_per_worker": 12, "gpus": (*"01234567",)}),
        ({"device": "cpu"}, ONE_GPU, False, {"device": "cpu", "gpus_per_worker": 0, "workers": 1}),
        # More workers than GPUs share them and their memory.
        ({"gpus_per_worker": 0.5}, ONE_GPU, False, {"workers": 2, "cpus_per_worker": 4}),
        ({"workers": 4}, EIGHT_GPUS, False, {"gpus_per_worker": 1, "gpu_share": 1, "threads": 12}),
        ({"workers": 8}, EIGHT_GPUS, False, {"gpus_per_worker": 1, "gpu_share": 1, "threads": 12}),
        ({"workers": 9}, EIGHT_GPUS, False, {"gpus_per_worker": 0.5, "gpu_share": 0.5}),
        ({"workers": 16}, EIGHT_GPUS, False, {"gpu_share": 0.5, "threads": 6}),
        # On a cluster every machine has room, and machines with GPUs may join it later.
        ({}, MIXED, True, {"device": "cuda", "workers": 0, "cpus_per_worker": 8}),
        ({"device": "cpu"}, MIXED, True, {"device": "cpu", "workers": 0, "cpus_per_worker": 8}),
        *(({"device": "cuda", "workers": 4}, machines, True, LATER) for machines in SCALED_TO_ZERO),
    ],
)
def test_workers_have_their_share_of_the_machines(
    options: dict[str, Any], machines: list[Machine], is_cluster: bool, wanted: dict[str, Any]
) -> None:
    plan = plan_workers(EncodeWorkerOptions(**options), machines, is_cluster=is_cluster)
    assert {name: getattr(plan, name) for name in wanted} == wanted


@pytest.mark.parametrize("machines", SCALED_TO_ZERO)
def test_a_cluster_without_gpus_has_to_be_told_whether_some_will_join(
    machines: list[Machine],
) -> None:
    with pytest.raises(UsageError, match=r"no GPU now: give --device cuda .* --device cpu"):
        plan_workers(EncodeWorkerOptions(), machines, is_cluster=True)
    assert plan_workers(EncodeWorkerOptions(device="cpu"), machines, is_cluster=True).threads >= 1


@pytest.mark.parametrize(
    ("nvidia", "amd", "is_asked"),
    [("libnone.so.1", "none", False), ("libnone.so.1", "/", True), ("libc.so.6", "none", True)],
)
def test_without_the_driver_of_a_gpu_torch_is_not_asked(
    nvidia: str, amd: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    pretend_cuda(monkeypatch, is_available=lambda: bool(asked.append("torch")))
    monkeypatch.setattr(gpus, "NVIDIA", nvidia)
    monkeypatch.setattr(gpus, "AMD", Path(amd))
    assert (gpus.visible_gpus(), asked) == ((), ["torch"] * is_asked)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="no GPU"):
        plan_workers(EncodeWorkerOptions(device="cuda"), TWO_CORES, is_cluster=False)
    with pytest.raises(UsageError, match="gpus-per-worker"):
        plan_workers(EncodeWorkerOptions(gpus_per_worker=1), TWO_CORES, is_cluster=False)


LOCALLY = "encoding with local processes: "


@pytest.mark.parametrize(
    ("machine", "options", "runner", "line"),
    [
        (TWO_CORES[0], {}, "local", f"{LOCALLY}no GPU here and no --ray-address"),
        (ONE_GPU[0], {}, "local", f"{LOCALLY}one GPU here and no --ray-address"),
        (TWO_CORES[0], {"device": "cpu"}, "local", f"{LOCALLY}the CPU alone here and no"),
        (EIGHT_GPUS[0], {}, "ray", "starting Ray on this machine: 8 GPUs"),
        (TWO_CORES[0], {"ray_address": "head:6379"}, "ray", "connecting to Ray at head:6379"),
        (ONE_GPU[0], {"runner": "ray"}, "ray", "starting Ray on this machine"),
        (EIGHT_GPUS[0], {"runner": "local"}, "local", ""),
    ],
)
def test_which_runner_is_chosen_and_why_is_one_line(
    machine: Machine,
    options: dict[str, str],
    runner: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(worker_plan, "this_machine", lambda _device: machine)
    monkeypatch.setattr(worker_plan, "cluster_machines", lambda _address: None)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    said: list[str] = []
    plan = settle_workers(EncodeWorkerOptions(**options), said.append)  # type: ignore[arg-type]
    assert plan.runner == runner
    assert len(said) == bool(line)
    assert "".join(said).startswith(line)


GB = 10**9
SDXL, FLUX = 2_000 * 2 * (77 * 2048 + 1280), 2_000 * 2 * (512 * 4096 + 768)
"""Bytes of the captions of a shard."""


@dataclass
class Device:
    """Counts what is brought to it."""

    is_idle: bool = True
    loads: Counter[Part] = field(default_factory=Counter)

    def bring(self, part: Part) -> None:
        self.loads[part] += 1


def turns_of(device: Device, at_once: int = 3, most: int = 8) -> Turns:
    return Turns(device, device, at_once=at_once, most=most)  # type: ignore[arg-type]


def shard(turns: Turns, parts: Iterable[Part], nbytes: int, held: Counter[str]) -> Iterator[None]:
    """The life of a shard, which takes three steps in each pass."""
    with closing(TextPass()) as texts:
        for part in parts:
            texts.nbytes = nbytes if part is Part.TEXT else texts.nbytes
            with turns.visit(part, texts):
                while not turns.enter(texts, 0):
                    yield
                held["waiting"] += texts.nbytes if part is Part.TEXT else 0
                held["most"] = max(held["most"], held["waiting"])
                for _ in range(3):
                    yield
        held["waiting"] -= texts.nbytes


def done(turns: Turns, shards: list[list[Part]], nbytes: int = 1, most: int = 8) -> Counter[str]:
    """Do these shards, `most` at a time, as a worker does them."""
    held: Counter[str] = Counter()
    waiting, lives = list(shards), list[Iterator[None]]()
    for _ in range(10_000):
        while waiting and len(lives) < most:
            lives.append(shard(turns, waiting.pop(0), nbytes, held))
        lives = [life for life in lives if next(life, held) is None]
        if not (lives or waiting):
            return held
    pytest.fail("shards wait for ever")


BOTH = [Part.TEXT, Part.IMAGE]


@pytest.mark.parametrize("most", [1, 3, 8])
def test_many_shards_load_each_network_once_for_so_many_of_them(most: int) -> None:
    device = Device()
    done(turns_of(device, most=most), [BOTH] * 64, most=most)
    least = 64 // most
    assert least <= device.loads[Part.TEXT] <= least + 2
    assert device.loads[Part.IMAGE] == device.loads[Part.TEXT]


@pytest.mark.parametrize("part", BOTH)
def test_shards_of_one_part_never_load_the_other(part: Part) -> None:
    device = Device()
    done(turns_of(device), [[part]] * 64)
    assert device.loads == {part: 1}


@pytest.mark.parametrize("many", BOTH)
def test_a_shard_comes_to_its_turn_however_many_want_the_other(many: Part) -> None:
    device = Device()
    turns = turns_of(device)
    first, waits = TextPass(), TextPass()
    with turns.visit(many, first):
        assert turns.enter(first, 0)
    other = next(part for part in BOTH if part is not many)
    with turns.visit(other, waits), ExitStack() as inside:
        ahead = 0
        while True:
            with ExitStack() as stack:
                texts = TextPass()
                stack.enter_context(turns.visit(many, texts))
                inside.close()
                if not turns.enter(texts, 0):
                    break
                inside.enter_context(stack.pop_all())
                ahead += 1
        assert ahead == 7
        assert turns.enter(waits, 0)


@pytest.mark.parametrize(
    ("nbytes", "free", "together"),
    [(SDXL, 500 * GB, 8), (FLUX, 500 * GB, 4), (FLUX, 100 * GB, 1), (SDXL, 20 * GB, 3)],
)
def test_captions_that_wait_take_no_more_than_a_share_of_the_disk(
    nbytes: int, free: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(two_passes.shutil, "disk_usage", lambda _folder: usage)
    device = Device()
    held = done(turns_of(device), [BOTH] * 32, nbytes)
    assert held["most"] == together * nbytes
    assert 32 // together <= device.loads[Part.TEXT] <= 32 // together + 2


# --- in a worker


@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the toy's networks take turns on the device, in this process."""
    monkeypatch.setattr(encoders, "is_split", lambda *_: True)
    monkeypatch.setattr("wdsprep.encoding.run_plan.make_runner", lambda *_args, **_how: Here())


@pytest.mark.system
@pytest.mark.usefixtures("in_turns")
def test_the_toy_in_turns_makes_the_same_bytes(images: Path, latents: Path, tmp_path: Path) -> None:
    encode(str(images), str(tmp_path / "out"), model="tiny", resolution=64, device="cpu")
    assert tree(tmp_path / "out") == tree(latents)


@pytest.mark.usefixtures("in_turns")
def test_a_compiler_that_is_lacking_is_missed_before_the_first_shard(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*_: Any, **_options: Any) -> Any:
        raise RuntimeError("Cannot find a working triton installation")

    monkeypatch.setattr("torch.compile", compiled)
    with pytest.raises(WorkError, match=r"^--compile does not work here \(Cannot find a working"):
        encode(str(images), str(tmp_path), model="tiny", resolution=64, device="cpu", compile=True)
    assert not any("receipts" in name for name in tree(tmp_path))
