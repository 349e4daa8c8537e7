"""Encode: each image shard becomes a latent shard, the same whoever does it and however often."""

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cosine_similarity

import wdsprep
from tests.kit import corpus
from tests.kit.damaged import findings
from tests.kit.encodes import (
    CAPTIONS,
    COUNT,
    LONG,
    Means,
    encode_here,
    in_this_process,
    latents_of,
    members,
    packed,
    pictures,
    rejected,
    run_encode,
    stacked,
)
from tests.kit.packs import (
    decoded,
    jpeg,
    manifest_of,
    samples_of,
    tar_bytes,
    temporaries,
    tree,
    write_files,
)
from wdsprep.arrays import fields_of
from wdsprep.cli import cli, main
from wdsprep.dataset import read_receipt, write_rebuilt
from wdsprep.encoder import Encoded
from wdsprep.encoding import Listener
from wdsprep.engine import Engine, EngineError, Result
from wdsprep.errors import FingerprintError, FormatError, SourceError, UsageError
from wdsprep.image_shards import ImageShard, find_image_shards
from wdsprep.index import index as index_tars
from wdsprep.latent_shard import LatentShard
from wdsprep.latent_worker import LatentsWorker
from wdsprep.latents import Workshop
from wdsprep.models import TINY
from wdsprep.noise import noise_keys, normal
from wdsprep.pixels import crop
from wdsprep.report import write_report
from wdsprep.runners import BrokenWorkerError
from wdsprep.samples import Code, RejectedError
from wdsprep.store import open_store
from wdsprep.tar.index import decode_index
from wdsprep.tar.read import file_tape, index_tar

SCALE = 0.18215
SHARDS = 14


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """7 shards of bucket 64 with 4 pictures each, 7 of 128 with 2. Tests leave it as it is."""
    root = tmp_path_factory.mktemp("packed")
    return packed(pictures(root / "downloads"), root / "images")


