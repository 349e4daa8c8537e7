"""The modules form layers: imports point up this list, and each heavy package has its place."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

PACKAGE = ROOT / "wdsprep"
LAYERS = [
    ("errors",),
    ("sealed", "given", "limits", "terminal"),
    ("receipts",),
    ("demo",),
    ("samples", "buckets", "filters", "manifest", "progress", "quantiles"),
    ("order",),
    ("store",),
    ("fetch", "tar", "rejects"),
    ("arrays", "edition", "headers"),
    ("colour",),
    ("formats",),
    ("images",),
    ("dataset", "index", "sources", "runners"),
    ("draft", "run", "outage", "spool", "hub", "weights", "noise", "pixels", "image_shards"),
    ("models",),
    ("downloads", "resume", "encoder"),
    ("decoder",),
    ("checks",),
    ("inspecting", "gpus"),
    ("plan", "report"),
    ("judging",),
    ("packer",),
    ("retries",),
    ("repair",),
    ("device", "latents"),
    ("engine", "crews", "pack_crew"),
    ("feeder",),
    ("latent_shard",),
    ("latent_worker",),
    ("pack", "encoding"),
    ("online",),
    ("loader",),
    ("streaming",),
    ("show", "pack_request"),
    ("options",),
    ("cli",),
    ("__main__",),
]
PLACES = {
    "click": {"cli", "options"},
    "boto3": {"store.s3"},
    "botocore": {f"store.{n}" for n in ("s3", "s3_errors", "s3_holds", "s3_reads", "s3_wire")},
    "pycurl": {"fetch.multi", "fetch.outcomes", "fetch.transfer"},
    "PIL": {
        *("images", "colour", "formats", "pixels", "report.pictures"),
        *("demo.paints", "demo.drawings", "demo.pictures"),
    },
    "pyarrow": {"sources.parquet", "sources.table", "pixels", "streaming.source"},
    "ray": {f"runners.{name}" for name in ("actor", "cluster", "metrics", "ray", "room")}
    | {"streaming", "streaming.source", "streaming.trainer", "streaming.works"},
    "numpy": {
        *("order", "order.permute", "order.mixing", "order.passes"),
        *("loader.catalog", "loader.grid", "loader.blocks", "loader.shelf", "loader.effects"),
        *("loader.fetching", "loader.reading", "loader.serving", "loader.shared"),
        "loader.aio",
        "streaming.stages",
        *("checks.rules", "inspecting", "report.pictures", "report.spectrum"),
    },
    "torch": {
        *("noise", "pixels", "encoder", "decoder", "device", "engine"),
        *("loader", "loader.batches", "loader.effects", "loader.plan", "loader.reading"),
        *("loader.serving", "loader.shared", "loader.transfer", "loader.encoded"),
        *("online.batches", "online.images"),
        *("streaming.stages", "streaming.trainer", "streaming.works"),
    },
    "torchvision": set(),
    "diffusers": {"encoder"},
    "transformers": {"encoder"},
    "huggingface_hub": {"hub"},
    "safetensors": {"encoder"},
    "webdataset": set(),
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield node.module or ""


def layer(module: str) -> int:
    top = module.partition(".")[0]
    return next(number for number, names in enumerate(LAYERS) if top in names)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_up_and_never_sideways(path: Path) -> None:
    here = module_name(path)
    for name in imports(path):
        if name.startswith("wdsprep."):
            there = name.removeprefix("wdsprep.")
            same_package = there.partition(".")[0] == here.partition(".")[0]
            assert same_package or layer(there) < layer(here), f"{here} imports {there}"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_heavy_packages_are_imported_in_their_place_only(path: Path) -> None:
    here = module_name(path)
    for name in imports(path):
        allowed = PLACES.get(name.partition(".")[0])
        assert allowed is None or here in allowed, f"{here} imports {name}"


def loaded_by(code: str) -> set[str]:
    script = f"import sys, json\n{code}\njson.dump(sorted(sys.modules), sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return {name.partition(".")[0] for name in json.loads(done.stderr)}


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_nothing_heavy(option: str) -> None:
    loaded = loaded_by(f"from wdsprep.cli import main\nmain(['{option}'])")
    assert loaded & set(PLACES) == {"click"}
    assert not loaded & {"asyncio", "multiprocessing", "concurrent", "http", "importlib_metadata"}


def test_pack_needs_no_torch() -> None:
    loaded = loaded_by("import wdsprep.show.pack, wdsprep.sources.table, wdsprep.runners.local")
    assert not loaded & {"torch", "torchvision", "diffusers", "transformers", "webdataset", "ray"}
