"""The example trainer in processes of its own, forked from one that has imported torch already."""

import io
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tests.kit.paths import EXAMPLES

PRELOADED = "train_example"  # what takes the time; found in EXAMPLES


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupt:
    """At these words the trainer sends a signal, to itself or to another one: no race is lost."""

    at: str
    signum: signal.Signals
    pid: int | None = None


class _Said(io.TextIOBase):
    def __init__(self, to: Connection, interrupt: Interrupt | None) -> None:
        self._to, self._interrupt = to, interrupt

    def write(self, text: str) -> int:
        self._to.send(text)
        if self._interrupt and self._interrupt.at in text:
            os.kill(self._interrupt.pid or os.getpid(), self._interrupt.signum)
        return len(text)


def train(
    folder: Path,
    arguments: list[str],
    environment: Mapping[str, str],
    said: Connection,
    interrupt: Interrupt | None,
) -> None:
    """What `tools/examples/train_example.py ARGUMENTS` does in `folder`; its words go to `said`."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    import train_example

    os.chdir(folder)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = ["train_example", *arguments]
    sys.stdout = _Said(said, interrupt)
    train_example.main()
