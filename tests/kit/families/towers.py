"""Small text encoders with their tokenizers: the real classes, two to six layers of width 16 to 32,
or of 28 layers where a family takes some by their numbers."""

from pathlib import Path
from typing import Any

import transformers
from torch import nn

from tests.kit.families import vocabularies as words

CLIPS = 16
"""the width of a CLIP"""
WIDTH = 32
WIDE = 48
DECODER = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3}
DECODER |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
DECODER |= {"max_position_embeddings": 2048}
SIGHT = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
SIGHT |= {"out_hidden_size": WIDTH}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
PICTURES = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"} | {
    f"vision_{each}_token_id": f"<|vision_{each}|>" for each in ("start", "end")
}
Tower = tuple[Any, nn.Module]
"""A tokenizer and the network that reads its tokens."""


def clip(width: int = CLIPS) -> Tower:
    tokenizer = words.clip()
    return tokenizer, transformers.CLIPTextModel(_clip(tokenizer, width, 77))


def projecting_clip(places: int = 77) -> Tower:
    tokenizer = words.clip(places)
    return tokenizer, transformers.CLIPTextModelWithProjection(_clip(tokenizer, CLIPS, places))


def _clip(tokenizer: Any, width: int, places: int) -> transformers.CLIPTextConfig:
    return transformers.CLIPTextConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=places,
        hidden_act="gelu",
        **_special(tokenizer),
    )


def t5(tokenizer: Any = None, *, width: int = WIDTH, kind: str = "T5") -> Tower:
    tokenizer = tokenizer or words.t5()
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 48, "num_heads": 2, "num_layers": 2}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", **sizes
    )
    return tokenizer, getattr(transformers, f"{kind}EncoderModel")(config)


def gemma2(tokenizer: Any = None) -> Tower:
    tokenizer = tokenizer or words.gemma()
    config = transformers.Gemma2Config(**DECODER, **_special(tokenizer), query_pre_attn_scalar=16)
    return tokenizer, transformers.Gemma2Model(config)


def glm() -> Tower:
    tokenizer = words.glm()
    config = transformers.GlmConfig(**DECODER, **_special(tokenizer, "pad", "eos"))
    return tokenizer, transformers.GlmModel(config)


def llama(width: int) -> Tower:
    tokenizer = words.llama()
    sizes = DECODER | {"hidden_size": width, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**sizes, **_special(tokenizer, "bos", "eos"))
    return tokenizer, transformers.LlamaForCausalLM(config)


def qwen3() -> Tower:
    tokenizer = words.qwen()
    config = transformers.Qwen3Config(vocab_size=len(tokenizer), **DECODER)
    return tokenizer, transformers.Qwen3Model(config)


def speaking_qwen3() -> Tower:
    """Of 28 layers, as Flux 2 takes those with the numbers 9, 18 and 27."""
    tokenizer = words.qwen()
    more = {"num_hidden_layers": 28, "intermediate_size": 16, "tie_word_embeddings": True}
    config = transformers.Qwen3Config(vocab_size=len(tokenizer), **(DECODER | more))
    return tokenizer, transformers.Qwen3ForCausalLM(config)


def qwen2_5_vl() -> Tower:
    tokenizer = words.qwen()
    text = {key: value for key, value in DECODER.items() if key != "head_dim"}
    text |= {"vocab_size": len(tokenizer), "rope_parameters": MROPE}
    text |= {f"{each}_token_id": None for each in ("bos", "eos", "pad")}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=SIGHT | {"fullatt_block_indexes": [0]}, **_places(tokenizer)
    )
    return tokenizer, transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(kind: Any, layers: int) -> Tower:
    tokenizer = words.qwen()
    text = DECODER | {"num_hidden_layers": layers, "intermediate_size": 16}
    text |= {"vocab_size": len(tokenizer), "rope_parameters": MROPE}
    seen = SIGHT | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=seen, **_places(tokenizer))
    return tokenizer, kind(config)


def mistral3() -> Tower:
    tokenizer = words.mistral()
    places = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "llama_4_scaling_beta": 0.1}
    places |= {"original_max_position_embeddings": 128}
    text = transformers.Ministral3Config(**DECODER, **_special(tokenizer), rope_parameters=places)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    seen = transformers.PixtralVisionConfig(
        **sizes, num_attention_heads=2, image_size=32, patch_size=8
    )
    config = transformers.Mistral3Config(text_config=text, vision_config=seen)
    return tokenizer, transformers.Mistral3Model(config)


def chatglm(aside: Path) -> Tower:
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel

    tokenizer = words.chatglm(aside)
    config = ChatGLMConfig(
        num_layers=3,
        padded_vocab_size=tokenizer.vocab_size,
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
    return tokenizer, made


def _special(tokenizer: Any, *names: str) -> dict[str, int]:
    """Return the size of a vocabulary, and the numbers of its tokens of these names, or of all."""
    ids = {f"{n}_token_id" for n in names or ("bos", "eos", "pad")}
    return {"vocab_size": len(tokenizer)} | {name: getattr(tokenizer, name) for name in ids}


def _places(tokenizer: Any) -> dict[str, int]:
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in PICTURES.items()}
