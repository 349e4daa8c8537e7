"""Read lists that a user gives, from a file or from Python. They may have 10 million lines."""

import os
from collections.abc import Iterable, Iterator
from contextlib import closing

from wdsprep.errors import UsageError
from wdsprep.store import did_you_mean_place, split_url
from wdsprep.store.base import local_path, stream

NameList = str | os.PathLike[str] | Iterable[str]
"""The path or URL of a list, or the list itself."""


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
