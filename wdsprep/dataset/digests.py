"""The digest by which a dataset knows its files: BLAKE3, or SHA-256 in one that was begun before.

A dataset keeps the form that it was begun in, so that what is packed, encoded or mended later is
what it would have been, to the byte. `FORM` is that of new ones, which two of their settings say.
"""

import hashlib
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Protocol

from blake3 import blake3

from wdsprep.errors import FormatError

FORMAT = 2
"""The newest format of datasets that is read."""


class Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


class DigestKind(Enum):
    BLAKE3 = "blake3"
    SHA256 = "sha256"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "DigestKind":
        name = settings.get("digest", cls.SHA256.value)
        try:
            return cls(name)
        except ValueError:
            raise FormatError(f"digests of an unknown kind, {name!r}") from None

    def new(self) -> Hash:
        return blake3() if self is DigestKind.BLAKE3 else hashlib.sha256()

    def hex(self, data: bytes | memoryview) -> str:
        found = self.new()
        found.update(data)
        return found.hexdigest()

    @property
    def shown(self) -> str:
        return "BLAKE3" if self is DigestKind.BLAKE3 else "SHA-256"


FORM: Mapping[str, Any] = {"digest": DigestKind.BLAKE3.value, "format": FORMAT}
FIRST_FORM: Mapping[str, Any] = {"format": 1}


def form_of(settings: Mapping[str, Any], names: Iterable[str] = FORM) -> dict[str, Any]:
    """Return the settings of a dataset that have these names: by default format and digest.

    A name that the settings lack is left out.
    """
    return {name: settings[name] for name in names if name in settings}


def format_of(settings: Mapping[str, Any]) -> int:
    return int(settings.get("format", FIRST_FORM["format"]))
