"""Reference images become what the pipeline itself makes of them, and text that depends on them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.kit.encoders import load_latent_encoder
from tests.kit.families.reference import as_called, whole_pipeline
from tests.kit.model_files import changed
from wdsprep.encoding.models.encoder import LatentEncoder
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.models.references import ReferencePipeline
from wdsprep.encoding.recipe_defaults import settle_recipe
from wdsprep.encoding.recipe_options import Encode
from wdsprep.errors import UsageError, WorkError

SIZES = ((300, 200), (1500, 900), (161, 640))
"""Small, over a megapixel, and high; of sides that no family takes as they are."""
SEVERAL = ("Flux2Klein", "QwenImageEditPlus", "QwenImage21")
"""Families that take several references."""
HAS_21 = hasattr(diffusers, "QwenImage21Pipeline")
QWEN_21 = pytest.param(
    "QwenImage21", marks=[pytest.mark.system, pytest.mark.skipif(not HAS_21, reason="no class")]
)
KONTEXT, EDIT, PLUS, KANDINSKY, LONGCAT = (
    pytest.param(name, marks=pytest.mark.system)
    for name in (
        *("FluxKontext", "QwenImageEdit", "QwenImageEditPlus"),
        *("Kandinsky5I2I", "LongCatImageEdit"),
    )
)
OF_PICTURES = (EDIT, QWEN_21, KANDINSKY, LONGCAT)
"""Families whose text depends on references, but for that of the quick half."""
FAMILIES = (KONTEXT, "Flux2Klein", PLUS, *OF_PICTURES)
ONE_OF_EACH_VAE = ("FluxKontext", "QwenImageEditPlus")
CAPTION = "a red house by the sea"

Family = Callable[[str], Path]
pytestmark = pytest.mark.usefixtures("small_references")


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Return a random picture, smooth enough that scaling matters and does not make it grey."""
    small = np.random.default_rng(seed).integers(0, 256, (9, 7, 3)).astype(np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def by_pipeline(
    folder: Path, images: list[Image.Image], caption: str
) -> tuple[list[Any], list[Tensor]]:
    """Return what a whole pipeline makes of one sample: its embeddings, and latents of images.

    Images are contiguous in memory, as wdsprep has them: kernels differ by layout. Where a pipeline
    draws a latent, its distribution has no width.
    """
    pipeline, latents = whole_pipeline(folder), []
    has_method = hasattr(pipeline, "_encode_vae_image")
    name = "_encode_vae_image" if has_method else "prepare_latents"
    encode, by_vae = getattr(pipeline, name), pipeline.vae.encode

    def noted(*words: Any, **options: Any) -> Any:
        made = encode(*words, **options)
        # Kandinsky's: noise, the reference and a mask as the channels of a frame, which come last.
        latents.append(made if has_method else made[:, 0].movedim(-1, 1)[:, 16:32])
        return made

    def mode(pixels: Tensor) -> Any:
        mode = by_vae(pixels.contiguous()).latent_dist.mode()
        drawn = SimpleNamespace(mode=lambda: mode, sample=lambda **_: mode)
        return SimpleNamespace(latent_dist=drawn)

    with patch.object(pipeline.vae, "encode", mode), patch.object(pipeline, name, noted):
        text, *_ = as_called(folder, caption, image=images if len(images) > 1 else images[0])
    return [*text.values()], latents


@cache
def loaded(folder: Path, references: int = 1, **recipe: Any) -> tuple[LatentEncoder, Any]:
    """Return an encoder, and what prepares references for it."""
    model = find_model(str(folder), text=recipe.get("text", "emb"))
    encoder = load_latent_encoder(folder, references=references, **recipe)
    return encoder, ReferencePipeline(model)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Flux2Klein", SIZES[0]),
        *(pytest.param(name, SIZES[0], marks=pytest.mark.system) for name in ONE_OF_EACH_VAE),
        *(pytest.param("Flux2Klein", size, marks=pytest.mark.system) for size in SIZES[1:]),
    ],
)
def test_a_reference_is_the_mode_that_the_pipeline_encodes(
    name: str, size: tuple[int, int], family: Family
) -> None:
    encoder, references = loaded(family(name))
    images = [picture(size)]
    _, [wanted] = by_pipeline(family(name), images, CAPTION)
    wanted = wanted.reshape(wanted.shape[1], *wanted.shape[-2:])
    (pixels,) = references.prepare(images).pixels
    (again,) = references.prepare(images).pixels
    assert torch.equal(pixels, again)
    alone = encoder.image_rows(pixels[None]).arrays["latent.npy"]
    assert alone[0].shape == wanted.shape
    most = 0 if name == "FluxKontext" else 1e-5  # others divide
    assert (alone[0] - wanted).abs().max() <= most
    stored = encoder.encode_images(torch.stack([pixels, 255 - pixels]))
    assert stored.ok.all()
    assert (stored.arrays["latent.npy"][0].float() - wanted).abs().max() <= 5e-4 * max(
        1, float(wanted.abs().max())
    )


