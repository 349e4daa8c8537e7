"""Say which settings of a dataset are not those that are asked for now.

A dataset knows its settings by their names, and says plainly what has changed. The options of a
call say it in the words of its user: by the option that a setting comes from, which may have
another name, or words of its own (`About.settings`). Settings of old datasets whose option is gone
are said plainly.
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
"""The settings that have changed, each with what it was and what it is now."""
Said: TypeAlias = str | Callable[[Any, Any], str]
"""What is said of a change: a text, or a function of what the setting was and what it is now."""
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingWords:
    """The words for a setting that has changed.

    Of all that has changed only the settings of the highest rank are said, and none where one of
    `unless` has changed too, which says more.
    """

    say: Said
    rank: int = 0
    unless: Collection[str] = ()


ABOVE, BELOW = 1, -1
"""The ranks of a setting that decides which others there are, and of one that follows from them."""


def follows(name: str) -> SettingWords:
    """Return the words for a setting that follows from others, which are said instead."""
    return SettingWords(say=f"other {name}", rank=BELOW)


def words_of(options: Iterable["Option"]) -> dict[str, SettingWords]:
    """Return the words of options for the settings that they decide."""
    own = list(options)
    named = {one.name: SettingWords(say=partial(say_named, one.spelled)) for one in own}
    return named | {name: said for one in own for name, said in one.about.settings.items()}


@contextmanager
def saying_changes(options: Iterable["Option"]) -> Iterator[None]:
    """Let the options of a call say what a dataset was made with, if it is refused for that."""
    try:
        yield
    except OtherSettingsError as error:
        if error.changes:
            error.say(say_changes(error.changes, words_of(options)))
        raise


def say_changes(changes: Changes, words: Mapping[str, SettingWords]) -> list[str]:
    """Say each change in these words, or plainly where there are none for it."""
    known = {name: words.get(name) or SettingWords(say=_plainly(name)) for name in changes}
    rank = max((each.rank for each in known.values()), default=0)
    told = (name for name, each in known.items() if each.rank == rank)
    told = (name for name in told if not {*known[name].unless} & changes.keys())
    return [_said(known[name].say, *changes[name]) for name in told]


def _said(say: Said, before: Any, now: Any) -> str:
    return say if isinstance(say, str) else say(before, now)


def say_plainly(changes: Changes) -> list[str]:
    """Say each change by the name of the setting."""
    return say_changes(changes, {})


def say_both(changes: Changes) -> list[str]:
    """Say what each of two datasets has; of values that people cannot read only that they differ.

    These follow from others as a rule, and are said where they are all that differs.
    """
    shown = {
        name: f"{name} {say_value(one) or 'none'} and {say_value(other) or 'none'}"
        for name, (one, other) in changes.items()
        if _is_plain(one) and _is_plain(other)
    }
    return [*shown.values()] or [f"other {name}" for name in changes]


def _plainly(name: str) -> Said:
    def said(before: Any, now: Any) -> str:
        if not (_is_plain(before) and _is_plain(now)):
            return f"other {name}"
        return say_named(name, before, now)

    return said


def _is_plain(value: Any) -> bool:
    """Return whether people can read a value, and tell it from another one."""
    if isinstance(value, list):
        return all(isinstance(one, str | int | float) for one in value)
    return not isinstance(value, Mapping) and not DIGEST.fullmatch(str(value))


def say_named(name: str, before: Any, now: Any) -> str:
    """Say by its name what a setting is and what it was: `--resolution 512 (was 256)`."""
    if isinstance(now if now is not None else before, bool):
        return f"{name} (was not given)" if now else f"no {name} (was given)"
    value = say_value(now)
    wanted = f"{name} {value}" if value else f"no {name}"
    return f"{wanted} (was {say_value(before) or 'not given'})"


def say_value(given: Any) -> str:
    """Return a value as a command line has it; empty where nothing was given."""
    if given is None:
        return ""
    value = ",".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
    return shlex.quote(value) if value else ""
