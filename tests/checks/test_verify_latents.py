"""Latents, of one shape or of several, alone and beside the images that they were made of."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.kit.damaged import (
    Fields,
    Samples,
    check,
    check_flips,
    findings,
    flip,
    restore,
    rewrite,
    state,
)
from tests.kit.encodes import encode_here, latents_of, packed, pictures, rejected
from tests.kit.latent_sets import field, npy
from tests.kit.packs import jpeg, manifest_of, pack, tree, write_files
from wdsprep.checks.findings import Kind
from wdsprep.checks.repair import do_repair, plan_repair
from wdsprep.checks.shard_check import array_problem
from wdsprep.cli import main
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.dataset.rejects import Reject
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.reporting.inspect import FoundSample, inspect

pytestmark = pytest.mark.usefixtures("no_models")
EMPTY = "empty.emb.npy"
UNIT = "64/000000"
Pair = tuple[Path, Path, dict[str, bytes]]


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


@pytest.fixture(scope="module")
def shaped_once(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Images of six sizes, one of them too small for any shape, in two slices."""
    root = tmp_path_factory.mktemp("shaped")
    sizes = ((64, 80), (100, 90), (64, 100), (64, 65), (64, 64), (200, 64))
    files: dict[str, bytes | str] = {}
    for number in range(48):
        files[f"{number:02d}.jpg"] = jpeg(number, sizes[number * 5 % 6])
    options = ("--buckets", "64", "--samples-per-shard", "24")
    images = pack(write_files(root / "in", files), root / "images", *options)
    encode_here(images, root / "latents", shapes="nearest:8,2", max_crop=0.3)
    return images, root / "latents", tree(root / "latents")


@pytest.fixture
def shaped(shaped_once: Pair) -> Pair:
    restore(shaped_once[1], shaped_once[2])
    return shaped_once


@pytest.mark.parametrize("kind", ["pair", "shaped"])
def test_latents_are_sound_and_match_their_images(
    request: pytest.FixtureRequest, kind: str
) -> None:
    images, latents, _whole = request.getfixturevalue(kind)
    assert findings(latents) == findings(images, latents) == findings(latents, images) == []
    assert findings(images, latents, quick=True) == []


def test_one_flipped_bit_anywhere_in_latents_is_found(pair: Pair) -> None:
    _images, latents, whole = pair
    names = check_flips(latents, whole, "latents", rounds=20)
    assert {EMPTY, MANIFEST} <= names


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
    again = 'run the same "wdsprep encode" again with --redo-changed'
    assert found[0].next_step == f"if it was made of these images, {again}"


def test_image_shards_without_latents_are_found(pair: Pair) -> None:
    images, latents, _whole = pair
    path = latents / MANIFEST
    manifest = manifest_of(latents)
    unit = next(iter(manifest.receipts)).unit
    for name in (
        f"receipts/{unit}.json",
        f"{unit}.tar",
        f"{unit}.tar.idx",
        f"{unit}.parquet",
        f"rejects/{unit}.jsonl",
    ):
        (latents / name).unlink(missing_ok=True)
    path.write_bytes(replace(manifest, receipts=[*manifest.receipts][1:]).to_bytes())
    assert findings(latents) == []
    found = check(images, latents).findings
    assert [str(finding.what) for finding in found] == [f"nothing was made of {unit}.tar"]


def test_latents_of_a_slice_that_repair_took_out_wait_for_pack(pair: Pair, tmp_path: Path) -> None:
    images, latents = shutil.copytree(pair[0], tmp_path / "images"), pair[1]
    flip(images / "64/000000.tar", 8 * 700)
    do_repair(plan_repair(check(images).surveys[0]))
    found = check(images, latents).findings
    assert {finding.kind for finding in found} == {Kind.UNPACKED}
    assert str(found[0]).endswith(
        f"{images} has no shard {found[0].name}, and is not complete: run the same "
        '"wdsprep pack" again to finish the images, then verify again'
    )
    packed(pair[0].parent / "photos", images)
    assert findings(images, latents) == []


def array(value: float, shape: tuple[int, ...] = (4, 8, 8), dtype: str = "<f2") -> bytes:
    return npy(np.full(shape, value, dtype))


def with_array(data: Callable[[Fields], bytes]) -> Callable[[Samples], Samples]:
    return lambda samples: [(key, {**f, "latent.npy": data(f)}) for key, f in samples]


def with_fact(name: str, value: object) -> Callable[[Samples], Samples]:
    def change(samples: Samples) -> Samples:
        key, fields = samples[0]
        facts = {**json.loads(fields["json"]), name: value}
        return [(key, {**fields, "json": json.dumps(facts).encode()}), *samples[1:]]

    return change


def swapped(samples: Samples) -> Samples:
    """The first and the last in each other's place; they are of different shapes, if of any."""
    return [samples[-1], *samples[1:-1], samples[0]]


