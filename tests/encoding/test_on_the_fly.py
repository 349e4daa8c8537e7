"""Latents made while training, and images decoded small, are those of the stored shards."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import wdsprep
from tests.kit.batches import assert_same
from tests.kit.encodes import COUNT, encode_here, packed, pictures, rejected
from tests.kit.packs import jpeg, manifest_of, pack, tree, write_files
from wdsprep.dataset.draft import Draft
from wdsprep.encoding.recipe_options import Encode
from wdsprep.errors import FingerprintError, FullError, UsageError

BATCH = 5
HOW = Encode(resolution=64, model="tiny", device="cpu")
NAMES = ("latent", "emb", "key", "txt", "json")

pytestmark = pytest.mark.usefixtures("stand_in")


def load(url: Path, **options: Any) -> Any:
    return wdsprep.load(str(url), **({"global_batch": BATCH, "rank": 0, "world_size": 1} | options))


def online(url: Path, **options: Any) -> Any:
    return load(url, **({"encode": HOW} | options))


@pytest.mark.usefixtures("real_models")
def test_batches_and_kept_shards_are_those_of_stored_latents_byte_for_byte(
    images: Path, tmp_path: Path
) -> None:
    """The last samples of a pass come with the next one's first step."""
    kept, stored = tmp_path / "kept", tmp_path / "stored"
    options = {"epochs": 2, "fields": NAMES, "drop_text": 0.2}
    loader = online(images, tee=str(kept), **options)
    steps = COUNT // BATCH + 1
    found = list(itertools.islice(loader, steps))
    encode_here(images, stored)
    assert_same(found, list(itertools.islice(load(stored, **options), steps)))
    assert tree(kept) == tree(stored)


def test_a_state_goes_on_in_the_other_mode(images: Path, stored: Path) -> None:
    whole = list(load(stored, epochs=2))
    loader, stop = load(stored, epochs=2), 3
    list(itertools.islice(loader, stop))
    for url, how in ((images, HOW), (stored, None), (images, HOW)):
        state = json.dumps(loader.state_dict())
        assert len(state) < 1024
        loader = load(url, epochs=2, encode=how)
        loader.load_state_dict(json.loads(state))
        assert_same(list(itertools.islice(loader, 2)), whole[stop : stop + 2])
        stop += 2


def test_a_state_of_latents_made_otherwise_is_refused(images: Path, stored: Path) -> None:
    state = load(stored).state_dict()
    for how in ({"seed": 1}, {"latents": "mean"}, {"dtype": "bf16"}):
        settings = {"resolution": 64, "model": "tiny", "device": "cpu", **how}
        with pytest.raises(FingerprintError, match="latents: "):
            online(images, encode=Encode(**settings)).load_state_dict(state)
    with pytest.raises(FingerprintError, match="samples, share"):
        online(images, encode=Encode(resolution=128, model="tiny")).load_state_dict(state)


def test_what_cannot_be_encoded_on_the_way_is_refused(images: Path, stored: Path) -> None:
    with pytest.raises(UsageError, match="holds latents"):
        online(stored)
    with pytest.raises(UsageError, match="leave out raw="):
        online(images, raw=True)
    with pytest.raises(UsageError, match="give both"):
        load(images, tee="somewhere")
    with pytest.raises(UsageError, match="give it num_workers=0"):
        list(
            torch.utils.data.DataLoader(
                online(images, device="cpu"), batch_size=None, num_workers=1
            )
        )


@pytest.mark.system
def test_crops_that_wait_are_bounded_in_bytes_on_any_machine(images: Path) -> None:
    step_nbytes = BATCH * 3 * HOW.resolution**2
    with patch("wdsprep.loading.prefetch.usable_cpus", return_value=64):
        assert online(images).plan.ahead == 66
        for steps, ahead in ((1, 2), (5, 5)):
            with patch("wdsprep.loading.prefetch.CROPS_NBYTES", steps * step_nbytes):
                assert online(images).plan.ahead == ahead


# Tee


def test_an_epoch_cut_short_is_completed_by_encode(
    images: Path, stored: Path, tmp_path: Path
) -> None:
    tee = tmp_path / "tee"
    list(online(images, tee=str(tee)))
    there = len(list(tee.glob("*/*.tar")))
    assert 0 < there < len(list(stored.glob("*/*.tar")))
    assert encode_here(images, tee).units_before == there
    assert tree(tee) == tree(stored)
    with pytest.raises(FingerprintError, match="seed"):
        next(iter(online(images, encode=replace(HOW, seed=3), tee=str(tee))))


