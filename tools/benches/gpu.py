"""What a GPU makes of `encode`: rates of whole runs and of networks alone, and what it computes.

`encode` with SD2, SDXL and Flux, in their real shapes with random weights in bfloat16, beside a
loop of the pipeline's own `encode_prompt` and VAE on pixels that are ready. The loop has the batch
and the layout of memory of `encode`, and asks for a batch before it has taken the one before. Then
the VAEs alone: layouts of memory, `--compile`, batch sizes, one of videos and a DC.
Then what is to be equal or close: noise, half precisions, one run and the next; and memory that
does not suffice, and two workers on one GPU. All takes some 8 minutes on one H100, with neither
network nor Ray. `--small` tries all of it anywhere, with tiny networks: its figures say nothing of
speed.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tools.benches import Group, Rival, Role, call
from tools.benches import gpu_models as models
from tools.benches.encode import family_loop, make_images

CLIP_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
CLIP_H = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
}
CLIP_BIG_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
}
T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
QWEN = {"base_dim": 96, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
SANA = {"attention_head_dim": 32} | {
    f"{coder}coder_{name}": value
    for coder, layers in (("en", [2, 2, 2, 3, 3, 3]), ("de", [1] * 6))
    for name, value in {
        "block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
        "block_out_channels": [128, 256, 512, 512, 1024, 1024],
        "layers_per_block": layers,
        "qkv_multiscales": [[], [], [], [5], [5], [5]],
    }.items()
}
KL = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32}
FAMILIES = {
    "sd2": ("StableDiffusion", {"text_encoder": CLIP_H}, KL),
    "sdxl": ("StableDiffusionXL", {"text_encoder": CLIP_L, "text_encoder_2": CLIP_BIG_G}, KL),
    "flux": ("Flux", {"text_encoder": CLIP_L, "text_encoder_2": T5_XXL}, KL),
    "video": ("QwenImage", {}, QWEN),
    "dc": ("Sana", {}, SANA),
}
"""The pipeline, its towers, and its VAE."""
PHOTO_SIDE = {256: 512, 512: 1024, 1024: 1024}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is done: on an H100, some ten seconds of each."""

    runs: tuple[tuple[str, int, int, int], ...] = (
        ("sd2", 256, 12_000, 128),
        ("sdxl", 512, 3_600, 32),
        ("sdxl", 1024, 900, 8),
        ("flux", 512, 1_200, 32),
    )
    """Family, resolution, images and batch of each run."""
    side: int = 256
    batch: int = 128
    batches: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256)
    large: tuple[int, int] = (512, 16)
    """Side and batch of the VAEs of other kinds."""
    seconds: float = 5.0
    """Of a loop."""
    tight: tuple[int, int] = (1_000, 64)
    """Images and batch where memory does not suffice."""

    def scaled(self, scale: float) -> "Sizes":
        runs = tuple(
            (name, side, max(6, round(n * scale)), size) for name, side, n, size in self.runs
        )
        return replace(self, runs=runs, seconds=self.seconds * scale)


SMALL = Sizes(
    runs=(("sd2", 32, 16, 4), ("sdxl", 64, 12, 4), ("flux", 64, 12, 4)),
    side=64,
    batch=4,
    batches=(1, 4),
    large=(64, 2),
    seconds=0.2,
    tight=(24, 8),
)


def groups(home: Path, scale: float, *, small: bool = False) -> Iterator[Group]:
    import torch

    if not small and not torch.cuda.is_available():
        print("gpu: torch finds no GPU here; --small tries this benchmark without", file=sys.stderr)
        return
    sizes = SMALL if small else Sizes().scaled(scale)
    made = Inputs(home, sizes, small=small)
    for run in sizes.runs:
        yield _run(made, *run)
    yield from _alone(made)
    yield from _checks(made)


class Inputs:
    """Models and photos that are made when a group first needs them."""

    def __init__(self, home: Path, sizes: Sizes, *, small: bool) -> None:
        self.home, self.sizes, self.small = home, sizes, small
        self.model = cache(self._model)
        self.photos = cache(self._photos)

    def path(self, name: str) -> Path:
        return self.home / name

    def prepare(self, *names: str) -> Callable[[], object]:
        """Names are those of families, or numbers for the sides of photos."""
        return lambda: [self.photos(int(n)) if n.isdigit() else self.model(n) for n in names]

    def side_of(self, resolution: int) -> int:
        return PHOTO_SIDE.get(resolution, 256)

    def _model(self, name: str) -> None:
        kind, towers, vae = FAMILIES[name]
        words = (
            [kind, self.path(name), {}, {}] if self.small else [kind, self.path(name), towers, vae]
        )
        models.run_apart(call(models.make, *words))

    def _photos(self, side: int) -> None:
        runs = self.sizes.runs
        count = max(n for _, resolution, n, _ in runs if self.side_of(resolution) == side)
        place = self.path(str(side))
        place.mkdir()
        make_images(place, max(count, self.sizes.tight[0]), side)


