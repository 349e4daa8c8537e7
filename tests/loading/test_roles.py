"""Datasets whose samples have several images: batches of one size of each, in one order."""

import io
import shutil
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import wdsprep
from tests.kit.batches import assert_same
from tests.kit.encodes import encode_here
from tests.kit.latent_sets import array_of, field, flat, keys
from tests.kit.packs import jpeg, packing_here
from tests.kit.role_sets import (
    LATENT,
    LATENT_FLIPPED,
    MASK,
    SOURCE,
    SOURCE_FLIPPED,
    SQUARE,
    TEXT,
    RoleSample,
    keys_of,
    random_samples,
    write_roles,
)
from tests.kit.shape_sets import RESOLUTION
from wdsprep.dataset.npy_arrays import layout
from wdsprep.dataset.shapes import fields_in_shape
from wdsprep.errors import FingerprintError, UsageError
from wdsprep.loading.prefetch import open_sources

BATCH = 4
SAMPLES = random_samples(4, 40, shapes=((48, 80), SQUARE))
FIELDS = (LATENT, SOURCE, MASK, TEXT)
SETTINGS = {"layout": layout(FIELDS), "resolution": RESOLUTION}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_roles(str(tmp_path_factory.mktemp("roles") / "pairs"), SAMPLES)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The same, as targets with their text, and sources with masks."""
    root = tmp_path_factory.mktemp("apart")
    targets = write_roles(str(root / "targets"), SAMPLES, (LATENT, TEXT))
    return targets, write_roles(str(root / "sources"), SAMPLES, (SOURCE, MASK))


def load(url: Any, **options: Any) -> Any:
    return wdsprep.load(url, **({"global_batch": BATCH, "rank": 0, "world_size": 1} | options))


def assert_right(batch: dict[str, Any], samples: Mapping[str, RoleSample]) -> None:
    """All of one size of each image, and each row is what was stored for its key."""
    for row, key in enumerate(batch["key"]):
        sample = samples[key]
        fields = fields_in_shape(SETTINGS, sample.target, sample.images)
        names = [item.name.removesuffix(".npy") for item in fields]
        assert {*names} == {*batch} - {"key", "shape"}
        for name, item in zip(names, fields, strict=True):
            assert np.array_equal(batch[name][row].numpy(), array_of(key, item))


def test_a_batch_is_of_one_size_of_each_image_and_one_number_of_them(url: str) -> None:
    samples = keys_of(SAMPLES)
    kinds: dict[str, list[str]] = {}
    for key, sample in samples.items():
        kinds.setdefault(repr(sample), []).append(key)
    came: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for step, batch in enumerate(load(url, epochs=12), 1):
        if step <= 150:
            assert_right(batch, samples)
        assert batch["mask" if "mask" in batch else "source"].dtype in (torch.uint8, torch.float16)
        (kind,) = {repr(samples[key]) for key in batch["key"]}
        came.update(batch["key"])
        steps[kind] += 1
        if min(map(len, kinds.values())) >= BATCH:  # in proportion to what there is
            times = [came[key] for key in kinds[kind]]
            assert max(times) - min(times) <= 1
        assert abs(steps[kind] - step * len(kinds[kind]) / len(samples)) < 2
    assert len(steps) == len(kinds)
    assert came.keys() == samples.keys()


def test_no_tar_is_read_to_know_the_sizes(url: str, tmp_path: Path) -> None:
    left = Path(shutil.copytree(url, tmp_path / "left"))
    for tar in left.glob("*/*.tar*"):
        if not tar.name.endswith(".parquet"):
            tar.unlink()
    assert load(str(left)).state_dict() == load(url).state_dict()


def test_numbers_of_images_may_be_padded_to_one(url: str) -> None:
    samples = keys_of(SAMPLES)
    seen: Counter[tuple[bool, ...]] = Counter()
    both = 0
    loader = load(url, pad_roles=True)
    assert len(loader.plan.datasets) < len(load(url).plan.datasets)
    for batch in loader:
        shown = {tuple(row) for row in batch["source_mask"].tolist()}
        both += len(shown) > 1
        for row, key in enumerate(batch["key"]):
            sample = samples[key]
            present = tuple(batch["source_mask"][row].tolist())
            seen[present] += 1
            assert sum(present) == 1 + ("source_1" in sample.images)
            assert ("mask" in batch) is ("mask" in sample.images)
            for item in fields_in_shape(SETTINGS, sample.target, sample.images):
                found = batch[item.name.removesuffix(".npy")][row].numpy()
                assert np.array_equal(found, array_of(key, item))
            if present[-1:] == (False,):
                assert not batch["source_1"][row].any()
                assert batch["source_1"].shape == batch["source"].shape
    assert both > 5
    assert {*seen} >= {(True, False), (True, True)}
    # The mask alone, and in a DataLoader's worker:
    only = load(url, pad_roles=True, fields=("source_mask",))
    workers = DataLoader(load(url, pad_roles=True), batch_size=None, num_workers=2)
    for batch, mask, other in zip(load(url, pad_roles=True), only, workers, strict=True):
        assert torch.equal(batch["source_mask"], mask["source_mask"])
        assert_same([batch], [other])


def test_sources_that_were_encoded_alone_are_joined_to_targets(
    url: str, apart: tuple[str, str], tmp_path: Path
) -> None:
    targets, sources = apart
    names = ("latent", "source", "source_1", "mask", "emb", "source_mask", "shape", "key")
    for options in ({"pad_roles": True}, {"where": "source_width == 64"}, {"drop_text": 0.5}):
        fields = names if "pad_roles" in options else [n for n in names if n != "source_mask"]
        found = [*load(targets, join=sources, fields=fields, **options)]
        assert_same(found, load(url, fields=fields, **options))
        assert len({*flat(batch["key"] for batch in found)}) > 20
    # Without shapes of the target either may be the first.
    square = [[RoleSample(images=sample.images) for sample in shard] for shard in SAMPLES]
    plain = write_roles(str(tmp_path / "plain"), square, (LATENT, TEXT), shapes=())
    fields = ("latent", "source", "source_1", "mask", "emb", "key")
    joined = load(plain, join=sources, fields=fields)
    assert_same(joined, load(sources, join=plain, fields=fields))
    # What is made of the same role later comes in place of the first.
    others = write_roles(str(tmp_path / "others"), SAMPLES, (field("latent", LATENT.shape), MASK))
    found = next(iter(load(url, join=others, fields=("source", "mask", "key"))))
    assert_same([found], [next(iter(load(url, fields=("source", "mask", "key"))))])


def test_a_joined_dataset_is_opened_once_for_all_sizes(
    apart: tuple[str, str], tmp_path: Path
) -> None:
    targets, sources = apart
    texts = write_roles(str(tmp_path / "texts"), SAMPLES, (TEXT,), shapes=())
    opened = open_sources(load(targets, join=[sources, texts]).plan)
    assert len(opened) > 10
    assert len({*chain.from_iterable(opened)}) == 3


def test_all_images_of_a_sample_are_mirrored_or_none(url: str, tmp_path: Path) -> None:
    fields = (LATENT, LATENT_FLIPPED, SOURCE, SOURCE_FLIPPED, MASK, TEXT)
    made = write_roles(str(tmp_path / "all"), SAMPLES, fields)
    settings, samples = {**SETTINGS, "layout": layout(fields)}, keys_of(SAMPLES)
    targets = write_roles(str(tmp_path / "targets"), SAMPLES, (*fields[:2], TEXT))
    sources = write_roles(str(tmp_path / "sources"), SAMPLES, fields[2:5])
    seen: Counter[tuple[str, bool]] = Counter()
    in_roles = ("source", "source_1", "mask", "key")
    for options in (
        {},
        {"pad_roles": True},
        {"fields": in_roles},
        {"fields": ("latent", *in_roles)},
    ):
        batches = [*load(made, flip=0.5, **options)]
        if "fields" in options:
            assert_same(batches, load(targets, join=sources, flip=0.5, **options))
        for batch in batches:
            assert not [name for name in batch if "flipped" in name]
            for row, key in enumerate(batch["key"]):
                sample, turned = samples[key], set()
                arrays = {
                    item.name.removesuffix(".npy"): array_of(key, item)
                    for item in fields_in_shape(settings, sample.target, sample.images)
                }
                for name in {"latent", *sample.images} & {*batch}:
                    mask = arrays[name][:, ::-1]
                    ways = (arrays[name], arrays.get(f"{name}_flipped", mask))
                    found = batch[name][row].numpy()
                    (is_turned,) = (n for n, way in enumerate(ways) if np.array_equal(found, way))
                    turned.add(bool(is_turned))
                (is_turned,) = turned  # all images of a sample or none
                seen.update((name, is_turned) for name in sample.images)
                if "source_1" in batch and "source_1" not in sample.images:
                    assert not batch["source_1"][row].any()
    assert min(seen.values()) > 20
    assert len(seen) == 6
    with pytest.raises(UsageError, match=r"leave out flip, or encode with --flip$"):
        load(url, flip=0.5)
    pairs = [[RoleSample(images={"source": SQUARE})] * 40]
    both = write_roles(str(tmp_path / "both"), pairs, (*fields[:2], SOURCE), shapes=())
    again = write_roles(str(tmp_path / "again"), SAMPLES, (SOURCE,))  # in place of the first
    for place, joined in ((both, None), (made, again)):
        with pytest.raises(UsageError, match="no latents of mirror images of source, and all im"):
            load(place, flip=0.5, join=joined)
    with pytest.raises(UsageError, match="no latents of mirror images of latent"):
        load(write_roles(str(tmp_path / "plain"), SAMPLES, (LATENT,)), join=sources, flip=0.5)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Image shards of 24 pairs: with one source, with two, with a mask or none."""
    root = tmp_path_factory.mktemp("images")
    for number in range(24):
        for folder, seed in (("targets", 0), ("source", 100)):
            (root / folder).mkdir(exist_ok=True)
            has_two = folder == "source" and number % 3 == 0
            for name in (f"{number}_0", f"{number}_1") if has_two else (f"{number}",):
                data = jpeg(number + seed + 50 * has_two, (64, 48) if has_two else (48, 40))
                (root / folder / f"{name}.jpg").write_bytes(data)
        if number % 2:
            levels = np.add.outer(3 * np.arange(40), np.arange(48) + number).astype(np.uint8)
            (root / "mask").mkdir(exist_ok=True)
            Image.fromarray(levels).save(root / "mask" / f"{number}.png")
    with packing_here():
        wdsprep.pack(
            root / "targets",
            root / "shards",
            role=(f"source={root}/source", f"mask={root}/mask"),
            optional_role="mask",
            buckets=(32,),
            workers=1,
            min_caption=0,
        )
    return str(root / "shards")


