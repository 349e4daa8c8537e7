"""Latents, alone and beside the images that they were made of."""

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from tests.kit.damaged import Fields, check, findings, flip, restore, rewrite
from tests.kit.encode_work import Making
from tests.kit.encodes import encode_here, packed, pictures
from tests.kit.latent_sets import field, npy
from tests.kit.packs import manifest_of, tree
from wdsprep.checks.repair import do_repair, plan_repair
from wdsprep.checks.shard_check import array_problem
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.errors import FormatError

FLIPS = 60
EMPTY = "empty.emb.npy"
Pair = tuple[Path, Path, dict[str, bytes]]


@pytest.fixture(scope="module", autouse=True)
def _no_models() -> Iterator[None]:
    with patch("wdsprep.encoding.encode.make_encoder", Making()):
        yield


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Images in three slices and two buckets, and their latents, with two rejects."""
    root = tmp_path_factory.mktemp("pair")
    images = packed(pictures(root / "photos", range(12)), root / "images")
    latents = root / "latents"
    encode_here(images, latents)
    return images, latents, tree(latents)


@pytest.fixture
def pair(once: Pair) -> Pair:
    restore(once[1], once[2])
    return once


def test_latents_are_sound_and_match_their_images(pair: Pair) -> None:
    images, latents, _whole = pair
    assert findings(latents) == findings(images, latents) == findings(latents, images) == []
    assert findings(images, latents, quick=True) == []


def test_one_flipped_bit_anywhere_in_latents_is_found(pair: Pair) -> None:
    _images, latents, whole = pair
    rng = random.Random(3)
    names = sorted(name for name, data in whole.items() if data)
    assert EMPTY in names
    sizes = [len(whole[name]) for name in names]
    for name in (*names, *rng.choices(names, sizes, k=FLIPS)):
        bit = rng.randrange(8 * len(whole[name]))
        flip(latents / name, bit)
        found = [finding.name for finding in check(latents).findings]
        assert found == [name], f"bit {bit} of {name}"
        (latents / name).write_bytes(whole[name])


@pytest.mark.system
def test_repair_and_encode_bring_back_every_kind_of_file(pair: Pair) -> None:
    images, latents, whole = pair
    for names in (
        ["64/000001.tar"],
        ["128/000000.tar.idx", "receipts/64/000001.json"],
        ["receipts/64/000000.json", MANIFEST],
        [EMPTY],
        [EMPTY, "64/000000.tar"],
    ):
        for name in names:
            flip(latents / name, 4 * len(whole[name]))
        do_repair(plan_repair(check(latents).surveys[0]))
        assert not check(images, latents).findings
        encode_here(images, latents)
        assert tree(latents) == whole, names
    for name in ("64/000001.tar", EMPTY, "receipts/64/000000.json"):
        (latents / name).unlink()
        do_repair(plan_repair(check(latents).surveys[0]))
        encode_here(images, latents)
        assert tree(latents) == whole, name


def test_encode_goes_on_with_no_damaged_array_of_the_empty_caption(pair: Pair) -> None:
    images, latents, _whole = pair
    flip(latents / EMPTY, 2_000)
    with pytest.raises(FormatError, match=r"empty\.emb\.npy is damaged: .*: run \"wdsprep repair"):
        encode_here(images, latents)


def test_latents_of_a_part_match_the_part(pair: Pair, tmp_path: Path) -> None:
    images, _latents, _whole = pair
    encode_here(images, tmp_path / "latents", limit=3)
    inputs = [receipt.input for receipt in manifest_of(tmp_path / "latents").receipts]
    assert any(":" in made_of for made_of in inputs)
    assert findings(images, tmp_path / "latents") == []


def test_images_that_are_others_now_are_found(pair: Pair, tmp_path: Path) -> None:
    _images, latents, _whole = pair
    source = pictures(tmp_path / "photos", range(12))
    (source / "photo-0000.txt").write_text("another caption")
    others = packed(source, tmp_path / "images")
    found = check(others, latents, quick=True).findings
    assert [finding.name for finding in found] == ["64/000000.tar"]
    assert "it was not made of the 64/000000.tar that" in found[0].what
    assert found[0].next_step == 'run the same "wdsprep encode" again with --redo-changed'


def test_image_shards_without_latents_are_found(pair: Pair) -> None:
    images, latents, _whole = pair
    path = latents / MANIFEST
    manifest = manifest_of(latents)
    unit = manifest.receipts[0].unit
    for name in (
        f"receipts/{unit}.json",
        f"{unit}.tar",
        f"{unit}.tar.idx",
        f"{unit}.parquet",
        f"rejects/{unit}.jsonl",
    ):
        (latents / name).unlink(missing_ok=True)
    path.write_bytes(replace(manifest, receipts=manifest.receipts[1:]).to_bytes())
    assert findings(latents) == []
    found = check(images, latents).findings
    assert [str(finding.what) for finding in found] == [f"nothing was made of {unit}.tar"]


def array(value: float, shape: tuple[int, ...] = (4, 8, 8), dtype: str = "<f2") -> bytes:
    return npy(np.full(shape, value, dtype))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda f: {**f, "latent.npy": array(np.nan)}, "latent.npy has values that are not finite"),
        (
            lambda f: {**f, "latent.npy": array(-np.inf)},
            "latent.npy has values that are not finite",
        ),
        (lambda f: {**f, "latent.npy": array(1, (4, 8, 9))}, "is not the array of <f2 (4, 8, 8)"),
        (lambda f: {**f, "latent.npy": array(1, dtype="<f4")}, "is not the array of <f2"),
        (lambda f: {**f, "latent.npy": f["latent.npy"][:-2]}, "is not the array of <f2"),
        (lambda f: {**f, "json": b'{"key": 1}'}, "json lacks"),
        (lambda f: dict(reversed(f.items())), "txt is in the place of latent.npy"),
    ],
)
def test_latents_that_break_the_format_are_found_although_their_hash_is_right(
    pair: Pair, change: Callable[[Fields], Fields], problem: str
) -> None:
    _images, latents, _whole = pair
    rewrite(latents, "64/000000", lambda samples: [(k, change(f)) for k, f in samples])
    found = check(latents).findings
    assert [finding.name for finding in found] == ["64/000000.tar"]
    assert problem in found[0].what


def test_arrays_as_long_as_their_captions_are_held_against_the_longest() -> None:
    emb = field("emb", (7, 3), "bfloat16", is_variable=True)

    def problem(bits: object) -> str:
        data = npy(bits)
        return array_problem(emb, memoryview(data), len(data))

    for length in (1, 2, 7):
        assert problem(np.full((length, 3), 0x7F7F, "<u2")) == ""
        assert problem(np.full((length, 3), 0xFF7F, "<u2")) == ""
    for special in (0x7F80, 0xFF80, 0x7FC0, 0x7F81):  # infinities, and what is no number
        assert problem(np.full((2, 3), special, "<u2")) == "emb.npy has values that are not finite"
    other = "emb.npy is not the array of bfloat16 (1 to 7, 3) that it should be"
    for shape in ((0, 3), (8, 3), (2, 4), (3,), (2, 3, 1)):
        assert problem(np.zeros(shape, "<u2")) == other
    assert problem(np.zeros((2, 3), "<f2")) == other
    whole = npy(np.zeros((2, 3), "<u2"))
    assert array_problem(emb, memoryview(whole)[:-2], len(whole) - 2) == other


def test_keys_in_another_order_than_the_images_are_found(pair: Pair) -> None:
    images, latents, _whole = pair
    rewrite(latents, "64/000000", lambda samples: [*samples[1:], samples[0]])
    assert findings(latents) == []
    assert findings(images, latents) == ["64/000000.tar unmatched"]


def test_a_dataset_is_named_once_and_each_in_any_place(pair: Pair, tmp_path: Path) -> None:
    images, latents, whole = pair
    moved = shutil.copytree(latents, tmp_path / "moved")
    assert findings(images, latents, moved) == []
    assert tree(moved) == whole
