"""A small random pipeline of each family, written as a folder by diffusers itself.

Lengths are those that the code of the pipelines fixes; widths are 16 to 32. Folders hold the small
denoiser too, in half precision, since nobody but `denoised` reads it.
"""

import inspect
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from tests.kit.families import denoisers, towers, vaes
from tests.kit.families import vocabularies as words
from tests.kit.families.folders import pipeline_class, quiet
from tests.kit.families.weights import randomised

CLIPS = 16
"""the width of a CLIP"""
WIDTH = towers.WIDTH


def small(name: str, folder: Path) -> Path:
    """Write the pipeline of that name (of NAMES or EDITS) there: the same bytes each time."""
    kind = pipeline_class(name)
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as aside, quiet():
        torch.manual_seed(0)  # for what `randomised` only adds to
        make = (FAMILIES | EDITS)[name]
        parts = make(Path(aside)) if name == "Kolors" else make()
        for part, network in parts.items():
            if isinstance(network, nn.Module):
                randomised(network, f"{name}.{part}")
            if part in ("transformer", "unet"):
                network.half()
        vaes.sized(parts["vae"])
        kind(**parts).save_pretrained(str(folder))
    return folder


def _one_tower(
    tokenizer: Callable[[], Any],
    tower: Callable[[Any], nn.Module],
    vae: Callable[[], nn.Module],
    denoiser: Callable[[int], nn.Module],
    scheduler: Callable[[], Any] = diffusers.FlowMatchEulerDiscreteScheduler,
) -> dict[str, Any]:
    """Return the parts of a pipeline with one text encoder, made in this order."""
    made = tokenizer()
    return {
        "tokenizer": made,
        "text_encoder": tower(made),
        "vae": vae(),
        "transformer": denoiser(WIDTH),
        "scheduler": scheduler(),
    }


def _t5(tokenizer: Any) -> nn.Module:
    return towers.t5(len(tokenizer))


