"""The line on stderr that shows how far a long command is: rewritten in place on a terminal, added
every half minute elsewhere, and never there for what takes less than a second."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TextIO

from wdsprep.terminal import one_line

TERMINAL_S, PIPE_S, FIRST_S = 0.2, 30.0, 1.0
Counting = Callable[[int, int], None]  # is told how many are done, of how many


def unheard(_done: int, _of: int) -> None:
    """Counting that nobody listens to."""


class ProgressLine:
    """Shows the latest of the texts it is given."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._started = time.monotonic()
        self._next = self._started + (FIRST_S if self._terminal else PIPE_S)
        self._drawn = False

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    def show(self, text: str) -> None:
        """Draw the text if it is time to."""
        if not self.due:
            return
        self._next = time.monotonic() + (TERMINAL_S if self._terminal else PIPE_S)
        line = one_line(text)
        self._out.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._out.flush()
        self._drawn = self._terminal

    def offer(self, text: Callable[[], str]) -> None:
        """Draw what takes a while to tell, if it is time to."""
        if self.due:
            self.show(text())

    def counting(self, noun: str) -> Counting:
        """Shows how many of these are done."""
        return lambda done, of: self.show(f"{done:,} of {plural(of, noun)} done")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        self._out.write(f"{one_line(text)}\n")
        self._out.flush()

    def clear(self) -> None:
        """Take the line away, so that what is printed next stands alone."""
        if self._drawn:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._drawn = False


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
    """The largest of some counts by name: `truncated 12, too_small 3`."""
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    more = ", ..." if len(ranked) > most else ""
    return ", ".join(f"{name} {number:,}" for name, number in ranked[:most]) + more


def rejects_lines(rejects: Mapping[str, int], url: str) -> list[str]:
    """For the end of a run: how many of which codes, and where they stand."""
    if not rejects:
        return []
    count = plural(sum(rejects.values()), "reject")
    return [f"{count} ({human_counts(rejects, 8)}): see {url}/rejects/"]


def broken_tars_lines(count: int, url: str) -> list[str]:
    """For the end of a run: tars of which an unknown part is lost."""
    if not count:
        return []
    lost = f"{plural(count, 'tar')} cannot be read to the end, and what follows there is lost"
    return [f"{lost}: {url}/rejects/ says where and why; mend or replace them, then start over"]


def left_out_lines(kinds: Mapping[str, int]) -> list[str]:
    """For the end of a run: files that were no input, by their kind."""
    if not kinds:
        return []
    parts = [f"{count:,} {kind}" for kind, count in Counter(kinds).most_common()]
    return [f"left out, neither images nor captions by their names: {', '.join(parts)}"]


def plural(number: int, noun: str, many: str = "") -> str:
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"
