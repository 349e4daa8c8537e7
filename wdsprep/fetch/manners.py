"""What a server's headers say about whether, and when, it wants to be asked.

Opt-outs are those that img2dataset obeys by default, and three more: `noml`, `none` (which includes
`noindex`) and the header of the TDM reservation protocol. A directive can be for one robot only, as
in `X-Robots-Tag: otherbot: noindex`; it binds us when it is for all, or for our name.
"""

import datetime
import email.utils
import random
from collections.abc import Iterator, Mapping, Sequence

from wdsprep.fetch.robots import TOKEN

OPT_OUTS = frozenset({"noai", "noimageai", "noml", "noindex", "noimageindex", "none"})
LONGEST_WAIT_S = 60.0
"""A server that asks for more is left alone: what it was asked for may be had another day."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0

Headers = Mapping[str, Sequence[str]]


def opt_out(headers: Headers) -> str:
    """The header by which the owner reserves the image, or nothing."""
    for value in headers.get("x-robots-tag", ()):
        for directive in _directives(value):
            if directive in OPT_OUTS:
                return f"X-Robots-Tag: {directive}"
    if "1" in headers.get("tdm-reservation", ()):
        return "TDM-Reservation: 1"
    return ""


def _directives(value: str) -> Iterator[str]:
    """Those for all robots or for us. A robot's name holds until the next one."""
    ours = True
    for part in value.lower().split(","):
        name, colon, rest = part.partition(":")
        if colon and not name.strip().startswith(("max-", "unavailable_after")):
            ours = name.strip() in (TOKEN, "*")
            part = rest
        if ours:
            yield part.strip()


def retry_after_s(headers: Headers, now: datetime.datetime) -> float:
    """How long the server asks us to wait: 0 when it does not say, or not so that we understand."""
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
    """Before the next attempt: anything up to a bound that doubles, so that many do not come back
    together."""
    bound = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
    return random.uniform(0, bound)  # noqa: S311 (jitter, not a secret)
