"""Read lists of any length that a user gives: from a file, which is read in pieces, or from Python.

`remove` takes lines, since a URL or a source may have blanks in it; `select` takes words. A list
may have 10 million of either.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice

from wdsprep.errors import UsageError
from wdsprep.store import did_you_mean_place, split_url
from wdsprep.store.base import local_path, stream

NameList = str | os.PathLike[str] | Iterable[str]
"""The path or URL of a list, or the list itself."""
PIECE_NBYTES, PIECE_NAMES = 4 << 20, 1 << 18
"""The bytes of a file, and the items of a list, that are read at a time."""


def is_file(path: str) -> bool:
    return os.path.isfile(path)  # noqa: PTH113  one of pathlib raises where a list of keys is long


def read_lines(what: str, given: NameList) -> Iterator[str]:
    """Yield the lines of a list, without blanks around them and without empty lines.

    Raise UsageError if a local file is missing. `what` names the items in the message.
    """
    if not isinstance(given, str | os.PathLike):
        yield from (line.strip() for line in given if line.strip())
        return
    place = os.fspath(given)
    is_missing = local_path(place) is not None and not is_file(local_path(place) or ".")
    if is_missing:
        meant = did_you_mean_place(place)
        raise UsageError(
            f"{place} does not exist: give a file with one of the {what} on each line{meant}"
        )
    store, name = split_url(place)
    with closing(stream(store, name)) as file:
        for line in file:
            if text := line.decode("utf-8", "surrogateescape").strip():
                yield text


def read_words(
    given: NameList, *, piece_nbytes: int = PIECE_NBYTES, piece_names: int = PIECE_NAMES
) -> Iterator[list[bytes]]:
    """Yield the words of a file, or the items of a list in UTF-8, as lists of several at a time.

    Words end at any white space. Each list holds the words in `piece_nbytes` of the file, or
    `piece_names` items.
    """
    if not isinstance(given, str | os.PathLike):
        names = (name.encode("utf-8", "surrogateescape") for name in given)
        while some := list(islice(names, piece_names)):
            yield some
        return
    store, name = split_url(os.fspath(given))
    cut = b""
    with closing(stream(store, name)) as file:
        while piece := file.read(piece_nbytes):
            words = (cut + piece).split()
            cut = b"" if piece[-1:].isspace() else words.pop()
            yield words
    if cut:
        yield [cut]
