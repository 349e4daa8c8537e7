"""Latents that others have cached become a dataset: every value, whatever library wrote it."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import wdsprep
from tests.kit.packs import tar_bytes, tree
from tests.kit.paths import ROOT
from wdsprep.dataset.npy_arrays import field_of, values_of
from wdsprep.errors import FingerprintError, NotFoundError, SourceError, UsageError
from wdsprep.importing.column_arrays import STORED, raw_array, to_stored
from wdsprep.reporting.inspect import FoundSample

COUNT = 12
Values = "np.ndarray[Any, Any]"


def values(number: int, shape: tuple[int, ...], name: str = "") -> Values:
    """As `tests.kit.foreign_sets` has them, which imports too much to be imported here."""
    rng = np.random.default_rng([number, len(shape), *name.encode()])
    return (rng.integers(-8, 8, shape) / 2).astype(np.float32)


def of_sample(place: Path, key: str) -> dict[str, Any]:
    """The arrays of a sample as floats, its json and its caption."""
    found = wdsprep.inspect(str(place), key)
    assert isinstance(found, FoundSample)
    members = found.members
    arrays = {n: values_of(field_of(n, d), d) for n, d in members.items() if n.endswith(".npy")}
    return {
        **{name.removesuffix(".npy"): array.astype(np.float32) for name, array in arrays.items()},
        "json": json.loads(members["json"]),
        "txt": members["txt"].decode(),
    }


def check_dataset(place: Path, keys: list[str]) -> None:
    """`verify` finds it sound, and the loader gives each sample once, as it lies there."""
    assert not wdsprep.verify(str(place)).findings
    loaded: list[str] = []
    for batch in wdsprep.load(str(place), global_batch=4, epochs=1):
        for row, key in enumerate(batch["key"]):
            stored = of_sample(place, key)
            if len(stored["latent"]) == batch["latent"].shape[1]:  # and no moments
                assert torch.equal(batch["latent"][row].float(), torch.tensor(stored["latent"]))
            if "emb" in stored:
                length = len(stored["emb"])
                assert torch.equal(batch["emb"][row][:length].float(), torch.tensor(stored["emb"]))
        loaded += batch["key"]
    assert sorted(loaded) == sorted(keys)


def test_mosaicml_keeps_bytes_of_two_resolutions(foreign_sets: Path, tmp_path: Path) -> None:
    cache = foreign_sets / "latents/mosaicml"
    with pytest.raises(UsageError, match=r"latents_256, latents_512: .* by --resolution 256"):
        wdsprep.import_(cache, tmp_path / "out")
    for pixels in (256, 512):
        place = tmp_path / f"out-{pixels}"
        imported = wdsprep.import_(cache, place, resolution=pixels)
        assert (imported.samples, imported.is_damaged) == (COUNT, False)
        settings = imported.manifest.settings
        assert (settings["source"], settings["resolution"]) == ("mds", pixels)
        assert (settings["latents"], settings["text"]) == ("given", "emb")
    number = 0
    for shard in json.loads((cache / "index.json").read_bytes())["shards"]:
        stem = shard["raw_data"]["basename"].removesuffix(".mds").replace(".", "_")
        for row in range(shard["samples"]):
            found = of_sample(place, f"{stem}-{row:07d}")
            assert np.array_equal(found["latent"], values(number, (4, 64, 64), "512"))
            assert np.array_equal(found["emb"], values(number, (77, 8), "emb"))
            assert found["txt"] == found["json"]["caption"] == f"picture {number}"
            number += 1
    check_dataset(place, _keys(place))


def _keys(place: Path) -> list[str]:
    return [key for path in sorted(place.rglob("*.tar")) for key in _keys_of(path)]


def _keys_of(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        names = tar.getnames()
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]


def test_prx_keeps_mean_and_deviation_and_text_as_long_as_it_is(
    foreign_sets: Path, tmp_path: Path
) -> None:
    """A loader draws latents of moments, whose second half is a log-variance, and scales them."""
    cache, sd = foreign_sets / "latents/prx", {"scale": 0.18215, "shift": 0.0}
    with pytest.raises(UsageError, match="give --scale and --shift of the VAE"):
        wdsprep.import_(cache, tmp_path / "out", resolution=64)
    imported = wdsprep.import_(cache, tmp_path / "out", resolution=64, **sd)
    settings = imported.manifest.settings
    assert (settings["latents"], settings["scale"], settings["shift"]) == ("moments", 0.18215, 0.0)
    assert settings["layout"][-1] == {
        "dtype": "bfloat16",
        "name": "emb.npy",
        "offset": 3712,
        "shape": [16, 6],
        "variable": True,
    }
    for number in range(COUNT):
        found = of_sample(tmp_path / "out", f"shard_00000-{number:07d}")
        mean, logvar = np.split(found["latent"], 2)
        assert np.array_equal(mean, values(number, (4, 8, 8), "mean"))
        std = 0.5 + np.abs(values(number, (4, 8, 8), "std"))
        assert np.allclose(np.exp(logvar / 2), std, rtol=1e-6)
        assert np.array_equal(found["emb"], values(number, (3 + number, 6), "emb"))
        assert found["json"]["meta"] == {
            "caption": f"picture {number}",
            "original_height": 100 + number,
        }
    check_dataset(tmp_path / "out", _keys(tmp_path / "out"))


@pytest.mark.parametrize("form", ["mlperf", "mlperf.parquet"])
def test_mlperf_keeps_moments_and_bfloat16_as_its_bits(
    foreign_sets: Path, tmp_path: Path, form: str
) -> None:
    imported = wdsprep.import_(foreign_sets / "latents" / form, tmp_path / "out", resolution=64)
    settings = imported.manifest.settings
    assert (settings["latents"], settings["scale"], settings["shift"]) == (
        *("moments", 0.3611, 0.1159),
    )
    assert {line["dtype"] for line in settings["layout"]} == {"bfloat16"}
    keys = sorted(_keys(tmp_path / "out"))
    for number, key in enumerate(keys):
        found = of_sample(tmp_path / "out", key)
        moments = [values(number, (4, 8, 8), name) for name in ("mean", "logvar")]
        assert np.array_equal(found["latent"], np.concatenate(moments))
        assert np.array_equal(found["emb"], values(number, (5, 8), "t5"))
        assert np.array_equal(found["pooled"], values(number, (6,), "clip"))
        assert found["json"]["meta"] == {"timestep": number % 8}
    check_dataset(tmp_path / "out", keys)


def test_primus_keeps_what_torch_has_saved(foreign_sets: Path, tmp_path: Path) -> None:
    imported = wdsprep.import_(foreign_sets / "latents/primus", tmp_path / "out", resolution=64)
    assert imported.manifest.settings["latents"] == "given"
    keys = [f"{number:010d}" for number in range(COUNT)]
    for number, key in enumerate(keys):
        found = of_sample(tmp_path / "out", key)
        assert np.array_equal(found["latent"], values(number, (4, 8, 8), "latent"))
        assert np.array_equal(found["emb"], values(number, (5, 8), "t5"))
        assert np.array_equal(found["pooled"], values(number, (6,), "clip"))
        assert found["txt"] == f"picture {number}"
    check_dataset(tmp_path / "out", keys)


def test_sana_keeps_npy_and_the_prompt_in_json(foreign_sets: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give --resolution, such as 64 if each of the 8 cells"):
        wdsprep.import_(foreign_sets / "latents/sana", tmp_path / "out")
    wdsprep.import_(foreign_sets / "latents/sana", tmp_path / "out", resolution=256)
    keys = [f"s{number:04d}" for number in range(COUNT)]
    for number, key in enumerate(keys):
        found = of_sample(tmp_path / "out", key)
        assert np.array_equal(found["latent"], values(number, (32, 8, 8), "latent"))
        assert found["txt"] == f"picture {number}"
        assert found["json"]["meta"]["width"] == 256 + number
    check_dataset(tmp_path / "out", keys)
    text = wdsprep.report(str(tmp_path / "out"), output=str(tmp_path / "page.html"))
    assert text


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


@pytest.mark.parametrize("dtype", sorted(set(STORED) - {"bfloat16", "uint16"}))
def test_every_dtype_that_is_taken_is_stored_whole(dtype: str) -> None:
    array = np.array([0, 1, 1], dtype)
    stored = to_stored(raw_array(array), sides=1)
    assert np.frombuffer(stored.data, stored.dtype).tolist() == array.tolist()


def test_a_pickle_is_no_tensor(tmp_path: Path) -> None:
    """A file that would run something when it is unpickled becomes a reject, and runs nothing."""

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    good, bad = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(4, 8, 8), good)
    torch.save({"x": Evil()}, bad)
    members = [("a.latents.pth", good.getvalue()), ("b.latents.pth", bad.getvalue())]
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/0.tar").write_bytes(tar_bytes(members))
    imported = wdsprep.import_(tmp_path / "cache", tmp_path / "out", resolution=64)
    assert (imported.samples, imported.manifest.rejects) == (1, {"unreadable": 1})
    assert not (tmp_path / "ran").exists()


def write_parquet(path: Path, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path.parent


def test_samples_whose_arrays_differ_are_rejects(tmp_path: Path) -> None:
    """What the first rows have is what all have to have."""
    good = np.zeros((4, 2, 2), np.float32)
    rows = [good, np.ones((4, 2, 3), np.float32), good + 1, None, good + np.inf]
    latents = [None if row is None else row.tolist() for row in rows]
    cache = write_parquet(tmp_path / "cache/a.parquet", latent=latents, key=[*"abcde"])
    wdsprep.import_(cache, tmp_path / "out", resolution=16, columns="latent=latent")
    rejects = (tmp_path / "out/rejects/16/a.jsonl").read_text().splitlines()
    codes = {line["key"]: line["code"] for line in map(json.loads, rejects)}
    assert codes == {"b": "other_shape", "d": "no_array", "e": "not_finite"}
    assert not wdsprep.verify(str(tmp_path / "out")).findings
    assert sorted(_keys(tmp_path / "out")) == ["a", "c"]


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
    assert of_sample(out, "k00")["json"]["crop"] == [0, 0, 80, 48]
    again = wdsprep.import_(tmp_path / "cache", out, resolution=64, shapes=shapes)
    assert again.units_before == 2
    with pytest.raises(FingerprintError, match="shapes: other"):
        wdsprep.import_(tmp_path / "cache", out, resolution=64, shapes=shapes[:3])


def test_shapes_that_cannot_be_are_one_line(tmp_path: Path) -> None:
    in_shapes(tmp_path / "cache")
    text = write_parquet(tmp_path / "text/a.parquet", prompt_embeds=[[[0.0] * 4]])
    cache, out = tmp_path / "cache", tmp_path / "out"
    for source, options, error, why in (
        (cache, {"shapes": "sdxl"}, UsageError, "give --resolution too"),
        (cache, {"shapes": "sdxl", "resolution": 64}, UsageError, "sdxl is for --resolution 1024"),
        (
            cache,
            {"shapes": [(50, 50), (30, 70)], "resolution": 50},
            UsageError,
            "fit no size in --shapes",
        ),
        (text, {"shapes": "nearest:8,2", "resolution": 64}, UsageError, "leave out --shapes"),
        (cache, {"resolution": 64}, SourceError, "are not squares: give the sizes of its images"),
    ):
        with pytest.raises(error, match=why):
            wdsprep.import_(source, out, **options)
    assert not out.exists()


def test_what_cannot_be_taken_is_one_line(foreign_sets: Path, tmp_path: Path) -> None:
    primus, out = foreign_sets / "latents/primus", tmp_path / "out"
    for columns, why in (
        ("latent=nope", r"has no column 'nope' \(--columns\): it has caption.txt, latents.pth"),
        ("latent", "write ROLE=NAME"),
        ("picture=x", "--columns 'picture': give one of latent, mean"),
        ("latent=x:float16", "the shape of bare bytes is written as"),
        ("latent=pooled_prompt_embeds.pth", r"latents of bfloat16 \(6,\) in .* are not channels"),
        ("latent=caption.txt", "caption.txt holds no array"),
    ):
        with pytest.raises((UsageError, SourceError), match=why):
            wdsprep.import_(primus, out, resolution=64, columns=columns)
    ours = wdsprep.import_(primus, tmp_path / "ours", resolution=64)
    assert ours.samples
    with pytest.raises(UsageError, match="is a dataset of wdsprep already"):
        wdsprep.import_(tmp_path / "ours", out)
    with pytest.raises(UsageError, match="--scale and --shift are for means and variances"):
        wdsprep.import_(primus, out, resolution=64, scale=0.5)
    with pytest.raises(SourceError, match="no column that is known to hold latents"):
        wdsprep.import_(foreign_sets / "images/datasets", out, resolution=64)
    wide = np.zeros((4, 2, 3), np.float32).tolist()
    cache = write_parquet(tmp_path / "wide/a.parquet", latent=[wide])
    with pytest.raises(SourceError, match="are not squares"):
        wdsprep.import_(cache, out, resolution=16)
    half = np.zeros((4, 2, 2), np.float32).tolist()
    cache = write_parquet(tmp_path / "half/a.parquet", mean=[half], logvar=[half])
    with pytest.raises(UsageError, match="resolution 33 is not a multiple of 2"):
        wdsprep.import_(cache, out, resolution=33)
    assert not out.exists()


def test_an_import_goes_on_after_a_limit_and_refuses_other_files(
    foreign_sets: Path, tmp_path: Path
) -> None:
    cache = shutil.copytree(foreign_sets / "latents/primus", tmp_path / "cache")
    whole = wdsprep.import_(cache, tmp_path / "whole", resolution=64)
    begun = wdsprep.import_(cache, tmp_path / "out", resolution=64, limit=7)
    assert (begun.manifest.samples, begun.manifest.complete) == (7, False)
    done = wdsprep.import_(cache, tmp_path / "out", resolution=64)
    assert (done.manifest, done.units_before) == (whole.manifest, 1)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    with pytest.raises(
        FingerprintError, match=r"other settings: .*resolution: 64, now 128.*wdsprep import"
    ):
        wdsprep.import_(cache, tmp_path / "out", resolution=128)
    (cache / "shard_1.tar").write_bytes(b"another")
    with pytest.raises(FingerprintError, match=r"1 file of .* changed or went away since"):
        wdsprep.import_(cache, tmp_path / "out", resolution=64)


KILLED = """
import os, signal, sys, wdsprep
from wdsprep.runners.job import JobListener

def end(status):
    if status().units_done == 1:
        os.kill(os.getpid(), signal.SIGKILL)

wdsprep.import_(*sys.argv[1:], resolution=64, listener=JobListener(on_status=end))
"""


def test_a_killed_import_goes_on_to_the_same_bytes(foreign_sets: Path, tmp_path: Path) -> None:
    cache = foreign_sets / "latents/primus"
    words = [sys.executable, "-c", KILLED, str(cache), str(tmp_path / "out")]
    assert subprocess.run(words, check=False, cwd=ROOT, timeout=300).returncode == -9
    assert len(list((tmp_path / "out/receipts").rglob("*.json"))) == 1
    done = wdsprep.import_(cache, tmp_path / "out", resolution=64)
    assert (done.units_before, done.manifest.complete) == (1, True)
    wdsprep.import_(cache, tmp_path / "whole", resolution=64)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
