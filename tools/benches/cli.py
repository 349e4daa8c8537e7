"""How long commands take to answer, beside Python itself doing nothing."""

import sys
from collections.abc import Iterator
from pathlib import Path

from tools.benches import Group, Rival, Role

PROGRAM = Path(sys.executable).with_name("wdsprep")


def groups(_home: Path, _scale: float) -> Iterator[Group]:
    yield Group(
        name="cli",
        title="until it answers",
        rivals=[
            Rival(name="wdsprep --help", command=[PROGRAM, "--help"], role=Role.OURS),
            Rival(name="wdsprep --version", command=[PROGRAM, "--version"], role=Role.OURS),
            Rival(name="python -c pass", command=[sys.executable, "-c", "pass"], role=Role.LIMIT),
        ],
    )
