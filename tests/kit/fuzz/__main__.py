"""Cases in a process of its own, which a library could end: `python -m tests.kit.fuzz SOUND SEED`.

Lines of standard input name cases, as "tar-bytes 7". Each run is a line of JSON on standard output
as it begins, and each case as it has ended. All that may be written is beside the current folder.
"""

import faulthandler
import json
import shutil
import sys
from collections import Counter
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


def play(kind: Kind, number: int, *, seed: int, sound: Path, root: Path, watch: Watch) -> Any:
    """Go through one case; return what there is to know of it."""
    rng = Random(f"{kind.name} {seed} {number}")
    case = root / "cases" / f"{kind.name}-{number}"
    place, out = case / "given", case / "out"
    case.mkdir(parents=True)
    kind.make(sound, place, rng)
    file = kind.change(place, rng) if number != UNCHANGED else ""
    every = kind.runs(place, out)
    kept = tree(place) if kind.is_ours else {}
    wrong, done = Counter[str](), list[Judged]()
    for run in rng.sample(every, min(kind.most, len(every))):
        may = (out, root / "cache", *((place,) if kind.is_ours else ()))
        before = seen(root, *may)
        tell({"begun": f"{kind.name} {number}", "run": run.name})
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


def tell(what: Any) -> None:
    """Say it on what was standard output at the start: commands print to another."""
    print(json.dumps(what), file=sys.__stdout__, flush=True)


def main(sound: Path, seed: int) -> None:
    root, by_name = Path.cwd().parent, {kind.name: kind for kind in KINDS}
    watch = Watch(root)
    for line in sys.stdin.read().splitlines():
        name, _, number = line.partition(" ")
        tell(play(by_name[name], int(number), seed=seed, sound=sound, root=root, watch=watch))


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
