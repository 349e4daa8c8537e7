"""Describe the settings of a dataset that differ from those of a call.

A dataset knows its settings by their names, and describes a change by the name and both values. The
options of a call describe it in the words of its user: by the option that a setting comes from,
which may have another name, or by words of its own (`About.settings`). Settings that no option of
the command has are described by their names.
"""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from wdsprep.errors import OtherSettingsError

if TYPE_CHECKING:
    from wdsprep.options import Option

Changes: TypeAlias = Mapping[str, tuple[Any, Any]]
"""The settings that have changed, each with its old and its new value."""
Description: TypeAlias = str | Callable[[Any, Any], str]
"""The description of a change: a text, or a function of the old and the new value."""
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingWords:
    """The words that describe a change of a setting.

    Of all changes only those of the highest rank are described. A change is left out too if one of
    the settings in `unless` has changed, since that says more.
    """

    say: Description
    rank: int = 0
    unless: Collection[str] = ()


ABOVE, BELOW = 1, -1
"""The ranks of a setting that decides which others exist, and of one that follows from others."""


def follows(name: str) -> SettingWords:
    """Return the words for a setting that follows from others, which are described instead."""
    return SettingWords(say=f"other {name}", rank=BELOW)


def words_of(options: Iterable["Option"]) -> dict[str, SettingWords]:
    """Return the words for the settings that options decide, by the name of the setting."""
    own = list(options)
    named = {one.name: SettingWords(say=partial(say_named, one.spelled)) for one in own}
    return named | {name: said for one in own for name, said in one.about.settings.items()}


@contextmanager
def describing_changes(options: Iterable["Option"]) -> Iterator[None]:
    """Reword an OtherSettingsError that the block raises, and raise it again.

    Its message then describes the changed settings by the options of the call. An error that does
    not know the changes keeps its message.
    """
    try:
        yield
    except OtherSettingsError as error:
        if error.changes:
            error.say(say_changes(error.changes, words_of(options)))
        raise


def say_changes(changes: Changes, words: Mapping[str, SettingWords]) -> list[str]:
    """Return a description of each change that no other change outranks, in the given words.

    A change is left out if a setting in its `SettingWords.unless` has changed too. A setting
    without words has rank 0, and is described by its name, and both values if they are readable.
    """
    known = {name: words.get(name) or SettingWords(say=_describe_plainly(name)) for name in changes}
    rank = max((each.rank for each in known.values()), default=0)
    told = (name for name, each in known.items() if each.rank == rank)
    told = (name for name in told if not {*known[name].unless} & changes.keys())
    return [_describe(known[name].say, *changes[name]) for name in told]


def _describe(say: Description, before: Any, now: Any) -> str:
    return say if isinstance(say, str) else say(before, now)


def say_plainly(changes: Changes) -> list[str]:
    """Return a line for each change: the name of the setting, and both values if readable."""
    return say_changes(changes, {})


def say_both(changes: Changes) -> list[str]:
    """Return a line for each readable setting in which two datasets differ, with both values.

    Settings whose values people cannot read usually follow from others. They are listed, without
    values, only if no readable setting differs.
    """
    shown = {
        name: f"{name} {say_value(one) or 'none'} and {say_value(other) or 'none'}"
        for name, (one, other) in changes.items()
        if _is_plain(one) and _is_plain(other)
    }
    return [*shown.values()] or [f"other {name}" for name in changes]


def _describe_plainly(name: str) -> Description:
    def said(before: Any, now: Any) -> str:
        if not (_is_plain(before) and _is_plain(now)):
            return f"other {name}"
        return say_named(name, before, now)

    return said


def _is_plain(value: Any) -> bool:
    """Return whether people can read a value.

    They cannot read mappings, digests, and lists of anything but texts and numbers.
    """
    if isinstance(value, list):
        return all(isinstance(one, str | int | float) for one in value)
    return not isinstance(value, Mapping) and not DIGEST.fullmatch(str(value))


def say_named(name: str, before: Any, now: Any) -> str:
    """Return a setting by name, with its new and its old value: `--resolution 512 (was 256)`.

    A flag has no value: `--flip (was not given)`, or `no --flip (was given)`.
    """
    if isinstance(now if now is not None else before, bool):
        return f"{name} (was not given)" if now else f"no {name} (was given)"
    value = say_value(now)
    wanted = f"{name} {value}" if value else f"no {name}"
    return f"{wanted} (was {say_value(before) or 'not given'})"


def say_value(given: Any) -> str:
    """Return a value as it is written on a command line; empty for None."""
    if given is None:
        return ""
    value = ",".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
    return shlex.quote(value) if value else ""