NOT_FINITE = "latent.npy has values that are not finite"
OTHER_CROP = "json states another crop than that of 64 x 100 pixels"


@pytest.mark.parametrize(
    ("kind", "change", "problem"),
    [
        ("pair", with_array(lambda _: array(np.nan)), NOT_FINITE),
        ("pair", with_array(lambda _: array(-np.inf)), NOT_FINITE),
        ("pair", with_array(lambda _: array(1, (4, 8, 9))), "is not the array of <f2 (4, 8, 8)"),
        ("pair", with_array(lambda _: array(1, dtype="<f4")), "is not the array of <f2"),
        ("pair", with_array(lambda f: f["latent.npy"][:-2]), "is not the array of <f2"),
        ("pair", lambda s: [(key, {**f, "json": b'{"key": 1}'}) for key, f in s], "json lacks"),
        (
            *("pair", lambda s: [(key, dict(reversed(f.items()))) for key, f in s]),
            "its members are txt, json, emb.npy, latent.npy, not latent.npy, emb.npy, json, txt",
        ),
        ("shaped", swapped, "latent.npy is not the array of"),
        ("shaped", with_fact("width", 120), "120 x 100 pixels do not belong in shape"),
        ("shaped", with_fact("width", 0), "0 x 100 pixels fit into no shape"),
        ("shaped", with_fact("crop", [0, 0, 64, 64]), OTHER_CROP),
        ("shaped", with_fact("scaled_height", 81), OTHER_CROP),
    ],
)
def test_latents_that_break_the_format_are_found_although_their_hash_is_right(
    request: pytest.FixtureRequest, kind: str, change: Callable[[Samples], Samples], problem: str
) -> None:
    _images, latents, _whole = request.getfixturevalue(kind)
    rewrite(latents, UNIT, change)
    found = check(latents).findings
    assert [finding.name for finding in found] == [f"{UNIT}.tar"]
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


@pytest.mark.parametrize("kind", ["pair", "shaped"])
def test_keys_in_another_order_than_the_images_are_found(
    request: pytest.FixtureRequest, kind: str
) -> None:
    images, latents, _whole = request.getfixturevalue(kind)
    rewrite(latents, UNIT, lambda samples: [samples[1], samples[0], *samples[2:]])
    assert findings(latents) == []
    assert findings(images, latents) == [f"{UNIT}.tar unmatched"]


def test_a_dataset_is_named_once_and_each_in_any_place(pair: Pair, tmp_path: Path) -> None:
    images, latents, whole = pair
    moved = shutil.copytree(latents, tmp_path / "moved")
    assert findings(images, latents, moved) == []
    assert tree(moved) == whole


# --- of several shapes


def test_a_receipt_that_counts_other_shapes_is_found(shaped: Pair) -> None:
    _images, latents, _whole = shaped
    first = next(iter(manifest_of(latents).receipts))
    shapes = [name for name in first.counts if "x" in name]
    for counts in (
        {name: count for name, count in first.counts.items() if name != shapes[-1]},
        {**first.counts, shapes[0]: first.counts[shapes[0]] + 1},
    ):
        state(latents, replace(first, counts=counts))
        assert findings(latents) == [f"{UNIT}.tar wrong"]


def test_what_repair_takes_out_encode_makes_again(shaped: Pair) -> None:
    images, latents, whole = shaped
    rewrite(latents, UNIT, swapped)
    do_repair(plan_repair(check(latents).surveys[0]))
    encode_here(images, latents, shapes="nearest:8,2", max_crop=0.3)
    assert tree(latents) == whole


def test_every_sample_and_every_reject_is_found_by_its_key(shaped: Pair) -> None:
    _images, latents, _whole = shaped
    samples, lost = latents_of(latents), rejected(latents)
    for key in random.Random(3).sample(sorted(samples), 20):
        found = inspect(latents, key)
        assert isinstance(found, FoundSample)
        left, top, right, bottom = samples[key]["json"]["crop"]
        assert found.facts["shape"] == f"{right - left}x{bottom - top}"
        assert found.members["txt"].decode() == samples[key]["txt"]
    for key in lost:
        assert isinstance(inspect(latents, key), Reject)
    with pytest.raises(NotFoundError):
        inspect(latents, "000000999999")


def test_the_screen_counts_the_shapes(shaped: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    _images, latents, _whole = shaped
    receipts = manifest_of(latents).receipts
    assert main(["inspect", str(latents)]) == 0
    said = capfd.readouterr().out
    of_square = sum(receipt.counts["64x64"] for receipt in receipts)
    assert f"       64x64 {of_square} samples" in said
    assert "shapes 48x80,56x72,64x64,72x56,80x48" in said
    assert main(["inspect", str(latents), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert [*facts["shapes"]] == sorted(facts["shapes"])
    assert not facts["shapes"].keys() & facts["counts"].keys()