def test_image_shards_give_the_images_of_each_sample_as_they_are_stored(images: str) -> None:
    seen: Counter[tuple[str, ...]] = Counter()
    for batch in load(images, global_batch=2, epochs=2):
        names = tuple(name for name in batch if name not in ("image", "txt", "key"))
        seen[names] += 2
        for name in ("image", *names):
            sizes = {Image.open(io.BytesIO(data)).size for data in batch[name]}
            wanted = {(64, 48)} if "source_1" in batch and name.startswith("source") else {(48, 40)}
            assert sizes == wanted
    assert {*seen} == {
        ("source",),
        ("source", "mask"),
        ("source", "source_1"),
        ("source", "source_1", "mask"),
    }
    for sample in load(images, raw=True, global_batch=2):
        assert {"jpg", "source.jpg"} <= {*sample}
    unmirrored = wdsprep.Encode(resolution=32, model="tiny", device="cpu")
    for options in ({}, {"pixels": 32}, {"encode": unmirrored}):
        with pytest.raises(UsageError, match=r"or give encode=Encode\(\.\.\., flip=True\), and"):
            load(images, flip=0.5, global_batch=2, **options)


def test_images_in_roles_are_cropped_as_their_target_is(images: str) -> None:
    from wdsprep.images.crop import crop

    stored = {sample["__key__"]: sample for sample in load(images, raw=True, global_batch=2)}
    for batch in load(images, pixels=32, global_batch=2):
        for row, key in enumerate(batch["key"]):
            assert torch.equal(batch["pixels"][row], crop(stored[key]["jpg"], 32).pixels)
            assert torch.equal(batch["source"][row], crop(stored[key]["source.jpg"], 32).pixels)
            if "mask" in batch:
                levels = Image.open(io.BytesIO(stored[key]["mask.png"]))
                fit = crop(stored[key]["jpg"], 32).fit
                size = fit.scaled_width, fit.scaled_height
                box = fit.left, fit.top, fit.left + 32, fit.top + 32
                wanted = np.asarray(levels.resize(size, Image.Resampling.BOX).crop(box), np.int16)
                assert (
                    np.abs(batch["mask"][row].numpy() - wanted).max() <= 2
                )  # Pillow weighs whole pixels
    fields = ("source", "source_1", "source_mask")
    for batch in load(images, pixels=32, global_batch=8, pad_roles=True, fields=fields):
        assert torch.equal(batch["source_1"].flatten(1).any(1), batch["source_mask"][:, -1])


