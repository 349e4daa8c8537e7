"""Latents of several shapes: each sample in the shape that its size says, found by its key."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.kit.damaged import Samples, check, findings, restore, rewrite, state
from tests.kit.encode_work import Making
from tests.kit.encodes import encode_here, latents_of, rejected
from tests.kit.packs import jpeg, manifest_of, pack, tree, write_files
from wdsprep.checks.repair import do_repair, plan_repair
from wdsprep.cli import main
from wdsprep.dataset.manifest import Receipt
from wdsprep.dataset.rejects import Reject
from wdsprep.errors import NotFoundError
from wdsprep.reporting.inspect import FoundSample, inspect

Pair = tuple[Path, Path, dict[str, bytes]]
UNIT = "64/000000"


@pytest.fixture(scope="module", autouse=True)
def _no_models() -> Iterator[None]:
    with patch("wdsprep.encoding.encode.make_encoder", Making()):
        yield


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Images of four sizes, one of them too small for any shape, in two slices."""
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
def pair(once: Pair) -> Pair:
    restore(once[1], once[2])
    return once


def test_latents_of_several_shapes_are_sound_and_match_their_images(pair: Pair) -> None:
    images, latents, _whole = pair
    assert len(manifest_of(latents).counts) > 4
    assert rejected(latents)
    assert findings(latents) == findings(images, latents) == []


def swapped(samples: Samples) -> Samples:
    """The first of a shape and the last of another in each other's place."""
    return [samples[-1], *samples[1:-1], samples[0]]


def with_fact(name: str, value: object) -> Callable[[Samples], Samples]:
    def change(samples: Samples) -> Samples:
        key, fields = samples[0]
        facts = {**json.loads(fields["json"]), name: value}
        return [(key, {**fields, "json": json.dumps(facts).encode()}), *samples[1:]]

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (swapped, "latent.npy is not the array of"),
        (with_fact("width", 120), "120 x 100 pixels do not belong in shape"),
        (with_fact("width", 0), "0 x 100 pixels fit into no shape"),
        (
            with_fact("crop", [0, 0, 64, 64]),
            "json states another crop than that of 64 x 100 pixels",
        ),
        (with_fact("scaled_height", 81), "json states another crop than that of"),
    ],
)
def test_a_sample_in_another_shape_than_its_size_says_is_found(
    pair: Pair, change: Callable[[Samples], Samples], problem: str
) -> None:
    _images, latents, _whole = pair
    rewrite(latents, UNIT, change)
    found = check(latents).findings
    assert [finding.name for finding in found] == [f"{UNIT}.tar"]
    assert problem in found[0].what


def test_keys_out_of_order_within_a_shape_are_found(pair: Pair) -> None:
    images, latents, _whole = pair
    rewrite(latents, UNIT, lambda samples: [samples[1], samples[0], *samples[2:]])
    assert findings(latents) == []
    assert findings(images, latents) == [f"{UNIT}.tar unmatched"]


def test_a_receipt_that_counts_other_shapes_is_found(pair: Pair) -> None:
    _images, latents, _whole = pair
    first = manifest_of(latents).receipts[0]
    shapes = [name for name in first.counts if "x" in name]
    for counts in (
        {name: count for name, count in first.counts.items() if name != shapes[-1]},
        {**first.counts, shapes[0]: first.counts[shapes[0]] + 1},
    ):
        state(latents, replace(first, counts=counts))
        assert findings(latents) == [f"{UNIT}.tar wrong"]


def test_what_repair_takes_out_encode_makes_again(pair: Pair) -> None:
    images, latents, whole = pair
    rewrite(latents, UNIT, swapped)
    do_repair(plan_repair(check(latents).surveys[0]))
    encode_here(images, latents, shapes="nearest:8,2", max_crop=0.3)
    assert tree(latents) == whole


def test_every_sample_and_every_reject_is_found_by_its_key(pair: Pair) -> None:
    _images, latents, _whole = pair
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


def test_the_screen_counts_the_shapes(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    _images, latents, _whole = pair
    receipts = [
        Receipt.from_bytes((latents / f"receipts/{UNIT[:-1]}{n}.json").read_bytes(), "")
        for n in (0, 1)
    ]
    assert main(["inspect", str(latents)]) == 0
    said = capfd.readouterr().out
    of_square = sum(receipt.counts["64x64"] for receipt in receipts)
    assert f"       64x64 {of_square} samples" in said
    assert "shapes 48x80,56x72,64x64,72x56,80x48" in said
    assert main(["inspect", str(latents), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert [*facts["shapes"]] == sorted(facts["shapes"])
    assert not facts["shapes"].keys() & facts["counts"].keys()
