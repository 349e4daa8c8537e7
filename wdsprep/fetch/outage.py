"""Tells a network that is down from hosts that are gone.

A name that does not resolve, a network without a route, a silence: none of these is an answer.
Where none comes for 200 rows in a row, or for all of a slice with 20 rows or more, and these are of
8 sites or more, the fault may be on this side, and somebody is asked who must know:

1. Hosts that answered this worker before. If one of them still does, the network is up, and the
   rows are rejects like others; if none does, it is down.
2. Before anybody has answered, the name service. That a name does not exist is an answer, if it
   comes from a name service which knows those of the internet. Where 8 sites are left that nothing
   is known of, the run stops, and says how its user, who may know better, goes on.

A site is the last two labels of a host's name: the many names of one provider that is gone are one.
A table whose few hosts are gone is never mistaken for an outage.
"""

import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from urllib.parse import urlsplit

from wdsprep.dataset.reject_codes import Code
from wdsprep.errors import WorkError
from wdsprep.fetch.options import Fetched
from wdsprep.store.schemes import is_keyed
from wdsprep.text import human_counts, plural

NO_ANSWER = frozenset({Code.DNS, Code.UNREACHABLE, Code.TIMEOUT})
NOT_ASKED = frozenset({Code.BAD_URL, Code.PRIVATE_ADDRESS, Code.FAULT})
OUTAGE_ROWS, OUTAGE_ROWS_OF_ALL, OUTAGE_SITES = 200, 20, 8
WITNESSES = 16
OF_THE_INTERNET = "a.root-servers.net"
NOBODYS = ".invalid"  # for ever (RFC 6761)
NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))

Ask = Callable[[str], "Future[Fetched]"]


Witnesses = dict[str, str]
"""The sites that answered the slices of a worker last, with a URL of each; the last one is last."""


class OutageCheck:
    """A check of the rows of one slice for signs that the network is down."""

    def __init__(self, ask: Ask, witnesses: Witnesses) -> None:
        self._ask, self._witnesses = ask, witnesses
        self._codes: Counter[str] = Counter()
        self._sites: dict[str, str] = {}
        """The sites asked, with the name that did not resolve, or nothing where all did."""
        self._answered = False

    def note(self, url: str, code: Code | None) -> None:
        if code in NO_ANSWER:
            self._codes[str(code)] += 1
            name = _host(url) if code is Code.DNS else ""
            self._sites[_site(url)] = name and self._sites.get(_site(url), name)
        elif code not in NOT_ASKED:
            self._forget()
            if _is_answer(url, code):  # slices share the sites: each step is one to threads
                self._witnesses.pop(_site(url), None)
                self._witnesses[_site(url)] = url
                for site in list(self._witnesses)[:-WITNESSES]:
                    self._witnesses.pop(site, None)

    def is_suspected(self, *, at_end: bool = False) -> bool:
        rows = self._codes.total()
        many = OUTAGE_ROWS_OF_ALL if at_end and not self._answered else OUTAGE_ROWS
        return rows >= many and len(self._sites) >= OUTAGE_SITES

    def confirm(self) -> None:
        """Find out whether the network is down, which takes a while, and raise WorkError if it is.

        If it is up, forget the rows that gave no answer so far.
        """
        witnesses = list(self._witnesses.values())
        if witnesses:
            asked = {self._ask(url): url for url in witnesses}
            try:
                answers = ((asked[done], done.result().code) for done in as_completed(asked))
                is_up = any(_is_answer(*answer) for answer in answers)
            finally:
                for future in asked:
                    future.cancel()
        else:  # count the sites without an answer whose names may exist, until they are enough
            names = [name for name in self._sites.values() if name]
            silent = len(self._sites) - len(names)
            with ThreadPoolExecutor(OUTAGE_SITES) as threads:
                while names and silent < OUTAGE_SITES:
                    batch, names = names[:OUTAGE_SITES], names[OUTAGE_SITES:]
                    silent += sum(not gone for gone in threads.map(is_unknown_name, batch))
            is_up = silent < OUTAGE_SITES
        if not is_up:
            nor = ", nor do hosts that did before" if witnesses else ""
            raise WorkError(
                f"none of the last {self._codes.total():,} URLs gave any answer, from "
                f"{plural(len(self._sites), 'site')} ({human_counts(self._codes)}){nor}: the "
                "network or its name service seems to be down here: mend that, then run the same "
                "command again; if it is up and these hosts are gone, add --ignore-outage"
            )
        self._forget()

    def _forget(self) -> None:
        self._answered = True
        self._codes.clear()
        self._sites.clear()


def is_unknown_name(name: str) -> bool:
    """Return whether the name service is at work and says that no such name exists.

    A name that ends in NOBODYS is not asked about, and never exists.
    """
    return name.endswith(NOBODYS) or (_exists(name) is False and _exists(OF_THE_INTERNET) is True)


def _exists(name: str) -> bool | None:
    """Return whether a host name exists, or None if the name service does not say."""
    try:
        socket.getaddrinfo(name, None)
    except socket.gaierror as error:
        return False if error.errno in NO_SUCH_NAME else None
    except UnicodeError:
        return None
    return True


def _is_answer(url: str, code: Code | None) -> bool:
    """Return whether a URL with this outcome was just answered by a server on the internet.

    What robots.txt disallows may have been known from before, so it is no answer. Nor is what
    comes from a bucket, which may be on a local network.
    """
    unsaid = NO_ANSWER | NOT_ASKED | {Code.DISALLOWED}
    return code not in unsaid and not is_keyed(url)


def _host(url: str) -> str:
    try:
        return urlsplit(url.strip()).hostname or ""
    except ValueError:  # half an IPv6 address
        return ""


def _site(url: str) -> str:
    """Return the last two labels of the URL's host, or all of it if it is an address."""
    name = _host(url)
    labels = name.split(".")
    return name if labels[-1].isdecimal() else ".".join(labels[-2:])