def test_what_encode_makes_in_one_pass_or_in_two_is_served(images: str, tmp_path: Path) -> None:
    how = {"resolution": 32, "role_size": ("source=nearest:8,2",)}
    encode_here(images, tmp_path / "both", roles="target,source,mask", **how)
    encode_here(images, tmp_path / "targets", resolution=32)
    encode_here(images, tmp_path / "sources", roles="source,mask", text="none", **how)
    raw = load(tmp_path / "both", raw=True, global_batch=2, epochs=2)
    stored = {sample["__key__"]: sample for sample in raw}
    fields = ("latent", "source", "source_1", "mask", "emb", "key")
    one = [*load(tmp_path / "both", global_batch=2, fields=fields)]
    two = load(tmp_path / "targets", join=tmp_path / "sources", global_batch=2, fields=fields)
    assert_same(two, one)
    seen: Counter[tuple[int, ...]] = Counter()
    for batch in one:
        seen[tuple(batch["source"].shape[1:])] += 1
        for row, key in enumerate(batch.pop("key")):
            assert {f"{name}.npy" for name in batch} == {
                name for name in stored[key] if name.endswith(".npy")
            }
            for name, value in batch.items():
                wanted = np.load(io.BytesIO(stored[key][f"{name}.npy"]))
                assert np.array_equal(value[row].numpy(), wanted)
    assert len(seen) > 1
    with pytest.raises(UsageError, match="latents of targets alone"):
        load(images, encode=wdsprep.Encode(resolution=32, model="tiny", roles="target,source"))
    latents = load(images, encode=wdsprep.Encode(resolution=32, model="tiny"), global_batch=2)
    assert [*next(iter(latents))] == ["latent", "emb", "key"]


