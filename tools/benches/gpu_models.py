"""What `tools/bench gpu` does in processes of its own: whole runs, VAEs alone, and checks."""

import hashlib
import io
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.benches import note, took
from tools.benches.encode import encode_apart, photo

if TYPE_CHECKING:
    import torch

    from wdsprep.encoding.models.encoder import LatentEncoder
    from wdsprep.encoding.models.find_model import Model
    from wdsprep.encoding.recipe_options import Recipe

US, COMPILED, CONTIGUOUS, THEIRS = WHO = (
    "wdsprep's network",
    "wdsprep's network, --compile",
    "wdsprep's network, contiguous",
    "diffusers, vae.encode",
)
CAPTIONS = ("a cat", "a dog that sleeps on a red sofa", "", "one, two, three " * 40)
NOISE = (16, 64, 64)


def run_apart(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr.decode(errors='replace')[-3000:]}")


def make(
    name: str, folder: str, towers: Mapping[str, Mapping[str, Any]], vae: Mapping[str, Any]
) -> None:
    import torch

    from tools.benches.encode_peers import DEVICE, make_pipeline

    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    make_pipeline(name, Path(folder), towers, vae, dtype)


def whole(home: str, model: str, count: int, resolution: int, batch: int, workers: int) -> None:
    """Time `encode` from the first batch to the last."""
    took(encode_apart(home, count, resolution, model=model, batch_size=batch, workers=workers))


def tight(home: str, model: str, count: int, resolution: int, batch: int) -> None:
    """Encode where batches of this size need more memory than there is."""
    from wdsprep.encoding import encode as encoding

    encoding.make_encoder = make_tight
    took(encode_apart(home, count, resolution, model=model, batch_size=batch, workers=1))


def make_tight(model: "Model", recipe: "Recipe", device: str) -> "LatentEncoder":
    """Make an encoder that lacks memory: on a GPU really, on a CPU by what it raises."""
    import torch

    from wdsprep.encoding.models.batch_size import peak_nbytes
    from wdsprep.encoding.models.encoder import LatentEncoder

    made = LatentEncoder(model, recipe, torch.device(device))
    if made.device.type == "cuda":
        room = torch.cuda.memory_reserved() + peak_nbytes(12, recipe.resolution, made.itemsize)
        torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
        return made
    plain = made.encode_images

    def encode_images(pixels: "torch.Tensor", *rest: Any, **options: Any) -> Any:
        if len(pixels) > 2:
            raise torch.OutOfMemoryError("out of memory, as it was made to be")
        return plain(pixels, *rest, **options)

    made.encode_images = encode_images  # type: ignore[method-assign]
    return made


def vae_loop(who: str, model: str, side: int, batch: int, seconds: float) -> None:
    from tools.benches.encode_peers import seconds_of

    took(seconds_of(_loop(who, model, side)(batch), least_s=seconds))


def sweep(model: str, side: int, batches: Sequence[int], seconds: float) -> None:
    """Note the rate of each size of a batch."""
    import torch

    from tools.benches.encode_peers import DEVICE, seconds_of

    make_run = _loop(US, model, side)
    for batch in batches:
        try:
            each = seconds_of(make_run(batch), least_s=seconds)
        except torch.OutOfMemoryError:
            note(f"batch {batch}: more than fits")
            continue
        peak = f", {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if DEVICE == "cuda" else ""
        note(f"batch {batch}: {batch / each:,.1f} images/s{peak}")


def _loop(who: str, model: str, side: int) -> Callable[[int], Callable[[], "list[torch.Tensor]"]]:
    """Return what makes, for a size, the launch of a batch."""
    import torch

    from tools.benches.encode_peers import DEVICE

    encoder = _encoder(model, side, text="none", compile=who == COMPILED)
    network = encoder._moments.get(exact=False)
    if who == CONTIGUOUS:
        network.layout = torch.contiguous_format
        network.to(memory_format=torch.contiguous_format)
    theirs = _their_vae(model, network.dtype) if who == THEIRS else None

    def make_run(batch: int) -> Callable[[], "list[torch.Tensor]"]:
        pixels = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8, device=DEVICE)
        noise = torch.arange(batch, device=DEVICE)
        if theirs is not None:
            return lambda: [theirs(pixels)]
        return lambda: list(encoder.encode_images(pixels, noise).arrays.values())

    return make_run


