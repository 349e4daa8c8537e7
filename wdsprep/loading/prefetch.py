"""Read batches ahead of the trainer, in threads, and serve them in their order.

This connects what is served (the order) with how it is read. `load(ahead=...)` is how many steps
are read ahead; `prefetch_depth` is its default.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import get_worker_info

from wdsprep.dataset.random_numbers import Ints
from wdsprep.errors import UsageError
from wdsprep.loading.batch_memory import Batch, Memory
from wdsprep.loading.batch_reader import Reader
from wdsprep.loading.load_plan import LoadPlan
from wdsprep.loading.options import LONGEST
from wdsprep.loading.order.global_order import Samples
from wdsprep.loading.served_datasets import Dataset
from wdsprep.loading.shard_access.local import LocalShelf, Shelf, WantedRows
from wdsprep.loading.shard_access.remote import RemoteShelf
from wdsprep.loading.shard_access.sample_cache import CacheDir
from wdsprep.loading.shared_memory import SharedBatch
from wdsprep.store.base import RemoteStore
from wdsprep.store.schemes import ANY_PLACE

if TYPE_CHECKING:
    from wdsprep.encoding.on_the_fly.image_preparation import Encoding

ROWS_AT_ONCE = 64  # rows that a thread reads at a time
SMALL_AT_ONCE = 256  # rows of small latents, which together take no more than the next line
SMALL_NBYTES = 8 << 20
FIRST_ROWS = 16  # rows that a thread reads of the first batch, so that all threads share it
CROPS_AT_ONCE = 8  # rows that a thread reads and decodes at a time
ORDERED_AT_ONCE = 1 << 15  # samples; of many shapes each costs the same anew each time
STEPS_AT_ONCE = 32  # the least number of steps whose order is computed at a time
FETCHERS = 16  # requests to S3 at a time
AHEAD_NBYTES = 128 << 20  # fetched from S3 before it is needed, twice, and what belongs to its runs
Shelves = tuple[tuple[Shelf, ...], ...]
"""The shelves of each stream: its own, then those of what is joined to it."""
NOBODY = -1  # the stream of a sample that another worker reads
CROPS_NBYTES = 1 << 30  # the limit on crops that wait to be encoded
NOTHING = np.empty(0, np.int64), np.empty(0, np.int64)


def prefetch_depth(threads: int, encoding: "Encoding | None", share: int) -> int:
    """Return how many steps are read ahead by default (the prefetch depth).

    Crops that wait to be encoded are large, and a machine may have many threads, so the bytes of
    the crops bound the number.
    """
    if encoding is None:
        return threads + 1
    step_nbytes = max(1, share) * 3 * encoding.recipe.resolution**2
    return max(2, min(threads + 2, CROPS_NBYTES // step_nbytes))


def serve(plan: LoadPlan, steps: range) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each step with its batch of stored samples, without keeping the batch."""
    return map(_add_step, fill_batches(plan, steps))


