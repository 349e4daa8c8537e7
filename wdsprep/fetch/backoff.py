"""The pause before a URL is asked for again: by Retry-After, or below a bound that doubles.

A 429 or 503 with a Retry-After header pauses its host for that time. Without the header the next
attempt follows after a random pause.
"""

import datetime
import email.utils
import random

from wdsprep.fetch.opt_outs import Headers

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
