"""Several resolutions in one pass: what a run for each would make, with half the work."""

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kit.counted_work import count_work
from tests.kit.encodes import COUNT, SHARDS, encode_here, one_error, packed, pictures, rejected, run
from tests.kit.packs import jpeg, tree, write_files
from wdsprep.dataset.manifest import Receipt
from wdsprep.encoding.latent_shard import LatentShard
from wdsprep.errors import FingerprintError
from wdsprep.runners.base import HopelessError
from wdsprep.runners.run import Outcome

BOTH = (64, 128)
LARGE = 14  # of the pictures, in bucket 128


pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.fixture(scope="module")
def latents(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("at-64") / "latents"
    encode_here(images, out)
    return out


@pytest.fixture(scope="module")
def alone(
    images: Path, latents: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, bytes]]:
    """What a run for each makes."""
    out = tmp_path_factory.mktemp("alone") / "128"
    encode_here(images, out, resolution=128)
    return {64: tree(latents), 128: tree(out)}


def at(folder: Path, resolution: int) -> Path:
    return folder / f"latents-{resolution}"


def both(images: Path | str, folder: Path, **options: Any) -> list[Outcome]:
    made = encode_here(images, folder / "latents-{resolution}", **{"resolution": BOTH, **options})
    assert isinstance(made, list)
    return made


def trees(folder: Path) -> dict[int, dict[str, bytes]]:
    return {resolution: tree(at(folder, resolution)) for resolution in BOTH}


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_work(monkeypatch)


# --- the bytes of a run for each


def test_one_pass_makes_what_a_run_for_each_makes(
    images: Path, alone: dict[int, dict[str, bytes]], tmp_path: Path
) -> None:
    low, high = both(images, tmp_path)
    assert (low.samples, high.samples) == (COUNT, LARGE)
    assert trees(tmp_path) == alone


def test_each_image_is_decoded_once_and_each_caption_encoded_once(
    images: Path, tmp_path: Path, work: Counter[str]
) -> None:
    both(images, tmp_path, batch_size=1)
    assert work == {"decoded": COUNT, "texts": COUNT, "at 64": COUNT, "at 128": LARGE}


def test_foreign_tars_too_with_the_rejects_of_each(tmp_path: Path) -> None:
    """An image of 100 pixels is too small for the one alone, and what is damaged there is not
    looked at by it."""
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
    both(tars, tmp_path)
    for resolution in BOTH:
        out = tmp_path / f"alone-{resolution}"
        encode_here(tars, out, resolution=resolution)
        assert tree(at(tmp_path, resolution)) == tree(out)
    low, high = (Counter(rejected(at(tmp_path, resolution)).values()) for resolution in BOTH)
    assert low == {"truncated": 2, "not_an_image": 1}
    assert high == {"too_small": 8, "truncated": 1, "not_an_image": 1}


# --- going on


def test_what_is_finished_is_left_alone_and_only_the_other_is_encoded(
    images: Path, latents: Path, alone: dict[int, dict[str, bytes]], tmp_path: Path,
    work: Counter[str],
) -> None:  # fmt: skip
    shutil.copytree(latents, at(tmp_path, 64))
    before = {path: path.stat().st_mtime_ns for path in at(tmp_path, 64).rglob("*.*[a-z]")}
    low, high = both(images, tmp_path, batch_size=1)
    assert (low.samples, low.units_before, high.samples) == (0, SHARDS, LARGE)
    assert work == {"decoded": LARGE, "texts": LARGE, "at 128": LARGE}
    now = {path: path.stat().st_mtime_ns for path in before}
    now.pop(at(tmp_path, 64) / "wdsprep.json")
    assert now.items() <= before.items()
    assert tree(at(tmp_path, 64)) == alone[64]


def test_a_limit_is_that_of_each(
    images: Path, alone: dict[int, dict[str, bytes]], tmp_path: Path
) -> None:
    low, high = both(images, tmp_path, limit=11)
    assert (low.samples, high.samples) == (11, 11)
    for resolution in BOTH:
        out = tmp_path / f"alone-{resolution}"
        encode_here(images, out, resolution=resolution, limit=11)
        found, wanted = tree(at(tmp_path, resolution)), tree(out)
        del found["wdsprep.json"], wanted["wdsprep.json"]  # which has the speed of a trial
        assert found == wanted
    both(images, tmp_path)
    assert trees(tmp_path) == alone