@pytest.mark.system
@pytest.mark.parametrize("name", FAMILIES)
def test_several_references_are_each_as_if_alone_or_refused(name: str, family: Family) -> None:
    _, references = loaded(family(name))
    images = [picture(size, seed) for seed, size in enumerate(SIZES[:2])]
    if name not in SEVERAL:
        with pytest.raises(WorkError, match="cannot take these reference images"):
            references.prepare(images)
        return
    alone = [references.prepare([image]).pixels[0] for image in images]
    together = references.prepare(images).pixels
    assert all(map(torch.equal, together, alone))
    _, wanted = by_pipeline(family(name), images, CAPTION)
    assert [latent.shape[-2:] for latent in wanted] == [
        tuple(side // 16 * (2 if name == "QwenImageEditPlus" else 1) for side in pixels.shape[1:])
        for pixels in together
    ]


@pytest.mark.parametrize("name", ["QwenImageEditPlus", *OF_PICTURES])
def test_text_is_what_the_pipeline_makes_of_that_caption_and_its_images(
    name: str, family: Family
) -> None:
    count = 2 if name in SEVERAL else 1
    encoder, references = loaded(family(name), count, latents="none")
    assert encoder.takes_images
    samples = [(CAPTION, [picture(SIZES[0], 1)] * count), ("two dogs " * 9, [picture(SIZES[2], 2)])]
    images = [references.prepare(pictures).for_text for _, pictures in samples]
    tokens = encoder.tokens([text for text, _ in samples], images)
    (embeddings, *others), _ = by_pipeline(family(name), samples[0][1], CAPTION)
    alone = encoder.text_rows(tokens[:1])
    assert alone.lengths is not None
    assert int(alone.lengths[0]) == embeddings.shape[1]
    assert torch.equal(alone.arrays["emb.npy"], embeddings)
    if name == "Kandinsky5I2I":  # of which others are a second embedding, and lengths in sum
        assert torch.equal(alone.arrays["clip.npy"], others[0])
        assert others[1].tolist() == [0, int(alone.lengths[0])]
    together = encoder.text_rows(tokens[::-1])
    assert torch.equal(together.arrays["emb.npy"][-1, : embeddings.shape[1]], embeddings[0])
    again = encoder.tokens([CAPTION], images[:1])
    assert torch.equal(encoder.text_rows(again).arrays["emb.npy"], embeddings)
    other = encoder.text_rows(encoder.tokens([CAPTION], images[1:2])).arrays["emb.npy"]
    assert other.shape != embeddings.shape or not torch.equal(other, embeddings)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        pytest.param("QwenImageEdit", 1, marks=pytest.mark.system),
        ("QwenImageEditPlus", 3),
        ("FluxKontext", 3),
        pytest.param("Kandinsky5I2I", 1, marks=pytest.mark.system),
    ],
)
@pytest.mark.parametrize("latents", ["none", pytest.param("auto", marks=pytest.mark.system)])
def test_text_has_room_for_as_many_references_as_the_pipeline_takes(
    name: str, most: int, latents: str, family: Family
) -> None:
    """With its VAE or without; where text does not depend on references, any number is right."""
    recipe = Encode(resolution=64, latents=latents, roles=("target", "source"))
    model = find_model(str(family(name)), text="emb", has_vae=latents == "auto")
    assert model.references == 0
    assert settle_recipe(recipe, model, "cpu")[1].references == most


@pytest.mark.system
@pytest.mark.parametrize(("name", "most"), [("Kandinsky5I2I", 1024), ("LongCatImageEdit", 512)])
def test_a_caption_over_which_a_pipeline_fails_with_its_image_has_no_tokens(
    name: str, most: int, family: Family
) -> None:
    """Both fail where they should cut; what they take decides the longest text."""
    encoder, references = loaded(family(name), latents="none", roles=("target", "source"))
    image = references.prepare([picture(SIZES[0])]).for_text
    texts = [f"{CAPTION} " * count for count in (1, 9, 400)]
    (short, longer, *others) = encoder.tokens(texts, [image] * 3)
    assert [short.count < longer.count] + [text.count for text in others] == [True, 0]
    (emb,) = (field for field in encoder.fields if field.name == "emb.npy")
    assert emb.is_variable
    assert most <= emb.shape[0] < most + 100


def test_text_without_the_images_that_it_depends_on_is_an_error(family: Family) -> None:
    encoder, _ = loaded(family("QwenImageEditPlus"), 2, latents="none")
    with pytest.raises(ValueError, match="depends on images"):
        encoder.tokens([CAPTION])
    with pytest.raises(ValueError, match="empty caption for each sample"):
        encoder.empty()


def test_a_processor_that_would_make_enormous_images_is_refused(
    family: Family, tmp_path: Path
) -> None:
    pictures = {"size": {"shortest_edge": 10**9, "longest_edge": 10**10}}
    file = "processor/processor_config.json"
    folder = changed(
        family("QwenImageEditPlus"), tmp_path / "model", file, image_processor=pictures
    )
    with pytest.raises(UsageError, match=r"_edge 10{9,10}, and no network has over"):
        find_model(str(folder), text="emb")


def test_a_reference_that_the_pipeline_refuses_is_told_with_its_words(family: Family) -> None:
    _, references = loaded(family("Flux2Klein"), text="none")
    with pytest.raises(WorkError, match="Image too small: 60"):
        references.prepare([picture((60, 200))])


def test_threads_prepare_references_at_once(family: Family) -> None:
    _, references = loaded(family("Flux2Klein"), text="none")
    images = [picture((90 + 20 * number, 128), number) for number in range(12)]
    alone = [references.prepare([image]).pixels[0] for image in images]
    with ThreadPoolExecutor(4) as threads:
        together = threads.map(lambda image: references.prepare([image]).pixels[0], images)
        assert all(map(torch.equal, together, alone))
