"""Which members of a batch's samples come from which of the datasets that are joined.

A *slot* is the number of a dataset among those of a stream: 0 is the first, which gives the order,
and those joined to it follow. Where captions are picked by chance, each *choice* has its own
dataset for all that is made of captions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.arrays import FLIPPED, LATENT, MASK, Field, text_fields
from wdsprep.encoding.captions.sources import OWN
from wdsprep.errors import UsageError
from wdsprep.loading.grid import short
from wdsprep.text import examples

if TYPE_CHECKING:
    from wdsprep.loading.catalog import Dataset

TEXTS = ("txt", "caption")
OF_TEXTS = (*TEXTS, "json")


@dataclass(frozen=True, eq=False)
class Taking:
    """What is read of the samples of a dataset: the arrays, and what is kept of their texts.
    `fields` are all arrays of a sample; it is read whole where that is how it is served. What the
    json of several samples says is put together; `yields` is whether others know better."""

    fields: tuple[Field, ...]
    names: tuple[str, ...]
    texts: tuple[str, ...]
    is_whole: bool
    yields: bool

    def facts(self, others: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """The json of a sample, with what that of those beside it says."""
        return {**own, **others} if self.yields else {**others, **own}


@lru_cache(512)
def _taking(
    fields: tuple[Field, ...], names: tuple[str, ...], texts: tuple[str, ...], *flags: bool
) -> Taking:
    """The same one for the same, so that rows of several streams are checked together."""
    return Taking(fields, names, texts, *flags)


Takings = tuple[tuple[Taking | None, ...], ...]
"""Of one stream, by slot and choice; None where nothing is taken."""


def takings_of(
    dataset: "Dataset", names: Sequence[str], choices: Sequence[str], *, raw: bool
) -> Takings:
    """`choices` are the names of captions, or one that is empty where nothing is picked."""
    wanted = {*names, short(FLIPPED)} if not raw else None
    if wanted is not None:
        wanted |= {short(field.name) for field in measured(dataset, names)}
    texts = tuple(name for name in OF_TEXTS if raw or name in names)
    facts = tuple(name for name in texts if name == "json")
    by_choice = [givers(dataset, choice) for choice in choices]
    found = []
    for slot, part in enumerate(dataset.beside):
        row: list[Taking | None] = []
        for given, of_texts in by_choice:
            own = tuple(name for name, giver in given.items() if giver == slot)
            taken = own if wanted is None else tuple(name for name in own if name in wanted)
            kept = texts if slot == of_texts else facts if own or not slot else ()
            is_whole = raw or not part.fields
            made = _taking(part.fields, taken, kept, is_whole, slot > of_texts)
            row.append(made if slot == 0 or taken or kept else None)
        found.append(tuple(row))
    return tuple(found)


def measured(dataset: "Dataset", names: Sequence[str]) -> list[Field]:
    """The arrays of true length that a batch has; where it has a mask alone, what it is of."""
    variable = [field for field in dataset.served if field.is_variable]
    wanted = [field for field in variable if short(field.name) in names]
    return wanted or (variable if short(MASK) in names else [])


def shapes_of(dataset: "Dataset", names: Sequence[str]) -> dict[str, object]:
    """Return what decides the shape of each tensor of a batch, of those that are named."""
    fields = {field for field in dataset.served if short(field.name) in names}
    found: dict[str, object] = {
        short(field.name): field for field in fields.union(measured(dataset, names))
    }
    if short(LATENT) in found and dataset.has_moments:
        found[short(LATENT)] = (found[short(LATENT)], dataset.patch)
    return found | {name: kind for name, kind in dataset.columns.items() if name in names}


def texts_served(parts: Sequence["Dataset"], choice: str = "") -> list[tuple[Field, ...]]:
    """Of each part, those of its text arrays that are served. A part takes the place of the text of
    an earlier one as a whole where both have an array of one name: else a sample would have arrays
    of two captions."""
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


def givers(dataset: "Dataset", choice: str) -> tuple[dict[str, int], int]:
    """For each array the slot that it comes from, and the one for texts."""
    given: dict[str, int] = {}
    of_texts = 0
    for slot, own in enumerate(texts_served(dataset.beside, choice)):
        fields = dataset.beside[slot].fields
        left_out = {*text_fields(fields)} - {*own}
        given |= {short(field.name): slot for field in fields if field not in left_out}
        if own:
            of_texts = slot
    return given, of_texts


def caption_name(settings: Mapping[str, object]) -> str:
    """What the captions of a dataset are called."""
    return str(settings.get("caption_name", OWN))


def check_choices(dataset: "Dataset", names: Sequence[str], choices: Sequence[str]) -> None:
    """Refuse captions that are not there, or of which there are not the same arrays."""
    there = [caption_name(part.settings) for part in dataset.beside if text_fields(part.fields)]
    for choice in choices:
        if choice not in there:
            known = ", ".join(dict.fromkeys(there))
            raise UsageError(
                f"captions: {dataset.store.url} and what is joined to it have {known}, not "
                f"{choice}: join the text dataset that was made with --caption-name {choice}"
            )
    lengths = measured(dataset, names)
    served = text_fields(dataset.served)
    wanted = [field for field in served if short(field.name) in names or field in lengths]
    for choice in choices:
        given, _ = givers(dataset, choice)
        for field in wanted:
            slot = given.get(short(field.name))
            part = None if slot is None else dataset.beside[slot]
            if part is None or field not in part.fields:
                raise UsageError(
                    f"captions: those of {choice} have no {short(field.name)} of {field}, as "
                    "others have: pick among captions that were encoded alike, or leave it out of "
                    "fields="
                )


def check_once(dataset: "Dataset", choices: Sequence[str]) -> None:
    """Refuse two joined datasets that have the same array, and nothing that says which is meant."""
    for choice in choices or [""]:
        known: dict[str, str] = {}
        for part in dataset.beside[1:]:
            of_texts = text_fields(part.fields)
            own = [short(field.name) for field in part.fields if field not in of_texts]
            if not choice or caption_name(part.settings) == choice:
                own += [short(field.name) for field in of_texts]
            if twice := [name for name in own if name in known]:
                raise UsageError(
                    f"{known[twice[0]]} and {part.store.url} are joined, and both have "
                    f"{examples(twice)}: leave one of them out, or say captions= where they are "
                    "captions of other names"
                )
            known |= dict.fromkeys(own, part.store.url)
