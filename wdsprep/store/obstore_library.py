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
from collections.abc import Mapping
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from wdsprep.store.remote import PerProcess

NAME = "obstore._obstore"


def _load() -> Any:
    """Load the extension module, or where it has been loaded before a copy of it.

    The system loads a file once in a process, so the copy is a file in memory: the folder for
    temporary files may forbid programs. Names that it sets in `sys.modules` are given back to their
    modules.
    """
    if NAME not in sys.modules:
        return importlib.import_module(NAME)
    before = _modules()
    with os.fdopen(os.memfd_create("obstore"), "wb") as file:
        file.write(Path(str(before[NAME].__file__)).read_bytes())
        file.flush()
        path = f"/proc/self/fd/{file.fileno()}"
        loader = ExtensionFileLoader(NAME, path)
        try:
            module = module_from_spec(ModuleSpec(NAME, loader, origin=path))
            loader.exec_module(module)
        finally:
            for name in _modules():
                del sys.modules[name]
            sys.modules.update(before)
    return module


def _modules() -> Mapping[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.startswith("obstore")}


own_library = PerProcess(_load).get
"""Returns the extension module of obstore, loaded for this process alone."""