def serve_raw(plan: LoadPlan, places: range) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield samples of a rank one by one, each with its place counted from step 0."""
    if not places:
        return iter(())
    steps = range(places.start // plan.share, -(-places.stop // plan.share))
    batches = fill_batches(plan, steps, places=places)
    samples = (sample for batch in batches for sample in batch.out["samples"])
    return zip(places, samples, strict=True)


def _add_step(batch: Batch) -> tuple[int, dict[str, Any]]:
    return batch.step, batch.out if get_worker_info() is None else SharedBatch(batch.out)


def open_reader(plan: LoadPlan) -> Reader:
    return Reader(
        datasets=plan.datasets,
        shelves=open_shelves(plan),
        names=plan.names,
        effects=plan.effects,
        memory=Memory(pin=plan.pinned, keep=2 * (plan.ahead + 4)),
        raw=plan.raw,
        skip_missing=plan.skip_missing,
    )


def open_shelves(plan: LoadPlan) -> Shelves:
    wholes = dict.fromkeys(part.whole for dataset in plan.datasets for part in dataset.with_joined)
    opened = {whole: open_shelf(whole, plan.cache) for whole in wholes}
    return tuple(tuple(opened[part.whole] for part in d.with_joined) for d in plan.datasets)


def close_shelves(shelves: Shelves) -> None:
    for shelf in dict.fromkeys(chain.from_iterable(shelves)):
        shelf.close()


def open_shelf(dataset: Dataset, cache: CacheDir | None) -> Shelf:
    if dataset.store.root:
        return LocalShelf(dataset, dataset.store.root)
    if isinstance(dataset.store, RemoteStore):
        return RemoteShelf(dataset, dataset.store, FETCHERS, cache)
    raise UsageError(f"{dataset.store.url} cannot be loaded: give {ANY_PLACE}")


def fill_batches(
    plan: LoadPlan, steps: range, reader: Reader | None = None, *, places: range | None = None
) -> Iterator[Batch]:
    """Yield filled batches in order, while threads fill the next ones.

    Threads fill batches in any order, a few steps ahead. The first batch is read alone, so that
    it comes soon. With `places`, batches have only the samples of these numbers,
    counted from step 0. The shelves of the reader are closed at the end.
    """
    reader = reader or open_reader(plan)
    pool = ThreadPoolExecutor(max(1, plan.threads), "wdsprep-load")
    # At the latest when the program ends:
    close = weakref.finalize(reader, _close, pool, reader.shelves)
    most = _rows_at_once(plan)
    queue: deque[tuple[Batch, list[Future[None]]]] = deque()
    served = 0
    try:
        for batch in _plan_batches(plan, reader, steps, places):
            reader.begin(batch)
            at_once = most if served or queue else min(most, FIRST_ROWS)
            tops = range(0, len(batch), at_once)
            parts = [range(top, min(top + at_once, len(batch))) for top in tops]
            queue.append((batch, [pool.submit(reader.fill, batch, part) for part in parts]))
            if len(queue) > min(plan.ahead, served):
                yield _finish(*queue.popleft(), plan.pad)
                served += 1
        while queue:
            yield _finish(*queue.popleft(), plan.pad)
    finally:
        close()


def _rows_at_once(plan: LoadPlan) -> int:
    """Return how many rows a thread reads at once.

    If samples are small, most of the work is what is done once for all of these rows.
    """
    if "made" in plan.names:
        return CROPS_AT_ONCE
    if plan.datasets[0].kind != "latents":
        return ROWS_AT_ONCE
    largest = max(dataset.served_nbytes for dataset in plan.datasets)
    slots = max(len(dataset.with_joined) for dataset in plan.datasets)
    return max(slots * ROWS_AT_ONCE, min(SMALL_AT_ONCE, SMALL_NBYTES // largest))


def _close(pool: ThreadPoolExecutor, shelves: Shelves) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    close_shelves(shelves)


def _finish(batch: Batch, filling: list[Future[None]], pad: str) -> Batch:
    for part in filling:
        part.result()
    if pad == LONGEST:
        batch.shorten()
    return batch


def _plan_batches(
    plan: LoadPlan, reader: Reader, steps: range, places: range | None
) -> Iterator[Batch]:
    """Yield the batches to read, and announce their samples to shelves that fetch from S3.

    Such a shelf hears of samples a group of steps before they are read, and at the same time of
    those that come after, so that neighbours are fetched together. The first group is announced
    alone: the less is fetched, the sooner it comes.
    """
    fetches = any(shelf.fetches for shelf in chain.from_iterable(reader.shelves))
    groups = _groups(plan, steps, places, fetches=fetches)
    if not fetches:
        for group in groups:
            yield from group.batches
        return
    told: Iterator[Batch] = iter(())
    now, first = next(groups, None), True
    while now is not None:
        after = next(groups, None)
        later = after.wanted(reader) if after is not None and not first else {}
        for shelf, wanted in now.wanted(reader).items():
            shelf.expect(wanted, later.get(shelf, NOTHING))
        yield from told
        told, now, first = now.batches, after, False
    yield from told


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """A few steps, with the places of all their samples.

    Each batch is made when it is its turn, so that none is kept here.
    """

    batches: Iterator[Batch]
    samples: Samples
    choice: Ints | None
    """The number of each sample's caption, if captions are picked by chance."""

    def wanted(self, reader: Reader) -> dict[Shelf, WantedRows]:
        return wanted_by_shelf(reader, self.samples, self.choice)


