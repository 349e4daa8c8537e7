"""`encode` on a GPU: images a second of SD2, SDXL and Flux, at the sizes that people train at.

Networks have the real shapes and random weights in bfloat16. The photos have 1024 pixels a side,
and the start is left out. The limit is a loop of the pipeline's own `encode_prompt` and VAE, in
bfloat16, on pixels that are ready. Without a GPU there is nothing to measure here.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.benches import Group, Rival, Role, call
from tools.benches.encode import family_loop, make_images, modelled

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
FAMILIES = {
    "SD2": ("StableDiffusion", {"text_encoder": CLIP_H}),
    "SDXL": ("StableDiffusionXL", {"text_encoder": CLIP_L, "text_encoder_2": CLIP_BIG_G}),
    "Flux": ("Flux", {"text_encoder": CLIP_L, "text_encoder_2": T5_XXL}),
}
VAE = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32}
SIZES = {256: (3000, 64), 512: (1500, 32), 1024: (500, 8)}
"""Images of each resolution, and how many the loop takes at a time."""


def groups(home: Path, scale: float) -> Iterator[Group]:
    import torch

    if not torch.cuda.is_available():
        print("gpu: torch finds no GPU here, which this benchmark is for", file=sys.stderr)
        return
    make_images(home, max(6, round(max(count for count, _ in SIZES.values()) * scale)), 1024)
    for name in FAMILIES:
        model = home / name.lower()
        subprocess.run(call(make, name, model), check=True)
        for resolution, (count, batch) in SIZES.items():
            yield _group(home, name, model, resolution, max(6, round(count * scale)), batch)


def _group(home: Path, name: str, model: Path, resolution: int, count: int, batch: int) -> Group:
    limit = f"encode_prompt and VAE in a loop, batch {batch}"
    return Group(
        name=f"gpu-{name.lower()}-{resolution}",
        title=f"shapes of {name} at {resolution} on a GPU, start left out",
        unit="images",
        count=count,
        rounds=2,
        rivals=[
            Rival(
                name="wdsprep encode, local",
                command=call(modelled, home, model, count, resolution),
                role=Role.OURS,
                leaves=home / "latents",
            ),
            Rival(
                name=limit,
                command=call(family_loop, model, count, batch, resolution),
                role=Role.LIMIT,
            ),
        ],
        targets={limit: 0.9},
    )


# --- in a process of its own


def make(name: str, folder: str) -> None:
    import torch

    from tools.benches.encode_peers import make_pipeline

    kind, towers = FAMILIES[name]
    make_pipeline(kind, Path(folder), towers, VAE, torch.bfloat16)