def test_a_shard_that_another_trainer_has_kept_is_not_written_again(
    images: Path, stored: Path, tmp_path: Path
) -> None:
    kept, units = tmp_path / "kept", []

    def finish(draft: Draft, *what: Any) -> Any:
        units.append(draft.unit)
        return finish_draft(draft, *what)

    finish_draft = Draft.finish
    with patch.object(Draft, "finish", finish):
        loaders = [online(images, tee=str(kept), epochs=2) for _ in range(2)]
        assert all(loader._serve_encoded for loader in loaders), "opened before anything is kept"
        for loader in loaders:
            list(loader)
    assert len(units) == len(set(units)) > 0
    assert tree(kept) == tree(stored)


def test_the_shards_that_wait_longest_are_given_up_and_left_to_encode(
    images: Path, stored: Path, tmp_path: Path
) -> None:
    tee = tmp_path / "tee"
    with patch("wdsprep.encoding.on_the_fly.latent_writer.GATHERED", 2):
        list(online(images, tee=str(tee), epochs=2))
    assert encode_here(images, tee).units_before < len(list(stored.glob("*/*.tar")))
    assert tree(tee) == tree(stored)


def test_a_shard_that_cannot_be_written_ends_even_an_endless_run(
    images: Path, tmp_path: Path
) -> None:
    full = FullError("the disk is full")
    with patch.object(Draft, "finish", side_effect=full):
        batches = iter(online(images, tee=str(tmp_path / "tee"), epochs=None))
        with pytest.raises(FullError, match="the disk is full"):
            list(itertools.islice(batches, 100 * COUNT))


def test_a_damaged_image_is_replaced_and_kept_as_a_reject(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stored shards lack it, so their order is another one, and refuses the state."""
    damaged, kept, stored = (tmp_path / name for name in ("damaged", "kept", "stored"))
    photos = pictures(tmp_path / "photos")
    image = photos / "photo-0004.jpg"
    image.write_bytes(image.read_bytes()[:-500])
    packed(photos, damaged, "--check", "header")
    loader = online(damaged, epochs=2, tee=str(kept))
    first = [
        name for batch in itertools.islice(loader, COUNT // BATCH + 1) for name in batch["key"]
    ]
    assert len(set(first)) == COUNT - 1
    (key,) = rejected(kept)
    assert key not in first
    assert "cannot be served (truncated); others are served in its place" in caplog.text
    assert encode_here(damaged, stored).manifest.samples == COUNT - 1
    assert tree(kept) == tree(stored)
    with pytest.raises(FingerprintError, match=f"{COUNT - 1} samples"):
        load(stored, epochs=2).load_state_dict(loader.state_dict())


LARGE = 6


@pytest.fixture(scope="module")
def large_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large ones, three shards of two."""
    root = tmp_path_factory.mktemp("large")
    files: dict[str, bytes | str] = {}
    for number in range(LARGE):
        files[f"{number}.jpg"] = jpeg(number, (301, 263))
        files[f"{number}.txt"] = f"photo {number}"
    source = write_files(root / "in", files)
    return pack(source, root / "images", "--buckets", "64,128", "--samples-per-shard", "2")


@pytest.fixture(scope="module")
def by_decoding(large_images: Path) -> dict[str, Path]:
    """Latents of images that were decoded in full, and at a smaller scale."""
    kinds = {kind: large_images.parent / kind for kind in ("full", "fast")}
    for kind, out in kinds.items():
        encode_here(large_images, out, decode=kind)
    return kinds


def test_datasets_say_how_they_were_decoded_by_default_fast(
    large_images: Path, by_decoding: dict[str, Path], tmp_path: Path
) -> None:
    full, fast = by_decoding.values()
    encode_here(large_images, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(fast)
    assert [manifest_of(out).settings["decode"] for out in (full, fast)] == ["full", "fast"]
    assert set(tree(full)) == set(tree(fast))
    assert tree(full)["128/000000.tar"] != tree(fast)["128/000000.tar"]


@pytest.mark.parametrize("kind", ["full", "fast"])
def test_a_trainer_gets_what_is_stored_and_adds_to_what_is_there(
    kind: str, large_images: Path, by_decoding: dict[str, Path], tmp_path: Path
) -> None:
    out, wanted = tmp_path / "kept", by_decoding[kind]
    encode_here(large_images, out, decode=kind, limit=2)
    how = replace(HOW, decode=kind)
    on_the_way = load(large_images, encode=how, tee=out, global_batch=2, epochs=1)
    stored = load(wanted, global_batch=2, epochs=1)
    assert on_the_way.state_dict() == stored.state_dict()
    for mine, theirs in zip(on_the_way, stored, strict=True):
        assert torch.equal(mine["latent"], theirs["latent"])
    encode_here(large_images, out, decode=kind)
    for name in ("128/000000.tar", "128/000002.tar"):
        assert tree(out)[name] == tree(wanted)[name]
