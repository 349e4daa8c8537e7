"""Datasets to damage, check and repair, all in this process."""

from pathlib import Path
from unittest.mock import patch

from tests.kit.packs import Loud, pack, photos, tree
from wdsprep.checks.findings import Finding
from wdsprep.checks.options import VerifyOptions
from wdsprep.checks.verify import Verified, check_datasets

SLICES = ("--samples-per-shard", "4")


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


def source_of_photos(root: Path, count: int = 12) -> Path:
    """Photos, and two files that are none, whose rejects lie in two slices."""
    photos(root, count)
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
