"""What is stored of a caption and an image is what the pipeline of each family makes of them."""

import functools
import inspect
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import wdsprep
from tests.kit.batches import assert_same
from tests.kit.encoders import SIDE, load_latent_encoder, rows_of
from tests.kit.encodes import CAPTIONS, command, encode_here, latents_of, packed, pictures, rejected
from tests.kit.families import QUICK, each_family, latent_of, negative_of, prompt_of
from tests.kit.gpus import pretend_cuda
from tests.kit.model_files import changed
from tests.kit.packs import tree
from wdsprep.checks.verify import verify
from wdsprep.cli import main
from wdsprep.dataset.npy_arrays import OF_SIZES, text_fields
from wdsprep.encoding.models import base
from wdsprep.encoding.models.encoder import LatentEncoder, is_split
from wdsprep.encoding.models.families import BY_MASK, BY_ZEROS, member_name
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.models.noise import noise_keys, normal
from wdsprep.encoding.models.presets import PRESETS
from wdsprep.encoding.recipe_defaults import settle_recipe
from wdsprep.encoding.recipe_options import Encode
from wdsprep.encoding.sample_arrays import CLIP_ALONE, fields
from wdsprep.errors import UsageError, WdsprepError

TEXTS = ("a red house by the sea", "two dogs", "", 'a sign that says "open" ' * 40)

Family = Callable[[str], Path]
FEW = 5
encoder = cache(load_latent_encoder)


def first_row(made: LatentEncoder, caption: str) -> dict[str, Tensor]:
    """What a caption becomes, before it is stored."""
    return rows_of(made, made.text_rows(made.tokens([caption])))[0]


def wanted_of(name: str, outputs: dict[str, Any], made: LatentEncoder) -> dict[str, Tensor]:
    """The outputs of a pipeline for one caption, by the members that hold them.

    The first embedding is as long as the caption, for classes that may have it so.
    """
    names = [name for name in outputs if "embeds" in name or name == "text_hiddens"]
    first = next(name for name in names if "pooled" not in name and "mask" not in name)
    members = {member_name(name, first): value for name, value in outputs.items()}
    wanted = {}
    for field in text_fields(made.fields):
        value, axis = members[field.name], {"llama3.npy": 1}.get(field.name, 0)
        wanted[field.name] = value[0] if isinstance(value, list) else value.select(axis, 0)
    kind, value = f"{name}Pipeline", wanted["emb.npy"]
    if kind in BY_MASK:
        masks = [v for key, v in outputs.items() if re.search("prompt.*mask$|^attention_mask", key)]
        wanted["emb.npy"] = value[masks[0][0] > 0] if masks else value
    elif kind in BY_ZEROS:
        wanted["emb.npy"] = value[: int(value.abs().sum(1).nonzero().max()) + 1]
    return wanted


