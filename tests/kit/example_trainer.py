"""The example trainer in processes of its own, forked from one that has imported torch already."""

import io
import os
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from tests.kit.paths import EXAMPLES

PRELOADED = "train_example"  # what takes the time; found in EXAMPLES


class _Said(io.TextIOBase):
    def __init__(self, to: Connection) -> None:
        self._to = to

    def write(self, text: str) -> int:
        self._to.send(text)
        return len(text)


def train(
    folder: Path, arguments: list[str], environment: Mapping[str, str], said: Connection
) -> None:
    """What `tools/examples/train_example.py ARGUMENTS` does in `folder`; its words go to `said`."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    import train_example

    os.chdir(folder)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = ["train_example", *arguments]
    sys.stdout = _Said(said)
    train_example.main()
