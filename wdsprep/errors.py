"""Every error that wdsprep raises on purpose. Its message names the thing and the next step.

WdsprepError
├── UsageError           the request cannot be right                       exit 2
├── StoreError           bytes could not be listed, read, written, deleted
│   ├── NotFoundError
│   ├── ExistsError      an exclusive write found the name taken
│   ├── AccessError      credentials, permissions, a read-only place
│   ├── FullError        no space left
│   ├── BusyError        another run is at the same, for too long
│   └── ShortReadError   fewer bytes arrived than the store promised
├── TarError             a tar is not what it should be
├── FormatError          a manifest, receipt or index is damaged
│   └── NewerFormatError
├── FingerprintError     a resume with other settings or another source
├── SourceError          the source cannot be understood
└── WorkError            the runner could not get the work done

Anything else that escapes is a bug, and is reported as one.
"""

import re

# What a URL may keep to itself: a name and password, and a query, up to the marks after it.
SECRETS = re.compile(
    r"""(https?://)(?:[^\s/?#@]*@)?([^\s?#"'<>]*)(?:[?#]\S*?(?=[]:;,.)"'>}]*(?:\s|$)))?""",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """A text whose URLs end at their paths: a signed URL opens its file to all who read a log."""
    return SECRETS.sub(r"\1\2", text) if "://" in text else text


class WdsprepError(Exception):
    """A failure with a message for the user."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(without_secrets(message))


class UsageError(WdsprepError):
    exit_code = 2


class StoreError(WdsprepError):
    status = 0
    """Of the answer of a server of objects that is not S3, where there was one."""


class NotFoundError(StoreError):
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


class NewerFormatError(FormatError):
    pass


class FingerprintError(WdsprepError):
    pass


class SourceError(WdsprepError):
    pass


class WorkError(WdsprepError):
    pass
