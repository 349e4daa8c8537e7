"""Which of several joined datasets gives each array of a batch.

A *slot* is the number of a dataset among those of a stream: 0 is the first, which gives the order,
and those joined to it follow. An array of a later one takes the place of one of the same name.
Where captions are picked by chance, each *choice* has its own dataset for all that is made of
captions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from wdsprep.dataset.arrays import Field, text_fields
from wdsprep.encoding.captions import OWN
from wdsprep.loading.grid import short


class HasFields(Protocol):
    """A dataset, of which its arrays count and what its captions are called."""

    @property
    def fields(self) -> tuple[Field, ...]: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...


def served_fields(parts: Sequence[HasFields]) -> tuple[Field, ...]:
    """Return the arrays of a sample in a batch, in the order of the datasets."""
    given, _ = givers(parts)
    return tuple(
        field
        for slot, part in enumerate(parts)
        for field in part.fields
        if given.get(short(field.name)) == slot
    )


def texts_served(parts: Sequence[HasFields], choice: str = "") -> list[tuple[Field, ...]]:
    """Return the text arrays of each dataset that are served.

    One takes the place of the text of an earlier one as a whole where both have an array of one
    name: else a sample would have arrays of two captions."""
    found: list[tuple[Field, ...]] = []
    later: set[str] = set()
    for part in reversed(parts):
        own = text_fields(part.fields)
        is_other = bool(choice) and caption_name(part.settings) != choice
        if is_other or not later.isdisjoint(field.name for field in own):
            own = ()
        later |= {field.name for field in own}
        found.append(own)
    return found[::-1]


def givers(parts: Sequence[HasFields], choice: str = "") -> tuple[dict[str, int], int]:
    """Return the slot that each array comes from, by name, and the one of texts."""
    given: dict[str, int] = {}
    of_texts = 0
    for slot, own in enumerate(texts_served(parts, choice)):
        fields = parts[slot].fields
        left_out = {*text_fields(fields)} - {*own}
        given |= {short(field.name): slot for field in fields if field not in left_out}
        if own:
            of_texts = slot
    return given, of_texts


def caption_name(settings: Mapping[str, object]) -> str:
    """Return what the captions of a dataset are called."""
    return str(settings.get("caption_name", OWN))
