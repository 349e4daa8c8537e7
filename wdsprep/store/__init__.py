"""Where bytes live: a local folder, S3 or the web, behind calls that cannot leave half a file.

A name in a store is relative, with `/` between its parts. A write becomes visible under its name
only when it is complete; a read that brings fewer bytes than the store holds is an error.

`base` says what every store does; `local`, `s3` and `web` are the stores, and `ranges` is how a
server is asked for a part of a file. `holds` is how runs take turns, `spool` a local file without a
name for bytes that wait.

In: Names, and bytes to write.
Out: Bytes, listings, and marks that only one process holds at a time.
Uses: no other room.
"""

import functools
import re
import threading

from wdsprep.errors import UsageError
from wdsprep.store.base import Store, is_web, local_path


def open_store(url: str) -> Store:
    """The store behind a local path or an `s3://bucket/prefix` URL; of a file on a web server, one
    that holds it alone and can only be read."""
    path = local_path(url)
    if path is not None:
        from wdsprep.store.local import LocalStore

        return LocalStore(path or ".")
    if re.match(r"s3://", url, re.IGNORECASE):
        from wdsprep.store.s3 import S3Store

        return S3Store(url)
    if is_web(url):
        from wdsprep.store.web import WebStore

        return WebStore(url)
    raise UsageError(f"{url}: not a place wdsprep can read or write: give a local path or s3://")


def split_url(url: str) -> tuple[Store, str]:
    """The store that holds the file behind `url`, and the file's name in it."""
    if is_web(url):
        from wdsprep.store.web import WebStore

        alone = WebStore(url)
        return alone, alone.name
    folder, _, name = url.rstrip("/").rpartition("/")
    if not folder:
        folder = "/" if url.startswith("/") else "."
    return open_store(folder), name


_OPENING = threading.Lock()  # lru_cache alone lets many threads open the same, which is slow on S3
_open_once = functools.lru_cache(maxsize=8)(open_store)


def opened(url: str) -> Store:
    """The store at `url`, opened once in each process: workers read many items from it."""
    with _OPENING:
        return _open_once(url)
