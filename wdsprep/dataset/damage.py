"""What to do about a file of a dataset that is missing, or is not what it has to be."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from wdsprep.errors import FormatError, NewerFormatError, NotFoundError, ShortReadError, TarError
from wdsprep.store.base import Store
from wdsprep.text import command

Found = TypeVar("Found")
SAYS_MORE = '"wdsprep '


@contextmanager
def naming_repair(store: Store) -> Iterator[None]:
    """Let an error about a file of the dataset in a store say what mends it, if it does not."""
    try:
        yield
    except NewerFormatError:
        raise
    except (FormatError, NotFoundError, ShortReadError, TarError) as error:
        if SAYS_MORE in str(error):
            raise
        next_step = f"run {command('repair', store.url)}, then the same command again"
        raise type(error)(f"{error}: {next_step}") from error


def readable(store: Store, found: Iterator[Found]) -> Iterator[Found]:
    """What is read of the dataset in a store, with the same for errors while it is read."""
    while True:
        with naming_repair(store):
            try:
                one = next(found)
            except StopIteration:
                return
        yield one
