"""Read the rows of a step into a batch, check them, and replace damaged samples.

The thread that iterates begins a batch; any number of threads fill it, each a run of rows at a
time. In latent shards all arrays lie at fixed offsets. So one read of a sample puts each array
straight into its row of a tensor, and the headers between them into a scratch row. Headers are then
checked for many rows at once. Most of a thread's time is the one call that reads all rows of a run,
which does not need the interpreter's lock; a tenth is checking headers.

An array of variable length is read as far as the sample or its row goes, together with what follows
it in the sample. The header says where the array ends. What follows is taken out if it is wanted,
and zeros replace it.

Joined datasets are read together, into the same rows (`wanted_arrays`). `WantedArrays` decides
beforehand what is taken from which dataset.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch

from wdsprep.dataset.damage import verify_step
from wdsprep.dataset.npy_arrays import FLIPPED, LATENT, MASK, Field, patched_shape
from wdsprep.dataset.open_shards import too_short
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import facts_bytes, parse_json
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import TarSample
from wdsprep.encoding.models.base import TENSORS
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.loading.augmentation import Effects
from wdsprep.loading.batch_memory import Batch, BlockPool, Memory
from wdsprep.loading.sample_layout import batch_name, layout_for
from wdsprep.loading.served_datasets import ATTEMPTS, MISSING, SHAPE, Dataset, Fault, Substitutes
from wdsprep.loading.shard_access.local import Shelf
from wdsprep.loading.wanted_arrays import (
    DAMAGED_JSON,
    TEXTS,
    ArrayMemory,
    RowRead,
    SampleTexts,
    WantedArrays,
    WantedBySlot,
    as_index,
    find_wanted,
    parse_sample,
    parse_tail,
    read_rows,
    select_rows,
    variable_fields,
)

SCRATCHES = 8  # scratch blocks kept of each size: one for each thread that reads
IMAGES = ("jpg", "jpeg", "png", "webp")
JOINED_AT_ONCE = 256  # rows of joined datasets that are read at a time, after encoding
NOTHING = np.empty(0, np.uint8)
LISTED = (*TEXTS, "json", "key", "image", "made")
COLUMNS = {"<i8": torch.int64, "<f4": torch.float32, "<f8": torch.float32, "|b1": torch.bool}
"""The torch dtype of a table's column, by its NumPy dtype."""


