"""Cases in a process of its own, which a library could end: `play_all`.

All that may be written is beside its current folder.
"""

import faulthandler
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import torch

from tests.kit.damaged import restore
from tests.kit.fuzz.cases import Kind
from tests.kit.fuzz.judge import Judged, Watch, judged, seen
from tests.kit.fuzz.kinds import KINDS
from tests.kit.packs import tree

UNCHANGED = -1
"""The number of the case in which nothing is changed."""


def play(kind: Kind, number: int, seed: int, watch: Watch, tell: Callable[[Any], None]) -> Any:
    """Go through one case; return what there is to know of it."""
    rng, root = Random(f"{kind.name} {seed} {number}"), Path.cwd().parent
    case = root / "cases" / f"{kind.name}-{number}"
    place, out = case / "given", case / "out"
    case.mkdir(parents=True)
    kind.make(root / "sound", place, rng)
    file = kind.change(place, rng) if number != UNCHANGED else ""
    every = kind.runs(place, out)
    kept = tree(place) if kind.is_ours else {}
    wrong, done = Counter[str](), list[Judged]()
    for run in rng.sample(every, min(kind.most, len(every))):
        may = (out, root / "cache", *((place,) if kind.is_ours else ()))
        before = seen(root, *may)
        tell({"run": run.name})
        result = judged(run, watch)
        touched = {path for path, _ in before.items() ^ seen(root, *may).items()}
        found = [*result.wrong, *(f"it touched {path}" for path in sorted(touched)[:3])]
        wrong.update(f"{run.name}: {one}" for one in (*found, *_in_rejects(out)))
        done.append(result)
        shutil.rmtree(out, ignore_errors=True)
        if kind.is_ours:
            restore(place, kept)
    shutil.rmtree(case, ignore_errors=True)
    shutil.rmtree(root / "cache", ignore_errors=True)
    runs = [[one.name, one.code, one.seconds, one.nbytes] for one in done]
    return {"kind": kind.name, "number": number, "file": file, "runs": runs, "wrong": [*wrong]}


def _in_rejects(out: Path) -> list[str]:
    """Return lines of rejects that tell of a fault of ours."""
    lines = [line for path in out.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return [line[:300] for line in lines if "a bug" in line or "Traceback" in line]


def play_all(to: Connection, cases: Sequence[tuple[str, int]], seed: int, root: Path) -> None:
    """Tell of each run as it begins, and of each case as it has ended."""
    words = os.open(root / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(words, stream)
    faulthandler.enable()
    os.chdir(root / "cwd")
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    by_name, watch = {kind.name: kind for kind in KINDS}, Watch(root)
    for name, number in cases:
        to.send(play(by_name[name], number, seed, watch, to.send))
