"""Decide which arrays and texts are read of each joined dataset.

This is decided once, before anything is read. A *slot* is the number of a dataset among those that
are joined: 0 is the first, which gives the order, and those joined to it follow. Where captions are
picked by chance, each *choice* has its own dataset for everything that is made of captions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from wdsprep.dataset.npy_arrays import FLIPPED, LATENT, MASK, Field, text_fields
from wdsprep.errors import UsageError
from wdsprep.loading.sample_layout import batch_name
from wdsprep.loading.served_datasets import Dataset, caption_name
from wdsprep.text import examples

TEXTS = ("txt", "caption")
TEXT_FIELDS = (*TEXTS, "json")


@dataclass(frozen=True, eq=False)
class WantedArrays:
    """The arrays and texts that are read of a dataset's samples.

    `fields` are all arrays of a sample, and `names` those that are kept. If `is_whole`, samples
    are read completely. The json of joined samples is merged; if `yields`, this one's values
    give way to those of the others.
    """

    fields: tuple[Field, ...]
    names: tuple[str, ...]
    texts: tuple[str, ...]
    is_whole: bool
    yields: bool

    def merge_json(self, others: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample's own json merged with the json of the samples joined so far.

        If both have a value, the sample's own is taken, unless this dataset yields.
        """
        return {**own, **others} if self.yields else {**others, **own}


@lru_cache(512)
def _make_wanted(
    fields: tuple[Field, ...], names: tuple[str, ...], texts: tuple[str, ...], *flags: bool
) -> WantedArrays:
    """Return wanted arrays, as the same object for the same arguments.

    So rows of several streams are read together.
    """
    return WantedArrays(fields, names, texts, *flags)


WantedBySlot = tuple[tuple[WantedArrays | None, ...], ...]
"""The arrays wanted of one stream, by slot and choice; None if nothing is read there."""


def find_wanted(
    dataset: Dataset, names: Sequence[str], choices: Sequence[str], *, raw: bool
) -> WantedBySlot:
    """Return the arrays to read from each dataset of a stream, by slot and choice.

    `choices` are the names of captions, or one empty name if none are picked.
    """
    wanted = {*names, batch_name(FLIPPED)} if not raw else None
    if wanted is not None:
        wanted |= {batch_name(field.name) for field in variable_fields(dataset, names)}
    texts = tuple(name for name in TEXT_FIELDS if raw or name in names)
    facts = tuple(name for name in texts if name == "json")
    by_choice = [dataset.array_sources(choice) for choice in choices]
    found = []
    for slot, part in enumerate(dataset.with_joined):
        row: list[WantedArrays | None] = []
        for given, of_texts in by_choice:
            own = tuple(name for name, giver in given.items() if giver == slot)
            taken = own if wanted is None else tuple(name for name in own if name in wanted)
            kept = texts if slot == of_texts else facts if own or not slot else ()
            is_whole = raw or not part.fields
            made = _make_wanted(part.fields, taken, kept, is_whole, slot > of_texts)
            row.append(made if slot == 0 or taken or kept else None)
        found.append(tuple(row))
    return tuple(found)


def variable_fields(dataset: Dataset, names: Sequence[str]) -> list[Field]:
    """Return the fields of variable length that a batch holds, or whose mask it holds."""
    variable = [field for field in dataset.served if field.is_variable]
    wanted = [field for field in variable if batch_name(field.name) in names]
    return wanted or (variable if batch_name(MASK) in names else [])


def tensor_shapes(dataset: Dataset, names: Sequence[str]) -> dict[str, object]:
    """Return a value for each named tensor of a batch, by which two datasets can be compared.

    Equal values mean tensors of the same dtype and shape.
    """
    fields = {field for field in dataset.served if batch_name(field.name) in names}
    found: dict[str, object] = {
        batch_name(field.name): field for field in fields.union(variable_fields(dataset, names))
    }
    if batch_name(LATENT) in found and dataset.has_moments:
        found[batch_name(LATENT)] = (found[batch_name(LATENT)], dataset.patch)
    return found | {name: kind for name, kind in dataset.columns.items() if name in names}


def check_choices(dataset: Dataset, names: Sequence[str], choices: Sequence[str]) -> None:
    """Raise UsageError if no dataset has the captions of a choice, or if arrays of these differ."""
    there = [
        caption_name(part.settings) for part in dataset.with_joined if text_fields(part.fields)
    ]
    for choice in choices:
        if choice not in there:
            known = ", ".join(dict.fromkeys(there))
            raise UsageError(
                f"captions={choice}: {dataset.store.url} and the datasets joined to it have "
                f"{known}; join the text dataset that was made with --caption-name {choice}"
            )
    lengths = variable_fields(dataset, names)
    served = text_fields(dataset.served)
    wanted = [field for field in served if batch_name(field.name) in names or field in lengths]
    for choice in choices:
        given, _ = dataset.array_sources(choice)
        for field in wanted:
            slot = given.get(batch_name(field.name))
            part = None if slot is None else dataset.with_joined[slot]
            if part is None or field not in part.fields:
                raise UsageError(
                    f"the captions {choice} have no {batch_name(field.name)} like that of others "
                    f"({field}): pick among captions that were encoded alike, or leave it out of "
                    "fields="
                )


def check_unique_arrays(dataset: Dataset, choices: Sequence[str]) -> None:
    """Raise UsageError if two joined datasets have the same array in one choice of captions."""
    for choice in choices or [""]:
        known: dict[str, str] = {}
        for part in dataset.with_joined[1:]:
            of_texts = text_fields(part.fields)
            own = [batch_name(field.name) for field in part.fields if field not in of_texts]
            if not choice or caption_name(part.settings) == choice:
                own += [batch_name(field.name) for field in of_texts]
            if twice := [name for name in own if name in known]:
                raise UsageError(
                    f"{known[twice[0]]} and {part.store.url} are joined, and both have "
                    f"{examples(twice)}: leave one of them out, or give captions= if they hold "
                    "captions of different names"
                )
            known |= dict.fromkeys(own, part.store.url)
