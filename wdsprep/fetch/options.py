"""What the user decides about fetching, and what comes of one URL."""

from dataclasses import dataclass, field

from wdsprep.dataset.reject_codes import Code
from wdsprep.errors import UsageError
from wdsprep.limits import MAX_DOWNLOAD_NBYTES
from wdsprep.options import Options, about
from wdsprep.text import check_at_least

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
class FetchRules:
    """Settings of the downloader: how to ask, how often, and what to obey."""

    timeout_s: float = 10.0
    """The limit of one attempt with its redirects, from its start to its last byte."""
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
        check_at_least(0.001, timeout=self.timeout_s)
        check_at_least(0, retries=self.retries)
        check_at_least(1, requests=self.in_flight, per_host=self.per_host)
        check_contact(self.contact)


@dataclass(frozen=True, kw_only=True)
class FetchOptions(Options):
    """The options of the downloader, as a user gives them."""

    timeout: float = field(
        default=FetchRules.timeout_s,
        metadata=about(
            "Give up an attempt at a URL after so many seconds.",
            DOWNLOADING,
            least=0.1,
            usual=True,
        ),
    )
    retries: int = field(
        default=FetchRules.retries,
        metadata=about("Try a failed URL so many more times.", DOWNLOADING, least=0, usual=True),
    )
    requests: int = field(
        default=FetchRules.in_flight,
        metadata=about(
            "Have so many requests under way at a time from one machine.",
            DOWNLOADING,
            least=1,
            usual=True,
            page="have so many requests under way at a time from one machine, or from each node of "
            "a Ray cluster; its workers share them",
        ),
    )
    per_host: int = field(
        default=FetchRules.per_host,
        metadata=about(
            "Have so many requests under way at one host.", DOWNLOADING, least=1, usual=True
        ),
    )
    contact: str = field(
        default=FetchRules.contact,
        metadata=about(
            "Show this URL or mail address to servers.", DOWNLOADING, read=check_contact
        ),
    )
    ignore_robots: bool = field(
        default=False,
        metadata=about(
            "Fetch what robots.txt disallows.",
            DOWNLOADING,
        ),
    )
    ignore_opt_outs: bool = field(
        default=False,
        metadata=about(
            "Fetch what is marked noai or noimageai.",
            DOWNLOADING,
        ),
    )
    allow_private_hosts: bool = field(
        default=FetchRules.allow_private,
        metadata=about("Fetch from loopback and local networks too.", DOWNLOADING),
    )
    ignore_outage: bool = field(
        default=False,
        metadata=about(
            "Reject the URLs where none of many hosts answers, instead of stopping.",
            DOWNLOADING,
        ),
    )
    allow_s3: bool = field(
        default=FetchRules.allow_s3,
        metadata=about(
            "Read the rows of a table that are s3://, gs://, az:// or hf://, with your keys.",
            DOWNLOADING,
        ),
    )

    def rules(self, max_nbytes: int) -> FetchRules:
        return FetchRules(
            timeout_s=self.timeout,
            retries=self.retries,
            in_flight=self.requests,
            per_host=self.per_host,
            max_nbytes=max_nbytes,
            contact=self.contact,
            robots=not self.ignore_robots,
            opt_outs=not self.ignore_opt_outs,
            allow_private=self.allow_private_hosts,
            minds_outage=not self.ignore_outage,
            allow_s3=self.allow_s3,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The bytes behind a URL, or the code of why there are none."""

    data: bytes = b""
    code: Code | None = None
    detail: str = ""
    host: str = ""
    """The host of the URL asked for, not of where it led."""
