"""Which failures of the hub are worth another attempt, and what the others mean for the user."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from wdsprep.errors import AccessError, NotFoundError, ShortReadError, StoreError, UsageError
from wdsprep.store.retry import FIRST_PAUSE_S, persist

BUSY = (408, 429, 500, 502, 503, 504)
T = TypeVar("T")


class AnswerError(Exception):
    """The error that a server has answered with a status, and no bytes."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


def retrying(act: Callable[[], T], *, pause_s: float = FIRST_PAUSE_S) -> T:
    return persist(act, is_transient, pause_s)


def is_transient(error: Exception) -> bool:
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        return is_transient(error.__cause__)  # so the library tells of an upload
    return isinstance(error, (ShortReadError, _no_answer_error())) or status_of(error) in BUSY


def _no_answer_error() -> type[Exception]:
    """Return the error class that the hub's library raises if no answer comes.

    It is that of the HTTP library under it, which differs between versions.
    """
    from huggingface_hub import get_session

    client = importlib.import_module(type(get_session()).__module__.partition(".")[0])
    error: type[Exception] = client.TransportError
    return error


def status_of(error: BaseException) -> int:
    if isinstance(error, AnswerError):
        return error.status
    response = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0))


@contextlib.contextmanager
def store_errors(what: str, repository: str) -> Iterator[None]:
    """Turn errors of the hub's library into errors of wdsprep that say what a user can do."""
    try:
        yield
    except (StoreError, UsageError):
        raise
    except Exception as error:
        of_upload = isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception)
        cause = error.__cause__ if of_upload else error
        found = _explain(cause, what, repository)
        if found is None:
            raise
        if isinstance(found, StoreError):
            found.status = status_of(error)
        raise found from None  # its own words may have a signed URL


def _explain(error: Any, what: str, repository: str) -> Exception | None:
    from huggingface_hub import errors

    status, kind = status_of(error), type(error).__name__
    if isinstance(error, errors.OfflineModeIsEnabled):
        return AccessError(f"{what}: HF_HUB_OFFLINE is set, which forbids it: unset it")
    if isinstance(error, errors.GatedRepoError):
        return AccessError(f"{repository}: the dataset is gated: ask for access on its page")
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFoundError(f"{repository}: no such revision: check what is behind the @")
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFoundError(
            f"{repository}: no such dataset, or none that you may see: create it, check the name, "
            "or set HF_TOKEN"
        )
    if isinstance(error, errors.EntryNotFoundError) or status in (404, 410):
        return NotFoundError(f"{what}: no such file")
    if status in (401, 403):
        return AccessError(f"{what}: the hub refuses ({status}): set HF_TOKEN or run hf auth login")
    if isinstance(error, errors.HFValidationError):
        return UsageError(f"{repository}: not a name of a dataset: give hf://datasets/OWNER/NAME")
    if status and is_transient(error):
        return StoreError(f"{what}: the hub answered {status} again and again: try later")
    if status:
        said = str(getattr(error, "server_message", "") or kind)
        return StoreError(f"{what}: the hub answered {status}: {' '.join(said.split())}")
    if isinstance(error, _no_answer_error()):
        return StoreError(f"{what}: {kind}: check the network or HF_ENDPOINT")
    return None
