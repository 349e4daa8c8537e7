"""Text by itself: what one run makes of captions, without the images that they belong to."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdsprep
from tests.kit.damaged import check, findings
from tests.kit.encodes import (
    COUNT,
    LONG,
    SHARDS,
    command,
    encode_here,
    latents_of,
    members,
    packed,
    positions_in,
    rejected,
    run,
    samples_in,
)
from tests.kit.packs import jpeg, manifest_of, tar_bytes, tree, write_files
from tests.kit.paths import format_recipe
from tests.kit.stores import Far
from wdsprep.dataset.tar import BLOCK
from wdsprep.dataset.tar.members import decode_index
from wdsprep.encoding import image_shards
from wdsprep.encoding.image_shards import find_image_shards, read_texts, tars_of
from wdsprep.encoding.models.find_model import TINY, find_model
from wdsprep.errors import UsageError
from wdsprep.store import open_store
from wdsprep.tables.stored_tables import read_positions

pytestmark = pytest.mark.usefixtures("stand_in")


def texts(images: Path | str, out: Path, **options: Any) -> Path:
    encode_here(images, out, **({"resolution": 0, "latents": "none"} | options))
    return out


@pytest.mark.usefixtures("real_models")
def test_text_and_latents_alone_are_what_one_run_makes_member_by_member(
    images: Path, latents: Path, tmp_path: Path
) -> None:
    """With real models: the same shards, keys and order, and each member in one of the two."""
    made, alone = texts(images, tmp_path / "text"), tmp_path / "alone"
    encode_here(images, alone, text="none")
    for shard in manifest_of(latents).shards:
        both = members(latents / shard.name)
        of_text, of_images = members(made / shard.name), members(alone / shard.name)
        assert list(both) == list(of_text) == list(of_images)
        for key, wanted in both.items():
            facts = [json.loads(some[key].pop("json")) for some in (of_images, of_text, both)]
            assert {**facts[0], **facts[1]} == facts[2]
            assert set(facts[1]) == {"caption", "cut", "key", "source", "tokens"}
            assert {**of_images[key], **of_text[key]} == wanted
            assert list(of_text[key]) == ["emb.npy", "txt"]
    assert (made / "empty.emb.npy").read_bytes() == (latents / "empty.emb.npy").read_bytes()
    assert not findings(images, made) + findings(images, alone)
    settings = manifest_of(made).settings
    assert settings["resolution"] == 64
    assert not {"crop", "scale", "shift", "seed"} & settings.keys()


def without_pictures(images: Path) -> None:
    """Write zeros over every image in every shard."""
    for shard in manifest_of(images).shards:
        path = images / shard.name
        data = bytearray(path.read_bytes())
        for start, _end in pairwise(decode_index(Path(f"{path}.idx").read_bytes(), "")):
            nbytes = int(data[start + 124 : start + 135], 8)
            data[start + BLOCK : start + BLOCK + nbytes] = bytes(nbytes)
        path.write_bytes(data)


def test_no_byte_of_an_image_is_looked_at(own: Path, tmp_path: Path) -> None:
    whole = texts(own, tmp_path / "whole")
    without_pictures(own)
    blind = texts(own, tmp_path / "blind")
    assert tree(blind) == tree(whole)
    assert manifest_of(blind).samples == COUNT


@pytest.mark.usefixtures("real_models")
def test_a_pipeline_without_a_vae_has_all_that_text_needs(images: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(TINY, bare, ignore=shutil.ignore_patterns("vae"))
    assert not any("vae" in name for name in find_model("tiny", text="emb", has_vae=False).files)
    made = texts(images, tmp_path / "text", model=str(bare), limit=6, text="tokens")
    assert {item["name"] for item in manifest_of(made).settings["layout"]} == {"tokens.npy"}
    with pytest.raises(UsageError, match=r"lacks vae/config\.json"):
        encode_here(images, tmp_path / "latents", model=str(bare))


def test_a_shard_that_is_not_what_was_packed_is_left_out(own: Path, tmp_path: Path) -> None:
    """Without a digest of all of it: by its size, its index and its headers."""
    names = [own / shard.name for shard in manifest_of(own).shards[:4]]
    cut, moved, lost, other = names
    cut.write_bytes(cut.read_bytes()[:-BLOCK])
    offsets = np.fromfile(f"{moved}.idx", "<u8")
    offsets[1] += BLOCK
    offsets.tofile(f"{moved}.idx")
    Path(f"{lost}.idx").unlink()
    np.fromfile(f"{other}.idx", "<u8")[:-1].tofile(f"{other}.idx")
    outcome = encode_here(own, tmp_path / "text", resolution=0, latents="none")
    reasons = {failed.unit.name: failed.reason for failed in outcome.quarantined}
    said = [reasons[path.relative_to(own).as_posix().removesuffix(".tar")] for path in names]
    assert "is truncated" in said[0]
    assert "is not what was packed (its index has" in said[1]
    assert "is not there, or its index is not" in said[2]
    assert "is not what was packed" in said[3]
    assert all("wdsprep repair" in line for line in said)
    assert manifest_of(tmp_path / "text").samples == COUNT - 4 * 4


def test_a_resolution_chooses_images_and_its_absence_takes_all(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    high = texts(images, tmp_path / "high", resolution=128)
    assert set(latents_of(high)) == {
        key for tar in images.glob("128/*.tar") for key in members(tar)
    }
    monkeypatch.chdir(images.parent)
    assert run(images, "--latents", "none") == 0
    assert manifest_of(images.parent / "text").samples == COUNT
    shutil.rmtree(images.parent / "text")


def test_a_trainer_can_load_text_alone(images: Path, tmp_path: Path) -> None:
    made = texts(images, tmp_path / "text")
    samples = latents_of(made)
    loader = wdsprep.load(str(made), global_batch=6, epochs=1, rank=0, world_size=1)
    batches = list(loader)
    assert sorted(key for batch in batches for key in batch["key"]) == sorted(samples)
    for batch in batches:
        assert set(batch) == {"emb", "key"}
        for row, key in zip(batch["emb"], batch["key"], strict=True):
            assert torch.equal(row, torch.from_numpy(samples[key]["emb.npy"]))
    assert loader.state_dict()


# --- rows
HOW = {"shapes": "nearest:32,2", "max_crop": 0.3}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of which some lose too much in any shape, and their latents in shapes."""
    root = tmp_path_factory.mktemp("mixed")
    sizes = ((64, 80), (100, 70), (300, 66), (70, 120), (66, 66), (64, 300))
    files: dict[str, bytes | str] = {}
    for number in range(18):
        files[f"{number:03d}.jpg"] = jpeg(number, sizes[number * 5 % 6])
        files[f"{number:03d}.txt"] = f"caption {number}"
    images = packed(write_files(root / "photos", files), root / "images")
    encode_here(images, root / "latents", **HOW)
    return images


