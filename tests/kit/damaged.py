"""Datasets to damage, check and repair, all in this process."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from tests.kit.encodes import positions_in
from tests.kit.packs import Loud, pack, photos, tree
from wdsprep.checks.findings import Finding
from wdsprep.checks.options import VerifyOptions
from wdsprep.checks.verify import Verified, check_datasets
from wdsprep.dataset.file_names import index_name, receipt_name, table_name, unit_of_file
from wdsprep.dataset.manifest import Receipt, Shard
from wdsprep.dataset.sample_table import LATENT_COLUMNS, TableWriter
from wdsprep.dataset.samples import parse_object
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.stored_dataset import read_manifest, read_receipt, write_manifest
from wdsprep.dataset.tar.read import file_tape, read_samples
from wdsprep.dataset.tar.write import TarWriter
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes

SLICES = ("--samples-per-shard", "4")
Fields = dict[str, bytes]
Samples = list[tuple[str, Fields]]


def check(*datasets: Path | str, quick: bool = False) -> Verified:
    with patch("wdsprep.runners.make_runner.runner_for", lambda *_, **__: Loud(max_attempts=1)):
        return check_datasets([str(dataset) for dataset in datasets], VerifyOptions(quick=quick))


def findings(*datasets: Path | str, quick: bool = False) -> list[str]:
    """The file and the kind of each finding."""
    return [named(finding) for finding in check(*datasets, quick=quick).findings]


def named(finding: Finding) -> str:
    return f"{finding.name} {finding.kind.value}"


def pack_here(source: Path, images: Path, *options: str) -> Path:
    return pack(source, images, *SLICES, *options)


def source_of_photos(root: Path) -> Path:
    """Photos, and two files that are none, whose rejects lie in two slices."""
    photos(root, 12)
    for name in ("0/zzz.jpg", "zzz.jpg"):
        (root / name).write_bytes(b"no image\n")
    return root


def restore(root: Path, files: dict[str, bytes]) -> None:
    """Make a dataset hold exactly these files again."""
    for name in tree(root).keys() - files.keys():
        (root / name).unlink()
    for name, data in files.items():
        path = root / name
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def check_flips(root: Path, files: dict[str, bytes], kind: str, *, rounds: int) -> set[str]:
    """Flip a bit in one file of each unit, and check that these are found, and nothing else.

    Small files are hit as often as large ones, every other time. Return the names of the files.
    """
    rng, hit = random.Random(7), set[str]()
    by_unit: dict[str, list[str]] = {}
    for name in sorted(name for name, data in files.items() if data):
        by_unit.setdefault(unit_of_file(name, kind), []).append(name)
    for number in range(rounds):
        bits = {}
        for names in by_unit.values():
            sizes = [len(files[name]) for name in names]
            (name,) = rng.choices(names, sizes if number % 2 else None)
            bits[name] = rng.randrange(8 * len(files[name]))
            flip(root / name, bits[name])
        assert [finding.name for finding in check(root).findings] == sorted(bits), bits
        restore(root, files)
        hit |= bits.keys()
    return hit


def state(root: Path, receipt: Receipt) -> None:
    """Let a dataset say this of a unit, in its receipt and in its manifest."""
    store = open_store(str(root))
    write_bytes(store, receipt_name(receipt.unit), receipt.to_bytes())
    manifest = read_manifest(store)
    assert manifest is not None
    receipts = [receipt if r.unit == receipt.unit else r for r in manifest.receipts]
    write_manifest(store, replace(manifest, receipts=receipts))


def rewrite(root: Path, unit: str, change: Callable[[Samples], Samples]) -> None:
    """Write the first shard of a unit again with other samples, and all that speaks of it.

    The positions of latents stay. Images keep their table.
    """
    store = open_store(str(root))
    receipt = read_receipt(store, unit)
    old, *others = receipt.shards
    is_of_latents, table = receipt.dataset == "latents", TableWriter(LATENT_COLUMNS)
    rows = positions_in(root, old.name) if is_of_latents else [*range(old.samples)]
    with file_tape(root / old.name) as tape:
        samples = [(sample.key, sample.fields) for sample in read_samples(tape, old.name)]
    with store.write(old.name) as sink, TarWriter(sink) as tar:
        for row, (key, fields) in zip(rows, change(samples), strict=False):
            tar.add(key, fields.items())
            table.add(key, {**(parse_object(fields.get("json", b"")) or {}), "row": row})
        tar.finish()
    write_bytes(store, index_name(old.name), tar.index)
    files = dict(receipt.files)
    if is_of_latents:
        write_bytes(store, name := table_name(old.name), data := table.finish())
        files[name] = hex_digest(data)
    shard = Shard(name=old.name, samples=tar.samples, nbytes=tar.nbytes, digest=tar.digest)
    state(root, replace(receipt, shards=(shard, *others), files=files))
