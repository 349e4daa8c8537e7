"""The LoRA examples: killed and run again in two processes, they end with the same weights."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import wdsprep
from tests.kit.encodes import encode_here, packed, pictures
from tests.kit.example_trainer import Interrupt, running, world_of
from tests.kit.families.folders import pipeline_class, quiet
from tests.kit.paths import EXAMPLES, ROOT, blocks

MISSING = [name for name in ("accelerate", "peft") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed: run tools/venv"),
]

FAMILIES = {"lora_sdxl": "StableDiffusionXL", "lora_flux": "Flux"}
PAGE = ROOT / "wdsprep/loading/fine-tuning.md"
WEIGHTS = "pytorch_lora_weights.safetensors"
STEPS, SAVED, KILLED = 16, 5, 8
OPTIONS = ["--steps", str(STEPS), "--save-every", str(SAVED), "--batch", "4", "--rate", "1e-2"]
OPTIONS += ["--rank", "4", "--sampling-steps", "2", "--prompt", "a cat", "--prompt", "a dog"]
OPTIONS += ["--warm-up", "2", "--schedule", "cosine", "--log-every", "1"]
OPTIONS += ["--sample-every", str(STEPS)]
OF_FAMILY = {"lora_sdxl": ["--min-snr", "5"], "lora_flux": []}
WORLD = {"LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
LOSS = re.compile(rf"^step (\d+) of {STEPS}: loss ([\d.]+), mean .* left$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Example:
    program: str
    folder: Path
    """With the model, the latents, and `whole`, to which a run in peace has come."""
    losses: list[tuple[str, str]]

    @property
    def words(self) -> list[str]:
        return [
            str(self.folder / "latents"),
            "--model",
            str(self.folder / "model"),
            *OPTIONS,
            *OF_FAMILY[self.program],
        ]


@pytest.fixture(scope="module", params=FAMILIES)
def example(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, family: Any
) -> Example:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "model").symlink_to(family(FAMILIES[request.param]))
    images = packed(pictures(folder / "pictures", range(24)), folder / "images")
    how = {"model": str(folder / "model"), "shapes": "nearest:16,2"}
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
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                running(
                    example.program,
                    example.folder,
                    words,
                    None if rank else interrupt,
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    **world,
                )
            )
            for rank in range(2)
        )
        while True:
            try:
                said += first.said.recv()
            except EOFError:
                break
        first.end(-signal.SIGKILL if interrupt else 0)
        if not interrupt:
            second.end()
    return said


def launched(example: Example, out: str) -> str:
    """Train in two processes as `accelerate launch` starts them; return what they said."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    launch += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    program = [str(EXAMPLES / f"{example.program}.py"), *example.words]
    own = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launch, *program, "--out", str(example.folder / out)],
        env={**os.environ, **own, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_images_of_several_shapes_make_the_loss_fall(example: Example) -> None:
    loader = wdsprep.load(example.folder / "latents", global_batch=4, epochs=3)
    assert len({batch["shape"] for batch in loader}) > 1
    assert [int(step) for step, _loss in example.losses] == [*range(1, STEPS + 1)]
    losses = [float(loss) for _step, loss in example.losses]
    assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])


def test_killed_and_launched_again_it_comes_to_the_same_weights(example: Example) -> None:
    """In the middle of an epoch, with half a checkpoint beside the last whole one."""
    dies = Interrupt(at=f"step {KILLED} of", signum=signal.SIGKILL)
    run(example, "killed", dies)
    out = example.folder / "killed"
    assert [path.name for path in out.iterdir()] == [f"checkpoint-{SAVED:08d}"]
    (out / "checkpoint.part").mkdir()
    (out / "checkpoint.part/optimizer.bin").write_bytes(b"cut")
    again = launched if example.program == "lora_sdxl" else run
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


def test_the_pipeline_loads_the_lora_and_draws_with_it(example: Example) -> None:
    out = example.folder / "whole"
    trained = load_file(out / WEIGHTS)
    assert all(value.any() for value in trained.values())
    with quiet():
        pipeline = pipeline_class(FAMILIES[example.program]).from_pretrained(
            str(example.folder / "model")
        )
        pipeline.set_progress_bar_config(disable=True)
        before = drawn(pipeline)
        pipeline.load_lora_weights(str(out))
        (adapters,) = pipeline.get_list_adapters().values()
        assert len(adapters) == 1
        assert not np.array_equal(before, drawn(pipeline))
    for name, count in (("samples.png", 2), (f"samples-{STEPS:08d}.png", 4)):
        with Image.open(out / name) as image:
            assert image.width > (count - 1) * image.height
            assert len(set(image.convert("L").tobytes())) > 20


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
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "page.py"],
        cwd=tmp_path,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    options: Any = {"global_batch": 2, "epochs": None, "drop_text": 0.1, "step": 3}
    fourth = next(iter(wdsprep.load(example.folder / "latents", **options)))
    assert done.stdout == f"3 {fourth['key']}\n"


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_a_small_pipeline_to_try_them_on_is_one_command(family: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "tiny_pipeline.py"), family, "tiny"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300, check=True)
    index = json.loads((tmp_path / "tiny/model_index.json").read_text())
    assert index["_class_name"] == f"{FAMILIES[f'lora_{family}']}Pipeline"
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300, check=False)
    assert again.returncode == 2
    assert b"tiny is there already: choose another folder" in again.stderr


def drawn(pipeline: Any) -> Any:
    random = torch.Generator().manual_seed(0)
    how = {"height": 64, "width": 64, "num_inference_steps": 1, "output_type": "np"}
    return pipeline("a cat", generator=random, **how).images