def test_rows_of_other_tars_cannot_be_told_from_keys(tmp_path: Path) -> None:
    """Keys in no order, one reject among the samples, and one after them: rows are there."""
    sizes = {"b": (64, 64), "c": (32, 32), "a": (80, 80), "d": (70, 70), "0": (32, 32)}
    tar = tar_bytes(
        (f"{key}.{ending}", data)
        for key, size in sizes.items()
        for ending, data in (("jpg", jpeg(3, size)), ("txt", key.encode()))
    )
    url = str(write_files(tmp_path / "tars", {"x.tar": tar}) / "*.tar")
    with pytest.raises(UsageError, match="was not made by pack: give --resolution"):
        texts(url, tmp_path / "text")
    out = tmp_path / "latents"
    encode_here(url, out)
    made = texts(url, tmp_path / "text", resolution=64)
    assert list(members(made / "64/x.tar")) == [*sizes]
    assert {key: some["txt"] for key, some in latents_of(made).items()} == {k: k for k in sizes}
    assert positions_in(out, "64/x.tar") == [0, 2, 3]
    assert not findings(out) + findings(made)
    assert not check(out).notes
    (receipt,) = manifest_of(out).receipts
    assert read_positions(open_store(str(out)), receipt).tolist() == [0, 2, 3]
    (out / "64/x.parquet").unlink()
    with pytest.raises(UsageError, match=f"is missing: run .*index {out}"):
        read_positions(open_store(str(out)), receipt)


