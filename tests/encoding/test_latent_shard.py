"""What a latent dataset holds: the numbers of diffusers and transformers, mirror images too."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import wdsprep
from tests.kit.damaged import findings
from tests.kit.encodes import (
    CAPTIONS,
    COUNT,
    LONG,
    encode_here,
    latents_of,
    members,
    positions_in,
    rejected,
    run_encode,
    samples_in,
    stacked,
)
from tests.kit.families import latent_of
from tests.kit.packs import jpeg, manifest_of, pack, tree, write_files
from wdsprep.dataset.npy_arrays import fields_of
from wdsprep.dataset.tar.members import decode_index
from wdsprep.encoding.models.find_model import TINY, find_model
from wdsprep.encoding.models.noise import noise_keys, normal
from wdsprep.encoding.models.vae import Decoder
from wdsprep.errors import FingerprintError, UsageError
from wdsprep.images.crop import crop
from wdsprep.loading.loader import Loader

SCALE = 0.18215


# --- the numbers are those of diffusers and transformers


@pytest.fixture(scope="session")
def posterior(images: Path) -> Any:
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(TINY / "vae", low_cpu_mem_usage=False)
    samples = sorted(samples_in(images).items())
    pixels = torch.stack([crop(sample["jpg"], 64).pixels for _, sample in samples])
    with torch.no_grad():
        return vae.encode(pixels.float() / 127.5 - 1).latent_dist


@pytest.fixture(scope="session")
def states(images: Path) -> Tensor:
    from transformers import CLIPTextModel, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(TINY / "tokenizer")
    text = CLIPTextModel.from_pretrained(TINY / "text_encoder", dtype=torch.float32)
    captions = [sample["txt"].decode() for _, sample in sorted(samples_in(images).items())]
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


@pytest.mark.parametrize("seed", [0, pytest.param(7, marks=pytest.mark.system)])
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
    assert not findings(images, latents)
    for shard in manifest_of(images).shards:
        keys = list(members(images / shard.name))
        assert list(members(latents / shard.name)) == keys
        assert [keys[row] for row in positions_in(latents, shard.name)] == keys
    assert not rejected(latents)


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
    originals = samples_in(images)
    for key, sample in latents_of(latents).items():
        of_image, facts = json.loads(originals[key]["json"]), sample["json"]
        scaled, box = crops[of_image["width"], of_image["height"]]
        count = len(tokenizer(of_image["caption"]).input_ids)
        assert facts == {
            "caption": of_image["caption"], "crop": box, "cut": count > 77, "key": key,
            "height": of_image["height"], "width": of_image["width"],
            "scaled_height": scaled[1], "scaled_width": scaled[0], "source": of_image["source"],
            "original_height": of_image["original_height"],
            "original_width": of_image["original_width"],
            "tokens": count,
        }  # fmt: skip
        assert sample["txt"] == of_image["caption"]


def test_long_captions_are_cut_and_counted_and_empty_ones_are_the_empty_text(latents: Path) -> None:
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


VIDEO = ("AutoencoderKLQwenImage",)


def by_the_vae_alone(folder: Path, pixels: "np.ndarray[Any, Any]") -> Tensor:
    """There and back by diffusers, with nothing done in between."""
    kind = json.loads((folder / "vae/config.json").read_text())["_class_name"]
    vae = getattr(diffusers, kind).from_pretrained(str(folder / "vae"), low_cpu_mem_usage=False)
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1
    with torch.inference_mode():
        found = vae.encode(image[:, :, None] if kind in VIDEO else image)
        latent = found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latent
        made = vae.decode(latent).sample
        made = made[:, :, 0] if kind in VIDEO else made
        return ((made[0] / 2 + 0.5).clamp(0, 1) * 255).permute(1, 2, 0)


@pytest.mark.parametrize("name", ["StableDiffusionXL", "Flux", "Flux2Klein", "QwenImage", "Sana"])
def test_a_latent_goes_back_the_way_it_came(name: str, family: Callable[[str], Path]) -> None:
    folder = family(name)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    decoder = Decoder(find_model(str(folder), text="none"))
    made = torch.from_numpy(decoder.decode(latent_of(folder, pixels)))
    wanted = by_the_vae_alone(folder, pixels)
    assert made.shape == wanted.shape == (64, 64, 3)
    assert wanted.std() > 1, "nothing can be seen in it"
    assert (made.float() - wanted).abs().max() <= 0.51


FLIPPED = 16


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pictures, and their latents with those of their mirror images: means, and samples."""
    root = tmp_path_factory.mktemp("flips")
    files: dict[str, bytes | str] = {}
    for number in range(FLIPPED):
        files[f"{number:03d}.png"] = jpeg(number, (80, 64), "PNG")
        files[f"{number:03d}.txt"] = f"picture {number}"
    source = write_files(root / "in", files)
    pack(source, root / "images", "--buckets", "64", "--samples-per-shard", "8")
    encode_here(root / "images", root / "means", flip=True, latents="mean")
    encode_here(root / "images", root / "sampled", flip=True)
    return {name: root / name for name in ("images", "means", "sampled")}


