"""All commands over datasets whose manifests, receipts and small files somebody has changed."""

import contextlib
import io
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import wdsprep
from tests.kit.damaged import packing_here
from tests.kit.encodes import encode_here, in_this_process
from tests.kit.packs import photos
from tests.kit.sealed_files import mutate_file
from wdsprep.cli import main
from wdsprep.dataset.removed import Removed, UnitRemoval, removed_from, write_removed
from wdsprep.errors import WdsprepError
from wdsprep.store import open_store

PACK = ("--buckets", "32,64", "--samples-per-shard", "4", "--workers", "1")
TOY = ("--model", "tiny", "--device", "cpu", "--runner", "local", "--workers", "1")
ENCODED: dict[str, dict[str, Any]] = {
    "latents": {"resolution": 32},
    "shaped": {"resolution": 32, "shapes": "shapes.txt", "text": "none"},
    "moments": {"resolution": 32, "latents": "moments", "text": "tokens"},
    "words": {"resolution": 32, "latents": "none"},
}
OTHERS = ("captioned", "imported", "removed-from", "selected")
OF_IMAGES = ("images", "removed-from", "selected")
LIMIT_S = 20.0


def make_datasets(root: Path, names: Sequence[str] = (*ENCODED, *OTHERS)) -> Path:
    """Small datasets below a folder: images, and those of these names."""
    downloads = photos(root / "downloads", 8)
    (downloads / "zzz.jpg").write_bytes(b"no image")
    with packing_here(), contextlib.redirect_stderr(io.StringIO()):
        assert main(["pack", str(downloads), str(root / "images"), *PACK]) == 0
        (root / "shapes.txt").write_text("24x40\n32x32\n40x24\n")
        for name in ENCODED.keys() & {*names}:
            encode_here(root / "images", root / name, **_options(root, name))
        table = root / "captions.csv"
        keys = [f"000000{number:06d}" for number in range(4)]
        table.write_text("key,caption\n" + "".join(f"{key},of {key}\n" for key in keys))
        if "captioned" in names:
            encode_here(root / "images", root / "captioned", resolution=32, captions=str(table))
        if "imported" in names:
            _import(root)
        if "removed-from" in names:
            _remove(root)
        if "selected" in names:
            wdsprep.select(root / "images", root / "selected", count=4)
    return root


def _options(root: Path, name: str) -> dict[str, Any]:
    found = dict(ENCODED.get(name, {"resolution": 32}))
    return found | ({"shapes": str(root / "shapes.txt")} if "shapes" in found else {})