PutSubstitute = Callable[[Batch, int], None]
"""A function that encodes the image at the place that a row has now, and puts it into the row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reader:
    """A reader that fills the rows of batches from datasets.

    `shelves` has, for each dataset, its own shelf and those of what is joined to it. `names` is
    what a batch holds. `scratch` is the memory that headers are read into.
    """

    datasets: tuple[Dataset, ...]
    shelves: tuple[tuple[Shelf, ...], ...]
    names: tuple[str, ...]
    effects: Effects
    memory: Memory
    raw: bool = False
    skip_missing: bool = False
    scratch: BlockPool = field(default_factory=lambda: BlockPool(keep=SCRATCHES))
    wanted: tuple[WantedBySlot, ...] = ()

    def __post_init__(self) -> None:
        names, choices = self.names, self.effects.choices
        made = (find_wanted(dataset, names, choices, raw=self.raw) for dataset in self.datasets)
        object.__setattr__(self, "wanted", tuple(made))

    @cached_property
    def _substitutes(self) -> Substitutes:
        return Substitutes(self.datasets)

    @cached_property
    def _texts(self) -> SampleTexts:
        return SampleTexts(self.datasets, self.effects.paths)

    def begin(self, batch: Batch) -> Batch:
        """Prepare a batch to be filled, and return it.

        Allocate its tensors and lists, pick its captions, and find the samples that are joined
        to its rows.
        """
        count = len(batch)
        batch.keys = [""] * count
        if self.effects.captions:
            batch.choice = self.effects.pick_captions(batch.step, batch.first, count).tolist()
        self._locate_joined(batch)
        if self.raw:
            batch.out["samples"] = [None] * count
            return batch
        dataset = self.datasets[batch.stream[0]]
        lengths = variable_fields(dataset, self.names)
        for item in dataset.served:
            if not item.is_variable or item in lengths:
                self._begin_array(batch, item)
        for name, kind in dataset.columns.items():
            if name in self.names:
                self._begin_tensor(batch, name, COLUMNS[kind], ())
        if self.effects.pixels and "pixels" in self.names:
            width, height = dataset.size or (self.effects.pixels,) * 2
            self._begin_tensor(batch, "pixels", torch.uint8, (3, height, width))
        for name in self.names:
            if name in LISTED:
                batch.out[name] = batch.keys if name == "key" else [None] * count
        if dataset.has_moments and batch_name(LATENT) in self.names:
            batch.moments = batch.out[batch_name(LATENT)]
            channels, *sides = batch.moments.shape[1:]
            made = self.memory.take(batch.moments.nbytes // 2)
            shape = patched_shape((channels // 2, *sides), dataset.patch)
            batch.out[batch_name(LATENT)] = made.view(batch.moments.dtype).view(count, *shape)
        if SHAPE in self.names:
            batch.out[SHAPE] = dataset.shape
        if self._flips:
            batch.flipped = batch.out[batch_name(FLIPPED)]
        batch.out = {name: batch.out[name] for name in self.names if name in batch.out}
        return batch

    def _locate_joined(self, batch: Batch) -> None:
        """Find the samples that are joined to the rows of a batch, and set `joined_places`."""
        if self._slots == 1:
            return
        own = np.array(batch.shard, np.int64), np.array(batch.index, np.int64)
        streams = {*batch.stream}
        if len(streams) == 1:
            places = [
                joined.positions.locate(*own) for joined in self.datasets[streams.pop()].joined
            ]
        else:
            places = self._locate_joined_mixed(np.array(batch.stream), own)
        batch.joined_places = [(shards.tolist(), indices.tolist()) for shards, indices in places]

    def _locate_joined_mixed(self, stream: Ints, own: tuple[Ints, Ints]) -> list[tuple[Ints, Ints]]:
        places = [(own[0].copy(), own[1].copy()) for _ in range(self._slots - 1)]
        for number in np.unique(stream).tolist():
            here = stream == number
            for found, joined in zip(places, self.datasets[number].joined, strict=False):
                found[0][here], found[1][here] = joined.positions.locate(own[0][here], own[1][here])
        return places

    @cached_property
    def _slots(self) -> int:
        return max(map(len, self.wanted))

    @property
    def _flips(self) -> bool:
        return self.effects.flip > 0 and batch_name(LATENT) in self.names

    def _begin_array(self, batch: Batch, item: Field) -> None:
        name, dtype = batch_name(item.name), TENSORS[item.dtype]
        if not item.is_variable:
            if name in self.names or (item.name == FLIPPED and self._flips):
                self._begin_tensor(batch, name, dtype, item.shape)
            return
        if name in self.names:
            made, batch.padded = self.memory.take_padded(len(batch), item)
            batch.views[name] = batch.padded.rows
            batch.out[name] = made.view(dtype).view(len(batch), *item.shape)
        if batch_name(MASK) in self.names:
            made = self.memory.take(len(batch) * item.shape[0])
            batch.out[batch_name(MASK)] = made.view(torch.bool).view(len(batch), -1)
        batch.variable, batch.lengths = name, np.zeros(len(batch), np.int64)

    def _begin_tensor(
        self, batch: Batch, name: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        made = self.memory.take(len(batch) * prod(shape) * dtype.itemsize)
        batch.views[name] = made.numpy().reshape(len(batch), -1)
        batch.out[name] = made.view(dtype).view(len(batch), *shape)

    def fill(self, batch: Batch, rows: range) -> None:
        """Read rows of a batch, and make the random changes to them.

        Damaged samples are replaced by others of the same stream.
        """
        if faults := self._read(batch, rows):
            self._replace(batch, faults)
        self.effects.finish(batch, rows)

    def fill_joined(self, batch: Batch, instead: PutSubstitute | None = None) -> None:
        """Read the arrays of joined datasets into a batch whose own rows are complete.

        If a joined sample is damaged, another sample replaces the whole row, and `instead` puts
        the arrays of the first dataset there. Without `instead`, raise FormatError.
        """
        for top in range(0, len(batch) if self._slots > 1 else 0, JOINED_AT_ONCE):
            rows = range(top, min(top + JOINED_AT_ONCE, len(batch)))
            faults = self._read(batch, rows, first=1)
            if instead is not None and faults:
                self._replace(batch, faults, instead)
                continue
            for row, fault in faults.items():
                raise FormatError(
                    f"{fault.tar}: sample {fault.number}, which is joined to {batch.keys[row]}, "
                    f"cannot be served ({fault.reason}), and its image has been encoded by now"
                ).with_next_step(verify_step(fault.tar.rpartition("/")[0].rpartition("/")[0]))

    def _read(self, batch: Batch, run: range, *, first: int = 0) -> dict[int, Fault]:
        """Read rows from the datasets of slot `first` and later; return the faults by row.

        Samples that are joined to a damaged one are not checked.
        """
        faults: dict[int, Fault] = {}
        planned = [
            RowRead(
                batch=batch,
                run=run,
                rows=rows,
                slot=slot,
                arrays=arrays,
                memory=None if arrays.is_whole else self._memory(batch, run, arrays, rows),
            )
            for slot in range(first, self._slots)
            for arrays, rows in self._wanted_rows(batch, run, slot)
        ]
        read_rows(planned, self.shelves)
        for read in planned:
            if faults:
                read.leave_out(faults)
            if read.rows:
                memory = read.memory
                faults |= self._check_arrays(read, memory) if memory else self._put_whole(read)
        return faults

    def _memory(
        self, batch: Batch, run: range, arrays: WantedArrays, rows: Sequence[int]
    ) -> ArrayMemory:
        variable = batch.variable if batch.variable in arrays.names else ""
        padded = batch.padded if variable else None
        views = {n: v[run.start : run.stop] for n, v in batch.views.items() if n in arrays.names}
        layout = layout_for(arrays.fields, (*views, variable))
        headers = self.scratch.take(len(run) * layout.headers_nbytes).reshape(len(run), -1)
        if padded is not None:
            padded.open(rows)
        columns = layout.columns(headers, views)
        return ArrayMemory(layout=layout, columns=columns, headers=headers, padded=padded)

    def _wanted_rows(
        self, batch: Batch, run: range, slot: int
    ) -> Iterator[tuple[WantedArrays, Sequence[int]]]:
        """Yield the wanted arrays of a slot, each with the rows that they are read for."""
        streams = {*batch.stream[run.start : run.stop]}
        is_picked = len(self.effects.choices) > 1
        kinds = {arrays for n in streams for arrays in self._wanted_by_choice(n, slot)}
        if len(kinds) == 1:
            arrays = kinds.pop()
            if arrays is not None:
                yield arrays, run
            return
        found: dict[WantedArrays, list[int]] = {}
        for row in run:
            arrays = self._wanted_by_choice(batch.stream[row], slot)[
                batch.choice[row] if is_picked else 0
            ]
            if arrays is not None:
                found.setdefault(arrays, []).append(row)
        yield from found.items()

    def _wanted_by_choice(self, stream: int, slot: int) -> tuple[WantedArrays | None, ...]:
        wanted = self.wanted[stream]
        return wanted[slot] if slot < len(wanted) else (None,) * len(self.effects.choices)

    def _replace(
        self, batch: Batch, faults: dict[int, Fault], instead: PutSubstitute | None = None
    ) -> None:
        """Replace the samples of these rows by others, until none is damaged.

        Log a warning for each new fault. Raise FormatError once ATTEMPTS samples for one row
        were damaged. With `instead`, only joined datasets are read here, and `instead` puts the
        arrays of the first dataset.
        """
        wanted = {row: (batch.shard[row], batch.index[row]) for row in faults}
        drawn, damaged = dict.fromkeys(faults, 0), dict.fromkeys(faults, 0)
        while faults:
            for row, fault in faults.items():
                self._substitutes.warn(self._stream_choice(batch, row), batch.shard[row], fault)
                damaged[row] += fault.reason != MISSING
                if damaged[row] == ATTEMPTS:
                    raise self._substitutes.make_error(batch.stream[row], fault)
                drawn[row], place = self._substitutes.next(
                    self._stream_choice(batch, row), wanted[row], drawn[row]
                )
                batch.shard[row], batch.index[row] = place
                self._relocate_joined(batch, row)
                if instead is not None:
                    instead(batch, row)
                    self._relocate_joined(batch, row)
            first = 0 if instead is None else 1
            again = [self._read(batch, range(row, row + 1), first=first) for row in faults]
            faults = {row: why for some in again for row, why in some.items()}

    def read_substitute(
        self, batch: Batch, row: int, wanted: tuple[int, int], attempt: int
    ) -> Batch:
        """Read a substitute for a sample that could not be encoded, into a batch of its own.

        `wanted` is the place of that sample. Each `attempt` draws another substitute.
        """
        return self.read_single(
            batch, row, self._substitutes.draw(batch.stream[row], wanted, attempt)
        )

    def read_single(self, batch: Batch, row: int, place: tuple[int, int]) -> Batch:
        """Read the sample at this place of the row's stream into a batch of its own.

        If it is damaged, the batch has a substitute.
        """
        shard, index = place
        one = Batch(batch.step, batch.first + row, [batch.stream[row]], [shard], [index])
        self.fill(self.begin(one), range(1))
        return one

    def _stream_choice(self, batch: Batch, row: int) -> tuple[int, int]:
        """Return the stream of a row, and which of the choices of captions was drawn for it."""
        return batch.stream[row], batch.choice[row] if len(self.effects.choices) > 1 else 0

    def _relocate_joined(self, batch: Batch, row: int) -> None:
        own = np.array([batch.shard[row]]), np.array([batch.index[row]])
        joined = self.datasets[batch.stream[row]].joined
        for (shards, indices), each in zip(batch.joined_places, joined, strict=False):
            shard, index = each.positions.locate(*own)
            shards[row], indices[row] = int(shard[0]), int(index[0])

    def _place(self, batch: Batch, row: int, slot: int = 0) -> tuple[str, int]:
        """Return the URL of the tar that a row is read from, and the sample's number in it."""
        dataset = self.datasets[batch.stream[row]].with_joined[slot]
        shards, indices = (batch.shard, batch.index) if not slot else batch.joined_places[slot - 1]
        return f"{dataset.store.url}/{dataset.names[shards[row]]}", indices[row]

    def _describe_fault(self, error: "BadSampleError | NotFoundError") -> str:
        if isinstance(error, BadSampleError):
            return str(error)
        if not self.skip_missing:
            raise error
        return MISSING

    def _put_whole(self, read: RowRead) -> dict[int, Fault]:
        """Put samples that were read whole into the batch, and return the faults by row.

        Samples with a fault are added to the batch's `refused`.
        """
        faults, batch = {}, read.batch
        for number, row in enumerate(read.rows):
            error = read.result.errors.get(number)
            sample = (
                parse_sample(read.result.rests[number])
                if error is None
                else self._describe_fault(error)
            )
            fault = (
                sample
                if isinstance(sample, str)
                else self._put_sample(batch, row, read.slot, read.arrays, sample)
            )
            if fault:
                faults[row] = Fault(fault, *self._place(batch, row, read.slot))
                batch.refused.setdefault((batch.shard[row], batch.index[row]), None)
        return faults

    def _put_sample(
        self, batch: Batch, row: int, slot: int, arrays: WantedArrays, sample: TarSample
    ) -> str:
        """Put the wanted parts of a sample into its row; return its fault, or "" if it has none.

        Raise FormatError if a joined sample has another key than the row.
        """
        if slot:
            if sample.key != batch.keys[row]:
                raise self._wrong_key_error(batch, slot, row, sample.key)
            return self._merge_raw(batch.out["samples"][row], arrays, sample)
        batch.keys[row] = sample.key
        if self.raw:
            url = self._place(batch, row)[0]
            others = {
                field.name for field in arrays.fields if batch_name(field.name) not in arrays.names
            }
            own = {name: data for name, data in sample.fields.items() if name not in others}
            made = {"__key__": sample.key, "__url__": url, **own}
            batch.out["samples"][row] = made
            return ""
        if "made" in self.names:
            return self._prepare(batch, row, sample)
        image = next((sample.fields[name] for name in IMAGES if name in sample.fields), None)
        if image is None and {"image", "pixels"} & set(self.names):
            return "it has no image"
        if "image" in self.names:
            batch.out["image"][row] = image
        if "pixels" in self.names and image is not None:
            try:
                batch.out["pixels"][row] = self.effects.crop(image)
            except RejectedError as error:
                return str(error)
        return self._texts.put(batch, row, slot, arrays, sample)

    def _merge_raw(self, made: dict[str, Any], arrays: WantedArrays, sample: TarSample) -> str:
        """Add the wanted members of a joined sample to those of the first one.

        Return its fault, or "" if it has none.
        """
        made |= {n: data for n, data in sample.fields.items() if batch_name(n) in arrays.names}
        if arrays.texts:
            try:
                facts = [parse_json(f.get("json", b"{}")) for f in (made, sample.fields)]
                made["json"] = facts_bytes(arrays.merge_json(*facts))
            except (ValueError, TypeError, RecursionError):
                return DAMAGED_JSON
            if "txt" in arrays.texts:
                made["txt"] = sample.fields.get("txt", b"")
        return ""

    def _wrong_key_error(self, batch: Batch, slot: int, row: int, key: str) -> FormatError:
        """Return the error for a joined sample that has another key."""
        (tar, index), (other, number) = (self._place(batch, row, n) for n in (0, slot))
        parts = self.datasets[batch.stream[row]].with_joined
        return FormatError(
            f"sample {number} of {other} has the key {key}, but sample {index} of {tar}, to which "
            f"it is joined, has {batch.keys[row]}: one of the two was changed"
        ).with_next_step(verify_step(parts[0].store.url, parts[slot].store.url))

    def _prepare(self, batch: Batch, row: int, sample: TarSample) -> str:
        from wdsprep.encoding.on_the_fly.image_preparation import (
            reject_of,  # with Pillow, which latents do not need
        )

        shard, index = batch.shard[row], batch.index[row]
        tar = self.datasets[batch.stream[row]].names[shard]
        try:
            made = self.effects.prepare(sample, tar)
        except RejectedError as refused:
            batch.refused[shard, index] = reject_of(sample, tar, refused)
            return str(refused.code)
        if made.crop.pixels.shape != batch.out["pixels"].shape[1:]:
            return "its image is not of the size that its json says"
        batch.out["pixels"][row] = made.crop.pixels
        batch.out["made"][row] = made.without_pixels()
        return ""

    def _check_arrays(self, read: RowRead, memory: ArrayMemory) -> dict[int, Fault]:
        """Check samples whose arrays were read; put their keys, lengths and texts into the batch.

        Clear the bytes after arrays of variable length. Return the faults by row.
        """
        batch, rows, layout, padded = read.batch, read.rows, memory.layout, memory.padded
        headers = memory.headers
        if len(rows) < len(read.run):
            headers = headers[[row - read.run.start for row in rows]]
        keys = layout.keys(headers)
        self._put_keys(read, keys)
        # The lengths of the last array, and how many bytes came of it and of what is behind it:
        lengths = left = np.zeros(len(rows), np.int64)
        if layout.fields[-1].is_variable:
            lengths, left = layout.lengths(headers), read.result.sizes - layout.last_start
            if batch.variable in read.arrays.names:
                batch.lengths[as_index(rows)] = lengths
        ends = lengths * layout.token_nbytes
        is_short = ends > left
        faults: dict[int, str] = {}
        if read.wants_rest or read.result.errors or None in keys or is_short.any():
            each = zip(rows, keys, lengths.tolist(), is_short.tolist(), strict=True)
            for number, (row, key, length, lacks) in enumerate(each):
                if number in read.result.errors:
                    faults[row] = self._describe_fault(read.result.errors[number])
                elif key is None:
                    faults[row] = "its headers are not those of the dataset"
                elif lacks:
                    faults[row] = str(too_short())
                elif read.wants_rest:
                    fault = self._put_texts(read, memory, number, key, length)
                    if fault:
                        faults[row] = fault
        if padded is not None:
            sound = [number for number, row in enumerate(rows) if row not in faults]
            come = np.minimum(left[sound], padded.row_nbytes)
            padded.close([rows[number] for number in sound], ends[sound], come)
        return {row: Fault(why, *self._place(batch, row, read.slot)) for row, why in faults.items()}

    def _put_keys(self, read: RowRead, keys: Sequence[str | None]) -> None:
        """Put the keys of the first dataset into the batch.

        For a joined dataset, raise FormatError if a sample has another key than its row.
        """
        batch, rows = read.batch, read.rows
        if not read.slot:
            for row, key in zip(rows, keys, strict=True):
                batch.keys[row] = key or ""
        elif keys != select_rows(batch.keys, rows):
            for number, (row, key) in enumerate(zip(rows, keys, strict=True)):
                is_other = key is not None and key != batch.keys[row]
                if is_other and number not in read.result.errors:
                    raise self._wrong_key_error(batch, read.slot, row, str(key))

    def _put_texts(
        self, read: RowRead, memory: ArrayMemory, number: int, key: str, length: int
    ) -> str:
        """Put the texts of a sample into its row; return their fault, or "" if they have none."""
        row, held = read.rows[number], NOTHING
        if memory.padded is not None:
            nbytes = int(read.result.sizes[number]) - memory.layout.last_start
            held = memory.padded.rows[row, :nbytes]
        padding = memory.layout.padding(length)
        sample = parse_tail(held, read.result.rests[number], padding, key)
        if isinstance(sample, str):
            return sample
        return self._texts.put(read.batch, row, read.slot, read.arrays, sample)
