"""Every error that wdsprep raises on purpose. Its message names the thing and the next step.

The code that reads a file knows where and why that fails; what to do about it depends on the
command. So the next step may be added on the way up (`WdsprepError.with_next_step`).

WdsprepError
├── UsageError           the request cannot be right                       exit 2
├── StoreError           bytes could not be listed, read, written, deleted
│   ├── NotFoundError
│   ├── NotAFileError    a folder, a pipe or a device stands in the place of a file
│   ├── ExistsError      an exclusive write found the name taken
│   ├── AccessError      credentials, permissions, a read-only place
│   ├── FullError        no space left
│   ├── BusyError        another run has held the same files for too long
│   └── ShortReadError   fewer bytes arrived than the store promised
├── TarError             a tar is not what it should be
├── FormatError          what was read has no format that is known here
│   ├── DamageError      a file of a dataset, such as a tar, is not as it was written
│   └── OtherFormatError
├── FingerprintError     a resume with other settings or another source
├── SourceError          the source cannot be understood
└── WorkError            the runner could not get the work done

Anything else that escapes is a bug, and is reported as one.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

Error = TypeVar("Error", bound="WdsprepError")

# The secrets of a web URL: a name and password, and a query, up to the punctuation after it. A path
# may have taken a slash from the URL. A backslash belongs to JSON, and stays with what it escapes.
SECRETS = re.compile(
    r"""(https?:/{1,2})(?:[^\s/?#"<>\\]*@)?([^\s?#"'<>\\]*)"""
    r"""(?:[?#](?:\\.|[^\s\\])*?(?=[]:;,.)"'>}]*(?:\s|$)))?""",
    re.IGNORECASE,
)
# The secrets of other URLs: a name and password, in which S3's have slashes, and a query that gives
# something a value. In names of files on S3 a question mark stands for itself.
OTHER_SECRETS = re.compile(
    r"""\b(?!https?:)([a-z][a-z0-9+.-]*://)(?:[^\s/?#"<>@:\\]*:(?!\d*/)[^\s?#"<>\\]*@)?"""
    r"""([^\s?#"'<>\\]*)"""
    r"""(?:\?(?=[\w.%-]+=)(?:\\.|[^\s\\])*?(?=[]:;,.)"'>}]*(?:\s|$)))?""",
    re.IGNORECASE,
)

# A query that is left because the path before it has a space, so that its URL ends earlier.
LEFT_QUERIES = re.compile(
    r"""(?<=[^\s?])\?(?=[\w.%-]+=)(?:\\.|[^\s\\])*?(?=[]:;,.)"'>}]*(?:\s|$))"""
)


def without_secrets(text: str) -> str:
    """Return a text without the credentials and queries of the URLs in it.

    A signed URL opens its file to everyone who reads it. All text for people goes through here as
    early as possible: an error when it is made, what is printed, a line of a log, the record of a
    tracker. JSON stays JSON.
    """
    if ":/" not in text:
        return text
    return LEFT_QUERIES.sub("", OTHER_SECRETS.sub(r"\1\2", SECRETS.sub(r"\1\2", text)))


def values_without_secrets(value: Any) -> Any:
    """Return a value without the URL secrets in its texts, at any depth of lists and mappings."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {name: values_without_secrets(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(values_without_secrets, value))
    return value


MOST, KEPT = 2_000, 900
"""The most characters of a message, and how many a longer message keeps at each end.

A stranger's file may have names of megabytes. The cause stands at the start of a message and the
next step at its end, so the middle is left out."""


class WdsprepError(Exception):
    """A failure with a message for the user."""

    exit_code = 1
    next_step = ""

    def __init__(self, message: str = "") -> None:
        text = without_secrets(message)
        super().__init__(text if len(text) <= MOST else f"{text[:KEPT]} ... {text[-KEPT:]}")

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}: {self.next_step}" if self.next_step else message

    def with_next_step(self: Error, next_step: str) -> Error:
        """Set the next step that this error names unless it has one, and return the error."""
        self.next_step = self.next_step or without_secrets(next_step)
        return self


class UsageError(WdsprepError):
    exit_code = 2


class StoreError(WdsprepError):
    status = 0
    """The HTTP status of the answer of an object store; 0 without an answer."""


class NotFoundError(StoreError):
    pass


class NotAFileError(StoreError):
    pass


class ExistsError(StoreError):
    pass


class AccessError(StoreError):
    pass


class FullError(StoreError):
    pass


class BusyError(StoreError):
    pass


class ShortReadError(StoreError):
    pass


class TarError(WdsprepError):
    pass


class FormatError(WdsprepError):
    pass


class DamageError(FormatError, TarError):
    """An error for a damaged file of a dataset.

    It has the path or URL of the file, the cause, and the key of the sample if that is known.
    """

    def __init__(self, place: str, cause: str, key: str = "") -> None:
        at = f" at sample {key}" if key else ""
        super().__init__(f"{place} is damaged{at}: {cause}")
        self.place, self.cause, self.key = map(without_secrets, (place, cause, key))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.place, self.cause, self.key), self.__dict__


class OtherFormatError(FormatError):
    pass


class FingerprintError(WdsprepError):
    pass


class SourceError(WdsprepError):
    pass


class WorkError(WdsprepError):
    pass
