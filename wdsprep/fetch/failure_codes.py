"""What a failed transfer or an HTTP status means in our own codes."""

import errno
import re

import pycurl

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.errors import WorkError

_SYSTEM = {
    errno.ECONNREFUSED: Code.REFUSED,
    errno.ETIMEDOUT: Code.TIMEOUT,
    errno.ECONNRESET: Code.BROKEN_OFF,
    errno.EPIPE: Code.BROKEN_OFF,
}
_CODES = {
    pycurl.E_COULDNT_RESOLVE_HOST: Code.DNS,
    pycurl.E_COULDNT_CONNECT: Code.UNREACHABLE,
    pycurl.E_OPERATION_TIMEDOUT: Code.TIMEOUT,
    pycurl.E_URL_MALFORMAT: Code.BAD_URL,
    pycurl.E_SSL_CONNECT_ERROR: Code.TLS,
    pycurl.E_PEER_FAILED_VERIFICATION: Code.TLS,
}
_E_TOO_LARGE = 100  # pycurl has no name for it
_BROKEN = {
    **dict.fromkeys((pycurl.E_RECV_ERROR, pycurl.E_SEND_ERROR, pycurl.E_PARTIAL_FILE), ""),
    pycurl.E_GOT_NOTHING: "no answer before the end",
    pycurl.E_UNSUPPORTED_PROTOCOL: "not HTTP",
    pycurl.E_FTP_WEIRD_SERVER_REPLY: "not HTTP",
    pycurl.E_BAD_CONTENT_ENCODING: "a content encoding that cannot be undone",
    _E_TOO_LARGE: "too large a header",
}
_HERE = {pycurl.E_OUT_OF_MEMORY, pycurl.E_FAILED_INIT, pycurl.E_SSL_CACERT_BADFILE}
_VERIFY = re.compile(r".*verify result: (.*?)(?: \(\d+\))?$")
_AFTER = re.compile(r" after \d+ (?:ms|milliseconds)(?:: Could not connect to server)?")


def rejection_for_curl(error: int, message: str, *, system: int, resolved: bool) -> RejectedError:
    """Return the rejection for libcurl's error. Raise an error if it is this machine's fault.

    `system` is the error number of the system, if there was one. `resolved` tells whether an
    address was known: time that ran out before that is the name service's, whatever libcurl was
    doing by its own words.
    """
    if error in (pycurl.E_COULDNT_CONNECT, pycurl.E_SSL_CONNECT_ERROR) and system in _SYSTEM:
        return RejectedError(_SYSTEM[system], _short(message))
    if error == pycurl.E_OPERATION_TIMEDOUT and not resolved:
        return RejectedError(Code.DNS, _short(message))
    if error in _CODES:
        return RejectedError(_CODES[error], _short(message))
    if error in _BROKEN:
        return RejectedError(Code.BROKEN_OFF, _BROKEN[error] or _short(message))
    if error in _HERE:
        raise WorkError(f"libcurl cannot work here: {message}: mend that, then run the same again")
    raise RuntimeError(f"libcurl failed with error {error}: {message}")


def rejection_for_status(status: int) -> RejectedError | None:
    """Return the rejection for an HTTP status, or None if the body is to be read."""
    detail = f"HTTP {status}"
    if status in (200, 201, 203):
        return None
    if status < 300 or status == 304:
        code = Code.BROKEN_OFF if status in (101, 206) else Code.EMPTY
    elif status < 400:
        code = Code.REDIRECTS
    elif status in (408, 429):
        code = Code.TIMEOUT if status == 408 else Code.HTTP_429
    else:
        code = Code.HTTP_5XX if 500 <= status < 600 else Code.HTTP_4XX
    return RejectedError(code, detail)


def _short(message: str) -> str:
    text = " ".join(_AFTER.sub("", _VERIFY.sub(r"\1", message)).split())
    return text if len(text) <= 120 else text[:119] + "…"
