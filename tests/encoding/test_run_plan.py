"""A run of `encode` is planned whole, in one readable object, before anything is written."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.encodes import SHARDS, encode_here, packed, pictures
from tests.kit.packs import jpeg, tree
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.encoding.make_run_plan import make_plan
from wdsprep.encoding.options import EncodeOptions
from wdsprep.encoding.run_plan import EncodePlan
from wdsprep.errors import FingerprintError


def planned(images: Path | str, out: Path | str, **options: Any) -> EncodePlan:
    usual = {"model": "tiny", "device": "cpu", "runner": "local", "workers": 1}
    wanted = EncodeOptions(str(images), str(out), **{"resolution": 64, **usual, **options})
    return make_plan(wanted, told=lambda _line: None)


def test_a_plan_says_what_a_run_will_do_and_leaves_no_trace(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "latents-{resolution}"
    encode_here(images, tmp_path / "latents-64", text="none", limit=9)
    before = tree(tmp_path)
    plan = planned(images, out, resolution=(64, 128), text_out=tmp_path / "text")
    assert str(plan).splitlines() == [
        f"{images}: 14 shards, 42 images for resolution 64, 7 shards, 14 images for resolution "
        "128, 14 shards, 42 captions for resolution 64; model tiny in fp32 on cpu",
        plan.model.note,
        f"{tmp_path}/latents-64 goes on: 14 shards, 42 images for resolution 64, 12 of 14 shards "
        "missing",
        "  latents: sample",
        "  the trial goes on: 1 shard that --limit had cut is encoded anew",
        f"{tmp_path}/latents-128 begins: 7 shards, 14 images for resolution 128, 7 of 7 shards "
        "missing",
        "  latents: sample",
        f"{tmp_path}/text begins: 14 shards, 42 captions for resolution 64, 14 of 14 shards "
        "missing",
        "  text: emb, of the samples' own captions",
        "14 image shards to encode, by 1 CPU worker on this machine",
    ]
    assert tree(tmp_path) == before


def test_what_is_there_is_not_missing(images: Path, tmp_path: Path) -> None:
    encode_here(images, tmp_path, limit=9)
    plan = planned(images, tmp_path)
    (dataset,) = plan.datasets
    assert (dataset.shards, dataset.missing, plan.units) == (SHARDS, len(dataset.pending), 12)
    assert len(dataset.stale) == 1
    assert "the trial goes on: 1 shard that --limit had cut is encoded anew" in dataset.removals
    over = planned(images, tmp_path, overwrite=True)
    assert (over.datasets[0].missing, over.units) == (SHARDS, SHARDS)
    assert str(over.datasets[0]).startswith(f"{tmp_path} starts over: ")


def test_nothing_is_written_where_one_of_several_datasets_cannot_go_on(tmp_path: Path) -> None:
    """Its images have changed since, which is found out before the other one is begun."""
    source = pictures(tmp_path / "downloads")
    packed(source, tmp_path / "images")
    out = tmp_path / "out"
    encode_here(tmp_path / "images", out / "128", resolution=128)
    (source / "photo-0002.jpg").write_bytes(jpeg(99, (200, 136)))
    packed(source, tmp_path / "images", "--overwrite")
    before = tree(out)
    with pytest.raises(FingerprintError, match=r"changed or gone since .*128 was encoded"):
        encode_here(tmp_path / "images", out / "{resolution}", resolution=(64, 128))
    assert tree(out) == before


def unpacked_shards() -> set[int]:
    """Return the ids of all there are in this process."""
    return {id(each) for each in gc.get_objects() if type(each) is ImageShard}


def test_a_plan_keeps_no_image_shard_unpacked(images: Path, tmp_path: Path) -> None:
    """Of a million they are half a GB, for the length of the run."""
    of_other_tests = unpacked_shards()
    plan = planned(images, tmp_path / "out")
    gc.collect()
    assert unpacked_shards() == of_other_tests
    assert len(list(plan.datasets[0].pending)) == SHARDS
    assert len(list(plan.datasets[0].pending.hand_out())) == SHARDS
    assert not plan.datasets[0].pending


def test_a_plan_of_the_toy_needs_no_torch(images: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from tests.encoding.test_run_plan import planned\n"
        "for name in [n for n in sys.modules if n.partition('.')[0] == 'torch']:\n"
        "    del sys.modules[name]\n"
        "planned(*sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, images, tmp_path / "out"], check=True)
