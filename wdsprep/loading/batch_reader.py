"""Read the rows of a step into a batch, check them, and replace damaged samples.

The thread that iterates begins a batch; any number of threads fill it, each a run of rows at a
time. In latent shards all arrays lie at fixed offsets. So one read of a sample puts each array
straight into its row of a tensor, and the headers between them into a scratch row. Headers are then
checked for many rows at once. Most of a thread's time is the one call that reads all rows of a run,
which does not need the interpreter's lock; a tenth is checking headers.

An array of variable length is read as far as the sample or its row goes, together with what follows
it in the sample. The header says where the array ends. What follows is taken out if it is wanted,
and zeros replace it.

Joined datasets are read together, into the same rows. `WantedArrays` says beforehand what is taken
from which dataset.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from math import prod

import numpy as np
import torch

from wdsprep.dataset.aio import Bytes
from wdsprep.dataset.damage import verify_step
from wdsprep.dataset.npy_arrays import LATENT, MASK
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import MIRRORED, facts_bytes, is_mask, parse_json, role_of
from wdsprep.dataset.tar import END
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import TarSample, scan
from wdsprep.encoding.models.base import TENSORS
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.images.nearest_shape import Shapes
from wdsprep.loading.augmentation import finish, tensor_of
from wdsprep.loading.batch_memory import Batch, BlockPool, Memory, as_index
from wdsprep.loading.load_plan import SAMPLED, LoadPlan
from wdsprep.loading.sample_layout import SampleLayout, batch_name, layout_for
from wdsprep.loading.served_datasets import (
    ATTEMPTS,
    MISSING,
    SHAPE,
    TEXTS,
    Dataset,
    Fault,
    Substitutes,
    WantedArrays,
    find_wanted,
    presence_name,
)
from wdsprep.loading.shard_access import NOTHING, RowReads, Shards, read_samples, too_short
from wdsprep.sources.captions import caption_at

SCRATCHES = 8  # scratch blocks kept of each size: one for each thread that reads
IMAGES = ("jpg", "jpeg", "png", "webp")
MANY = 1000  # samples without a text that captions= asks for, before a warning
DAMAGED_JSON = "its json is damaged"
LISTED = (*TEXTS, "json", "key", "image", "made")
_log = logging.getLogger("wdsprep")

PutSubstitute = Callable[[Batch, int], None]
"""A function that encodes the image at the place that a row has now, and puts it into the row."""
Sources = tuple[tuple[Shards, ...], ...]
"""The shards of each stream: its own, then those of what is joined to it."""


class Reader:
    """A reader that fills the rows of the batches of a plan from these shards.

    Its memory keeps at most `keep` unused blocks of each size.
    """

    def __init__(self, plan: LoadPlan, sources: Sources, *, keep: int) -> None:
        self.plan, self.sources = plan, sources
        self.datasets, self.names = plan.datasets, plan.names
        self._raw = raw = plan.options.raw
        wanted = [find_wanted(d, plan.names, plan.choices, raw=raw) for d in plan.datasets]
        self._slots = max(map(len, wanted))
        nothing = ((None,) * len(plan.choices),)
        self.wanted = [by_slot + nothing * (self._slots - len(by_slot)) for by_slot in wanted]
        self._memory = Memory(pin=plan.pinned, keep=keep)
        self._scratch = BlockPool(keep=SCRATCHES)  # that headers are read into
        self.substitutes = Substitutes(plan.datasets)
        self._lacking: dict[str, float] = {}  # samples without a text at a path of captions=

    def begin(self, batch: Batch) -> Batch:
        """Prepare a batch to be filled, and return it.

        Allocate its tensors and lists, pick its captions, and find the samples that are joined
        to its rows.
        """
        count = len(batch)
        batch.keys = [""] * count
        if self.plan.picks_captions:
            batch.choice = self.plan.pick_captions(batch.step, batch.first, count).tolist()
        joined_places = np.zeros((self._slots - 1, 2, count), np.int64)
        batch.places = np.concatenate([batch.places, joined_places])
        self._locate_joined(batch, range(count))
        if self._raw:
            batch.out["samples"] = [None] * count
            return batch
        dataset = self.datasets[batch.stream[0]]
        for name, item in dataset.variable_fields(self.names).items():
            batch.variable, batch.lengths = name, np.zeros(count, np.int64)
            if name in self.names:
                memory, batch.padded = self._memory.take_padded(count, item)
                batch.views[name] = batch.padded.rows
                batch.out[name] = memory.view(TENSORS[item.dtype]).view(count, *item.shape)
        tensors = self.plan.tensors_of(dataset)
        sizes = [count * prod(shape) * dtype.itemsize for dtype, shape in tensors.values()]
        memories = self._memory.take(sizes) if sizes else []
        for (name, (dtype, shape)), memory in zip(tensors.items(), memories, strict=True):
            batch.out[name] = memory.view(dtype).view(count, *shape)
            if name != batch_name(MASK) or not batch.variable:
                batch.views[name] = memory.numpy().reshape(count, -1)
        for name in self.names:
            if name in LISTED or (name in dataset.role_images and not self.plan.options.pixels):
                batch.out[name] = batch.keys if name == "key" else [None] * count
        for name in self.plan.presence_masks(dataset).keys() & self.names:
            batch.out[name][:] = True
        if SAMPLED in batch.out:
            latent = batch_name(LATENT)
            batch.moments, batch.out[latent] = batch.out[latent], batch.out[SAMPLED]
        if SHAPE in self.names:
            batch.out[SHAPE] = dataset.shape
        batch.flipped = {n: batch.out[name] for n, name in self.plan.flipped_names(dataset).items()}
        batch.out = {name: batch.out[name] for name in self.names if name in batch.out}
        return batch

    def _locate_joined(self, batch: Batch, rows: range) -> None:
        """Find the samples that are joined to these rows, and set their places."""
        for number, here in batch.by_stream(rows) if self._slots > 1 else ():
            for slot, other in enumerate(self.datasets[number].joined, 1):
                batch.places[slot][:, here] = other.locate(*batch.places[0][:, here])

    def fill(self, batch: Batch, rows: range) -> None:
        """Read rows of a batch, and make the random changes to them.

        Damaged samples are replaced by others of the same stream.
        """
        if faults := self._read(batch, rows):
            self._replace(batch, faults)
        finish(self.plan, batch, rows)

    def fill_joined(self, batch: Batch, rows: range, instead: PutSubstitute | None = None) -> None:
        """Read the arrays of joined datasets into rows whose own arrays are complete.

        If a joined sample is damaged, another sample replaces the whole row, and `instead` puts
        the arrays of the first dataset there. Without `instead`, raise FormatError.
        """
        faults = self._read(batch, rows, first=1)
        if instead is not None:
            self._replace(batch, faults, instead)
            return
        for row, (reason, tar, number) in faults.items():
            raise FormatError(
                f"{tar}: sample {number}, which is joined to {batch.keys[row]}, cannot be "
                f"served ({reason}), and its image has been encoded by now"
            ).with_next_step(verify_step(tar.rpartition("/")[0].rpartition("/")[0]))

    def _read(self, batch: Batch, run: range, *, first: int = 0) -> dict[int, Fault]:
        """Read rows from the datasets of slot `first` and later; return the faults by row.

        Samples that are joined to a damaged one are not checked.
        """
        faults: dict[int, Fault] = {}
        planned = [
            self._plan_reads(batch, run, slot, arrays, rows)
            for slot in range(first, self._slots)
            for arrays, rows in self._wanted_rows(batch, run, slot)
        ]
        read_samples(planned)
        for reads in planned:
            if layout := reads.layout:
                reasons = self._put_arrays(reads, layout, faults)
            else:
                reasons = self._put_whole(reads, faults)
            for row, reason in reasons.items():
                faults[row] = reason, *self._place(batch, row, reads.slot)
        return faults

    def _plan_reads(
        self, batch: Batch, run: range, slot: int, arrays: WantedArrays, rows: Sequence[int]
    ) -> RowReads:
        shards, indices = batch.places[slot][:, as_index(rows)].tolist()
        reads = RowReads(
            sources=[self.sources[n][slot] for n in map(batch.stream.__getitem__, rows)],
            shards=shards,
            indices=indices,
            rest=arrays.is_whole or bool(arrays.texts),
            batch=batch,
            run=run,
            batch_rows=rows,
            slot=slot,
            arrays=arrays,
        )
        if arrays.is_whole:
            return reads
        variable = batch.variable if batch.variable in arrays.names else ""
        views = {n: v[run.start : run.stop] for n, v in batch.views.items() if n in arrays.names}
        reads.layout = layout_for(arrays.fields, (*views, variable))
        headers_nbytes = reads.layout.headers_nbytes
        reads.headers = self._scratch.take(len(run) * headers_nbytes).reshape(len(run), -1)
        reads.columns = reads.layout.columns(reads.headers, views)
        if variable and batch.padded is not None:
            reads.padded, reads.spare = batch.padded, batch.padded.row_nbytes
            batch.padded.open(rows)
        return reads

    def _wanted_rows(
        self, batch: Batch, run: range, slot: int
    ) -> Iterator[tuple[WantedArrays, Sequence[int]]]:
        """Yield the wanted arrays of a slot, each with the rows that they are read for."""
        streams = {*batch.stream[run.start : run.stop]}
        kinds = {arrays for stream in streams for arrays in self.wanted[stream][slot]}
        if len(kinds) == 1:
            arrays = kinds.pop()
            if arrays is not None:
                yield arrays, run
            return
        by_arrays: dict[WantedArrays, list[int]] = {}
        for row in run:
            arrays = self.wanted[batch.stream[row]][slot][self.plan.choice_of(batch, row)]
            if arrays is not None:
                by_arrays.setdefault(arrays, []).append(row)
        yield from by_arrays.items()

    def _replace(
        self, batch: Batch, faults: dict[int, Fault], instead: PutSubstitute | None = None
    ) -> None:
        """Replace the samples of these rows by others, until none is damaged.

        Log a warning for each new fault. Raise FormatError once ATTEMPTS samples for one row
        were damaged. With `instead`, that function puts the arrays of the first dataset into a row,
        and only the joined datasets are read here.
        """
        wanted = {row: batch.place(row) for row in faults}
        drawn, damaged = dict.fromkeys(faults, 0), dict.fromkeys(faults, 0)
        while faults:
            for row, fault in faults.items():
                choice = batch.stream[row], self.plan.choice_of(batch, row)
                self.substitutes.warn(choice, batch.place(row)[0], fault)
                damaged[row] += fault[0] != MISSING
                if damaged[row] == ATTEMPTS:
                    raise self.substitutes.make_error(batch.stream[row], fault)
                drawn[row], place = self.substitutes.next(choice, wanted[row], drawn[row])
                batch.places[0][:, row] = place
                if instead is not None:
                    instead(batch, row)
                self._locate_joined(batch, range(row, row + 1))
            first = 0 if instead is None else 1
            again = [self._read(batch, range(row, row + 1), first=first) for row in faults]
            faults = {row: fault for of_row in again for row, fault in of_row.items()}

    def read_single(self, batch: Batch, row: int, place: tuple[int, int]) -> Batch:
        """Read the sample at this place of the row's stream into a batch of its own.

        If it is damaged, the batch has a substitute.
        """
        places = np.reshape(place, (1, 2, 1))
        single = Batch(batch.step, batch.first + row, [batch.stream[row]], places)
        self.fill(self.begin(single), range(1))
        return single

    def _place(self, batch: Batch, row: int, slot: int = 0) -> tuple[str, int]:
        """Return the URL of the tar that a row is read from, and the sample's number in it."""
        dataset = self.datasets[batch.stream[row]].with_joined[slot]
        shard, index = batch.place(row, slot)
        return f"{dataset.store.url}/{dataset.names[shard]}", index

    def _describe_fault(self, error: "BadSampleError | NotFoundError") -> str:
        if isinstance(error, BadSampleError):
            return str(error)
        if not self.plan.options.skip_missing:
            raise error
        return MISSING

    def _put_whole(self, reads: RowReads, lost: Collection[int]) -> dict[int, str]:
        """Put samples that were read whole into the batch, and return their faults by row.

        Rows that are `lost` by now are passed over. Samples with a fault are added to the batch's
        `refused`.
        """
        faults, batch = {}, reads.batch
        for number, row in enumerate(reads.batch_rows):
            if row in lost:
                continue
            if error := reads.errors.get(number):
                fault = self._describe_fault(error)
            elif isinstance(sample := parse_sample(reads.rests[number]), str):
                fault = sample
            else:
                fault = self._put_sample(reads, row, sample)
            if fault:
                faults[row] = fault
                batch.refused.setdefault(batch.place(row), None)
        return faults

    def _put_sample(self, reads: RowReads, row: int, sample: TarSample) -> str:
        """Put the wanted parts of a sample into its row; return its fault, or "" if it has none.

        Raise FormatError if a joined sample has another key than the row.
        """
        batch = reads.batch
        if not reads.slot:
            batch.keys[row] = sample.key
        elif sample.key != batch.keys[row]:
            raise self._wrong_key_error(batch, reads.slot, row, sample.key)
        if self._raw:
            return self._put_raw(reads, row, sample)
        if "made" in self.names:
            return self._prepare(batch, row, sample)
        dataset = self.datasets[batch.stream[row]].with_joined[reads.slot]
        if dataset.kind == "latents":
            fault = self._put_members(reads, row, sample)
        else:
            fault = self._put_images(batch, row, dataset, sample)
        return fault or self._put_texts(reads, row, sample)

    def _put_members(self, reads: RowReads, row: int, sample: TarSample) -> str:
        """Put the arrays of a sample that was read whole into its row; return its fault, or "".

        In place of an image in a role that it lacks are zeros.
        """
        batch = reads.batch
        for item in reads.arrays.fields:
            name, data = batch_name(item.name), sample.fields.get(item.name)
            if data is None and item.is_of_role:
                _leave_out(batch, row, name)
            elif name in reads.arrays.names:
                value = None if data is None else tensor_of(item, data)
                if value is None:
                    return f"its {name} is not that of the dataset"
                if item.is_variable:
                    batch.put(name, row, value)
                elif name in batch.views:
                    batch.views[name][row] = value.view(torch.uint8).numpy().reshape(-1)
        return ""

    def _put_images(self, batch: Batch, row: int, dataset: Dataset, sample: TarSample) -> str:
        """Put the images of a sample, or their crops, into its row; return its fault, or ""."""
        for name in ("image", "pixels", *dataset.role_images):
            if name not in batch.out:
                continue
            prefix = f"{name}." if name in dataset.role_images else ""
            image = _image_in(sample, prefix)
            if image is None and prefix and dataset.lacks_images:
                _leave_out(batch, row, name)
            elif image is None:
                return f"it has no {name if prefix else 'image'}"
            elif name == "image" or not self.plan.options.pixels:
                batch.out[name][row] = image
            else:
                from wdsprep.images.crop import crop, crop_mask  # Pillow: not for latents

                side, max_area = self.plan.options.pixels, self.plan.options.max_area
                try:  # of a mask, what the crop of its target shows
                    target = (_image_in(sample, "") or b"") if is_mask(name) else image
                    cut = crop(target, side, max_area=max_area)
                    is_cut = not is_mask(name)
                    pixels = cut.pixels if is_cut else crop_mask(image, cut, 1, max_area=max_area)
                except RejectedError as error:
                    return f"{prefix}{error}"
                batch.out[name][row] = pixels
        return ""

    def _put_raw(self, reads: RowReads, row: int, sample: TarSample) -> str:
        """Put the members of a sample into its row; return its fault, or "" if it has none.

        The wanted members of a joined sample are added to those of the first one.
        """
        arrays, samples = reads.arrays, reads.batch.out["samples"]
        if not reads.slot:
            names = {field.name for field in arrays.fields}
            others = {name for name in names if batch_name(name) not in arrays.names}
            fields = {name: data for name, data in sample.fields.items() if name not in others}
            url = self._place(reads.batch, row)[0]
            samples[row] = {"__key__": sample.key, "__url__": url, **fields}
            return ""
        members = samples[row]
        members |= {n: data for n, data in sample.fields.items() if batch_name(n) in arrays.names}
        if arrays.texts:
            try:
                facts = [parse_json(f.get("json", b"{}")) for f in (members, sample.fields)]
                members["json"] = facts_bytes(arrays.merge_json(*facts))
            except (ValueError, TypeError, RecursionError):
                return DAMAGED_JSON
            if "txt" in arrays.texts:
                members["txt"] = sample.fields.get("txt", b"")
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
        """Decode and crop an image for the models; return its fault, or "" if it has none."""
        # Pillow, too
        from wdsprep.encoding.on_the_fly.encode_steps import prepare_image, reject_of

        plan, place = self.plan, batch.place(row)
        tar = self.datasets[batch.stream[row]].names[place[0]]
        shapes = plan.cut or Shapes.square(plan.options.pixels)
        limits = {"max_area": plan.options.max_area, "max_nbytes": plan.max_nbytes}
        try:
            prepared, crop = prepare_image(sample, tar, shapes=shapes, **limits)
        except RejectedError as refused:
            batch.refused[place] = reject_of(sample, tar, refused)
            return str(refused.code)
        if crop.pixels.shape != batch.out["pixels"].shape[1:]:
            return "its image is not of the size that its json says"
        batch.out["pixels"][row] = crop.pixels
        batch.out["made"][row] = prepared, crop.without_pixels()
        return ""

    def _put_arrays(
        self, reads: RowReads, layout: SampleLayout, lost: Collection[int]
    ) -> dict[int, str]:
        """Check samples whose arrays were read; put their keys, lengths and texts into the batch.

        Clear the bytes after arrays of variable length. Return the faults by row; rows that are
        `lost` by now are passed over. Raise FormatError if a joined sample has another key than its
        row.
        """
        batch, rows, padded = reads.batch, reads.batch_rows, reads.padded
        headers = reads.headers
        if len(rows) < len(reads.run):
            headers = headers[[row - reads.run.start for row in rows]]
        keys, lengths = layout.read_headers(headers)
        if not reads.slot:
            for row, key in zip(rows, keys, strict=True):
                batch.keys[row] = key or ""
        elif keys != [batch.keys[row] for row in rows]:
            for number, (row, key) in enumerate(zip(rows, keys, strict=True)):
                is_other = key is not None and key != batch.keys[row]
                if is_other and number not in reads.errors and row not in lost:
                    raise self._wrong_key_error(batch, reads.slot, row, str(key))
        left = lengths  # how many bytes came of the last array, and of what is behind it
        if layout.fields[-1].is_variable:
            left = reads.sizes - layout.last_start
            if batch.variable in reads.arrays.names:
                batch.lengths[as_index(rows)] = lengths
        ends = lengths * layout.token_nbytes
        is_short = ends > left
        faults: dict[int, str] = {}
        if reads.rest or reads.errors or None in keys or is_short.any():
            samples = zip(rows, keys, lengths.tolist(), is_short.tolist(), strict=True)
            for number, (row, key, length, lacks) in enumerate(samples):
                if row in lost:
                    continue
                if number in reads.errors:
                    faults[row] = self._describe_fault(reads.errors[number])
                elif key is None:
                    faults[row] = "its headers are not those of the dataset"
                elif lacks:
                    faults[row] = str(too_short())
                elif reads.rest:
                    held = NOTHING if padded is None else padded.rows[row, : left[number]]
                    padding = layout.padding(length)
                    sample = parse_tail(held, reads.rests[number], padding, key)
                    if not isinstance(sample, str):
                        sample = self._put_texts(reads, row, sample)
                    if sample:
                        faults[row] = sample
        if padded is not None:
            is_lost = {*lost, *faults}
            sound = [number for number, row in enumerate(rows) if row not in is_lost]
            come = np.minimum(left[sound], padded.row_nbytes)
            padded.close([rows[number] for number in sound], ends[sound], come)
        return faults

    def _put_texts(self, reads: RowReads, row: int, sample: TarSample) -> str:
        """Put the texts of a sample into its row; return their fault, or "" if they have none.

        The json of a joined sample is merged with what the row has.
        """
        batch, arrays = reads.batch, reads.arrays
        try:
            for name in arrays.texts:
                column = batch.out[name]
                if name in TEXTS:
                    column[row] = self._caption(batch, row, sample)
                else:
                    facts = parse_json(sample.fields.get("json", b"{}"))
                    column[row] = arrays.merge_json(column[row], facts) if reads.slot else facts
        except (ValueError, TypeError, RecursionError):  # a hostile one is nested 1,000 deep
            return DAMAGED_JSON
        return ""

    def _caption(self, batch: Batch, row: int, sample: TarSample) -> str:
        """Return the text at the picked path of a sample's json, or else the sample's caption.

        Log a warning when MANY samples had no text at a path, and none had one.
        """
        if self.plan.paths:
            path = self.plan.paths[batch.choice[row]]
            text = caption_at(parse_json(sample.fields.get("json", b"{}")), path)
            if text is not None:
                self._lacking[path] = float("-inf")
                return text
            self._lacking[path] = self._lacking.get(path, 0) + 1
            if self._lacking[path] == MANY:
                url = self.datasets[batch.stream[row]].store.url
                what = f"none of the first {MANY:,} samples has a text at {path} in its json"
                _log.warning("%s: %s; captions= gives them their own captions instead", url, what)
        return sample.fields.get("txt", b"").decode("utf-8", "replace")


def _image_in(sample: TarSample, prefix: str) -> bytes | None:
    """Return the image whose member has this prefix before its extension, if there is one."""
    members = (sample.fields.get(f"{prefix}{kind}") for kind in IMAGES)
    return next((data for data in members if data is not None), None)


def _leave_out(batch: Batch, row: int, name: str) -> None:
    """Put zeros in place of an image in a role that a sample lacks, and note that it does.

    `name` is that of the image, or of the latents of its mirror image.
    """
    role, number = role_of(name.removesuffix(MIRRORED))
    if name in batch.views:
        batch.views[name][row] = 0
    if presence_name(role) in batch.out:
        batch.out[presence_name(role)][row, number] = False


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
    sample = next(scan(lambda at, nbytes: whole[at : at + nbytes]), "it is empty")
    return str(sample) if isinstance(sample, BadSampleError) else sample