def test_overwrite_and_redo_changed_are_for_all(
    own: Path, alone: dict[int, dict[str, bytes]], tmp_path: Path
) -> None:
    both(own, tmp_path, seed=3)
    both(own, tmp_path, overwrite=True)
    for resolution, found in trees(tmp_path).items():
        assert found.pop("edition")
        assert found == alone[resolution]
    write_files(own.parent / "downloads", {"photo-0002.txt": "another caption"})
    packed(own.parent / "downloads", own, "--overwrite")
    with pytest.raises(FingerprintError, match="1 image shard has changed or gone"):
        both(own, tmp_path)
    low, high = both(own, tmp_path, redo_changed=True)
    assert (low.samples, high.samples) == (2, 2)


def test_settings_of_another_kind_are_told_before_anything_is_written(
    images: Path, tmp_path: Path
) -> None:
    encode_here(images, at(tmp_path, 128), resolution=128, limit=2)
    before = tree(tmp_path)
    for resolution in (BOTH, BOTH[::-1]):
        with pytest.raises(FingerprintError, match=r"latents-128 was .*: seed: 0, now 1: run"):
            both(images, tmp_path, resolution=resolution, seed=1)
        assert tree(tmp_path) == before


def test_a_shard_that_cannot_be_read_is_left_out_of_both(own: Path, tmp_path: Path) -> None:
    bad = own / "128/000001.tar"
    bad.write_bytes(bad.read_bytes()[:5_000])
    for outcome in both(own, tmp_path):
        (failed,) = outcome.quarantined
        assert failed.unit.name == "128/000001"
        assert not outcome.manifest.complete
        assert len(outcome.manifest.receipts) == outcome.manifest.samples // 2 - 7 * (
            outcome.manifest.settings["resolution"] == 64
        )


def test_a_shard_that_one_has_got_before_the_worker_died_is_left_out_of_the_other_alone(
    images: Path, alone: dict[int, dict[str, bytes]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    finish = LatentShard.finish

    def die(output: LatentShard, *files: Mapping[str, Any]) -> Receipt:
        if output.settings["resolution"] == 128:
            raise HopelessError("the worker has died")
        return finish(output, *files)

    monkeypatch.setattr(LatentShard, "finish", die)
    low, high = both(images, tmp_path)
    assert not low.quarantined
    assert low.manifest.complete
    assert tree(at(tmp_path, 64)) == alone[64]
    assert len(high.quarantined) == 7
    assert not high.manifest.complete


# --- what a user sees


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("out", "--resolution", "64,128"), "out is one place, and each of 2 resolutions makes a "
         "dataset: write {resolution} where their names differ, as in out-{resolution}"),
        (("--resolution", "64,64"), "resolution 64 is given twice: give each once"),
        (("--resolution", "64,"), "'64,': give whole numbers of pixels, such as 256 or 256,512"),
        (("--resolution", "64,100"), "--resolution 100 is not a multiple of 8"),
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
    assert run(images, *words) == 2
    assert said in one_error(capsys)
    assert not tree(tmp_path)


def test_each_has_a_line_at_the_end(
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    place = "shards/latents-{resolution}"
    assert run(images, place, "--resolution", "128,64") == 0
    told = capsys.readouterr()
    phases = f"7 shards, {LARGE} images for resolution 128, {SHARDS} shards, {COUNT} images for"
    assert f"{images}: {phases} resolution 64; model tiny in fp32 on cpu" in told.err
    assert f"{COUNT + LARGE} samples encoded in " in told.out
    assert f"\nshards/latents-128: {LARGE} samples in 7 shards, " in told.out
    assert f"\nshards/latents-64: {COUNT} samples in {SHARDS} shards, " in told.out
    assert told.out.count("next: ") == 2
    assert run(images, place, "--resolution", "64,128", "--json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["latents"], line["encoded"], line["shards"]) for line in found] == [
        ("shards/latents-64", 0, SHARDS),
        ("shards/latents-128", 0, 7),
    ]


def test_shapes_and_mirror_images_of_both_are_what_runs_of_their_own_make(
    images: Path, tmp_path: Path
) -> None:
    options = {"shapes": "nearest:16,2", "flip": True}
    both(images, tmp_path / "both", **options)
    for resolution in BOTH:
        encode_here(images, tmp_path / f"{resolution}", resolution=resolution, **options)
        assert tree(at(tmp_path / "both", resolution)) == tree(tmp_path / f"{resolution}")
