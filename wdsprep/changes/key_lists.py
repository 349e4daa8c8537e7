"""Lists that a user gives, of any length: from a place, which is read in pieces, or from Python.

`remove` takes what stands on each line, since a URL or a source may have blanks in it; `select`
takes words. A list may have 10 million of either.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice

from wdsprep.errors import UsageError
from wdsprep.store import split_url
from wdsprep.store.base import local_path, stream

NameList = str | os.PathLike[str] | Iterable[str]
"""A file with names, or names."""
PIECE_NBYTES, PIECE_NAMES = 4 << 20, 1 << 18
"""The bytes of a file, and the names of Python, that are looked at together."""


def is_file(path: str) -> bool:
    return os.path.isfile(path)  # noqa: PTH113  one of pathlib raises where a list of keys is long


def read_lines(what: str, given: NameList) -> Iterator[str]:
    """Yield the lines without blanks around them, and without empty ones."""
    if not isinstance(given, str | os.PathLike):
        yield from (line.strip() for line in given if line.strip())
        return
    place = os.fspath(given)
    is_missing = local_path(place) is not None and not is_file(local_path(place) or ".")
    if is_missing:
        raise UsageError(f"{place}: no such file: name one with a line for each of the {what}")
    store, name = split_url(place)
    with closing(stream(store, name)) as file:
        for line in file:
            if text := line.decode("utf-8", "surrogateescape").strip():
                yield text


def read_words(given: NameList) -> Iterator[list[bytes]]:
    """Yield the words between blanks, some at a time; names of Python are taken as they are."""
    if not isinstance(given, str | os.PathLike):
        names = (name.encode("utf-8", "surrogateescape") for name in given)
        while some := list(islice(names, PIECE_NAMES)):
            yield some
        return
    store, name = split_url(os.fspath(given))
    cut = b""
    with closing(stream(store, name)) as file:
        while piece := file.read(PIECE_NBYTES):
            words = (cut + piece).split()
            cut = b"" if piece[-1:].isspace() else words.pop()
            yield words
    if cut:
        yield [cut]
