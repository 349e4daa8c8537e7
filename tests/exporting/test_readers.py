"""What is exported is read by the reader that it is for, every sample with what it holds."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wdsprep
from tests.exporting.test_export import FLUX, latents
from tests.kit.encodes import encode_here, latents_of, packed, pictures, samples_in
from tests.kit.joined_sets import VARIED, Images, caption, write_part
from tests.kit.latent_sets import array_of, field
from tests.kit.paths import ROOT
from tests.kit.sd_scripts import cached_images
from wdsprep.store.base import absolute

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries that readers import
SYSTEM = pytest.mark.system
COUNT = 10
MISSING = "is not installed: run tools/venv"
OTHERS = {name: Path(sys.prefix, name) for name in ("energon", "wids")}
"""Folders in the environment with what must not stand beside the rest: an older webdataset, and the
libraries that Energon asks for."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    return packed(pictures(root / "in", range(COUNT)), root / "images")


@pytest.fixture(scope="module")
def encoded(images: Path) -> Path:
    """Latents of the toy model."""
    encode_here(images, images.parent / "latents")
    return images.parent / "latents"


def stored_images(root: Path) -> dict[str, tuple[bytes, str, dict[str, Any]]]:
    """By key: the image, its caption and its json."""
    samples = samples_in(root).items()
    return {key: (s["jpg"], s["txt"].decode(), json.loads(s["json"])) for key, s in samples}


