"""What people would write instead of `wdsprep encode`, for `tools/bench encode`: the shape of the
Anyscale guide on Ray Data, a bare loop over the models, and a dummy encoder for our own workers."""

import io
import logging
import os
import shutil
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from wdsprep.dataset.arrays import Field
from wdsprep.encoding.models.base import Encoded, Tokens
from wdsprep.encoding.models.find import TINY
from wdsprep.encoding.recipe import Recipe

CORES = len(os.sched_getaffinity(0))


def guide_pixels(data: bytes, resolution: int) -> np.ndarray:
    """Decode, RGB, shorter side, centre square, [-1, 1]: torchvision's transforms on Pillow."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = resolution / min(image.size)
    size = tuple(max(resolution, round(side * scale)) for side in image.size)
    image = image.resize(size, Image.Resampling.BICUBIC)
    left, top = ((side - resolution) // 2 for side in image.size)
    image = image.crop((left, top, left + resolution, top + resolution))
    levels = np.asarray(image, dtype=np.float32) / 255
    return np.ascontiguousarray(((levels - 0.5) / 0.5).transpose(2, 0, 1))


class Transform:
    """A CPU actor of the guide: fp32 pixels and token ids, which a dummy tokeniser makes."""

    def __init__(self, resolution: int) -> None:
        self._resolution = resolution

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        pixels = [guide_pixels(data, self._resolution) for data in batch["image"]]
        ids = np.zeros((len(pixels), 77), dtype=np.int64)
        return {"pixels": np.stack(pixels), "ids": ids, "caption": batch["caption"]}


class DummyEncoder:
    """The encoder actor at no cost: numbers drawn once, of the right shapes."""

    def __init__(self, resolution: int, batch_size: int) -> None:
        rng, side = np.random.default_rng(0), resolution // 8
        self._latents = rng.normal(size=(batch_size, 4, side, side)).astype(np.float32)
        self._embeddings = rng.normal(size=(batch_size, 77, 1024)).astype(np.float32)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        count = len(batch["pixels"])
        latents, embeddings = self._latents[:count], self._embeddings[:count]
        return {"latent": latents, "emb": embeddings, "caption": batch["caption"]}


def make_parquet(folder: Path, pictures: list[bytes], count: int, *, per_file: int = 64) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    for number, first in enumerate(range(0, count, per_file)):
        rows = range(first, min(count, first + per_file))
        images = [pictures[row % len(pictures)] for row in rows]
        captions = [f"picture number {row} of many" for row in rows]
        table = pa.table({"image": images, "caption": captions})
        pq.write_table(table, folder / f"{number:05d}.parquet")


def start_ray() -> None:
    """Ray, tuned for a small machine and a small table.

    The node has two CPUs more than there are: the actors hold theirs, and reading and writing must
    not wait for them. Blocks are of 16 MB: in those of 128 MB, the default, all images here would
    be one or two, and actors would stand idle.
    """
    import ray
    import ray.data

    ray.init(
        address="local",
        num_cpus=CORES + 2,
        object_store_memory=2 << 30,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    logging.getLogger("ray").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.target_max_block_size = 16 << 20
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def peer_ray(
    source: Path,
    out: Path,
    *,
    resolution: int = 256,
    batch_size: int = 64,
    transformers: int = CORES,
) -> None:
    """Read Parquet, transform, encode, write Parquet: needs `start_ray` once before."""
    import ray.data
    from ray.data import ActorPoolStrategy

    found = ray.data.read_parquet(str(source))
    ready = found.map_batches(
        Transform,
        fn_constructor_args=(resolution,),
        batch_size=batch_size,
        compute=ActorPoolStrategy(size=transformers),
        num_cpus=1,
    )
    encoded = ready.map_batches(
        DummyEncoder,
        fn_constructor_args=(resolution, batch_size),
        batch_size=batch_size,
        compute=ActorPoolStrategy(size=1),
        num_cpus=0.5,
    )
    encoded.write_parquet(str(out), min_rows_per_file=500)


def make_wide(folder: Path) -> Path:
    """`tiny` with twice the channels and three times the layers, random: the model is the work. For
    a GPU the VAE is as wide as SD2's."""
    import diffusers
    import transformers

    transformers.utils.logging.disable_progress_bar()
    shutil.copytree(TINY, folder)
    config = dict(diffusers.AutoencoderKL.load_config(TINY, subfolder="vae"))
    config |= {"block_out_channels": [32, 64, 64, 64], "layers_per_block": 2}
    if torch.cuda.is_available():
        config |= {"block_out_channels": [128, 256, 512, 512], "norm_num_groups": 32}
    diffusers.AutoencoderKL.from_config(config).save_pretrained(folder / "vae")
    text = transformers.CLIPTextConfig.from_pretrained(TINY, subfolder="text_encoder")
    text.update({"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6})
    transformers.CLIPTextModel(text).save_pretrained(folder / "text_encoder")
    return folder


def peer_loop(
    model: str, batches: int, *, resolution: int, batch_size: int, layout: torch.memory_format
) -> float:
    """Seconds to run the VAE and the text encoder on `batches` batches that are ready."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    vae = AutoencoderKL.from_pretrained(model, subfolder="vae").to(device, dtype).eval()
    text = CLIPTextModel.from_pretrained(model, subfolder="text_encoder").to(device, dtype).eval()
    pixels = torch.rand((batch_size, 3, resolution, resolution), device=device, dtype=dtype)
    pixels = (2 * pixels - 1).to(memory_format=layout)
    vae = vae.to(memory_format=layout)
    ids = torch.ones((batch_size, 77), dtype=torch.int64, device=device)

    def run() -> None:
        vae.encode(pixels).latent_dist.parameters.float().cpu()
        text(ids).last_hidden_state.half().cpu()

    with torch.inference_mode():
        run()
        started = time.perf_counter()
        for _ in range(batches):
            run()
        return time.perf_counter() - started


def make_free(_model: object, recipe: Recipe, _device: str) -> "FreeEncoder":
    return FreeEncoder(recipe.resolution)


class FreeEncoder:
    """The same dummy as an encoder of wdsprep: what is left is all that is not the models."""

    def __init__(self, resolution: int) -> None:
        side = resolution // 8
        self.resolution, self.device, self.itemsize = resolution, torch.device("cpu"), 2
        self.is_compiled = self.is_split = False
        self.has_text, self.text_batch_size = True, 0
        self.fields = (
            Field(name="latent.npy", dtype="<f2", shape=(4, side, side)),
            Field(name="emb.npy", dtype="<f2", shape=(77, 1024)),
        )

    @cached_property
    def _numbers(self) -> dict[str, torch.Tensor]:
        return {field.name: torch.randn(field.shape).half() for field in self.fields}

    def tokens(self, captions: Sequence[str]) -> list[Tokens]:
        return [Tokens(caption, count=77) for caption in captions]

    def encode_images(
        self,
        pixels: torch.Tensor,
        noise: torch.Tensor,  # noqa: ARG002
        *,
        exact: bool = False,  # noqa: ARG002
    ) -> Encoded:
        return self._made("latent.npy", len(pixels))

    def encode_texts(self, texts: Sequence[Tokens], *, exact: bool = False) -> Encoded:  # noqa: ARG002
        return self._made("emb.npy", len(texts))

    def _made(self, name: str, count: int) -> Encoded:
        array = self._numbers[name]
        made = {name: array.expand(count, *array.shape)}
        return Encoded(arrays=made, ok=torch.ones(count, dtype=torch.bool))

    def empty(self) -> dict[str, torch.Tensor]:
        return {"emb.npy": self._numbers["emb.npy"]}
