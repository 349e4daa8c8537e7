"""Small files that say themselves whether they are whole.

Each is one line of canonical JSON that begins with a digest of all that follows it, so one flipped
bit anywhere is found. A large one is written piece by piece.

Here too are the number of the format of datasets, and the digest by which a dataset knows its
files: BLAKE3.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from blake3 import blake3

from wdsprep.dataset.json_records import Count, Fields, Text, check_record, read_record
from wdsprep.errors import DamageError, OtherFormatError
from wdsprep.text import brief

_HEAD, _MIDDLE, _END = b'{"digest":"', b'",', b"}\n"
_BODY = len(_HEAD) + 64 + len(_MIDDLE)
OTHER_DIGEST = "its digest does not match what it holds"
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode


SEALED = Fields({"format": Count, "kind": Text})
"""The fields that all sealed files have."""


def canonical_json(body: object) -> bytes:
    """Encode a value as JSON, equal values as equal bytes.

    A path in the value may be bytes that are no UTF-8.
    """
    return _encode(body).encode("utf-8", "surrogatepass")


def seal(
    kind: str, body: Mapping[str, Any], more: Callable[[], Iterable[bytes]] = lambda: ()
) -> Iterator[bytes]:
    """Yield a sealed file piece by piece.

    `more` makes what follows the body: once for the digest, and once for the file.
    """
    head = canonical_json({**body, "format": FORMAT, "kind": kind})[1 : -len("}")]
    digest = blake3(head)
    for piece in _with_end(more()):
        digest.update(piece)
    yield _HEAD + digest.hexdigest().encode() + _MIDDLE + head
    yield from _with_end(more())


def _with_end(pieces: Iterable[bytes]) -> Iterator[bytes]:
    yield from pieces
    yield _END


def check_seal(data: bytes, what: str) -> None:
    """Check by its digest that a sealed file is as it was written."""
    body, head = memoryview(data)[_BODY:], data[:_BODY]
    if head != _HEAD + hex_digest(body).encode() + _MIDDLE:
        raise DamageError(what, OTHER_DIGEST)


def check_format(stated: int, what: str) -> None:
    if stated != FORMAT:
        raise OtherFormatError(
            f"{what} is of format {stated}, and this wdsprep reads format {FORMAT} alone: use the "
            "wdsprep that wrote it, or make the dataset again with --overwrite"
        )


def unseal(kind: str, head: Fields, data: bytes, what: str) -> dict[str, Any]:
    """Return the body of a sealed file, checked to be of this kind with the fields of `head`.

    Its digest is not checked: `check_seal` does that.
    """
    body: dict[str, Any] = read_record(SEALED, data, what)
    check_format(body["format"], what)
    if body["kind"] != kind:
        found = brief(body["kind"])[1:-1]
        raise DamageError(what, f"it holds a {found} where a {kind} should be")
    check_record(head, body, what)
    return body


FORMAT = 1
"""The format of the datasets that are written and read."""


def hex_digest(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest()
