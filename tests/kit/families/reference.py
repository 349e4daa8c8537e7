"""What diffusers alone makes of one caption and of one image, to hold what is stored against.

Text: the pipeline is loaded without denoiser and VAE, and its `encode_prompt` is called with the
defaults of its `__call__`. Outputs have the names that `encode_prompt` returns them by. Images: the
code of the family's image-to-image pipeline, with the noise that is asked for in place of its own;
where a family has none, the inverse of how its pipeline makes latents ready for the decoder.
"""

import ast
import inspect
import textwrap
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor

from tests.kit.families.folders import class_of, denoiser_of, pipeline_class

SECOND_CALL = {
    *("Flux2KleinPipeline", "Krea2Pipeline", "ErnieImagePipeline", "Kandinsky5T2IPipeline")
}
"""their `__call__` guides by default, and calls `encode_prompt` once more, for the text ''"""


def prompt_of(folder: Path, caption: str, **more: Any) -> dict[str, Any]:
    """Of one caption, in fp32 on the CPU, without guidance: outputs by name, the batch of one kept.

    `more` goes to `encode_prompt`, such as `max_sequence_length`. What is None is left out.
    """
    found = _encoded(folder, [caption], guidance=False, **more)
    return {name: value for name, value in found.items() if not name.startswith("negative_")}


def negative_of(folder: Path) -> dict[str, Any] | None:
    """What stands for no caption where the pipeline guides, by the names of `prompt_of`.

    None where its defaults make no use of one, as with Flux.
    """
    if class_of(folder) in SECOND_CALL:
        return prompt_of(folder, "")
    found = _encoded(folder, ["a"], guidance=True)
    negative = {
        name.removeprefix("negative_"): value
        for name, value in found.items()
        if name.startswith("negative_")
    }
    return negative or None


def latent_of(folder: Path, pixels: np.ndarray, *, noise: Tensor | None = None) -> Tensor:
    """Of uint8 pixels (H, W, 3), the latent `(C, h, w)`, normalised and unpacked.

    It is the mean, or with noise (of the shape of the VAE's own latent) mean + deviation * noise.
    """
    name = class_of(folder).removesuffix("Pipeline")
    image = VaeImageProcessor().preprocess(Image.fromarray(pixels))
    with torch.inference_mode():
        found = WAYS[name](_Vae(_vae(folder), noise), image)
    return found.reshape(found.shape[1], *found.shape[-2:])


class _Vae:
    """A VAE whose distribution draws what is asked for."""

    def __init__(self, vae: Any, noise: Tensor | None) -> None:
        self.vae, self.noise, self.config = vae, noise, vae.config
        self.bn = getattr(vae, "bn", None)

    def to(self, *_: Any, **__: Any) -> "_Vae":
        return self

    def encode(self, image: Tensor) -> Any:
        found = self.vae.encode(image)
        if not hasattr(found, "latent_dist"):
            assert self.noise is None, "this VAE has no distribution"
            return found
        drawn = found.latent_dist.mean
        if self.noise is not None:
            drawn = drawn + found.latent_dist.std * self.noise.reshape(drawn.shape)
        given = SimpleNamespace(sample=lambda *_: drawn, mode=lambda: drawn)
        return SimpleNamespace(latent_dist=given)


def _prepared(name: str, vae: _Vae, image: Tensor, **more: Any) -> Tensor:
    """By `prepare_latents` of a pipeline, with a scheduler that adds no noise."""
    scheduler = SimpleNamespace(
        add_noise=lambda latents, *_: latents, scale_noise=lambda latents, *_: latents
    )
    own = SimpleNamespace(vae=vae, scheduler=scheduler)
    kind, cpu = getattr(diffusers, f"{name}Img2ImgPipeline"), torch.device("cpu")
    return kind.prepare_latents(own, image, None, 1, 1, torch.float32, cpu, **more)


def _encoded_by(name: str, vae: _Vae, image: Tensor) -> Tensor:
    """By `_encode_vae_image` of a pipeline, which takes nothing else of it than its VAE."""
    kind = getattr(diffusers, f"{name}Img2ImgPipeline")
    return kind._encode_vae_image(SimpleNamespace(vae=vae), image, None)


def _z_image(vae: _Vae, image: Tensor) -> Tensor:
    scheduler = SimpleNamespace(scale_noise=lambda latents, *_: latents)
    own = SimpleNamespace(vae=vae, scheduler=scheduler, vae_scale_factor=8)
    channels, (height, width) = vae.config.latent_channels, image.shape[-2:]
    cpu = torch.device("cpu")
    return diffusers.ZImageImg2ImgPipeline.prepare_latents(
        own, image, None, 1, channels, height, width, torch.float32, cpu, None
    )


