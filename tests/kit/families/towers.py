"""Small text encoders: the real classes, two to six layers of width 16 to 32."""

from typing import Any

import transformers

WIDTH = 32
DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
SIGHT = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": WIDTH,
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
PICTURES = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"} | {
    f"vision_{each}_token_id": f"<|vision_{each}|>" for each in ("start", "end")
}


def clip(tokenizer: Any, width: int = 16, positions: int = 77) -> transformers.CLIPTextModel:
    return transformers.CLIPTextModel(_clip(tokenizer, width, positions))


def projecting_clip(
    tokenizer: Any, width: int = 16, positions: int = 77
) -> transformers.CLIPTextModelWithProjection:
    return transformers.CLIPTextModelWithProjection(_clip(tokenizer, width, positions))


def _clip(tokenizer: Any, width: int, positions: int) -> transformers.CLIPTextConfig:
    return transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=positions,
        hidden_act="gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5(vocabulary: int, width: int = WIDTH) -> transformers.T5EncoderModel:
    return transformers.T5EncoderModel(
        transformers.T5Config(**_t5(vocabulary, width), num_layers=2)
    )


def umt5(vocabulary: int) -> transformers.UMT5EncoderModel:
    return transformers.UMT5EncoderModel(
        transformers.UMT5Config(**_t5(vocabulary, WIDTH), num_layers=2)
    )


def _t5(vocabulary: int, width: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": 8,
        "d_ff": 48,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
    }


def gemma2(tokenizer: Any) -> transformers.Gemma2Model:
    special = {f"{each}_token_id": getattr(tokenizer, f"{each}_token_id") for each in _SPECIAL}
    sizes = DECODER | {"query_pre_attn_scalar": 16}
    return transformers.Gemma2Model(
        transformers.Gemma2Config(vocab_size=len(tokenizer), **sizes, **special)
    )


def glm(tokenizer: Any) -> transformers.GlmModel:
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    return transformers.GlmModel(
        transformers.GlmConfig(**DECODER, **sizes, eos_token_id=tokenizer.eos_token_id)
    )


def llama(tokenizer: Any, width: int) -> transformers.LlamaForCausalLM:
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = DECODER | {"hidden_size": width, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes, **special)
    return transformers.LlamaForCausalLM(config)


def qwen3(tokenizer: Any) -> transformers.Qwen3Model:
    return transformers.Qwen3Model(_qwen3(tokenizer))


def speaking_qwen3(tokenizer: Any, layers: int) -> transformers.Qwen3ForCausalLM:
    more = {"num_hidden_layers": layers, "intermediate_size": 16, "tie_word_embeddings": True}
    return transformers.Qwen3ForCausalLM(_qwen3(tokenizer, **more))


def _qwen3(tokenizer: Any, **more: Any) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(vocab_size=len(tokenizer), **(DECODER | more))


def qwen2_5_vl(tokenizer: Any) -> transformers.Qwen2_5_VLForConditionalGeneration:
    text = {key: value for key, value in DECODER.items() if key != "head_dim"}
    text |= {"vocab_size": len(tokenizer), "rope_parameters": MROPE}
    text |= {f"{each}_token_id": None for each in ("bos", "eos", "pad")}
    seen = SIGHT | {"fullatt_block_indexes": [0]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=seen, **_places(tokenizer)
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(tokenizer: Any, layers: int) -> transformers.Qwen3VLModel:
    return transformers.Qwen3VLModel(_qwen3_vl(tokenizer, layers))


def speaking_qwen3_vl(tokenizer: Any) -> transformers.Qwen3VLForConditionalGeneration:
    return transformers.Qwen3VLForConditionalGeneration(_qwen3_vl(tokenizer, 2))


def _qwen3_vl(tokenizer: Any, layers: int) -> transformers.Qwen3VLConfig:
    text = DECODER | {"num_hidden_layers": layers, "intermediate_size": 16}
    text |= {"vocab_size": len(tokenizer), "rope_parameters": MROPE}
    seen = SIGHT | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=seen, **_places(tokenizer))


def mistral3(tokenizer: Any) -> transformers.Mistral3Model:
    special = {f"{each}_token_id": getattr(tokenizer, f"{each}_token_id") for each in _SPECIAL}
    places = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 128,
        "llama_4_scaling_beta": 0.1,
    }
    text = transformers.Ministral3Config(
        vocab_size=len(tokenizer), **DECODER, **special, rope_parameters=places
    )
    seen = transformers.PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    return transformers.Mistral3Model(
        transformers.Mistral3Config(text_config=text, vision_config=seen)
    )


def chatglm(vocabulary: int) -> Any:
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel

    config = ChatGLMConfig(
        num_layers=3,
        padded_vocab_size=vocabulary,
        hidden_size=WIDTH,
        ffn_hidden_size=48,
        kv_channels=16,
        num_attention_heads=2,
        seq_length=512,
        add_qkv_bias=True,
        multi_query_attention=True,
        multi_query_group_num=1,
        original_rope=True,
    )
    made = ChatGLMModel(config, empty_init=False)
    for name, weight in made.named_parameters():  # it leaves those of its norms as memory was
        if "norm" in name:
            weight.data.fill_(1)
    return made


_SPECIAL = ("bos", "eos", "pad")


def _places(tokenizer: Any) -> dict[str, int]:
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in PICTURES.items()}
