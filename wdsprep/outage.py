"""Tells a network that is down from hosts that are gone."""

from collections import Counter

from wdsprep.errors import WorkError
from wdsprep.progress import human_counts
from wdsprep.samples import Code

NO_ANSWER = frozenset({Code.DNS, Code.UNREACHABLE, Code.TIMEOUT})
OUTAGE_ROWS, OUTAGE_ROWS_OF_ALL, OUTAGE_SITES = 200, 20, 8


class Outage:
    """A name that does not resolve, a network without a route, a silence: none of these is an
    answer. Where none comes for 200 rows in a row, or for all of a slice with 20 rows or more, and
    these are of 8 sites or more, the fault is on this side. A site is the last two labels of a
    host's name: the many names of one provider that is gone are one. A table whose few hosts are
    gone is never mistaken for an outage."""

    def __init__(self) -> None:
        self._codes: Counter[str] = Counter()
        self._sites: set[str] = set()
        self._answered = False

    def note(self, url: str, code: Code | None) -> None:
        if code not in NO_ANSWER:
            if code not in (Code.BAD_URL, Code.PRIVATE_ADDRESS):  # nobody was asked
                self._answered = True
                self._codes.clear()
                self._sites.clear()
            return
        self._codes[str(code)] += 1
        if len(self._sites) < OUTAGE_SITES:
            self._sites.add(_site(url))
        if self._codes.total() >= OUTAGE_ROWS and len(self._sites) >= OUTAGE_SITES:
            self._raise()

    def check_at_end(self) -> None:
        rows = 0 if self._answered else self._codes.total()
        if rows >= OUTAGE_ROWS_OF_ALL and len(self._sites) >= OUTAGE_SITES:
            self._raise()

    def _raise(self) -> None:
        raise WorkError(
            f"none of the last {self._codes.total():,} URLs gave any answer, from "
            f"{len(self._sites)} sites or more ({human_counts(self._codes)}): the network or its "
            "name service seems to be down here: see to it, then run the same command again"
        )


def _site(url: str) -> str:
    """The last two labels of the host; all of an address."""
    host = url.partition("://")[2].partition("/")[0].rpartition("@")[2].lower()
    name = host if host.startswith("[") else host.partition(":")[0]
    labels = name.split(".")
    return name if labels[-1].isdecimal() else ".".join(labels[-2:])
