"""Which answers of servers are taken, by their status and headers: images and robots.txt files."""

import datetime

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.fetch import backoff, opt_outs
from wdsprep.fetch.failure_codes import rejection_for_status
from wdsprep.fetch.options import TRANSIENT, FetchRules
from wdsprep.fetch.transfer import Head, too_many_bytes

MOVED = frozenset({301, 302, 303, 307, 308})
PAGES = ("text/html", "application/xhtml", "application/json", "video/", "audio/")
"""Content types of what is no image; servers name those of images wrongly too often."""


class LaterError(RejectedError):
    """The error that a server refuses a request, but says when to come back."""

    def __init__(self, code: Code, detail: str, after_s: float) -> None:
        super().__init__(code, detail)
        self.args = (code, detail, after_s)
        self.after_s = after_s


def judge_image(rules: FetchRules, head: Head) -> bool:
    """Return True if the body of an answer is to be received, by its head; False for a redirect.

    Raise RejectedError if there will be no image: by the status, an opt-out of the owner, the
    type of the content or its length.
    """
    if is_redirect(head):
        return False
    if failure := rejection_for_status(head.status):
        raise _add_retry_time(failure, head)
    if rules.opt_outs and (reserved := opt_outs.opt_out(head.headers)):
        raise RejectedError(Code.DISALLOWED, reserved)
    if head.first("content-type").lower().startswith(PAGES):
        raise RejectedError(Code.NOT_AN_IMAGE, head.first("content-type")[:80])
    if head.nbytes > rules.max_nbytes:
        raise too_many_bytes(rules.max_nbytes)
    return True


def judge_robots(head: Head) -> bool:
    """Return whether there is a robots.txt, by the head of an answer.

    Raise an error if it may be there, but cannot be had now. A file that is missing allows
    everything; one that cannot be had now forbids everything.
    """
    failure = rejection_for_status(head.status)
    if failure is not None and failure.code in TRANSIENT:
        raise _add_retry_time(failure, head)
    return failure is None


def is_redirect(head: Head) -> bool:
    return head.status in MOVED and bool(head.first("location"))


def _add_retry_time(failure: RejectedError, head: Head) -> RejectedError:
    now = datetime.datetime.now(datetime.timezone.utc)
    after_s = backoff.retry_after_s(head.headers, now)
    if not after_s or failure.code not in TRANSIENT:
        return failure
    return LaterError(failure.code, f"{failure.detail}, Retry-After {after_s:.0f} s", after_s)


def asks_too_long_pause(error: RejectedError) -> bool:
    return isinstance(error, LaterError) and error.after_s > backoff.LONGEST_WAIT_S
