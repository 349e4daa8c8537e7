"""Datasets with shapes: batches of one shape each, in one order, each sample once a pass."""

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdsprep
from tests.kit.latent_sets import EMB, array_of, field, flat, write_latents
from tests.kit.shape_sets import CELL, FIELDS, RESOLUTION, ShapeSet, write_shapes
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.shapes import Size
from wdsprep.errors import FingerprintError, FormatError, NotFoundError, UsageError
from wdsprep.loading.options import Stream

BATCH = 8
SQUARE = (RESOLUTION, RESOLUTION)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ShapeSet:
    """Seven shapes, of the first one sample, some missing from some shards."""
    return write_shapes(str(tmp_path_factory.mktemp("shapes")))


def load(url: Any, **options: Any) -> Any:
    return wdsprep.load(url, **({"global_batch": BATCH, "rank": 0, "world_size": 1} | options))


def latent_of(size: Size, channels: int = 4) -> Any:
    return field("latent", (channels, size[1] // CELL, size[0] // CELL))


def assert_right(batch: dict[str, Any], shape_of: dict[str, Size]) -> None:
    """All of one shape, and each row is that of its key."""
    (size,) = {shape_of[key] for key in batch["key"]}
    assert batch["shape"] == (size[1], size[0])
    assert batch["latent"].shape[1:] == latent_of(size).shape
    for row, key in enumerate(batch["key"]):
        assert np.array_equal(batch["latent"][row].numpy(), array_of(key, latent_of(size)))
        assert np.array_equal(batch["emb"][row].numpy(), array_of(key, field("emb", EMB)))


# What a batch holds


def test_captions_of_true_length_are_padded_in_every_shape(tmp_path: Path) -> None:
    emb = field("emb", (9, 16), "bfloat16", is_variable=True)
    made = write_shapes(str(tmp_path), fields=(FIELDS[0], emb))
    names = ("emb", "emb_mask", "key", "txt")
    for batch in load(made.url, pad="longest", drop_text=0.3, fields=names):
        assert batch["emb"].shape[1] == batch["emb_mask"].sum(1).max()
        for row, key in enumerate(batch["key"]):
            wanted = array_of(key, emb)
            is_dropped = bool((batch["emb"][row, :2] == 9).all())
            assert not (is_dropped and batch["txt"][row])
            count = 2 if is_dropped else len(wanted)
            assert batch["emb_mask"][row].sum() == count
            if not is_dropped:
                found = batch["emb"][row, :count].view(torch.int16).numpy().view("<u2")
                assert np.array_equal(found, wanted)


# The order


def test_ranks_may_have_different_shapes(data: ShapeSet) -> None:
    """With 4 of a step of one shape, 8 ranks of 2 and 4 of 4 have one order between them."""

    def served(world: int, step: int = 0) -> list[list[str]]:
        options = {"global_batch": 16, "shape_batch": 4, "world_size": world, "step": step}
        ranks = [load(data.url, rank=rank, **options) for rank in range(world)]
        steps = []
        for parts in zip(*ranks, strict=True):
            for batch in parts[:2]:
                assert list(batch) == ["latent", "emb", "shape", "key"]
                assert_right(batch, data.shape_of)
            steps.append(flat(batch["key"] for batch in parts))
        return steps

    whole = served(4)
    assert served(8, 5) == whole[5:]
    several = 0
    for own in whole:
        shapes = [{data.shape_of[key] for key in own[n : n + 4]} for n in range(0, 16, 4)]
        assert all(len(one) == 1 for one in shapes)
        several += len(set.union(*shapes)) > 1
    assert several > len(whole) // 2
    raw = load(data.url, global_batch=16, shape_batch=4, raw=True)
    assert [sample["__key__"] for sample in raw] == flat(whole)


def test_groups_that_no_rank_can_have_alone_are_refused(data: ShapeSet, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shape_batch=4 must be a multiple of the 8 samples"):
        load(data.url, shape_batch=4)
    with pytest.raises(UsageError, match="global batch of 8 does not divide by shape_batch 3"):
        load(data.url, shape_batch=3)
    with pytest.raises(UsageError, match="shape_batch 0: give 1 or more"):
        load(data.url, shape_batch=0)
    squares = write_latents(str(tmp_path))
    with pytest.raises(UsageError, match="shape_batch is for datasets with shapes"):
        load(squares, shape_batch=4, world_size=2)
    load(squares, shape_batch=8)  # says nothing new


# Mixing


@pytest.mark.parametrize(
    ("wants", "share"),
    [
        ([{}, {}], None),
        ([{"weight": 3}, {"weight": 1}], 0.75),
        ([{"count": 300}, {"count": 100}], 0.75),
        ([{"repeat": 2.5}, {}], None),
    ],
)
def test_the_share_of_a_dataset_is_split_among_its_shapes(
    data: ShapeSet, tmp_path: Path, wants: list[dict[str, float]], share: float | None
) -> None:
    squares = write_latents(str(tmp_path), [40, 50], base=10**6, more={"resolution": RESOLUTION})
    total = len(data.shape_of)
    if share is None:
        share = total * wants[0].get("repeat", 1) / (total * wants[0].get("repeat", 1) + 90)
    both = [Stream(data.url, **wants[0]), Stream(squares, **wants[1])]  # type: ignore[arg-type]
    known = data.shape_of | {f"{10**6 + n:012d}": SQUARE for n in range(90)}
    served: Counter[Any] = Counter()
    for step, batch in enumerate(load(both, epochs=4, threads=1), 1):
        if step < 20:
            assert_right(batch, known)
        size = data.shape_of.get(batch["key"][0])
        assert len({key in data.shape_of for key in batch["key"]}) == 1
        served[size] += 1
        for shape, count in Counter(data.shape_of.values()).items():
            assert abs(served[shape] - step * share * count / total) < 2
        assert abs(served[None] - step * (1 - share)) < 2


# States


def test_a_state_of_other_data_says_which_dataset_differs(data: ShapeSet, tmp_path: Path) -> None:
    state = load(data.url).state_dict()
    moved = str(shutil.copytree(data.url, tmp_path / "moved"))
    load(moved).load_state_dict(state)
    samples = len(data.shape_of)
    assert state["stream 0"].endswith(f", {samples} samples in 7 shapes, share {samples}")
    other = write_shapes(str(tmp_path / "other"), [[2, 4, 6, 8, 10, 12, 14]]).url
    told = (
        rf"stream 0 \({re.escape(other)}\): .* {samples} samples in 7 shapes, .* -> .* 56 samples"
    )
    with pytest.raises(FingerprintError, match=told):
        load(other).load_state_dict(state)
    swapped = write_shapes(str(tmp_path / "swapped"), [[2, 4, 6, 8, 10, 14, 12]]).url
    with pytest.raises(FingerprintError, match=r"56 samples in 7 shapes, .* -> .* 56 samples"):
        load(swapped).load_state_dict(load(other).state_dict())
    grouped = load(data.url, shape_batch=4, world_size=2).state_dict()
    with pytest.raises(FingerprintError, match="shape-batch: 4 -> "):
        load(data.url).load_state_dict(grouped)


def test_counts_that_do_not_add_up_are_refused(data: ShapeSet, tmp_path: Path) -> None:
    url = str(shutil.copytree(data.url, tmp_path / "copy"))
    path = Path(url, "wdsprep.json")
    manifest = Manifest.from_bytes(path.read_bytes(), "")
    first, *others = manifest.receipts
    counts = {**first.counts, "64x64": first.counts.get("64x64", 0) + 1}
    wrong = Manifest(
        dataset="latents",
        settings=manifest.settings,
        receipts=[replace(first, counts=counts), *others],
        complete=True,
    )
    path.write_bytes(wrong.to_bytes())
    with pytest.raises(FormatError, match=r"its shapes do not add up .*: run .wdsprep verify"):
        load(url)


# Damage and S3


def test_a_shape_of_which_nothing_is_left_says_which(data: ShapeSet, tmp_path: Path) -> None:
    url = str(shutil.copytree(data.url, tmp_path / "copy"))
    sorted(Path(url, "64").glob("*.tar"))[3].unlink()  # which has the one sample of 32x128
    with pytest.raises(NotFoundError, match=r"\(32x128\): all its shards are missing"):
        list(load(url, epochs=40, skip_missing=True))
