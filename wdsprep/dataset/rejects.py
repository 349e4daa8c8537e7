"""The rejects of one unit of work as a file: written as they come and counted, read back whole."""

import hashlib
import json
import logging
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from wdsprep.errors import WdsprepError
from wdsprep.store.base import Sink

_log = logging.getLogger("wdsprep")


class Code(str, Enum):
    """Why a sample did not make it."""

    stage: str

    def __new__(cls, value: str, stage: str) -> "Code":
        code = str.__new__(cls, value)
        code._value_ = value
        code.stage = stage
        return code

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def named(cls, value: str) -> "Code":
        return next(code for code in cls if code.value == value)

    VANISHED = ("vanished", "read")  # listed, then gone
    UNREADABLE = ("unreadable", "read")
    NO_IMAGE = ("no_image", "read")  # a caption or json without its image
    BAD_JSON = ("bad_json", "read")
    BAD_CAPTION = ("bad_caption", "read")  # not UTF-8
    TAR_VANISHED = ("tar_vanished", "read")
    TAR_TRUNCATED = ("tar_truncated", "read")
    TAR_BAD_HEADER = ("tar_bad_header", "read")
    TAR_REPEATED_KEY = ("tar_repeated_key", "read")
    TAR_REPEATED_FIELD = ("tar_repeated_field", "read")
    TAR_SCATTERED = ("tar_scattered", "read")  # another sample's member in between
    RECORD_LOST = ("record_lost", "read")  # rejected, and why was in a file that was damaged
    BAD_URL = ("bad_url", "fetch")  # not http, https or s3, or no URL at all
    PRIVATE_ADDRESS = ("private_address", "fetch")  # that only this machine may reach
    DISALLOWED = ("disallowed", "fetch")  # by robots.txt, or by a header such as noai
    DNS = ("dns", "fetch")
    REFUSED = ("refused", "fetch")
    UNREACHABLE = ("unreachable", "fetch")  # no route to the network or the host
    TLS = ("tls", "fetch")
    TIMEOUT = ("timeout", "fetch")
    BROKEN_OFF = ("broken_off", "fetch")  # reset, fewer bytes than promised, not HTTP
    REDIRECTS = ("redirects", "fetch")  # too many, or in a circle
    HTTP_4XX = ("http_4xx", "fetch")
    HTTP_429 = ("http_429", "fetch")
    HTTP_5XX = ("http_5xx", "fetch")
    TOO_MANY_BYTES = ("too_many_bytes", "fetch")
    FAULT = ("fault", "fetch")  # an exception that nobody foresaw: a bug of ours
    HASH_MISMATCH = ("hash_mismatch", "fetch")  # not the bytes that the table speaks of
    FILTERED = ("filtered", "filter")
    CAPTION_TOO_SHORT = ("caption_too_short", "filter")
    CAPTION_TOO_LONG = ("caption_too_long", "filter")
    EMPTY = ("empty", "check")  # a file of no bytes
    NOT_AN_IMAGE = ("not_an_image", "check")
    UNSUPPORTED = ("unsupported", "check")  # an image, of a kind that cannot be decoded here
    TRUNCATED = ("truncated", "check")
    CORRUPT = ("corrupt", "check")
    TOO_SMALL = ("too_small", "check")
    TOO_LARGE = ("too_large", "check")
    ASPECT_RATIO = ("aspect_ratio", "check")
    BAD_KEY = ("bad_key", "encode")  # of a foreign tar: it cannot be written, or is unsafe to
    NOT_FINITE = ("not_finite", "encode")  # neither in the models' dtype nor in fp32


ENDS_A_TAR = (Code.TAR_TRUNCATED, Code.TAR_BAD_HEADER, Code.TAR_VANISHED)
"""After these nothing more of a tar is read: nobody knows how many samples that costs."""


def by_stage(counts: Mapping[str, int]) -> Counter[str]:
    """Counts by code, as receipts have them, summed up by stage."""
    found: Counter[str] = Counter()
    for code, count in counts.items():
        found[Code.named(code).stage] += count
    return found


class RejectedError(Exception):
    """Raised where a sample turns out to be none; `pack` catches it and writes a Reject."""

    def __init__(self, code: Code, detail: str = "") -> None:
        super().__init__(code, detail)
        self.code, self.detail = code, detail

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}" if self.detail else str(self.code)


_told: set[str] = set()


def as_rejected(error: Exception, unforeseen: Code) -> RejectedError:
    """What an exception that one sample met says of that sample, so that it costs no other. One
    that nobody foresaw is a bug of ours: its reject has the code `unforeseen` and says where, and
    the log says it once. What is no sample's doing is raised: an error on purpose, which is of the
    run, and a lack of memory."""
    if isinstance(error, RejectedError):
        return error
    if isinstance(error, WdsprepError | MemoryError):
        raise error
    frames = [(frame.f_globals.get("__name__", ""), line) for frame, line in _frames(error)]
    place = next((f"{name}:{line}" for name, line in frames if name.startswith("wdsprep.")), "")
    bug = f"a bug: {type(error).__name__} at {place}"
    if bug not in _told:
        _told.add(bug)
        _log.warning("%s: what met it is a reject (%s): please report it", bug, unforeseen)
    return RejectedError(unforeseen, f"{bug}: {error}"[:200])


def _frames(error: Exception) -> list[tuple[Any, int]]:
    """The innermost first."""
    return list(traceback.walk_tb(error.__traceback__))[::-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """A sample that did not make it: the key it would have had, where it came from, and why. `url`
    is where its image was to be fetched, if it was."""

    key: str
    source: str
    code: Code
    detail: str = ""
    url: str = ""

    def to_json(self) -> str:
        """One line of a rejects file."""
        line = {"code": self.code.value, "detail": self.detail, "key": self.key}
        line |= {"source": self.source, "stage": self.code.stage}
        line |= {"url": self.url} if self.url else {}
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, line: str) -> "Reject":
        found = json.loads(line)
        return cls(
            key=found["key"],
            source=found["source"],
            code=Code.named(found["code"]),
            detail=found["detail"],
            url=found.get("url", ""),
        )


UNSETTLED = "rejects that rows are leaving"
"""By this a receipt has the digest of its rejects as they were, until they are as it says."""


class RejectsFile:
    """Writes rejects to a sink; a unit may have any number of them."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._hash = hashlib.sha256()
        self.counts: Counter[str] = Counter()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def add(self, reject: Reject) -> None:
        line = reject.to_json().encode("utf-8", "replace")
        self._sink.write(line)
        self._hash.update(line)
        self.counts[reject.code.value] += 1


def read_rejects(data: bytes) -> list[Reject]:
    """The rejects in a file's bytes; a ValueError where a line is none."""
    try:
        return [Reject.from_json(line.decode()) for line in data.splitlines()]
    except (KeyError, TypeError, StopIteration) as error:
        raise ValueError(f"no reject: {error!r}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """An input that is no sample, as its source found it."""

    source: str
    code: Code
    detail: str = ""
    url: str = ""

    def to_reject(self, key: str) -> Reject:
        return Reject(key=key, source=self.source, code=self.code, detail=self.detail, url=self.url)