@pytest.fixture(scope="session")
def latents(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of it at 64, undisturbed. Tests leave it as it is."""
    out = tmp_path_factory.mktemp("encoded") / "latents"
    encode_here(images, out)
    return out


@pytest.fixture
def own(images: Path, tmp_path: Path) -> Path:
    """A copy of the images, to damage."""
    shutil.copytree(images.parent, tmp_path / "own")
    return tmp_path / "own/images"


def image_samples(root: Path, *, bucket: int = 64) -> dict[str, dict[str, bytes]]:
    shards = [shard for shard in manifest_of(root).shards if shard.bucket >= bucket]
    return {key: s for shard in shards for key, s in members(root / shard.name).items()}


def check_latents(images: Path, root: Path, *, bucket: int = 64) -> None:
    """What holds for every latent dataset made of all that `images` has for a phase."""
    manifest = manifest_of(root)
    assert manifest.complete
    lost = rejected(root)
    expected = [shard for shard in manifest_of(images).shards if shard.bucket >= bucket]
    for shard in manifest.shards:
        path = root / shard.name
        data = path.read_bytes()
        assert (shard.nbytes, shard.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        with file_tape(path) as tape:
            assert index_tar(tape, shard.name) == Path(f"{path}.idx").read_bytes()
    for shard in expected:
        keys = [key for key in members(images / shard.name) if key not in lost]
        assert list(members(root / shard.name)) == keys
    units = [shard.name.removesuffix(".tar") for shard in expected]
    names = {f"{kind}/{unit}.json{end}" for unit in units
             for kind, end in (("receipts", ""), ("rejects", "l"))}  # fmt: skip
    names |= {shard.name + end for shard in manifest.shards for end in ("", ".idx")}
    names |= {f"empty.{line['name']}" for line in manifest.settings["layout"][1:]}
    assert set(tree(root)) == names | {"wdsprep.json"}


# --- the numbers are those of diffusers and transformers


def pixels_of(images: Path) -> Tensor:
    samples = sorted(image_samples(images).items())
    return torch.stack([crop(sample["jpg"], 64).pixels for _, sample in samples])


@pytest.fixture(scope="session")
def posterior(images: Path) -> Any:
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(TINY / "vae", low_cpu_mem_usage=False)
    with torch.no_grad():
        return vae.encode(pixels_of(images).float() / 127.5 - 1).latent_dist


@pytest.fixture(scope="session")
def states(images: Path) -> Tensor:
    from transformers import CLIPTextModel, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(TINY / "tokenizer")
    text = CLIPTextModel.from_pretrained(TINY / "text_encoder", dtype=torch.float32)
    captions = [sample["txt"].decode() for _, sample in sorted(image_samples(images).items())]
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    with torch.no_grad():
        made: Tensor = text(tokenizer(captions, max_length=77, **options).input_ids)[0]
    return made


def assert_stored(found: Tensor, expected: Tensor) -> None:
    """The same but for the rounding to fp16."""
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-4)
    close = cosine_similarity(found.float().flatten(1), expected.flatten(1))
    assert close.min() >= 0.9999


def test_means_and_embeddings_are_those_of_a_plain_loop(
    images: Path, tmp_path: Path, posterior: Any, states: Tensor
) -> None:
    encode_here(images, tmp_path / "out", latents="mean")
    assert_stored(stacked(tmp_path / "out", "latent.npy"), posterior.mode() * SCALE)
    assert_stored(stacked(tmp_path / "out", "emb.npy"), states)


def test_moments_rebuild_the_distribution(images: Path, tmp_path: Path, posterior: Any) -> None:
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    encode_here(images, tmp_path / "out", latents="moments", text="none")
    rebuilt = DiagonalGaussianDistribution(stacked(tmp_path / "out", "latent.npy").float())
    torch.testing.assert_close(rebuilt.mean, posterior.mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rebuilt.std, posterior.std, rtol=3e-3, atol=1e-5)
    assert sorted(next(iter(latents_of(tmp_path / "out").values()))) == [
        "json", "latent.npy", "txt",
    ]  # fmt: skip
    assert not (tmp_path / "out/empty.emb.npy").exists()


@pytest.mark.parametrize("seed", [0, 7])
def test_a_sample_is_the_mean_and_the_noise_of_its_key(
    images: Path, latents: Path, tmp_path: Path, posterior: Any, seed: int
) -> None:
    out = latents
    if seed:
        out = tmp_path / "out"
        encode_here(images, out, seed=seed)
    noise = normal(noise_keys(seed, sorted(latents_of(out))), tuple(posterior.mean.shape[1:]))
    drawn = (posterior.mean + posterior.std * noise) * SCALE
    assert_stored(stacked(out, "latent.npy"), drawn)


# --- the same bytes, whoever does it


@pytest.mark.parametrize("workers", [1, 3])
def test_bytes_do_not_depend_on_the_workers(
    images: Path, latents: Path, tmp_path: Path, workers: int
) -> None:
    done = run_encode(images, tmp_path / "out", "--workers", str(workers))
    assert done.returncode == 0, done.stderr
    assert "42 images encoded" in done.stdout
    assert tree(tmp_path / "out") == tree(latents)


def test_bytes_are_the_same_on_ray(images: Path, latents: Path, tmp_path: Path) -> None:
    done = run_encode(images, tmp_path / "out", "--runner", "ray", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "out") == tree(latents)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_other_batch_sizes_change_next_to_nothing(
    images: Path, latents: Path, tmp_path: Path, batch_size: int
) -> None:
    encode_here(images, tmp_path / "out", batch_size=batch_size)
    ours, theirs = latents_of(tmp_path / "out"), latents_of(latents)
    assert list(ours) == list(theirs)
    for key, sample in ours.items():
        assert (sample["json"], sample["txt"]) == (theirs[key]["json"], theirs[key]["txt"])
    for name in ("latent.npy", "emb.npy"):
        difference = stacked(tmp_path / "out", name).float() - stacked(latents, name).float()
        assert difference.abs().max() < 1e-3


# --- what is in a latent dataset


def test_every_image_sample_is_there_under_its_key_and_in_its_place(
    images: Path, latents: Path
) -> None:
    check_latents(images, latents)
    assert len(latents_of(latents)) == COUNT
    assert not rejected(latents)


def test_plain_webdataset_decodes_it(latents: Path) -> None:
    import gc
    import warnings

    import webdataset as wds

    urls = [str(latents / shard.name) for shard in manifest_of(latents).shards]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files open
        found = list(wds.WebDataset(urls, shardshuffle=False).decode())
        gc.collect()
    assert len(found) == COUNT
    for sample in found:
        assert (sample["latent.npy"].shape, sample["latent.npy"].dtype) == ((4, 8, 8), "float16")
        assert sample["emb.npy"].shape[0] == 77
        assert sample["json"]["caption"] == sample["txt"]
        assert sample["json"]["key"] == sample["__key__"]


def test_the_layout_finds_every_array_by_one_positioned_read(latents: Path) -> None:
    manifest = manifest_of(latents)
    record = manifest.settings["layout"]
    fields = fields_of(record)
    assert [field.name for field in fields] == ["latent.npy", "emb.npy"]
    known = latents_of(latents)
    for shard in manifest.shards:
        data = (latents / shard.name).read_bytes()
        starts = decode_index((latents / f"{shard.name}.idx").read_bytes(), "idx")
        for key, start in zip(members(latents / shard.name), starts[:-1], strict=True):
            for field, line in zip(fields, record, strict=True):
                begin = start + line["offset"]
                expected = known[key][field.name]
                assert (expected.dtype.str, expected.shape) == (field.dtype, field.shape)
                assert data[begin : begin + field.array_nbytes] == expected.tobytes()


def test_the_json_says_how_the_array_came_about(images: Path, latents: Path) -> None:
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(TINY / "tokenizer")
    crops = {  # width, height: scaled, crop
        (64, 80): ((64, 80), [0, 8, 64, 72]),
        (100, 90): ((71, 64), [3, 0, 67, 64]),
        (200, 136): ((94, 64), [15, 0, 79, 64]),
    }
    originals = image_samples(images)
    for key, sample in latents_of(latents).items():
        of_image, facts = json.loads(originals[key]["json"]), sample["json"]
        scaled, box = crops[of_image["width"], of_image["height"]]
        count = len(tokenizer(of_image["caption"]).input_ids)
        assert facts == {
            "caption": of_image["caption"], "crop": box, "cut": count > 77, "key": key,
            "height": of_image["height"], "width": of_image["width"],
            "scaled_height": scaled[1], "scaled_width": scaled[0], "source": of_image["source"],
            "source_height": of_image["source_height"], "source_width": of_image["source_width"],
            "tokens": count,
        }  # fmt: skip
        assert sample["txt"] == of_image["caption"]


def test_the_size_before_pack_shrank_an_image_is_kept(tmp_path: Path) -> None:
    write_files(tmp_path / "in", {"a.png": jpeg(1, (300, 200), "PNG")})
    packed(tmp_path / "in", tmp_path / "images", "--reencode", "jpg:90", "--max-side", "150")
    encode_here(tmp_path / "images", tmp_path / "out")
    ((_, sample),) = latents_of(tmp_path / "out").items()
    names = ("source", "source_width", "source_height", "width", "height")
    assert [sample["json"][name] for name in names] == ["a.png", 300, 200, 150, 100]


def test_long_captions_are_cut_and_counted_and_empty_ones_are_the_empty_text(
    latents: Path,
) -> None:
    samples = latents_of(latents).values()
    long = sum(CAPTIONS[n % 5] == LONG for n in range(COUNT))
    empty = sum(CAPTIONS[n % 5] == "" for n in range(COUNT))
    assert sum(sample["json"]["cut"] for sample in samples) == long
    assert manifest_of(latents).counts == {"cut": long, "empty_caption": empty}
    of_nothing = np.load(latents / "empty.emb.npy")
    found = [sample["emb.npy"] for sample in samples if not sample["txt"]]
    assert len(found) == empty
    for emb in found:
        np.testing.assert_allclose(emb, of_nothing, rtol=1e-3, atol=1e-3)


def test_a_higher_resolution_takes_the_larger_images_alone(images: Path, tmp_path: Path) -> None:
    encode_here(images, tmp_path / "out", resolution=128)
    check_latents(images, tmp_path / "out", bucket=128)
    assert {shard.bucket for shard in manifest_of(tmp_path / "out").shards} == {128}
    assert stacked(tmp_path / "out", "latent.npy").shape == (14, 4, 16, 16)


def test_tokens_can_be_kept_in_place_of_embeddings(images: Path, tmp_path: Path) -> None:
    from transformers import CLIPTokenizer

    encode_here(images, tmp_path / "out", text="tokens")
    check_latents(images, tmp_path / "out")
    tokenizer = CLIPTokenizer.from_pretrained(TINY / "tokenizer")
    options = {"padding": "max_length", "truncation": True, "max_length": 77}
    for sample in latents_of(tmp_path / "out").values():
        assert sample["tokens.npy"].tolist() == tokenizer(sample["txt"], **options).input_ids


# --- what cannot be


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """The exit code and the one line of a command that made nothing."""
    with in_this_process():
        code = main(["encode", *map(str, words)])
    told = capsys.readouterr()
    assert not told.out
    (line,) = told.err.splitlines()
    assert line.startswith("wdsprep: ")
    return code, line


LOCAL = ("--runner", "local", "--device", "cpu")
TOY = (*LOCAL, "--model", "tiny")


@pytest.mark.parametrize(
    ("resolution", "code", "words"),
    [("256", 2, "has the buckets 64, 128"), ("100", 2, "no multiple of 8"), ("4", 2, "4")],
)
def test_a_resolution_that_cannot_be_is_refused(
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    resolution: str,
    code: int,
    words: str,
) -> None:
    out = tmp_path / "out"
    found, line = refused(capsys, images, out, "--resolution", resolution, *TOY)
    assert (found, words in line) == (code, True), line
    assert not out.exists()


def test_images_that_are_none_are_refused(
    images: Path, latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = tmp_path / "out", ("--resolution", "64", *TOY)
    code, line = refused(capsys, tmp_path / "nowhere", out, *options)
    assert (code, "nowhere" in line, "wdsprep pack" in line) == (1, True, True), line
    code, line = refused(capsys, images.parent / "downloads", out, *options)
    assert (code, f'run "wdsprep pack {images.parent}/downloads" first' in line) == (1, True), line
    code, line = refused(capsys, latents, out, *options)
    assert (code, "is a dataset of latents" in line) == (2, True), line
    before = tree(images)
    code, line = refused(capsys, images, images / "latents", *options)
    assert (code, "lies in the source" in line) == (2, True), line
    code, line = refused(capsys, images, images, *options)
    assert code == 2
    assert tree(images) == before
    assert not (images / "latents").exists()
    assert not out.exists()


def test_a_model_that_cannot_be_had_is_named_before_anything_begins(
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    options = ("--resolution", "64", *LOCAL)
    code, line = refused(capsys, images, tmp_path / "out", *options, "--model", "some/model")
    assert code == 1
    assert "some/model" in line
    assert "hf download some/model" in line
    code, line = refused(capsys, images, tmp_path / "out", *options, "--model", "./no-folder")
    assert code == 2
    assert not (tmp_path / "out").exists()


# --- tars that something else packed


def rotated() -> bytes:
    """160 x 190 as it is seen, 190 x 160 as it is stored."""
    out = io.BytesIO()
    image = Image.effect_noise((190, 160), 60).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(out, "JPEG", exif=exif)
    return out.getvalue()


def foreign(root: Path) -> Path:
    """Two tars: one with all that can be wrong with a sample, one that ends too soon."""
    good = tar_bytes(
        [
            ("one.jpg", jpeg(1, (80, 70))), ("one.txt", b"first"),
            ("turned.jpg", rotated()), ("turned.json", b'{"caption": "seen upright", "n": 1}'),
            ("small.jpg", jpeg(2, (40, 90))), ("small.txt", b"too small"),
            ("up/../../out.jpg", jpeg(3, (80, 70))), ("up/../../out.txt", b"leaves"),
            ("bad.jpg", jpeg(4, (80, 70))[:900]), ("bad.txt", b"damaged"),
            ("text.txt", b"no image"),
            ("deep/er.png", jpeg(5, (64, 64), "PNG")),
        ]
    )  # fmt: skip
    cut = tar_bytes([(f"{n}.jpg", jpeg(n, (70, 70))) for n in range(4)])
    return write_files(root, {"a/b.tar": good, "c.tar": cut[: len(cut) * 6 // 10]})


def test_tars_of_others_are_encoded_and_what_is_bad_is_told(tmp_path: Path) -> None:
    source = foreign(tmp_path / "in")
    encode_here(source, tmp_path / "out")
    manifest = manifest_of(tmp_path / "out")
    assert manifest.complete
    assert [shard.name for shard in manifest.shards] == ["64/a/b.tar", "64/c.tar"]
    found = latents_of(tmp_path / "out")
    assert list(members(tmp_path / "out/64/a/b.tar")) == ["one", "turned", "deep/er"]
    assert found["turned"]["txt"] == found["turned"]["json"]["caption"] == "seen upright"
    facts = found["turned"]["json"]
    assert (facts["width"], facts["height"], facts["source_width"]) == (160, 190, 160)
    assert found["deep/er"]["txt"] == ""
    lost = rejected(tmp_path / "out")
    assert lost == {
        "small": "too_small", "bad": "truncated", "text": "no_image", "2": "tar_truncated",
        "up/../../out": "bad_key",
    }  # fmt: skip
    assert list(members(tmp_path / "out/64/c.tar")) == ["0", "1"]
    assert sum(receipt.inputs for receipt in manifest.receipts) == len(found) + len(lost)
    assert set(tree(tmp_path)) >= {"out/rejects/64/a/b.jsonl", "out/receipts/64/a/b.json"}


def test_keys_of_foreign_tars_are_those_that_webdataset_gives_them(tmp_path: Path) -> None:
    """By `tar -C dir .`, of folders with dots, linked: pack and encode lose none of them."""
    names = ("f0", "d/sub.dir/a0", "v1.5/x/b", "..c/d")
    files = {f"{name}.jpg": jpeg(n, (70, 70)) for n, name in enumerate(names)}
    folder = write_files(tmp_path / "of", dict(files) | {f"{name}.txt": name for name in names})
    (tmp_path / "in").mkdir()
    tar = ["tar", "--sort=name", "-cf", tmp_path / "in/x.tar", "-C", folder, "."]
    subprocess.run(tar, check=True)
    encode_here(tmp_path / "in", tmp_path / "out")
    assert not manifest_of(tmp_path / "out").rejects
    theirs, ours = (
        {sample["__key__"]: sample["txt"] for sample in decoded(tmp_path / name)}
        for name in ("in/x.tar", "out/64/x.tar")
    )
    assert ours == theirs == {f"./{name}": name for name in names}
    (batch,) = wdsprep.load(str(tmp_path / "out"), global_batch=4)
    assert set(batch["key"]) == set(theirs)
    assert not findings(tmp_path / "out")
    index_tars(str(tmp_path / "in"))
    raw = wdsprep.load(str(tmp_path / "in"), global_batch=4, raw=True)
    assert {sample["__key__"] for sample in raw} == set(theirs)
    images = packed(tmp_path / "in", tmp_path / "images")
    packed_keys = {sample["json"]["source"] for sample in samples_of(images)}
    assert packed_keys == {f"x.tar/{key}" for key in theirs}


def test_gzipped_tars_are_encoded_as_they_are(tmp_path: Path) -> None:
    data = tar_bytes([("a.jpg", jpeg(1, (70, 70))), ("a.txt", b"x"), ("a.cls", b"1")])
    write_files(tmp_path / "in", {"0.tar": data, "d/1.tar.gz": gzip.compress(data)})
    encode_here(tmp_path / "in", tmp_path / "out")
    manifest = manifest_of(tmp_path / "out")
    assert [shard.name for shard in manifest.shards] == ["64/0.tar", "64/d/1.tar"]
    assert manifest.counts["left_out:.cls"] == 2
    one, other = (members(tmp_path / "out" / shard.name)["a"] for shard in manifest.shards)
    assert one["latent.npy"] == other["latent.npy"]
    write_files(tmp_path / "in", {"d/1.tgz": b""})
    with pytest.raises(SourceError, match=r"d/1.tar.gz and d/1.tgz would both become 64/d/1.tar"):
        encode_here(tmp_path / "in", tmp_path / "other")


@pytest.mark.parametrize("whole", [0, 2])
def test_an_encode_that_loses_a_part_of_a_tar_or_makes_nothing_exits_with_3(
    whole: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tar_bytes((f"{n}.jpg", jpeg(n, (70, 70))) for n in range(whole + 1))
    write_files(tmp_path / "in", {"0.tar": data[: data.rindex(b"%d.jpg" % whole) + 600]})
    assert command(tmp_path / "in", tmp_path / "out") == 3
    said = capsys.readouterr().out
    assert "1 tar cannot be read to the end" in said
    assert ("nothing could be encoded" in said) is (not whole)
    assert manifest_of(tmp_path / "out").samples == whole
    small = write_files(tmp_path / "small", {"0.tar": tar_bytes([("a.jpg", jpeg(1, (9, 9)))])})
    assert command(small, tmp_path / "none") == 3
    assert "nothing could be encoded" in capsys.readouterr().out


def test_a_model_without_finite_numbers_says_what_to_do_and_exits_with_3(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = other_weights(tmp_path, times=float("nan"))
    assert command(images, tmp_path / "out", "--model", str(broken), "--limit", "4") == 3
    said = capsys.readouterr().out
    assert set(rejected(tmp_path / "out").values()) == {"not_finite"}
    assert f"{broken} gives no finite numbers for any image, in fp32" in said
    assert "or choose another --model" in said
    assert "may be faster" not in said


def test_the_users_own_limit_of_area_counts_not_the_datasets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two pictures of 121 megapixels, in a dataset that says it may have any."""
    bomb = corpus.png_bomb(11_000)
    files: dict[str, bytes | str] = {"a.png": bomb, "b.jpg": jpeg(1, (70, 70)), "c.png": bomb}
    write_files(tmp_path / "in", files)
    images = packed(tmp_path / "in", tmp_path / "images", "--max-area", "9" * 12, "--check=header")
    assert manifest_of(images).samples == 3
    assert command(images, tmp_path / "out") == 0
    assert "was packed with --max-area 999999999999" in capsys.readouterr().err
    assert rejected(tmp_path / "out") == {"000000000000": "too_large", "000000000002": "too_large"}
    assert "max_area" not in manifest_of(tmp_path / "out").settings
    assert command(images, tmp_path / "less", "--max-area", "4899") == 3
    assert manifest_of(tmp_path / "less").settings["max_area"] == 4899

    how = wdsprep.Encode(resolution=64, model="tiny", device="cpu")
    for options in ({"encode": how}, {"pixels": 64}):
        (batch,) = wdsprep.load(str(images), global_batch=3, **options)  # type: ignore[arg-type]
        assert batch["key"] == ["000000000001"] * 3
    with pytest.raises(FormatError, match="16 samples in a row"):
        next(iter(wdsprep.load(str(images), global_batch=3, pixels=64, max_area=4899)))
    with pytest.raises(UsageError, match="Encode"):
        wdsprep.load(str(images), global_batch=3, encode=how, max_area=4899)
    write_report([str(images)], str(tmp_path / "report.html"), max_area=10_000)
    page = (tmp_path / "report.html").read_text()
    assert page.count("too_large 11000 x 11000") == 2


def test_a_strangers_dataset_brings_no_number_that_json_cannot_hold(tmp_path: Path) -> None:
    """Nor does it lose a shard by facts that are missing."""
    images = packed(pictures(tmp_path / "in", [0]), tmp_path / "images")
    (shard,) = manifest_of(images).shards
    rows = [
        (
            f"{key}.{name}",
            data.replace(b'"source_height":80', b'"source_height":' + b"8" * 400 + b".0"),
        )
        for key, fields in members(images / shard.name).items()
        for name, data in fields.items()
    ]
    receipt = read_receipt(open_store(str(images)), "000000")
    data = tar_bytes(rows)
    (images / shard.name).write_bytes(data)
    shard = shard._replace(nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    altered = replace(receipt, shards=(shard,)).to_bytes()
    (images / "receipts/000000.json").write_bytes(altered)
    write_rebuilt(str(images))
    assert not encode_here(images, tmp_path / "out").quarantined
    (sample,) = members(tmp_path / "out" / shard.name).values()
    assert json.loads(sample["json"], parse_constant=pytest.fail)["source_height"] == 80


def test_tars_can_be_named_by_a_pattern_and_come_from_webdataset(tmp_path: Path) -> None:
    import webdataset as wds

    (tmp_path / "in").mkdir()
    with wds.ShardWriter(str(tmp_path / "in/part-%02d.tar"), maxcount=3, verbose=0) as sink:
        for number in range(7):
            sample = {"__key__": f"{number:03d}", "jpg": jpeg(number, (70, 70)), "txt": "x"}
            sink.write(sample)
    encode_here(f"{tmp_path}/in/part-{{00..01}}.tar", tmp_path / "out")
    assert list(latents_of(tmp_path / "out")) == [f"{n:03d}" for n in range(6)]
    assert [s.name for s in manifest_of(tmp_path / "out").shards] == [
        "64/part-00.tar", "64/part-01.tar",
    ]  # fmt: skip


def test_a_tar_may_lie_beside_its_latents(tmp_path: Path) -> None:
    """Where no wildcard would take those for a part of the source."""
    tars = {f"{key}.tar": tar_bytes([(f"{key}.jpg", jpeg(1, (80, 70)))]) for key in "xy"}
    write_files(tmp_path, tars)
    encode_here(tmp_path / "x.tar", tmp_path / "lat")
    encode_here(tmp_path / "{x,y}.tar", tmp_path / "both")
    assert [len(latents_of(tmp_path / name)) for name in ("lat", "both")] == [1, 2]
    for source, out in ((tmp_path / "*.tar", tmp_path / "lat2"), (tmp_path / "x.tar", tmp_path)):
        with pytest.raises(UsageError, match="lies in the"):
            encode_here(source, out)


def test_a_tar_whose_name_is_no_utf8_is_named(tmp_path: Path) -> None:
    tar = tar_bytes([("a.jpg", jpeg(1, (80, 70)))])
    write_files(tmp_path / "in", {os.fsdecode(b"caf\xe9.tar"): tar})
    with pytest.raises(SourceError, match="caf\ufffd\\.tar: the name of this tar is not"):
        encode_here(tmp_path / "in", tmp_path / "out")


def test_the_time_left_is_told_once_a_foreign_tar_is_done(tmp_path: Path) -> None:
    """Until then nobody knows how much is in one."""
    tar = tar_bytes((f"{n}.jpg", jpeg(n, (80, 70))) for n in range(3))
    write_files(tmp_path / "in", {"x.tar": tar, "y.tar": tar})
    seen: list[str] = []
    listener = Listener(status=lambda status: seen.extend(status().remarks(60)))
    encode_here(tmp_path / "in", tmp_path / "out", listener=listener)
    assert set(seen) == {"1 min 00 s left"}


def test_a_limit_counts_the_samples_of_foreign_tars(tmp_path: Path) -> None:
    tars = {f"{c}.tar": [(f"{c}{n}.jpg", jpeg(n, (70, 70))) for n in range(3)] for c in "ab"}
    write_files(tmp_path / "in", {name: tar_bytes(files) for name, files in tars.items()})
    encode_here(tmp_path / "in", tmp_path / "out", limit=4)
    assert list(latents_of(tmp_path / "out")) == ["a0", "a1", "a2", "b0"]
    encode_here(tmp_path / "in", tmp_path / "out")
    encode_here(tmp_path / "in", tmp_path / "at once")
    assert tree(tmp_path / "out") == tree(tmp_path / "at once")


# --- damage


def command(images: Path, out: Path, *more: str) -> int:
    with in_this_process():
        return main(["encode", str(images), str(out), "--resolution", "64", *TOY, *more])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3000] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9000])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "is not what was packed"),
        (cut_short, "is truncated (expected"),
        (Path.unlink, "is not there"),
    ],
)
def test_a_damaged_shard_is_left_out_and_done_once_it_is_packed_anew(
    own: Path,
    latents: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    words: str,
) -> None:
    out, shard = tmp_path / "out", "64/000001.tar"
    damage(own / shard)
    assert command(own, out) == 3
    told = capsys.readouterr().out
    assert f"shard {shard.removesuffix('.tar')} is left out: {shard} {words}" in told
    assert f'run "wdsprep repair {own}", then "wdsprep pack" again' in told
    assert "run the same command again" in told
    assert "next:" not in told
    assert not manifest_of(out).complete
    assert set(tree(latents)) - set(tree(out)) == {
        shard, f"{shard}.idx", f"receipts/{shard[:-4]}.json", f"rejects/{shard[:-4]}.jsonl",
    }  # fmt: skip
    assert not temporaries(out)

    (own / "receipts/000001.json").unlink()
    packed(own.parent / "downloads", own)
    assert command(own, out) == 0
    assert f"after {SHARDS - 1} shards encoded before" in capsys.readouterr().out
    assert tree(out) == tree(latents)


