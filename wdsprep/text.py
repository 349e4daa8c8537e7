"""Read and write numbers, sizes and times, and make text of others harmless.

Values of options are read here, the same from a command line and from Python: `parse_size` reads
"2GB", `parse_auto` and `parse_names` read other spellings, `whole_number` and `real_number` refuse
what is not a number.

Names, captions, URLs and messages of servers are written by strangers. Printed as they are, they
could move the cursor, set colours and titles, hide other text, reverse lines, or look like lines of
ours. So the lines that a command composes pass through `join_lines`, and everything that is written
to a terminal passes through `escape_controls` once more. Escapes are those of JSON, so JSON stays
as it was.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from operator import index
from reprlib import Repr
from typing import Any

from wdsprep.errors import UsageError, without_secrets


def whole_number(name: str, given: Any) -> int:
    """Return the value of an option as an int. Raise UsageError if it is not a whole number."""
    with suppress(TypeError):
        if not isinstance(given, bool):
            return int(index(given))
    raise UsageError(f"{name} {brief(given)}: give a whole number")


def real_number(name: str, given: Any) -> float:
    """Return the value of an option: an int as it is, any other real number as a float.

    Raise UsageError if it is not a number.
    """
    with suppress(OverflowError):
        if isinstance(given, Real) and not isinstance(given, bool):
            return given if isinstance(given, int) else float(given)
    raise UsageError(f"{name} {brief(given)}: give a number")


def nearest_name(wrong: str, names: Iterable[str]) -> str:
    """Return the name that is most like a wrong one, or the only longer one that begins with it.

    Return "" if no name is similar enough.
    """
    import difflib

    known = {name.lstrip("-"): name for name in names}  # the dashes would make all names alike
    plain = wrong.lstrip("-")
    near = difflib.get_close_matches(plain, known, 1, 0.7)
    longer = [name for name in known if len(plain) > 2 and name.startswith(plain)]
    found = near or (longer if len(longer) == 1 else [])
    return known[found[0]] if found else ""


def did_you_mean(wrong: object, names: Iterable[str]) -> str:
    """Return ` (did you mean NAME?)` with the name that is most like a wrong one, else ""."""
    near = nearest_name(wrong.lower(), names) if isinstance(wrong, str) else ""
    return f" (did you mean {near}?)" if near else ""


def check_one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Raise UsageError if the value of the option `name` is not one of the known words."""
    if value not in known:
        words = ", ".join(filter(None, known))
        raise UsageError(f"{name} {brief(value)}{did_you_mean(value, known)}: give one of {words}")


def parse_size(given: Any) -> int:
    """Parse a number of bytes, such as 2GB or 512MiB."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([kKMGT]?)(i)?B?", str(given))
    if match is None:
        raise UsageError(f"{brief(given)} is not a size: write 2GB, 500MB or a number of bytes")
    power = "BKMGT".index(match[2].upper() or "B")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def parse_auto(given: Any) -> int:
    """Parse a number from 1 on, or `auto`, which is 0."""
    text = str(given)  # True is not a number here
    if text in ("0", "auto"):
        return 0
    if not re.fullmatch(r"\d{1,18}", text) or not int(text):
        raise UsageError(f"{brief(given)}: give auto, or a number from 1 on")
    return int(text)


def parse_names(given: Any) -> tuple[str, ...]:
    """Parse names with commas between them, or a list of names."""
    if isinstance(given, str):
        return tuple(name for word in given.split(",") if (name := word.strip()))
    if not isinstance(given, Iterable):
        raise UsageError(
            f"{brief(given)} is not a list of names: write a,b or give a list of strings"
        )
    return check_texts(given)


def check_texts(given: Iterable[Any]) -> tuple[str, ...]:
    """Return the values as a tuple. Raise UsageError if one of them is not a string."""
    listed = tuple(given)
    if wrong := [item for item in listed if not isinstance(item, str)]:
        raise UsageError(f"{brief(wrong[0])} is not a string: give a list of strings")
    return listed


Counting = Callable[[int, int], None]  # called with how many are done, and of how many


def ignore_count(_done: int, _of: int) -> None:
    """Do nothing with a count. It stands in if a caller wants no progress."""


def human_bytes(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def human_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def human_counts(counts: Mapping[str, int], most: int = 4) -> str:
    """List the largest of some counts by name: `truncated 12, too_small 3`."""
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    more = ", ..." if len(ranked) > most else ""
    return ", ".join(f"{name} {number:,}" for name, number in ranked[:most]) + more


def plural(number: int, noun: str, many: str = "") -> str:
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"


def command_line(*words: str) -> str:
    """Return a command of wdsprep that can be pasted, for the end of a line."""
    return f"wdsprep {shlex.join(words)}"


def command(*words: str) -> str:
    """Return a command of wdsprep for a message, in double quotes."""
    return f'"{command_line(*words)}"'


def install_extra(name: str) -> str:
    """Return how to install an extra of wdsprep, which is in no index of packages yet."""
    return f"run pip install '.[{name}]' in a clone of wdsprep"


EXAMPLES = 3


def examples(names: Sequence[str]) -> str:
    """List the first of some names: `a, b, c, ...`."""
    return ", ".join(names[:EXAMPLES]) + ", ..." * (len(names) > EXAMPLES)


COLUMNS, LONGEST = 12, 40
LONG = 200  # the most characters of a stranger's text in a message


class _BriefRepr(Repr):
    """A repr that cuts long texts in the middle, after it has removed the secrets of URLs."""

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(without_secrets(x), level)


_BRIEF = _BriefRepr()
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = LONGEST


def shortened(text: str) -> str:
    """Return a stranger's text for a message: no secrets, one line, its first LONG characters."""
    text = without_secrets(text)
    return one_line(text if len(text) <= LONG else f"{text[:LONG]}...")


def brief(value: object) -> str:
    """Return a stranger's value for a message, as Python writes it, on one short line."""
    if isinstance(value, bytes | bytearray | memoryview):
        value = bytes(value[:LONGEST])
    elif isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to write some
        return f"a number of {value.bit_length():,} bits"
    return one_line(_BRIEF.repr(value))


def list_columns(names: Sequence[str]) -> str:
    """List the columns of a table in few words: the first ones, with long names cut."""
    shown = [name if len(name) <= LONGEST else f"{name[:LONGEST]}..." for name in names[:COLUMNS]]
    more = [f"and {len(names) - COLUMNS:,} more"] if len(names) > COLUMNS else []
    return ", ".join([*shown, *more]) or "no columns"


_HARMFUL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def one_line(text: str) -> str:
    """Return a text with its control characters, direction marks and half characters escaped."""
    return _HARMFUL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def join_lines(lines: Iterable[str]) -> str:
    """Join lines into a text, and escape line breaks and other harmful characters within a line."""
    return "\n".join(map(one_line, lines))


def escape_controls(text: str) -> str:
    """Escape the characters of a text that could control a terminal, but for its line breaks."""
    return join_lines(text.split("\n"))


_NO_CHARACTER = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # halves of pairs, from JSON


def shown(name: str) -> str:
    """Return a file name as text that UTF-8 can hold.

    Bytes that are not UTF-8 are replaced, and so are halves of surrogate pairs.
    """
    if name.isascii():
        return name
    name = _NO_CHARACTER.sub("\ufffd", name)
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
