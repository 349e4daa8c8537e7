"""Text that came from data, made harmless for who reads it.

Names, captions, URLs and messages of servers are written by strangers. Printed as they are, they
could move the cursor, set colours and titles, hide what stands there, turn lines around, or look
like lines of ours. So all that a command prints passes through here: `printed` for the lines that a
command composes, and `harmless` once more where anything leaves for a terminal.

What is escaped is written as JSON does, so JSON stays what it was.
"""

import logging
import re
from collections.abc import Iterable

_HARMFUL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def one_line(text: str) -> str:
    """Without controls, whether of the cursor or of the direction; without halves of pairs."""
    return _HARMFUL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def printed(lines: Iterable[str]) -> str:
    """The lines as a text, of which each is one."""
    return "\n".join(map(one_line, lines))


def harmless(text: str) -> str:
    """A text of many lines as it may be printed."""
    return printed(text.split("\n"))


class LogFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))
