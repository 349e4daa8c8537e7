"""The benchmarks behind tools/bench: one module for each command that is measured.

A module has `groups(home, scale)`, which makes its data in the folder `home`, yields one group of
rivals after another, and clears up behind each. `scale` multiplies the amount of data.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1]
ROOT = TOOLS.parent
CORES = len(os.sched_getaffinity(0))


class Role(Enum):
    OURS = "wdsprep"
    RIVAL = "rival"
    LIMIT = "limit"


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A command to measure. It may say in its last line how long the part that counts took, as
    `took SECONDS`; else all of it counts, with the start of its process."""

    name: str
    command: Sequence[str | Path]
    role: Role = Role.RIVAL
    env: Mapping[str, str] = field(default_factory=dict)
    leaves: Path | None = None
    """What goes after each round."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rivals that do the same work: `count` of `unit`, or one thing whose time counts."""

    name: str
    title: str
    rivals: Sequence[Rival]
    unit: str = "samples"
    count: float = 0
    rounds: int = 0
    """At most so many, where one takes long."""
    prepare: Callable[[], object] | None = None
    """What makes its data, where that takes long: a group that is left out makes none."""
    targets: Mapping[str, float] = field(default_factory=dict)
    """How many times as fast as this rival the first is meant to be."""


def call(function: Callable[..., object], *arguments: object, python: Path | str = "") -> list[str]:
    """The command that calls a function of a module here, in a process of its own."""
    words = json.dumps([str(a) if isinstance(a, Path) else a for a in arguments])
    where = f"{function.__module__}:{function.__name__}"
    return [str(python or sys.executable), str(TOOLS / "bench"), "call", where, words]


def ours(*words: str | Path) -> list[str]:
    """A `wdsprep` command."""
    return [sys.executable, "-m", "wdsprep", *map(str, words)]


def took(seconds: float) -> None:
    """Say how long the part that counts took."""
    print(f"took {seconds}", flush=True)


def note(text: str) -> None:
    """Say what stands below the table."""
    print(f"note {text}", flush=True)
