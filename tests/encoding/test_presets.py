"""What is said of a model that is not here is what its pipeline gives, but for the widths."""

from collections.abc import Callable
from pathlib import Path

import pytest

from wdsprep.cli import main
from wdsprep.dataset.npy_arrays import OF_SIZES
from wdsprep.encoding.latent_arrays import fields
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.models.presets import PRESETS
from wdsprep.encoding.recipe_defaults import settle_recipe
from wdsprep.encoding.recipe_options import Recipe
from wdsprep.encoding.sample_sizes import CLIP_ALONE

FAMILIES = {
    "sd2": "StableDiffusion",
    "sdxl": "StableDiffusionXL",
    "sd3": "StableDiffusion3",
    "flux": "Flux",
    "flux-schnell": "Flux",
    "flux2-klein": "Flux2Klein",
    "pixart-sigma": "PixArtSigma",
    "sana": "Sana",
    "lumina2": "Lumina2",
    "qwen-image": "QwenImage",
    "z-image": "ZImage",
    "auraflow": "AuraFlow",
    "chroma": "Chroma",
    "kolors": "Kolors",
    "hidream": "HiDreamImage",
}
"""Small pipelines of the same classes, which have the real lengths and channels."""
SAME = {"sd1": "sd2", "sd35": "sd3", "tiny": "sd2"}


def test_every_preset_is_held_against_a_pipeline() -> None:
    assert {*FAMILIES, *SAME} == {*PRESETS}
    for name, other in SAME.items():
        of = [(array.name, array.dtype, array.shape[:-1]) for array in PRESETS[name].arrays]
        assert of == [(a.name, a.dtype, a.shape[:-1]) for a in PRESETS[other].arrays]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_preset_says_which_arrays_its_pipeline_gives(
    name: str, family: Callable[[str], Path]
) -> None:
    preset, found = PRESETS[name], {}
    for text in ("emb", "tokens"):
        model = find_model(str(family(FAMILIES[name])), text=text)
        recipe = Recipe(resolution=64, text=text, text_length=preset.text_length)
        recipe, model = settle_recipe(recipe, model, "cpu")
        found[text] = fields(model, recipe)[1:]
    assert (model.channels, model.factor, model.vae_kind) == (
        preset.channels,
        preset.factor,
        preset.vae,
    )
    arrays = {a.name: (a.dtype, a.shape, a.is_trimmed) for a in preset.arrays}
    assert {field.name for field in found["emb"]} == arrays.keys()
    for field in found["emb"]:
        dtype, shape, is_trimmed = arrays[field.name]
        assert (field.dtype, field.is_variable) == (dtype, is_trimmed)
        assert (field.shape[-2:-1], len(field.shape)) == (shape[-2:-1], len(shape))
    tokens = [field for field in found["tokens"] if field.name not in OF_SIZES]
    ids = [field.shape[0] for field in tokens if field.dtype == "<i4"]
    assert len(ids) == len(preset.runs)
    if name != "sana":  # whose template is longer in a small vocabulary
        assert ids == [run.listed for run in preset.runs]
    masks = [field for field in tokens if field.dtype == "|u1"]
    assert len(masks) == (0 if name in CLIP_ALONE else len(ids))


def test_the_help_says_for_which_resolutions_models_and_shapes_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["encode", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "trained at 512 (sd1, sd2), 1024 (sdxl, the others) and 1328 (qwen-image)" in told
    assert "sdxl is the list of SDXL, for --resolution 1024 alone" in told
