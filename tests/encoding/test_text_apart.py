"""Text stored once beside the latents of several resolutions: what a run for each would make."""

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import wdsprep
from tests.kit import encodes
from tests.kit.counted_work import count_work
from tests.kit.encodes import one_error, packed, pictures, rejected, run
from tests.kit.packs import jpeg, manifest_of, tree, write_files
from wdsprep.dataset.shapes import batch_that_fits
from wdsprep.encoding.options import EncodeOptions
from wdsprep.errors import UsageError
from wdsprep.runners.run import Outcome

BOTH = (64, 128)
COUNT, LARGE = 18, 6  # pictures, and those of them in bucket 128
SLICES, SHARDS = 3, 6

pytestmark = pytest.mark.usefixtures("stand_in")


def encode_here(images: Path | str, out: Path, **options: Any) -> Outcome:
    """With batches of one, of which none is padding."""
    return encodes.encode_here(images, out, batch_size=1, **options)


def apart(images: Path | str, folder: Path, **options: Any) -> list[Outcome]:
    wanted = {"resolution": BOTH, "text_out": str(folder / "text"), **options}
    made = encode_here(images, folder / "latents-{resolution}", **wanted)
    assert isinstance(made, list)
    return made


def in_runs_of_their_own(images: Path | str, folder: Path, **options: Any) -> dict[str, bytes]:
    """What `apart` is to make."""
    for resolution in BOTH:
        out = folder / f"latents-{resolution}"
        encode_here(images, out, resolution=resolution, text="none", **options)
    encode_here(images, folder / "text", latents="none", resolution=64, **options)
    return tree(folder)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fewer than other tests have: each run here has batches of one. Tests leave it as it is."""
    root = tmp_path_factory.mktemp("few")
    return packed(pictures(root / "downloads", range(COUNT)), root / "images")


@pytest.fixture(scope="module")
def alone(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return in_runs_of_their_own(images, tmp_path_factory.mktemp("alone"))


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_work(monkeypatch)


def test_one_pass_makes_what_three_runs_make_each_image_and_caption_once(
    images: Path, alone: dict[str, bytes], tmp_path: Path, work: Counter[str]
) -> None:
    low, high, text = apart(images, tmp_path)
    assert (low.samples, high.samples, text.samples) == (COUNT, LARGE, COUNT)
    assert work == {"decoded": COUNT, "texts": COUNT, "at 64": COUNT, "at 128": LARGE}
    assert tree(tmp_path) == alone


def test_text_is_there_of_images_that_are_refused(tmp_path: Path) -> None:
    """One is damaged, one of too many pixels, and one is no caption's."""
    source = pictures(tmp_path / "in", range(12))
    small = jpeg(1, (100, 90))
    write_files(source, {"photo-0001.jpg": small[: len(small) // 2]})
    images = packed(source, tmp_path / "images", "--check", "header")
    options = {"max_area": 200 * 100}
    made = tmp_path / "made"
    low, high, text = apart(images, made, **options)
    assert tree(made) == in_runs_of_their_own(images, tmp_path / "alone", **options)
    assert Counter(rejected(made / "latents-64").values()) == {"too_large": 4, "truncated": 1}
    assert (low.samples, high.samples, text.samples) == (7, 0, 12)


def test_foreign_tars_have_text_beside_the_latents_of_one_resolution(tmp_path: Path) -> None:
    source = pictures(tmp_path / "in", range(6))
    write_files(source, {"photo-0001.jpg": b"none"})
    tars = tmp_path / "tars"
    tars.mkdir()
    subprocess.run(["tar", "-cf", tars / "a.tar", "-C", source, "."], check=True)
    with pytest.raises(UsageError, match="give --text-out with one --resolution"):
        apart(tars, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    apart(tars, tmp_path / "made", resolution=64)
    made = tmp_path / "alone"
    encode_here(tars, made / "latents-64", text="none")
    encode_here(tars, made / "text", latents="none")
    assert tree(tmp_path / "made") == tree(made)


def test_with_shapes_and_flips_text_is_of_all_images_that_may_have_one(
    images: Path, tmp_path: Path
) -> None:
    options = {"resolution": 128, "shapes": "nearest:32,2", "flip": True}
    latents, text = apart(images, tmp_path / "made", **options)
    assert latents.manifest.settings["resolution"] == 128
    assert text.manifest.settings["resolution"] == 64
    made = tmp_path / "alone"
    encode_here(images, made / "latents-128", text="none", **options)
    encode_here(images, made / "text", latents="none")
    assert tree(tmp_path / "made") == tree(made)


def test_other_captions_are_of_the_text_alone(images: Path, tmp_path: Path) -> None:
    keys = sorted(json.loads(line)["key"] for line in _jsons(images))
    table = tmp_path / "table.csv"
    table.write_text(f"key,caption\n{keys[3]},other\n")
    apart(images, tmp_path / "made", captions=table, text_out=tmp_path / "made/text")
    made = tmp_path / "alone"
    for resolution in BOTH:
        out = made / f"latents-{resolution}"
        encode_here(images, out, resolution=resolution, text="none")
    encode_here(images, made / "text", latents="none", captions=table)
    assert tree(tmp_path / "made") == tree(made)


def _jsons(images: Path) -> list[bytes]:
    import tarfile

    found = []
    for path in images.rglob("*.tar"):
        with tarfile.open(path) as tar:
            found += [tar.extractfile(m).read() for m in tar if m.name.endswith(".json")]  # type: ignore[union-attr]
    return found


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


def test_only_what_is_lacking_is_made(
    images: Path, alone: dict[str, bytes], tmp_path: Path, work: Counter[str]
) -> None:
    """Be it the text or the latents, and whatever of each is there."""
    encode_here(images, tmp_path / "text", latents="none")
    assert work == {"texts": COUNT}
    low, high, text = apart(images, tmp_path)
    assert (low.samples, high.samples, text.samples) == (COUNT, LARGE, 0)
    assert work == {"texts": COUNT, "decoded": COUNT, "at 64": COUNT, "at 128": LARGE}
    assert tree(tmp_path) == alone
    shutil.rmtree(tmp_path / "text")
    encode_here(images, tmp_path / "text", latents="none", limit=7)
    apart(images, tmp_path)
    assert work["decoded"] == COUNT  # of text that is lacking no image is looked at
    assert tree(tmp_path) == alone


def test_what_is_damaged_is_found_removed_and_made_again(
    images: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    apart(images, tmp_path)
    parts = [str(tmp_path / name) for name in ("latents-64", "latents-128", "text")]
    assert not wdsprep.verify(str(images), *parts).findings
    bad = tmp_path / "text/128/000001.tar"
    bad.write_bytes(bad.read_bytes()[:1_000])
    (tmp_path / "latents-64/64/000000.tar").unlink()
    for name in ("text", "latents-64"):
        assert wdsprep.repair(str(tmp_path / name), yes=True).is_whole
    low, high, text = apart(images, tmp_path)
    assert (low.units_before, high.units_before, text.units_before) == (
        SHARDS - 1,
        SLICES,
        SHARDS - 1,
    )
    assert tree(tmp_path) == alone


# --- what a user sees


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--text-out", "text-{resolution}"), "text is stored once for all resolutions, so give"),
        (("--text-out", "shards/latents-64/"), "and text to shards/latents-64/, which is in"),
        (("--text-out", "shards/latents-64/text"), "latents go to shards/latents-64 and text to"),
        (("--text-out", "shards"), "shards/latents-64 and text to shards, which is in"),
        (("--text-out", "t", "--text", "none"), "--text-out stores text, and --text none"),
        (("--text-out", "t", "--latents", "none"), "--text-out is for text beside latents, and"),
        (("--text-out", "t-{caption}"), "t-{caption} needs the name of captions: give"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_written(
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    place = "shards/latents-{resolution}"
    assert run(images, place, "--resolution", "64,128", *options) == 2
    assert said in one_error(capsys)
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


def test_the_end_says_how_the_parts_are_loaded_together(
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    place = "shards/latents-{resolution}"
    assert run(images, place, "--resolution", "64,128", "--text-out", "shards/text") == 0
    told = capsys.readouterr()
    assert f"{SHARDS} shards, {COUNT} captions for resolution 64; model tiny" in told.err
    assert f"\nshards/text: {COUNT} samples in {SHARDS} shards, " in told.out
    for resolution in BOTH:
        manifest = manifest_of(tmp_path / f"shards/latents-{resolution}")
        batch = batch_that_fits(manifest.settings, manifest.counts, manifest.samples)
        joined = f'"shards/latents-{resolution}", join=["shards/text"]'
        both = f"wdsprep.load({joined}, global_batch={batch})"
        assert told.out.count(f"next: {both}") == 1
    assert told.out.count("next: ") == 2
    loader = wdsprep.load("shards/latents-128", join=["shards/text"], global_batch=6)
    assert {"latent", "emb"} <= next(iter(loader)).keys()
    assert run(images, place, "--resolution", "64", "--text-out", "shards/text", "--json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["latents"], line["encoded"]) for line in found] == [
        ("shards/latents-64", 0),
        ("shards/text", 0),
    ]
    assert EncodeOptions("i", "l", resolution=64, text_out="t").places == {64: "l", "caption": "t"}
