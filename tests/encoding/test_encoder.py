"""What is stored is what diffusers and transformers compute, whatever the batch."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cosine_similarity, interpolate

from tests.kit.encoders import load_latent_encoder as encoder
from tools.tiny.drawings import draw
from wdsprep.encoding.models.base import Encoded
from wdsprep.encoding.models.device import Encoder
from wdsprep.encoding.models.encoder import LatentEncoder, load_encoder
from wdsprep.encoding.models.find_model import TINY, find_model
from wdsprep.encoding.models.noise import noise_keys
from wdsprep.encoding.models.vae import Decoder
from wdsprep.encoding.recipe_options import Encode
from wdsprep.errors import WorkError

CAPTIONS = [
    "a photo of a cat on a sofa",
    "",
    "Ein Hund läuft im Schnee — 雪の中の犬 🐕",
    "one, two! " * 60,
    "<|endoftext|> in the middle <|endoftext|>",
    "  spaces \t and\nlines  ",
]


def pictures(count: int, side: int = 64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    fine = torch.rand(count, 3, side, side, generator=generator)
    smooth = interpolate(coarse, side, mode="bilinear")
    return ((0.85 * smooth + 0.15 * fine) * 255).round().to(torch.uint8)


tiny = partial(cache(encoder), "tiny")


def run(encoder: LatentEncoder, pixels: Tensor, *, seed: int = 0, exact: bool = False) -> Encoded:
    count = len(pixels)
    captions = [CAPTIONS[i % len(CAPTIONS)] for i in range(count)]
    keys = noise_keys(seed, [f"{i:06}" for i in range(count)])
    return both(encoder, pixels, captions, keys, exact=exact)


def both(
    encoder: Encoder, pixels: Tensor, captions: Sequence[str], keys: Tensor, *, exact: bool = False
) -> Encoded:
    """The arrays of images and of captions, as one."""
    made = encoder.encode_images(pixels, keys, exact=exact)
    if not encoder.has_text:
        return made
    text = encoder.encode_texts(encoder.tokens(captions), exact=exact)
    return Encoded(made.arrays | text.arrays, made.ok & text.ok)


def ids_of(encoder: Encoder, captions: Sequence[str]) -> list[list[int]]:
    return [list(found.ids["tokens.npy"]) for found in encoder.tokens(captions)]


def copy_of_tiny(folder: Path) -> Path:
    return Path(shutil.copytree(TINY, folder / "model"))


def change_weights(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def similarity(a: Tensor, b: Tensor) -> float:
    return cosine_similarity(a.float().flatten(1), b.float().flatten(1)).min().item()


# Numbers


def test_moments_rebuild_the_distribution() -> None:
    """By a plain loop, which everything here is held against."""
    from diffusers import AutoencoderKL
    from diffusers.image_processor import VaeImageProcessor
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    pixels = pictures(4)
    stored = run(tiny(latents="moments"), pixels).arrays["latent.npy"]
    ours = DiagonalGaussianDistribution(stored.float())
    vae = AutoencoderKL.from_pretrained(TINY / "vae", low_cpu_mem_usage=False)
    with torch.no_grad():
        theirs = vae.encode(VaeImageProcessor.normalize(pixels.float() / 255)).latent_dist
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.std, theirs.std, rtol=3e-3, atol=1e-5)


def test_neighbours_and_padding_do_not_show() -> None:
    ours, pixels = tiny(), pictures(4)
    keys = noise_keys(0, list("abcd"))
    whole = both(ours, pixels, CAPTIONS[:4], keys)
    order = [2, 0, 0, 0]
    padded = both(ours, pixels[order], [CAPTIONS[row] for row in order], keys[order])
    alone = both(ours, pixels[2:3], CAPTIONS[2:3], keys[2:3])
    for name, made in whole.arrays.items():
        assert torch.equal(padded.arrays[name][0], made[2])
        assert (alone.arrays[name][0] - made[2]).abs().max() <= 1e-3 * made[2].abs().max()


def test_half_precision_comes_close() -> None:
    pixels = pictures(2)
    exact = run(tiny(latents="mean"), pixels)
    for dtype, least in (("bf16", 0.998), ("fp16", 0.9999)):
        ours = tiny(latents="mean", dtype=dtype)
        assert ours.itemsize == 2
        made = run(ours, pixels)
        for name, values in exact.arrays.items():
            assert similarity(made.arrays[name], values) > least
        again = run(ours, pixels, exact=True)
        assert all(torch.equal(again.arrays[name], exact.arrays[name]) for name in exact.arrays)


@pytest.mark.system
def test_tiny_makes_drawings_again_that_it_was_not_trained_on() -> None:
    images = [draw(f"for this test {n}", (256, 256)).image for n in range(8)]
    drawn = torch.stack([torch.from_numpy(np.array(image)) for image in images])
    ours = tiny(latents="mean", text="none", resolution=256)
    latents = run(ours, drawn.permute(0, 3, 1, 2).contiguous()).arrays["latent.npy"]
    decoder = Decoder(find_model("tiny", text="none"))
    made = torch.stack([torch.from_numpy(decoder.decode(latent)) for latent in latents])
    errors = (made.float() - drawn.float()).square().flatten(1).mean(1)
    assert (10 * torch.log10(255**2 / errors)).mean() > 22


# What does not fit


def test_what_overflows_in_half_precision_is_right_in_fp32(tmp_path: Path) -> None:
    """Large activations that a norm makes small again, as in SDXL's VAE."""
    folder = copy_of_tiny(tmp_path)

    def large(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        names = ("encoder.conv_in.weight", "encoder.conv_in.bias")
        return {n: v.float() * 1e6 if n in names else v.float() for n, v in weights.items()}

    change_weights(folder / "vae/diffusion_pytorch_model.safetensors", large)
    ours, pixels = encoder(folder, dtype="fp16", text="none"), pictures(3)
    assert not run(ours, pixels).ok.any()
    assert run(ours, pixels, exact=True).ok.all()
    assert run(encoder(folder, dtype="bf16", text="none"), pixels).ok.all()


def test_only_the_row_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path)
    path = folder / "text_encoder/model.safetensors"
    first, second, third = ids_of(tiny(), CAPTIONS[:3])
    only = next(iter({*third} - {*first, *second}))

    def broken(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        name = next(n for n in weights if n.endswith("token_embedding.weight"))
        weights[name][only] = torch.nan
        return weights

    change_weights(path, broken)
    ours = encoder(folder)
    for exact in (False, True):
        made = both(ours, pictures(3), CAPTIONS[:3], noise_keys(0, list("abc")), exact=exact)
        assert made.ok.tolist() == [True, True, False]


def test_values_beyond_the_storage_range_are_named(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path)
    change_json(folder / "vae/config.json", scaling_factor=1e6)
    ours = encoder(folder, text="none")
    assert not run(ours, pictures(1), exact=True).ok.any()


# Captions


@pytest.mark.parametrize("pad", ["<|endoftext|>", "!"])
def test_tokens_are_cut_padded_and_masked_as_the_libraries_do(pad: str, tmp_path: Path) -> None:
    from transformers import CLIPTextModel, CLIPTokenizer

    folder = copy_of_tiny(tmp_path)
    change_json(folder / "text_encoder/config.json", use_attention_mask=True)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        change_json(folder / "tokenizer" / name, pad_token=pad)
    ours = encoder(folder)
    found = ours.tokens(CAPTIONS)
    tokenizer: Any = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    inputs = tokenizer(CAPTIONS, max_length=tokenizer.model_max_length, **options)
    assert [tokens.ids["tokens.npy"] for tokens in found] == inputs.input_ids.tolist()
    counts = inputs.attention_mask.sum(1).tolist()
    for tokens, count in zip(found, counts, strict=True):
        assert tokens.cut == (tokens.count > 77)
        assert min(tokens.count, 77) == count
    assert found[1].count == 2
    assert found[3].count == 242  # start, 60 times four tokens, end
    text = CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    with torch.no_grad():
        states = text(inputs.input_ids, attention_mask=inputs.attention_mask)[0]
    apart = ours.text_rows(found).arrays["emb.npy"] - states
    assert apart[[0, 1, 2, 3, 5]].abs().max() < 1e-5  # but for the one with ends in the middle


# Other models


def test_names_of_older_checkpoints_are_understood(tmp_path: Path) -> None:
    """Stable Diffusion's files date from before both libraries renamed their tensors."""
    folder = copy_of_tiny(tmp_path)
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def older_vae(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {}
        for name, value in weights.items():
            for new, before in old.items():
                name = name.replace(f"attentions.0.{new}.", f"attentions.0.{before}.")
            renamed[name] = value
        assert renamed.keys() != weights.keys()
        return renamed

    def older_text(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        names = {name: f"text_model.{name.removeprefix('text_model.')}" for name in weights}
        places = torch.arange(77)[None]
        made = {names[name]: value for name, value in weights.items()}
        return {**made, "text_model.embeddings.position_ids": places}

    change_weights(folder / "vae/diffusion_pytorch_model.safetensors", older_vae)
    change_weights(folder / "text_encoder/model.safetensors", older_text)
    pixels = pictures(2)
    made, wanted = run(encoder(folder), pixels), run(tiny(), pixels)
    assert all(torch.equal(made.arrays[name], wanted.arrays[name]) for name in wanted.arrays)


def test_weights_that_lack_a_tensor_are_refused_instead_of_made_up(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path)
    for name, lost in (
        ("vae/diffusion_pytorch_model.safetensors", "encoder.conv_in.weight"),
        ("text_encoder/model.safetensors", "final_layer_norm.weight"),
    ):
        kept = (folder / name).read_bytes()
        change_weights(
            folder / name,
            lambda found, lost=lost: {n: v for n, v in found.items() if not n.endswith(lost)},
        )
        with pytest.raises(WorkError, match=f"lacks 1 tensor .*{lost}"):
            encoder(folder)
        (folder / name).write_bytes(kept)


@pytest.mark.parametrize(
    "name", ["vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"]
)
def test_damaged_weights_are_one_line(name: str, tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(WorkError, match=f"{name} is not a safetensors file") as caught:
        encoder(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_weights_in_parts_are_those_of_one_file(tmp_path: Path, variant: str | None) -> None:
    """Written by the libraries themselves."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel

    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    options = {"max_shard_size": "300KB", "variant": variant}
    for kind, name in ((AutoencoderKL, "vae"), (CLIPTextModel, "text_encoder")):
        (weights,) = (tmp_path / name).glob("*.safetensors")
        kind.from_pretrained(weights.parent).save_pretrained(weights.parent, **options)
        weights.unlink()
        assert len(list(weights.parent.glob("*.safetensors"))) > 1
    assert bool(find_model(str(tmp_path), text="emb").note) == (variant == "fp16")
    whole, parts = run(tiny(), pictures(3)), run(encoder(tmp_path), pictures(3))
    for name, array in whole.arrays.items():
        assert torch.equal(array, parts.arrays[name])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_agrees_with_the_cpu() -> None:
    pixels = pictures(4)
    wanted = run(tiny(), pixels)
    recipe = Encode(resolution=64, dtype="fp16")
    ours = load_encoder(find_model("tiny", text="emb"), recipe, "cuda")
    keys = noise_keys(0, [f"{i:06}" for i in range(4)])
    for exact in (False, True):
        made = both(ours, pixels.cuda(), CAPTIONS[:4], keys.cuda(), exact=exact)
        for name, values in wanted.arrays.items():
            assert similarity(made.arrays[name].cpu(), values) > 0.9999
