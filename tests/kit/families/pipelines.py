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

from tests.kit.families import towers, vaes
from tests.kit.families import vocabularies as words
from tests.kit.families.denoisers import denoiser, unet
from tests.kit.families.reference import pipeline_class, quiet
from tests.kit.families.towers import CLIPS, WIDE, WIDTH, Tower
from tests.kit.families.weights import randomised


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


def _parts(
    network: nn.Module | str, vae: nn.Module, *pairs: Tower, scheduler: Any = None, **more: Any
) -> dict[str, Any]:
    """Return the parts of a pipeline: its denoiser, or the class of it, a VAE and text encoders."""
    made: dict[str, Any] = {"vae": vae} | more
    for number, (tokenizer, encoder) in enumerate(pairs, 1):
        ending = f"_{number}" if number > 1 else ""
        made |= {f"tokenizer{ending}": tokenizer, f"text_encoder{ending}": encoder}
    if isinstance(network, nn.Module):
        made |= {"unet": network, "scheduler": diffusers.EulerDiscreteScheduler(steps_offset=1)}
    else:
        flow = diffusers.FlowMatchEulerDiscreteScheduler()
        made |= {"transformer": denoiser(network), "scheduler": scheduler or flow}
    return made


def _stable_diffusion() -> dict[str, Any]:
    none = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return _parts(unet(WIDTH), vaes.kl(0.18215), towers.clip(WIDTH), **none)


def _stable_diffusion_xl() -> dict[str, Any]:
    network, pairs = unet(2 * CLIPS, sizes=CLIPS), (towers.clip(), towers.projecting_clip())
    return _parts(network, vaes.kl(0.13025), *pairs, add_watermarker=False)


def _stable_diffusion_3() -> dict[str, Any]:
    """Its T5 is wider than both CLIPs together, so that zeros fill their rows."""
    pairs = towers.projecting_clip(), towers.projecting_clip(), towers.t5(width=WIDE)
    return _parts("SD3Transformer2DModel", vaes.kl16(1.5305, 0.0609), *pairs)


def _flux() -> dict[str, Any]:
    return _parts("FluxTransformer2DModel", vaes.flux(), towers.clip(), towers.t5())


def _pixart() -> dict[str, Any]:
    solver = diffusers.DPMSolverMultistepScheduler()
    kind = "PixArtTransformer2DModel"
    return _parts(kind, vaes.kl(0.13025), towers.t5(), scheduler=solver)


def _sana() -> dict[str, Any]:
    """With a token for each line of the instruction that goes before a caption: else it has 777."""
    gemma = words.gemma()
    defaults = inspect.signature(diffusers.SanaPipeline.__call__).parameters
    gemma.add_tokens(
        [line for line in defaults["complex_human_instruction"].default if line[-1] != " "]
    )
    solver = diffusers.DPMSolverMultistepScheduler()
    kind = "SanaTransformer2DModel"
    return _parts(kind, vaes.dc(), towers.gemma2(gemma), scheduler=solver)


def _kolors(aside: Path) -> dict[str, Any]:
    return _parts(unet(WIDTH, sizes=WIDTH), vaes.kl(0.13025), towers.chatglm(aside))


def _hidream_image() -> dict[str, Any]:
    """Its CLIPs are asked for 128 tokens, so they have more places than others."""
    clips = [towers.projecting_clip(places=248) for _ in range(2)]
    pairs = *clips, towers.t5(width=CLIPS), towers.llama(CLIPS)
    return _parts("HiDreamImageTransformer2DModel", vaes.flux(), *pairs)


def _hunyuan_image() -> dict[str, Any]:
    pairs = towers.qwen2_5_vl(), towers.t5(words.byt5())
    return _parts("HunyuanImageTransformer2DModel", vaes.hunyuan_image(), *pairs)


def _krea2() -> dict[str, Any]:
    layers = {"text_encoder_select_layers": (1, 2, 3, 4)}
    pair = towers.qwen3_vl(transformers.Qwen3VLModel, layers=5)
    return _parts("Krea2Transformer2DModel", vaes.qwen_image(), pair, **layers)


