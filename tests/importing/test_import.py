"""Latents that others have cached become a dataset: every value, whatever library wrote it."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import wdsprep
from tests.kit.encodes import latents_of
from tests.kit.packs import tree
from tests.kit.paths import ROOT
from wdsprep.dataset.npy_arrays import fields_of, from_bfloat16
from wdsprep.errors import FingerprintError, NotFoundError, SourceError, UsageError
from wdsprep.importing.column_arrays import STORED, to_stored

COUNT = 12
Values = "np.ndarray[Any, Any]"
VAE = {"scale": 0.18215, "shift": 0.0}


def values(number: int, shape: tuple[int, ...], name: str = "") -> Values:
    """As `tests.kit.foreign_sets` has them, which imports too much to be imported here."""
    rng = np.random.default_rng([number, len(shape), *name.encode()])
    return (rng.integers(-8, 8, shape) / 2).astype(np.float32)


def floats_of(place: Path | str) -> dict[str, dict[str, Any]]:
    """The samples of a dataset by key: arrays as floats, its json and its caption."""
    samples = latents_of(Path(place))
    for sample in samples.values():
        for name in (name for name in sample if name.endswith(".npy")):
            is_bits = sample[name].dtype == np.uint16
            array = from_bfloat16(sample[name]) if is_bits else sample[name]
            sample[name] = array.astype(np.float32)
    return samples


def check_dataset(place: Path, samples: dict[str, dict[str, Any]]) -> None:
    """`verify` finds it sound, and the loader gives each sample once, as it lies there."""
    assert not wdsprep.verify(str(place)).findings
    loaded: list[str] = []
    for batch in wdsprep.load(str(place), global_batch=4, epochs=1):
        for row, key in enumerate(batch["key"]):
            latent, emb = (samples[key].get(name) for name in ("latent.npy", "emb.npy"))
            if len(latent) == batch["latent"].shape[1]:  # and no moments
                assert torch.equal(batch["latent"][row].float(), torch.tensor(latent))
            if emb is not None:
                assert torch.equal(batch["emb"][row][: len(emb)].float(), torch.tensor(emb))
        loaded += batch["key"]
    assert sorted(loaded) == sorted(samples)


def mosaicml(number: int, pixels: int) -> dict[str, Any]:
    side = pixels // 8
    latent = values(number, (4, side, side), str(pixels))
    return {"latent": latent, "emb": values(number, (77, 8), "emb")}


def prx(number: int) -> dict[str, Any]:
    """A loader draws latents of moments, whose second half is a log-variance."""
    std = 0.5 + np.abs(values(number, (4, 8, 8), "std"))
    latent = np.concatenate([values(number, (4, 8, 8), "mean"), 2 * np.log(std)])
    return {"latent": latent, "emb": values(number, (3 + number, 6), "emb")}


def flux(number: int, *latents: str) -> dict[str, Any]:
    latent = np.concatenate([values(number, (4, 8, 8), name) for name in latents])
    texts = {"emb": values(number, (5, 8), "t5"), "pooled": values(number, (6,), "clip")}
    return {"latent": latent, **texts}


def captioned(number: int) -> dict[str, Any]:
    return {"caption": f"picture {number}"}


FLUX = {"latent": "bfloat16 (8, 8, 8)", "emb": "bfloat16 (5, 8)", "pooled": "bfloat16 (6,)"}
MLPERF: dict[str, Any] = {
    "settings": {"latents": "moments", "scale": 0.3611, "shift": 0.1159},
    "fields": FLUX,
    "arrays": lambda n: flux(n, "mean", "logvar"),
    "meta": lambda n: {"timestep": n % 8},
}
CACHES: dict[str, dict[str, Any]] = {
    "mosaicml": {
        "options": {"resolution": 512},
        "settings": {"source": "mds", "resolution": 512, "latents": "given", "text": "emb"},
        "fields": {"latent": "<f2 (4, 64, 64)", "emb": "<f2 (77, 8)"},
        "arrays": partial(mosaicml, pixels=512),
        "refused": ({}, r"latents_256, latents_512: .* by --resolution 256"),
    },
    "mosaicml:256": {
        "options": {"resolution": 256},
        "settings": {"resolution": 256},
        "fields": {"latent": "<f2 (4, 32, 32)", "emb": "<f2 (77, 8)"},
        "arrays": partial(mosaicml, pixels=256),
    },
    "prx": {
        "options": {"resolution": 64, **VAE},
        "settings": {"latents": "moments", **VAE},
        "fields": {"latent": "<f4 (8, 8, 8)", "emb": "bfloat16 (1 to 16, 6)"},
        "arrays": prx,
        "meta": lambda n: {**captioned(n), "original_height": 100 + n},
        "keys": "shard_00000-{:07d}",
        "refused": ({"resolution": 64}, "give --scale and --shift of the VAE"),
    },
    **dict.fromkeys(("mlperf", "mlperf.parquet"), MLPERF),
    "primus": {
        "settings": {"latents": "given", "source": "tars"},
        "fields": FLUX | {"latent": "bfloat16 (4, 8, 8)"},
        "arrays": lambda n: flux(n, "latent"),
        "keys": "{:010d}",
    },
    "sana": {
        "options": {"resolution": 256},
        "settings": {"latents": "given", "text": "none"},
        "fields": {"latent": "<f2 (32, 8, 8)"},
        "arrays": lambda n: {"latent": values(n, (32, 8, 8), "latent")},
        "meta": lambda n: {"prompt": f"picture {n}", "height": 256, "width": 256 + n},
        "keys": "s{:04d}",
        "refused": ({}, "give --resolution, such as 64 if each of the 8 cells"),
    },
}
"""By the name of a cache: the options of its import, the settings and arrays of the dataset, what
samples have by their numbers, and other options that are refused."""


@pytest.mark.parametrize("name", CACHES)
def test_what_a_trainer_has_cached_is_kept(name: str, foreign_sets: Path, tmp_path: Path) -> None:
    case, cache = CACHES[name], foreign_sets / "latents" / name.partition(":")[0]
    out, options = tmp_path / "out", case.get("options", {"resolution": 64})
    if "refused" in case:
        with pytest.raises(UsageError, match=case["refused"][1]):
            wdsprep.import_(cache, out, **case["refused"][0])
    imported = wdsprep.import_(cache, out, **options)
    assert (imported.samples, imported.is_damaged) == (COUNT, False)
    assert case["settings"].items() <= imported.manifest.settings.items()
    fields = fields_of(imported.manifest.settings["layout"])
    assert {f.name.removesuffix(".npy"): str(f) for f in fields} == case["fields"]
    samples = floats_of(out)
    for number, key in enumerate(sorted(samples)):
        sample, meta = samples[key], case.get("meta", captioned)(number)
        assert key == case.get("keys", key).format(number)
        for role, array in case["arrays"](number).items():
            assert np.allclose(sample[f"{role}.npy"], array, rtol=1e-6, atol=0)
        assert sample["json"]["meta"] == meta
        assert sample["txt"] == meta.get("caption", meta.get("prompt", ""))
    check_dataset(out, samples)
    assert wdsprep.report(str(out), output=str(tmp_path / "page.html"))


def test_what_stands_for_no_caption_is_zeros_or_files(foreign_sets: Path, tmp_path: Path) -> None:
    cache, out = foreign_sets / "latents/primus", tmp_path / "out"
    files = {"emb": values(99, (5, 8)), "pooled": values(99, (6,))}
    for role, array in files.items():
        bits = (array.view(np.uint32) >> 16).astype(np.uint16)
        np.save(tmp_path / f"{role}.npy", bits)
    said = ",".join(f"{role}={tmp_path}/{role}.npy" for role in files)
    with pytest.raises(UsageError, match="give emb=FILE,pooled=FILE, or zeros"):
        wdsprep.import_(cache, out, resolution=64, empty=f"emb={tmp_path}/emb.npy")
    swapped = f"emb={tmp_path}/pooled.npy,pooled={tmp_path}/emb.npy"
    with pytest.raises(SourceError, match=r"cannot be the array of an empty caption \(emb.npy is"):
        wdsprep.import_(cache, out, resolution=64, empty=swapped)
    for empty, wanted in (("zeros", {n: a * 0 for n, a in files.items()}), (said, files)):
        wdsprep.import_(cache, out, resolution=64, empty=empty, overwrite=True)
        assert not wdsprep.verify(str(out)).findings
        batch = next(iter(wdsprep.load(str(out), global_batch=4, drop_text=1.0)))
        for name, array in wanted.items():
            assert torch.equal(batch[name][0].float(), torch.tensor(array))
    wdsprep.import_(cache, out, resolution=64, overwrite=True)
    with pytest.raises(NotFoundError, match=r"wdsprep import. with --empty and --overwrite"):
        next(iter(wdsprep.load(str(out), global_batch=4, drop_text=1.0)))


@pytest.mark.parametrize("dtype", STORED)
def test_every_dtype_that_is_taken_is_stored_whole(dtype: str) -> None:
    array = np.array([0, 1, 1], dtype)
    assert to_stored(array, sides=1).tolist() == array.tolist()


def write_parquet(path: Path, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path.parent


def test_samples_whose_arrays_differ_are_rejects(tmp_path: Path) -> None:
    """What the first rows have is what all have to have, and a key is that of one sample: of a
    second one the detail says so, and a sample that was refused has no key."""
    good = np.zeros((4, 2, 2), np.float32)
    rows = [good, np.ones((4, 2, 3), np.float32), good + 1, None, good + np.inf, good + 2, good]
    latents = [None if row is None else row.tolist() for row in rows]
    cache = write_parquet(tmp_path / "cache/a.parquet", latent=latents, key=[*"abcdead"])
    wdsprep.import_(cache, tmp_path / "out", resolution=16, columns="latent=latent")
    lines = (tmp_path / "out/rejects/16/a.jsonl").read_text().splitlines()
    codes = {line["source"][-1]: line["code"] for line in map(json.loads, lines)}
    assert codes == {"1": "other_shape", "3": "no_array", "4": "not_finite", "5": "bad_key"}
    assert "another sample of a.parquet has the key a" in lines[-1]
    assert not wdsprep.verify(str(tmp_path / "out")).findings
    assert [*latents_of(tmp_path / "out")] == ["a", "c", "d"]


def in_shapes(place: Path) -> dict[str, Values]:
    """A cache of 30 latents of three shapes in turn, of which two are of none that is listed."""
    sides = [(6, 10), (8, 8), (10, 6)] * 10
    latents = {f"k{n:02d}": values(n, (4, *side)) for n, side in enumerate(sides)}
    latents["k07"], latents["k20"] = values(7, (4, 8, 9)), values(20, (4, 4, 4))
    for name, keys in (("a", [*latents][:18]), ("b", [*latents][18:])):
        rows = [latents[key].tolist() for key in keys]
        write_parquet(place / f"{name}.parquet", latent=rows, key=keys, caption=keys)
    return latents


def test_latents_of_buckets_become_a_dataset_in_shapes(tmp_path: Path) -> None:
    latents = in_shapes(tmp_path / "cache")
    shapes = [(48, 80), (64, 64), (80, 48), (40, 96)]
    out = tmp_path / "out"
    imported = wdsprep.import_(tmp_path / "cache", out, resolution=64, shapes=shapes)
    assert imported.manifest.rejects == {"other_shape": 2}
    assert not wdsprep.verify(str(out)).findings
    found: dict[str, Values] = {}
    for batch in wdsprep.load(str(out), global_batch=4, epochs=1):
        height, width = batch["shape"]
        for key, latent in zip(batch["key"], batch["latent"].float().numpy(), strict=True):
            assert latent.shape == (4, height // 8, width // 8)
            found[key] = latent
    assert set(found) <= set(latents) - {"k07", "k20"}
    assert len(found) >= 24  # what fills no batch of its shape waits for the next epoch
    for key, latent in found.items():
        assert np.array_equal(latent, latents[key])
    assert latents_of(out)["k00"]["json"]["crop"] == [0, 0, 80, 48]
    again = wdsprep.import_(tmp_path / "cache", out, resolution=64, shapes=shapes)
    assert again.units_before == 2
    with pytest.raises(FingerprintError, match="shapes: other"):
        wdsprep.import_(tmp_path / "cache", out, resolution=64, shapes=shapes[:3])


def test_what_cannot_be_taken_is_one_line(foreign_sets: Path, tmp_path: Path) -> None:
    primus, out = foreign_sets / "latents/primus", tmp_path / "out"
    wdsprep.import_(primus, tmp_path / "ours", resolution=64)
    in_shapes(shaped := tmp_path / "shaped")
    text = write_parquet(tmp_path / "text/a.parquet", prompt_embeds=[[[0.0] * 4]])
    wide, square = (np.zeros((4, 2, side)).tolist() for side in (3, 2))
    wide_cache = write_parquet(tmp_path / "wide/a.parquet", latent=[wide])
    moments = write_parquet(tmp_path / "moments/a.parquet", mean=[square], logvar=[square])
    has_no_column = r"has no column 'nope' \(--columns\): it has caption.txt, latents.pth"
    no_size = "fit no size in --shapes"
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (primus, {"columns": "latent=nope"}, has_no_column),
        (tmp_path / "none", {}, "none is empty or .* not known here: give MDS shards, files of"),
        (primus, {"columns": "latent"}, "write ROLE=NAME"),
        (primus, {"columns": "picture=x"}, "--columns 'picture': give one of latent, mean"),
        (primus, {"columns": "latent=x:float16"}, "or latent=z:float16:4x32x32 if it holds bare"),
        (primus, {"columns": "latent=pooled_prompt_embeds.pth"}, r"\(6,\) in .* are not channels"),
        (primus, {"columns": "latent=caption.txt"}, "caption.txt holds no array"),
        (primus, {"scale": 0.5}, "--scale and --shift are for means and variances"),
        (tmp_path / "ours", {}, "is a dataset of wdsprep already"),
        (foreign_sets / "images/datasets", {}, "no column that is known to hold latents"),
        (wide_cache, {"resolution": 16}, "are not squares"),
        (moments, {"resolution": 33}, "resolution 33 is not a multiple of 2"),
        (shaped, {"shapes": "sdxl", "resolution": 0}, "give --resolution too"),
        (shaped, {"shapes": "sdxl"}, "sdxl lacks "),
        (shaped, {"shapes": [(50, 50), (30, 70)], "resolution": 50}, no_size),
        (shaped, {}, "are not squares: give the sizes of its images"),
        (text, {"shapes": "nearest:8,2"}, "leave out --shapes"),
    ]
    for source, options, why in cases:
        with pytest.raises((UsageError, SourceError), match=why) as raised:
            wdsprep.import_(source, out, **{"resolution": 64, **options})
        assert "\n" not in str(raised.value)
    assert not out.exists()


KILLED = """
import os, signal, sys, wdsprep
from wdsprep.runners.job import JobListener

