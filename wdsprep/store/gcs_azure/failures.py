"""Which failures of GCS and Azure are worth another attempt, and what the others mean for the user.

obstore says what happened in the class of its error, or else in the error's text, of which the
status is taken and what the server gave as its code. The text itself is not shown: it has URLs, and
is many lines long.
"""

import re

from wdsprep.errors import (
    AccessError,
    ExistsError,
    FullError,
    NotFoundError,
    ShortReadError,
    StoreError,
    UsageError,
)
from wdsprep.store.remote import NOT_SUPPORTED, Failures

BEYOND = 416
PAST_ITS_END = "Wanted range starting at"
FULL = ("QuotaExceeded", "InsufficientStorage", "AccountBeingCreated")
OF_CREDENTIALS = re.compile(
    r"credential|token request|metadata (request|server)|oauth|InstanceMetadata|service.?account"
    r"|private key|account name|Account must be",
    re.IGNORECASE,
)
SETTINGS = {
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
    "az": "check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


def is_transient(error: Exception) -> bool:
    if isinstance(error, ShortReadError):
        return True
    if kind_of(error) != "GenericError":
        return False
    status = status_of(error)
    if not status:
        return not (is_of_credentials(error) or PAST_ITS_END in str(error))
    return status in (408, 429) or (status >= 500 and status not in NOT_SUPPORTED)


def kind_of(error: BaseException) -> str:
    """Return the name of an error's class: each copy of the library has classes of its own."""
    return type(error).__name__


def status_of(error: BaseException) -> int:
    found = re.search(r"status code: (\d{3})|status: (\d{3}),", str(error))
    return int(found[1] or found[2]) if found else 0


def code_of(error: BaseException) -> str:
    found = re.search(r"<Code>(\w+)</Code>", str(error))
    return found[1] if found else ""


def is_of_credentials(error: BaseException) -> bool:
    return bool(OF_CREDENTIALS.search(str(error).partition("\n\nDebug source")[0]))


def is_beyond(error: BaseException) -> bool:
    """Return whether an error may say that a file ends before the range asked for."""
    is_said = status_of(error) == BEYOND or code_of(error) == "InvalidRange"
    return is_said or PAST_ITS_END in str(error)


def _is_plain(error: Exception) -> bool:
    """Return whether an error of one of Python's own classes was raised by the library."""
    beginnings = {FileNotFoundError: "Object at location", ValueError: "Could not parse path"}
    return str(error).startswith(beginnings.get(type(error), "\0"))


def _explain(error: Exception, what: str, place: str) -> StoreError | UsageError | None:
    if type(error).__module__.partition(".")[0] != "obstore" and not _is_plain(error):
        return None
    kind, code, status = kind_of(error), code_of(error), status_of(error)
    settings, said = SETTINGS[place.partition(":")[0]], f"{status} {code}".rstrip()
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return NotFoundError(f"{place}: no such bucket or container: create it, or check the name")
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{what}: no such object")
    if kind in ("AlreadyExistsError", "PreconditionError"):
        return ExistsError(f"{what}: exists already")
    if code in FULL or status == 507:
        return FullError(f"{what}: no space left there ({code}): make room and run the same again")
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return AccessError(f"{what}: access denied{f' ({code})' if code else ''}: {settings}")
    if kind in ("InvalidPathError", "ValueError"):
        return UsageError(f"{what}: such a name cannot be used there")
    if status and is_transient(error):
        return StoreError(f"{what}: the server answered {said} again and again: try later")
    if status:
        return StoreError(f"{what}: the server answered {said}: {settings}")
    if is_of_credentials(error):
        return AccessError(f"{what}: no credentials that work: {settings}")
    return StoreError(f"{what}: {_cause(error)}: check the network, or {settings}")


def _cause(error: Exception) -> str:
    """Return the last reason on an error's first line, without URLs, or "no answer"."""
    line = str(error).partition("\n")[0]
    reason = re.split(r", source: ?| - |: ", line)[-1]
    return re.sub(r"\S+://\S+", "", reason).strip(" .()") or "no answer"


FAILURES = Failures(is_transient, status_of, _explain)
