"""The hub library's session where a process forks, such as a DataLoader for its workers.

The library closes its session in each child. For that it takes a lock of the connections, which
another thread of the parent may have held at that moment: nobody is left to give it back, and the
child waits for ever before it has done anything. So a session is closed by the process that opened
it alone. A child makes one of its own.
"""

import os
import sys


def _leave_to_parent() -> None:
    get_session = getattr(sys.modules.get("huggingface_hub.utils"), "get_session", None)
    if get_session is None:
        return
    session, process = get_session(), os.getpid()
    if "close" not in vars(session):
        close = session.close
        session.close = lambda: close() if os.getpid() == process else None


def spare_sessions() -> None:
    """Let a session of the hub's library be closed only by the process that opened it.

    Children forked from now on leave it open. To be called once in a process.
    """
    os.register_at_fork(before=_leave_to_parent)