def end(status):
    if status().units_done == 1:
        os.kill(os.getpid(), signal.SIGKILL)

wdsprep.import_(*sys.argv[1:], resolution=64, listener=JobListener(on_status=end))
"""


def test_an_import_goes_on_after_a_kill_or_a_limit_and_refuses_other_files(
    foreign_sets: Path, tmp_path: Path
) -> None:
    cache = shutil.copytree(foreign_sets / "latents/primus", tmp_path / "cache")
    whole = wdsprep.import_(cache, tmp_path / "whole", resolution=64)
    killed, limited = tmp_path / "killed", tmp_path / "limited"
    words = [sys.executable, "-c", KILLED, str(cache), str(killed)]
    assert subprocess.run(words, check=False, cwd=ROOT, timeout=300).returncode == -9
    assert len(list((killed / "receipts").rglob("*.json"))) == 1
    begun = wdsprep.import_(cache, limited, resolution=64, limit=7)
    assert (begun.manifest.samples, begun.manifest.complete) == (7, False)
    for out in (killed, limited):
        done = wdsprep.import_(cache, out, resolution=64)
        assert (done.manifest, done.units_before) == (whole.manifest, 1)
        assert tree(out) == tree(tmp_path / "whole")
    with pytest.raises(
        FingerprintError, match=r"other settings: .*resolution: 64, now 128.*wdsprep import"
    ):
        wdsprep.import_(cache, out, resolution=128)
    (cache / "shard_1.tar").write_bytes(b"another")
    with pytest.raises(FingerprintError, match=r"1 file of .* changed or went away since"):
        wdsprep.import_(cache, out, resolution=64)