def test_a_bad_image_that_pack_did_not_decode_is_a_reject(tmp_path: Path) -> None:
    source = pictures(tmp_path / "in", range(6))
    path = source / "photo-0003.jpg"
    path.write_bytes(path.read_bytes()[:-2000])
    packed(source, tmp_path / "images", "--check", "header")
    done = encode_here(tmp_path / "images", tmp_path / "out")
    check_latents(tmp_path / "images", tmp_path / "out")
    (key,) = image_samples(tmp_path / "images").keys() - latents_of(tmp_path / "out").keys()
    assert rejected(tmp_path / "out") == {key: "truncated"}
    assert (done.samples, done.manifest.rejects) == (5, {"truncated": 1})


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    images = packed(pictures(tmp_path / "in", range(3)), tmp_path / "of [2024] {a,b}")
    encode_here(images, tmp_path / "out")
    check_latents(images, tmp_path / "out")


# --- going on


def test_a_second_run_has_nothing_to_do_and_changes_no_byte(
    images: Path, latents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(latents)
    assert command(images, latents) == 0
    assert f"nothing left to do: {SHARDS} shards encoded before" in capsys.readouterr().out
    assert tree(latents) == before


def other_weights(folder: Path, *, times: float = 1.5) -> Path:
    from safetensors.torch import load_file, save_file

    made = Path(shutil.copytree(TINY, folder / "model"))
    path = made / "vae/diffusion_pytorch_model.safetensors"
    save_file({k: v * times for k, v in load_file(path).items()}, path, metadata={"format": "pt"})
    return made


def test_other_settings_never_mix_with_what_is_there(
    images: Path, latents: Path, tmp_path: Path
) -> None:
    before = tree(latents)
    with pytest.raises(FingerprintError, match="seed: 0 -> 1"):
        encode_here(images, latents, seed=1)
    with pytest.raises(FingerprintError, match="text: emb -> tokens"):
        encode_here(images, latents, text="tokens")
    with pytest.raises(FingerprintError, match=r"weights: [0-9a-f]{64} -> [0-9a-f]{64}"):
        encode_here(images, latents, model=str(other_weights(tmp_path)))
    with pytest.raises(FingerprintError, match="resolution: 64 -> 128"):
        encode_here(images, latents, resolution=128)
    assert tree(latents) == before


def test_the_same_weights_in_another_place_are_the_same_model(
    images: Path, latents: Path, tmp_path: Path
) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    shutil.copytree(latents, tmp_path / "out")
    done = encode_here(images, tmp_path / "out", model=str(tmp_path / "model"))
    assert (done.samples, done.units_before) == (0, SHARDS)


def test_overwrite_starts_over_and_clears_latents_alone(
    own: Path, latents: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(latents, out)
    (out / "notes.txt").write_text("mine")
    encode_here(own, out, seed=3, overwrite=True)
    assert set(tree(out)) == {*tree(latents), "notes.txt", "edition"}
    assert manifest_of(out).settings["seed"] == 3
    assert (out / "notes.txt").read_text() == "mine"
    others = tmp_path / "others"
    shutil.copytree(own, others)
    before = tree(others)
    with pytest.raises(UsageError, match="is a dataset of images"):
        encode_here(own, others, overwrite=True)
    assert tree(others) == before


@pytest.mark.parametrize("limit", [4, 6])
def test_a_limited_run_can_be_completed_to_the_same_bytes(
    images: Path, latents: Path, tmp_path: Path, limit: int
) -> None:
    out = tmp_path / "out"
    encode_here(images, out, limit=limit)
    assert list(latents_of(out)) == list(latents_of(latents))[:limit]
    assert not manifest_of(out).complete
    encode_here(images, out)
    assert tree(out) == tree(latents)


def test_a_limit_may_grow(images: Path, tmp_path: Path) -> None:
    encode_here(images, tmp_path / "out", limit=2)
    encode_here(images, tmp_path / "out", limit=8)
    assert len(latents_of(tmp_path / "out")) == 8


def test_appended_images_are_encoded_by_the_next_run(tmp_path: Path) -> None:
    source, images, out = tmp_path / "in", tmp_path / "images", tmp_path / "out"
    packed(pictures(source, range(9)), images)
    encode_here(images, out)
    packed(pictures(source, range(9, 15)), images, "--append")
    done = encode_here(images, out)
    assert (done.samples, len(latents_of(out))) == (6, 15)
    check_latents(images, out)


def test_latents_are_complete_only_when_their_images_are(own: Path, tmp_path: Path) -> None:
    images, out = tmp_path / "images", tmp_path / "out"
    packed(own.parent / "downloads", images, "--limit", "12")
    encode_here(images, out)
    assert len(latents_of(out)) == 12
    assert not manifest_of(out).complete


def test_images_packed_anew_with_other_bytes_are_told(own: Path, tmp_path: Path) -> None:
    encode_here(own, tmp_path / "out")
    write_files(own.parent / "downloads", {"photo-0000.txt": "another caption"})
    (own / "receipts/000000.json").unlink()
    packed(own.parent / "downloads", own, "--overwrite")
    with pytest.raises(FingerprintError, match=r"1 image shard of then changed .*64/000000"):
        encode_here(own, tmp_path / "out")


# --- the engine, with a stand-in for the models


def engine(encoder: Any, *, batch_size: int = 4, threads: int = 1) -> Engine:
    return Engine(
        encoder, seed=0, batch_size=batch_size, max_area=10**8, decoders=2, threads=threads
    )


def grey(level: int) -> bytes:
    out = io.BytesIO()
    Image.new("L", (16, 16), level).save(out, "PNG")
    return out.getvalue()


def fed(made: Engine, levels: Iterable[int]) -> "dict[int, Future[Result]]":
    with made.feeding(), made.turn():
        return {level: made.put(str(level), grey(level), "x" * level) for level in levels}


def level_of(found: "Future[Result]") -> tuple[float, float]:
    latent, emb = found.result(60).arrays
    return latent.item(), emb.item()


class Cramped(Means):
    """Has memory for two images."""

    def encode(self, pixels: Tensor, *rest: Any, **options: Any) -> Encoded:
        found = super().encode(pixels, *rest, **options)
        if len(pixels) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found


class Overflowing(Means):
    """Images over 100 overflow, those over 200 in fp32 too."""

    def encode(self, pixels: Tensor, *rest: Any, exact: bool = False) -> Encoded:
        found = super().encode(pixels, *rest)
        most = 200 if exact else 100
        return Encoded(arrays=found.arrays, ok=found.arrays["latent.npy"].flatten() <= most)


class CrampedLater(Overflowing):
    """The same, and from its second batch on there is memory for two images."""

    def encode(self, pixels: Tensor, *rest: Any, exact: bool = False) -> Encoded:
        found = super().encode(pixels, *rest, exact=exact)
        if len(pixels) > 2 and len(self.sizes) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found


class Broken(Means):
    """Fails at its third batch."""

    def encode(self, *arguments: Any, **options: Any) -> Encoded:
        found = super().encode(*arguments, **options)
        if len(self.sizes) > 2:
            raise ValueError("a kernel of 3 is wanted")
        return found


@pytest.mark.parametrize("threads", [1, 3])
def test_results_are_never_mixed_between_samples(threads: int) -> None:
    made = engine(Means(), threads=threads)
    results: dict[int, Future[Result]] = {}
    for some in (range(3), range(3, 50), range(50, 53)):
        with made.feeding(), made.turn():
            for level in some:
                results[level] = made.put(str(level), grey(level), "x" * level)
                if level >= 10:  # results are taken in order
                    level_of(results[level - 10])
                    made.free_place()
    for level, found in results.items():
        assert level_of(found) == (level, level)
    made.close()


def test_batches_span_shards() -> None:
    encoder = Means()
    made = engine(encoder, batch_size=8)
    results: dict[int, Future[Result]] = {}
    with made.feeding():  # a third shard, which has nothing yet
        for first in (0, 5):
            results |= fed(made, range(first, first + 5))
    assert [level_of(found) for found in results.values()] == [(n, n) for n in range(10)]
    assert encoder.sizes == [8, 8]  # of which 6 are padding
    made.close()


def test_a_batch_that_does_not_fit_is_halved_with_the_same_result() -> None:
    encoder = Cramped()
    made = engine(encoder, batch_size=8)
    results = fed(made, range(21))
    assert [level_of(found) for found in results.values()] == [(n, n) for n in range(21)]
    assert made.stats.batch_size == 2
    assert made.stats.samples == 21
    assert encoder.sizes[:3] == [8, 4, 2]
    assert set(encoder.sizes[3:]) <= {2, 8}  # those that were filled before
    made.close()


@pytest.mark.parametrize("kind", [Overflowing, CrampedLater])
def test_what_overflows_is_computed_exactly_and_rejected_only_then(kind: type[Means]) -> None:
    made = engine(kind())
    levels = [5, 150, 250, 7, 101, 9, 255, 199, 11, 12, 13, 200]
    results = fed(made, levels)
    for level, found in results.items():
        if level > 200:
            with pytest.raises(RejectedError) as refused:
                found.result(60)
            assert refused.value.code is Code.NOT_FINITE
        else:
            assert level_of(found) == (level, level)
    assert made.stats.exact == sum(level > 100 for level in levels)
    assert made.stats.samples == len(levels)
    made.close()


class Counting(Means):
    """Sees how many cores it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.cores: list[int] = []

    def encode(self, *arguments: Any, **options: Any) -> Encoded:
        self.cores.append(torch.get_num_threads())
        return super().encode(*arguments, **options)

    def empty(self) -> dict[str, Tensor]:
        self.cores.append(torch.get_num_threads())
        return super().empty()


def test_all_is_computed_on_one_core_each_so_that_their_count_never_shows() -> None:
    encoder = Counting()
    made = engine(encoder, threads=2)
    made.empty()
    for found in fed(made, range(12)).values():
        found.result(60)
    made.close()
    assert len(encoder.cores) == 4
    assert set(encoder.cores) == {1}


def test_a_failing_encoder_is_told_to_whoever_waits() -> None:
    made = engine(Broken())
    with pytest.raises(EngineError, match="ValueError: a kernel of 3"):
        fed(made, range(100))
    with pytest.raises(EngineError):
        made.check()
    made.close()


def test_closing_in_the_middle_does_not_hang() -> None:
    made = engine(Means())
    feeding = threading.Thread(target=_feed_until_closed, args=(made,))
    feeding.start()
    made.close()
    feeding.join(60)
    assert not feeding.is_alive()


def _feed_until_closed(made: Engine) -> None:
    with pytest.raises((EngineError, RuntimeError)):
        fed(made, range(256))


# --- a worker, with a stand-in for the models


def worker(images: Path, out: Path, encoder: Means, **changes: Any) -> LatentsWorker:
    options: dict[str, Any] = {"batch_size": 8, "decoders": 2, "threads": 1, **changes}
    workshop = Workshop(
        images=str(images),
        latents=str(out),
        settings={"seed": 0},
        make_encoder=partial(_same, encoder),
        max_area=10**8,
        **options,
    )
    return LatentsWorker(workshop)


def _same(encoder: Means) -> Means:
    return encoder


def do(call: LatentsWorker, shard: ImageShard, errors: list[Exception]) -> None:
    try:
        for _ in call(shard):
            pass
    except Exception as error:  # noqa: BLE001  looked at by the test
        errors.append(error)


def do_all(call: LatentsWorker, shards: Iterable[ImageShard]) -> list[Exception]:
    """All shards at once, as a runner with several units in each worker does."""
    errors: list[Exception] = []
    threads = [threading.Thread(target=do, args=(call, shard, errors)) for shard in shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a shard hangs"
    return errors


def test_shards_done_at_once_keep_their_samples_apart(images: Path, tmp_path: Path) -> None:
    encoder = Means()
    shards = find_image_shards(str(images), 64).shards
    call = worker(images, tmp_path / "out", encoder)
    assert not do_all(call, shards)
    call.close()
    assert set(encoder.sizes) == {8}
    for shard in shards:
        originals = members(images / f"{shard.name}.tar")
        made = members(tmp_path / "out" / f"{shard.name}.tar")
        assert list(made) == list(originals)
        for key, sample in made.items():
            mean = crop(originals[key]["jpg"], 16).pixels.float().mean().half()
            assert sample["latent.npy"].endswith(mean.numpy().tobytes())


def test_a_worker_whose_encoder_fails_says_that_it_is_broken(images: Path, tmp_path: Path) -> None:
    call = worker(images, tmp_path / "out", Broken())
    shards = find_image_shards(str(images), 64).shards
    errors = do_all(call, shards)
    call.close()
    assert errors
    assert {type(error) for error in errors} == {BrokenWorkerError}
    assert "a kernel of 3 is wanted" in str(errors[0])
    assert not temporaries(tmp_path / "out")


def test_a_store_that_times_out_is_an_error_and_not_waited_for(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatentShard, "add", _time_out)
    call = worker(images, tmp_path / "out", Means())
    errors = do_all(call, find_image_shards(str(images), 64).shards[:1])
    call.close()
    assert [type(error) for error in errors] == [TimeoutError]


def _time_out(*_arguments: object) -> None:
    raise TimeoutError


def test_a_shard_that_is_given_up_leaves_nothing_and_the_next_one_is_done(
    images: Path, tmp_path: Path
) -> None:
    call = worker(images, tmp_path / "out", Means(), batch_size=2)
    first, second, *_ = find_image_shards(str(images), 64).shards
    for _ in range(30):  # more than there are places for what is under way
        steps = call(first)
        next(steps)
        steps.close()
    assert not temporaries(tmp_path / "out")
    assert not list((tmp_path / "out/receipts").rglob("*.*"))
    assert not do_all(call, [first, second])
    call.close()
    assert len(members(tmp_path / "out" / f"{first.name}.tar")) == 4


# --- what a user sees


def test_encode_is_a_library_call_too(images: Path, latents: Path, tmp_path: Path) -> None:
    with in_this_process():
        done = wdsprep.encode(
            str(images), str(tmp_path / "out"), resolution=64, model="tiny", runner="local",
            device="cpu",
        )  # fmt: skip
    assert (done.samples, done.quarantined, done.manifest.complete) == (COUNT, (), True)
    assert tree(tmp_path / "out") == tree(latents)


def test_the_library_raises_what_the_command_tells(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere"):
        encode_here(tmp_path / "nowhere", tmp_path / "out")


def test_bare_names_are_those_that_pack_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    packed(pictures(Path("downloads"), range(3)), Path("shards/images"))
    with in_this_process():
        assert main(["encode", "--resolution", "64", *TOY]) == 0
    assert len(latents_of(Path("shards/latents-64"))) == 3


def test_the_summary_tells_the_speed_and_what_is_next(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(images, tmp_path / "out") == 0
    told = capsys.readouterr()
    assert f"{images}: {SHARDS} shards, 42 images for resolution 64; model tiny in fp32" in told.err
    assert "tiny is a toy model" in told.err
    assert "42 images encoded in " in told.out
    assert "images/s each, device busy " in told.out
    assert "8 captions cut" in told.out
    assert f"{tmp_path}/out: 42 samples in {SHARDS} shards" in told.out
    assert "next: " in told.out


def test_json_is_all_that_stands_on_stdout(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(images, tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    expected = {
        "complete": True, "cut": 8, "encoded": 42, "quarantined": [], "rejects": {},
        "samples": 42, "shards": SHARDS, "shards_before": 0, "latents": f"{tmp_path}/out",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert 0 < found["busy"] <= 1
    assert found["images_per_s"] > 0
    assert list(found["workers"].values()) == [pytest.approx(found["images_per_s"])]
    assert found["encoded_bytes"] == sum(s.nbytes for s in manifest_of(tmp_path / "out").shards)
    with in_this_process():
        words = ["encode", str(images), str(tmp_path / "out"), "--resolution", "64", *TOY, "--json"]
        cli.main(words, standalone_mode=False)
    again = json.loads(capsys.readouterr().out)
    assert (again["encoded"], again["shards_before"]) == (0, SHARDS)


def test_images_whose_packing_goes_on_are_told(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(own.parent / "downloads", tmp_path / "images", "--limit", "3")
    assert command(tmp_path / "images", tmp_path / "out") == 0
    assert "is not packed to its end" in capsys.readouterr().err
