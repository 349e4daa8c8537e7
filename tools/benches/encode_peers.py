"""What people would write instead of `wdsprep encode`, for `tools/bench encode`: the shape of the
Anyscale guide on Ray Data, a bare loop over the models, and a dummy encoder for our own workers."""

import inspect
import io
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from wdsprep.dataset.npy_arrays import Field
from wdsprep.encoding.models.base import Encoded, Tokens
from wdsprep.encoding.models.device import Encoder
from wdsprep.encoding.models.find_model import TINY
from wdsprep.encoding.recipe_options import Encode

IN_FLIGHT = 2
CORES = len(os.sched_getaffinity(0))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


def make_family(folder: Path) -> Path:
    """Z-Image with random weights: layers as wide as those of Qwen3-0.6B, and a VAE of 16 channels
    which is as wide as that of `make_wide`, so that text and images are both much work."""
    layers = 2
    tower = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
    tower |= {"num_attention_heads": 16, "num_key_value_heads": 8}
    tower |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    vae = {"block_out_channels": [32, 64, 64, 64], "layers_per_block": 2}
    return make_pipeline("ZImage", folder, {"text_encoder": tower}, vae)


def make_pipeline(
    name: str,
    folder: Path,
    towers: Mapping[str, Mapping[str, Any]],
    vae: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> Path:
    """One of the small pipelines of the tests, with networks of these sizes in place of its own."""
    import diffusers
    import transformers

    from tests.kit.families import small
    from wdsprep.encoding.models.load_networks import silence_libraries

    silence_libraries()
    small(name, folder)
    for part, sizes in towers.items():
        config = transformers.AutoConfig.from_pretrained(folder / part)
        config.update(sizes)
        kind = getattr(transformers, config.architectures[0])
        with torch.device(DEVICE):  # a large one takes minutes on a CPU
            made = kind(config).to(dtype)
        made.save_pretrained(folder / part)
    config = dict(diffusers.AutoencoderKL.load_config(folder, subfolder="vae")) | vae
    with torch.device(DEVICE):
        made = getattr(diffusers, config["_class_name"]).from_config(config).to(dtype)
    made.save_pretrained(folder / "vae")
    return folder


Launch = Callable[[], list[torch.Tensor]]
"""Asks the device for a batch."""


def seconds_of(launch: Launch, *, batches: int = 1, least_s: float = 0.0) -> float:
    """Return the time of a batch, once two that do not count have been taken.

    At least so many are taken, for so long. As in a run of `encode`, a GPU has the next batch
    before what it has made of one is on the host.
    """
    with torch.inference_mode():
        for _ in range(2):
            _on_the_way(launch())()
        started, count, waiting = time.perf_counter(), 0, deque[Callable[[], object]]()
        while count < batches or time.perf_counter() - started < least_s:
            waiting.append(_on_the_way(launch()))
            count += 1
            if len(waiting) > IN_FLIGHT:
                waiting.popleft()()
        for wait in waiting:
            wait()
        return (time.perf_counter() - started) / count


def _on_the_way(made: list[torch.Tensor]) -> Callable[[], object]:
    """Send arrays to the host; what is returned waits until they are there."""
    if DEVICE == "cpu":
        return lambda: made
    there = [
        torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
        for each in made
    ]
    event = torch.cuda.Event()
    event.record()
    return lambda: (event.synchronize(), there)


def family_batch(model: str, *, resolution: int, batch_size: int) -> Launch:
    """A pipeline's own `encode_prompt` and VAE, on pixels that are ready."""
    from diffusers import DiffusionPipeline

    from wdsprep.encoding.models.load_networks import silence_libraries

    silence_libraries()
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    index = DiffusionPipeline.load_config(model)
    denoiser = {name: None for name in ("transformer", "unet") if name in index}
    pipeline = DiffusionPipeline.from_pretrained(model, **denoiser, torch_dtype=dtype).to(DEVICE)
    options = {"device": DEVICE, "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    known = inspect.signature(pipeline.encode_prompt).parameters.keys()
    options = {name: options[name] for name in options.keys() & known}
    pixels = torch.rand((batch_size, 3, resolution, resolution), device=DEVICE, dtype=dtype)
    captions = [f"picture number {number} of many" for number in range(batch_size)]

    def launch() -> list[torch.Tensor]:
        latents = pipeline.vae.encode(2 * pixels - 1).latent_dist.sample().half()
        made = pipeline.encode_prompt(list(captions), **options)
        return [latents, *(array.bfloat16() for array in _tensors(made))]

    return launch


def _tensors(made: object) -> Iterator[torch.Tensor]:
    """Those in tuples and lists."""
    if isinstance(made, torch.Tensor):
        yield made
    elif isinstance(made, tuple | list):
        for each in made:
            yield from _tensors(each)


def sd_batch(model: str, *, resolution: int, batch_size: int) -> Launch:
    """The VAE and the text encoder of Stable Diffusion, on pixels and tokens that are ready.

    Pixels have the layout of memory that is the faster one on the device.
    """
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel

    device, dtype = DEVICE, torch.float16 if DEVICE == "cuda" else torch.float32
    vae = AutoencoderKL.from_pretrained(model, subfolder="vae").to(device, dtype).eval()
    text = CLIPTextModel.from_pretrained(model, subfolder="text_encoder").to(device, dtype).eval()
    layout = torch.contiguous_format if DEVICE == "cuda" else torch.channels_last
    pixels = torch.rand((batch_size, 3, resolution, resolution), device=device, dtype=dtype)
    pixels = (2 * pixels - 1).to(memory_format=layout)
    vae = vae.to(memory_format=layout)
    ids = torch.ones((batch_size, 77), dtype=torch.int64, device=device)

    def launch() -> list[torch.Tensor]:
        moments = vae.encode(pixels).latent_dist.parameters.float()
        return [moments, text(ids).last_hidden_state.half()]

    return launch


def make_free(_model: object, recipe: Encode, _device: str) -> "FreeEncoder":
    return FreeEncoder(recipe.resolution, has_images=not recipe.is_of_text)


class FreeEncoder(Encoder):
    """The same dummy as an encoder of wdsprep: what is left is all that is not the models."""

    def __init__(self, resolution: int, *, has_images: bool = True) -> None:
        side = resolution // 8
        self.resolution, self.device, self.itemsize = resolution, torch.device("cpu"), 2
        self.has_text = True
        latent = Field(name="latent.npy", dtype="<f2", shape=(4, side, side))
        emb = Field(name="emb.npy", dtype="<f2", shape=(77, 1024))
        self.fields = (latent, emb) if has_images else (emb,)

        self._drawn: dict[tuple[int, ...], torch.Tensor] = {}

    def tokens(self, captions: Sequence[str], _images: object = ()) -> list[Tokens]:
        return [Tokens(caption, count=77) for caption in captions]

    def encode_images(
        self,
        pixels: torch.Tensor,
        noise: torch.Tensor,  # noqa: ARG002
        *,
        exact: bool = False,  # noqa: ARG002
    ) -> Encoded:
        return self._made("latent.npy", (4, *(side // 8 for side in pixels.shape[2:])), len(pixels))

    def encode_texts(self, texts: Sequence[Tokens], *, exact: bool = False) -> Encoded:  # noqa: ARG002
        return self._made("emb.npy", self.fields[-1].shape, len(texts))

    def _made(self, name: str, shape: tuple[int, ...], count: int) -> Encoded:
        """Numbers that are drawn once."""
        if shape not in self._drawn:
            self._drawn[shape] = torch.randn(shape).half()
        made = {name: self._drawn[shape].expand(count, *shape)}
        return Encoded(arrays=made, ok=torch.ones(count, dtype=torch.bool))

    def empty(self) -> dict[str, torch.Tensor]:
        return {"emb.npy": torch.zeros(self.fields[-1].shape).half()}
