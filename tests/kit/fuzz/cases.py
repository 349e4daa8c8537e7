"""What a case is: a sound copy, one file of it changed, and runs over it."""

import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import wdsprep
from tests.kit.encodes import in_this_process
from tests.kit.fuzz.mutations import changed
from tests.kit.packs import packing_here
from wdsprep.cli import main
from wdsprep.errors import WdsprepError

HERE = ("--device", "cpu", "--runner", "local", "--workers", "1")
TOY = ("--model", "tiny", *HERE)


Make = Callable[[Path, Path, Random], None]


class Run(NamedTuple):
    """A command, or a use of the library, that ends with an exit code."""

    name: str
    act: Callable[[], int]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is copied, how a file of it is changed, and what reads it."""

    name: str
    make: Make
    """Makes a folder out of what `make_sound` has made."""
    change: Callable[[Path, Random], str]
    """Changes a file of it, and returns which."""
    runs: Callable[[Path, Path], Sequence[Run]]
    """All that read it and write to another folder."""
    most: int = 3
    """Of these, so many are drawn for each case."""
    is_ours: bool = False
    """Whether runs may change what they read: `remove` and `repair` are made for it."""


def command(*words: str | Path) -> Run:
    """Run a command in this process, with its workers in it."""
    texts = [str(word) for word in words]

    def act() -> int:
        with packing_here(), in_this_process():
            return main(texts)

    return Run(texts[0], act)


def library(name: str, use: Callable[[], Any]) -> Run:
    """Use the library, whose errors are for this like those of commands."""

    def act() -> int:
        try:
            use()
        except WdsprepError as error:
            sys.stderr.write(f"wdsprep: {error}\n")
            return error.exit_code
        return 0

    return Run(name, act)


def serve(batches: Iterable[Any], most: int = 3) -> None:
    for number, batch in enumerate(batches, 1):
        assert batch
        if number == most:
            break


def load_some(place: Path, most: int = 3, **options: Any) -> Run:
    """Load a few batches."""
    name = f"load({', '.join(options)})"
    return library(name, lambda: serve(wdsprep.load(place, global_batch=2, **options), most))


def copy_ours(*names: str, write: Callable[[Path], None] = lambda _place: None) -> Make:
    """Copy datasets and files of ours, and write what is given with them."""

    def make(sound: Path, place: Path, _rng: Random) -> None:
        place.mkdir()
        for name in dict.fromkeys(names):
            source = sound / "datasets" / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, place / name)
        write(place)

    return make


def change(*patterns: str) -> Callable[[Path, Random], str]:
    """Change one of the files of these patterns; of tables that say the same, keep that one."""

    def act(place: Path, rng: Random) -> str:
        paths = sorted(p for each in patterns for p in place.rglob(each) if p.is_file())
        path = rng.choice(paths or sorted(place.rglob("config.json")))
        path.write_bytes(changed(path.read_bytes(), path.name, rng))
        for other in path.parent.glob("t.*"):
            if path.name.startswith("t.") and other != path:
                other.unlink()
        return path.relative_to(place).as_posix()

    return act
