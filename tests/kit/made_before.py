"""What older code wrote, kept beside this file, and how a test goes on from a copy of it."""

import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kit.encodes import in_this_process
from wdsprep.cli import main

KIT = Path(__file__).parent
WHEN = 1_735_689_600  # the first second of 2025
MODEL = ("--model", "tiny", "--device", "cpu", "--runner", "local", "--workers", "1")
Fed = Iterable[dict[str, Any]]


def made_by(version: str) -> Path:
    return KIT / f"made_by_{version.replace('.', '_')}"


def copied(made: Path, to: Path) -> Path:
    """A copy in which all files have their time, which git does not keep.

    By programs of the system, which copy a thousand files in a tenth of Python's time.
    """
    subprocess.run(["cp", "-r", str(made), str(to)], check=True)
    date(to)
    return to


def date(home: Path) -> None:
    """Give each file the same time: the inputs of a dataset say when its files were changed."""
    touch = ["touch", "--date", f"@{WHEN}"]
    subprocess.run(["find", str(home), "-type", "f", "-exec", *touch, "{}", "+"], check=True)


def run(home: Path, *words: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    """A command as a user gives it, in the folder of the copy."""
    command = [sys.executable, "-m", "wdsprep", *words]
    done = subprocess.run(
        command, cwd=home, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def run_here(home: Path, *words: str) -> None:
    """The same in this process, which loads the libraries of models once for all tests."""
    with pytest.MonkeyPatch.context() as patch, in_this_process():
        patch.chdir(home)
        assert main([*words]) == 0


# --- what is there


def tree(root: Path) -> dict[str, bytes]:
    """Every file of a dataset, hidden ones too."""
    paths = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def untouched(root: Path) -> set[str]:
    """The files that nobody has written since."""
    paths = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)) for path in paths if path.stat().st_mtime == WHEN}


def shards(root: Path) -> set[str]:
    return {name for name in tree(root) if name.endswith(".tar")}


def manifest(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "wdsprep.json").read_bytes())
    return found


def damage(tar: Path) -> None:
    with tar.open("r+b") as file:
        file.seek(700)
        file.write(b"damage")


# --- batches


def noted(batches: Fed, count: int) -> list[dict[str, Any]]:
    """What tells batches apart, as JSON has it: the keys, and how each array of each begins."""
    return [
        {
            name: [note(value) for value in values]
            if isinstance(values, list | tuple | torch.Tensor)
            else note(values)
            for name, values in batch.items()
            if name != "__url__"
        }
        for batch in itertools.islice(batches, count)
    ]


def note(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [round(number, 3) for number in value.float().flatten()[::61][:6].tolist()]
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return value


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> bool:
    """To what processors and versions of libraries may differ by; another sample differs by far."""
    return len(found) == len(wanted) and all(
        a.keys() == b.keys() and all(close(a[name], b[name]) for name in a)
        for a, b in zip(found, wanted, strict=True)
    )


def close(one: Any, other: Any) -> bool:
    if one and isinstance(one, list) and isinstance(one[0], list):
        if list(map(len, one)) != list(map(len, other)):
            return False
        return all(np.allclose(a, b, atol=2e-2) for a, b in zip(one, other, strict=True))
    return bool(one == other)
