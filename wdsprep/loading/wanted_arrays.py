"""Decide which arrays and texts are read of each joined dataset, and read them together.

What is read (`WantedArrays`) is decided once, before anything is read. A *slot* is the number of a
dataset among those that are joined: 0 is the first, which gives the order, and those joined to it
follow. Where captions are picked by chance, each *choice* has its own dataset for everything that
is made of captions.

`RowRead` is what is read of some rows of a batch from all joined datasets, in one call. A thread
that has made a system call waits for the interpreter's lock, and the checks before the call hold
that lock. With one call for all of them, two datasets that are joined take 1.08 times the processor
time of one dataset with the same bytes, at batches of 64; with a call for each they took 1.10 times
(two idle cores, page cache).

`SampleTexts` finds what a sample has beside its arrays: its members, its caption, its json.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from wdsprep.dataset.aio import Bytes
from wdsprep.dataset.npy_arrays import FLIPPED, LATENT, MASK, Field, text_fields
from wdsprep.dataset.samples import parse_json
from wdsprep.dataset.tar import END
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import TarSample, scan
from wdsprep.errors import UsageError
from wdsprep.loading.batch_memory import Batch, PaddedRows
from wdsprep.loading.sample_layout import SampleLayout, batch_name
from wdsprep.loading.served_datasets import Dataset, caption_name
from wdsprep.loading.shard_access.local import (
    NONE,
    ByteColumns,
    ReadError,
    ReadSamples,
    Shelf,
    WantedSamples,
    read_samples,
)
from wdsprep.sources.captions import caption_at
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
        for text_field in wanted:
            slot = given.get(batch_name(text_field.name))
            part = None if slot is None else dataset.with_joined[slot]
            if part is None or text_field not in part.fields:
                raise UsageError(
                    f"the captions {choice} have no {batch_name(text_field.name)} like that of "
                    f"others ({text_field}): pick among captions that were encoded alike, or leave "
                    "it out of fields="
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


NOTHING_READ = ReadSamples(np.empty(0, np.int64), (), {})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArrayMemory:
    """The memory that the arrays of some rows, and the headers between them, are read into."""

    layout: SampleLayout
    columns: ByteColumns
    headers: Bytes
    padded: PaddedRows | None = None
    """The rows of an array of variable length, if that is wanted."""

    @property
    def spare(self) -> int:
        return self.padded.row_nbytes if self.padded else 0


@dataclass(kw_only=True, slots=True, eq=False)
class RowRead:
    """Rows of a batch to read from one dataset, and the result of reading them.

    `slot` is the number of that dataset among the joined ones. Without `memory`, samples are
    read whole.
    """

    batch: Batch
    run: range
    """The run of rows that one thread fills."""
    rows: Sequence[int]
    """Those of them that are read."""
    slot: int
    arrays: WantedArrays
    memory: ArrayMemory | None = None
    result: ReadSamples = field(default=NOTHING_READ)

    @property
    def wants_rest(self) -> bool:
        return self.memory is None or bool(self.arrays.texts)

    def group_by_stream(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield each stream with the numbers of its rows, counted among the rows to read."""
        streams = select_rows(self.batch.stream, self.rows)
        if len(set(streams)) == 1:
            yield streams[0], range(len(streams))
            return
        for stream in set(streams):
            yield stream, [number for number, own in enumerate(streams) if own == stream]

    def samples_to_read(self, numbers: Sequence[int]) -> WantedSamples:
        """Return the samples to read for the rows with these numbers, which are of one stream."""
        batch, memory = self.batch, self.memory
        places = batch.joined_places[self.slot - 1] if self.slot else (batch.shard, batch.index)
        rows = select_rows(self.rows, numbers)
        return WantedSamples(
            rows=[row - self.run.start for row in rows],
            shards=select_rows(places[0], rows),
            indices=select_rows(places[1], rows),
            columns=memory.columns if memory else (),
            spare=memory.spare if memory else 0,
            rest=self.wants_rest,
        )

    def put(self, found: Sequence[tuple[Sequence[int], ReadSamples]]) -> None:
        """Set the result from the samples that were read of each stream.

        `found` pairs the numbers of a stream's rows, from `group_by_stream`, with their samples.
        The result has the samples in the order of the rows.
        """
        if len(found) == 1:
            self.result = found[0][1]
            return
        sizes, rests = np.zeros(len(self.rows), np.int64), [NONE] * len(self.rows)
        errors: dict[int, ReadError] = {}
        for numbers, some in found:
            sizes[list(numbers)] = some.sizes
            errors |= {numbers[number]: error for number, error in some.errors.items()}
            for number, rest in zip(numbers, some.rests, strict=False):
                rests[number] = rest
        self.result = ReadSamples(sizes, rests, errors)

    def leave_out(self, rows: Collection[int]) -> None:
        """Remove these rows, and what was read for them, from the read.

        Their samples are damaged in another dataset.
        """
        kept = [number for number, row in enumerate(self.rows) if row not in rows]
        came = self.result
        rests = [came.rests[number] for number in kept] if came.rests else ()
        errors = {at: came.errors[n] for at, n in enumerate(kept) if n in came.errors}
        self.result = ReadSamples(came.sizes[kept], rests, errors)
        self.rows = [self.rows[number] for number in kept]


