"""Small random models that score, as folders, and what transformers alone makes of one image.

small("clip", folder)                         clip, siglip, dinov2, vit or swin
alone(folder, image, caption)                 its outputs for that image, by name
head(path, width)                             a linear layer in safetensors
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

from tests.kit.families import vocabularies

SIDE = 32
LAYERS = {"hidden_size": 32, "intermediate_size": 48}
LAYERS |= {"num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {**LAYERS, "image_size": SIDE, "patch_size": 8}
SQUARE = {"height": SIDE, "width": SIDE}
LABELS = {"vit": ("Neutral", "nsfw"), "swin": ("clean", "watermark", "logo")}
KINDS = ("clip", "siglip", "dinov2", "vit", "swin")

transformers.utils.logging.disable_progress_bar()


def small(kind: str, folder: Path, **more: Any) -> Path:
    """A model with its image processor; `more` goes into its config."""
    torch.manual_seed(KINDS.index(kind))
    make = {"clip": _clip, "siglip": _siglip, "dinov2": _dinov2, "vit": _vit, "swin": _swin}
    for each in make[kind](more):
        each.save_pretrained(folder)
    return folder


def _clip(more: dict[str, Any]) -> tuple[Any, ...]:
    tokenizer = vocabularies.clip()
    text = {**LAYERS, "vocab_size": len(tokenizer), "max_position_embeddings": 77}
    text |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=VISION, projection_dim=24, **more
    )
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SQUARE)
    return transformers.CLIPModel(config), processor, tokenizer


def _siglip(more: dict[str, Any]) -> tuple[Any, ...]:
    tokenizer = vocabularies.t5(64)
    text = {**LAYERS, "vocab_size": len(tokenizer), "max_position_embeddings": 64}
    config = transformers.SiglipConfig(text_config=text, vision_config=VISION, **more)
    processor = transformers.SiglipImageProcessor(size=SQUARE)
    return transformers.SiglipModel(config), processor, tokenizer


def _dinov2(more: dict[str, Any]) -> tuple[Any, ...]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"image_size": SIDE, "patch_size": 8}
    config = transformers.Dinov2Config(**sizes | more)
    processor = transformers.BitImageProcessor(size={"shortest_edge": 40}, crop_size=SQUARE)
    return transformers.Dinov2Model(config), processor


def _vit(more: dict[str, Any]) -> tuple[Any, ...]:
    config = transformers.ViTConfig(**VISION | _labels("vit") | more)
    processor = transformers.ViTImageProcessor(size=SQUARE)
    return transformers.ViTForImageClassification(config), processor


def _swin(more: dict[str, Any]) -> tuple[Any, ...]:
    sizes = {"image_size": SIDE, "patch_size": 4, "embed_dim": 16, "window_size": 4}
    sizes |= {"depths": [1, 1], "num_heads": [2, 2], "problem_type": "multi_label_classification"}
    config = transformers.SwinConfig(**sizes | _labels("swin") | more)
    processor = transformers.ViTImageProcessor(size=SQUARE)
    return transformers.SwinForImageClassification(config), processor


def _labels(kind: str) -> dict[str, Any]:
    numbered = dict(enumerate(LABELS[kind]))
    return {"id2label": numbered, "label2id": {name: n for n, name in numbered.items()}}


def head(path: Path, width: int, *, value: float | None = None) -> Path:
    torch.manual_seed(7)
    weight = torch.randn(1, width) if value is None else torch.full((1, width), value)
    save_file({"weight": weight, "bias": torch.tensor([5.0])}, path)
    return path


@cache
def _whole(folder: Path) -> tuple[Any, Any]:
    """A model and its image processor, as transformers loads them."""
    config = transformers.AutoConfig.from_pretrained(folder)
    is_classifier = config.model_type in ("vit", "swin")
    kind = transformers.AutoModelForImageClassification if is_classifier else transformers.AutoModel
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    return kind.from_pretrained(folder).eval(), processor


def alone(folder: Path, image: Image.Image, caption: str = "") -> dict[str, torch.Tensor]:
    """What transformers gives of one image and caption, in a batch of their own."""
    model, processor = _whole(folder)
    config, pixels = model.config, processor(images=image, return_tensors="pt")
    with torch.inference_mode():
        if config.model_type in ("vit", "swin"):
            logits = model(**pixels).logits[0]
            is_several = config.problem_type == "multi_label_classification"
            found = logits.sigmoid() if is_several else logits.softmax(-1)
            return {config.id2label[n].lower(): value for n, value in enumerate(found)}
        if config.model_type == "dinov2":
            return {"image_emb": model(**pixels).pooler_output[0]}
        is_siglip = "siglip" in config.model_type
        padding = {"padding": "max_length", "max_length": 64} if is_siglip else {}
        tokens = transformers.AutoTokenizer.from_pretrained(folder)(
            [caption], truncation=True, return_tensors="pt", **padding
        )
        output = model(**pixels, **tokens)
        logits = output.logits_per_image[0, 0]
        if is_siglip:
            logits = logits - model.logit_bias[0]
        similarity = logits / model.logit_scale.exp().squeeze()
        return {"similarity": similarity, "image_emb": output.image_embeds[0]}