@pytest.mark.parametrize("name", each_family())
def test_text_is_what_the_pipeline_makes_of_that_one_caption(name: str, family: Family) -> None:
    folder = family(name)
    made = encoder(folder)
    for text in TEXTS:
        wanted = wanted_of(name, prompt_of(folder, text), made)
        found = first_row(made, text)
        assert found.keys() == wanted.keys()
        for member, value in wanted.items():
            assert found[member].shape == value.shape
            assert (found[member] - value).abs().max() <= 1e-5


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference, as a share of the largest value: so fp32 rounds."""
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", each_family())
def test_a_latent_is_what_the_denoiser_is_trained_on(name: str, family: Family) -> None:
    folder, pixels = family(name), np.random.default_rng(5).integers(0, 256, (SIDE, SIDE, 3))
    pixels = pixels.astype(np.uint8)
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous()
    keys = noise_keys(7, ["a"])
    mean = encoder(folder, text="none", latents="mean")
    found = mean.image_rows(images, keys).arrays["latent.npy"][0]
    assert found.shape == mean.fields[0].shape
    assert difference(found, latent_of(folder, pixels)) <= 1e-5
    if name == "Sana":  # no distribution
        return
    moments = encoder(folder, text="none", latents="moments")
    shape = moments.fields[0].shape
    noise = normal(keys, (shape[0] // 2, *shape[1:]))
    drawn = encoder(folder, text="none").image_rows(images, keys).arrays["latent.npy"][0]
    assert difference(drawn, latent_of(folder, pixels, noise=noise[0])) <= 1e-5
    assert moments.image_rows(images, keys).arrays["latent.npy"].shape[1:] == shape


@pytest.mark.parametrize("name", each_family())
def test_a_caption_that_is_left_out_is_the_pipelines_own_way(name: str, family: Family) -> None:
    folder = family(name)
    made = encoder(folder)
    wanted = wanted_of(name, negative_of(folder) or prompt_of(folder, ""), made)
    empty = made.empty()
    assert empty.keys() == wanted.keys()
    for member, value in wanted.items():
        assert empty[member].shape == value.shape
        torch.testing.assert_close(empty[member], value.to(empty[member].dtype))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("few")
    return packed(pictures(root / "downloads", range(FEW)), root / "images")


@pytest.mark.parametrize("name", each_family())
def test_a_dataset_holds_what_the_models_make_verifies_and_is_found_done(
    name: str, family: Family, few: Path, tmp_path: Path
) -> None:
    folder, out = family(name), tmp_path / "latents"
    first = encode_here(few, out, model=str(folder), resolution=SIDE)
    assert not verify(str(out)).findings
    before = tree(out)
    assert encode_here(few, out, model=str(folder), resolution=SIDE).manifest == first.manifest
    assert tree(out) == before
    samples = latents_of(out)
    assert len(samples) == FEW
    made = encoder(folder)
    stored = {field.name: field for field in made.fields}
    for sample in samples.values():
        found = first_row(made, sample["txt"])
        for member, value in found.items():
            array = sample[member]
            if stored[member].dtype == "bfloat16":
                assert array.dtype == np.uint16
                assert np.array_equal(array, value.bfloat16().view(torch.int16).numpy().view("u2"))
            else:
                assert np.array_equal(array, value.half().numpy())
        facts = sample["json"]
        if "time_ids.npy" in sample:
            left, top, right, bottom = facts["crop"]
            sizes = [facts["original_height"], facts["original_width"], top, left]
            assert sample["time_ids.npy"].tolist() == [*sizes, bottom - top, right - left]
        assert facts["tokens"] > 0
    settings = json.loads((out / "wdsprep.json").read_bytes())["settings"]
    if name != "StableDiffusion":  # whose captions no code of a pipeline encodes
        assert settings["pipeline"] == f"{name}Pipeline"
        assert len(settings["template"]) == 32
    for field in text_fields(made.fields):
        assert (out / f"empty.{field.name}").is_file()
    assert not any((out / f"empty.{each}").exists() for each in OF_SIZES)


def test_sizes_are_told_to_those_denoisers_that_want_them(family: Family) -> None:
    made = {
        name: [field.name for field in encoder(family(name), text="none").fields]
        for name in ("Kolors", "CogView4", "Flux")
    }
    together, *each = OF_SIZES
    assert made == {
        "Kolors": ["latent.npy", together],
        "CogView4": ["latent.npy", *each],
        "Flux": ["latent.npy"],
    }


@pytest.mark.parametrize(
    "name", each_family(["Flux", "StableDiffusionXL", "QwenImage", "Sana", "Kolors"])
)
def test_tokens_are_those_that_the_encoders_get(name: str, family: Family) -> None:
    made = encoder(family(name), text="tokens")
    (short, long) = made.tokens(["two dogs", "word " * 3000])
    assert (short.cut, long.cut) == (False, True)
    assert 2 < short.count < 1000 < long.count
    found = made.encode_texts([short]).arrays
    assert list(found) == [field.name for field in text_fields(made.fields)]
    for field in text_fields(made.fields):
        assert found[field.name].shape == (1, *field.shape)
    names = [field.name for field in text_fields(made.fields) if "mask" not in field.name]
    second = ["tokens_2.npy"] if name in ("Flux", "StableDiffusionXL") else []
    assert names == ["tokens.npy", *second]


@pytest.mark.system
def test_a_text_length_is_the_pipelines_or_it_is_refused(family: Family) -> None:
    fields = {f.name: f.shape for f in encoder(family("Flux"), text_length=64).fields}
    assert fields["emb.npy"][0] == 64
    for name in ("StableDiffusionXL", "StableDiffusion"):
        with pytest.raises(UsageError, match="whose text has one length"):
            encoder(family(name), text_length=64)
    for name, length in (("Flux", 513), ("StableDiffusion3", 513), ("Lumina2", 513)):
        with pytest.raises(WdsprepError, match=f"cannot be greater than 512 but is {length}"):
            encoder(family(name), text_length=length)


# Bad input


def test_an_encoder_without_finite_numbers_makes_rejects(
    family: Family, few: Path, tmp_path: Path
) -> None:
    folder = changed(family("Flux"), tmp_path / "model")
    path = folder / "text_encoder_2/model.safetensors"
    weights = load_file(path)
    weights[next(name for name in weights if "layer_norm" in name)][:] = torch.nan
    save_file(weights, path, {"format": "pt"})
    encode_here(few, tmp_path / "made", model=str(folder))
    assert {*rejected(tmp_path / "made").values()} == {"not_finite"}


def test_what_is_moved_at_the_end_is_an_output(family: Family, tmp_path: Path) -> None:
    """As `return prompt_embeds.to(self.device), text_ids` has it."""
    folder = changed(
        family("QwenImage"),
        tmp_path / "a",
        _class_name="LongCatImagePipeline",
        text_processor=["transformers", "Qwen2Tokenizer"],
    )
    shutil.copytree(folder / "tokenizer", folder / "text_processor")
    made = encoder(folder)
    assert first_row(made, "a cat")["emb.npy"].shape[0] > 1


def test_a_caption_over_which_a_pipeline_fails_is_one_reject(
    family: Family, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As parsers of HTML do over some."""
    import diffusers

    encode_prompt = diffusers.FluxPipeline.encode_prompt

    def fails(self: Any, prompt: list[str], *words: Any, **options: Any) -> Any:
        if any(text == CAPTIONS[3] for text in prompt):
            raise ValueError("expected name token")
        return encode_prompt(self, prompt, *words, **options)

    fails.__signature__ = inspect.signature(encode_prompt)  # type: ignore[attr-defined]
    monkeypatch.setattr(
        diffusers.FluxPipeline, "encode_prompt", functools.wraps(encode_prompt)(fails)
    )
    encode_here(few, tmp_path / "made", model=str(family("Flux")), resolution=SIDE)
    assert {*rejected(tmp_path / "made").values()} == {"no_tokens"}
    assert {sample["txt"] for sample in latents_of(tmp_path / "made").values()} == {
        text.strip() for text in CAPTIONS if text != CAPTIONS[3]
    }


