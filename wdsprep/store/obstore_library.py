"""The obstore library, as each process may use it.

Its runtime has threads and an epoll instance. A forked child has none of the threads, so a call
hangs there; and the epoll instance is its parent's, where what the child registers has crashed the
parent. So a process uses only what it has loaded itself. Where somebody else may have used the
library before, be it this process's parent, the extension module is loaded a second time from a
copy, which has a runtime of its own: 40 ms, 15 MB. A DataLoader that forks its workers is the case
that matters.

`_obstore` and its `_store` are private names of obstore; its public modules only pass them on.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from wdsprep.store.remote import PerProcess

NAME = "obstore._obstore"


def own_library() -> Any:
    """Return the extension module of obstore, loaded for this process alone."""
    return _LIBRARY.get()


def _load() -> ModuleType:
    return _copy() if NAME in sys.modules else importlib.import_module(NAME)


_LIBRARY = PerProcess(_load)


def _copy() -> ModuleType:
    """Load the extension module once more.

    The system loads a file once in a process, so this loads a copy of the file. Names that the
    copy sets in `sys.modules` are given back to their modules.
    """
    spec = importlib.util.find_spec(NAME)
    assert spec is not None  # noqa: S101  for mypy: who opens a store has looked
    data = Path(str(spec.origin)).read_bytes()
    before = _modules()
    try:
        return _from_bytes(data)
    finally:
        for name in _modules():
            del sys.modules[name]
        sys.modules.update(before)


def _modules() -> Mapping[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.startswith("obstore")}


def _from_bytes(data: bytes) -> ModuleType:
    """Load the extension module from its bytes, without a file if the system can.

    The folder for temporary files may forbid programs.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("obstore")
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            return _from_file(f"/proc/self/fd/{fd}")
    with tempfile.NamedTemporaryFile(suffix=".so") as temporary:
        temporary.write(data)
        temporary.flush()
        return _from_file(temporary.name)


def _from_file(path: str) -> ModuleType:
    spec = spec_from_loader(NAME, ExtensionFileLoader(NAME, path))
    assert spec is not None  # noqa: S101  for mypy
    assert spec.loader is not None  # noqa: S101  for mypy
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