def load(data: Path, **options: Any) -> Loader:
    return wdsprep.load(data, **{"global_batch": 8, **options})


def test_a_sample_and_its_mirror_image_have_noise_of_their_own(made: dict[str, Path]) -> None:
    names = ("latent.npy", "latent_flipped.npy")
    means, samples = (
        [stacked(made[which], name).float() for name in names] for which in ("means", "sampled")
    )
    noise = [sample - mean for sample, mean in zip(samples, means, strict=True)]
    alike = torch.corrcoef(torch.stack([each.flatten() for each in noise]))[0, 1]
    assert abs(alike) < 0.1


def test_chance_picks_the_mirror_image_at_a_rate(made: dict[str, Path]) -> None:
    stored = latents_of(made["sampled"])
    seen = []
    for batch in load(made["sampled"], flip=0.3, epochs=20):
        assert set(batch) == {"latent", "emb", "key"}
        for key, latent in zip(batch["key"], batch["latent"].numpy(), strict=True):
            is_flipped = np.array_equal(latent, stored[key]["latent_flipped.npy"])
            assert is_flipped != np.array_equal(latent, stored[key]["latent.npy"])
            seen.append(is_flipped)
    assert len(seen) == 20 * FLIPPED
    assert 0.2 < np.mean(seen) < 0.4


def test_both_may_be_asked_for_and_a_state_knows_the_rate(made: dict[str, Path]) -> None:
    batch = next(iter(load(made["means"], fields=("latent", "latent_flipped"))))
    assert not torch.equal(batch["latent"], batch["latent_flipped"])
    state = load(made["means"], flip=0.5).state_dict()
    with pytest.raises(FingerprintError, match=r"flip: 0\.5 -> \(none\)"):
        load(made["means"]).load_state_dict(state)


def test_what_chance_mirrors_on_the_way_is_what_is_stored(made: dict[str, Path]) -> None:
    how = wdsprep.Encode(resolution=64, model="tiny", device="cpu", flip=True)
    options = {"flip": 0.4, "epochs": 2, "drop_text": 0.2}
    stored = list(load(made["sampled"], **options))
    loader = load(made["images"], encode=how, **options)
    assert loader.state_dict() == load(made["sampled"], **options).state_dict()
    for one, other in zip(loader, stored, strict=True):
        assert one["key"] == other["key"]
        assert torch.equal(one["latent"], other["latent"])
        assert torch.equal(one["emb"], other["emb"])
    with pytest.raises(UsageError, match="ask for latent, and give flip="):
        load(made["images"], encode=how, fields=("latent_flipped",))


def test_moments_are_mirrored_before_they_are_sampled(
    made: dict[str, Path], tmp_path: Path
) -> None:
    encode_here(made["images"], tmp_path / "moments", flip=True, latents="moments")
    stored = latents_of(tmp_path / "moments")

    def alike(latent: torch.Tensor, member: np.ndarray) -> float:
        mean, _logvar = torch.from_numpy(member).float().chunk(2)
        return float(torch.corrcoef(torch.stack([latent.float().flatten(), mean.flatten()]))[0, 1])

    with pytest.raises(UsageError, match="ask for latent, and give flip="):
        load(tmp_path / "moments", fields=("latent", "latent_flipped"))
    for batch in load(tmp_path / "moments", flip=1.0):
        for key, latent in zip(batch["key"], batch["latent"], strict=True):
            mirrored = alike(latent, stored[key]["latent_flipped.npy"])
            assert mirrored > max(0.9, alike(latent, stored[key]["latent.npy"]))


# --- the same bytes, whoever does it


@pytest.mark.system
def test_bytes_do_not_depend_on_the_workers(images: Path, latents: Path, tmp_path: Path) -> None:
    """Those of one are made in this process."""
    done = run_encode(images, tmp_path / "out", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert f"{COUNT} images encoded" in done.stdout
    assert tree(tmp_path / "out") == tree(latents)


def test_other_batch_sizes_change_next_to_nothing(
    images: Path, latents: Path, tmp_path: Path
) -> None:
    encode_here(images, tmp_path / "out", batch_size=5)
    ours, theirs = latents_of(tmp_path / "out"), latents_of(latents)
    assert list(ours) == list(theirs)
    for key, sample in ours.items():
        assert (sample["json"], sample["txt"]) == (theirs[key]["json"], theirs[key]["txt"])
    for name in ("latent.npy", "emb.npy"):
        found, wanted = stacked(tmp_path / "out", name), stacked(latents, name)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)  # a step of fp16