def _qwen_image_21() -> dict[str, Any]:
    tokenizer, encoder = towers.qwen3_vl(transformers.Qwen3VLForConditionalGeneration, layers=2)
    tokenizer.chat_template = words.QWEN_LISTS_TEMPLATE
    pictures = transformers.Qwen2VLImageProcessor(
        patch_size=16, min_pixels=64 * 64, max_pixels=128 * 128
    )
    videos = transformers.Qwen3VLVideoProcessor()
    reader = transformers.Qwen3VLProcessor(pictures, tokenizer, videos, tokenizer.chat_template)
    made = _parts("QwenImage21Transformer2DModel", vaes.qwen_image_21(), (tokenizer, encoder))
    del made["tokenizer"]
    return made | {"processor": reader}


def _with_pictures(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the parts of a pipeline, with one of that name which prepares few tokens of a picture
    for them."""
    made = make()
    pictures = transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112)
    videos = transformers.Qwen2VLVideoProcessor()
    return made | {name: transformers.Qwen2VLProcessor(pictures, made["tokenizer"], videos)}


def _kandinsky5() -> dict[str, Any]:
    pairs = towers.qwen2_5_vl(), towers.clip()
    kind = "Kandinsky5Transformer3DModel"
    return _with_pictures("tokenizer", lambda: _parts(kind, vaes.flux(), *pairs))


def _one_tower(
    network: str, vae: Callable[[], nn.Module], tower: Callable[[], Tower]
) -> Callable[[], dict[str, Any]]:
    return lambda: _parts(network, vae(), tower())


FAMILIES: dict[str, Callable[..., dict[str, Any]]] = {
    "StableDiffusion": _stable_diffusion,
    "StableDiffusionXL": _stable_diffusion_xl,
    "StableDiffusion3": _stable_diffusion_3,
    "Flux": _flux,
    "PixArtAlpha": _pixart,
    "PixArtSigma": _pixart,
    "Sana": _sana,
    "Lumina2": _one_tower("Lumina2Transformer2DModel", vaes.flux, towers.gemma2),
    "QwenImage": _one_tower("QwenImageTransformer2DModel", vaes.qwen_image, towers.qwen2_5_vl),
    "ZImage": _one_tower("ZImageTransformer2DModel", vaes.flux, towers.qwen3),
    "AuraFlow": _one_tower(
        "AuraFlowTransformer2DModel", lambda: vaes.kl(0.13025), lambda: towers.t5(kind="UMT5")
    ),
    "Chroma": _one_tower("ChromaTransformer2DModel", vaes.flux, towers.t5),
    "Kolors": _kolors,
    "HiDreamImage": _hidream_image,
    "Flux2Klein": _one_tower("Flux2Transformer2DModel", vaes.flux2, towers.speaking_qwen3),
    "CogView4": _one_tower("CogView4Transformer2DModel", lambda: vaes.kl16(1.0, 0.0), towers.glm),
    "HunyuanImage": _hunyuan_image,
    "Krea2": _krea2,
    "OvisImage": _one_tower("OvisImageTransformer2DModel", vaes.flux, towers.qwen3),
    "ErnieImage": _one_tower("ErnieImageTransformer2DModel", vaes.flux2, towers.mistral3),
    "Kandinsky5T2I": _kandinsky5,
}
if hasattr(diffusers, "QwenImage21Pipeline"):  # since 0.42
    FAMILIES["QwenImage21"] = _qwen_image_21
_qwen_image_edit = partial(_with_pictures, "processor", FAMILIES["QwenImage"])
_longcat = _one_tower("LongCatImageTransformer2DModel", vaes.flux, towers.qwen2_5_vl)
EDITS: dict[str, Callable[..., dict[str, Any]]] = {
    "FluxKontext": _flux,
    "QwenImageEdit": _qwen_image_edit,
    "QwenImageEditPlus": _qwen_image_edit,
    "Kandinsky5I2I": _kandinsky5,
    "LongCatImageEdit": partial(_with_pictures, "text_processor", _longcat),
}
"""Those that need an image beside the prompt."""
