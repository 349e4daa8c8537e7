"""The loader: one sequence, whatever reads it; resumed by an integer; nothing lost or repeated."""

import gc
import io
import itertools
import json
import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import wdsprep
from tests.kit.batches import damage
from tests.kit.latent_sets import EMB, LATENT, array_of, field, flat, keys, write_latents
from tests.kit.packs import jpeg, pack, photos, samples_of, tar_bytes, write_files
from tests.kit.webserver import WebServer, ranges_of
from wdsprep.dataset.reindex import index
from wdsprep.errors import FingerprintError, FormatError, NotFoundError, UsageError
from wdsprep.images.crop import crop
from wdsprep.loading.options import Stream

BATCH = 32


def load(url: Any, **options: Any) -> Any:
    return wdsprep.load(url, **({"global_batch": BATCH, "rank": 0, "world_size": 1} | options))


# What a batch holds


def test_a_batch_that_is_kept_does_not_change(data: str) -> None:
    kept = list(load(data, epochs=3, ahead=1))
    for batch in kept:
        for row, key in enumerate(batch["key"]):
            wanted = array_of(key, field("latent", LATENT))
            assert np.array_equal(batch["latent"][row].numpy(), wanted)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_says_so(data: str) -> None:
    with pytest.raises(UsageError, match="no such GPU"):
        load(data, pin=True)
    with pytest.raises(UsageError, match="no such GPU"):
        load(data, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_on_a_gpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    """While the stream that uses them is busy, and pinned memory is used again and again."""
    url = write_latents(str(tmp_path), moments=True)
    busy = torch.zeros(4096, 4096, device="cuda")
    options = {"epochs": 12, "ahead": 1, "drop_text": 0.2, "fields": ("latent", "emb", "key")}
    kept = []
    for batch in load(url, device="cuda", **options):
        busy = busy @ busy
        kept.append((batch["key"], batch["latent"] + busy[0, 0], batch["emb"].clone()))
    pinned = list(load(url, pin=True, **options))
    for (names, latent, emb), wanted, host in zip(kept, load(url, **options), pinned, strict=True):
        assert names == wanted["key"]
        assert torch.equal(latent.cpu().float(), wanted["latent"].float())
        assert torch.equal(emb.cpu(), wanted["emb"])
        assert host["latent"].is_pinned()
        assert torch.equal(host["latent"], wanted["latent"])


def test_unknown_fields_and_rates_are_refused(data: str) -> None:
    refused: list[tuple[str, dict[str, Any]]] = [
        ("holds latents; ask for some of", {"fields": ("latents",)}),
        ("rate", {"drop_text": 1.5}),
        ("pixels -1: give 0 or more", {"pixels": -1}),
        ("from 0 on", {"step": -1}),
        ("epochs 0", {"epochs": 0}),
        ("divide", {"rank": 0, "world_size": 5}),
        ("both", {"rank": 1, "world_size": None}),
    ]
    for said, options in refused:
        with pytest.raises(UsageError, match=said):
            load(data, **options)
    with pytest.raises(NotFoundError, match="no dataset"):
        load(data + "/receipts-of-none")


def test_a_dataset_on_the_web_is_refused(data: str) -> None:
    with WebServer(ranges_of(Path(data, "wdsprep.json").read_bytes())) as server:
        url = f"{server.url}/wdsprep.json"
        for streams, join in ((url, ()), (data, url)):
            with pytest.raises(UsageError, match=rf"{url} cannot be loaded: give a local path"):
                load(streams, join=join)


# One order


def test_an_iteration_is_an_epoch_and_the_next_goes_on(data: str) -> None:
    loader = load(data)
    assert len(loader) == loader.steps_per_epoch == 9
    found = []
    for epoch in range(3):
        assert loader.epoch == epoch
        found += keys(loader)
        assert loader.step == 9 * (epoch + 1)
    assert found == keys(load(data, epochs=3))
    with pytest.raises(TypeError, match="endless"):
        len(load(data, epochs=None))


def test_rank_comes_from_the_environment(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert keys(wdsprep.load(data, global_batch=BATCH)) == keys(load(data, rank=1, world_size=2))
    for rank, world in (("", "2"), ("one", "2"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        said = f"RANK={rank!r} and WORLD_SIZE={world!r}: set both"
        with pytest.raises(UsageError, match=said):
            wdsprep.load(data, global_batch=BATCH)


OTHER_TEXTS = {
    "none": (),
    "of another length": (field("emb", (9, 16)),),
    "as long as captions": (field("emb", (9, 16), is_variable=True),),
    "more": (field("pooled", (3,)), field("emb", EMB)),
}


@pytest.mark.parametrize("texts", OTHER_TEXTS.values(), ids=OTHER_TEXTS)
@pytest.mark.parametrize("moments", [False, True])
def test_a_mixture_has_alike_what_is_asked_for(
    data: str, tmp_path: Path, texts: Any, moments: bool
) -> None:
    """Whatever else either of them has."""
    latent = field("latent", LATENT)
    one = write_latents(str(tmp_path / "one"), [60], moments=True) if moments else data
    fields = (latent, *texts)
    other = write_latents(str(tmp_path / "two"), [90], base=10**6, fields=fields, moments=moments)
    with pytest.raises(UsageError, match=r"differ in name or shape \((emb|pooled).*give fields="):
        load([one, other])
    for names in (("latent", "key"), ("key", "txt", "latent")):
        came = {}
        for batch in load([one, other], fields=names, drop_text=0.5, epochs=2):
            assert [*batch] == [*names]
            if not moments:
                came |= dict(zip(batch["key"], batch["latent"], strict=True))
        for key, values in came.items():
            assert np.array_equal(values.numpy(), array_of(key, latent))
    with pytest.raises(UsageError, match=r"differ in name or shape"):
        load([one, other], fields=("latent", *("emb", "pooled")[: 1 + (len(texts) > 1)]))


def test_moments_of_a_mixture_have_one_patch(tmp_path: Path) -> None:
    one, other = (
        write_latents(str(tmp_path / name), [60], base=base, moments=True, more={"patch": patch})
        for name, base, patch in (("one", 0, 1), ("two", 10**6, 2))
    )
    with pytest.raises(UsageError, match=r"differ in name or shape \(latent\): give fields="):
        load([one, other])
    assert load([one, other], fields=("emb", "key"))


def test_buckets_are_chosen_by_name(tmp_path: Path) -> None:
    url = write_latents(str(tmp_path), [40, 40])
    assert len(load(Stream(url, buckets=[256])).urls()) == 2
    assert len(load(Stream(url, buckets="256")).urls()) == 2
    with pytest.raises(UsageError, match="has the buckets 256: choose from these instead of 512"):
        load(Stream(url, buckets=["256", "512"]))


def test_a_loader_says_what_it_serves_and_how_far_it_is(data: str) -> None:
    loader = load(data, epochs=None, world_size=2, rank=1, step=12)
    what = f"{data!r}: 300 samples, 9 steps of 32 an epoch"
    assert repr(loader) == f"<Loader {what}; at step 12>"
    mixed = load([Stream(data), Stream(data, repeat=2)])
    assert repr(mixed) == (
        f"<Loader {data!r}, {data!r}: 600 samples, 28 steps of 32 an epoch; at step 0>"
    )


def test_a_place_that_holds_no_dataset_says_where_one_is(data: str, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "in/latents")
    with pytest.raises(UsageError, match=rf"give one of them \({tmp_path}/in/latents\)$"):
        load(str(tmp_path / "in"))
    with pytest.raises(NotFoundError, match="give the folder"):
        load(f"{data}/256/000000.tar")
    (tmp_path / "in/latents/wdsprep.json").rename(tmp_path / "kept")
    (tmp_path / "in/latents/receipts").mkdir(exist_ok=True)
    (tmp_path / "in/latents/receipts/000000.json").write_text("{}")
    with pytest.raises(UsageError, match="wdsprep rebuild"):
        load(str(tmp_path / "in/latents"))


# Resume


def test_moving_the_loader_ends_an_iteration_and_begins_where_it_says(data: str) -> None:
    whole = keys(load(data))
    loader = load(data)
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    next(running)
    loader.load_state_dict(state)
    with pytest.raises(UsageError, match=r"step was set, .* is at step 1 now$"):
        next(running)
    assert keys(loader) == whole[1:]
    loader.step = 0
    for number, _ in enumerate(loader, 1):
        loader.step = number  # where it is
    assert number == len(whole)
    loader.step = 2
    running = iter(loader)
    next(running)
    assert keys(loader, 2) == whole[3:5]
    with pytest.raises(UsageError, match=r"iterated again, and it is at step 5 now$"):
        next(running)
    assert loader.state_dict()["step"] == 5
    raw = load(data, raw=True)
    for _ in itertools.islice(raw, 40):
        pass
    raw.step = 2
    assert [sample["__key__"] for sample in raw] == flat(whole[2:])
    for step in (-3, "3", 1.5):
        with pytest.raises(UsageError):
            loader.step = step


def test_a_changed_dataset_or_parameter_is_refused_and_a_moved_one_is_not(
    data: str, tmp_path: Path
) -> None:
    loader = load(data)
    keys(loader, 3)
    state = loader.state_dict()
    moved = str(shutil.copytree(data, tmp_path / "moved"))
    again = load(moved)
    again.load_state_dict(state)
    assert keys(again) == keys(load(data))[3:]
    other = write_latents(str(tmp_path / "other"), [60, 60, 60, 60, 59])
    for options, what in (
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"global_batch": 64}, "global-batch: 32 -> 64"),
        ({"url": other}, rf"stream 0 \({re.escape(other)}\): .* 300 samples, .* -> .* 299 samples"),
        ({"window": 8}, "window"),
        ({"drop_text": 0.1}, "drop-text: 0.0 -> 0.1"),
    ):
        with pytest.raises(FingerprintError, match=what):
            load(**{"url": data, **options}).load_state_dict(state)
    load(data, drop_text=0, fields=("emb", "txt"), raw=False).load_state_dict(state)
    for wrong in ({}, None, state | {"step": 1 << 50}):
        with pytest.raises(FormatError):
            load(data).load_state_dict(wrong)
    with pytest.raises(FingerprintError, match="version: 1 -> 2"):
        load(data).load_state_dict(state | {"version": 1})


# Damage


@pytest.mark.parametrize("at", [0, 150, 515, 1650])
def test_a_damaged_sample_is_replaced_and_nothing_shifts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    url = write_latents(str(tmp_path))
    whole = flat(keys(load(url)))
    path = tmp_path / "256/000001.tar"
    start = int(np.fromfile(f"{path}.idx", "<u8")[7])
    damage(path, start + at, b"\xff" * 16)
    with caplog.at_level(logging.WARNING, "wdsprep"):
        found = flat(keys(load(url)))
    bad = f"{67:012d}"
    assert found == flat(keys(load(url, threads=1, ahead=0)))
    assert [k for k, w in zip(found, whole, strict=True) if k != w] == [found[whole.index(bad)]]
    assert "000001.tar: sample 7 cannot be served" in caplog.text


def test_a_missing_shard_is_an_error_or_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = write_latents(str(tmp_path))
    whole = flat(keys(load(url)))
    (tmp_path / "256/000002.tar").unlink()
    with pytest.raises(NotFoundError, match=r"000002\.tar.*missing.*skip_missing"):
        keys(load(url))
    found = flat(keys(load(url, skip_missing=True)))
    for key, wanted in zip(found, whole, strict=True):
        assert (key == wanted) is not (120 <= int(wanted) < 180)
        assert not 120 <= int(key) < 180
    assert caplog.text.count("the shard is missing") == 1


# Raw samples, images, foreign tars


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its open files
def test_raw_samples_are_those_of_webdataset(data: str) -> None:
    import webdataset

    loader = load(data, raw=True)
    urls = loader.urls()
    wanted = {s["__key__"]: s for s in webdataset.WebDataset(urls, shardshuffle=False)}
    gc.collect()
    found = list(loader)
    assert len(found) == len(loader) == 9 * BATCH
    assert [sample["__key__"] for sample in found] == flat(keys(load(data)))
    for sample in found:
        other = wanted[sample["__key__"]]
        names = {name for name in other if not name.startswith("__")}
        assert all(sample[name] == other[name] for name in names)
        assert sample["__url__"] == other["__url__"]


def test_raw_mode_resumes_at_any_sample(data: str) -> None:
    whole = flat(keys(load(data)))
    for stop in (0, 1, 31, 32, 50):
        loader = load(data, raw=True)
        for _ in itertools.islice(loader, stop):
            pass
        again = load(data, raw=True)
        again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert [sample["__key__"] for sample in again] == whole[stop:]


def test_foreign_tars_that_are_written_anew_are_indexed_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(count: int, later_s: float) -> None:
        write_files(tmp_path, {"0.tar": tar_bytes((f"{n}.txt", b"") for n in range(count))})
        at = time.time() + later_s
        os.utime(tmp_path / "0.tar", (at, at))

    url = str(tmp_path)
    write(5, -5)
    assert index(url) == {"0.tar": 5, "0.tar.parquet": 5}
    assert index(url) == {}
    assert len(list(load(url, raw=True, global_batch=5))) == 5
    assert not caplog.text
    write(10, 5)
    load(url, raw=True, global_batch=5)
    assert "0.tar is newer than its index; if it was written again, run" in caplog.text
    assert index(url) == {"0.tar": 10, "0.tar.parquet": 10}
    for nbytes in (0, 60):
        os.truncate(tmp_path / "0.tar.idx", nbytes)
        with pytest.raises(UsageError, match="wdsprep index"):
            load(url, raw=True, global_batch=5)
        assert index(url) == {"0.tar": 10, "0.tar.parquet": 10}


def test_foreign_tars_load_raw_and_as_crops(tmp_path: Path) -> None:
    for number in range(2):
        parts = []
        for n in range(20):
            Image.new("RGB", (40 + n, 32), (n, 2 * n, 3 * n)).save(out := io.BytesIO(), "PNG")
            parts += [(f"{number}_{n}.png", out.getvalue()), (f"{number}_{n}.txt", b"%d" % n)]
        write_files(tmp_path, {f"{number}.tar": tar_bytes(parts)})
    url = str(tmp_path)
    with pytest.raises(UsageError, match="wdsprep index"):
        load(url, raw=True)
    assert {*index(url).items()} >= {("0.tar", 20), ("1.tar", 20)}
    with pytest.raises(UsageError, match="raw=True"):
        load(url)
    assert len({sample["__key__"] for sample in load(url, raw=True, global_batch=40)}) == 40
    batch = next(iter(load(url, pixels=16)))
    assert batch["pixels"].shape == (BATCH, 3, 16, 16)
    for pixels, key, text in zip(batch["pixels"], batch["key"], batch["txt"], strict=True):
        n = int(key.split("_")[1])
        assert text == str(n)
        assert pixels[:, 8, 8].tolist() == [n, 2 * n, 3 * n]


def test_all_captions_may_be_dropped_and_none_where_there_are_none(
    data: str, tmp_path: Path
) -> None:
    for batch in load(data, drop_text=1.0, fields=("emb", "txt")):
        assert (batch["emb"] == 9).all()
        assert not any(batch["txt"])
    bare = write_latents(str(tmp_path), [BATCH], fields=(field("latent", LATENT),))
    with pytest.raises(UsageError, match="--text none: leave out drop_text"):
        load(bare, drop_text=0.1)
    (batch,) = load(bare, drop_text=1, fields=("latent", "txt"))
    assert not any(batch["txt"])


# Packed images: bytes and crops, with their own captions and keys


COUNT = 48  # the 32 bucket gets half of them, the 64 bucket the others


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    return pack(photos(root / "photos", COUNT), root / "packed", "--samples-per-shard", "10")


@pytest.fixture(scope="module")
def stored(images: Path) -> dict[str, dict[str, Any]]:
    return {sample["__key__"]: sample for sample in samples_of(images)}


def test_images_come_as_they_were_packed(images: Path, stored: dict[str, Any]) -> None:
    seen = []
    for batch in load(images, global_batch=12, fields=("image", "txt", "json", "key")):
        for image, text, facts, key in zip(
            *(batch[name] for name in ("image", "txt", "json", "key")), strict=True
        ):
            assert image == stored[key]["jpg"]
            assert (text, facts) == (stored[key]["txt"], stored[key]["json"])
            seen.append(key)
    assert sorted(seen) == sorted(stored)
    assert set(next(iter(load(images, global_batch=12)))) == {"image", "txt", "key"}


def test_the_json_of_foreign_tars_holds_no_number_that_json_cannot(tmp_path: Path) -> None:
    facts = b'{"a": 1.5, "b": %s.0, "c": -Infinity, "d": [NaN, 2e999]}' % (b"9" * 400)
    tar = tar_bytes(
        part for n in range(12) for part in ((f"{n}.jpg", jpeg(n)), (f"{n}.json", facts))
    )
    dict(index(str(write_files(tmp_path, {"0.tar": tar}))))
    (batch,) = load(tmp_path, global_batch=12, pixels=32, fields=("json",))
    assert batch["json"] == [{"a": 1.5, "b": None, "c": None, "d": [None, None]}] * 12


def test_crops_are_those_of_the_packed_images(images: Path, stored: dict[str, Any]) -> None:
    for batch in load(images, global_batch=12, pixels=32):
        assert batch["pixels"].shape == (12, 3, 32, 32)
        assert batch["pixels"].dtype == torch.uint8
        for pixels, text, key in zip(batch["pixels"], batch["txt"], batch["key"], strict=True):
            assert torch.equal(pixels, crop(stored[key]["jpg"], 32).pixels)
            assert text == stored[key]["txt"]


def test_crops_are_of_images_that_are_large_enough(images: Path, stored: dict[str, Any]) -> None:
    """As encode takes them: those of the phase, each once a pass."""
    found = [key for batch in load(images, global_batch=12, pixels=64) for key in batch["key"]]
    large = [
        key
        for key, sample in stored.items()
        if min(sample["json"]["width"], sample["json"]["height"]) >= 64
    ]
    assert sorted(found) == sorted(large)
    assert len(found) == COUNT // 2
    with pytest.raises(UsageError, match=r"no bucket to load \(32, 64\) is for 128 pixels"):
        load(images, global_batch=12, pixels=128)


def test_a_dataset_that_grows_yet_says_that_states_will_not_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    photos(tmp_path / "photos", COUNT)
    cut = ("--samples-per-shard", "10", "--limit", "30")
    for options, said in ((cut, 1), (cut[:2], 0)):
        caplog.clear()
        load(pack(tmp_path / "photos", tmp_path / "packed", *options), global_batch=12)
        assert caplog.text.count("is not complete: checkpoints made now will not resume") == said


def test_a_state_is_of_crops_of_one_size(images: Path) -> None:
    state = load(images, global_batch=12, pixels=32).state_dict()
    with pytest.raises(FingerprintError, match="pixels: 32 -> 64"):
        load(images, global_batch=12, pixels=64).load_state_dict(state)


def test_images_and_latents_are_told_apart(images: Path, tmp_path: Path) -> None:
    latents = write_latents(str(tmp_path), [30])
    with pytest.raises(UsageError, match=r"holds images and .* holds latents: load"):
        load([latents, images])
    with pytest.raises(UsageError, match="pixels= is for images"):
        load(latents, pixels=32)