def read_rows(planned: Sequence[RowRead], shelves: Sequence[Sequence[Shelf]]) -> None:
    """Read the rows of all planned reads, and set the result of each.

    All that is on local disks is read in one call. `shelves` are by stream and slot.
    """
    streams = [[*one.group_by_stream()] for one in planned]
    came = read_samples(
        [
            (shelves[stream][one.slot], one.samples_to_read(numbers))
            for one, own in zip(planned, streams, strict=True)
            for stream, numbers in own
        ]
    )
    for one, own in zip(planned, streams, strict=True):
        one.put([(numbers, next(came)) for _, numbers in own])


def as_index(rows: Sequence[int]) -> slice | Sequence[int]:
    """Return an index of rows for NumPy, which is faster with a slice than with numbers."""
    return slice(rows.start, rows.stop) if isinstance(rows, range) else rows


def select_rows(values: Sequence[Any], rows: Sequence[int]) -> Sequence[Any]:
    if isinstance(rows, range):
        return values[rows.start : rows.stop]
    return [values[row] for row in rows]


DAMAGED_JSON = "its json is damaged"
MANY = 1000  # samples without a text that captions= asks for, before a warning
_log = logging.getLogger("wdsprep")


class SampleTexts:
    """A writer of the captions and json of samples into batches.

    If captions are picked from the json, `paths` has the path for each choice.
    """

    def __init__(self, datasets: Sequence[Dataset], paths: Sequence[str]) -> None:
        self._datasets, self._paths = datasets, paths
        self._lacking: dict[str, int] = {}
        """The number of samples without a text at each path; -1 once a sample had one."""

    def put(
        self, batch: Batch, row: int, slot: int, wanted: WantedArrays, sample: TarSample
    ) -> str:
        """Put the texts of a sample into its row; return their fault, or "" if they have none.

        The json of a joined sample (a `slot` above 0) is merged with what the row has.
        """
        try:
            for name in wanted.texts:
                if name in TEXTS:
                    batch.out[name][row] = self._caption(batch, row, sample)
                else:
                    facts = parse_json(sample.fields.get("json", b"{}"))
                    made = batch.out[name]
                    made[row] = wanted.merge_json(made[row], facts) if slot else facts
        except (ValueError, TypeError, RecursionError):  # a hostile one is nested 1,000 deep
            return DAMAGED_JSON
        return ""

    def _caption(self, batch: Batch, row: int, sample: TarSample) -> str:
        """Return the text at the picked path of a sample's json, or else the sample's caption."""
        if self._paths:
            path = self._paths[batch.choice[row]]
            found = caption_at(parse_json(sample.fields.get("json", b"{}")), path)
            if found is not None:
                self._lacking[path] = -1
                return found
            self._warn_of_path(batch.stream[row], path)
        return sample.fields.get("txt", b"").decode("utf-8", "replace")

    def _warn_of_path(self, stream: int, path: str) -> None:
        """Count a sample without a text at this path of the json.

        Log a warning when MANY were counted and no sample had one.
        """
        count = self._lacking.get(path, 0)
        if count < 0:
            return
        self._lacking[path] = count + 1
        if count + 1 == MANY:
            url = self._datasets[stream].store.url
            what = f"none of the first {MANY:,} samples has a text at {path} in its json"
            _log.warning("%s: %s; captions= gives them their own captions instead", url, what)


def parse_tail(held: Bytes, rest: memoryview, start: int, key: str) -> "TarSample | str":
    """Return the members after the arrays of a sample, or their fault.

    `held` has what came into the row of the last array, and `rest` the bytes after that. The
    members begin at `start`, counted over both.
    """
    sample = parse_sample(held[start:].data, rest[max(0, start - len(held)) :])
    if not isinstance(sample, str) and sample.key != key:
        return "its members have different keys"
    return sample


def parse_sample(*parts: memoryview) -> "TarSample | str":
    """Parse the single sample in these bytes of a tar; return the sample, or its fault."""
    whole = b"".join((*parts, END))
    found = next(scan(lambda at, nbytes: whole[at : at + nbytes]), "it is empty")
    return str(found) if isinstance(found, BadSampleError) else found