def _qwen(vae: _Vae, image: Tensor) -> Tensor:
    return _encoded_by("QwenImage", vae, image[:, :, None])


def _qwen_21(vae: _Vae, image: Tensor) -> Tensor:
    opaque = torch.cat([image, torch.ones_like(image[:, :1])], dim=1)
    own = SimpleNamespace(vae=vae, latent_channels=vae.config.z_dim)
    return diffusers.QwenImage21Pipeline._encode_vae_image(own, opaque[:, :, None], None)


def _flux2(vae: _Vae, image: Tensor) -> Tensor:
    kind = diffusers.Flux2KleinPipeline
    own = SimpleNamespace(vae=vae, _patchify_latents=kind._patchify_latents)
    return kind._encode_vae_image(own, image, None)


def _ernie(vae: _Vae, image: Tensor) -> Tensor:
    """As its pipeline undoes it, with an epsilon of its own and not the config's."""
    latent = diffusers.ErnieImagePipeline._patchify_latents(vae.encode(image).latent_dist.mode())
    mean, variance = (each.view(1, -1, 1, 1) for each in (vae.bn.running_mean, vae.bn.running_var))
    return (latent - mean) / torch.sqrt(variance + 1e-5)


def _sana(vae: _Vae, image: Tensor) -> Tensor:
    return vae.encode(image).latent * vae.config.scaling_factor


def _scaled(vae: _Vae, image: Tensor) -> Tensor:
    """As PixArt, AuraFlow, CogView4, HunyuanImage and Kandinsky undo it, without any shift."""
    return vae.encode(image).latent_dist.mode() * vae.config.scaling_factor


_flux = partial(_encoded_by, "Flux")
_sdxl = partial(_prepared, "StableDiffusionXL", add_noise=False)
WAYS = {
    "StableDiffusion": partial(_prepared, "StableDiffusion"),
    "StableDiffusionXL": _sdxl,
    "StableDiffusion3": partial(_prepared, "StableDiffusion3"),
    "Flux": _flux,
    "PixArtAlpha": _scaled,
    "PixArtSigma": _scaled,
    "Sana": _sana,
    "Lumina2": _flux,
    "QwenImage": _qwen,
    "QwenImage21": _qwen_21,
    "ZImage": _z_image,
    "AuraFlow": _scaled,
    "Chroma": partial(_encoded_by, "Chroma"),
    "Kolors": _sdxl,
    "HiDreamImage": _flux,
    "Flux2Klein": _flux2,
    "CogView4": _scaled,
    "HunyuanImage": _scaled,
    "Krea2": _qwen,
    "OvisImage": _flux,
    "ErnieImage": _ernie,
    "Kandinsky5T2I": _scaled,
}


def _encoded(folder: Path, prompts: list[str], *, guidance: bool, **more: Any) -> dict[str, Any]:
    pipeline = _pipeline(folder)
    taken = set(inspect.signature(pipeline.encode_prompt).parameters) - {"kwargs"}
    defaults = {
        each.name: each.default
        for each in inspect.signature(type(pipeline).__call__).parameters.values()
        if each.name in taken and each.default is not inspect.Parameter.empty
    }
    own = {
        "prompt": list(prompts),
        "device": torch.device("cpu"),
        "num_images_per_prompt": 1,
        "do_classifier_free_guidance": guidance,
        "batch_size": len(prompts),
    }
    given = defaults | {name: value for name, value in own.items() if name in taken} | more
    with torch.inference_mode():
        found = pipeline.encode_prompt(**given)
    names = returned(type(pipeline).encode_prompt)
    values = found if isinstance(found, tuple) else (found,)
    both = zip(names, values, strict=True)
    return {name: value for name, value in both if value is not None and len(value)}


def returned(function: Any) -> list[str]:
    """The names in its last `return`, as diffusers' own test of encode_prompt finds them."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    returns = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
    last = max(returns, key=lambda node: node.lineno).value
    return [ast.unparse(each) for each in (last.elts if isinstance(last, ast.Tuple) else [last])]


@cache
def _pipeline(folder: Path) -> Any:
    pipeline_class(class_of(folder).removesuffix("Pipeline"))  # imported without its warnings
    left_out = {denoiser_of(folder): None, "vae": None}
    return DiffusionPipeline.from_pretrained(str(folder), **left_out, **_LOADING)


@cache
def _vae(folder: Path) -> Any:
    kind = getattr(diffusers, class_of(folder, "vae"))
    return kind.from_pretrained(str(folder / "vae"), **_LOADING)


_LOADING = {"low_cpu_mem_usage": False, "use_safetensors": True}