def test_what_cannot_be_served_is_refused_in_a_line(
    url: str, apart: tuple[str, str], tmp_path: Path
) -> None:
    targets, sources = apart

    def refused(*streams: Any, **options: Any) -> str:
        with pytest.raises(UsageError) as error:
            load(*streams, **options)
        return str(error.value)

    assert "fields=latent, sauce: " in refused(url, fields=("latent", "sauce"))
    assert "ask for some of" in refused(targets, fields=("latent", "source"))
    assert "source_mask" in refused(url, fields=("source_mask",))
    twice = shutil.copytree(sources, tmp_path / "twice")
    assert "both have source" in refused(targets, join=(sources, twice))
    assert "a multiple of the 4 samples" in refused(url, shape_batch=2)


def test_a_state_is_refused_where_the_roles_are_others(
    url: str, apart: tuple[str, str], tmp_path: Path
) -> None:
    targets, _ = apart
    state = load(url).state_dict()
    fewer = write_roles(str(tmp_path / "fewer"), SAMPLES, (LATENT, SOURCE, TEXT))
    for other in (
        load(targets),
        load(url, pad_roles=True),
        load(fewer),
        load(targets, join=write_roles(str(tmp_path / "sources"), SAMPLES, (SOURCE,))),
    ):
        with pytest.raises(FingerprintError):
            other.load_state_dict(state)
    load(url).load_state_dict(state)


def test_a_damaged_sample_is_replaced_by_one_of_its_sizes(url: str, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(url, tmp_path / "broken"))
    samples = keys_of(SAMPLES)
    for tar in broken.glob("64/*.tar"):
        data = bytearray(tar.read_bytes())
        for at in range(0, len(data), len(data) // 5):
            place = data.find(b"source.npy", at)
            if place >= 0:
                data[place : place + 6] = b"sauces"
        tar.write_bytes(data)
    for pad in (False, True):
        lost = {*flat(keys(load(url, epochs=3, pad_roles=pad)))}
        left = [*load(str(broken), epochs=3, pad_roles=pad)]
        assert 5 < len(lost - {*flat(batch["key"] for batch in left)}) < 40
        if not pad:
            for batch in left:
                assert_right(batch, samples)
