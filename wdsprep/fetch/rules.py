"""What the user decides about fetching, and what comes of one URL."""

from dataclasses import dataclass

from wdsprep.dataset.reject_codes import Code
from wdsprep.errors import UsageError
from wdsprep.limits import MAX_DOWNLOAD_NBYTES
from wdsprep.text import at_least

PASSING = frozenset(
    {
        *(Code.DNS, Code.REFUSED, Code.UNREACHABLE, Code.TIMEOUT, Code.BROKEN_OFF),
        *(Code.HTTP_429, Code.HTTP_5XX, Code.FAULT),
    }
)
"""What another day may cure, or a version without the bug: worth another attempt now, and another
run later."""

ROBOTS = "robots.txt"
"""How the detail of a reject begins that was disallowed by it, and not by a header."""


def check_contact(contact: str) -> None:
    """Refuse what no header can hold."""
    if not (contact.isascii() and contact.isprintable()):
        raise UsageError(f"{contact!r}: not a contact to show: give a URL or a mail address")


@dataclass(frozen=True, kw_only=True)
class FetchRules:
    """How to ask, how often, and what to obey."""

    timeout_s: float = 10.0
    """Of one attempt with its redirects, from its start to its last byte."""
    retries: int = 2
    in_flight: int = 256
    """Requests at a time in this process."""
    per_host: int = 8
    max_nbytes: int = MAX_DOWNLOAD_NBYTES
    redirects: int = 5
    contact: str = ""
    """A URL or a mail address that the user agent shows."""
    robots: bool = True
    opt_outs: bool = True
    allow_private: bool = False
    minds_outage: bool = True
    """Stop where nobody answers, as the network may be down."""
    allow_s3: bool = False
    """Read `s3://`, `gs://`, `az://` and `hf://` URLs, which is done with the credentials of who
    runs this."""

    def __post_init__(self) -> None:
        at_least(0.001, timeout=self.timeout_s)
        at_least(0, retries=self.retries)
        at_least(1, requests=self.in_flight, per_host=self.per_host)
        check_contact(self.contact)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The bytes behind a URL, or the code of why there are none."""

    data: bytes = b""
    code: Code | None = None
    detail: str = ""
    host: str = ""
    """Of the URL asked for, not of where it led."""
