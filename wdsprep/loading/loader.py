"""Serve a dataset, or a mixture of several, to a trainer: one order, whatever the cluster.

    loader = wdsprep.load("shards/latents-256", global_batch=1024)
    for epoch in range(10):
        for batch in loader:                     # this rank's share: latent, emb, key
            train(batch)
            state = loader.state_dict()          # the same on every rank

`wdsprep.loading.order.global_order` gives the order: a function of seed and step in which each
sample comes exactly once a pass (the proof is in `wdsprep.loading.order.shuffle`). So the whole
state is the number of steps served. A state may be resumed on any number of ranks, threads and
workers, with nothing lost or repeated. A state of other data, another seed or another batch is
refused. The state counts what was *yielded*, never what was read ahead.

Threads read ahead by default. Inside `torch.utils.data.DataLoader(loader, batch_size=None,
num_workers=V)` each of the V workers takes every V-th step (in raw mode every V-th sample), and the
DataLoader takes turns among them, which restores the order. Workers are other processes, so the
trainer must count steps: set `loader.step` before each epoch, or the DataLoader repeats the first.

    for batch in DataLoader(loader, batch_size=None, num_workers=2):
        step += 1                                # resume: load(..., step=step)

torchdata's StatefulDataLoader asks each worker for its state. It needs as many workers to resume.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from wdsprep.dataset.manifest import fingerprint
from wdsprep.dataset.random_numbers import key_of
from wdsprep.dataset.removed_samples import removed_from
from wdsprep.dataset.shapes import buckets_of_phase
from wdsprep.errors import FingerprintError, FormatError, UsageError
from wdsprep.limits import MAX_AREA
from wdsprep.loading.augmentation import normalise_weights, stored_empty_captions
from wdsprep.loading.batch_memory import NumberedBatches, WholeBatch, copy_batches
from wdsprep.loading.join import join_datasets
from wdsprep.loading.load_plan import Captions, LoadPlan, check_plan, choose_fields, make_encoding
from wdsprep.loading.open_datasets import (
    as_streams,
    find_latent_shapes,
    join_places,
    open_stream,
    select_buckets,
)
from wdsprep.loading.options import FULL, LoadOptions
from wdsprep.loading.order.global_order import MAX_STEP, Order
from wdsprep.loading.prefetch import fill_batches, prefetch_depth, serve_raw
from wdsprep.loading.sample_cache import open_cache_dir
from wdsprep.loading.served_datasets import Dataset, order_streams
from wdsprep.loading.subsets import divide_by_roles, select_where, shorten_for_state
from wdsprep.options import takes_options
from wdsprep.store import shared_store
from wdsprep.text import brief, plural, whole_number

if TYPE_CHECKING:
    from wdsprep.encoding.on_the_fly.encode_steps import Encoding


NAMED = 8  # joined datasets that a state lists one by one


@takes_options(LoadOptions)
def load(options: LoadOptions) -> "Loader":
    """Return a loader of a dataset or of a mixture of several.

        for batch in wdsprep.load("shards/latents-256", global_batch=1024):
            train(batch["latent"], batch["emb"])

    A step has `global_batch` samples over all ranks. `rank` and `world_size` come from
    torch.distributed or the environment unless given. `epochs` is the length of an iteration,
    None for an endless one, and `step` is where to begin.

    `fields` lists what a batch holds: the arrays, `key`, `txt` (or `caption`) and `json`; for
    images, `image` or, with `pixels=256`, `pixels`. An image of more than `max_area` pixels
    counts as damaged. `raw` gives samples one by one, as webdataset gives them. Arrays that are
    as long as their captions come with a `emb_mask`, and are filled with zeros: to a length that is
    the same for all batches, or with `pad="longest"` to the longest of each batch.

    `where` is a condition on the json of samples, such as "aesthetic >= 6 and width >= 768":
    samples that do not meet it are left out. `join` lists datasets of the same images, whose
    arrays batches have too. `captions` has weights by which one of several captions is picked at
    random for each sample: those of text datasets by their names, or texts in the json by their
    paths. `drop_text` is the share of captions that the empty caption replaces, and `flip` the
    share of images whose latents are those of the mirror image.

    `homogeneous` takes all samples of a step from one stream, and from one shape if a stream has
    several. `shape_batch` does that only for groups of so many neighbours in a step, a multiple
    of what a rank gets. `window` is how far the order shuffles inside a shard, and `run` how
    many neighbours stay together there, as one request to S3.

    `skip_missing` serves other samples in place of those of a missing shard. `cache` is a local
    folder for at most `cache_nbytes` of what comes from S3; all processes of a machine may
    share it. `device` copies batches there one step ahead, and `pin` leaves the copy to the
    trainer.

    `encode` makes latents of image shards on the fly, on the trainer's device: the same batches
    and states as with stored latents, in which a GPU may give other last bits. `tee` is where to
    keep these latents, as `wdsprep encode` would.
    """
    changes = (options.pixels, options.captions, options.drop_text, options.flip, options.pad_roles)
    has_others = any(changes) or options.pin or options.device or options.pad != FULL
    if options.raw and (has_others or options.fields is not None):
        raise UsageError("raw=True gives samples as they are stored: leave out the other options")
    streams, join = as_streams(options.streams), join_places(options.join)
    options = replace(options, streams=streams, join=join)  # not iterators, which are used up
    datasets = tuple(part for stream in streams for part in open_stream(stream, join))
    cached = open_cache_dir(options.cache, options.cache_nbytes)
    encoding = make_encoding(options)
    if options.max_area != MAX_AREA and not options.pixels:
        raise UsageError("max_area= is for pixels=; with encode=, give Encode(max_area=)")
    if options.tee and len({dataset.whole for dataset in datasets}) > 1:
        raise UsageError("tee= is for one dataset: encode a mixture without it")
    datasets = _select_samples(datasets, options, encoding, cached[0] if cached else None)
    captions = normalise_weights({} if options.captions is None else options.captions)
    order = Order(
        streams=order_streams(datasets),
        global_batch=options.global_batch,
        seed=options.seed,
        window=options.window,
        run=options.run,
        homogeneous=options.homogeneous or any(d.is_of_one_shape for d in datasets),
        shape_batch=options.shape_batch,
        epoch_steps=options.epoch_steps,
        also=_state_parameters(datasets, options, captions),
        also_places={name: d.store.url for name, d in _joined_datasets(datasets).items()},
    )
    names = choose_fields(datasets, options)
    rank, world = _find_rank(options)
    order.check(options.step, rank=rank, world=world)
    threads, ahead = prefetch_depth(options, encoding, options.global_batch // world)
    plan = LoadPlan(
        options=options,
        datasets=datasets,
        order=order,
        rank=rank,
        world=world,
        names=() if options.raw else names,
        captions=captions,
        threads=threads,
        ahead=ahead,
        cache=cached,
    )
    check_plan(plan)
    if plan.options.drop_text:
        plan = replace(plan, empty=stored_empty_captions(plan))
    return Loader(plan, encoding)


def _find_rank(options: LoadOptions) -> tuple[int, int]:
    """Return the rank and the world size.

    The options come first, then torch.distributed, then the environment, then 0 and 1.
    """
    if options.rank is not None or options.world_size is not None:
        if options.rank is None or options.world_size is None:
            raise UsageError("give both rank and world_size, or neither")
        return options.rank, options.world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    with suppress(ValueError):
        numbers = int(rank or 0), int(size or 1)
        if (size or not numbers[0]) and (rank or numbers[1] <= 1):
            return numbers
    raise UsageError(
        f"the environment has RANK={rank!r} and WORLD_SIZE={size!r}: set both to whole numbers, or "
        "give rank= and world_size="
    )


def _state_parameters(
    datasets: tuple[Dataset, ...], options: LoadOptions, captions: Captions
) -> dict[str, Any]:
    """Return the settings that a saved state must agree with, among them how latents were made."""
    fingerprints = [fingerprint(d.settings) for d in datasets if d.kind == "latents"]
    conditions = [*{dataset.whole: dataset.where for dataset in datasets}.values()]
    several = f"several, together {key_of(*conditions):016x}"
    shown = ", ".join(f"{name} {share!r}" for name, share in captions)
    unusual = {
        "flip": options.flip,
        "pad_roles": options.pad_roles,
        "latents": f"{key_of(*fingerprints):016x}" if fingerprints else "",
        "max_area": options.max_area if options.max_area != MAX_AREA else 0,  # of pixels alone
        "where": conditions[0] if len({*conditions}) == 1 else several,
        "captions": shorten_for_state(shown),
    }
    lines = {
        name: f"{key_of(fingerprint(d.settings), d.digest):016x}, {d.samples:,} samples"
        for name, d in _joined_datasets(datasets).items()
    }
    tables = dict.fromkeys(table for d in datasets for table in d.tables)
    lines |= {f"table {number}": table.digest[:16] for number, table in enumerate(tables)}
    if len(lines) > NAMED:
        lines = {"joined": f"{len(lines)}, together {key_of(*lines.values()):016x}"}
    usual = {"drop_text": options.drop_text, "pixels": options.pixels}
    return usual | {name: value for name, value in unusual.items() if value} | lines


def _joined_datasets(datasets: tuple[Dataset, ...]) -> dict[str, Dataset]:
    """Return the joined datasets, by the names under which a saved state lists them."""
    parts = dict.fromkeys(part.whole for d in datasets for part in d.with_joined[1:])
    return {f"joined {number}": part for number, part in enumerate(parts)}


def _select_samples(
    datasets: tuple[Dataset, ...],
    options: LoadOptions,
    encoding: "Encoding | None",
    folder: Path | None,
) -> tuple[Dataset, ...]:
    """Return the datasets with only the samples that can be served, joined to what they list.

    With `encoding`, images become the latents that will be made of them. Left out are images too
    small to crop, samples that a joined dataset lacks, and those that do not meet the condition.
    Shapes and selections are kept in `folder`, by default in that of this machine. Raise UsageError
    if latents are to be kept and samples are left out.
    """
    if encoding is not None:
        settings = encoding.settings
        datasets = tuple(
            part for images in datasets for part in find_latent_shapes(images, settings, folder)
        )
    if side := options.pixels:
        datasets = tuple(
            select_buckets(dataset, buckets_of_phase(side, dataset.settings["buckets"]), side)
            if dataset.kind == "images"
            else dataset
            for dataset in datasets
        )
    divided = divide_by_roles(join_datasets(datasets), folder, pad=options.pad_roles)
    left = select_where(divided, options.where, folder)
    lost = sum(dataset.samples for dataset in datasets) - sum(dataset.samples for dataset in left)
    if options.tee and (lost or left[0].where):
        raise UsageError(
            "tee= keeps whole shards: leave out where=, and join= of what lacks samples "
            f"({plural(lost, 'sample')} here)"
        )
    return left


def _read_numbers(state: Mapping[str, Any], name: str, *, count: int) -> list[int]:
    """Return the numbers that a state has under a name, or [] if it has none.

    Raise FormatError unless there are `count` whole numbers.
    """
    if name not in state:
        return []
    numbers = state[name]
    is_list = isinstance(numbers, list | tuple) and len(numbers) == count
    if not is_list or any(type(n) is not int or not 0 <= n <= MAX_STEP for n in numbers):
        raise FormatError(f"this is not the state of a loader: {name} is {brief(numbers)}")
    return [*numbers]


class Loader(IterableDataset[dict[str, Any]]):
    """An iterable over the batches of one rank, which can be stopped and resumed.

    An iteration continues where the last one stopped. It ends at the next multiple of the plan's
    number of epochs, counted from step 0. `step` is the number of steps served so far. `encoding`
    has the models and settings that make latents on the fly, if they are not stored.
    """

    def __init__(self, plan: LoadPlan, encoding: "Encoding | None") -> None:
        self.plan, self.encoding = plan, encoding
        self._unit = plan.share if plan.options.raw else 1  # items a step
        self._place = plan.options.step * self._unit  # a step, or in raw mode a sample
        self._worker: tuple[int, int, int] | None = None  # in one: its number, of how many, its end
        self._is_entered = False  # as a worker, and not yet at the end
        self._moves = 0  # of the place, but for that of the newest iteration

    def __repr__(self) -> str:
        return f"<Loader {self.plan.summary}; at step {self.step:,}>"

    @property
    def step(self) -> int:
        """The number of steps served so far, at which the next iteration begins."""
        return self._place // self._unit

    @step.setter
    def step(self, step: int) -> None:
        step = whole_number("step", step)
        self.plan.order.check(step, rank=self.plan.rank, world=self.plan.world)
        if (step * self._unit, None) != (self._place, self._worker):
            self._move(step * self._unit, None)

    def __len__(self) -> int:
        """Return the number of batches, in raw mode of samples, in an iteration from its start."""
        if self.plan.options.epochs is None:
            raise TypeError("an endless loader has no length")
        steps = self.plan.options.epochs * self.plan.order.steps_per_epoch
        return steps * self._unit

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.plan.order.epoch(self.step)

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.order.steps_per_epoch

    @property
    def end(self) -> int:
        """The step at which an iteration that begins now ends."""
        epochs, length = self.plan.options.epochs, self.plan.order.steps_per_epoch
        return (
            MAX_STEP if epochs is None else (self.step // (epochs * length) + 1) * epochs * length
        )

    def urls(self) -> list[str]:
        """Return the URLs of the shards, as `webdataset.WebDataset` takes them."""
        wholes = dict.fromkeys(dataset.whole for dataset in self.plan.datasets)
        places = {whole: whole.store.root or whole.store.url for whole in wholes}
        return [f"{place}/{name}" for whole, place in places.items() for name in whole.names]

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from: under 1 KB of JSON, the same on every rank."""
        state = self.plan.order.state(self.step)
        if row := self._place % self._unit:
            state["row"] = [row, self.plan.world]
        if self._worker:
            state["worker"] = list(self._worker)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the loader to the place of a saved state, at which the next iteration begins.

        Raise FingerprintError if the state is of other data or another order, and FormatError
        if it is no state.
        """
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            raise FormatError(f"this is not the state of a loader, but {brief(state)}")
        row, world = _read_numbers(state, "row", count=2) or (0, self.plan.world)
        if row >= max(1, self._unit) and world == self.plan.world:
            raise FormatError(f"this is not the state of a loader: a step has no row {brief(row)}")
        worker = _read_numbers(state, "worker", count=3)
        if worker and worker[0] >= worker[1]:
            raise FormatError(f"this is not the state of a loader: its worker is {brief(worker)}")
        order_state = {name: state[name] for name in state if name not in ("row", "worker")}
        try:
            step = self.plan.order.resume(order_state)
        except FingerprintError as error:
            places = self.plan.order.places_with_other_samples(order_state)
            lost = [url for url in places if removed_from(shared_store(url)).changes]
            why = f"samples were removed from {' and '.join(lost)}: " if lost else ""
            raise FingerprintError(f"{why}{error}") from None
        if row and (world != self.plan.world or not self.plan.options.raw):
            raise FingerprintError(
                f"the state was saved {row} samples into a step by one of {world} ranks: resume in "
                "raw mode on as many, or save states between steps"
            )
        self._move(step * self._unit + row, (worker[0], worker[1], worker[2]) if worker else None)

    def _move(self, place: int, worker: tuple[int, int, int] | None) -> None:
        """Set the place at which the next iteration begins.

        An iteration that is under way then raises UsageError.
        """
        self._place, self._worker, self._is_entered = place, worker, False
        self._moves += 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        if info is not None and (self.encoding or self.plan.pinned or self.plan.device):
            raise UsageError(
                "encode=, device= and pin= do not work in a DataLoader's workers: give it "
                "num_workers=0, or leave them out and give it pin_memory=True"
            )
        number, stride = (0, 1) if info is None else (info.id, info.num_workers)
        if self._worker and (info is None or self._worker[:2] != (number, stride)):
            raise FingerprintError(
                f"the state was saved in worker {self._worker[0]} of {self._worker[1]} of a "
                "DataLoader: resume in one with as many workers, or count steps in the trainer and "
                "set loader.step"
            )
        end = self._unit * (self.end if info is None else self._enter(number, stride))
        self._moves += 1
        moves = self._moves
        for place, item in self._serve(range(self._place, max(self._place, end), stride)):
            self._place = place + stride
            yield item
            if self._moves != moves:
                raise UsageError(
                    "this iteration cannot go on: the loader's step was set, or it was iterated "
                    f"again, and it is at step {self.step} now"
                )
        self._place, self._worker, self._is_entered = end, None, False

    def _serve(self, places: range) -> NumberedBatches:
        if self.plan.options.raw:
            return serve_raw(self.plan, places)
        batches: NumberedBatches
        if self._serve_encoded is None:
            batches = ((batch.step, batch.out) for batch in fill_batches(self.plan, places))
        else:
            batches = self._serve_encoded(places)
        if self.plan.device is not None:
            batches = copy_batches(batches, self.plan.device)
        return ((step, WholeBatch(batch)) for step, batch in batches)

    @cached_property
    def _serve_encoded(self) -> Callable[[range], NumberedBatches] | None:
        """The function that encodes images, made for the first batch; None for stored latents."""
        if self.encoding is None:
            return None
        from wdsprep.loading.encoded_batches import serve_encoded

        return serve_encoded(self.plan, self.encoding)

    def _enter(self, number: int, workers: int) -> int:
        """Begin to serve in a DataLoader's worker, and return the step at which that ends.

        From here on the worker counts its own steps. Persistent workers live on when the
        trainer breaks off an iteration, but have read ahead by then: only the trainer knows
        how far it came.
        """
        if self._is_entered:
            raise UsageError(
                "the last iteration was stopped early, and its workers have read ahead of it: make "
                "a new DataLoader, from a loader whose step is set to the next one"
            )
        if self._worker is None:
            self._worker = (number, workers, self.end)
            self._place += number
        self._is_entered = True
        return self._worker[2]
