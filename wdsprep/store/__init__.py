"""Stores, where bytes live: a local folder, S3, GCS, Azure, the Hugging Face hub or the web.

They are used through calls that cannot leave half a file.

A name in a store is relative, with `/` between its parts. A write becomes visible under its name
only when it is complete; a read that brings fewer bytes than the store holds is an error.

`base` says what every store does, and `schemes` which scheme is which store: `local`, `s3`,
`gcs_azure`, `hub` and `web`. `remote` has what those over a network share:
what is tried again, how other failures are explained, and how a file is read in ranges and uploaded
in parts. Runs take turns by locks (`Store.hold`): `object_locks` makes them of objects where a
store has no locks of its own, and says who has one and how others wait. `spool` is a local file
without a name, for bytes that wait.

In: Names, and bytes to write.
Out: Bytes, listings, and marks that only one process holds at a time.
"""

import functools
import os
import threading
from itertools import islice

from wdsprep.errors import UsageError
from wdsprep.store.base import Store, expand_home, is_web, local_path
from wdsprep.store.schemes import (
    ANY_PLACE,
    check_no_password,
    is_keyed,
    place_scheme,
    root_and_name,
    store_class,
)
from wdsprep.text import nearest_name

MOST_NEIGHBOURS = 10_000
"""The most names beside a wrong path among which a similar one is looked for."""


def open_store(url: str) -> Store:
    """Open the store behind a local path or a URL.

    `schemes` lists the kinds of URL. A file on a web server is a store that holds this file
    alone, and can only be read.
    """
    path = local_path(url)
    if path is not None:
        from wdsprep.store.local import LocalStore

        return LocalStore(path or ".")
    scheme = place_scheme(url)
    if not scheme:
        raise UsageError(f"{url}: not a place wdsprep can read or write: give {ANY_PLACE}")
    check_no_password(url)
    store: Store = store_class(scheme)(url)
    return store


def split_url(url: str) -> tuple[Store, str]:
    """Return the store that holds the file behind `url`, and the file's name in it.

    The name is "" if `url` is a whole bucket or repository. Whether the file exists is not
    checked.
    """
    if is_web(url):
        from wdsprep.store.web import WebStore

        alone = WebStore(url)
        return alone, alone.name
    has_name = is_keyed(url) and root_and_name(url.rstrip("/"))[1]
    if local_path(url) is None and not has_name:
        return open_store(url), ""  # which holds files and is none, or says that it is no place
    folder, _, name = url.rstrip("/").rpartition("/")
    if not folder:
        folder = "/" if url.startswith("/") else "."
    return open_store(folder), name


def did_you_mean_place(url: str) -> str:
    """Return ` (did you mean PLACE?)` with a local neighbour of a similar name, else ""."""
    path = local_path(url)
    if path is None:
        return ""
    parent, slash, name = path.rstrip(os.sep).rpartition(os.sep)
    try:
        entries = islice(expand_home(parent or slash or ".").iterdir(), MOST_NEIGHBOURS)
        neighbours = [entry.name for entry in entries if entry.name != name]
    except OSError:
        return ""
    near = nearest_name(name, neighbours)
    return f" (did you mean {parent}{slash}{near}?)" if near else ""


_OPENING = threading.Lock()  # lru_cache alone lets many threads open the same, which is slow on S3
_open_once = functools.lru_cache(maxsize=8)(open_store)


def shared_store(url: str) -> Store:
    """Return the store at `url`, which this process may have opened before.

    The stores that were opened last are kept, as workers read many files of one.
    """
    with _OPENING:
        return _open_once(url)
