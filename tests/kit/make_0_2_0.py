"""Make `made_by_0_2_0`: what the code of 20da3e3 (0.2.0, with all of the changelog's "Unreleased")
writes, by its commands, some of them killed, and the states of its loaders.

    git worktree add /tmp/old 20da3e3 && cp tests/kit/ma{de_before,ke_0_2_0}.py /tmp/old/tests/kit
    cd /tmp/old && python -m tests.kit.make_0_2_0 /tmp/made

Datasets are 13 small pictures packed by fives, and all that was made of them; `COMMANDS` are
in their order. What KILLED names was ended by SIGKILL just before it gave a file its name.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from PIL import Image

import wdsprep
from tests.kit.encodes import in_this_process
from tests.kit.made_before import MODEL, date, noted, run, run_here
from tests.kit.packs import packing_here
from wdsprep.cli import main
from wdsprep.store.local import LocalStore

COUNT = 13
SIZES = ((64, 80), (140, 130), (200, 90), (90, 100))
LICENCES = ("cc0", "by", "nc")

# --- what is packed


def write_inputs(home: Path) -> None:
    """Pictures, of which two are equal and one is no picture, a table of captions and of scores."""
    folder = home / "downloads"
    folder.mkdir(parents=True)
    for number in range(COUNT):
        stem = folder / f"photo-{number:02d}"
        stem.with_suffix(".jpg").write_bytes(picture(number if number != 9 else 5))
        stem.with_suffix(".txt").write_text(f"photo {number} of a field")
        told: dict[str, Any] = {"aesthetic": number / 2, "license": LICENCES[number % 3]}
        told["short"] = f"field {number}"
        if number % 4:
            told["long"] = f"a photograph of field number {number}, seen from above"
        stem.with_suffix(".json").write_text(json.dumps(told))
    (folder / "photo-99.jpg").write_bytes(b"no picture")
    rows = [f"photo-{number:02d}.jpg,given to photo {number}" for number in range(0, COUNT, 2)]
    (home / "captions.csv").write_text("\n".join(["source,caption", *rows, ""]))


def write_scores(home: Path) -> None:
    """A score for all samples but some, by keys: rows of a table that is joined."""
    keys = [batch["key"][0] for batch in load(home, "images", global_batch=1)]
    rows = [f"{key},{number / 4},{number}" for number, key in enumerate(sorted(keys)) if number % 5]
    (home / "scores.csv").write_text("\n".join(["key,score,votes", *rows, ""]))


def picture(number: int) -> bytes:
    """A few squares, so that it is small as a file."""
    width, height = SIZES[number % len(SIZES)]
    noise = random.Random(number).randbytes(4 * 4 * 3)
    out = BytesIO()
    squares = Image.frombytes("RGB", (4, 4), noise).resize(
        (width, height), Image.Resampling.NEAREST
    )
    squares.save(out, "JPEG", quality=70)
    return out.getvalue()


# --- commands

PACK = ("--buckets", "64,128", "--samples-per-shard", "5", "--workers", "1")
BOTH = ("--resolution", "64,128", "--flip", *MODEL)
SHAPES = ("--resolution", "64", "--shapes", "nearest:8,3", "--text", "none", *MODEL)
TEXT = ("--latents", "none", *MODEL)
GIVEN = ("--captions", "captions.csv", "--captions-by", "source", "--caption-name", "given")
CHOSEN = ("--where", "aesthetic >= 1 and license != 'nc'", "--split", "train=0.7,val=0.3")
CHOICE = ("images", "latents-64", "shaped", "text-long")
MOMENTS = ("--resolution", "64", "--scale", "0.18215", "--shift", "0")
GONE = ("--keys", "000000000002,000001000001,000002000001", "--yes")
LOST = ("--keys", "000000000000,000001000002", "--yes")
LESS = ("images", "latents-64", "shaped", "text-long")
"""Of these there are copies below `less`, from which samples are removed."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "images": ("pack", "downloads", "images", *PACK),
    "latents-64": ("encode", "images", "latents-{resolution}", "--text-out", "text", *BOTH),
    "shaped": ("encode", "images", "shaped", "--max-crop", "0.08", *SHAPES),
    "text-long": ("encode", "images", "text-{caption}", "--caption-fields", "long,short", *TEXT),
    "text-given": ("encode", "images", "text-given", *GIVEN, *TEXT),
    "selected": ("select", *CHOICE, "selected/{split}/{name}", *CHOSEN, "--seed", "3"),
    "few": ("select", "images", "few", "--count", "5", "--samples-per-shard", "2"),
    "hashes": ("duplicates", "images", "--hashes", "hashes", "-o", "copies.txt"),
    "mds": ("export", "latents-64", "mds", "--to", "mds"),
    "wids": ("export", "shaped", "wids", "--to", "wids"),
    "webshart": ("export", "images", "webshart", "--to", "webshart"),
    "energon": ("export", "latents-128", "energon", "--to", "energon"),
    "imported": ("import", "mds", "imported", *MOMENTS),
    "less": ("remove", *(f"less/{name}" for name in LESS), *GONE),
    "less/latents-64": ("remove", "less/latents-64", *LOST),
    "less/mds": (
        "export",
        "less/latents-64",
        "less/mds",
        "--to",
        "mds",
        "--join",
        "less/text-long",
    ),
    "less/images-chosen": (
        "select",
        "less/images",
        "less/latents-64",
        "less/{name}-chosen",
        "--count",
        "6",
    ),
}
KILLED: dict[str, tuple[tuple[str, ...], str, int]] = {
    "begun/images": (("pack", "downloads", "begun/images", *PACK), "receipts/*", 2),
    "begun/latents-64": (
        ("encode", "images", "begun/latents-{resolution}", "--text-out", "begun/text", *BOTH),
        *("receipts/*", 5),
    ),
    "begun/text-given": (("encode", "images", "begun/text-given", *GIVEN, *TEXT), "receipts/*", 3),
    "begun/selected": (
        ("select", *CHOICE, "begun/selected/{split}/{name}", *CHOSEN, "--seed", "3"),
        *("receipts/*", 6),
    ),
    "begun/mds": (
        ("export", "latents-64", "begun/mds", "--to", "mds"),
        *(".wdsprep/*/*", 2),
    ),
    "begun/wids": (("export", "shaped", "begun/wids", "--to", "wids"), "*.tar", 3),
    "begun/imported": (("import", "mds", "begun/imported", *MOMENTS), "receipts/*", 2),
    "removing": (
        ("remove", *(f"removing/{name}" for name in LESS), *GONE),
        *("receipts/*", 4),
    ),
}
"""The command, and before which file of this kind it was killed."""
TOLD: dict[str, tuple[str, ...]] = {
    **{
        f"inspect {name}": ("inspect", name, "--json")
        for name in ("images", "shaped", "text-given")
    },
    "inspect less": ("inspect", "less/latents-64", "--json"),
    "inspect a sample": ("inspect", "less/latents-64", "000001000003", "--json"),
    "inspect a removed one": ("inspect", "less/latents-64", "000000000000", "--json"),
    "verify": ("verify", "images", "latents-64", "shaped", "text-given", "--json"),
    "verify less": ("verify", *(f"less/{name}" for name in LESS), "--json"),
    "plan": ("plan", "images", "--gpu", "A100", "--shapes", "nearest:8,3", "--json"),
}
"""What programs read."""

