"""Datasets of ours whose manifests, receipts, small files and shards somebody has changed."""

import contextlib
import io
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import wdsprep
from tests.kit.encodes import encode_here
from tests.kit.fuzz.cases import HERE, TOY, Kind, Run, change, command, copy_ours, load_some
from tests.kit.packs import packing_here, photos
from tests.kit.scores import score_here
from tests.kit.scoring_models import small
from tests.kit.sealed_files import mutate_file, mutate_settings
from wdsprep.cli import main
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.dataset.removed_samples import Removed, UnitRemoval, removed_from, write_removed
from wdsprep.store import open_store

PACK = ("--buckets", "32,64", "--samples-per-shard", "4", "--workers", "1")
ENCODED: dict[str, dict[str, Any]] = {
    "latents": {"resolution": 32},
    "shaped": {"resolution": 32, "shapes": "shapes.txt", "text": "none"},
    "moments": {"resolution": 32, "latents": "moments", "text": "tokens"},
    "words": {"resolution": 32, "latents": "none"},
}
OTHERS = ("captioned", "imported", "removed-from", "selected", "scores")
EXPORTED = {"to-mds": "images", "to-imagefolder": "images", "to-parquet": "latents"}
FORMS = (*(FORMS_OF_LATENTS := ("wids", "parquet", "mds")), "energon", "webshart")
OF_IMAGES = ("images", "removed-from", "selected")


def make_datasets(root: Path, names: Sequence[str] = (*ENCODED, *OTHERS, *EXPORTED)) -> Path:
    """Small datasets below a folder: images, and those of these names."""
    downloads = photos(root / "downloads", 8)
    (downloads / "zzz.jpg").write_bytes(b"no image")
    with packing_here(), contextlib.redirect_stderr(io.StringIO()):
        assert main(["pack", str(downloads), str(root / "images"), *PACK]) == 0
        (root / "shapes.txt").write_text("24x40\n32x32\n40x24\n")
        for name in ENCODED.keys() & {*names}:
            encode_here(root / "images", root / name, **_options(root, name))
        (root / "keys.txt").write_text("000000000000\n")
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
        if "scores" in names:
            small("vit", root / "scorer")
            score_here(root / "images", root / "scores", model=f"vit={root / 'scorer'}")
        for form in EXPORTED.keys() & {*names}:
            wdsprep.export(root / EXPORTED[form], root / form, to=form.partition("-")[2])
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


def _runs_of(name: str) -> Callable[[Path, Path], list[Run]]:
    """Name each command that reads the dataset of that name, and then those that write to it."""

    def runs(root: Path, out: Path) -> list[Run]:
        found = [command(*words) for words in words_of(root, name, out)]
        if name == "scores":
            load = partial(load_some, root / "images", join=root / name, pixels=32)
            return [*found, load(), load(where="nsfw >= 0")]
        uses = LOADS[name in ("removing", *OF_IMAGES)]
        return [*found, *(load_some(root / name, **options) for options in uses)]

    return runs


IN_PLACE = wdsprep.Encode(resolution=32, model="tiny")
LOADS: dict[bool, list[dict[str, Any]]] = {  # by whether it is of images
    True: [
        {},
        {"pixels": 32, "fields": ("pixels", "json", "txt", "key")},
        {"where": "width >= 40"},
        {"encode": IN_PLACE, "device": "cpu"},
    ],
    False: [{}, {"raw": True}, {"where": "width >= 40", "fields": ("key", "json")}],
}


def words_of(root: Path, name: str, out: Path) -> Iterator[tuple[str | Path, ...]]:
    place, images = root / name, root / "images"
    is_of_images = name in (*OF_IMAGES, "removing")
    yield "inspect", place
    yield "inspect", place, "--json"
    yield "inspect", place, "000000000000"
    yield "verify", place, "--workers", "1"
    yield "report", place, "-o", out / "report.html", "--model", "none"
    yield "card", place
    for form in FORMS if is_of_images else FORMS_OF_LATENTS:
        yield "export", place, out, "--to", form, "--workers", "1"
    yield "select", place, out, "--where", "width >= 40", "--workers", "1"
    yield "select", place, out, "--count", "2", "--workers", "1"
    if is_of_images:
        yield "inspect", place, "--where", "width >= 40 or aesthetic > 1 or 'a' in captions"
        yield "duplicates", place, "--workers", "1"
        yield "encode", place, out, "--resolution", "32", *TOY
        yield "plan", place, "--resolution", "32,64"
        yield "pack", root / "downloads", place, *PACK
    elif name == "scores":
        joined = "--join", place, "--where", "nsfw >= 0"
        yield "duplicates", images, *joined, "--keep", "nsfw", "--workers", "1"
        yield "select", images, out, *joined, "--workers", "1"
        yield "export", images, out, "--to", "parquet", "--join", place, "--workers", "1"
        yield "score", images, place, "--model", f"vit={root / 'scorer'}", *HERE
    else:
        yield "verify", images, place, "--workers", "1"
        yield "select", images, place, f"{out}/{{name}}", "--count", "2", "--workers", "1"
        options = [w for k, v in _options(root, name).items() for w in (f"--{k}", str(v))]
        if name == "captioned":
            options += ["--captions", str(root / "captions.csv")]
        yield "encode", images, place, *options, *TOY
    yield "remove", place, "--keys", root / "keys.txt", "--yes"
    if name == "removing":
        yield "remove", place, "--yes"
    yield "index", place
    yield "repair", place, "--quick", "--yes", "--workers", "1"
    yield "repair", place, "--yes", "--workers", "1"
    yield "rebuild", place


def _change(name: str) -> Callable[[Path, Random], str]:
    """Change the settings, a file that says something, or one that holds something."""

    def change(root: Path, rng: Random) -> str:
        place = root / name
        if rng.random() < 0.3:
            mutate_settings(place, rng)
            return f"{name}: settings"
        endings = RECORDS if rng.random() < 0.75 else DATA
        files = [
            path.relative_to(place).as_posix()
            for path in sorted(place.rglob("*"))
            if path.is_file() and path.suffix in endings
        ]
        weights = [8 if f == MANIFEST else 3 if f.startswith(("rec", "rem")) else 1 for f in files]
        file = rng.choices(files, weights)[0]
        mutate_file(place / file, file, rng)
        return f"{name}/{file}"

    return change


def _runs_of_export(name: str, source: str) -> Callable[[Path, Path], list[Run]]:
    def runs(root: Path, _out: Path) -> list[Run]:
        form = name.partition("-")[2]
        return [command("export", root / source, root / name, "--to", form, "--workers", "1")]

    return runs


FILES = ("shapes.txt", "keys.txt", "captions.csv")
RECORDS = (".json", ".jsonl", "")
DATA = (".idx", ".parquet", ".npy", ".tar")
KINDS = tuple(
    Kind(
        name=f"own-{name}",
        make=copy_ours("downloads", "images", name, *FILES, *["scorer"] * (name == "scores")),
        change=_change(name),
        runs=_runs_of(name),
        most=6,
        is_ours=True,
    )
    for name in ("images", *ENCODED, *OTHERS, "removing")
) + tuple(
    Kind(
        name=f"export-{name}",
        make=copy_ours(name, source),
        change=change(f"{name}/**/*.*"),
        runs=_runs_of_export(name, source),
        is_ours=True,
    )
    for name, source in EXPORTED.items()
)


if __name__ == "__main__":
    make_datasets(Path(sys.argv[1]))
