"""Decide which arrays and texts are read of each joined dataset, and hold what is read of rows.

What is read (`WantedArrays`) is decided once, before anything is read. A *slot* is the number of a
dataset among those that are joined: 0 is the first, which gives the order, and those joined to it
follow. Where captions are picked by chance, each *choice* has its own dataset for everything that
is made of captions.

`RowReads` is what is read of some rows of a batch from one slot. The reads of all slots go in one
call. A thread that has made a system call waits for the interpreter's lock, and the checks before
the call hold that lock. With one call for all of them, two datasets that are joined take 1.08 times
the processor time of one dataset with the same bytes, at batches of 64; with a call for each they
took 1.10 times (two idle cores, page cache).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from wdsprep.dataset.aio import Bytes
from wdsprep.dataset.npy_arrays import Field
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.samples import role_of
from wdsprep.loading.batch_memory import Batch, PaddedRows
from wdsprep.loading.sample_layout import SampleLayout, batch_name
from wdsprep.loading.served_datasets import Dataset, presence_name
from wdsprep.loading.shard_access import ReadError, Shards

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

    def merge_json(self, others: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample's own json merged with the json of the samples joined so far.

        If both have a value, the sample's own is taken, unless this dataset yields.
        """
        return {**facts, **others} if self.yields else {**others, **facts}


_make_wanted = lru_cache(512)(WantedArrays)
"""Returns the same object for the same arguments, so that rows of streams are read together."""

WantedBySlot = tuple[tuple[WantedArrays | None, ...], ...]
"""The arrays wanted of one stream, by slot and choice; None if nothing is read there."""


def find_wanted(
    dataset: Dataset, names: Sequence[str], choices: Sequence[str], *, raw: bool
) -> WantedBySlot:
    """Return the arrays to read from each dataset of a stream, by slot and choice.

    `choices` are the names of captions, or one empty name if none are picked.
    """
    variable = (batch_name(field.name) for field in dataset.variable_fields(names))
    asked_for = {n for n in dataset.images_in_roles if presence_name(role_of(n)[0]) in names}
    mirrored = (batch_name(field.name) for field in dataset.served if field.mirrors)
    wanted = {*names, *mirrored, *variable, *asked_for}
    texts = tuple(name for name in TEXT_FIELDS if raw or name in names)
    facts = tuple(name for name in texts if name == "json")
    by_choice = [dataset.array_sources(choice) for choice in choices]
    by_slot = []
    for slot, part in enumerate(dataset.with_joined):
        row: list[WantedArrays | None] = []
        for slots, text_slot in by_choice:
            arrays = [name for name, giver in slots.items() if giver == slot]
            kept = tuple(name for name in arrays if raw or name in wanted)
            kept_texts = texts if slot == text_slot else facts if arrays or not slot else ()
            is_whole = raw or not part.fields or part.lacks_images
            arrays_wanted = _make_wanted(part.fields, kept, kept_texts, is_whole, slot > text_slot)
            row.append(arrays_wanted if slot == 0 or kept or kept_texts else None)
        by_slot.append(tuple(row))
    return tuple(by_slot)


@dataclass(kw_only=True, slots=True, eq=False)
class RowReads:
    """Rows of a batch to read from the datasets of one slot, and what was read of them.

    For each sample, `sources` has the shards of its dataset, `shards` the number of its shard among
    them, `indices` its own number in that shard, and `rows` the row of the columns to which its
    first bytes go, one column after another. With `rest`, its remaining bytes are wanted too;
    without columns these are all bytes. A sample may be shorter than the columns by up to `spare`
    bytes, which the last column then lacks.

    `read_samples` sets the size of each sample, its bytes after those in the columns, and by number
    the reason why a sample could not be read.

    `batch_rows` are these rows among those that one thread fills, the `run`. Their arrays, and the
    headers between these, go where the layout says; without a layout, samples are read whole.
    `padded` has the rows of an array of variable length, if that is wanted.
    """

    sources: Sequence[Shards]
    shards: Sequence[int]
    indices: Sequence[int]
    rows: Sequence[int]
    columns: Sequence[Bytes] = ()
    spare: int = 0
    rest: bool = False
    sizes: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    rests: list[memoryview] = field(default_factory=list)
    errors: dict[int, ReadError] = field(default_factory=dict)
    batch: Batch
    run: range
    batch_rows: Sequence[int]
    slot: int
    arrays: WantedArrays
    layout: SampleLayout | None = None
    headers: Bytes
    padded: PaddedRows | None = None

    @property
    def columns_nbytes(self) -> int:
        return sum(column.shape[1] for column in self.columns)

    @property
    def least_nbytes(self) -> int:
        return self.columns_nbytes - self.spare

    def buffers(self, number: int) -> list[Bytes]:
        """Return the memory for the first bytes of a sample, part by part."""
        return [column[self.rows[number]] for column in self.columns]

    def leave_out(self, rows: Collection[int]) -> None:
        """Remove these rows, and what was read for them, since other datasets lack them."""
        kept = [number for number, row in enumerate(self.batch_rows) if row not in rows]
        self.batch_rows = [self.batch_rows[number] for number in kept]
        self.sizes = self.sizes[kept]
        self.rests = [self.rests[number] for number in kept]
        self.errors = {at: self.errors[n] for at, n in enumerate(kept) if n in self.errors}


def select_rows(values: Sequence[Any], rows: Sequence[int]) -> Sequence[Any]:
    if isinstance(rows, range):
        return values[rows.start : rows.stop]
    return [values[row] for row in rows]


def as_index(rows: Sequence[int]) -> "slice | Sequence[int]":
    """Return an index of rows for NumPy, which is faster with a slice than with numbers."""
    return slice(rows.start, rows.stop) if isinstance(rows, range) else rows
