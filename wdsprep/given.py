"""Numbers that a caller gives: NumPy's become Python's, which JSON knows, and others are refused in
one line."""

from numbers import Real
from operator import index
from typing import Any

from wdsprep.errors import UsageError


def whole(name: str, given: Any) -> int:
    try:
        return int(index(given))
    except TypeError:
        raise UsageError(f"{name} {given!r}: give a whole number") from None


def whole_or_none(name: str, given: Any) -> int | None:
    return None if given is None else whole(name, given)


def real(name: str, given: Any) -> Any:
    if not isinstance(given, Real):
        raise UsageError(f"{name} {given!r}: give a number")
    return given