def wanted_by_shelf(
    reader: Reader, samples: Samples, choice: Ints | None, *, first: int = 0
) -> dict[Shelf, WantedRows]:
    """Return for each shelf the samples that will be read from it, in the order of training.

    Slots before `first` are left out.
    """
    found: dict[Shelf, list[tuple[Ints, Ints, Ints]]] = {}
    for number, (dataset, shelves) in enumerate(zip(reader.datasets, reader.shelves, strict=True)):
        here = np.flatnonzero(samples.stream.ravel() == number)
        if not len(here):
            continue
        own = samples.shard.ravel()[here], samples.index.ravel()[here]
        for slot in range(first, len(shelves)):
            takes = np.array([wanted is not None for wanted in reader.wanted[number][slot]])
            some = takes[choice.ravel()[here]] if len(takes) > 1 and choice is not None else takes
            some = np.broadcast_to(some, here.shape)
            places = dataset.joined[slot - 1].positions.locate(*own) if slot else own
            rows = here[some], places[0][some], places[1][some]
            found.setdefault(shelves[slot], []).append(rows)
    return {shelf: _sort_by_order(rows) for shelf, rows in found.items()}


def _sort_by_order(rows: Sequence[tuple[Ints, Ints, Ints]]) -> WantedRows:
    """Return the shards and numbers of samples, sorted by the places of these in the order."""
    if len(rows) == 1:
        return rows[0][1:]
    places, shards, indices = map(np.concatenate, zip(*rows, strict=True))
    by = np.argsort(places, kind="stable")
    return shards[by], indices[by]


def _groups(
    plan: LoadPlan, steps: range, places: range | None, *, fetches: bool
) -> Iterator[_Group]:
    """Yield the steps in groups that double in size, with the places of all their samples.

    They double up to a limit; the first is one step, so that the first batch comes soon.
    `places` are numbers of samples, counted through all steps; the stream of other samples is
    set to NOBODY. With `fetches`, the bytes of a group are limited too.
    """
    most = max(STEPS_AT_ONCE, ORDERED_AT_ONCE // plan.share)
    if fetches:
        nbytes = plan.share * max(dataset.served_nbytes for dataset in plan.datasets)
        most = min(most, max(1, AHEAD_NBYTES // nbytes))
    done, count = 0, 1
    while done < len(steps):
        some = steps[done : done + count]
        found = plan.order.steps(some[0], some[-1] - some[0] + 1, rank=plan.rank, world=plan.world)
        rows = slice(None, None, steps.step)
        own = Samples(stream=found.stream[rows], shard=found.shard[rows], index=found.index[rows])
        locate_in_tars(plan.datasets, own)
        if places is not None:
            numbers = np.arange(some.start * plan.share, some.stop * plan.share) - places.start
            others = (numbers < 0) | (numbers % places.step != 0)
            own.stream[others.reshape(own.stream.shape)] = NOBODY
        picked = None
        if plan.effects.captions:
            own_first = plan.rank * plan.share
            picked = np.stack([plan.effects.pick_captions(n, own_first, plan.share) for n in some])
        yield _Group(batches=_batches(plan, some, own), samples=own, choice=picked)
        done, count = done + count, min(2 * count, most)


def locate_in_tars(datasets: Sequence[Dataset], found: Samples) -> None:
    """Replace places in selections, as the order gives them, by places in the tars."""
    for number, dataset in enumerate(datasets):
        if dataset.part_of is not None and (here := found.stream == number).any():
            where = dataset.selection.locate(found.shard[here], found.index[here])
            found.shard[here], found.index[here] = where


def _batches(plan: LoadPlan, steps: range, found: Samples) -> Iterator[Batch]:
    for row, step in enumerate(steps):
        own = found.stream[row] != NOBODY
        yield Batch(
            step=step,
            first=plan.rank * plan.share,
            stream=found.stream[row][own].tolist(),
            shard=found.shard[row][own].tolist(),
            index=found.index[row][own].tolist(),
        )
