"""Judge answers to requests for images and robots.txt files by their status and headers."""

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
    """The error for a request that a server refuses, but says when to repeat."""

    def __init__(self, code: Code, detail: str, after_s: float) -> None:
        super().__init__(code, detail)
        self.args = (code, detail, after_s)
        self.after_s = after_s


def judge_image(rules: FetchRules, head: Head) -> bool:
    """Return whether the body of an answer is to be received: True unless it is a redirect.

    Raise RejectedError if the status, an opt-out of the owner, the content type or the length
    shows that there will be no image.
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


def _add_retry_time(failure: RejectedError, head: Head) -> RejectedError:
    now = datetime.datetime.now(datetime.timezone.utc)
    after_s = backoff.retry_after_s(head.headers, now)
    if not after_s or failure.code not in TRANSIENT:
        return failure
    return LaterError(failure.code, f"{failure.detail}, Retry-After {after_s:.0f} s", after_s)


def asks_too_long_pause(error: RejectedError) -> bool:
    return isinstance(error, LaterError) and error.after_s > backoff.LONGEST_WAIT_S
