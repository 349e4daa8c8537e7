"""Datasets to damage, check and repair, all in this process."""

import contextlib
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from unittest.mock import patch

from tests.kit.packs import pack, photos, tree
from wdsprep.checks import Finding
from wdsprep.checks.verify import Verified, check_datasets
from wdsprep.runners.base import Event, Quarantined, Unit, Work
from wdsprep.runners.in_process import InProcessRunner

SLICES = ("--samples-per-shard", "4")


class Loud(InProcessRunner):
    """In this process, where a unit that fails is a bug."""

    def run(self, work: Work, units: Iterable[Unit]) -> Generator[Event, None, None]:
        for event in super().run(work, units):
            assert not isinstance(event, Quarantined), event.trace
            yield event


def check(*datasets: Path | str, quick: bool = False) -> Verified:
    here = lambda _units, _nbytes: Loud(max_attempts=1)  # noqa: E731
    return check_datasets([str(dataset) for dataset in datasets], make_runner=here, quick=quick)


def findings(*datasets: Path | str, quick: bool = False) -> list[str]:
    """The file and the kind of each finding."""
    return [named(finding) for finding in check(*datasets, quick=quick).findings]


def named(finding: Finding) -> str:
    return f"{finding.name} {finding.kind.value}"


@contextlib.contextmanager
def packing_here() -> Iterator[None]:
    """No worker processes, which take long to start."""
    with patch(
        "wdsprep.packing.worker_plan.make_runner", lambda *_args, **_options: Loud(max_attempts=1)
    ):
        yield


def pack_here(source: Path, images: Path, *options: str) -> Path:
    with packing_here():
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
