"""What the user decides about fetching, and what comes of one URL."""

from dataclasses import dataclass

from wdsprep.dataset.reject_codes import Code
from wdsprep.errors import UsageError
from wdsprep.limits import MAX_DOWNLOAD_NBYTES
from wdsprep.options import Options, option_field

TRANSIENT = frozenset(
    {
        *(Code.DNS, Code.REFUSED, Code.UNREACHABLE, Code.TIMEOUT, Code.BROKEN_OFF),
        *(Code.HTTP_429, Code.HTTP_5XX, Code.FAULT),
    }
)
"""Codes of failures that may pass: worth another attempt now, and another run later."""

ROBOTS = "robots.txt"
"""The start of a reject's detail, where robots.txt disallowed the URL and not a header."""


DOWNLOADING = "Downloading"


def check_contact(contact: str) -> str:
    """Check that a header can hold the contact, and return it."""
    if not isinstance(contact, str) or not (contact.isascii() and contact.isprintable()):
        raise UsageError(f"{contact!r} is not a contact for a header: give a URL or a mail address")
    return contact


@dataclass(frozen=True, kw_only=True)
class FetchOptions(Options):
    """The options of the downloader, as a user gives them."""

    timeout: float = option_field(
        "Give up an attempt at a URL after so many seconds.", DOWNLOADING, default=10.0, least=0.1
    )
    retries: int = option_field(
        "Try a failed URL so many more times.", DOWNLOADING, default=2, least=0
    )
    requests: int = option_field(
        "Have so many requests under way at a time from one machine, or from each node of a "
        "cluster; its workers share them.",
        DOWNLOADING,
        default=256,
        least=1,
    )
    per_host: int = option_field(
        "Have so many requests under way at one host.", DOWNLOADING, default=8, least=1
    )
    contact: str = option_field(
        "Show this URL or mail address to servers.", DOWNLOADING, default="", read=check_contact
    )
    ignore_robots: bool = option_field(
        "Fetch what robots.txt disallows.", DOWNLOADING, default=False
    )
    ignore_opt_outs: bool = option_field(
        "Fetch what is marked noai or noimageai.", DOWNLOADING, default=False
    )
    allow_private_hosts: bool = option_field(
        "Fetch from loopback and local networks too.", DOWNLOADING, default=False
    )
    ignore_outage: bool = option_field(
        "Reject the URLs where none of many hosts answers, instead of stopping.",
        DOWNLOADING,
        default=False,
    )
    allow_s3: bool = option_field(
        "Read the rows of a table that are s3://, gs://, az:// or hf://, with your keys.",
        DOWNLOADING,
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class FetchRules(FetchOptions):
    """The rules of a downloader: the options that a user gives, and further bounds."""

    max_nbytes: int = MAX_DOWNLOAD_NBYTES
    redirects: int = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The bytes behind a URL, or the code of why there are none."""

    data: bytes = b""
    code: Code | None = None
    detail: str = ""
    host: str = ""
    """The host of the URL asked for, not of where it led."""
