"""Small denoisers: the real classes, one layer of each kind.

Two reasons to have them: a folder is then a whole pipeline, of which a reader leaves a part out;
and `denoised` shows what a denoiser makes of text that was cut to its length and padded again.
"""

from typing import Any

import diffusers
from torch import nn

LAYER = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1}
LAYERS = LAYER | {"num_single_layers": 1}
ROPE = (4, 6, 6)


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


def sd3(text: int, pooled: int) -> nn.Module:
    sizes = {"sample_size": 8, "pos_embed_max_size": 16, "caption_projection_dim": 32}
    return diffusers.SD3Transformer2DModel(
        **LAYER, **sizes, joint_attention_dim=text, pooled_projection_dim=pooled
    )


def flux(text: int, pooled: int) -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        **LAYERS, joint_attention_dim=text, pooled_projection_dim=pooled, axes_dims_rope=ROPE
    )


def flux2(text: int) -> nn.Module:
    guidance = {"timestep_guidance_channels": 16, "guidance_embeds": False}
    return diffusers.Flux2Transformer2DModel(
        **LAYERS, **guidance, joint_attention_dim=text, axes_dims_rope=(4, 4, 4, 4)
    )


def pixart(text: int) -> nn.Module:
    sizes = {"sample_size": 32, "cross_attention_dim": 32}
    return diffusers.PixArtTransformer2DModel(
        **LAYER, **sizes, caption_channels=text, use_additional_conditions=False
    )


def sana(text: int) -> nn.Module:
    cross = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 16}
    return diffusers.SanaTransformer2DModel(
        **LAYER, **cross, cross_attention_dim=32, sample_size=16, caption_channels=text
    )


def lumina2(text: int) -> nn.Module:
    heads = {"num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 8, "hidden_size": 32}
    layers = {"num_layers": 1, "num_refiner_layers": 1}
    return diffusers.Lumina2Transformer2DModel(
        **heads, **layers, sample_size=8, axes_dim_rope=ROPE, cap_feat_dim=text
    )


def qwen_image(text: int) -> nn.Module:
    return diffusers.QwenImageTransformer2DModel(
        **LAYER, joint_attention_dim=text, axes_dims_rope=ROPE
    )


def qwen_image_21(text: int) -> nn.Module:
    kind = diffusers.QwenImage21Transformer2DModel
    return kind(**LAYER, context_in_dim=text, axes_dims_rope=ROPE)


def z_image(text: int) -> nn.Module:
    layers = {"dim": 16, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 1, "n_kv_heads": 1}
    return diffusers.ZImageTransformer2DModel(
        **layers, cap_feat_dim=text, axes_dims=list(ROPE), axes_lens=[1024, 64, 64]
    )


def aura_flow(text: int) -> nn.Module:
    sizes = {"sample_size": 8, "pos_embed_max_size": 64, "caption_projection_dim": 32}
    return diffusers.AuraFlowTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        joint_attention_dim=text,
        **sizes,
    )


def chroma(text: int) -> nn.Module:
    names = ("num_channels", "hidden_dim")
    small = {f"approximator_{name}": 16 for name in names} | {"approximator_layers": 1}
    return diffusers.ChromaTransformer2DModel(
        **LAYERS, **small, joint_attention_dim=text, axes_dims_rope=ROPE
    )


def hidream(t5: int, llama: int, pooled: int) -> nn.Module:
    experts = {"num_routed_experts": 2, "num_activated_experts": 1}
    sizes = {"patch_size": 2, "in_channels": 16, "max_resolution": (16, 16)}
    return diffusers.HiDreamImageTransformer2DModel(
        **(LAYERS | {"num_attention_heads": 1}),
        **experts,
        **sizes,
        caption_channels=[t5, llama],
        text_emb_dim=pooled,
        axes_dims_rope=ROPE,
        llama_layers=[0, 1],
    )


def cogview4(text: int) -> nn.Module:
    sizes = {"sample_size": 8, "pos_embed_max_size": 16, "time_embed_dim": 16, "condition_dim": 8}
    return diffusers.CogView4Transformer2DModel(**LAYER, **sizes, text_embed_dim=text)


def hunyuan_image(channels: int, text: int) -> nn.Module:
    """Without the part for words in quotes, which alone would be 8 MB."""
    sides = {"in_channels": channels, "out_channels": channels, "rope_axes_dim": (8, 8)}
    return diffusers.HunyuanImageTransformer2DModel(
        **LAYERS, **sides, num_refiner_layers=1, text_embed_dim=text
    )


def kandinsky5(text: int, pooled: int) -> nn.Module:
    sizes = {"in_visual_dim": 16, "out_visual_dim": 16, "model_dim": 32, "ff_dim": 32}
    blocks = {"num_text_blocks": 1, "num_visual_blocks": 1, "time_dim": 16, "visual_cond": True}
    return diffusers.Kandinsky5Transformer3DModel(
        **sizes, **blocks, in_text_dim=text, in_text_dim2=pooled, axes_dims=ROPE
    )


def longcat(text: int) -> nn.Module:
    return diffusers.LongCatImageTransformer2DModel(
        **LAYERS, joint_attention_dim=text, pooled_projection_dim=text, axes_dims_rope=ROPE
    )


def krea2(text: int, layers: int) -> nn.Module:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    return diffusers.Krea2Transformer2DModel(
        **LAYER,
        **{f"text_{name}": value for name, value in heads.items()},
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=text,
        num_text_layers=layers,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=ROPE,
    )


def ovis_image(text: int) -> nn.Module:
    return diffusers.OvisImageTransformer2DModel(
        **LAYERS, joint_attention_dim=text, axes_dims_rope=ROPE
    )


def ernie_image(text: int) -> nn.Module:
    sizes = {"hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 2, "num_layers": 1}
    return diffusers.ErnieImageTransformer2DModel(**sizes, text_in_dim=text, rope_axes_dim=ROPE)
