"""What is in a latent dataset: the numbers of diffusers and transformers, found and told alike."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tests.kit.encodes import (
    CAPTIONS,
    COUNT,
    LONG,
    check_latents,
    encode_here,
    image_samples,
    latents_of,
    members,
    packed,
    rejected,
    stacked,
)
from tests.kit.packs import jpeg, manifest_of, write_files
from wdsprep.dataset.npy_arrays import fields_of
from wdsprep.dataset.tar.index import decode_index
from wdsprep.encoding.models.find_model import TINY
from wdsprep.encoding.models.noise import noise_keys, normal
from wdsprep.images.crop import crop

SCALE = 0.18215


# --- the numbers are those of diffusers and transformers


def pixels_of(images: Path) -> Tensor:
    samples = sorted(image_samples(images).items())
    return torch.stack([crop(sample["jpg"], 64).pixels for _, sample in samples])


@pytest.fixture(scope="session")
def posterior(images: Path) -> Any:
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(TINY / "vae", low_cpu_mem_usage=False)
    with torch.no_grad():
        return vae.encode(pixels_of(images).float() / 127.5 - 1).latent_dist


@pytest.fixture(scope="session")
def states(images: Path) -> Tensor:
    from transformers import CLIPTextModel, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(TINY / "tokenizer")
    text = CLIPTextModel.from_pretrained(TINY / "text_encoder", dtype=torch.float32)
    captions = [sample["txt"].decode() for _, sample in sorted(image_samples(images).items())]
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    with torch.no_grad():
        made: Tensor = text(tokenizer(captions, max_length=77, **options).input_ids)[0]
    return made


def assert_stored(found: Tensor, expected: Tensor) -> None:
    """The same but for the rounding to fp16."""
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-4)
    close = cosine_similarity(found.float().flatten(1), expected.flatten(1))
    assert close.min() >= 0.9999


def test_means_and_embeddings_are_those_of_a_plain_loop(
    images: Path, tmp_path: Path, posterior: Any, states: Tensor
) -> None:
    encode_here(images, tmp_path / "out", latents="mean")
    assert_stored(stacked(tmp_path / "out", "latent.npy"), posterior.mode() * SCALE)
    assert_stored(stacked(tmp_path / "out", "emb.npy"), states)


@pytest.mark.parametrize("seed", [0, 7])
def test_a_sample_is_the_mean_and_the_noise_of_its_key(
    images: Path, latents: Path, tmp_path: Path, posterior: Any, seed: int
) -> None:
    out = latents
    if seed:
        out = tmp_path / "out"
        encode_here(images, out, seed=seed)
    noise = normal(noise_keys(seed, sorted(latents_of(out))), tuple(posterior.mean.shape[1:]))
    drawn = (posterior.mean + posterior.std * noise) * SCALE
    assert_stored(stacked(out, "latent.npy"), drawn)


# --- what is in a latent dataset


def test_every_image_sample_is_there_under_its_key_and_in_its_place(
    images: Path, latents: Path
) -> None:
    check_latents(images, latents)
    assert len(latents_of(latents)) == COUNT
    assert not rejected(latents)


def test_plain_webdataset_decodes_it(latents: Path) -> None:
    import gc
    import warnings

    import webdataset as wds

    urls = [str(latents / shard.name) for shard in manifest_of(latents).shards]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files open
        found = list(wds.WebDataset(urls, shardshuffle=False).decode())
        gc.collect()
    assert len(found) == COUNT
    for sample in found:
        assert (sample["latent.npy"].shape, sample["latent.npy"].dtype) == ((4, 8, 8), "float16")
        assert sample["emb.npy"].shape[0] == 77
        assert sample["json"]["caption"] == sample["txt"]
        assert sample["json"]["key"] == sample["__key__"]


def test_the_layout_finds_every_array_by_one_positioned_read(latents: Path) -> None:
    manifest = manifest_of(latents)
    record = manifest.settings["layout"]
    fields = fields_of(record)
    assert [field.name for field in fields] == ["latent.npy", "emb.npy"]
    known = latents_of(latents)
    for shard in manifest.shards:
        data = (latents / shard.name).read_bytes()
        starts = decode_index((latents / f"{shard.name}.idx").read_bytes(), "idx")
        for key, start in zip(members(latents / shard.name), starts[:-1], strict=True):
            for field, line in zip(fields, record, strict=True):
                begin = start + line["offset"]
                expected = known[key][field.name]
                assert (expected.dtype.str, expected.shape) == (field.dtype, field.shape)
                assert data[begin : begin + field.array_nbytes] == expected.tobytes()


def test_the_json_says_how_the_array_came_about(images: Path, latents: Path) -> None:
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(TINY / "tokenizer")
    crops = {  # width, height: scaled, crop
        (64, 80): ((64, 80), [0, 8, 64, 72]),
        (100, 90): ((71, 64), [3, 0, 67, 64]),
        (200, 136): ((94, 64), [15, 0, 79, 64]),
    }
    originals = image_samples(images)
    for key, sample in latents_of(latents).items():
        of_image, facts = json.loads(originals[key]["json"]), sample["json"]
        scaled, box = crops[of_image["width"], of_image["height"]]
        count = len(tokenizer(of_image["caption"]).input_ids)
        assert facts == {
            "caption": of_image["caption"], "crop": box, "cut": count > 77, "key": key,
            "height": of_image["height"], "width": of_image["width"],
            "scaled_height": scaled[1], "scaled_width": scaled[0], "source": of_image["source"],
            "source_height": of_image["source_height"], "source_width": of_image["source_width"],
            "tokens": count,
        }  # fmt: skip
        assert sample["txt"] == of_image["caption"]


def test_the_size_before_pack_shrank_an_image_is_kept(tmp_path: Path) -> None:
    write_files(tmp_path / "in", {"a.png": jpeg(1, (300, 200), "PNG")})
    packed(tmp_path / "in", tmp_path / "images", "--reencode", "jpg:90", "--max-side", "150")
    encode_here(tmp_path / "images", tmp_path / "out")
    ((_, sample),) = latents_of(tmp_path / "out").items()
    names = ("source", "source_width", "source_height", "width", "height")
    assert [sample["json"][name] for name in names] == ["a.png", 300, 200, 150, 100]


def test_long_captions_are_cut_and_counted_and_empty_ones_are_the_empty_text(
    latents: Path,
) -> None:
    samples = latents_of(latents).values()
    long = sum(CAPTIONS[n % 5] == LONG for n in range(COUNT))
    empty = sum(CAPTIONS[n % 5] == "" for n in range(COUNT))
    assert sum(sample["json"]["cut"] for sample in samples) == long
    assert manifest_of(latents).counts == {"cut": long, "empty_caption": empty}
    of_nothing = np.load(latents / "empty.emb.npy")
    found = [sample["emb.npy"] for sample in samples if not sample["txt"]]
    assert len(found) == empty
    for emb in found:
        np.testing.assert_allclose(emb, of_nothing, rtol=1e-3, atol=1e-3)
