"""Small denoisers: the real classes, one layer of each kind.

Two reasons to have them: a folder is then a whole pipeline, of which a reader leaves a part out;
and `denoised` shows what a denoiser makes of text that was cut to its length and padded again.
"""

from typing import Any

import diffusers
from torch import nn

from tests.kit.families.towers import CLIPS, WIDE, WIDTH
from tests.kit.families.vaes import HUNYUAN_CHANNELS

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
LAYER = HEADS | {"num_layers": 1}
LAYERS = LAYER | {"num_single_layers": 1}
ROPE = {"axes_dims_rope": (4, 6, 6)}
PLACES = {"sample_size": 8, "pos_embed_max_size": 16}
JOINT = {"joint_attention_dim": WIDTH}

DENOISERS: dict[str, dict[str, Any]] = {
    "SD3Transformer2DModel": LAYER
    | PLACES
    | {"caption_projection_dim": 32, "joint_attention_dim": WIDE, "pooled_projection_dim": WIDTH},
    "FluxTransformer2DModel": LAYERS | ROPE | JOINT | {"pooled_projection_dim": CLIPS},
    "Flux2Transformer2DModel": LAYERS
    | {"timestep_guidance_channels": 16, "guidance_embeds": False}
    | {"joint_attention_dim": 3 * WIDTH, "axes_dims_rope": (4, 4, 4, 4)},
    "PixArtTransformer2DModel": LAYER
    | {"sample_size": 32, "cross_attention_dim": 32}
    | {"caption_channels": WIDTH, "use_additional_conditions": False},
    "SanaTransformer2DModel": LAYER
    | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32}
    | {"sample_size": 16, "caption_channels": WIDTH},
    "Lumina2Transformer2DModel": {"num_layers": 1, "num_refiner_layers": 1, "sample_size": 8}
    | {"num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 8, "hidden_size": 32}
    | {"axes_dim_rope": (4, 6, 6), "cap_feat_dim": WIDTH},
    "QwenImageTransformer2DModel": LAYER | ROPE | JOINT,
    "QwenImage21Transformer2DModel": LAYER | ROPE | {"context_in_dim": WIDTH},
    "ZImageTransformer2DModel": {"dim": 16, "n_layers": 1, "n_refiner_layers": 1}
    | {"n_heads": 1, "n_kv_heads": 1, "cap_feat_dim": WIDTH}
    | {"axes_dims": [4, 6, 6], "axes_lens": [1024, 64, 64]},
    "AuraFlowTransformer2DModel": HEADS
    | JOINT
    | {"num_mmdit_layers": 1, "num_single_dit_layers": 1}
    | {"sample_size": 8, "pos_embed_max_size": 64, "caption_projection_dim": 32},
    "ChromaTransformer2DModel": LAYERS
    | ROPE
    | JOINT
    | {f"approximator_{name}": 16 for name in ("num_channels", "hidden_dim")}
    | {"approximator_layers": 1},
    "HiDreamImageTransformer2DModel": LAYERS
    | ROPE
    | {"num_attention_heads": 1, "num_routed_experts": 2, "num_activated_experts": 1}
    | {"patch_size": 2, "in_channels": 16, "max_resolution": (16, 16)}
    | {"caption_channels": [CLIPS, CLIPS], "text_emb_dim": 2 * CLIPS, "llama_layers": [0, 1]},
    "CogView4Transformer2DModel": LAYER
    | PLACES
    | {"time_embed_dim": 16, "condition_dim": 8, "text_embed_dim": WIDTH},
    # Without the part for words in quotes, which alone would be 8 MB.
    "HunyuanImageTransformer2DModel": LAYERS
    | {"in_channels": HUNYUAN_CHANNELS, "out_channels": HUNYUAN_CHANNELS}
    | {"rope_axes_dim": (8, 8), "num_refiner_layers": 1, "text_embed_dim": WIDTH},
    "Kandinsky5Transformer3DModel": {"num_text_blocks": 1, "num_visual_blocks": 1, "time_dim": 16}
    | {"in_visual_dim": 16, "out_visual_dim": 16, "model_dim": 32, "ff_dim": 32}
    | {"in_text_dim": WIDTH, "in_text_dim2": CLIPS, "axes_dims": (4, 6, 6), "visual_cond": True},
    "LongCatImageTransformer2DModel": LAYERS | ROPE | JOINT | {"pooled_projection_dim": WIDTH},
    "Krea2Transformer2DModel": LAYER
    | ROPE
    | {"text_num_attention_heads": 2, "text_num_key_value_heads": 2, "text_intermediate_size": 32}
    | {"num_key_value_heads": 1, "intermediate_size": 32, "timestep_embed_dim": 16}
    | {"text_hidden_dim": WIDTH, "num_text_layers": 4}
    | {"num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1},
    "OvisImageTransformer2DModel": LAYERS | ROPE | JOINT,
    "ErnieImageTransformer2DModel": {"num_attention_heads": 2, "num_layers": 1}
    | {"hidden_size": 32, "ffn_hidden_size": 32}
    | {"text_in_dim": WIDTH, "rope_axes_dim": (4, 6, 6)},
}
"""The options of each class that is in one family."""


def denoiser(kind: str) -> nn.Module:
    made: nn.Module = getattr(diffusers, kind)(**DENOISERS[kind])
    return made


def unet(text: int, sizes: int | None = None) -> nn.Module:
    """`sizes`: the width of the pooled text, where sizes and crop go in beside it."""
    more: dict[str, Any] = {}
    if sizes is not None:
        more = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
        more["projection_class_embeddings_input_dim"] = sizes + 6 * 8
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        cross_attention_dim=text,
        **more,
    )
