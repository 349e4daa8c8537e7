"""All that commands print: results, errors, and the line that shows how far a long one is.

That line is on stderr, rewritten in place on a terminal, added every half minute elsewhere, and
never there for what takes less than a second. Lines that several commands end with are here too.
"""

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TextIO

import click

from wdsprep.dataset.reject_codes import Code
from wdsprep.errors import without_secrets
from wdsprep.runners.base import Quarantined
from wdsprep.text import Counting, harmless, human_counts, one_line, plural

TERMINAL_S, PIPE_S, FIRST_S = 0.2, 30.0, 1.0


def echo(text: str, *, nl: bool = True, err: bool = False) -> None:
    """All that a command prints, but for the progress line, and what click prints of itself."""
    click.echo(harmless(text), nl=nl, err=err)


def complain(text: str, *, debug: bool = False) -> None:
    """An error is one line, whatever names are in it; after its traceback, if that is wanted."""
    if debug:
        echo(without_secrets(traceback.format_exc()), err=True)
    click.echo(f"wdsprep: {one_line(without_secrets(text))}", err=True)


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


def rejects_lines(rejects: Mapping[str, int], url: str) -> list[str]:
    """For the end of a run: how many of which codes, and where they stand."""
    if not rejects:
        return []
    count = plural(sum(rejects.values()), "reject")
    lines = [f"{count} ({human_counts(rejects, 8)}): see {url}/rejects/"]
    if scattered := rejects.get(Code.TAR_SCATTERED.value):
        lines.append(
            f"of {plural(scattered, 'sample')} the members stand apart in the tar, so captions may "
            "be lost: make the tars again in the order of names (tar --sort=name), then --overwrite"
        )
    return lines


def broken_tars_lines(count: int, url: str) -> list[str]:
    """For the end of a run: tars of which an unknown part is lost."""
    if not count:
        return []
    lost = f"{plural(count, 'tar')} cannot be read to the end, and what follows there is lost"
    return [f"{lost}: {url}/rejects/ says where and why; mend or replace them, then start over"]


def memory_lines(failed: Iterable[Quarantined], options: str) -> list[str]:
    """For the end of a run: what takes less memory, where workers may have lacked that."""
    if not any("memory" in one.reason for one in failed):
        return []
    return [f"where memory is short, fewer --workers or a smaller {options} takes less of it"]


def left_out_lines(kinds: Mapping[str, int]) -> list[str]:
    """For the end of a run: files that were no input, by their kind."""
    if not kinds:
        return []
    parts = [f"{count:,} {kind}" for kind, count in Counter(kinds).most_common()]
    formats = [kind[1:] for kind in (".parquet", ".csv", ".tsv", ".jsonl") if kind in kinds]
    formats += ["tars"] if {".tar", ".tgz"} & kinds.keys() else []
    hint = f" (--input-format {' or '.join(formats)} packs those)" if formats else ""
    return [f"left out, neither images nor captions by their names: {', '.join(parts)}{hint}"]
