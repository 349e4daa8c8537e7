"""Encode: each image shard becomes a latent shard, the same whoever does it and however often."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.damaged import findings
from tests.kit.encodes import (
    COUNT,
    LOCAL,
    SHARDS,
    TOY,
    command,
    encode_here,
    in_this_process,
    latents_of,
    packed,
    pictures,
    rejected,
)
from tests.kit.hub import set_constants
from tests.kit.packs import manifest_of, tree, write_files
from wdsprep.cli import main
from wdsprep.encoding.encode import EncodePlan, headlines, make_plan
from wdsprep.encoding.models.find_model import TINY
from wdsprep.encoding.options import EncodeOptions
from wdsprep.encoding.recipe_options import MOST_COMPILED
from wdsprep.errors import FingerprintError, UsageError
from wdsprep.runners.job import JobListener

pytestmark = pytest.mark.usefixtures("stand_in")


# --- what the command itself loads


@pytest.mark.parametrize("runner", ["auto", pytest.param("ray", marks=pytest.mark.system)])
def test_until_its_workers_begin_the_command_loads_no_model_library(
    images: Path, tmp_path: Path, runner: str
) -> None:
    """They take seconds to import, and only workers need them."""
    script = (
        "import os, sys, wdsprep.encoding.gpus\n"
        "from wdsprep.runners.job import JobListener\n"
        "from wdsprep.encoding.encode import encode\n"
        "wdsprep.encoding.gpus.has_driver = lambda: False\n"
        "def begun(_begun):\n"
        "    heavy = {'torch', 'torchvision', 'diffusers', 'transformers', 'ray'}\n"
        "    print('begun with', sorted(heavy & sys.modules.keys()), flush=True)\n"
        "    os._exit(0)\n"
        f"encode({str(images)!r}, {str(tmp_path / 'out')!r}, resolution=64, model='tiny',\n"
        f"    runner={runner!r}, listener=JobListener(on_begin=begun))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    found = "['ray']" if runner == "ray" else "[]"
    assert done.stdout == f"begun with {found}\n", done.stderr


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


def test_images_that_are_none_are_refused(
    images: Path, stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = tmp_path / "out", ("--resolution", "64", *TOY)
    code, line = refused(capsys, tmp_path / "nowhere", out, *options)
    assert (code, "nowhere" in line, "wdsprep pack" in line) == (1, True, True), line
    code, line = refused(capsys, images.parent / "downloads", out, *options)
    assert (code, f'"wdsprep pack {images.parent}/downloads IMAGES" first' in line) == (1, True), (
        line
    )
    code, line = refused(capsys, stored, out, *options)
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
    set_constants(monkeypatch, ENDPOINT="http://127.0.0.1:9", HF_HUB_CACHE=str(tmp_path / "cache"))
    options = ("--resolution", "64", *LOCAL)
    code, line = refused(capsys, images, tmp_path / "out", *options, "--model", "some/model")
    assert code == 1
    assert "some/model" in line
    assert "hf download some/model" in line
    code, line = refused(capsys, images, tmp_path / "out", *options, "--model", "./no-folder")
    assert code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("real_models")
def test_a_model_without_finite_numbers_says_what_to_do_and_exits_with_3(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = other_weights(tmp_path, times=float("nan"))
    assert command(images, tmp_path / "out", "--model", str(broken), "--limit", "4") == 3
    said = capsys.readouterr().out
    assert set(rejected(tmp_path / "out").values()) == {"not_finite"}
    assert "as not_finite: the model gives no finite numbers for them, not even in fp32" in said
    assert "or choose another --model" in said
    assert "may be faster" not in said


# --- going on


def test_a_second_run_has_nothing_to_do_and_changes_no_byte(
    images: Path, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(stored)
    assert command(images, stored) == 0
    assert f"nothing left to do: {SHARDS} shards encoded before" in capsys.readouterr().out
    assert tree(stored) == before


def other_weights(folder: Path, *, times: float = 1.5) -> Path:
    from safetensors.torch import load_file, save_file

    made = Path(shutil.copytree(TINY, folder / "model"))
    path = made / "vae/diffusion_pytorch_model.safetensors"
    save_file({k: v * times for k, v in load_file(path).items()}, path, metadata={"format": "pt"})
    return made


def test_other_settings_never_mix_with_what_is_there(
    images: Path, stored: Path, tmp_path: Path
) -> None:
    before = tree(stored)
    with pytest.raises(FingerprintError, match=": seed: 0, now 1: run with those"):
        encode_here(images, stored, seed=1)
    with pytest.raises(FingerprintError, match=r": .*text: emb, now tokens.*: run with"):
        encode_here(images, stored, text="tokens")
    with pytest.raises(FingerprintError, match=r": .*the weights of the model: other"):
        encode_here(images, stored, model=str(other_weights(tmp_path)))
    with pytest.raises(FingerprintError, match=": layout: other; resolution: 64, now 128: run"):
        encode_here(images, stored, resolution=128)
    assert tree(stored) == before


def test_overwrite_starts_over_and_clears_latents_alone(
    own: Path, stored: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(stored, out)
    (out / "notes.txt").write_text("mine")
    encode_here(own, out, seed=3, overwrite=True)
    assert set(tree(out)) == {*tree(stored), "notes.txt", "edition"}
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
    images: Path, stored: Path, tmp_path: Path, limit: int
) -> None:
    out = tmp_path / "out"
    encode_here(images, out, limit=limit)
    assert list(latents_of(out)) == list(latents_of(stored))[:limit]
    assert not manifest_of(out).complete
    encode_here(images, out)
    assert tree(out) == tree(stored)


def test_a_trial_of_images_that_have_changed_says_what_is_removed(
    own: Path, tmp_path: Path
) -> None:
    out, told = tmp_path / "out", list[str]()
    encode_here(own, out, limit=9)
    write_files(own.parent / "downloads", {"photo-0000.txt": "another caption"})
    (own / "receipts/000000.json").unlink()
    packed(own.parent / "downloads", own, "--overwrite")
    listener = JobListener(on_message=told.append)
    with pytest.raises(FingerprintError, match="wdsprep encode --redo-changed does again"):
        encode_here(own, out)
    encode_here(own, out, redo_changed=True, listener=listener)
    encode_here(own, tmp_path / "fresh")
    assert tree(out) == tree(tmp_path / "fresh")
    assert findings(own, out) == []
    assert [line for line in told if "shard" in line] == [
        "1 shard done anew, with what --limit had cut off",
        "1 shard removed: their images have changed or are gone",
    ]


def test_appended_images_are_encoded_by_the_next_run(tmp_path: Path) -> None:
    source, images, out = tmp_path / "in", tmp_path / "images", tmp_path / "out"
    packed(pictures(source, range(9)), images)
    encode_here(images, out)
    packed(pictures(source, range(9, 15)), images, "--append")
    done = encode_here(images, out)
    assert (done.samples, len(latents_of(out))) == (6, 15)
    assert not findings(images, out)


# --- what a user sees


def test_the_summary_tells_the_speed_and_what_is_next(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(images, tmp_path / "out") == 0
    told = capsys.readouterr()
    what = f"{SHARDS} shards, {COUNT} images for resolution 64; model tiny in fp32"
    assert f"{images}: {what}" in told.err
    assert "tiny is a toy model" in told.err
    assert f"{COUNT} images encoded in " in told.out
    assert re.search(r"images/s, device busy \d+% of the time", told.out)
    assert "5 captions cut" in told.out
    assert f"{tmp_path}/out: {COUNT} samples in {SHARDS} shards" in told.out
    assert "next: " in told.out


def test_json_is_all_that_stands_on_stdout(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(images, tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    expected = {
        "complete": True, "cut": 5, "encoded": COUNT, "quarantined": [], "rejects": {},
        "samples": COUNT, "shards": SHARDS, "shards_before": 0, "latents": f"{tmp_path}/out",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert 0 < found["busy"] <= 1
    assert found["images_per_s"] > 0
    assert list(found["workers"].values()) == [pytest.approx(found["images_per_s"])]
    assert found["encoded_bytes"] == sum(s.nbytes for s in manifest_of(tmp_path / "out").shards)
    assert command(images, tmp_path / "out", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["encoded"], again["shards_before"]) == (0, SHARDS)


def test_images_whose_packing_goes_on_are_told_and_their_latents_are_not_complete(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(own.parent / "downloads", tmp_path / "images", "--limit", "3")
    assert command(tmp_path / "images", tmp_path / "out") == 0
    assert "is not completely packed" in capsys.readouterr().err
    assert len(latents_of(tmp_path / "out")) == 3
    assert not manifest_of(tmp_path / "out").complete


def planned(images: Path | str, out: Path | str, **options: Any) -> EncodePlan:
    usual = {"model": "tiny", "device": "cpu", "runner": "local", "workers": 1}
    wanted = EncodeOptions(str(images), str(out), **{"resolution": 64, **usual, **options})
    return make_plan(wanted, JobListener())


def test_a_plan_says_what_a_run_will_do_and_leaves_no_trace(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "latents-{resolution}"
    encode_here(images, tmp_path / "latents-64", text="none", limit=9)
    before = tree(tmp_path)
    plan = planned(images, out, resolution=(64, 128), text_out=tmp_path / "text")
    assert list(headlines(plan)) == [
        f"{images}: 8 shards, 24 images for resolution 64, 4 shards, 8 images for resolution "
        "128, 8 shards, 24 captions for resolution 64; model tiny in fp32 on cpu",
        plan.model.note,
    ]
    low, high, text = plan.datasets
    shaped = planned(images, tmp_path / "shaped", shapes="nearest:32,2", max_crop=0.2)
    for dataset in (*plan.datasets, *shaped.datasets):  # as they come back from a file
        assert dataset.settings == json.loads(json.dumps(dataset.settings))
    assert [len(dataset.packed) for dataset in plan.datasets] == [6, 4, 8]
    assert low.removals == ("1 shard done anew, with what --limit had cut off",)
    assert low.claim.is_there
    assert not any(dataset.claim.is_there for dataset in (high, text))
    assert plan.job.worker_plan.workers == 1
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("given", "shapes"),
    [
        ({"resolution": 1024, "shapes": "sdxl"}, 40),
        ({"resolution": (64, 128, 256), "shapes": "nearest:64,2"}, 5),
        ({"resolution": 256, "roles": "source", "role_size": "source=nearest:32,2"}, 5),
    ],
)
def test_many_shapes_are_not_compiled_one_after_the_other(
    given: dict[str, Any], shapes: int
) -> None:
    with pytest.raises(UsageError) as refused:
        EncodeOptions(**given, compile=True)
    assert str(refused.value) == (
        f"--compile takes minutes for each shape, and there are {shapes}: leave it out, or encode "
        f"{MOST_COMPILED} shapes at most"
    )
    EncodeOptions(**given)
