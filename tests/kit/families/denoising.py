"""What a denoiser makes of a latent and of text: to show that nothing is lost by trimming text.

Text is cut to its true length when it is stored, and padded again when it is loaded. Where a
denoiser reads a mask, or lengths, what it makes of that must be what it made of the whole.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.kit.families.folders import class_of, denoiser_of, quiet

TIME = torch.tensor([0.5])


def denoised(
    folder: Path, outputs: dict[str, Any], latent: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Of the outputs of one caption (`prompt_of`) and an unpacked latent `(C, h, w)`, in fp32.

    `mask`, (tokens,) and bool, says which rows of the text are words; without it the mask among the
    outputs counts, or all rows where there is none. What is given to the denoiser:

    - PixArt, Sana, Lumina2, QwenImage, Krea2: the mask as it is;
    - HunyuanImage: the mask, and no words in quotes;
    - Chroma: the mask as bool, with True for each place of the image;
    - ZImage: the rows that the mask leaves; ErnieImage: all rows and how many are words;
    - AuraFlow, OvisImage: no mask at all: their pads are zeros, and must be as many as before.
    """
    name = class_of(folder)
    if mask is None and name in MASKS:
        mask = outputs.get(MASKS[name])
        mask = None if mask is None else mask[0].bool()
    with torch.inference_mode():
        return CALLS[name](denoiser(folder), outputs, latent[None].float(), mask)


def _pixart(network: Any, outputs: dict[str, Any], latent: Tensor, mask: Tensor | None) -> Tensor:
    sizes = {"resolution": None, "aspect_ratio": None}
    return network(
        latent,
        encoder_hidden_states=outputs["prompt_embeds"],
        encoder_attention_mask=_long(mask),
        timestep=1000 * TIME,
        added_cond_kwargs=sizes,
    ).sample


def _masked(network: Any, outputs: dict[str, Any], latent: Tensor, mask: Tensor | None) -> Tensor:
    return network(
        latent,
        timestep=TIME,
        encoder_hidden_states=outputs["prompt_embeds"],
        encoder_attention_mask=_long(mask),
    ).sample


def _plain(network: Any, outputs: dict[str, Any], latent: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is None
    text = outputs["prompt_embeds"]
    return network(latent, timestep=TIME, encoder_hidden_states=text).sample


def _qwen(network: Any, outputs: dict[str, Any], latent: Tensor, mask: Tensor | None) -> Tensor:
    height, width = latent.shape[-2:]
    return network(
        _packed(latent),
        encoder_hidden_states=outputs["prompt_embeds"],
        encoder_hidden_states_mask=_long(mask),
        timestep=TIME,
        img_shapes=[[(1, height // 2, width // 2)]],
    ).sample


def _z_image(network: Any, outputs: dict[str, Any], latent: Tensor, mask: Tensor | None) -> Tensor:
    text = outputs["prompt_embeds"][0]
    rows = text if mask is None else text[mask]
    return network([latent[0][:, None]], TIME, [rows]).sample[0]


def _chroma(network: Any, outputs: dict[str, Any], latent: Tensor, mask: Tensor | None) -> Tensor:
    packed, text = _packed(latent), outputs["prompt_embeds"]
    words = torch.ones(text.shape[1], dtype=torch.bool) if mask is None else mask
    places = torch.ones(packed.shape[1], dtype=torch.bool)
    return network(
        packed,
        encoder_hidden_states=text,
        timestep=TIME,
        txt_ids=torch.zeros(text.shape[1], 3),
        img_ids=_ids(latent),
        attention_mask=torch.cat([words, places])[None],
    ).sample


def _ovis(network: Any, outputs: dict[str, Any], latent: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is None
    text = outputs["prompt_embeds"]
    order = torch.arange(text.shape[1])
    return network(
        _packed(latent),
        encoder_hidden_states=text,
        timestep=TIME,
        txt_ids=torch.stack([torch.zeros_like(order), order, order], dim=1).float(),
        img_ids=_ids(latent),
    ).sample


def _krea2(network: Any, outputs: dict[str, Any], latent: Tensor, mask: Tensor | None) -> Tensor:
    text = outputs["prompt_embeds"]
    places = torch.cat([torch.zeros(text.shape[1], 3), _ids(latent)])
    return network(
        _packed(latent),
        encoder_hidden_states=text,
        timestep=TIME,
        position_ids=places,
        encoder_attention_mask=None if mask is None else mask[None],
    ).sample


def _ernie(network: Any, outputs: dict[str, Any], latent: Tensor, mask: Tensor | None) -> Tensor:
    text = outputs["text_hiddens"][0]
    words = torch.tensor([len(text) if mask is None else int(mask.sum())])
    return network(latent, TIME, text_bth=text[None], text_lens=words).sample


def _long(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.long()[None]


def _packed(latent: Tensor) -> Tensor:
    """Squares of 2 x 2 in a row, by the code of the pipeline that began with it."""
    return diffusers.FluxPipeline._pack_latents(latent, *latent.shape)


def _ids(latent: Tensor) -> Tensor:
    rows, columns = (side // 2 for side in latent.shape[-2:])
    return diffusers.FluxPipeline._prepare_latent_image_ids(
        1, rows, columns, torch.device("cpu"), torch.float32
    )


@cache
def denoiser(folder: Path) -> Any:
    """In fp32. Loaded by hand: without accelerate diffusers refuses to load Krea2's."""
    part = denoiser_of(folder)
    kind = getattr(diffusers, class_of(folder, part))
    with quiet():
        made = kind.from_config(kind.load_config(str(folder / part)))
    made.load_state_dict(load_file(folder / part / "diffusion_pytorch_model.safetensors"))
    return made.float().eval()


MASKS = {
    "PixArtAlphaPipeline": "prompt_attention_mask",
    "PixArtSigmaPipeline": "prompt_attention_mask",
    "SanaPipeline": "prompt_attention_mask",
    "Lumina2Pipeline": "prompt_attention_mask",
    "ChromaPipeline": "prompt_attention_mask",
    "QwenImagePipeline": "prompt_embeds_mask",
    "HunyuanImagePipeline": "prompt_embeds_mask",
    "Krea2Pipeline": "prompt_embeds_mask",
}
CALLS: dict[str, Callable[[Any, dict[str, Any], Tensor, Tensor | None], Tensor]] = {
    "PixArtAlphaPipeline": _pixart,
    "PixArtSigmaPipeline": _pixart,
    "SanaPipeline": _masked,
    "Lumina2Pipeline": _masked,
    "HunyuanImagePipeline": _masked,
    "AuraFlowPipeline": _plain,
    "QwenImagePipeline": _qwen,
    "ZImagePipeline": _z_image,
    "ChromaPipeline": _chroma,
    "OvisImagePipeline": _ovis,
    "Krea2Pipeline": _krea2,
    "ErnieImagePipeline": _ernie,
}
