"""Several resolutions in one pass, and text stored once beside them: what a run for each makes."""

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import wdsprep
from tests.kit import encodes
from tests.kit.encode_work import Plain
from tests.kit.encodes import packed, pictures, rejected, run, samples_in
from tests.kit.packs import jpeg, manifest_of, tree, write_files
from wdsprep.dataset.manifest import Receipt
from wdsprep.dataset.shapes import batch_that_fits
from wdsprep.encoding.latent_shard import LatentShard
from wdsprep.encoding.options import EncodeOptions
from wdsprep.errors import FingerprintError, UsageError
from wdsprep.images import formats
from wdsprep.runners.base import HopelessError
from wdsprep.runners.run import Outcome

BOTH = (64, 128)
COUNT, LARGE = 12, 4  # pictures, and those of them in bucket 128
SLICES, SHARDS = 2, 4

pytestmark = pytest.mark.usefixtures("stand_in")


def encode_here(images: Path | str, out: Path, **options: Any) -> Outcome:
    """With batches of one, of which none is padding."""
    return encodes.encode_here(images, out, batch_size=1, **options)


def both(images: Path | str, folder: Path, **options: Any) -> list[Outcome]:
    made = encode_here(images, folder / "latents-{resolution}", **{"resolution": BOTH, **options})
    assert isinstance(made, list)
    return made


def apart(images: Path | str, folder: Path, **options: Any) -> list[Outcome]:
    return both(images, folder, **{"text_out": str(folder / "text"), **options})


def in_runs_of_their_own(
    images: Path | str, folder: Path, *, has_text_apart: bool, **options: Any
) -> dict[str, bytes]:
    """What `both` is to make, or `apart`."""
    text = {"text": "none"} if has_text_apart else {}
    for resolution in BOTH:
        out = folder / f"latents-{resolution}"
        encode_here(images, out, resolution=resolution, **text, **options)
    if has_text_apart:
        encode_here(images, folder / "text", latents="none", resolution=64, **options)
    return tree(folder)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fewer than other tests have: each run here has batches of one. Tests leave it as it is."""
    root = tmp_path_factory.mktemp("few")
    return packed(pictures(root / "downloads", range(COUNT)), root / "images")


@pytest.fixture(scope="module")
def alone(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return in_runs_of_their_own(images, tmp_path_factory.mktemp("alone"), has_text_apart=False)


@pytest.fixture(scope="module")
def alone_apart(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return in_runs_of_their_own(images, tmp_path_factory.mktemp("apart"), has_text_apart=True)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often an image is decoded, and the rows that the encoder is given, none of them padding.

    Rows of images are counted by their side.
    """
    counted: Counter[str] = Counter()
    load, images, texts = formats.load, Plain.encode_images, Plain.encode_texts

    def load_counted(*arguments: Any) -> Any:
        counted["decoded"] += 1
        return load(*arguments)

    def encode_images(encoder: Plain, pixels: Any, *noise: Any, **how: Any) -> Any:
        counted[f"at {pixels.shape[-1]}"] += len(pixels)
        return images(encoder, pixels, *noise, **how)

    def encode_texts(encoder: Plain, captions: Any, **how: Any) -> Any:
        counted["texts"] += len(captions)
        return texts(encoder, captions, **how)

    monkeypatch.setattr(formats, "load", load_counted)
    monkeypatch.setattr(Plain, "encode_images", encode_images)
    monkeypatch.setattr(Plain, "encode_texts", encode_texts)
    return counted


# --- the bytes of a run for each