def _run(made: Inputs, family: str, resolution: int, count: int, batch: int) -> Group:
    limit = f"encode_prompt and VAE in a loop, batch {batch}"
    side, model = str(made.side_of(resolution)), made.path(family)
    place = made.path(side)
    return Group(
        name=f"gpu-{family}-{resolution}",
        title=f"shapes of {family} at {resolution} on a GPU, start left out",
        unit="images",
        count=count,
        rounds=1,
        prepare=made.prepare(family, side),
        rivals=[
            Rival(
                name="wdsprep encode, local",
                command=call(models.whole, place, model, count, resolution, batch, 1),
                role=Role.OURS,
                leaves=place / "latents",
            ),
            Rival(
                name=limit,
                command=call(family_loop, model, count, batch, resolution, made.sizes.seconds),
                role=Role.LIMIT,
            ),
        ],
        targets={limit: 0.9},
    )


def _alone(made: Inputs) -> Iterator[Group]:
    """VAEs on pixels that are ready."""
    side, batch, seconds = made.sizes.side, made.sizes.batch, made.sizes.seconds
    large, few = made.sizes.large

    def group(name: str, title: str, model: str, size: int, rivals: list[Rival]) -> Group:
        return Group(
            name=f"gpu-{name}",
            title=title,
            unit="images",
            count=size,
            rounds=1,
            prepare=made.prepare(model),
            rivals=rivals,
        )

    def rival(who: str, model: str, at: int, size: int, role: Role = Role.RIVAL) -> Rival:
        command = call(models.vae_loop, who, made.path(model), at, size, seconds)
        return Rival(name=who, command=command, role=role)

    us, compiled, contiguous, theirs = models.WHO
    both = [rival(us, "sd2", side, batch, Role.OURS), rival(contiguous, "sd2", side, batch)]
    yield group("layouts", f"the VAE of SD2 at {side}, batch {batch}", "sd2", batch, both)
    both = [rival(us, "sd2", side, batch, Role.OURS), rival(compiled, "sd2", side, batch)]
    yield group("compile", f"the VAE of SD2 at {side}, compiled", "sd2", batch, both)
    sweep = call(models.sweep, made.path("sd2"), side, list(made.sizes.batches), seconds / 2)
    one = [Rival(name="wdsprep's network", command=sweep, role=Role.OURS)]
    yield group("batches", f"the VAE of SD2 at {side}, by batch", "sd2", 0, one)
    for model, kind in (("video", "a VAE of videos"), ("dc", "a DC VAE")):
        both = [rival(us, model, large, few, Role.OURS), rival(theirs, model, large, few)]
        yield group(model, f"{kind} at {large}, batch {few}", model, few, both)


def _checks(made: Inputs) -> Iterator[Group]:
    """What is to be equal or close, and what is to go on."""
    sizes = made.sizes
    _, resolution, count, batch = sizes.runs[0]
    side, model = str(made.side_of(resolution)), made.path("sd2")
    place, (few, too_many) = made.path(side), sizes.tight
    check = call(models.check, model, sizes.side, min(8, sizes.batch))
    tight = call(models.tight, place, model, few, resolution, too_many)

    def ours(name: str, command: list[str]) -> Rival:
        return Rival(name=name, command=command, role=Role.OURS, leaves=place / "latents")

    def group(name: str, title: str, rivals: list[Rival], count: int = 0) -> Group:
        return Group(
            name=f"gpu-{name}",
            title=title,
            unit="images",
            count=count,
            rounds=1,
            prepare=made.prepare("sd2", side),
            rivals=rivals,
        )

    yield group("checks", "noise, precisions, equality", [ours("wdsprep's networks", check)])
    yield group("memory", "batches that need too much memory", [ours("wdsprep encode", tight)])
    workers = [
        ours(
            f"workers: {number}",
            call(models.whole, place, model, count, resolution, batch, number),
        )
        for number in (1, 2)
    ]
    yield group("workers", f"workers on one GPU, SD2 at {resolution}", workers, count)
