"""A small random pipeline of each family, written as a folder by diffusers itself.

Lengths are those that the code of the pipelines fixes; widths are 16 to 32. Folders hold the small
denoiser too, in half precision, since nobody but `denoised` reads it.
"""

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
)
from torch import nn

from tests.kit.families import denoisers, towers, vaes
from tests.kit.families import vocabularies as words
from tests.kit.families.folders import pipeline_class, quiet
from tests.kit.families.weights import randomised

CLIPS = 16
"""the width of a CLIP"""
WIDTH = towers.WIDTH


def small(name: str, folder: Path) -> Path:
    """Write the pipeline of that name (of NAMES) there: the same bytes each time."""
    kind = pipeline_class(name)
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as aside, quiet():
        torch.manual_seed(0)  # for what `randomised` only adds to
        parts = FAMILIES[name](Path(aside)) if name == "Kolors" else FAMILIES[name]()
        for part, network in parts.items():
            if isinstance(network, nn.Module):
                randomised(network, f"{name}.{part}")
            if part in ("transformer", "unet"):
                network.half()
        vaes.sized(parts["vae"])
        kind(**parts).save_pretrained(str(folder))
    return folder


def _stable_diffusion() -> dict[str, Any]:
    tokenizer = words.clip()
    return {
        "tokenizer": tokenizer,
        "text_encoder": towers.clip(tokenizer, WIDTH),
        "vae": vaes.kl(0.18215),
        "unet": denoisers.unet(WIDTH),
        "scheduler": EulerDiscreteScheduler(steps_offset=1),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def _stable_diffusion_xl() -> dict[str, Any]:
    return _two_clips() | {
        "vae": vaes.kl(0.13025),
        "unet": denoisers.unet(2 * CLIPS, sizes=CLIPS),
        "scheduler": EulerDiscreteScheduler(steps_offset=1),
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
        "scheduler": FlowMatchEulerDiscreteScheduler(),
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
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def _pixart() -> dict[str, Any]:
    t5 = words.t5()
    return {
        "tokenizer": t5,
        "text_encoder": towers.t5(len(t5)),
        "vae": vaes.kl(0.13025),
        "transformer": denoisers.pixart(WIDTH),
        "scheduler": DPMSolverMultistepScheduler(),
    }


def _sana() -> dict[str, Any]:
    """With a token for each line of the instruction that goes before a caption: else it has 777."""
    gemma = words.gemma()
    defaults = inspect.signature(SanaPipeline.__call__).parameters
    gemma.add_tokens(
        [line for line in defaults["complex_human_instruction"].default if line[-1] != " "]
    )
    return {
        "tokenizer": gemma,
        "text_encoder": towers.gemma2(gemma),
        "vae": vaes.dc(),
        "transformer": denoisers.sana(WIDTH),
        "scheduler": DPMSolverMultistepScheduler(),
    }


def _lumina2() -> dict[str, Any]:
    gemma = words.gemma()
    return {
        "tokenizer": gemma,
        "text_encoder": towers.gemma2(gemma),
        "vae": vaes.flux(),
        "transformer": denoisers.lumina2(WIDTH),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def _qwen_image() -> dict[str, Any]:
    qwen = words.qwen()
    return {
        "tokenizer": qwen,
        "text_encoder": towers.qwen2_5_vl(qwen),
        "vae": vaes.qwen_image(),
        "transformer": denoisers.qwen_image(WIDTH),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def _z_image() -> dict[str, Any]:
    qwen = words.qwen()
    return {
        "tokenizer": qwen,
        "text_encoder": towers.qwen3(qwen),
        "vae": vaes.flux(),
        "transformer": denoisers.z_image(WIDTH),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def _aura_flow() -> dict[str, Any]:
    t5 = words.t5()
    return {
        "tokenizer": t5,
        "text_encoder": towers.umt5(len(t5)),
        "vae": vaes.kl(0.13025),
        "transformer": denoisers.aura_flow(WIDTH),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def _chroma() -> dict[str, Any]:
    t5 = words.t5()
    return {
        "tokenizer": t5,
        "text_encoder": towers.t5(len(t5)),
        "vae": vaes.flux(),
        "transformer": denoisers.chroma(WIDTH),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def _kolors(aside: Path) -> dict[str, Any]:
    tokenizer = words.chatglm(aside)
    return {
        "tokenizer": tokenizer,
        "text_encoder": towers.chatglm(tokenizer.vocab_size),
        "vae": vaes.kl(0.13025),
        "unet": denoisers.unet(WIDTH, sizes=WIDTH),
        "scheduler": EulerDiscreteScheduler(steps_offset=1),
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
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def _flux2_klein() -> dict[str, Any]:
    """28 layers, since the pipeline takes those with the numbers 9, 18 and 27."""
    qwen = words.qwen()
    return {
        "tokenizer": qwen,
        "text_encoder": towers.speaking_qwen3(qwen, layers=28),
        "vae": vaes.flux2(),
        "transformer": denoisers.flux2(3 * WIDTH),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def _cogview4() -> dict[str, Any]:
    glm = words.glm()
    return {
        "tokenizer": glm,
        "text_encoder": towers.glm(glm),
        "vae": vaes.kl16(1.0, 0.0),
        "transformer": denoisers.cogview4(WIDTH),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
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
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def _krea2() -> dict[str, Any]:
    qwen, layers = words.qwen(), (1, 2, 3, 4)
    return {
        "tokenizer": qwen,
        "text_encoder": towers.qwen3_vl(qwen, layers=5),
        "vae": vaes.qwen_image(),
        "transformer": denoisers.krea2(WIDTH, len(layers)),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "text_encoder_select_layers": layers,
    }


def _ovis_image() -> dict[str, Any]:
    qwen = words.qwen()
    return {
        "tokenizer": qwen,
        "text_encoder": towers.qwen3(qwen),
        "vae": vaes.flux(),
        "transformer": denoisers.ovis_image(WIDTH),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def _ernie_image() -> dict[str, Any]:
    mistral = words.mistral()
    return {
        "tokenizer": mistral,
        "text_encoder": towers.mistral3(mistral),
        "vae": vaes.flux2(),
        "transformer": denoisers.ernie_image(WIDTH),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def _two_clips() -> dict[str, Any]:
    first, second = words.clip(), words.clip()
    return {
        "tokenizer": first,
        "tokenizer_2": second,
        "text_encoder": towers.clip(first, CLIPS),
        "text_encoder_2": towers.projecting_clip(second, CLIPS),
    }


FAMILIES: dict[str, Callable[..., dict[str, Any]]] = {
    "StableDiffusion": _stable_diffusion,
    "StableDiffusionXL": _stable_diffusion_xl,
    "StableDiffusion3": _stable_diffusion_3,
    "Flux": _flux,
    "PixArtAlpha": _pixart,
    "PixArtSigma": _pixart,
    "Sana": _sana,
    "Lumina2": _lumina2,
    "QwenImage": _qwen_image,
    "ZImage": _z_image,
    "AuraFlow": _aura_flow,
    "Chroma": _chroma,
    "Kolors": _kolors,
    "HiDreamImage": _hidream_image,
    "Flux2Klein": _flux2_klein,
    "CogView4": _cogview4,
    "HunyuanImage": _hunyuan_image,
    "Krea2": _krea2,
    "OvisImage": _ovis_image,
    "ErnieImage": _ernie_image,
}
