"""One step's rows: read where they belong, checked, and replaced where they are damaged.

A batch is begun by the thread that iterates and filled by any number of threads, a run of rows
each. In latent shards all arrays lie at fixed places, so a read of a sample puts each array
straight into its row of a tensor and the headers between them into a scratch row; headers are then
checked for many rows at once. Most of a thread's time is the one call that reads all rows of a run,
which needs no lock of the interpreter; a tenth is checking headers.

An array of variable length is read as far as the sample or its row goes, and with it what stands
behind it in the sample. The header says what of that is the array: the rest is taken out if it is
wanted, and zeros take its place.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from wdsprep.dataset.arrays import FLIPPED, LATENT, MASK, Field
from wdsprep.dataset.latents import patched_shape
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import parse_json
from wdsprep.dataset.tar import END
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import TarSample, scan
from wdsprep.encoding.models.base import TENSORS
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.loading.catalog import SHAPE, Dataset
from wdsprep.loading.effects import TEXTS, Effects
from wdsprep.loading.grid import Grid, grid_of, short
from wdsprep.loading.memory import Batch, Blocks, Memory
from wdsprep.loading.order.chance import key_of
from wdsprep.loading.shelves.local import ByteColumns, Came, SamplePlaces, Shelf, too_short
from wdsprep.text import command

ATTEMPTS = 16  # to replace a damaged sample: more means that the dataset is lost
MISSING = "the shard is missing"
SCRATCHES = 8  # kept, of each size: one for each thread that reads
IMAGES = ("jpg", "jpeg", "png", "webp")
NOTHING = np.empty(0, np.uint8)
LISTED = (*TEXTS, "json", "key", "image", "made")
_log = logging.getLogger("wdsprep")


@dataclass(frozen=True, kw_only=True, eq=False)
class Reader:
    """Reads rows of some datasets. `names` is what a batch is to hold, beside arrays and key;
    `scratch` is where headers are read to."""

    datasets: tuple[Dataset, ...]
    shelves: tuple[Shelf, ...]
    names: tuple[str, ...]
    effects: Effects
    memory: Memory
    raw: bool = False
    skip_missing: bool = False
    scratch: Blocks = field(default_factory=lambda: Blocks(keep=SCRATCHES))
    _told: set[tuple[str, int]] = field(default_factory=set)
    _missing: dict[int, set[int]] = field(default_factory=dict)
    """The shards of each stream that are known to be missing."""

    def begin(self, batch: Batch) -> Batch:
        """Make room for what is to be read."""
        count = len(batch)
        batch.keys = [""] * count
        if self.raw:
            batch.out["samples"] = [None] * count
            return batch
        dataset = self.datasets[batch.stream[0]]
        for item in dataset.fields:
            self._begin_array(batch, item)
        if self.effects.pixels and "pixels" in self.names:
            side = self.effects.pixels
            self._begin_tensor(batch, "pixels", torch.uint8, (3, side, side))
        for name in self.names:
            if name in LISTED:
                batch.out[name] = batch.keys if name == "key" else [None] * count
        if dataset.has_moments and short(LATENT) in self.names:
            batch.moments = batch.out[short(LATENT)]
            channels, *sides = batch.moments.shape[1:]
            made = self.memory.take(batch.moments.nbytes // 2)
            shape = patched_shape((channels // 2, *sides), dataset.patch)
            batch.out[short(LATENT)] = made.view(batch.moments.dtype).view(count, *shape)
        if SHAPE in self.names:
            batch.out[SHAPE] = dataset.shape
        if self._flips:
            batch.flipped = batch.out[short(FLIPPED)]
        batch.out = {name: batch.out[name] for name in self.names if name in batch.out}
        return batch

    @property
    def _flips(self) -> bool:
        return self.effects.flip > 0 and short(LATENT) in self.names

    def _begin_array(self, batch: Batch, item: Field) -> None:
        name, dtype = short(item.name), TENSORS[item.dtype]
        if not item.is_variable:
            if name in self.names or (item.name == FLIPPED and self._flips):
                self._begin_tensor(batch, name, dtype, item.shape)
            return
        if name in self.names:
            made, batch.padded = self.memory.take_padded(len(batch), item)
            batch.views[name] = batch.padded.rows
            batch.out[name] = made.view(dtype).view(len(batch), *item.shape)
        if short(MASK) in self.names:
            made = self.memory.take(len(batch) * item.shape[0])
            batch.out[short(MASK)] = made.view(torch.bool).view(len(batch), -1)
        if {name, short(MASK)} & {*self.names}:
            batch.variable, batch.lengths = name, np.zeros(len(batch), np.int64)

    def _begin_tensor(
        self, batch: Batch, name: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        made = self.memory.take(len(batch) * prod(shape) * dtype.itemsize)
        batch.views[name] = made.numpy().reshape(len(batch), -1)
        batch.out[name] = made.view(dtype).view(len(batch), *shape)

    def fill(self, batch: Batch, rows: range) -> None:
        """Read these rows. A damaged sample gives its place to another one of its stream, which
        depends on nothing but the damaged one."""
        whole = self.raw or not self.datasets[batch.stream[0]].fields
        read = self._read_whole if whole else self._read_arrays
        faults = read(batch, rows)
        if faults:
            self._replace(batch, faults, read)
        self.effects.finish(batch, rows)

    def _replace(
        self,
        batch: Batch,
        faults: dict[int, str],
        read: Callable[[Batch, range], dict[int, str]],
    ) -> None:
        """Put other samples in these rows, and others again until all are sound."""
        wanted = {row: (batch.shard[row], batch.index[row]) for row in faults}
        drawn, damaged = dict.fromkeys(faults, 0), dict.fromkeys(faults, 0)
        while faults:
            for row, reason in faults.items():
                self._tell(batch, row, reason)
                damaged[row] += reason != MISSING
                if damaged[row] == ATTEMPTS:
                    raise FormatError(self._lost(batch, row, reason))
                drawn[row] = self._substitute(batch, row, wanted[row], drawn[row])
            again = [read(batch, range(row, row + 1)) for row in faults]
            faults = {row: why for some in again for row, why in some.items()}

    def instead(self, batch: Batch, row: int, wanted: tuple[int, int], attempt: int) -> Batch:
        """The sample that takes the place of one that was read, but came to nothing later."""
        shard, index = self._draw(batch.stream[row], wanted, attempt)
        one = Batch(batch.step, batch.first + row, [batch.stream[row]], [shard], [index])
        self.fill(self.begin(one), range(1))
        return one

    def _substitute(self, batch: Batch, row: int, wanted: tuple[int, int], drawn: int) -> int:
        """Put another sample there, the next that is drawn whose shard is not known to be missing;
        how many are drawn now. What is known changes nothing: those would be drawn and missed."""
        stream = batch.stream[row]
        dataset, missing = self.datasets[stream], self._missing.get(stream, set())
        while len(missing) < dataset.filled:
            shard, index = self._draw(stream, wanted, drawn)
            drawn += 1
            if shard not in missing:
                batch.shard[row], batch.index[row] = shard, index
                return drawn
        raise NotFoundError(f"{dataset.place}: all its shards are missing")

    def _draw(self, stream: int, wanted: tuple[int, int], attempt: int) -> tuple[int, int]:
        dataset = self.datasets[stream]
        number = key_of("substitute", dataset.digest, *wanted, attempt) % int(dataset.ends[-1])
        spots = np.searchsorted(dataset.ends, [number], side="right")
        shards, indices = dataset.located(
            spots, number - (dataset.ends[spots] - dataset.sizes[spots])
        )
        return int(shards[0]), int(indices[0])

    def _lost(self, batch: Batch, row: int, reason: str) -> str:
        dataset = self.datasets[batch.stream[row]]
        url = dataset.store.url
        hint = "" if dataset.kind == "tars" else f": run {command('verify', url)}"
        what = f"{ATTEMPTS} samples in a row cannot be served, the last ({reason})"
        return f"{dataset.place}: {what}{hint}"

    def _name(self, batch: Batch, row: int) -> str:
        dataset = self.datasets[batch.stream[row]]
        return f"{dataset.store.url}/{dataset.names[batch.shard[row]]}"

    def _tell(self, batch: Batch, row: int, reason: str) -> None:
        """Once a sample, or once for all of a missing shard."""
        shard, index, name = batch.shard[row], batch.index[row], self._name(batch, row)
        if reason == MISSING:
            self._missing.setdefault(batch.stream[row], set()).add(shard)
        place = (name, index if reason != MISSING else -1)
        if place in self._told:
            return
        self._told.add(place)
        what = reason if reason == MISSING else f"sample {index} cannot be served ({reason})"
        _log.warning("%s: %s: others are served in its place", name, what)

    def _get(
        self, batch: Batch, rows: range, columns: ByteColumns, *, rest: bool, spare: int = 0
    ) -> "list[Came | str]":
        """Of each row what has come beside its part of the columns, or why the sample cannot be
        had."""
        some = slice(rows.start, rows.stop)
        streams, shards, indices = batch.stream[some], batch.shard[some], batch.index[some]
        found: list[Came | str] = [""] * len(rows)
        for stream in set(streams):
            own = [number for number, other in enumerate(streams) if other == stream]
            places = SamplePlaces(own, [shards[n] for n in own], [indices[n] for n in own])
            came = self.shelves[stream].fill(places, columns, spare=spare, rest=rest)
            for number, one in zip(own, came, strict=True):
                found[number] = one if isinstance(one, Came) else self._fault(one)
        return found

    def _fault(self, error: "BadSampleError | NotFoundError") -> str:
        if isinstance(error, BadSampleError):
            return str(error)
        if not self.skip_missing:
            raise error
        return MISSING

    def _read_whole(self, batch: Batch, rows: range) -> dict[int, str]:
        faults = {}
        came = self._get(batch, rows, (), rest=True)
        for row, one in zip(rows, came, strict=True):
            sample = one if isinstance(one, str) else parsed(one.rest)
            fault = sample if isinstance(sample, str) else self._take(batch, row, sample)
            if fault:
                faults[row] = fault
                batch.refused.setdefault((batch.shard[row], batch.index[row]), None)
        return faults

    def _take(self, batch: Batch, row: int, sample: TarSample) -> str:
        """Keep what is wanted of a sample; why it cannot be, or nothing."""
        batch.keys[row] = sample.key
        if self.raw:
            url = self._name(batch, row)
            made = {"__key__": sample.key, "__url__": url, **sample.fields}
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
        return self._take_texts(batch, row, sample)

    def _prepare(self, batch: Batch, row: int, sample: TarSample) -> str:
        from wdsprep.encoding.on_the_way import reject_of  # with Pillow, which latents do not need

        shard, index = batch.shard[row], batch.index[row]
        tar = self.datasets[batch.stream[row]].names[shard]
        try:
            made = self.effects.prepare(sample, tar)
        except RejectedError as refused:
            batch.refused[shard, index] = reject_of(sample, tar, refused)
            return str(refused.code)
        batch.out["pixels"][row] = made.crop.pixels
        batch.out["made"][row] = made.without_pixels()
        return ""

    def _take_texts(self, batch: Batch, row: int, sample: TarSample) -> str:
        for name in self.names:
            try:
                if name in TEXTS:
                    batch.out[name][row] = sample.fields.get("txt", b"").decode("utf-8", "replace")
                elif name == "json":
                    batch.out[name][row] = parse_json(sample.fields.get("json", b"{}"))
            except (ValueError, RecursionError):  # a hostile one is nested 1,000 deep
                return "its json is damaged"
        return ""

    def _read_arrays(self, batch: Batch, rows: range) -> dict[int, str]:
        fields, padded = self.datasets[batch.stream[0]].fields, batch.padded
        grid = grid_of(fields, (*batch.views, batch.variable))
        heads = self.scratch.take(len(rows) * grid.heads_nbytes).reshape(len(rows), -1)
        own = {name: view[rows.start : rows.stop] for name, view in batch.views.items()}
        rest = not {*TEXTS, "json"}.isdisjoint(self.names)
        spare = 0
        if padded is not None:
            padded.open(rows)
            spare = padded.row_nbytes
        came = self._get(batch, rows, grid.columns(heads, own), spare=spare, rest=rest)
        keys = grid.keys(heads)
        some = slice(rows.start, rows.stop)
        batch.keys[some] = [key or "" for key in keys]
        ends = left = np.zeros(len(rows), np.int64)  # of the last array, and of all from there on
        if batch.variable:
            batch.lengths[some] = grid.lengths(heads)
            ends = batch.lengths[some] * grid.token_nbytes
            left = np.array([isinstance(o, Came) and o.nbytes for o in came]) - grid.last_start
        faults: dict[int, str] = {}
        for row, one, key, is_short in zip(rows, came, keys, (ends > left).tolist(), strict=True):
            if isinstance(one, str):
                faults[row] = one
            elif key is None:
                faults[row] = "its headers are not those of the dataset"
            elif is_short:
                faults[row] = str(too_short())
            elif rest and (fault := self._take_rest(batch, row, one, grid, key)):
                faults[row] = fault
        if padded is not None:
            sound = [n for n, row in enumerate(rows) if row not in faults]
            come = np.minimum(left[sound], padded.row_nbytes)
            padded.close([rows[n] for n in sound], ends[sound], come)
        return faults

    def _take_rest(self, batch: Batch, row: int, came: Came, grid: Grid, key: str) -> str:
        """Take out what is behind the arrays, some of it perhaps in the row of the last one."""
        held = NOTHING
        if batch.padded is not None:
            held = batch.padded.rows[row, : came.nbytes - grid.last_start]
        start = grid.padding(int(batch.lengths[row]) if batch.variable else 0)
        sample = parsed(held[start:].data, came.rest[max(0, start - len(held)) :])
        if isinstance(sample, str):
            return sample
        if sample.key != key:
            return "its members have different keys"
        return self._take_texts(batch, row, sample)


def parsed(*parts: memoryview) -> "TarSample | str":
    """The one sample in these bytes of a tar, or what is wrong with it."""
    whole = b"".join((*parts, END))
    found = next(scan(lambda at, nbytes: whole[at : at + nbytes]), "it is empty")
    return str(found) if isinstance(found, BadSampleError) else found