# --- loaders

HOW = wdsprep.Encode(resolution=64, model="tiny", device="cpu", text="none")
SHAPED = wdsprep.Encode(
    resolution=64, model="tiny", device="cpu", text="none", shapes="nearest:8,3"
)
LOADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "where": ("images", {"where": "aesthetic >= 2 and license in ('cc0', 'by')"}),
    "where of latents": ("latents-64", {"where": "width > 70 or caption == 'photo 0 of a field'"}),
    "where of a table": ("latents-64", {"join": "scores.csv", "where": "score < 2 and votes != 3"}),
    "where of shapes": ("shaped", {"where": "not width < 90"}),
    "where on the way": ("images", {"where": "aesthetic < 5", "encode": HOW}),
    "text joined": ("latents-64", {"join": "text", "drop_text": 0.3}),
    "text and a table joined": ("latents-128", {"join": ["text", "scores.csv"]}),
    "text joined to shapes": ("shaped", {"join": "text-given"}),
    "text joined on the way": ("images", {"join": "text", "encode": HOW}),
    "captions": (
        "latents-64",
        {"join": ["text-long", "text-given"], "captions": {"long": 0.6, "given": 0.4}},
    ),
    "captions of the json": ("images", {"captions": {"caption": 0.5, "meta.long": 0.5}}),
    "shapes": ("shaped", {}),
    "shapes in parts of a step": (
        "shaped",
        {"global_batch": 4, "shape_batch": 2, "rank": 0, "world_size": 2},
    ),
    "shapes on the way": ("images", {"encode": SHAPED}),
    "mirrored": ("latents-128", {"flip": 0.5, "seed": 4}),
    "rows joined": ("less/latents-64", {"join": "less/text-long"}),
    "rows joined, where": ("less/latents-64", {"join": "less/text-long", "where": "width > 70"}),
    "rows of shapes joined": ("less/shaped", {"join": "less/text-long"}),
    "selected": ("selected/train/latents-64", {"join": "selected/train/text-long"}),
    "imported": ("imported", {}),
    "teed": ("teed", {}),
}


