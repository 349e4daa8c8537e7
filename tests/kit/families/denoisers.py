"""Small denoisers: the real classes, one layer of each kind.

Two reasons to have them: a folder is then a whole pipeline, of which a reader leaves a part out;
and `denoised` shows what a denoiser makes of text that was cut to its length and padded again.
"""

from typing import Any

import diffusers
from diffusers import (
    AuraFlowTransformer2DModel,
    ChromaTransformer2DModel,
    CogView4Transformer2DModel,
    ErnieImageTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    HiDreamImageTransformer2DModel,
    HunyuanImageTransformer2DModel,
    Kandinsky5Transformer3DModel,
    Krea2Transformer2DModel,
    LongCatImageTransformer2DModel,
    Lumina2Transformer2DModel,
    OvisImageTransformer2DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    ZImageTransformer2DModel,
)
from torch import nn

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
ROPE = (4, 6, 6)


def unet(text: int, sizes: int | None = None) -> UNet2DConditionModel:
    """`sizes`: the width of the pooled text, where sizes and crop go in beside it."""
    more: dict[str, Any] = {}
    if sizes is not None:
        more = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": sizes + 6 * 8,
        }
    return UNet2DConditionModel(
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


def sd3(text: int, pooled: int) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        **HEADS,
        sample_size=8,
        num_layers=1,
        joint_attention_dim=text,
        caption_projection_dim=32,
        pooled_projection_dim=pooled,
        pos_embed_max_size=16,
    )


def flux(text: int, pooled: int) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        **HEADS,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=text,
        pooled_projection_dim=pooled,
        axes_dims_rope=ROPE,
    )


def flux2(text: int) -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        **HEADS,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=text,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )


def pixart(text: int) -> PixArtTransformer2DModel:
    return PixArtTransformer2DModel(
        **HEADS,
        sample_size=32,
        num_layers=1,
        cross_attention_dim=32,
        caption_channels=text,
        use_additional_conditions=False,
    )


def sana(text: int) -> SanaTransformer2DModel:
    return SanaTransformer2DModel(
        **HEADS,
        sample_size=16,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=text,
    )


def lumina2(text: int) -> Lumina2Transformer2DModel:
    return Lumina2Transformer2DModel(
        sample_size=8,
        hidden_size=32,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=ROPE,
        cap_feat_dim=text,
    )


def qwen_image(text: int) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        **HEADS, num_layers=1, joint_attention_dim=text, axes_dims_rope=ROPE
    )


def qwen_image_21(text: int) -> nn.Module:
    return diffusers.QwenImage21Transformer2DModel(
        **HEADS, num_layers=1, context_in_dim=text, axes_dims_rope=ROPE
    )


def z_image(text: int) -> ZImageTransformer2DModel:
    return ZImageTransformer2DModel(
        dim=16,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=1,
        n_kv_heads=1,
        cap_feat_dim=text,
        axes_dims=list(ROPE),
        axes_lens=[1024, 64, 64],
    )


def aura_flow(text: int) -> AuraFlowTransformer2DModel:
    return AuraFlowTransformer2DModel(
        **HEADS,
        sample_size=8,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        joint_attention_dim=text,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )


def chroma(text: int) -> ChromaTransformer2DModel:
    return ChromaTransformer2DModel(
        **HEADS,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=text,
        axes_dims_rope=ROPE,
        approximator_num_channels=16,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )


def hidream(t5: int, llama: int, pooled: int) -> HiDreamImageTransformer2DModel:
    return HiDreamImageTransformer2DModel(
        num_attention_heads=1,
        attention_head_dim=16,
        patch_size=2,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        caption_channels=[t5, llama],
        text_emb_dim=pooled,
        num_routed_experts=2,
        num_activated_experts=1,
        axes_dims_rope=ROPE,
        max_resolution=(16, 16),
        llama_layers=[0, 1],
    )


def cogview4(text: int) -> CogView4Transformer2DModel:
    return CogView4Transformer2DModel(
        **HEADS,
        num_layers=1,
        text_embed_dim=text,
        time_embed_dim=16,
        condition_dim=8,
        pos_embed_max_size=16,
        sample_size=8,
    )


def hunyuan_image(channels: int, text: int) -> HunyuanImageTransformer2DModel:
    """Without the part for words in quotes, which alone would be 8 MB."""
    return HunyuanImageTransformer2DModel(
        **HEADS,
        in_channels=channels,
        out_channels=channels,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=text,
        rope_axes_dim=(8, 8),
    )


def kandinsky5(text: int, pooled: int) -> Kandinsky5Transformer3DModel:
    return Kandinsky5Transformer3DModel(
        in_visual_dim=16,
        out_visual_dim=16,
        in_text_dim=text,
        in_text_dim2=pooled,
        time_dim=16,
        model_dim=32,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=ROPE,
        visual_cond=True,
    )


def longcat(text: int) -> LongCatImageTransformer2DModel:
    return LongCatImageTransformer2DModel(
        **HEADS,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=text,
        pooled_projection_dim=text,
        axes_dims_rope=ROPE,
    )


def krea2(text: int, layers: int) -> Krea2Transformer2DModel:
    return Krea2Transformer2DModel(
        **HEADS,
        num_layers=1,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=text,
        num_text_layers=layers,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=ROPE,
    )


def ovis_image(text: int) -> OvisImageTransformer2DModel:
    return OvisImageTransformer2DModel(
        **HEADS, num_layers=1, num_single_layers=1, joint_attention_dim=text, axes_dims_rope=ROPE
    )


def ernie_image(text: int) -> ErnieImageTransformer2DModel:
    return ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=1,
        ffn_hidden_size=32,
        text_in_dim=text,
        rope_axes_dim=ROPE,
    )