def pixels_of(data: bytes) -> bytes:
    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def elsewhere(name: str, code: str, *words: Path | str) -> Any:
    """What a program prints as JSON, with the libraries of that folder before all others."""
    if not OTHERS[name].exists():
        pytest.skip(f"{OTHERS[name]} {MISSING}")
    paths = os.pathsep.join([str(OTHERS[name]), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, words)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# --- streaming
@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens MDS, and checks its digests."""
    streaming = pytest.importorskip("streaming", reason=f"streaming {MISSING}")
    monkeypatch.delenv("RANK", raising=False)

    def opened(root: Path) -> list[dict[str, Any]]:
        streaming.base.util.clean_stale_shared_memory()
        how = {"local": str(root), "batch_size": 1, "validate_hash": "sha256"}
        return [*streaming.StreamingDataset(**how)]

    return opened


@SYSTEM
def test_streaming_reads_images(images: Path, streamed: Any, tmp_path: Path) -> None:
    wdsprep.export(images, tmp_path / "out", to="mds")
    kept = stored_images(images)
    found = streamed(tmp_path / "out")
    assert len(found) == len(kept) == COUNT
    for sample in found:
        data, text, facts = kept[sample["key"]]
        assert (sample["image"], sample["caption"]) == (data, text)
        assert (sample["width"], sample["height"]) == (facts["width"], facts["height"])
        assert sample["original_width"] == facts["original_width"]


@SYSTEM
def test_streaming_reads_latents_in_the_columns_of_prx(
    encoded: Path, streamed: Any, tmp_path: Path
) -> None:
    """Whose trainer draws from mean and deviation, and scales then."""
    wdsprep.export(encoded, tmp_path / "out", to="mds", tower="t5gemma2b-256-bf16")
    settings = json.loads((encoded / "wdsprep.json").read_bytes())["settings"]
    kept = latents_of(encoded)
    found = streamed(tmp_path / "out")
    assert {sample["key"] for sample in found} == kept.keys()
    for sample in found:
        ours = kept[sample["key"]]
        mean, deviation = np.split(sample["img_latent"].astype("f4"), 2)
        scaled = (mean - settings["shift"]) * settings["scale"]
        assert np.allclose(scaled, ours["latent.npy"], atol=2e-3)
        assert not deviation.any()
        emb = sample["latent_caption_t5gemma2b-256-bf16"]
        assert np.array_equal(emb, ours["emb.npy"])
        assert sample["caption"] == ours["txt"]


@SYSTEM
def test_streaming_reads_moments_and_embeddings_of_their_length(
    images: Path, streamed: Any, tmp_path: Path
) -> None:
    encode_here(images, tmp_path / "moments", latents="moments")
    wdsprep.export(tmp_path / "moments", tmp_path / "out", to="mds")
    kept = latents_of(tmp_path / "moments")
    for sample in streamed(tmp_path / "out"):
        mean, logvar = np.split(np.float32(kept[sample["key"]]["latent.npy"]), 2)
        wanted = np.concatenate([mean, np.exp(0.5 * logvar)])
        assert np.allclose(sample["img_latent"], wanted, rtol=1e-3)
    text = write_part(str(tmp_path / "text"), Images(sizes=(6,)), VARIED)
    wdsprep.export(text, tmp_path / "texts", to="mds", tower="t")
    for sample in streamed(tmp_path / "texts"):
        bits = array_of(sample["key"], VARIED[1])
        values = (bits.astype("<u4") << 16).view("<f4")
        assert np.array_equal(sample["latent_caption_t"], values)
        mask = sample["attention_mask_caption_t"]
        assert (mask.sum(), mask.shape) == (len(bits), (7,))


# --- datasets
@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def opened(*words: str, **options: str) -> Any:
        import datasets

        cache = str(tmp_path / "cache")
        return datasets.load_dataset(*words, split="train", cache_dir=cache, **options)

    return opened


@SYSTEM
def test_datasets_reads_images(images: Path, loaded: Any, tmp_path: Path) -> None:
    wdsprep.export(images, tmp_path / "out", to="parquet")
    kept = stored_images(images)
    found = loaded(str(tmp_path / "out"))
    assert sorted(found["key"]) == sorted(kept)
    for row in found:
        data, text, facts = kept[row["key"]]
        assert row["image"].tobytes() == pixels_of(data)
        assert (row["caption"], row["captions"]) == (text, facts.get("captions", [text]))
        assert json.loads(row["json"]) == facts


@SYSTEM
def test_datasets_reads_flux_moments_in_the_columns_of_mlperf(loaded: Any, tmp_path: Path) -> None:
    import torch

    fields = (field("latent", (32, 4, 4)), *FLUX[1:])
    source = latents(tmp_path / "latents", fields=fields, more={"latents": "moments"})
    wdsprep.export(source, tmp_path / "out", to="parquet")
    found = loaded(str(tmp_path / "out"))
    columns = ["__key__", "t5_encodings", "clip_encodings", "mean", "logvar"]
    assert found.column_names == columns
    assert len(found) == 15
    for row in found:
        tensors = [torch.from_numpy(np.load(io.BytesIO(row[c]))) for c in columns[1:]]
        t5, clip, mean, logvar = (tensor.view(torch.bfloat16) for tensor in tensors)
        stored = (torch.from_numpy(array_of(row["__key__"], item)) for item in fields)
        both, pooled, emb = (tensor.bfloat16() for tensor in stored)
        assert torch.equal(torch.cat([mean, logvar]), both)
        assert torch.equal(t5, emb)
        assert torch.equal(clip, pooled)


@SYSTEM
def test_datasets_reads_folders_of_images(images: Path, loaded: Any, tmp_path: Path) -> None:
    """As the training scripts of diffusers ask for them."""
    wdsprep.export(images, tmp_path / "out", to="imagefolder")
    found = loaded("imagefolder", data_dir=str(tmp_path / "out"))
    assert found.column_names == ["image", "text"]
    told = sorted((row["text"], row["image"].tobytes()) for row in found)
    kept = stored_images(images)
    assert told == sorted((one_line(text), pixels_of(data)) for data, text, _ in kept.values())
    for key, (data, text, _facts) in kept.items():
        (image,) = (tmp_path / "out").glob(f"*/{key}.jpg")
        assert image.read_bytes() == data
        assert image.with_suffix(".txt").read_text() == f"{one_line(text)}\n"


def one_line(text: str) -> str:
    return " ".join(text.split("\n")).strip()


# --- sd-scripts
@SYSTEM
@pytest.mark.parametrize(
    ("kind", "pipeline"),
    [("sd", "StableDiffusion"), ("sdxl", "StableDiffusionXL"), ("flux", "Flux")],
)
def test_sd_scripts_finds_latents_and_text_beside_images(
    kind: str, pipeline: str, images: Path, family: Callable[[str], Path], tmp_path: Path
) -> None:
    """In shapes that are its buckets, with mirror images."""
    how = {"model": str(family(pipeline)), "shapes": "nearest:16,2", "flip": True}
    encode_here(images, tmp_path / "latents", **how)
    done = wdsprep.export(tmp_path / "latents", tmp_path / "out", to="kohya", join=images)
    assert done.samples == COUNT
    stored, kept = latents_of(tmp_path / "latents"), stored_images(images)
    settings = json.loads((tmp_path / "latents/wdsprep.json").read_bytes())["settings"]
    found = list(cached_images(tmp_path / "out", kind, resolution=64, step=16))
    assert {one.key for one in found} == stored.keys()
    assert len({one.bucket for one in found}) > 1
    for one in found:
        ours, (data, _text, _facts) = stored[one.key], kept[one.key]
        assert (one.repeats, one.caption) == (1, one_line(ours["txt"]))
        scale, shift = (1, 0) if kind == "flux" else (settings["scale"], settings["shift"])
        for values, name in ((one.latents, "latent.npy"), (one.flipped, "latent_flipped.npy")):
            assert np.allclose((values - shift) * scale, ours[name], atol=1e-5)
        facts = ours["json"]
        assert one.original_size == [facts["original_width"], facts["original_height"]]
        assert one.crop_ltrb == facts["crop"]
        (image,) = (tmp_path / "out").glob(f"*/{one.key}.jpg")
        assert image.read_bytes() == data
        check_outputs(kind, one.outputs, ours)


def check_outputs(kind: str, outputs: Any, ours: dict[str, Any]) -> None:
    if kind == "sd":
        assert not outputs
    if kind == "sdxl":
        both = np.concatenate([outputs["hidden_state1"], outputs["hidden_state2"]], axis=1)
        assert np.array_equal(both, ours["emb.npy"])
        assert np.array_equal(outputs["pool2"], ours["pooled.npy"])
    if kind == "flux":
        values = (ours["emb.npy"].astype("<u4") << 16).view("<f4")
        assert np.array_equal(outputs["t5_out"], values)
        assert np.array_equal(outputs["l_pooled"], ours["pooled.npy"])
        assert outputs["txt_ids"].shape == (len(values), 3)
        assert outputs["t5_attn_mask"].all()
        assert not outputs["apply_t5_attn_mask"]


# --- webshart
def test_webshart_reads_images_where_they_are(images: Path, tmp_path: Path) -> None:
    webshart = pytest.importorskip("webshart", reason=f"webshart {MISSING}")
    wdsprep.export(images, tmp_path / "out", to="webshart")
    kept = stored_images(images)
    seen = 0
    for bucket in sorted(path.parent.name for path in (tmp_path / "out").glob("*/000000.json")):
        found = webshart.discover_dataset(
            source=str(images / bucket), metadata=str(tmp_path / "out" / bucket)
        )
        loader = webshart.TarDataLoader(found)
        for shard in range(found.num_shards):
            for number in range(found.get_shard_sample_count(shard)):
                entry = loader.load_sample(shard, number)
                data, text, facts = kept[entry.path.partition(".")[0]]
                assert (bytes(entry.data), entry.captions) == (data, text)
                assert (entry.width, entry.height) == (facts["width"], facts["height"])
                seen += 1
    assert seen == COUNT


# --- wids
WIDS = """
import hashlib, json, os, sys
os.environ["WIDS_CACHE"] = sys.argv[2]
os.makedirs(sys.argv[2])
import wids
found = wids.ShardListDataset(sys.argv[1] + "/wids-meta.json")
told = {}
for number in range(len(found)):
    one = found[number]
    array = one[".npy"] if ".npy" in one else one[".jpg"].convert("RGB")
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    info = one[".json"]
    told[one["__key__"]] = [digest, info["prompt"], info["width"], info["height"]]
print(json.dumps(told))
"""


@SYSTEM
@pytest.mark.parametrize("what", ["images", "latents"])
def test_wids_reads_what_sana_asks_for(
    what: str, images: Path, encoded: Path, tmp_path: Path
) -> None:
    wdsprep.export(images.parent / what, tmp_path / "out", to="wids")
    told = elsewhere("wids", WIDS, tmp_path / "out", tmp_path / "cache")
    if what == "images":
        wanted = {
            key: [digest(pixels_of(data)), text, facts["width"], facts["height"]]
            for key, (data, text, facts) in stored_images(images).items()
        }
    else:
        samples = latents_of(encoded).items()
        wanted = {k: [digest(s["latent.npy"].tobytes()), s["txt"], 64, 64] for k, s in samples}
    assert told == wanted


# --- Energon
ENERGON = """
import hashlib, json, sys
from megatron.energon import (
    Cooker, DefaultTaskEncoder, SampleDecoder, WorkerConfig, get_loader, get_train_dataset,
    stateless,
)

@stateless
def cook(sample):
    def digest(value):
        if hasattr(value, "view"):
            import torch
            assert value.dtype == torch.bfloat16, value.dtype
            value = value.view(torch.uint16).numpy().tobytes()
        data = value if isinstance(value, bytes) else str(value).encode()
        return hashlib.sha256(data).hexdigest()
    found = {k: digest(v) for k, v in sample.items() if not k.startswith("__")}
    return {**{k: v for k, v in sample.items() if k.startswith("__")}, "told": json.dumps(found)}

class Task(DefaultTaskEncoder):
    cookers = [Cooker(cook, has_subflavors=json.loads(sys.argv[3]))]
    decoder = SampleDecoder() if sys.argv[3] != "{}" else None
    def batch(self, samples):
        return [(sample["__key__"], json.loads(sample["told"])) for sample in samples]

found = get_train_dataset(
    sys.argv[1], batch_size=1, task_encoder=Task(), shuffle_buffer_size=None,
    max_samples_per_sequence=None, worker_config=WorkerConfig.default_worker_config(0),
)
told = {}
for number, batch in enumerate(get_loader(found)):
    told |= dict(batch)
    if number + 1 == int(sys.argv[2]):
        break
print(json.dumps(told))
"""


@SYSTEM
def test_energon_opens_a_dataset_where_it_is_without_its_prepare(
    images: Path, tmp_path: Path
) -> None:
    """With its metadata in the dataset, or elsewhere."""
    kept = stored_images(images)
    before = {path: path.read_bytes() for path in images.rglob("*.*") if path.is_file()}
    for out in ("", tmp_path / "meta"):
        done = wdsprep.export(images, out, to="energon")
        assert done.out == (absolute(out) if out else str(images))
        told = elsewhere("energon", ENERGON, done.out, str(COUNT), "{}")
        assert told.keys() == kept.keys()
        for key, members in told.items():
            data, text, _facts = kept[key]
            assert (members["jpg"], members["txt"]) == (digest(data), digest(text.encode()))
    assert all(path.read_bytes() == data for path, data in before.items())
    assert not wdsprep.verify(images).findings


@SYSTEM
@pytest.mark.parametrize("kind", ["sample", "moments"])
def test_energon_gives_primus_its_tensors(kind: str, tmp_path: Path) -> None:
    import torch

    source = latents(tmp_path / "latents", more={"latents": kind})
    wdsprep.export(source, tmp_path / "out", to="primus")
    wanted = json.dumps({"encoding": "preencoded"})
    told = elsewhere("energon", ENERGON, tmp_path / "out", "15", wanted)
    assert len(told) == 15
    for key, members in told.items():
        arrays = (torch.from_numpy(array_of(key, item)).bfloat16() for item in FLUX)
        latent, pooled, emb = (a.view(torch.uint16).numpy().tobytes() for a in arrays)
        half = len(latent) // 2
        images = {"latents.pth": latent}
        if kind == "moments":
            images = {"mean.pth": latent[:half], "logvar.pth": latent[half:]}
        texts = {"prompt_embeds.pth": emb, "pooled_prompt_embeds.pth": pooled}
        said = {"caption.txt": caption(key, "").encode()}
        assert members == {n: digest(data) for n, data in {**images, **texts, **said}.items()}