def load(home: Path, name: str, **options: Any) -> Any:
    joined = options.get("join", ())
    named = [joined] if isinstance(joined, str) else joined
    given = {"global_batch": 2, "epochs": 3, "seed": 11, "window": 4, "run": 2, **options}
    return wdsprep.load(str(home / name), **{**given, "join": [str(home / each) for each in named]})


def loader(home: Path, name: str) -> Any:
    dataset, options = LOADERS[name]
    return load(home, dataset, **options)


@contextmanager
def kept_in(home: Path) -> Iterator[None]:
    """What loaders find out of all samples is kept below `home`."""
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(home)}):
        yield


def tee(home: Path, out: str) -> None:
    """Keep what passes, of a run that stops in its first pass."""
    made = load(home, "images", encode=HOW, tee=str(home / out), epochs=1)
    for _ in made:
        pass


# --- making it


def killed(home: Path, words: tuple[str, ...], pattern: str, count: int) -> None:
    """Run a command that ends with SIGKILL before it names the file of that kind."""
    call = [sys.executable, "-c", ELSEWHERE, pattern, str(count), *words]
    done = subprocess.run(call, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, (words, done.stdout, done.stderr)


ELSEWHERE = """
import socket, sys
socket.gethostname = lambda: "elsewhere"
from tests.kit.make_0_2_0 import run_to_a_kill
run_to_a_kill(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
"""


def run_to_a_kill(pattern: str, count: int, words: list[str]) -> None:
    """Run the command in this process, which kills itself."""
    write, left = LocalStore.write, count

    @contextmanager
    def cut(store: LocalStore, name: str, /, *, exclusive: bool = False) -> Iterator[Any]:
        nonlocal left
        with write(store, name, exclusive=exclusive) as sink:
            yield sink
            left -= fnmatch(name, pattern)
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(LocalStore, "write", cut), in_this_process(), packing_here():
        main(words)


def make(home: Path) -> None:
    write_inputs(home)
    date(home)
    for name, words in COMMANDS.items():
        if name == "less":
            for each in LESS:
                shutil.copytree(home / each, home / "less" / each)
                shutil.copytree(home / each, home / "removing" / each)
        (run_here if words[0] == "encode" else run)(home, *words)
        date(home)
    for words, pattern, count in KILLED.values():
        killed(home, words, pattern, count)
        date(home)
    tee(home, "teed")
    write_scores(home)
    date(home)
    told = {name: run(home, *words).stdout for name, words in TOLD.items()}
    (home / "told.json").write_text(json.dumps(told, indent=1) + "\n")
    with kept_in(home / "kept"):
        write_states(home)


def write_states(home: Path) -> None:
    states = {}
    for name in LOADERS:
        began = loader(home, name)
        noted(began, 2)
        states[name] = {"state": began.state_dict(), "next": noted(began, 3)}
    lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in states.items())
    (home / "states.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