def _stable_diffusion() -> dict[str, Any]:
    tokenizer = words.clip()
    return {
        "tokenizer": tokenizer,
        "text_encoder": towers.clip(tokenizer, WIDTH),
        "vae": vaes.kl(0.18215),
        "unet": denoisers.unet(WIDTH),
        "scheduler": diffusers.EulerDiscreteScheduler(steps_offset=1),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def _stable_diffusion_xl() -> dict[str, Any]:
    return _two_clips() | {
        "vae": vaes.kl(0.13025),
        "unet": denoisers.unet(2 * CLIPS, sizes=CLIPS),
        "scheduler": diffusers.EulerDiscreteScheduler(steps_offset=1),
        "add_watermarker": False,
    }


def _stable_diffusion_3() -> dict[str, Any]:
    t5, width = words.t5(), 48  # wider than both CLIPs together, so that zeros fill their rows
    first = towers.projecting_clip(words.clip(), CLIPS)
    return _two_clips() | {
        "text_encoder": first,
        "tokenizer_3": t5,
        "text_encoder_3": towers.t5(len(t5), width),
        "vae": vaes.kl16(1.5305, 0.0609),
        "transformer": denoisers.sd3(width, 2 * CLIPS),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }


def _flux() -> dict[str, Any]:
    clip, t5 = words.clip(), words.t5()
    return {
        "tokenizer": clip,
        "text_encoder": towers.clip(clip, CLIPS),
        "tokenizer_2": t5,
        "text_encoder_2": towers.t5(len(t5)),
        "vae": vaes.flux(),
        "transformer": denoisers.flux(WIDTH, CLIPS),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }


def _sana() -> dict[str, Any]:
    """With a token for each line of the instruction that goes before a caption: else it has 777."""
    gemma = words.gemma()
    defaults = inspect.signature(diffusers.SanaPipeline.__call__).parameters
    gemma.add_tokens(
        [line for line in defaults["complex_human_instruction"].default if line[-1] != " "]
    )
    return {
        "tokenizer": gemma,
        "text_encoder": towers.gemma2(gemma),
        "vae": vaes.dc(),
        "transformer": denoisers.sana(WIDTH),
        "scheduler": diffusers.DPMSolverMultistepScheduler(),
    }


def _kolors(aside: Path) -> dict[str, Any]:
    tokenizer = words.chatglm(aside)
    return {
        "tokenizer": tokenizer,
        "text_encoder": towers.chatglm(tokenizer.vocab_size),
        "vae": vaes.kl(0.13025),
        "unet": denoisers.unet(WIDTH, sizes=WIDTH),
        "scheduler": diffusers.EulerDiscreteScheduler(steps_offset=1),
    }


def _hidream_image() -> dict[str, Any]:
    """Its CLIPs are asked for 128 tokens, so they have more places than others."""
    t5, llama = words.t5(), words.llama()
    long = words.clip(248)
    clips = [towers.projecting_clip(long, CLIPS, positions=248) for _ in range(2)]
    return {
        "tokenizer": long,
        "tokenizer_2": words.clip(248),
        "tokenizer_3": t5,
        "tokenizer_4": llama,
        "text_encoder": clips[0],
        "text_encoder_2": clips[1],
        "text_encoder_3": towers.t5(len(t5), CLIPS),
        "text_encoder_4": towers.llama(llama, CLIPS),
        "vae": vaes.flux(),
        "transformer": denoisers.hidream(CLIPS, CLIPS, 2 * CLIPS),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }


def _hunyuan_image() -> dict[str, Any]:
    qwen, vae = words.qwen(), vaes.hunyuan_image()
    byt5 = words.byt5()
    return {
        "tokenizer": qwen,
        "text_encoder": towers.qwen2_5_vl(qwen),
        "tokenizer_2": byt5,
        "text_encoder_2": towers.t5(len(byt5)),
        "vae": vae,
        "transformer": denoisers.hunyuan_image(vae.config.latent_channels, WIDTH),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }


def _krea2() -> dict[str, Any]:
    qwen, layers = words.qwen(), (1, 2, 3, 4)
    return {
        "tokenizer": qwen,
        "text_encoder": towers.qwen3_vl(qwen, layers=5),
        "vae": vaes.qwen_image(),
        "transformer": denoisers.krea2(WIDTH, len(layers)),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        "text_encoder_select_layers": layers,
    }


def _qwen_image_21() -> dict[str, Any]:
    tokenizer = words.qwen()
    tokenizer.chat_template = words.QWEN_LISTS_TEMPLATE
    pictures = transformers.Qwen2VLImageProcessor(
        patch_size=16, min_pixels=64 * 64, max_pixels=128 * 128
    )
    videos = transformers.Qwen3VLVideoProcessor()
    return {
        "processor": transformers.Qwen3VLProcessor(
            pictures, tokenizer, videos, tokenizer.chat_template
        ),
        "text_encoder": towers.speaking_qwen3_vl(tokenizer),
        "vae": vaes.qwen_image_21(),
        "transformer": denoisers.qwen_image_21(WIDTH),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }


def _two_clips() -> dict[str, Any]:
    first, second = words.clip(), words.clip()
    return {
        "tokenizer": first,
        "tokenizer_2": second,
        "text_encoder": towers.clip(first, CLIPS),
        "text_encoder_2": towers.projecting_clip(second, CLIPS),
    }


def _with_pictures(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the parts of a pipeline, with one of that name which prepares pictures for them."""
    made = make()
    return made | {name: _sees_pictures(made["tokenizer"])}


def _sees_pictures(tokenizer: Any) -> transformers.Qwen2VLProcessor:
    """Return a processor that makes few tokens of a picture."""
    pictures = transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112)
    return transformers.Qwen2VLProcessor(pictures, tokenizer, transformers.Qwen2VLVideoProcessor())


def _kandinsky5() -> dict[str, Any]:
    qwen, clip = words.qwen(), words.clip()
    return {
        "tokenizer": _sees_pictures(qwen),
        "text_encoder": towers.qwen2_5_vl(qwen),
        "tokenizer_2": clip,
        "text_encoder_2": towers.clip(clip, CLIPS),
        "vae": vaes.flux(),
        "transformer": denoisers.kandinsky5(WIDTH, CLIPS),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }


_longcat = partial(_one_tower, words.qwen, towers.qwen2_5_vl, vaes.flux, denoisers.longcat)
_sd_vae = partial(vaes.kl, 0.13025)
_pixart = partial(
    _one_tower, words.t5, _t5, _sd_vae, denoisers.pixart, diffusers.DPMSolverMultistepScheduler
)
FAMILIES: dict[str, Callable[..., dict[str, Any]]] = {
    "StableDiffusion": _stable_diffusion,
    "StableDiffusionXL": _stable_diffusion_xl,
    "StableDiffusion3": _stable_diffusion_3,
    "Flux": _flux,
    "PixArtAlpha": _pixart,
    "PixArtSigma": _pixart,
    "Sana": _sana,
    "Lumina2": partial(_one_tower, words.gemma, towers.gemma2, vaes.flux, denoisers.lumina2),
    "QwenImage": partial(
        _one_tower, words.qwen, towers.qwen2_5_vl, vaes.qwen_image, denoisers.qwen_image
    ),
    "ZImage": partial(_one_tower, words.qwen, towers.qwen3, vaes.flux, denoisers.z_image),
    "AuraFlow": partial(
        _one_tower, words.t5, lambda t5: towers.umt5(len(t5)), _sd_vae, denoisers.aura_flow
    ),
    "Chroma": partial(_one_tower, words.t5, _t5, vaes.flux, denoisers.chroma),
    "Kolors": _kolors,
    "HiDreamImage": _hidream_image,
    "Flux2Klein": partial(  # of 28 layers, as it takes those with the numbers 9, 18 and 27
        _one_tower,
        words.qwen,
        partial(towers.speaking_qwen3, layers=28),
        vaes.flux2,
        lambda width: denoisers.flux2(3 * width),
    ),
    "CogView4": partial(
        _one_tower, words.glm, towers.glm, partial(vaes.kl16, 1.0, 0.0), denoisers.cogview4
    ),
    "HunyuanImage": _hunyuan_image,
    "Krea2": _krea2,
    "OvisImage": partial(_one_tower, words.qwen, towers.qwen3, vaes.flux, denoisers.ovis_image),
    "ErnieImage": partial(
        _one_tower, words.mistral, towers.mistral3, vaes.flux2, denoisers.ernie_image
    ),
    "Kandinsky5T2I": _kandinsky5,
}
if hasattr(diffusers, "QwenImage21Pipeline"):  # since 0.42
    FAMILIES["QwenImage21"] = _qwen_image_21
_qwen_image_edit = partial(_with_pictures, "processor", FAMILIES["QwenImage"])
EDITS: dict[str, Callable[..., dict[str, Any]]] = {
    "FluxKontext": _flux,
    "QwenImageEdit": _qwen_image_edit,
    "QwenImageEditPlus": _qwen_image_edit,
    "Kandinsky5I2I": _kandinsky5,
    "LongCatImageEdit": partial(_with_pictures, "text_processor", _longcat),
}
"""Those that need an image beside the prompt."""
