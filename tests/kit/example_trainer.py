"""The example trainers in processes of their own, forked from one that has imported torch."""

import contextlib
import importlib
import io
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

from tests.kit.paths import EXAMPLES

PROGRAMS = ("train_example", "lora_sdxl", "lora_flux", "lora_edit")
"""In EXAMPLES; what they import takes the time."""
LIMIT_S = 300


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


@dataclass(frozen=True, slots=True)
class Trainer:
    process: ForkServerProcess
    said: Connection

    def wait_for(self, words: str) -> None:
        while words not in self.said.recv():
            assert self.said.poll(LIMIT_S)

    def end(self, code: int = 0) -> None:
        self.process.join(LIMIT_S)
        assert self.process.exitcode == code


@contextlib.contextmanager
def running(
    program: str,
    folder: Path,
    words: Sequence[str],
    interrupt: Interrupt | None = None,
    **environment: str,
) -> Iterator[Trainer]:
    """Start `tools/examples/PROGRAM.py WORDS` in the folder; leaving it kills the process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PROGRAMS])
    ours, its = context.Pipe()
    arguments = (program, folder, list(words), environment, its, interrupt)
    process = context.Process(target=train, args=arguments)
    path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    with mock.patch.dict(os.environ, own, CUDA_VISIBLE_DEVICES=""):  # a GPU's sums vary
        process.start()
    its.close()
    try:
        yield Trainer(process, ours)
    finally:
        process.kill()
        process.join()
        ours.close()


def world_of(size: int) -> dict[str, str]:
    """Return what the processes of such a world find in their environment, but for `RANK`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return world | {"GLOO_SOCKET_IFNAME": "lo"}


def train(
    program: str,
    folder: Path,
    arguments: list[str],
    environment: Mapping[str, str],
    said: Connection,
    interrupt: Interrupt | None,
) -> None:
    """Run the program in the folder; its words go to `said`."""
    sys.path.insert(0, str(EXAMPLES))
    module = importlib.import_module(program)
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv = [program, *arguments]
    sys.stdout = _Said(said, interrupt)
    module.main()
