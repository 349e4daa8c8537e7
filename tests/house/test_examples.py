"""The examples and recipes: trainers, LoRA scripts, the notebook, and other trainers that read."""

import contextlib
import csv
import importlib.util
import json
import os
import re
import signal
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import wdsprep
from tests.kit.command_lines import ran
from tests.kit.encodes import encode_here, in_this_process, packed, pictures
from tests.kit.example_trainer import Interrupt, Trainer, running, world_of
from tests.kit.families.reference import pipeline_class, quiet
from tests.kit.gpus import pretend_cuda
from tests.kit.latent_sets import field, write_latents
from tests.kit.paths import EXAMPLES, FIND_TESTS, ROOT, blocks
from tests.kit.trackers import curves_of
from wdsprep.encoding.encode import encode

MISSING = [name for name in ("accelerate", "peft") if importlib.util.find_spec(name) is None]
needs_trainers = pytest.mark.skipif(
    bool(MISSING), reason=f"{MISSING} not installed: run tools/venv"
)
pytestmark = pytest.mark.system
FAMILIES = {
    "lora_sdxl": "StableDiffusionXL",
    "lora_flux": "Flux",
    "kontext": "FluxKontext",
    "qwen-edit": "QwenImageEdit",
}
EDITED = ("kontext", "qwen-edit")
"""Those of `lora_edit`, by the names that tiny_pipeline has for them."""
PAGE = ROOT / "wdsprep/loading/fine-tuning.md"
WEIGHTS = "pytorch_lora_weights.safetensors"
STEPS, SAVED, KILLED = 16, 5, 8
OPTIONS = f"--steps {STEPS} --save-every {SAVED} --sample-every {STEPS} --log-every 1 --batch 4"
OPTIONS += " --rate 1e-2 --rank 4 --warm-up 2 --schedule cosine --sampling-steps 2"
OF_FAMILY = {"lora_sdxl": ["--min-snr", "5"], "qwen-edit": ["--rate", "5e-2"]}
WORLD = {"LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
LOSS = re.compile(rf"^step (\d+) of {STEPS}: loss ([\d.]+), mean .* left$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Example:
    family: str
    folder: Path
    """With the model, the latents, and `whole`, to which a run in peace has come."""
    losses: list[tuple[str, str]]

    @property
    def words(self) -> list[str]:
        places = [str(self.folder / "latents"), "--model", str(self.folder / "model")]
        prompts = ["--prompt", "a cat", "--prompt", "a dog"]
        return [*places, *OPTIONS.split(), *prompts, *OF_FAMILY.get(self.family, [])]

    @property
    def program(self) -> str:
        return "lora_edit" if self.family in EDITED else self.family


@pytest.fixture(scope="module", params=FAMILIES)
def example(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, family: Any
) -> Example:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "model").symlink_to(family(FAMILIES[request.param]))
    how: dict[str, Any] = {"model": str(folder / "model"), "shapes": "nearest:16,2"}
    roles: list[str] = []
    if request.param in EDITED:
        roles = ["--role", f"source={pictures(folder / 'before', range(24))}"]
        how |= {"roles": "target,source", "role_size": "source=aligned"}
    images = packed(pictures(folder / "pictures", range(24)), folder / "images", *roles)
    encode_here(images, folder / "latents", **how)
    example = Example(request.param, folder, [])
    example.losses.extend(LOSS.findall(run(example, "whole")))
    return example


def run(example: Example, out: str, interrupt: Interrupt | None = None) -> str:
    """Train in two processes; return what the first one said.

    With an interrupt it dies of that. The second is killed then, or ends as the first is gone.
    """
    world = {**WORLD, **world_of(2)}
    words = [*example.words, "--out", str(example.folder / out)]
    said = ""
    start = partial(running, example.program, example.folder, words, **world)
    with (
        start(interrupt, RANK="0", LOCAL_RANK="0") as first,
        start(RANK="1", LOCAL_RANK="1") as second,
    ):
        with contextlib.suppress(EOFError):
            while True:
                said += first.said.recv()
        first.end(-signal.SIGKILL if interrupt else 0)
        if not interrupt:
            second.end()
    return said


def launched(example: Example, out: str) -> str:
    """Train in two processes as `accelerate launch` starts them; return what they said."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    launch += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    program = [str(EXAMPLES / f"{example.program}.py"), *example.words]
    own = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    return ran(*launch, *program, "--out", example.folder / out, env=os.environ | own).stdout


@needs_trainers
def test_images_of_several_shapes_make_the_loss_fall(example: Example) -> None:
    loader = wdsprep.load(example.folder / "latents", global_batch=4, epochs=3)
    assert len({batch["shape"] for batch in loader}) > 1
    assert [int(step) for step, _loss in example.losses] == [*range(1, STEPS + 1)]
    losses = [float(loss) for _step, loss in example.losses]
    assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])


@needs_trainers
@pytest.mark.parametrize("example", ["lora_sdxl", "kontext"], indirect=True)
def test_killed_and_launched_again_it_comes_to_the_same_weights(example: Example) -> None:
    """In the middle of an epoch, with half a checkpoint beside the last whole one."""
    dies = Interrupt(at=f"step {KILLED} of", signum=signal.SIGKILL)
    run(example, "killed", dies)
    out = example.folder / "killed"
    assert [path.name for path in out.iterdir()] == [f"checkpoint-{SAVED:08d}"]
    (out / "checkpoint.part").mkdir()
    (out / "checkpoint.part/optimizer.bin").write_bytes(b"cut")
    again = launched if example.family == "lora_sdxl" else run
    said = again(example, "killed")
    assert f"going on from {out / f'checkpoint-{SAVED:08d}'}" in said
    assert LOSS.findall(said) == example.losses[SAVED:]
    assert (out / WEIGHTS).read_bytes() == (example.folder / "whole" / WEIGHTS).read_bytes()
    assert {path.name for path in out.iterdir()} == {
        f"checkpoint-{STEPS:08d}",
        f"samples-{STEPS:08d}.png",
        "samples.png",
        WEIGHTS,
    }


@needs_trainers
def test_the_pipeline_loads_the_lora_and_draws_with_it(example: Example) -> None:
    out = example.folder / "whole"
    trained = load_file(out / WEIGHTS)
    assert all(value.any() for value in trained.values())
    with quiet():
        pipeline = pipeline_class(FAMILIES[example.family]).from_pretrained(
            str(example.folder / "model")
        )
        pipeline.set_progress_bar_config(disable=True)
        size = {"max_area": 64 * 64} if example.family == "kontext" else {}
        image = {"image": Image.new("RGB", (64, 64))} if example.family in EDITED else {}
        before = drawn(pipeline, **image, **size)
        pipeline.load_lora_weights(str(out))
        (adapters,) = pipeline.get_list_adapters().values()
        assert len(adapters) == 1
        assert not np.array_equal(before, drawn(pipeline, **image, **size))
    for name, count in (("samples.png", 2), (f"samples-{STEPS:08d}.png", 4)):
        with Image.open(out / name) as image:
            assert image.width > (count - 1) * image.height
            assert len(set(image.convert("L").tobytes())) > 20


@needs_trainers
@pytest.mark.parametrize("example", ["lora_sdxl"], indirect=True)
def test_the_state_of_a_loader_goes_into_checkpoints_of_accelerate(
    example: Example, tmp_path: Path
) -> None:
    """As the page says it; the next step after loading is the one after saving."""
    ((_kind, code),) = blocks(PAGE, "python")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/latents-256").symlink_to(example.folder / "latents")
    (tmp_path / "page.py").write_text(code)
    own = {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    program = sys.executable, "-W", "ignore", "page.py"
    done = ran(*program, cwd=tmp_path, env=os.environ | own)
    options: Any = {"global_batch": 2, "epochs": None, "drop_text": 0.1, "step": 3}
    fourth = next(iter(wdsprep.load(example.folder / "latents", **options)))
    assert done.stdout == f"3 {fourth['key']}\n"


EDITS = ("FluxKontext", "QwenImageEdit", "QwenImageEditPlus")


@needs_trainers
@pytest.mark.parametrize("name", EDITS)
def test_a_step_of_edits_shows_the_network_what_the_pipeline_shows_it(
    name: str, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, places, shapes, times and text as in the first step of its own loop."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    import lora_edit

    count = 2 if name == "QwenImageEditPlus" else 1
    words = ["lora_edit", "nothing", "--model", str(family(name)), "--guidance", "3.5"]
    words += ["--references", ",".join(["source", "source_1"][:count])]
    monkeypatch.setattr(sys, "argv", words)
    training = lora_edit.training_for(lora_edit.parse())
    with quiet():
        pipeline = pipeline_class(name).from_pretrained(
            str(family(name)), torch_dtype=torch.float32
        )
    shown: list[dict[str, Any]] = []
    encoded: list[torch.Tensor] = []

    def forward(**inputs: Any) -> Any:
        shown.append(inputs)
        raise InterruptedError

    def encode_image(**inputs: Any) -> torch.Tensor:
        encoded.append(type(pipeline)._encode_vae_image(pipeline, **inputs))
        return encoded[-1]

    monkeypatch.setattr(pipeline.transformer, "forward", forward)
    monkeypatch.setattr(pipeline, "_encode_vae_image", encode_image)
    noisy = torch.randn(1, pipeline.transformer.config.in_channels // 4, 8, 12)
    side = pipeline.vae_scale_factor
    images = [Image.new("RGB", (80 + 40 * n, 60), (9, 99, 200)) for n in range(count)]
    text = {"latents": lora_edit.packed(noisy), "num_inference_steps": 1, "guidance_scale": 3.5}
    if "Qwen" in name:
        del text["guidance_scale"]
    sizes = training.size_inputs(8 * side, 12 * side)
    image = images if count > 1 else images[0]
    with pytest.raises(InterruptedError), torch.inference_mode():
        pipeline(image=image, prompt="a cat", **text, **sizes)
    (wanted,) = shown
    batch = {"latent": noisy, "emb": wanted["encoder_hidden_states"]}
    if "Qwen" in name:
        batch["emb_mask"] = torch.ones(batch["emb"].shape[:2], dtype=torch.bool)
        assert wanted.pop("encoder_hidden_states_mask") is None  # as all of it counts
    else:
        batch["pooled"] = wanted["pooled_projections"]
    for number, latents in enumerate(encoded):
        batch[("source", "source_1")[number]] = latents.reshape(1, -1, *latents.shape[-2:])
    with pytest.raises(InterruptedError):
        training.predict(pipeline.transformer, noisy, wanted["timestep"].float(), batch)
    found = shown[1]
    assert found.pop("encoder_hidden_states_mask", batch.get("emb_mask")) is batch.get("emb_mask")
    for option in ("joint_attention_kwargs", "attention_kwargs", "return_dict"):
        wanted.pop(option, None)
    assert found.keys() == wanted.keys()
    for option, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[option], value), option
        else:
            assert found[option] == value, option


@needs_trainers
@pytest.mark.parametrize("family", ["sdxl", "flux", "kontext", "qwen-edit"])
def test_a_small_pipeline_to_try_them_on_is_one_command(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is made by a process, the others in this one."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import tiny_pipeline

    words = [str(EXAMPLES / "tiny_pipeline.py"), family, str(tmp_path / "tiny")]
    monkeypatch.setattr(sys, "argv", words)
    if family == "sdxl":
        ran(sys.executable, "-W", "ignore", *words, cwd=tmp_path)
    else:
        tiny_pipeline.main()
    index = json.loads((tmp_path / "tiny/model_index.json").read_text())
    name = FAMILIES.get(family) or FAMILIES[f"lora_{family}"]
    assert index["_class_name"] == f"{name}Pipeline"
    with pytest.raises(SystemExit, match="2"):
        tiny_pipeline.main()
    assert "tiny is there already: choose another folder" in capsys.readouterr().err


def drawn(pipeline: Any, **more: Any) -> Any:
    random = torch.Generator().manual_seed(0)
    how = {"height": 64, "width": 64, "num_inference_steps": 1, "output_type": "np", **more}
    return pipeline(prompt="a cat", generator=random, **how).images


PHASES = (("latents-256", 8), ("latents-512", 16))
TRAINER_STEPS = (9, 3)
TRAINER_SAVED, TRAINER_KILLED = 4, 7
TRAINER_OPTIONS = f"--steps 9,3 --batch 4 --width 8 --save-every {TRAINER_SAVED}".split()
Losses = list[tuple[str, str, float]]


def trainer(
    folder: Path,
    out: str,
    interrupt: Interrupt | None = None,
    *,
    more: Sequence[str] = (),
    **environment: str,
) -> contextlib.AbstractContextManager[Trainer]:
    words = [*(name for name, _side in PHASES), "--out", out, *TRAINER_OPTIONS, *more]
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
        victim.wait_for(f"phase 0 step {TRAINER_KILLED} ")
        victim.process.kill()
        whole.end()
    return losses_of(folder / "whole")


def test_a_run_leaves_losses_a_plot_and_grids_of_samples(undisturbed: Losses, folder: Path) -> None:
    wanted = [
        (str(n), str(step + 1)) for n, count in enumerate(TRAINER_STEPS) for step in range(count)
    ]
    assert [(phase, step) for phase, step, _loss in undisturbed] == wanted
    assert undisturbed[-1][2] < undisturbed[0][2]
    for name in ("losses", "samples-64", "samples-128"):
        with Image.open(folder / f"whole/{name}.png") as image:
            assert len(set(image.convert("L").tobytes())) > 20
    (told,) = (folder / "runs/whole").iterdir()
    points, settings = curves_of(told)
    step, loss = points["loss"][-1]
    assert (step, loss) == (sum(TRAINER_STEPS), pytest.approx(undisturbed[-1][2], rel=1e-6))
    assert "    batch: 4\n" in settings


def test_killed_and_run_again_it_has_the_losses_of_an_undisturbed_run(
    undisturbed: Losses, folder: Path
) -> None:
    """Also where the checkpoint says that its tensors were on a GPU, and there is none."""
    assert losses_of(folder / "killed") == undisturbed[:TRAINER_SAVED]
    save_as_on_a_gpu(folder / "killed/checkpoint.pt")
    with trainer(folder, "killed") as again:
        again.end()
    assert losses_of(folder / "killed") == undisturbed


@pytest.mark.parametrize("folder", [UNET], indirect=True)
def test_ctrl_c_saves_the_step_under_way_and_says_how_to_go_on(
    undisturbed: Losses, folder: Path
) -> None:
    ctrl_c = Interrupt(at=f"phase 0 step {TRAINER_SAVED + 1} ", signum=signal.SIGINT)
    with trainer(folder, "stopped", ctrl_c) as stopped:
        stopped.wait_for(
            f"saved at phase 0 step {TRAINER_SAVED + 2}: run the same command to go on"
        )
        stopped.end(130)
    assert losses_of(folder / "stopped") == undisturbed[: TRAINER_SAVED + 2]


@pytest.mark.parametrize("folder", [TRANSFORMER], indirect=True)
def test_two_ranks_have_the_losses_of_one_and_stop_together(
    undisturbed: Losses, folder: Path
) -> None:
    world = world_of(2)
    for code in (130, 0):
        with trainer(folder, "ranks", RANK="1", **world) as second:
            last_saved = f"phase 0 step {TRAINER_SAVED} " if code else "never"
            asks = Interrupt(at=last_saved, signum=signal.SIGTERM, pid=second.process.pid)
            with trainer(folder, "ranks", asks, RANK="0", **world) as first:
                first.end(code)
                second.end(code)
        assert (len(losses_of(folder / "ranks")) == sum(TRAINER_STEPS)) == (code == 0)
    found = losses_of(folder / "ranks")
    assert [row[:2] for row in found] == [row[:2] for row in undisturbed]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in undisturbed], rel=1e-4)


@pytest.mark.parametrize(
    ("gpus", "ranks", "rank", "wanted"),
    [
        (0, 2, 1, (torch.device("cpu"), "gloo")),
        (1, 1, 0, (torch.device("cuda:0"), "nccl")),
        (4, 4, 3, (torch.device("cuda:3"), "nccl")),
        (1, 2, 0, None),
    ],
)
def test_each_rank_has_a_gpu_of_its_own_or_is_refused_and_all_the_cpu_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    ranks: int,
    rank: int,
    wanted: tuple[torch.device, str] | None,
) -> None:
    """Ranks are refused before any of them waits."""
    pretend_cuda(monkeypatch, is_available=gpus > 0, device_count=gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_example

    if wanted is None:
        with pytest.raises(SystemExit, match=r"2 ranks .* 1 GPU: give --nproc-per-node 1, or "):
            train_example.place()
    else:
        assert train_example.place() == wanted


NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
CODES = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
LOOKED_AT = """
assert packed.manifest.complete and encoded.manifest.complete
assert packed.manifest.samples == encoded.manifest.samples == 12
assert len(batches) == 3
page = Path("report.html").read_text()
assert page.count("data:image/") > 24  # the photos, and what the latents decode to
assert "a disc of the colour" in page
"""
DISPLAY = """
import sys
import types
sys.modules["IPython"] = ipython = types.ModuleType("IPython")
ipython.get_ipython = lambda: None
sys.modules["IPython.display"] = display = types.ModuleType("IPython.display")
display.IFrame = lambda path, **size: print("shown:", path)
"""
"""The part of IPython that a notebook has by itself."""


def test_its_cells_run_in_their_order(tmp_path: Path) -> None:
    """In one program, as a kernel runs them."""
    program = f"{FIND_TESTS}\n" + "\n\n".join([DISPLAY, *CODES, LOOKED_AT])
    (tmp_path / "cells.py").write_text(program)
    done = ran(sys.executable, "-W", "ignore", "cells.py", cwd=tmp_path)
    assert done.stdout.count("a disc of the colour") == 3
    assert "shown: report.html" in done.stdout


def test_it_is_kept_without_what_it_printed() -> None:
    codes = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert len(codes) == len(CODES) > 3
    assert not any(cell["outputs"] or cell["execution_count"] for cell in codes)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
