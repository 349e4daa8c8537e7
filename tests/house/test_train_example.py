"""The example trainer: stopped, or on several ranks, it has the losses of one undisturbed run."""

import contextlib
import csv
import signal
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.kit.encodes import in_this_process, packed, pictures
from tests.kit.example_trainer import Interrupt, Trainer, running, world_of
from tests.kit.gpus import pretend_cuda
from tests.kit.latent_sets import field, write_latents
from tests.kit.paths import EXAMPLES
from tests.kit.trackers import curves_of
from wdsprep.encoding.encode import encode

pytestmark = pytest.mark.system

PHASES = (("latents-256", 8), ("latents-512", 16))
STEPS = (9, 3)
SAVED, KILLED = 4, 7
OPTIONS = ["--steps", "9,3", "--batch", "4", "--width", "8", "--save-every", str(SAVED)]
Losses = list[tuple[str, str, float]]


def trainer(
    folder: Path,
    out: str,
    interrupt: Interrupt | None = None,
    *,
    more: Sequence[str] = (),
    **environment: str,
) -> contextlib.AbstractContextManager[Trainer]:
    words = [*(name for name, _side in PHASES), "--out", out, *OPTIONS, *more]
    return running("train_example", folder, words, interrupt, **environment)


def save_as_on_a_gpu(checkpoint: Path) -> None:
    """Rewrite where its tensors were, which torch stores with each."""
    with zipfile.ZipFile(checkpoint) as file:
        members = {name: file.read(name) for name in file.namelist()}
    pickled = next(name for name in members if name.endswith("/data.pkl"))
    assert b"\x03\0\0\0cpu" in members[pickled]
    members[pickled] = members[pickled].replace(b"\x03\0\0\0cpu", b"\x06\0\0\0cuda:0")
    with zipfile.ZipFile(checkpoint, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)


def losses_of(out: Path) -> Losses:
    with (out / "losses.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [(phase, step, float(loss)) for phase, step, loss in rows]


UNET, TRANSFORMER = "as Stable Diffusion", "as newer families"


@pytest.fixture(scope="module", params=[UNET, TRANSFORMER])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With latents of two sizes, which say what kind of model is trained on them."""
    folder = tmp_path_factory.mktemp("training")
    if request.param == TRANSFORMER:
        return encoded_by_lumina2(folder)
    for name, side in PHASES:
        fields = (field("latent", (4, side, side)), field("emb", (7, 16)))
        write_latents(str(folder / name), (12, 9), fields=fields, extra={"model": "tiny"})
    return folder


def encoded_by_lumina2(folder: Path) -> Path:
    """By the small one: 16 channels, and text as long as the captions are."""
    from tests.kit.families import small

    model = small("Lumina2", folder / "model")
    images = packed(pictures(folder / "pictures", range(24)), folder / "images")
    with in_this_process():
        for name, side in PHASES:
            options = {"model": str(model), "device": "cpu", "runner": "local"}
            encode(images, folder / name, resolution=8 * side, **options)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Losses:
    """The losses of a run to its end; another is killed meanwhile, in mid-epoch."""
    tracked = trainer(folder, "whole", more=["--track", "tensorboard"])
    with tracked as whole, trainer(folder, "killed") as victim:
        victim.wait_for(f"phase 0 step {KILLED} ")
        victim.process.kill()
        whole.end()
    return losses_of(folder / "whole")


def test_a_run_leaves_losses_a_plot_and_grids_of_samples(undisturbed: Losses, folder: Path) -> None:
    wanted = [(str(n), str(step + 1)) for n, count in enumerate(STEPS) for step in range(count)]
    assert [(phase, step) for phase, step, _loss in undisturbed] == wanted
    assert undisturbed[-1][2] < undisturbed[0][2]
    for name in ("losses", "samples-64", "samples-128"):
        with Image.open(folder / f"whole/{name}.png") as image:
            assert len(set(image.convert("L").tobytes())) > 20
    (told,) = (folder / "runs/whole").iterdir()
    points, settings = curves_of(told)
    step, loss = points["loss"][-1]
    assert (step, loss) == (sum(STEPS), pytest.approx(undisturbed[-1][2], rel=1e-6))
    assert "    batch: 4\n" in settings


def test_killed_and_run_again_it_has_the_losses_of_an_undisturbed_run(
    undisturbed: Losses, folder: Path
) -> None:
    """Also where the checkpoint says that its tensors were on a GPU, and there is none."""
    assert losses_of(folder / "killed") == undisturbed[:SAVED]
    save_as_on_a_gpu(folder / "killed/checkpoint.pt")
    with trainer(folder, "killed") as again:
        again.end()
    assert losses_of(folder / "killed") == undisturbed


@pytest.mark.parametrize("folder", [UNET], indirect=True)
def test_ctrl_c_saves_the_step_under_way_and_says_how_to_go_on(
    undisturbed: Losses, folder: Path
) -> None:
    ctrl_c = Interrupt(at=f"phase 0 step {SAVED + 1} ", signum=signal.SIGINT)
    with trainer(folder, "stopped", ctrl_c) as stopped:
        stopped.wait_for(f"saved at phase 0 step {SAVED + 2}: run the same command to go on")
        stopped.end(130)
    assert losses_of(folder / "stopped") == undisturbed[: SAVED + 2]


@pytest.mark.parametrize("folder", [TRANSFORMER], indirect=True)
def test_two_ranks_have_the_losses_of_one_and_stop_together(
    undisturbed: Losses, folder: Path
) -> None:
    world = world_of(2)
    for code in (130, 0):
        with trainer(folder, "ranks", RANK="1", **world) as second:
            last_saved = f"phase 0 step {SAVED} " if code else "never"
            asks = Interrupt(at=last_saved, signum=signal.SIGTERM, pid=second.process.pid)
            with trainer(folder, "ranks", asks, RANK="0", **world) as first:
                first.end(code)
                second.end(code)
        assert (len(losses_of(folder / "ranks")) == sum(STEPS)) == (code == 0)
    found = losses_of(folder / "ranks")
    assert [row[:2] for row in found] == [row[:2] for row in undisturbed]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in undisturbed], rel=1e-4)


@pytest.mark.parametrize(
    ("gpus", "ranks", "rank", "wanted"),
    [
        (0, 2, 1, (torch.device("cpu"), "gloo")),
        (1, 1, 0, (torch.device("cuda:0"), "nccl")),
        (4, 4, 3, (torch.device("cuda:3"), "nccl")),
    ],
)
def test_each_rank_of_a_machine_has_a_gpu_of_its_own_and_all_the_cpu_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    ranks: int,
    rank: int,
    wanted: tuple[torch.device, str],
) -> None:
    assert place(monkeypatch, gpus, ranks, rank) == wanted


def test_more_ranks_than_gpus_are_refused_before_any_of_them_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit, match=r"2 ranks .* 1 GPU: give --nproc-per-node 1, or "):
        place(monkeypatch, gpus=1, ranks=2, rank=0)


def place(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, rank: int
) -> tuple[torch.device, str]:
    """What the trainer decides where torch says that there are so many GPUs."""
    pretend_cuda(monkeypatch, is_available=gpus > 0, device_count=gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_example

    return train_example.place()
