"""The hub library's session where a process forks, such as a DataLoader for its workers.

The library closes its session in each child. For that it takes a lock of the connections, which
another thread of the parent may have held at that moment: nobody is left to give it back, and the
child waits for ever before it has done anything. So there is no session while a process forks: the
child makes one of its own, and the parent goes on with the one it had.
"""

import os
import sys
from typing import Any

LIBRARY, SESSION = "huggingface_hub.utils._http", "_GLOBAL_CLIENT"
_aside: list[Any] = []


def _set_aside() -> None:
    library = sys.modules.get(LIBRARY)
    _aside[:] = [getattr(library, SESSION, None)]
    if _aside != [None]:
        setattr(library, SESSION, None)


def _take_back() -> None:
    """Unless another thread has made a new one meanwhile."""
    (session,) = _aside
    library = sys.modules.get(LIBRARY)
    if session is not None and getattr(library, SESSION, None) is None:
        setattr(library, SESSION, session)


def spare_sessions() -> None:
    """From now on; it is to be called once."""
    os.register_at_fork(before=_set_aside, after_in_parent=_take_back)