@pytest.mark.parametrize(
    ("encode", "wanted", "samples"),
    [(both, "alone", [COUNT, LARGE]), (apart, "alone_apart", [COUNT, LARGE, COUNT])],
)
def test_one_pass_makes_what_a_run_for_each_makes_each_image_and_caption_once(
    encode: Any, wanted: str, samples: list[int], images: Path, tmp_path: Path,
    work: Counter[str], request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    made = request.getfixturevalue(wanted)
    work.clear()
    assert [outcome.samples for outcome in encode(images, tmp_path)] == samples
    assert work == {"decoded": COUNT, "texts": COUNT, "at 64": COUNT, "at 128": LARGE}
    assert tree(tmp_path) == made


def test_foreign_tars_too_with_the_rejects_of_each(tmp_path: Path) -> None:
    """An image of 100 pixels is too small for the one alone, and what is damaged there is not
    looked at by it. Text lies beside the latents of one resolution."""
    source = pictures(tmp_path / "in", range(12))
    small = jpeg(1, (100, 90))
    write_files(source, {"photo-0001.jpg": small[: len(small) // 2], "photo-0005.jpg": b"none"})
    large = jpeg(2, (200, 136))
    write_files(source, {"photo-0008.jpg": large[: len(large) // 2]})
    tars = tmp_path / "tars"
    tars.mkdir()
    for number in range(2):
        names = [f"photo-{n:04d}.{end}" for n in range(6 * number, 6 * number + 6)
                 for end in ("jpg", "txt")]  # fmt: skip
        subprocess.run(["tar", "-cf", tars / f"{number}.tar", "-C", source, *names], check=True)
    both(tars, made := tmp_path / "made")
    assert tree(made) == in_runs_of_their_own(tars, tmp_path / "alone", has_text_apart=False)
    low, high = (Counter(rejected(made / f"latents-{side}").values()) for side in BOTH)
    assert low == {"truncated": 2, "not_an_image": 1}
    assert high == {"too_small": 8, "truncated": 1, "not_an_image": 1}
    with pytest.raises(UsageError, match="give --text-out with one --resolution"):
        apart(tars, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    apart(tars, tmp_path / "apart", resolution=64)
    encode_here(tars, tmp_path / "one/latents-64", text="none")
    encode_here(tars, tmp_path / "one/text", latents="none")
    assert tree(tmp_path / "apart") == tree(tmp_path / "one")


def test_text_is_there_of_images_that_are_refused(tmp_path: Path) -> None:
    """One is damaged, one of too many pixels, and one is no caption's."""
    source = pictures(tmp_path / "in", range(12))
    small = jpeg(1, (100, 90))
    write_files(source, {"photo-0001.jpg": small[: len(small) // 2]})
    images = packed(source, tmp_path / "images", "--check", "header")
    options = {"max_area": 200 * 100}
    made = tmp_path / "made"
    low, high, text = apart(images, made, **options)
    wanted = in_runs_of_their_own(images, tmp_path / "alone", has_text_apart=True, **options)
    assert tree(made) == wanted
    assert Counter(rejected(made / "latents-64").values()) == {"too_large": 4, "truncated": 1}
    assert (low.samples, high.samples, text.samples) == (7, 0, 12)


def test_shapes_and_mirror_images_are_what_runs_of_their_own_make(
    images: Path, tmp_path: Path
) -> None:
    """Text is of all images that may have latents of some shape."""
    options = {"shapes": "nearest:32,2", "flip": True}
    both(images, tmp_path / "both", **options)
    wanted = in_runs_of_their_own(images, tmp_path / "each", has_text_apart=False, **options)
    assert tree(tmp_path / "both") == wanted
    latents, text = apart(images, tmp_path / "apart", resolution=128, **options)
    assert latents.manifest.settings["resolution"] == 128
    assert text.manifest.settings["resolution"] == 64
    made = tmp_path / "alone"
    encode_here(images, made / "latents-128", text="none", resolution=128, **options)
    encode_here(images, made / "text", latents="none")
    assert tree(tmp_path / "apart") == tree(made)


def test_other_captions_are_of_the_text_alone(images: Path, tmp_path: Path) -> None:
    table, key = tmp_path / "table.csv", sorted(samples_in(images))[3]
    table.write_text(f"key,caption\n{key},other\n")
    apart(images, tmp_path / "made", captions=table)
    made = tmp_path / "alone"
    for resolution in BOTH:
        out = made / f"latents-{resolution}"
        encode_here(images, out, resolution=resolution, text="none")
    encode_here(images, made / "text", latents="none", captions=table)
    assert tree(tmp_path / "made") == tree(made)


def test_several_captions_have_a_text_each_in_the_same_pass(
    images: Path, tmp_path: Path, work: Counter[str]
) -> None:
    *latents, own, source = apart(
        images,
        tmp_path,
        resolution=64,
        text_out=tmp_path / "text-{caption}",
        caption_fields="caption,source",
    )
    assert [each.samples for each in (*latents, own, source)] == [COUNT] * 3
    assert work == {"decoded": COUNT, "texts": 2 * COUNT, "at 64": COUNT}
    encode_here(images, tmp_path / "alone", latents="none", caption_field="source")
    assert tree(tmp_path / "text-source") == tree(tmp_path / "alone")


# --- going on


def test_what_is_finished_is_left_alone_and_only_the_other_is_encoded(
    images: Path, alone: dict[str, bytes], tmp_path: Path, work: Counter[str]
) -> None:
    write_files(tmp_path, {n: data for n, data in alone.items() if n.startswith("latents-64")})
    low_place = tmp_path / "latents-64"
    before = {path: path.stat().st_mtime_ns for path in low_place.rglob("*.*[a-z]")}
    low, high = both(images, tmp_path)
    assert (low.samples, low.units_before, high.samples) == (0, SHARDS, LARGE)
    assert work == {"decoded": LARGE, "texts": LARGE, "at 128": LARGE}
    now = {path: path.stat().st_mtime_ns for path in before}
    now.pop(low_place / "wdsprep.json")
    assert now.items() <= before.items()
    assert tree(tmp_path) == alone


def test_only_what_is_lacking_is_made(
    images: Path, alone_apart: dict[str, bytes], tmp_path: Path, work: Counter[str]
) -> None:
    """Be it the text or the latents, and whatever of each is there."""
    encode_here(images, tmp_path / "text", latents="none")
    assert work == {"texts": COUNT}
    low, high, text = apart(images, tmp_path)
    assert (low.samples, high.samples, text.samples) == (COUNT, LARGE, 0)
    assert work == {"texts": COUNT, "decoded": COUNT, "at 64": COUNT, "at 128": LARGE}
    assert tree(tmp_path) == alone_apart
    shutil.rmtree(tmp_path / "text")
    encode_here(images, tmp_path / "text", latents="none", limit=7)
    apart(images, tmp_path)
    assert work["decoded"] == COUNT  # of text that is lacking no image is looked at
    assert tree(tmp_path) == alone_apart


def test_a_limit_is_that_of_each(images: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    low, high = both(images, tmp_path / "both", limit=3)
    assert (low.samples, high.samples) == (3, 3)
    wanted = in_runs_of_their_own(images, tmp_path / "alone", has_text_apart=False, limit=3)
    trees = [
        # the manifest has the speed of a trial
        {name: data for name, data in files.items() if not name.endswith("wdsprep.json")}
        for files in (tree(tmp_path / "both"), wanted)
    ]
    assert trees[0] == trees[1]
    both(images, tmp_path / "both")
    assert tree(tmp_path / "both") == alone


def test_overwrite_and_redo_changed_are_for_all(
    images: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    own = Path(shutil.copytree(images.parent, tmp_path / "own")) / "images"
    both(own, tmp_path / "out", seed=3)
    both(own, tmp_path / "out", overwrite=True)
    made = tree(tmp_path / "out")
    assert all(made.pop(f"latents-{side}/edition") for side in BOTH)
    assert made == alone
    write_files(own.parent / "downloads", {"photo-0002.txt": "another caption"})
    packed(own.parent / "downloads", own, "--overwrite")
    shutil.rmtree(tmp_path / "out/latents-64")  # it is not begun where the other cannot go on
    before = tree(tmp_path / "out")
    with pytest.raises(
        FingerprintError, match=r"1 image shard has changed or gone .*-128 was made"
    ):
        both(own, tmp_path / "out")
    assert tree(tmp_path / "out") == before
    low, high = both(own, tmp_path / "out", redo_changed=True)
    assert (low.samples, high.samples) == (COUNT, 2)


def test_a_shard_that_cannot_be_read_is_left_out_of_both(images: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(images, tmp_path / "own"))
    bad = own / "128/000001.tar"
    bad.write_bytes(bad.read_bytes()[:5_000])
    for outcome, shards in zip(both(own, tmp_path), (SHARDS, SLICES), strict=True):
        (failed,) = outcome.quarantined
        assert failed.unit.name == "128/000001"
        assert not outcome.manifest.complete
        assert len(outcome.manifest.receipts) == shards - 1


def test_a_shard_that_one_has_got_before_the_worker_died_is_left_out_of_the_other_alone(
    images: Path, alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = LatentShard.finish

    def die(output: LatentShard, *files: Mapping[str, Any]) -> Receipt:
        if output.settings["resolution"] == 128:
            raise HopelessError("the worker has died")
        return finish(output, *files)

    monkeypatch.setattr(LatentShard, "finish", die)
    low, high = both(images, tmp_path)
    assert not low.quarantined
    assert low.manifest.complete
    low_files = {f"latents-64/{name}": data for name, data in tree(tmp_path / "latents-64").items()}
    assert low_files.items() <= alone.items()
    assert len(high.quarantined) == SLICES
    assert not high.manifest.complete


# --- what a user sees

PLACE = "shards/latents-{resolution}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("out", "--resolution", "64,128"), "out is one place, and each resolution makes a "
         "dataset: write {resolution} where their names differ, as in out-{resolution}"),
        (("--resolution", "64,64"), "--resolution (64, 64): give each number of pixels once"),
        (("--resolution", "64,"), "'64,': give each number of pixels once, such as 256 or 256,512"),
        (("--resolution", "64,100"), "--resolution 100 is not a multiple of 8"),
        (("--resolution", "4"), "--resolution 4 is not a multiple of 8"),
        (("--text-out", "text-{resolution}"), "text-{resolution} lacks a resolution for"),
        (("--text-out", "shards/latents-64/"), "and text to shards/latents-64/, which is in"),
        (("--text-out", "shards/latents-64/text"), "latents go to shards/latents-64 and text to"),
        (("--text-out", "shards"), "shards/latents-64 and text to shards, which is in"),
        (("--text-out", "t", "--text", "none"), "--text-out is for text beside latents, and"),
        (("--text-out", "t", "--latents", "none"), "--text-out is for text beside latents, and"),
        (("--resolution", "64,128", "--latents", "none"), "--latents none makes one dataset"),
        (("--resolution", "64", "--latents", "none", "--upscale"), "--upscale is for images"),
        (("--resolution", "0"), "--resolution is missing: give pixels"),
        (("--text-out", "t-{caption}"), "t-{caption} lacks a caption for {caption}: give"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_before_anything_is_written(
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    usual = () if "--resolution" in words else (PLACE, "--resolution", "64,128")
    assert run(images, *usual, *words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "wdsprep: " in line]
    assert said in line
    assert not tree(tmp_path)


@pytest.mark.parametrize(
    ("images", "place"),
    [
        ("shards/images", "shards/latents-64"),
        ("a/images-2/", "a/latents-64-2"),
        ("cats", "cats-latents-64"),
        ("s3://bucket/cats", "s3://bucket/cats-latents-64"),
        ("s3://bucket", "shards/latents-64"),
        ("hf://datasets/owner/name/images", "shards/latents-64"),
        ("laion/{00000..00099}.tar", "shards/latents-64"),
        ("laion/0.tar", "shards/latents-64"),
    ],
)
def test_latents_lie_beside_their_images_unless_a_place_is_given(images: str, place: str) -> None:
    assert EncodeOptions(images, resolution=64).places == {64: place}
    apart_places = EncodeOptions(images, resolution=64, text_out="t").places
    assert apart_places == {64: place, "caption": "t"}


def test_each_has_a_line_at_the_end_that_says_how_the_parts_are_loaded_together(
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(images, PLACE, "--resolution", "128,64", "--text-out", "shards/text") == 0
    told = capsys.readouterr()
    phases = f"{SLICES} shards, {LARGE} images for resolution 128, {SHARDS} shards, {COUNT} images"
    texts = f"{SHARDS} shards, {COUNT} captions for resolution 64; model tiny in fp32 on cpu"
    assert f"{images}: {phases} for resolution 64, {texts}" in told.err
    assert f"{2 * COUNT + LARGE} samples encoded in " in told.out
    assert f"\nshards/latents-128: {LARGE} samples in {SLICES} shards, " in told.out
    assert f"\nshards/latents-64: {COUNT} samples in {SHARDS} shards, " in told.out
    assert f"\nshards/text: {COUNT} samples in {SHARDS} shards, " in told.out
    for resolution in BOTH:
        manifest = manifest_of(tmp_path / f"shards/latents-{resolution}")
        batch = batch_that_fits(manifest.settings, manifest.counts, manifest.samples)
        joined = f'"shards/latents-{resolution}", join=["shards/text"]'
        assert told.out.count(f"next: wdsprep.load({joined}, global_batch={batch})") == 1
    assert told.out.count("next: ") == 2
    loader = wdsprep.load("shards/latents-128", join=["shards/text"], global_batch=LARGE)
    assert {"latent", "emb"} <= next(iter(loader)).keys()
    again = (PLACE, "--resolution", "64,128", "--text-out", "shards/text", "--json")
    assert run(images, *again) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["latents"], line["encoded"], line["shards"]) for line in found] == [
        ("shards/latents-64", 0, SHARDS),
        ("shards/latents-128", 0, SLICES),
        ("shards/text", 0, SHARDS),
    ]
