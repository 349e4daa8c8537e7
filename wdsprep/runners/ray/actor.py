"""The actor that Ray makes on a node, before it is known which wdsprep the node has.

It is pickled by value, as the runner registers this module for that, so it comes to life on a node
with another version as well, and says so.
"""

from collections.abc import Generator, Mapping
from typing import Any

from wdsprep.runners.worker_versions import import_for_driver

THEN = "run again: it goes on from there"


class WdsprepWorker:
    """The actor that does units. The Ray dashboard shows its class and its name."""

    def __init__(
        self, version: str, work: bytes, path: list[str], tags: Mapping[str, str], others: int = 1
    ) -> None:
        self._version, self._path = version, path
        self._arguments = work, tags, others
        self._worker: Any = None

    def open(self) -> Generator[Any, None, None]:
        module = import_for_driver("wdsprep.runners.ray.worker", self._version, self._path, THEN)
        self._worker = module.RayWorker(*self._arguments)
        yield from self._worker.open()

    def do(self, unit: Any) -> Generator[Any, None, None]:
        yield from self._worker.do(unit)

    def stop(self) -> None:
        """Stop the units at their next yield, and then close the work.

        If a unit has not stopped after 4 s, answer without closing the work.
        """
        if self._worker:
            self._worker.stop()
