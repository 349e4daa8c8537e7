"""Why a sample was rejected: every code, and the stage at which it falls.

Every input ends as a sample or as a reject with one of these codes. They are a closed set, so that
they can be counted over years of runs, and each belongs to one stage of the way.
"""

from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import NoReturn

from wdsprep.errors import FormatError
from wdsprep.text import brief


class Code(str, Enum):
    """The reason why a sample was rejected, with the stage at which that was found."""

    stage: str

    def __new__(cls, value: str, stage: str = "") -> "Code":
        code = str.__new__(cls, value)
        code._value_ = value
        code.stage = stage
        return code

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:  # a stranger's file made it up
        raise FormatError(f"{brief(value)} is the code of no reject: verify the dataset")

    VANISHED = ("vanished", "read")  # listed, then gone
    UNREADABLE = ("unreadable", "read")
    NO_IMAGE = ("no_image", "read")  # a caption or json without its image
    NO_ROLE = ("no_role", "read")  # a sample without an image in a role that was asked for
    ROLE_GAP = ("role_gap", "read")  # an image in a role lacks before another one in that role
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
    REMOVED = ("removed", "remove")  # by `wdsprep remove`, which keeps nothing of it but the key
    FILTERED = ("filtered", "filter")
    NO_FIELD = ("no_field", "filter")  # a field lacks that the condition of a filter names
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
    TRANSPARENT = ("transparent", "check")
    OTHER_SIZE = ("other_size", "check")  # a mask, and its image has another size
    BAD_KEY = ("bad_key", "encode")  # of a foreign tar: it cannot be written, or is unsafe to
    NO_TOKENS = ("no_tokens", "encode")  # the tokenizers make nothing of the caption
    OTHER_SHAPE = ("other_shape", "encode")  # a cached array that is not like those of the dataset
    NO_ARRAY = ("no_array", "encode")  # a sample of a cache without one of its arrays
    NOT_FINITE = ("not_finite", "encode")  # neither in the models' dtype nor in fp32


ENDS_A_TAR = (Code.TAR_TRUNCATED, Code.TAR_BAD_HEADER, Code.TAR_VANISHED)
"""After these nothing more of a tar is read: nobody knows how many samples that costs."""


def by_stage(counts: Mapping[str, int]) -> Counter[str]:
    """Return how many were rejected at each stage, from the counts by code that receipts have."""
    stages: Counter[str] = Counter()
    for code, count in counts.items():
        stages[Code(code).stage] += count
    return stages
