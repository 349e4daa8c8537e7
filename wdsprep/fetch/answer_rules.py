"""Judge answers to requests for images and robots.txt files by their status and headers.

Here is what a failed transfer or an HTTP status means in our own codes, and which headers say that
the owner of an image does not want it to be used for training. These opt-outs are those that
img2dataset obeys by default, and three more: `noml`, `none` (which includes `noindex`) and the
header of the TDM reservation protocol. A directive can be for one robot only, as in `X-Robots-Tag:
otherbot: noindex`; it binds us when it is for all, or for our name.

A 429 or 503 with a Retry-After header pauses its host for that time. Without the header the next
attempt follows after a random pause, below a bound that doubles.
"""

import datetime
import email.utils
import errno
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pycurl

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.errors import WorkError
from wdsprep.fetch.options import TRANSIENT, FetchRules
from wdsprep.fetch.robots import TOKEN

Headers = Mapping[str, Sequence[str]]

MOVED = frozenset({301, 302, 303, 307, 308})
PAGES = ("text/html", "application/xhtml", "application/json", "video/", "audio/")
"""Content types of what is no image; servers name those of images wrongly too often."""


class LaterError(RejectedError):
    """The error for a request that a server refuses, but says when to repeat."""

    def __init__(self, code: Code, detail: str, after_s: float) -> None:
        super().__init__(code, detail)
        self.args = (code, detail, after_s)
        self.after_s = after_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The status and the headers of an answer, with names in lower case."""

    status: int
    headers: Headers

    def first(self, name: str) -> str:
        return next(iter(self.headers.get(name, ())), "")

    @property
    def nbytes(self) -> int:
        """Return the length of the body by the headers, or -1 if the server does not say."""
        length = self.first("content-length")
        if not (length.isascii() and length.isdigit()):
            return -1
        return int(length.lstrip("0")[:20] or 0)  # of more digits, each is too many


def judge_image(rules: FetchRules, head: Head) -> bool:
    """Return whether the body of an answer is to be received: True unless it is a redirect.

    Raise RejectedError if the status, an opt-out of the owner, the content type or the length
    shows that there will be no image.
    """
    if is_redirect(head):
        return False
    if failure := rejection_for_status(head.status):
        raise _add_retry_time(failure, head)
    if not rules.ignore_opt_outs and (reserved := opt_out(head.headers)):
        raise RejectedError(Code.DISALLOWED, reserved)
    if head.first("content-type").lower().startswith(PAGES):
        raise RejectedError(Code.NOT_AN_IMAGE, head.first("content-type")[:80])
    if head.nbytes > rules.max_nbytes:
        raise too_many_bytes(rules.max_nbytes)
    return True


def judge_robots(head: Head) -> bool:
    """Return whether the body of an answer is a robots.txt, by its head.

    Raise RejectedError if the file may exist, but cannot be had now. A missing file allows
    everything; a file that cannot be had now forbids everything.
    """
    failure = rejection_for_status(head.status)
    if failure is not None and failure.code in TRANSIENT:
        raise _add_retry_time(failure, head)
    return failure is None


def is_redirect(head: Head) -> bool:
    return head.status in MOVED and bool(head.first("location"))


def too_many_bytes(limit: int) -> RejectedError:
    return RejectedError(Code.TOO_MANY_BYTES, f"more than {limit:,}")


def _add_retry_time(failure: RejectedError, head: Head) -> RejectedError:
    now = datetime.datetime.now(datetime.timezone.utc)
    after_s = retry_after_s(head.headers, now)
    if not after_s or failure.code not in TRANSIENT:
        return failure
    return LaterError(failure.code, f"{failure.detail}, Retry-After {after_s:.0f} s", after_s)


_SYSTEM = {
    errno.ECONNREFUSED: Code.REFUSED,
    errno.ETIMEDOUT: Code.TIMEOUT,
    errno.ECONNRESET: Code.BROKEN_OFF,
    errno.EPIPE: Code.BROKEN_OFF,
}
_CODES = {
    pycurl.E_COULDNT_RESOLVE_HOST: Code.DNS,
    pycurl.E_COULDNT_CONNECT: Code.UNREACHABLE,
    pycurl.E_OPERATION_TIMEDOUT: Code.TIMEOUT,
    pycurl.E_URL_MALFORMAT: Code.BAD_URL,
    pycurl.E_SSL_CONNECT_ERROR: Code.TLS,
    pycurl.E_PEER_FAILED_VERIFICATION: Code.TLS,
}
_E_TOO_LARGE = 100  # pycurl has no name for it
_BROKEN = {
    **dict.fromkeys((pycurl.E_RECV_ERROR, pycurl.E_SEND_ERROR, pycurl.E_PARTIAL_FILE), ""),
    pycurl.E_GOT_NOTHING: "no answer before the end",
    pycurl.E_UNSUPPORTED_PROTOCOL: "not HTTP",
    pycurl.E_FTP_WEIRD_SERVER_REPLY: "not HTTP",
    pycurl.E_BAD_CONTENT_ENCODING: "a content encoding that cannot be undone",
    _E_TOO_LARGE: "too large a header",
}
_HERE = {pycurl.E_OUT_OF_MEMORY, pycurl.E_FAILED_INIT, pycurl.E_SSL_CACERT_BADFILE}
_VERIFY = re.compile(r".*verify result: (.*?)(?: \(\d+\))?$")
_AFTER = re.compile(r" after \d+ (?:ms|milliseconds)(?:: Could not connect to server)?")


def rejection_for_curl(error: int, message: str, *, system: int, resolved: bool) -> RejectedError:
    """Return the rejection for libcurl's error. Raise an error if it is this machine's fault.

    `system` is the error number of the system, if there was one. `resolved` tells whether an
    address was known: time that ran out before that is the name service's, whatever libcurl was
    doing by its own words.
    """
    if error in (pycurl.E_COULDNT_CONNECT, pycurl.E_SSL_CONNECT_ERROR) and system in _SYSTEM:
        return RejectedError(_SYSTEM[system], _short(message))
    if error == pycurl.E_OPERATION_TIMEDOUT and not resolved:
        return RejectedError(Code.DNS, _short(message))
    if error in _CODES:
        return RejectedError(_CODES[error], _short(message))
    if error in _BROKEN:
        return RejectedError(Code.BROKEN_OFF, _BROKEN[error] or _short(message))
    if error in _HERE:
        raise WorkError(f"libcurl cannot work here: {message}: mend that, then run the same again")
    raise RuntimeError(f"libcurl failed with error {error}: {message}")


def rejection_for_status(status: int) -> RejectedError | None:
    """Return the rejection for an HTTP status, or None if the body is to be read."""
    detail = f"HTTP {status}"
    if status in (200, 201, 203):
        return None
    if status < 300 or status == 304:
        code = Code.BROKEN_OFF if status in (101, 206) else Code.EMPTY
    elif status < 400:
        code = Code.REDIRECTS
    elif status in (408, 429):
        code = Code.TIMEOUT if status == 408 else Code.HTTP_429
    else:
        code = Code.HTTP_5XX if 500 <= status < 600 else Code.HTTP_4XX
    return RejectedError(code, detail)


def _short(message: str) -> str:
    text = " ".join(_AFTER.sub("", _VERIFY.sub(r"\1", message)).split())
    return text if len(text) <= 120 else text[:119] + "…"


OPT_OUTS = frozenset({"noai", "noimageai", "noml", "noindex", "noimageindex", "none"})


def opt_out(headers: Headers) -> str:
    """Return the header by which the owner reserves the image, or "" if there is none.

    The name of a robot holds for the directives after it, until the next name.
    """
    for value in headers.get("x-robots-tag", ()):
        is_for_us = True
        for part in value.lower().split(","):
            name, colon, directive = part.partition(":")
            if colon and not name.strip().startswith(("max-", "unavailable_after")):
                is_for_us = name.strip() in (TOKEN, "*")
            else:
                directive = part
            if is_for_us and directive.strip() in OPT_OUTS:
                return f"X-Robots-Tag: {directive.strip()}"
    if "1" in headers.get("tdm-reservation", ()):
        return "TDM-Reservation: 1"
    return ""


LONGEST_WAIT_S = 60.0
"""A server that asks for a longer pause is left alone: another run may get its images."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


def retry_after_s(headers: Headers, now: datetime.datetime) -> float:
    """Return how long the server asks us to wait, or 0 if it does not say, or we cannot read it."""
    value = next(iter(headers.get("retry-after", ())), "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        then = email.utils.parsedate_to_datetime(value)
    except (ValueError, OverflowError):  # no date; a zone of twenty digits
        return 0.0
    if then.tzinfo is None:
        then = then.replace(tzinfo=datetime.timezone.utc)
    return max(0.0, (then - now).total_seconds())


def pause_s(attempt: int) -> float:
    """Draw the pause before the next attempt.

    It is drawn below a bound that doubles with each attempt, so that many clients do not come
    back together.
    """
    bound = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
    return random.uniform(0, bound)  # noqa: S311 (jitter, not a secret)
