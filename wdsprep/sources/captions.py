"""Captions and facts as people leave them: text files, JSON beside an image, columns of a table."""

import datetime
import math
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from typing import Any

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import MAPPING, parse_json, value_at_path
from wdsprep.text import shown

MAX_DEPTH = 64
"""The most objects and lists within each other: more is an attack, on us or on who reads the
shards."""
_AS_THEY_ARE = frozenset({str, int, bool})
"""The types of values that any JSON can hold, which nearly all are."""
CAPTIONS = (".txt",)
"""The extensions of caption files, unless the user names others."""
NAMES = (
    *("caption", "text", "captions", "prompt", "TEXT", "CAPTION", "title", "description", "alt"),
    *("edit_prompt", "edit_instruction", "instruction"),
)
"""The names under which captions are looked up, of edits what to change."""


def decode_text(data: bytes, what: str) -> str:
    """Decode the text of a caption file, without the white space around it.

    Raise RejectedError if the text is not UTF-8. The error calls the file `what`.
    """
    try:
        return data.removeprefix(BOM_UTF8).decode().strip()
    except UnicodeDecodeError as error:
        raise RejectedError(
            Code.BAD_CAPTION, f"{shown(what)} is not UTF-8 (byte {error.start}): save it as UTF-8"
        ) from None


def decode_facts(data: bytes, what: str) -> dict[str, Any]:
    """Parse the JSON object beside an image, without values that are null or not finite.

    Raise RejectedError if the data is anything else. The error calls the file `what`.
    """
    try:
        found = parse_json(data)
        if isinstance(found, dict):
            return plain_facts(found)
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, absurdly deep
        raise RejectedError(Code.BAD_JSON, f"{shown(what)}: {error}") from None
    raise RejectedError(Code.BAD_JSON, f"{shown(what)}: {type(found).__name__}, not an object")


def captions_of(facts: Mapping[str, Any], column: str = "") -> tuple[str, ...]:
    """Return the captions in a sample's metadata, under the first name that has any.

    Only the name `column` is looked up if it is given, else those of NAMES in their order. The
    value is a text or a list of texts; a number, such as a class, is taken as a text.
    """
    for name in (column,) if column else NAMES:
        value = facts.get(name)
        if value is None:
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        texts = value if isinstance(value, list) else [value]
        captions = tuple(text.strip() for text in texts if isinstance(text, str) and text.strip())
        if captions:
            return captions
    return ()


def caption_at(facts: Mapping[str, Any], path: str) -> str | None:
    """Return the caption at a path in a sample's metadata, or None if there is none.

    Of several captions, return the first. White space around the caption is removed.
    """
    captions = captions_of({path: value_at_path(facts, path)}, path)
    return captions[0] if captions else None


def first_of(names: Sequence[str], there: Sequence[str]) -> str:
    """Return the first of the names that is among those `there`, or "" if there is none."""
    return next((name for name in names if name in there), "")


def apply_caption_file(text: str, captions: tuple[str, ...]) -> tuple[str, ...]:
    """Return the captions of a sample that has a caption file with this text.

    `captions` are those in the sample's metadata. Return them if the text is empty or equals the
    first of them; otherwise return the text alone.
    """
    return captions if not text or captions[:1] == (text,) else (text,)


def plain_facts(facts: Mapping[str, Any], depth: int = 1) -> dict[str, Any]:
    """Return facts as JSON can hold them, without those that are null, bytes, NaN or infinite.

    Dates and values of other types become texts. `depth` is the depth at which `facts` are
    nested. Raise RejectedError if values are nested more than MAX_DEPTH deep.
    """
    if depth > MAX_DEPTH:
        raise _too_deep()
    return {
        str(name): plain
        for name, value in facts.items()
        if (plain := value if type(value) in _AS_THEY_ARE else _plain(value, depth)) is not None
    }


def _plain(value: object, depth: int) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list | tuple):
        if depth == MAX_DEPTH:
            raise _too_deep()
        return [plain for item in value if (plain := _plain(item, depth + 1)) is not None]
    if isinstance(value, MAPPING):
        return plain_facts(value, depth + 1)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return None if isinstance(value, bytes | bytearray) else str(value)


def _too_deep() -> RejectedError:
    return RejectedError(Code.BAD_JSON, f"nested more than {MAX_DEPTH} deep")