def _import(root: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    cells = []
    for number in range(6):
        out = io.BytesIO()
        np.save(out, np.full((4, 8, 8), number, np.float16))
        cells.append(out.getvalue())
    (root / "cache").mkdir()
    captions = [f"caption {number}" for number in range(6)]
    pq.write_table(pa.table({"latent": cells, "caption": captions}), root / "cache/0.parquet")
    wdsprep.import_(root / "cache", root / "imported", resolution=64)


def _remove(root: Path) -> None:
    """One that samples were removed from, and one of which a removal was killed."""
    shutil.copytree(root / "images", root / "removed-from")
    wdsprep.remove(root / "removed-from", keys="000000000001", yes=True)
    shutil.copytree(root / "removed-from", root / "removing")
    store = open_store(str(root / "removing"))
    there = removed_from(store)
    write_removed(
        store,
        Removed(marks=there.marks, changes=there.changes, units=(UnitRemoval(unit="000001"),)),
    )


def commands_of(root: Path, name: str) -> Iterator[tuple[str, ...]]:
    """Each command that reads the dataset of that name, and then those that write to it."""
    place, images, out = str(root / name), str(root / "images"), str(root / "out")
    is_of_images = name in (*OF_IMAGES, "removing")
    yield "inspect", place
    yield "inspect", place, "--json"
    yield "inspect", place, "000000000000"
    yield "verify", place, "--workers", "1"
    yield "report", place, "-o", f"{root}/report.html", "--model", "none"
    yield "card", place
    yield "export", place, out, "--to", "wids" if is_of_images else "parquet", "--workers", "1"
    yield "select", place, out, "--where", "width >= 40", "--workers", "1"
    yield "select", place, out, "--count", "2", "--workers", "1"
    if is_of_images:
        yield "duplicates", place, "--workers", "1"
        yield "encode", place, out, "--resolution", "32", *TOY
        yield "plan", place, "--resolution", "32"
        yield "pack", str(root / "downloads"), place, *PACK
    else:
        yield "verify", images, place, "--workers", "1"
        yield "select", images, place, f"{out}/{{name}}", "--count", "2", "--workers", "1"
        options = [w for k, v in _options(root, name).items() for w in (f"--{k}", str(v))]
        if name == "captioned":
            options += ["--captions", str(root / "captions.csv")]
        yield "encode", images, place, *options, *TOY
        yield "plan", place
    yield "remove", place, "--keys", f"{root}/keys.txt", "--yes"
    yield "remove", place, "--yes"
    yield "index", place
    yield "repair", place, "--quick", "--yes", "--workers", "1"
    yield "repair", place, "--yes", "--workers", "1"
    yield "rebuild", place


class TooLongError(BaseException):
    """A command that did not end in its time."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def stop(_number: int, _frame: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def said_by(*words: str) -> str:
    """What a command prints as its errors; what is wrong with that, if it took too long."""
    out, err = io.StringIO(), io.StringIO()
    began = time.monotonic()
    try:
        with (
            at_most(LIMIT_S),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            packing_here(),
            in_this_process(),
        ):
            main([*words])
    except TooLongError:
        return f"a bug: took {time.monotonic() - began:.0f} s"
    return err.getvalue()


def load(place: Path) -> str:
    """What serving two batches says; nothing where it goes well."""
    try:
        with at_most(LIMIT_S):
            for number, batch in enumerate(wdsprep.load(place, global_batch=2, epochs=1)):
                assert batch
                if number == 2:
                    break
    except WdsprepError as error:
        return f"{error}"
    except TooLongError:
        return "a bug: took too long"
    except Exception as error:  # noqa: BLE001 (what is looked for)
        return f"a bug: {type(error).__name__}: {error}"
    return ""


def fuzz(sound: Path, root: Path, rng: Random, *, most: int = 1000) -> list[tuple[str, str]]:
    """Change a file of one of the datasets, and run up to so many of the commands. Returns those
    that met a bug, or said more than is readable."""
    name = rng.choice(sorted(p.parent.name for p in sound.glob("*/wdsprep.json")))
    if root.exists():
        shutil.rmtree(root)
    root.mkdir(parents=True)
    for each in {"downloads", "images", name}:
        shutil.copytree(sound / each, root / each)
    for file in sound.glob("*.*"):
        shutil.copy2(file, root / file.name)
    (root / "keys.txt").write_text("000000000000\n")
    place = root / name
    files = sorted(
        p.relative_to(place).as_posix()
        for p in place.rglob("*")
        if p.is_file() and p.suffix in (".json", ".jsonl", ".idx", ".rows", "", ".sqlite")
    )
    weights = [
        8 if f == "wdsprep.json" else 3 if f.startswith(("rec", "removed")) else 1 for f in files
    ]
    file = rng.choices(files, weights)[0]
    mutate_file(place / file, file, rng)
    changed = (place / file).read_bytes()
    kept = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    every = list(commands_of(root, name))
    chosen = every if most >= len(every) else rng.sample(every, most)
    found = []
    said = load(place)
    if "a bug:" in said or len(said) > 5000:
        found.append((f"load {name}/{file}", said))
    for words in chosen:
        said = said_by(*words)
        if "a bug:" in said or max(map(len, said.splitlines()), default=0) > 3000:
            found.append((f"{' '.join(words[:1])} {name}/{file}", said[:2000]))
        shutil.rmtree(root / "out", ignore_errors=True)
        for path in place.rglob("*"):
            if path.is_file() and path not in kept:
                path.unlink()
        for path, data in kept.items():
            if not path.exists() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    if found:
        found.append(("the file", repr(changed[:3000])))
    return found
