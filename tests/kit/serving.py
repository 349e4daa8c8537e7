"""Servers of Python's own kind in a thread of their own, for as long as a block runs."""

import contextlib
import threading
from collections.abc import Iterator
from socketserver import BaseServer
from typing import TypeVar

Kind = TypeVar("Kind", bound=BaseServer)


@contextlib.contextmanager
def serving(server: Kind) -> Iterator[Kind]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
