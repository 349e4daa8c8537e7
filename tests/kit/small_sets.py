"""Small pictures, and datasets that commands make of them, all files with one date.

`python -m tests.kit.small_sets` writes the fixture `format_1` again, after a change of the format.
"""

import json
import random
import shutil
import subprocess
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import wdsprep
from tests.kit.encodes import in_this_process
from tests.kit.packs import packing_here
from wdsprep.cli import main

FIXTURE = Path(__file__).parent / "format_1"
WHEN = 1_735_689_600  # the first second of 2025
SIZES = ((64, 80), (140, 130), (200, 90), (90, 100))
MODEL = ("--model", "tiny", "--device", "cpu", "--runner", "local", "--workers", "1")
PACK = ("--buckets", "64,128", "--samples-per-shard", "5", "--workers", "1")
ENCODE = ("--resolution", "64", "--text", "none", *MODEL)
LOAD: dict[str, Any] = {"global_batch": 2, "epochs": 2, "seed": 11}


def write_pictures(folder: Path, count: int) -> None:
    """Pictures of a few squares with captions and json, and a file that is no picture."""
    folder.mkdir(parents=True)
    for number in range(count):
        stem = folder / f"photo-{number:02d}"
        noise = random.Random(number).randbytes(4 * 4 * 3)
        squares = Image.frombytes("RGB", (4, 4), noise)
        out = BytesIO()
        squares.resize(SIZES[number % 4], Image.Resampling.NEAREST).save(out, "JPEG", quality=70)
        stem.with_suffix(".jpg").write_bytes(out.getvalue())
        stem.with_suffix(".txt").write_text(f"photo {number} of a field")
        stem.with_suffix(".json").write_text(json.dumps({"aesthetic": number / 2}))
    (folder / "photo-99.jpg").write_bytes(b"no picture")


def date(home: Path) -> None:
    """Give each file the same time: the inputs of a dataset say when its files were changed."""
    touch = ["touch", "--date", f"@{WHEN}"]
    subprocess.run(["find", str(home), "-type", "f", "-exec", *touch, "{}", "+"], check=True)


def run_in(home: Path, *words: str) -> None:
    """Run a command of wdsprep in this process and this folder."""
    with pytest.MonkeyPatch.context() as patch, in_this_process(), packing_here():
        patch.chdir(home)
        assert main([*words]) == 0, words


def write_fixture() -> None:
    """Write pictures, their shards and latents, and the state of a loader with what comes next."""
    shutil.rmtree(FIXTURE, ignore_errors=True)
    write_pictures(FIXTURE / "downloads", 6)
    date(FIXTURE)
    run_in(FIXTURE, "pack", "downloads", "images", *PACK)
    run_in(FIXTURE, "encode", "images", "latents", *ENCODE)
    loader = wdsprep.load(str(FIXTURE / "latents"), **LOAD)
    served = [batch["key"] for _, batch in zip(range(2), loader, strict=False)]
    state, rest = loader.state_dict(), [batch["key"] for batch in loader]
    said = {"served": served, "state": state, "rest": rest}
    (FIXTURE / "loader.json").write_text(json.dumps(said, indent=1) + "\n")
    for path in FIXTURE.rglob("*.hold"):
        path.unlink()


if __name__ == "__main__":
    write_fixture()
