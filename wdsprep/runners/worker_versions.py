"""Whether a worker has the wdsprep of its driver: looked at before anything is unpickled there.

What travels is pickled by name, and names mean something else in another version, or nothing. So
the driver's version goes before it as plain text, and it is the driver's own code that compares:
`installed` reaches a local worker as source, and all of this reaches Ray's workers by value, as the
module is registered for that, with the actor that Ray makes on a node (`WdsprepWorker`). It runs
there whatever is installed, so nothing of wdsprep is imported at its top.
"""

import importlib
import re
import socket
import sys
from collections.abc import Generator, Iterable
from typing import Any

THEN = "run again: it goes on from there"
Installed = tuple[str, str]
"""A version, and the folder where it lies; both empty where there is none."""


def installed() -> tuple[str, str]:
    """Return the version and the folder of the wdsprep that this process imports."""
    import importlib  # a local worker has the source of this function and nothing else

    try:
        package = importlib.import_module("wdsprep")
    except ImportError:
        return "", ""
    return getattr(package, "__version__", ""), next(iter(package.__path__), "")


def refusal(who: str, there: Installed, ours: str, remedy: str, *, because: str = "") -> str:
    version, folder = there
    has = f"wdsprep {version} ({folder}){because}" if version else "no wdsprep"
    return f"{who} has {has}, and its driver has {ours}: {remedy}"


def find_refusal(text: str) -> str:
    """Return the refusal of a version in Ray's text of a worker's error, or "" if there is none."""
    found = re.search(r"^RuntimeError: (.+ has .+, and its driver has .+)$", text, re.MULTILINE)
    return found[1] if found else ""


def import_for_driver(module: str, ours: str, path: Iterable[str], then: str) -> Any:
    """Import and return a module in a worker of Ray, if the wdsprep here is the driver's version.

    Raise RuntimeError if the version is another, or the module cannot be imported. `ours` is the
    driver's version. The driver's `path` is added to that of this process. `then` says what to do
    once the nodes have the same version.
    """
    sys.path.extend(entry for entry in path if entry not in sys.path)
    there, because = installed(), ""
    if there[0] == ours:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            because = f", which cannot be imported: {error}"
    who, remedy = f"the worker on {socket.gethostname()}", f"install wdsprep {ours} on every node"
    # Not an error of wdsprep: there may be none to import it from.
    raise RuntimeError(refusal(who, there, ours, f"{remedy} and {then}", because=because))


class WdsprepWorker:
    """The actor that does units. The Ray dashboard shows its class and its name."""

    def __init__(self, version: str, path: list[str], *arguments: Any) -> None:
        """Take the version and the path of the driver, and the arguments of a `RayWorker`."""
        self._version, self._path, self._arguments = version, path, arguments
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
