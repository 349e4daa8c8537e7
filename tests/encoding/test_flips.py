"""Latents of mirror images: stored beside the others, and picked by chance at loading."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import wdsprep
from tests.kit.encodes import encode_here, latents_of, stacked
from tests.kit.packs import jpeg, pack, write_files
from wdsprep.errors import FingerprintError, UsageError
from wdsprep.loading.loader import Loader

COUNT = 24


def png(number: int, *, mirrored: bool) -> bytes:
    image = Image.open(io.BytesIO(jpeg(number, (80, 64), "PNG")))
    out = io.BytesIO()
    (ImageOps.mirror(image) if mirrored else image).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same pictures with their mirror images, and the mirror images alone."""
    root = tmp_path_factory.mktemp("flips")
    for name in ("straight", "mirrored"):
        files = {
            f"{number:03d}.png": png(number, mirrored=name == "mirrored") for number in range(COUNT)
        }
        captions = {f"{number:03d}.txt": f"picture {number}" for number in range(COUNT)}
        source = write_files(root / name, {**files, **captions})
        pack(source, root / f"{name}-images", "--buckets", "64", "--samples-per-shard", "8")
    both, alone = root / "both", root / "alone"
    encode_here(root / "straight-images", both, flip=True, latents="mean")
    encode_here(root / "mirrored-images", alone, latents="mean")
    sampled = root / "sampled"
    encode_here(root / "straight-images", sampled, flip=True)
    return {"both": both, "alone": alone, "sampled": sampled, "images": root / "straight-images"}


def load(data: Path, **options: Any) -> Loader:
    return wdsprep.load(data, **{"global_batch": 8, **options})


def test_the_second_latents_are_those_of_the_mirror_image(made: dict[str, Path]) -> None:
    straight, mirrored = latents_of(made["both"]), latents_of(made["alone"])
    for key, sample in straight.items():
        assert np.array_equal(sample["latent_flipped.npy"], mirrored[key]["latent.npy"])
        assert not np.array_equal(sample["latent_flipped.npy"], sample["latent.npy"])
        assert np.array_equal(sample["emb.npy"], mirrored[key]["emb.npy"])
    assert not wdsprep.verify(made["images"], made["both"], workers=1).findings


def test_a_sample_and_its_mirror_image_have_noise_of_their_own(made: dict[str, Path]) -> None:
    names = ("latent.npy", "latent_flipped.npy")
    means, samples = (
        [stacked(made[which], name).float() for name in names] for which in ("both", "sampled")
    )
    noise = [sample - mean for sample, mean in zip(samples, means, strict=True)]
    alike = torch.corrcoef(torch.stack([each.flatten() for each in noise]))[0, 1]
    assert abs(alike) < 0.1


def test_to_mirror_a_latent_is_not_to_mirror_its_image(made: dict[str, Path]) -> None:
    """By how much, and so why they are stored."""
    straight = stacked(made["both"], "latent.npy").float()
    mirrored = stacked(made["both"], "latent_flipped.npy").float()
    apart = (straight.flip(-1) - mirrored).square().mean() / mirrored.var()
    assert apart > 0.01


@pytest.mark.parametrize("which", ["both", "sampled"])
def test_chance_picks_the_mirror_image_at_a_rate(made: dict[str, Path], which: str) -> None:
    stored = latents_of(made[which])
    seen = []
    for batch in load(made[which], flip=0.3, epochs=20):
        assert set(batch) == {"latent", "emb", "key"}
        for key, latent in zip(batch["key"], batch["latent"].numpy(), strict=True):
            is_flipped = np.array_equal(latent, stored[key]["latent_flipped.npy"])
            assert is_flipped != np.array_equal(latent, stored[key]["latent.npy"])
            seen.append(is_flipped)
    assert len(seen) == 20 * COUNT
    assert 0.2 < np.mean(seen) < 0.4


def test_what_is_mirrored_is_the_same_on_any_ranks_and_after_a_resume(
    made: dict[str, Path],
) -> None:
    def latents(**options: Any) -> torch.Tensor:
        loader = load(made["both"], flip=0.5, epochs=4, **options)
        return torch.stack([batch["latent"].clone() for batch in loader])

    whole = latents()
    assert torch.equal(latents(step=5), whole[5:])
    halves = [latents(rank=rank, world_size=2) for rank in (0, 1)]
    assert torch.equal(torch.cat(halves, dim=1), whole)


def test_both_may_be_asked_for_and_a_state_knows_the_rate(made: dict[str, Path]) -> None:
    batch = next(iter(load(made["both"], fields=("latent", "latent_flipped"))))
    assert not torch.equal(batch["latent"], batch["latent_flipped"])
    state = load(made["both"], flip=0.5).state_dict()
    with pytest.raises(FingerprintError, match=r"flip: 0\.5 -> \(none\)"):
        load(made["both"]).load_state_dict(state)


def test_what_has_no_mirror_images_cannot_be_flipped(made: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="leave out flip, or encode with --flip"):
        load(made["alone"], flip=0.5)
    with pytest.raises(UsageError, match="give a rate from 0 to 1"):
        load(made["both"], flip=2)


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

    with pytest.raises(UsageError, match="ask for latent in fields=, and give flip="):
        load(tmp_path / "moments", fields=("latent", "latent_flipped"))
    for batch in load(tmp_path / "moments", flip=1.0):
        for key, latent in zip(batch["key"], batch["latent"], strict=True):
            mirrored = alike(latent, stored[key]["latent_flipped.npy"])
            assert mirrored > max(0.9, alike(latent, stored[key]["latent.npy"]))
