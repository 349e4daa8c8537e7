"""Which failures of S3 are worth another attempt, and what the others mean for the user.

boto3's own retries are switched off: they leave out a plain 429 and a body that breaks off, and
stop for good after some hundred failures in a row, which is one bad second of a busy loader.
"""

import socket
from typing import Any

from wdsprep.errors import (
    AccessError,
    ExistsError,
    FullError,
    NotFoundError,
    ShortReadError,
    StoreError,
    UsageError,
)
from wdsprep.store.remote import is_busy

BUSY = {"SlowDown", "RequestTimeout", "ConditionalRequestConflict", "OperationAborted"}
FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"}
SET_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
REFUSED = {
    "InvalidAccessKeyId": "the access key is unknown there: check AWS_ACCESS_KEY_ID or AWS_PROFILE",
    "SignatureDoesNotMatch": "the secret key is wrong: check AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    "ExpiredToken": "the credentials have expired: log in again",
    "InvalidToken": "the session token is wrong: check AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": f"the clock of {socket.gethostname()} is wrong: set it, or start NTP",
}


def is_transient(error: Exception) -> bool:
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError, SSLError
    from botocore.parsers import ResponseParserError

    if isinstance(error, ClientError):
        return code_of(error) in BUSY or is_busy(status_of(error))
    lost = (ConnectionError, HTTPClientError, ResponseParserError, ShortReadError)
    return isinstance(error, lost) and not isinstance(error, SSLError)


def code_of(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: Any) -> int:
    response = getattr(error, "response", None) or {}  # None without an answer
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def explain(error: Any, what: str, bucket: str) -> StoreError | UsageError | None:
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        NoCredentialsError,
        ParamValidationError,
    )

    if isinstance(error, ParamValidationError):
        return UsageError(f"{what}: {_one_line(error)}")
    if isinstance(error, NoCredentialsError):
        return AccessError(f"{bucket}: no credentials: {SET_KEYS}")
    if isinstance(error, BotoCoreError) and is_transient(error):
        return StoreError(f"{what}: {_one_line(error)}: check the network or AWS_ENDPOINT_URL")
    if isinstance(error, BotoCoreError):
        return settings_error(error, bucket)
    if not isinstance(error, ClientError):
        return None
    code, status = code_of(error), status_of(error)
    if code == "NoSuchBucket":
        return NotFoundError(f"{bucket}: no such bucket: create it, or check the name")
    if code in ("NoSuchKey", "404"):
        return NotFoundError(f"{what}: no such object")
    if code in FULL or status == 507:
        return FullError(f"{what}: no space left there ({code}): make room and run the same again")
    if code in REFUSED:
        return AccessError(f"{bucket}: {REFUSED[code]}")
    if status in (401, 403):
        return AccessError(f"{what}: access denied: check the permissions of these credentials")
    if status == 412:
        return ExistsError(f"{what}: exists already")
    if is_transient(error):
        return StoreError(f"{what}: the server answered {status} {code} again and again: try later")
    said = _one_line(error.response["Error"].get("Message") or code)
    return StoreError(f"{what}: the server answered {status} {code}: {said}")


def settings_error(error: Exception, bucket: str) -> AccessError:
    """Return the error for a missing profile, a bad endpoint URL, or half a pair of keys."""
    from botocore.exceptions import PartialCredentialsError

    if isinstance(error, PartialCredentialsError):
        half = f"half of the credentials is missing, {error.kwargs['cred_var']}"
        return AccessError(f"{bucket}: {half}: {SET_KEYS}")
    return AccessError(f"{bucket}: {_one_line(error)}: check the AWS settings")


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")
