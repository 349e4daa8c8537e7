"""What diffusers alone makes of one caption and of one image, to hold what is stored against.

Text: the outputs of `encode_prompt` when the pipeline itself calls it, by the names that it returns
them by. Images: the code of the family's image-to-image pipeline, with the noise that is asked for
in place of its own; where a family has none, the inverse of how its pipeline makes latents ready
for the decoder.
"""

import ast
import contextlib
import inspect
import json
import textwrap
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

NEGATIVE = "negative_"


def class_of(folder: Path, part: str | None = None) -> str:
    """The class of the pipeline, or of a part of it."""
    listed = json.loads((folder / "model_index.json").read_text())
    return str(listed[part][1] if part else listed["_class_name"])


def denoiser_of(folder: Path) -> str:
    return "unet" if (folder / "unet").is_dir() else "transformer"


def pipeline_class(name: str) -> Any:
    with quiet():
        return getattr(diffusers, f"{name}Pipeline")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Diffusers warns of what it uses itself: with Chroma of a class of its own, with Kolors, which
    cannot even be imported where warnings are errors, of a function of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


class StopError(Exception):
    """A pipeline has come as far as was asked for."""


@cache
def whole_pipeline(folder: Path) -> Any:
    """In fp32. Its denoiser is loaded by hand: without accelerate diffusers refuses Krea2's."""
    part = denoiser_of(folder)
    with quiet():
        kind = getattr(diffusers, class_of(folder, part))
        denoiser = kind.from_config(kind.load_config(str(folder / part)))
        denoiser.load_state_dict(load_file(folder / part / "diffusion_pytorch_model.safetensors"))
        pipeline = getattr(diffusers, class_of(folder)).from_pretrained(
            str(folder), **{part: denoiser.float().eval()}, low_cpu_mem_usage=False
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def prompt_of(folder: Path, caption: str) -> dict[str, Any]:
    """Of one caption, in fp32 on the CPU: outputs by name, the batch of one kept.

    What is None is left out, and so is what stands for no caption.
    """
    first, *_ = as_called(folder, caption)
    return {name: value for name, value in first.items() if not name.startswith(NEGATIVE)}


def negative_of(folder: Path) -> dict[str, Any] | None:
    """What stands for no caption where the pipeline guides, by the names of `prompt_of`.

    Some pipelines encode it by a call of its own. None where the defaults of a pipeline make no use
    of one, as with Flux.
    """
    first, *others = as_called(folder, "a")
    if others:
        return others[-1]
    negative = {name: value for name, value in first.items() if name.startswith(NEGATIVE)}
    return {name.removeprefix(NEGATIVE): value for name, value in negative.items()} or None


def latent_of(folder: Path, pixels: np.ndarray, *, noise: Tensor | None = None) -> Tensor:
    """Of uint8 pixels (H, W, 3), the latent `(C, h, w)`, normalised and unpacked.

    It is the mean, or with noise (of the shape of the VAE's own latent) mean + deviation * noise.
    """
    name = class_of(folder).removesuffix("Pipeline")
    image = VaeImageProcessor().preprocess(Image.fromarray(pixels))
    with torch.inference_mode():
        found = WAYS[name](_Vae(whole_pipeline(folder).vae, noise), image)
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


WAYS: dict[str, Callable[[_Vae, Tensor], Tensor]] = {
    "StableDiffusion": partial(_prepared, "StableDiffusion"),
    "StableDiffusion3": partial(_prepared, "StableDiffusion3"),
    "Chroma": partial(_encoded_by, "Chroma"),
    "Sana": _sana,
    "QwenImage21": _qwen_21,
    "ZImage": _z_image,
    "Flux2Klein": _flux2,
    "ErnieImage": _ernie,
}
for _way, _names in (
    (partial(_prepared, "StableDiffusionXL", add_noise=False), "StableDiffusionXL Kolors"),
    (partial(_encoded_by, "Flux"), "Flux Lumina2 HiDreamImage OvisImage"),
    (_qwen, "QwenImage Krea2"),
    (_scaled, "PixArtAlpha PixArtSigma AuraFlow CogView4 HunyuanImage Kandinsky5T2I"),
):
    WAYS |= dict.fromkeys(_names.split(), _way)


def as_called(folder: Path, caption: str, **options: Any) -> list[dict[str, Any]]:
    """What each call of `encode_prompt` gives, until the denoiser is called for the first time."""
    pipeline, made = whole_pipeline(folder), []
    names, encode_prompt = returned(type(pipeline).encode_prompt), pipeline.encode_prompt

    def noted(*words: Any, **options: Any) -> Any:
        found = encode_prompt(*words, **options)
        values = zip(names, found if isinstance(found, tuple) else (found,), strict=True)
        made.append({name: value for name, value in values if value is not None and len(value)})
        return found

    denoiser = getattr(pipeline, denoiser_of(folder))
    options = options or {"height": 64, "width": 64}
    with (
        patch.object(pipeline, "encode_prompt", noted),
        patch.object(denoiser, "forward", side_effect=StopError),
        quiet(),
        pytest.raises(StopError),
    ):
        pipeline(prompt=caption, num_inference_steps=2, **options)
    return made


def returned(function: Any) -> list[str]:
    """The names in its last `return`, as diffusers' own test of encode_prompt finds them."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    returns = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
    last = max(returns, key=lambda node: node.lineno).value
    return [ast.unparse(each) for each in (last.elts if isinstance(last, ast.Tuple) else [last])]


# --- the denoiser: text is cut to its true length when it is stored, and padded again when it is
# loaded. Where a denoiser reads a mask, or lengths, what it makes of that must be what it made of
# the whole. The pipeline's own code makes ready what the denoiser is given.

MASKS = ("prompt_attention_mask", "prompt_embeds_mask")


def denoised(
    folder: Path, outputs: dict[str, Any], rows: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """The first step of a denoiser from always the same noise, in fp32, given the outputs of one
    caption (`prompt_of`).

    `rows`, (tokens, ...), take the place of its text. `mask`, (tokens,) and bool, says which of
    them are words: a pipeline without a mask is given a list of these, or all of them. A mask of
    floats, as Chroma's, is given as bool.
    """
    pipeline, made = whole_pipeline(folder), []
    taken = inspect.signature(type(pipeline).__call__).parameters
    arguments = {name: value for name, value in outputs.items() if name in taken}
    arguments |= {"prompt_embeds": text_of(outputs)}
    arguments |= dict.fromkeys({"guidance_scale"}.intersection(taken), 0.0)
    if rows is not None and mask is not None:
        is_list = isinstance(text_of(outputs), list)
        arguments["prompt_embeds"] = [rows[mask]] if is_list else rows[None]
        arguments |= {name: mask[None].long() for name in set(MASKS).intersection(taken)}
    for name in set(MASKS).intersection(outputs):
        kind = outputs[name].dtype
        arguments[name] = arguments[name].to(torch.bool if kind.is_floating_point else kind)
    forward = pipeline.transformer.forward

    def noted(*words: Any, **options: Any) -> Any:
        made.append(forward(*words, **options))
        raise StopError

    with patch.object(pipeline.transformer, "forward", noted), pytest.raises(StopError):
        pipeline(
            **arguments,
            height=64,
            width=96,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
        )
    first = made[0][0]
    return first[0] if isinstance(first, list) else first


def text_of(outputs: dict[str, Any]) -> Any:
    """The embedding of the words: a tensor of one row, or a list of a tensor."""
    return outputs.get("prompt_embeds", outputs.get("text_hiddens"))
