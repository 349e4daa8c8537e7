"""The files of models as their repositories have them: configs are real, weights a few bytes."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VAE = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [128, 256, 512, 512],
    "latent_channels": 4,
}
TEXT = {"architectures": ["CLIPTextModel"], "hidden_size": 1024, "max_position_embeddings": 77}
INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.42.1",
    "feature_extractor": [None, None],
    "requires_safety_checker": False,
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
FLUX_INDEX = {
    "_class_name": "FluxPipeline",
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
FLUX_VAE = {**VAE, "latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159}


def sd_files() -> dict[str, bytes]:
    """The files of a repository as Stable Diffusion's are; their weights are a few bytes here."""
    return {
        "README.md": b"# a model",
        "model_index.json": json.dumps(INDEX).encode(),
        "unet/diffusion_pytorch_model.safetensors": b"never fetched",
        "text_encoder/config.json": json.dumps(TEXT).encode(),
        "text_encoder/model.safetensors": b"text weights",
        "text_encoder/model.fp16.safetensors": b"half text weights",
        "text_encoder/pytorch_model.bin": b"pickle",
        "tokenizer/merges.txt": b"#version: 0.2\n",
        "tokenizer/vocab.json": b"{}",
        "tokenizer/special_tokens_map.json": b"{}",
        "tokenizer/tokenizer_config.json": b'{"model_max_length": 77}',
        "vae/config.json": json.dumps(VAE).encode(),
        "vae/diffusion_pytorch_model.safetensors": b"vae weights",
        "vae/diffusion_pytorch_model.fp16.safetensors": b"half vae weights",
        "vae/diffusion_pytorch_model.bin": b"pickle",
    }


def flux_files(index: dict[str, Any] | None = None, **changed: Any) -> dict[str, bytes]:
    """A pipeline with two text encoders, one of them in parts, and all that is not needed."""
    stem = "text_encoder_2/model"
    configs = {
        "model_index.json": {**(index or FLUX_INDEX), **changed},
        "text_encoder_2/config.json": {"architectures": ["T5EncoderModel"]},
        "tokenizer_2/tokenizer_config.json": {},
        "vae/config.json": FLUX_VAE,
    }
    return {
        **sd_files(),
        **{name: json.dumps(value).encode() for name, value in configs.items()},
        f"{stem}.safetensors.index.json": b"{}",
        f"{stem}-00001-of-00002.safetensors": b"a part",
        f"{stem}-00002-of-00002.safetensors": b"another",
        "tokenizer_2/spiece.model": b"pieces",
        "tokenizer_2/model.safetensors": b"no part of a tokenizer",
        "transformer/config.json": b"{}",
        "transformer/diffusion_pytorch_model.safetensors": b"never fetched",
    }


def without(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name not in names}


def with_changes(files: dict[str, bytes], changes: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files with some replaced: by bytes, by JSON, or by nothing."""
    kept = without(files, *changes)
    for name, value in changes.items():
        if value is not None:
            kept[name] = value if isinstance(value, bytes) else json.dumps(value).encode()
    return kept


def changed(folder: Path, into: Path, file: str = "model_index.json", **values: Any) -> Path:
    """Return a copy of which a file says something else; what is None is taken out."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(folder, into)
    found = json.loads((into / file).read_bytes()) | values
    kept = {name: value for name, value in found.items() if value is not None}
    (into / file).write_text(json.dumps(kept))
    return into
