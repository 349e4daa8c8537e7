"""Folders of models that a stranger has damaged, with or without intent.

    python -m tests.kit.damaged_models 500 7 Flux Sana

damages 500 copies of small pipelines of these families (without names: of all), with the seed 7,
and loads each. What is not said in one line of ours is printed, and so is what took long or much
memory.
"""

import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wdsprep.errors import WdsprepError

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 10**9, 10**11, 10**20, 10**40, -(10**9), 1.5),
    *(float("nan"), float("inf"), float("-inf"), 1e300),
    *("", "a", "../../x", "/etc/passwd", "\0", "9" * 50, "transformers", "stranger/kernel"),
    *([], [[]], {}, {"a": {}}, [None], ["x", "y"], [1] * 100),
]
KINDS = (*["value"] * 8, *["missing"] * 3, "values", "empty", "cut", "bytes")
KINDS = (*KINDS, "deep", "loop", "folder", "list", "wrapped", "latin")
SPARE_NBYTES = 1_500_000_000
LONGEST_S, LARGEST_NBYTES = 15.0, 300_000_000


def damage(folder: Path, rng: random.Random) -> str:
    """Damage one of the JSON files there; return how."""
    path = rng.choice(sorted(folder.rglob("*.json")))
    kind, data = rng.choice(KINDS), path.read_bytes()
    how = f"{path.relative_to(folder)}: {kind}"
    if kind in ("loop", "folder"):
        path.unlink()
        path.mkdir() if kind == "folder" else path.symlink_to(path.name)
    elif kind in ("value", "missing", "values"):
        value = json.loads(data)
        for _ in range(5 if kind == "values" else 1):
            how += f" {_change(value, kind, rng)}"
        path.write_text(json.dumps(value))
    else:
        path.write_bytes(_rewritten(data, kind, rng))
    return how


def _change(value: Any, kind: str, rng: random.Random) -> str:
    places = sorted(_places(value), key=len)
    if not places:
        return "nothing"
    place = rng.choice(places[:60] if rng.random() < 0.7 else places)
    owner = value
    for name in place[:-1]:
        owner = owner[name]
    if kind == "missing":
        del owner[place[-1]]
        return str(place)
    owner[place[-1]] = odd = rng.choice(ODD)
    return f"{place} = {str(odd)[:60]!r}"


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    named = value.items() if isinstance(value, dict) else ()
    listed = enumerate(value[:20]) if isinstance(value, list) else ()
    for name, one in (*named, *listed):
        yield from _places(one, (*place, name))


def _rewritten(data: bytes, kind: str, rng: random.Random) -> bytes:
    depth = rng.choice([200, 900, 5000])
    made = {
        "empty": b"",
        "cut": data[: rng.randrange(len(data))],
        "deep": b'{"a":' * depth + b"1" + b"}" * depth,
        "list": b"[" + data + b"]",
        "wrapped": b'{"model": ' + data + b"}",
        "latin": data.replace(b"e", b"\xe9", 1),
    }
    if kind != "bytes":
        return made[kind]
    changed = bytearray(data)
    for _ in range(3):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def load(folder: Path, text: str) -> str:
    """Find a model and load what encodes with it; return the line that refuses it, or nothing."""
    from wdsprep.encoding.choices import settled_for
    from wdsprep.encoding.models.encoder import load_encoder
    from wdsprep.encoding.models.find import find_model
    from wdsprep.encoding.recipe import Recipe

    try:
        recipe, model = settled_for(
            Recipe(resolution=64, text=text), find_model(str(folder), text=text), "cpu"
        )
        load_encoder(model, recipe, "cpu")
    except WdsprepError as error:
        return str(error)
    return ""


@contextmanager
def little_memory(nbytes: int = SPARE_NBYTES) -> Iterator[None]:
    """A block in which this process gets no more than so much beside what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def copied(folder: Path, into: Path) -> Path:
    """A copy without the denoiser, which nobody reads."""
    shutil.rmtree(into, ignore_errors=True)
    left_out = shutil.ignore_patterns("transformer", "unet")
    return Path(shutil.copytree(folder, into, ignore=left_out))


def main(count: int, seed: int, names: list[str]) -> int:
    from tests.kit.families import NAMES, small

    rng, tally, made = random.Random(seed), Counter[str](), dict[str, Path]()
    with tempfile.TemporaryDirectory() as root, little_memory():
        for _ in range(count):
            name = rng.choice(names or list(NAMES))
            made.setdefault(name, Path(root, name))
            if not made[name].is_dir():
                small(name, made[name])
            folder = copied(made[name], Path(root, "damaged"))
            how = f"{name}/{damage(folder, rng)}"
            tally[_judged(how, lambda at=folder: load(at, rng.choice(["emb", "tokens"])))] += 1
    print(dict(tally))  # noqa: T201
    return int(tally["unforeseen"] > 0)


def _judged(how: str, act: Callable[[], str]) -> str:
    began, peak = time.monotonic(), _peak_nbytes()
    signal.alarm(100)  # ends the process where it hangs
    try:
        verdict = "refused" if act() else "loaded"
    except Exception:  # noqa: BLE001  which is what is looked for
        verdict = "unforeseen"
        print(how, traceback.format_exc(), sep="\n")  # noqa: T201
    signal.alarm(0)
    took, more = time.monotonic() - began, _peak_nbytes() - peak
    if took > LONGEST_S or more > LARGEST_NBYTES:
        print(f"{how}: {took:.0f} s, {more / 1e6:.0f} MB")  # noqa: T201
    return verdict


def _peak_nbytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
