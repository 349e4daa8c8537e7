"""What to do about a file of a dataset that is missing, or is not what it has to be.

Readers raise a `DamageError`, which says where and why; a command, or a room, adds the next step
around its reads.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.errors import (
    DamageError,
    FormatError,
    NotFoundError,
    OtherFormatError,
    ShortReadError,
    TarError,
)
from wdsprep.store.base import Store
from wdsprep.text import command

UNLIKE_RECEIPT = "it is not what its receipt says"
DELETE_STEP = "delete it, and run the same command again"
"""The next step where a command makes a file again that is not there."""


def repair_step(url: str, again: str = "the same command") -> str:
    """Return the next step for a damaged file: `repair`, then the command `again`."""
    return f"run {command('repair', url)}, then {again} again"


def verify_step(*urls: str) -> str:
    """Return the next step for damage that only a check of whole datasets explains."""
    return f"run {command('verify', *urls)}"


@contextmanager
def naming_next_step(next_step: str) -> Iterator[None]:
    """Add a next step to an error about a dataset's file that the block raises without one.

    An error about a format that is too new stays as it is.
    """
    try:
        yield
    except OtherFormatError:
        raise
    except (FormatError, NotFoundError, ShortReadError, TarError) as error:
        error.with_next_step(next_step)
        raise


@contextmanager
def naming_place(place: str) -> Iterator[None]:
    """Turn an error about a sample of a tar into a DamageError that names the tar."""
    try:
        yield
    except BadSampleError as error:
        raise DamageError(place, str(error), error.key) from error


def naming_repair(store: Store) -> AbstractContextManager[None]:
    """Add the commands that mend a dataset to errors about its files."""
    return naming_next_step(repair_step(store.url))
