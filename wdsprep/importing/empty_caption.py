"""Read the arrays of the empty caption, for classifier-free guidance, from where a user says.

A cache does not hold them, but its trainer has them in files, or uses zeros.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from wdsprep.dataset.digests import hex_digest
from wdsprep.dataset.npy_arrays import Field, is_finite, text_fields
from wdsprep.dataset.rejects import RejectedError
from wdsprep.errors import SourceError, UsageError
from wdsprep.importing.column_arrays import array_of, npy_of, to_stored, zeros
from wdsprep.importing.column_names import CachedColumn
from wdsprep.importing.import_plan import MEMBERS, SIDES
from wdsprep.store import split_url

ZEROS = "zeros"
Empty = Mapping[str, bytes]
"""The bytes of the arrays of the empty caption, by the name of their member."""


def empty_of(given: str, fields: Sequence[Field]) -> Empty:
    """Return the arrays of the empty caption that the user gives, or none.

    They are given as `zeros`, or as files: `emb=t5_empty.npy,pooled=clip_empty.npy`. Raise
    UsageError if these are not the arrays of text in `fields`, and SourceError if an array does not
    fit its field.
    """
    wanted = text_fields(fields)
    if not given:
        return {}
    if given == ZEROS:
        return {field.name: npy_of(field, zeros(field)) for field in wanted}
    files = dict(_file(part.strip()) for part in given.split(",") if part.strip())
    names = {field.name for field in wanted}
    if files.keys() != names:
        roles = ",".join(f"{name.removesuffix('.npy')}=FILE" for name in sorted(names))
        raise UsageError(f"--empty {given}: give {roles or 'none, as there is no text'}, or zeros")
    return {field.name: _member(field, files[field.name]) for field in wanted}


def _file(part: str) -> tuple[str, str]:
    role, equals, path = part.partition("=")
    if not equals or role not in MEMBERS:
        raise UsageError(f"--empty {part}: write ROLE=FILE, as emb=t5_empty.npy, or zeros")
    return MEMBERS[role], path


def _member(field: Field, path: str) -> bytes:
    role = next(role for role, name in MEMBERS.items() if name == field.name)
    store, name = split_url(path)
    data = store.read(name)
    try:
        raw = to_stored(array_of(CachedColumn(role=role, name=path), data), SIDES[role])
        member = npy_of(field, raw)
    except RejectedError as refused:
        raise SourceError(
            f"{path} cannot be the array of an empty caption ({refused.detail})"
        ) from refused
    if not is_finite(field.dtype, raw.data):
        raise SourceError(
            f"{path} cannot be the array of an empty caption (some values are not finite)"
        )
    return member


def empty_setting(given: str, empty: Empty) -> dict[str, Any]:
    """Return the settings about the empty caption: `zeros`, or the digest of its arrays."""
    if not given:
        return {}
    said = given if given == ZEROS else hex_digest(b"".join(empty.values()))
    return {"empty": said}