@pytest.mark.parametrize("latents", ["sample", "moments"])
def test_a_vae_without_a_distribution_says_so(latents: str, family: Family) -> None:
    with pytest.raises(WdsprepError, match="gives the latents themselves"):
        encoder(family("Sana"), latents=latents)


def test_a_side_that_the_family_cannot_take_is_refused(
    family: Family, few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(few, tmp_path / "out", "--model", str(family("Flux")), "--resolution", "72") == 2
    assert "not a multiple of 16" in capsys.readouterr().err


def test_what_a_pipeline_cuts_after_its_encoder_is_counted_too(family: Family) -> None:
    """Qwen-Image has 1,024 tokens encoded, and takes 512 of them."""
    made = encoder(family("QwenImage"))
    some = made.tokens([" ".join(["dog"] * count) for count in range(40, 1000, 40)])
    lengths = [int(made.text_rows([one]).lengths[0]) for one in some]  # type: ignore[index]
    assert {one.cut for one in some} == {False, True}
    template = some[0].count - lengths[0]
    for one, length in zip(some, lengths, strict=True):
        assert one.cut == (one.count - template > 512)
        assert length == min(512, one.count - template)


@pytest.mark.parametrize(
    ("free", "share", "comes_to"),
    [
        (10**12, 1.0, "both"),
        (300_000_000, 1.0, "in turn"),
        (600_000_000, 1.0, "both"),
        (600_000_000, 0.5, "in turn"),  # another worker of this GPU may not have begun
        (1_000_000, 1.0, "neither"),
    ],
)
def test_a_gpu_holds_both_kinds_of_network_or_one_or_says_what_it_lacks(
    free: int, share: float, comes_to: str, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    pretend_cuda(
        monkeypatch, mem_get_info=(free, free), set_per_process_memory_fraction=shares.append
    )
    monkeypatch.setattr(base, "_gpu_share", 1.0)
    base.limit_memory(share)
    assert shares == [share]
    model = find_model(str(family("QwenImage")), text="emb")
    recipe = Encode(resolution=SIDE, dtype="half")
    if comes_to == "neither":
        with pytest.raises(WdsprepError, match=r"needs .* MB of a GPU \(.* for images, .* text\)"):
            is_split(model, recipe, torch.device("cuda"), itemsize=2)
        return
    # An image is reckoned with 101 MB of activations, a caption with 268.
    many = replace(recipe, resolution=256)
    assert is_split(model, many, torch.device("cuda"), itemsize=2) == (comes_to == "in turn")
    assert not is_split(model, many, torch.device("cpu"), itemsize=2)


@pytest.mark.parametrize("name", each_family(["QwenImage", "Flux2Klein", "Krea2"]))
def test_batches_made_on_the_way_are_those_of_stored_shards_and_so_is_what_is_kept(
    name: str, family: Family, few: Path, tmp_path: Path
) -> None:
    folder, stored, kept = str(family(name)), tmp_path / "stored", tmp_path / "kept"
    encode_here(few, stored, model=folder, resolution=SIDE)
    options: dict[str, Any] = {"global_batch": 4, "drop_text": 0.3, "seed": 3}
    how = wdsprep.Encode(resolution=SIDE, model=folder, device="cpu")
    made = list(wdsprep.load(str(few), encode=how, tee=str(kept), epochs=3, **options))
    for before, after in zip(wdsprep.load(str(stored), **options), made, strict=False):
        assert_same([before], [after])
    shards = {name: data for name, data in tree(kept).items() if name.endswith(".tar")}
    assert shards
    encode_here(few, kept, model=folder, resolution=SIDE)
    assert tree(kept) == tree(stored)
    assert tree(kept).items() >= shards.items()


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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if family in QUICK else pytest.mark.system)
        for name, family in FAMILIES.items()
    ],
)
def test_a_preset_says_which_arrays_its_pipeline_gives(
    name: str, family: Callable[[str], Path]
) -> None:
    preset, found = PRESETS[name], {}
    for text in ("emb", "tokens"):
        model = find_model(str(family(FAMILIES[name])), text=text)
        recipe = Encode(resolution=64, text=text, text_length=preset.text_length)
        recipe, model = settle_recipe(recipe, model, "cpu")
        found[text] = fields(model, recipe)[1:]
    assert (model.channels, model.factor, model.vae_kind) == (
        preset.channels,
        preset.factor,
        preset.vae,
    )
    arrays = {a.name: (a.dtype, a.shape, a.is_variable) for a in preset.arrays}
    assert {field.name for field in found["emb"]} == arrays.keys()
    for field in found["emb"]:
        dtype, shape, is_trimmed = arrays[field.name]
        assert (field.dtype, field.is_variable) == (dtype, is_trimmed)
        assert (field.shape[-2:-1], len(field.shape)) == (shape[-2:-1], len(shape))
    tokens = [field for field in found["tokens"] if field.name not in OF_SIZES]
    ids = [field.shape[0] for field in tokens if field.dtype == "<i4"]
    assert len(ids) == len(preset.towers)
    if name != "sana":  # whose template is longer in a small vocabulary
        assert ids == [preset.ids or length for _, length in preset.towers]
    masks = [field for field in tokens if field.dtype == "|u1"]
    assert len(masks) == (0 if name in CLIP_ALONE else len(ids))


def test_the_help_says_for_which_resolutions_models_and_shapes_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["encode", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "trained at 512 (sd1, sd2), 1024 (sdxl, the others) and 1328 (qwen-image)" in told
    assert "sdxl is the list of SDXL, for --resolution 1024 alone" in told
