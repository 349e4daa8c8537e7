"""A range of a file, as a server is asked for it and as it says that it serves it.

A proxy that drops the request's range, or serves another one, answers with bytes that look as good
as the right ones. What came is taken only where the answer's head says that it is what was asked.
"""

import re
from dataclasses import dataclass

from wdsprep.errors import StoreError

CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.IGNORECASE | re.ASCII)
MOST_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """A range of the bytes of a file, from `start` on; without `nbytes`, up to the end."""

    start: int = 0
    nbytes: int | None = None

    @property
    def header(self) -> str:
        if self.nbytes is None:
            return f"bytes={self.start}-"
        return f"bytes={self.start}-{self.start + max(self.nbytes, 1) - 1}"  # there is none of 0

    def covers_file(self, length: int) -> bool:
        """Return whether the range has the whole of a file of that length."""
        return self.start == 0 <= length and (self.nbytes is None or length <= self.nbytes)

    def check_answer(self, said: str, what: str) -> tuple[int, int | None]:
        """Return how many bytes an answer brings, and the length of the file if it is told.

        `said` is the Content-Range of the answer. Raise StoreError, which names the file `what`,
        if it is not this range: only the end of the file may cut it short.
        """
        match = CONTENT_RANGE.fullmatch(said.strip())
        if match is None:
            raise self.range_error(said, what)
        start, last = int(match[1]), int(match[2])
        total = None if match[3] == "*" else int(match[3])
        ends = [] if total is None else [total - 1]
        if self.nbytes is not None:
            ends.append(self.start + max(self.nbytes, 1) - 1)
        if start != self.start or last < start or not ends or last != min(ends):
            raise self.range_error(said, what)
        return last - start + 1, total

    def check_beyond(self, said: str, what: str) -> int | None:
        """Return the length of a file that ends before this range, by the answer that says so.

        `said` is the Content-Range of the answer. Return None if it does not tell the length.
        Raise StoreError, which names the file `what`, if the length is beyond the start of the
        range.
        """
        match = re.fullmatch(r"bytes \*/(\d{1,18})", said.strip(), re.IGNORECASE | re.ASCII)
        if match is None:
            return None
        if int(match[1]) > self.start:
            raise self.range_error(said, what)
        return int(match[1])

    def range_error(self, said: str, what: str) -> StoreError:
        gave = repr(said[:MOST_SHOWN]) if said else "no range"
        return StoreError(
            f"{what}: the server gave {gave} when asked for {self.header}, so it or a proxy before "
            "it does not keep to ranges: avoid the proxy, or copy the file"
        )


def length_of(said: str) -> int:
    """Parse a Content-Length. Return -1 if it is none."""
    return int(said) if re.fullmatch(r"\d{1,18}", said, re.ASCII) else -1