def test_a_reader_of_the_page_joins_latents_with_their_images(mixed: Path) -> None:
    recipe: dict[str, Any] = {}
    exec(format_recipe("with_images"), recipe)
    latents, samples = mixed.parent / "latents", dict[str, Any]()
    for receipt in manifest_of(latents).receipts:
        joined = recipe["with_images"](latents, mixed, receipt.unit)
        assert list(joined["key"]) == list(members(latents / f"{receipt.unit}.tar"))
        assert list(joined["key"]) == list(joined["key_of_image"])
        samples |= dict(zip(joined["key"], joined["bucket"], strict=True))
    images = samples_in(mixed)
    assert samples.keys() == images.keys() - rejected(latents).keys()
    assert samples == {key: json.loads(images[key]["json"])["bucket"] for key in samples}


# --- from S3, where each sample is a request


def test_of_large_images_far_away_no_more_than_the_ends_of_samples_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A json and a caption that are longer than what is asked for are read too."""
    files: dict[str, bytes | str] = {}
    for number in range(70):
        files[f"{number:02d}.jpg"] = jpeg(number, (400, 400))
        files[f"{number:02d}.txt"] = LONG * (40 if number % 30 == 7 else 1)
    images = packed(write_files(tmp_path / "photos", files), tmp_path / "images")
    found = find_image_shards(str(images), 0).shards[0]
    monkeypatch.setattr("wdsprep.dataset.shard_reader.TAIL_NBYTES", 4 * BLOCK)
    monkeypatch.setattr("wdsprep.dataset.shard_reader.LARGE_NBYTES", 1)
    store = Far(images)
    source = replace(tars_of(str(images), 1 << 30), has_images=False)
    assert not image_shards.is_read_in_parts(store, found)  # type: ignore[arg-type]
    for shard in find_image_shards(str(images), 0).shards:
        rows = dict(read_texts(source, store, shard))  # type: ignore[arg-type]
        near = dict(read_texts(source, open_store(str(images)), shard))
        assert rows == near
        assert list(rows) == list(members(images / shard.item.name))
    whole = sum(shard.item.nbytes for shard in find_image_shards(str(images), 0).shards)
    assert sum(nbytes for *_, nbytes in store.asked) < whole / 4
    monkeypatch.setattr(image_shards, "LARGE_NBYTES", 1)
    assert image_shards.is_read_in_parts(store, found)  # type: ignore[arg-type]


def test_the_end_names_the_place_and_what_comes_next(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "text"
    assert command(images, out, "--latents", "none") == 0
    said = capsys.readouterr()
    text = said.out + said.err
    assert f"{SHARDS} shards, {COUNT} captions for resolution 64; model tiny" in text
    assert f"{COUNT} captions encoded in " in text
    assert "image" not in text.replace(str(images), "")
    assert f"{out}: {COUNT} samples in {SHARDS} shards" in text
    assert f'wdsprep.load("{out}"' in text


def test_what_shows_a_dataset_shows_one_of_text(
    images: Path, latents: Path, tmp_path: Path
) -> None:
    made = texts(images, tmp_path / "text")
    overview = wdsprep.inspect(str(made)).facts
    assert overview["kind"] == "text"
    assert (overview["samples"], overview["settings"]["latents"]) == (COUNT, "none")
    (key, sample), *_ = latents_of(made).items()
    assert wdsprep.inspect(str(made), key).facts["json"] == sample["json"]
    page = tmp_path / "report.html"
    datasets = map(str, (images, made, latents))
    wdsprep.report(*datasets, output=str(page), samples=2, model="none", yes=True)
    text = page.read_text()
    assert f"{made}, text (emb)" in text
    assert "This dataset holds text alone" in text
    assert "scaled to ?" not in text