def _their_vae(model: str, dtype: "torch.dtype") -> "Callable[[torch.Tensor], torch.Tensor]":
    """Return what diffusers makes of pixels, as its pipelines call it."""
    import json

    import diffusers
    import torch

    from tools.benches.encode_peers import DEVICE

    kind = json.loads(Path(model, "vae/config.json").read_text())["_class_name"]
    vae = getattr(diffusers, kind).from_pretrained(model, subfolder="vae", torch_dtype=dtype)
    vae = vae.to(DEVICE).eval()
    is_of_videos = any(isinstance(part, torch.nn.Conv3d) for part in vae.modules())

    def encoded(pixels: "torch.Tensor") -> "torch.Tensor":
        images = 2 * (pixels.to(dtype) / 255) - 1
        made = vae.encode(images.unsqueeze(2) if is_of_videos else images)
        found: torch.Tensor = (
            made.latent_dist.sample() if hasattr(made, "latent_dist") else made.latent
        )
        return found.half()

    return encoded


def _encoder(model: str, side: int, **options: Any) -> "LatentEncoder":
    import torch

    from tools.benches.encode_peers import DEVICE
    from wdsprep.encoding.models.encoder import LatentEncoder
    from wdsprep.encoding.models.find_model import find_model
    from wdsprep.encoding.models.load_networks import silence_libraries
    from wdsprep.encoding.recipe_defaults import settle_recipe
    from wdsprep.encoding.recipe_options import Recipe

    silence_libraries()
    wanted = Recipe(resolution=side, **options)
    recipe, found = settle_recipe(wanted, find_model(model, text=wanted.text), DEVICE)
    return LatentEncoder(found, recipe, torch.device(DEVICE))


def check(model: str, side: int, count: int) -> None:
    """Note what is equal, and how far half precisions are from fp32."""
    import torch

    with torch.inference_mode():
        _check_noise()
        pixels = _pictures(count, side)
        exact = _made(model, side, "fp32", pixels)
        for dtype in ("fp16", "bf16"):
            made = _made(model, side, dtype, pixels)
            for name, array in made.items():
                note(f"{dtype} beside fp32, {name}: {_apart(array, exact[name])}")
        _check_again(model, side, pixels)


def _check_noise() -> None:
    import torch

    from tools.benches.encode_peers import DEVICE
    from wdsprep.encoding.models.noise import noise_keys, normal

    keys = noise_keys(0, [f"{number:06d}" for number in range(64)])
    here, there = normal(keys, NOISE), normal(keys.to(DEVICE), NOISE).cpu()
    digest = hashlib.sha256(there.numpy().astype("<f4").tobytes()).hexdigest()
    same = "the bits of the CPU" if torch.equal(here, there) else "NOT the bits of the CPU"
    note(f"noise on {DEVICE}: {same}, {digest[:16]}")


def _pictures(count: int, side: int) -> "torch.Tensor":
    import torch
    from PIL import Image

    from tools.benches.encode_peers import DEVICE

    opened = [Image.open(io.BytesIO(photo(side, seed))) for seed in range(count)]
    return torch.from_numpy(np.stack(opened)).permute(0, 3, 1, 2).contiguous().to(DEVICE)


def _made(model: str, side: int, dtype: str, pixels: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """Return what a precision makes of images and captions, in fp32 and before it is stored."""
    import torch

    encoder = _encoder(model, side, dtype=dtype, latents="mean")
    noise = torch.zeros(len(pixels), dtype=torch.int64, device=pixels.device)
    rows = dict(encoder.image_rows(pixels, noise).arrays)
    rows |= encoder.text_rows(encoder.tokens(CAPTIONS)).arrays
    return {name: array.float().cpu() for name, array in rows.items()}


def _apart(made: "torch.Tensor", exact: "torch.Tensor") -> str:
    error = (made - exact).double()
    size = exact.double().square().mean().sqrt()
    share = (error.square().mean().sqrt() / size).item()
    return (
        f"{share:.2e} of its deviation in the mean, {(error.abs().max() / size).item():.2e} at most"
    )


def _check_again(model: str, side: int, pixels: "torch.Tensor") -> None:
    """Compare the same batch once more, and images one by one."""
    import torch

    encoder = _encoder(model, side, latents="mean", text="none")
    noise = torch.zeros(len(pixels), dtype=torch.int64, device=pixels.device)

    def latents(some: "torch.Tensor") -> "torch.Tensor":
        rows = encoder.image_rows(some, noise[: len(some)])
        return next(iter(rows.arrays.values())).float().cpu()

    first = latents(pixels)
    runs = [torch.equal(first, latents(pixels)) for _ in range(5)]
    note(f"the same batch again: {sum(runs)} of {len(runs)} times the same bits")
    alone = torch.cat([latents(pixels[number : number + 1]) for number in range(len(pixels))])
    note(f"each image alone, beside a batch of {len(pixels)}: {_apart(alone, first)}")
