"""Read batches ahead of the trainer, in threads, and serve them in their order.

This connects what is served (the order) with how it is read. `load(ahead=...)` is how many steps
are read ahead; `prefetch_depth` has its default.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from wdsprep.cpus import usable_cpus
from wdsprep.dataset.random_numbers import Ints
from wdsprep.loading.batch_memory import Batch, NumberedBatches
from wdsprep.loading.batch_reader import Reader, Sources
from wdsprep.loading.load_plan import LoadPlan
from wdsprep.loading.options import LONGEST, LoadOptions
from wdsprep.loading.order.global_order import Samples
from wdsprep.loading.served_datasets import Dataset
from wdsprep.loading.shard_access import RemoteShards, Shards, WantedRows
from wdsprep.store.base import RemoteStore

if TYPE_CHECKING:
    from wdsprep.encoding.on_the_fly.encode_steps import Encoding

THREADS = 3
CROPS_NBYTES = 1 << 30  # the limit on crops that wait to be encoded
ROWS_AT_ONCE = 64  # rows that a thread reads at a time
SMALL_AT_ONCE = 256  # rows of small latents, which together take no more than the next line
SMALL_NBYTES = 8 << 20
FIRST_ROWS = 16  # rows that a thread reads of the first batch, so that all threads share it
CROPS_AT_ONCE = 8  # rows that a thread reads and decodes at a time
ORDERED_AT_ONCE = 1 << 15  # samples; of many shapes each costs the same anew each time
STEPS_AT_ONCE = 32  # the least number of steps whose order is computed at a time
AHEAD_NBYTES = 128 << 20  # fetched from S3 before it is needed, twice, and what belongs to its runs
NOBODY = -1  # the stream of a sample that another worker reads
NO_ROWS = np.empty(0, np.int64), np.empty(0, np.int64)
Group = tuple[range, Samples, Ints | None]
"""A few steps, with the places of their samples, and captions if picked."""
END: Group = range(0), Samples(stream=NO_ROWS[0], shard=NO_ROWS[0], index=NO_ROWS[0]), None


def prefetch_depth(
    options: LoadOptions, encoding: "Encoding | None", share: int
) -> tuple[int, int]:
    """Return how many threads read and decode samples, and how many steps are read ahead.

    Decoding takes all cores. Threads that only read slow each other down if there are more of
    them than cores. Crops that wait to be encoded are large, and a machine may have many threads,
    so the bytes of the crops bound the steps.
    """
    cpus = usable_cpus()
    if encoding is None:
        threads = options.threads or max(2, min(THREADS, cpus))
        ahead = threads + 1
    else:
        threads = options.threads or max(THREADS, cpus)
        step_nbytes = max(1, share) * 3 * encoding.recipe.resolution**2
        ahead = max(2, min(threads + 2, CROPS_NBYTES // step_nbytes))
    return threads, ahead if options.ahead is None else options.ahead


def serve_raw(plan: LoadPlan, places: range) -> NumberedBatches:
    """Yield samples of a rank one by one, each with its place counted from step 0."""
    if not places:
        return iter(())
    steps = range(places.start // plan.share, -(-places.stop // plan.share))
    batches = fill_batches(plan, steps, places=places)
    samples = (sample for batch in batches for sample in batch.out["samples"])
    return zip(places, samples, strict=True)


def open_reader(plan: LoadPlan) -> Reader:
    return Reader(plan, open_sources(plan), keep=2 * (plan.ahead + 4))


def open_sources(plan: LoadPlan) -> Sources:
    wholes = dict.fromkeys(part.whole for d in plan.datasets for part in d.with_joined)
    opened = {
        whole: RemoteShards(whole, whole.store, plan.cache)
        if isinstance(whole.store, RemoteStore)
        else Shards(whole)
        for whole in wholes
    }
    return tuple(tuple(opened[part.whole] for part in d.with_joined) for d in plan.datasets)


def close_sources(sources: Sources, pool: ThreadPoolExecutor | None = None) -> None:
    """Close shards, after the pool of threads that read them."""
    if pool is not None:
        pool.shutdown(wait=False, cancel_futures=True)
    for shards in dict.fromkeys(chain.from_iterable(sources)):
        shards.close()


def fill_batches(
    plan: LoadPlan, steps: range, reader: Reader | None = None, *, places: range | None = None
) -> Iterator[Batch]:
    """Yield filled batches in order, while threads fill the next ones.

    Threads fill batches in any order, a few steps ahead. The first batch is read alone, so that
    it comes soon. With `places`, batches have only the samples of these numbers,
    counted from step 0. The reader's shards are closed at the end.
    """
    reader = reader or open_reader(plan)
    pool = ThreadPoolExecutor(max(1, plan.threads), "wdsprep-load")
    # At the latest when the program ends:
    close = weakref.finalize(reader, close_sources, reader.sources, pool)
    most = rows_at_once(plan)
    queue: deque[tuple[Batch, list[Future[None]]]] = deque()
    served = 0
    try:
        for batch in _plan_batches(plan, reader, steps, places):
            reader.begin(batch)
            runs = batch.runs(most if served or queue else min(most, FIRST_ROWS))
            queue.append((batch, [pool.submit(reader.fill, batch, run) for run in runs]))
            if len(queue) > min(plan.ahead, served):
                yield _finish(*queue.popleft(), plan.options.pad)
                served += 1
        while queue:
            yield _finish(*queue.popleft(), plan.options.pad)
    finally:
        close()


def rows_at_once(plan: LoadPlan) -> int:
    """Return how many rows of a batch a thread reads at a time."""
    if "made" in plan.names:
        return CROPS_AT_ONCE
    if plan.datasets[0].kind != "latents":
        return ROWS_AT_ONCE
    # of small ones, most work is done once for all rows
    largest = max(dataset.served_nbytes for dataset in plan.datasets)
    slots = max(len(dataset.with_joined) for dataset in plan.datasets)
    return max(slots * ROWS_AT_ONCE, min(SMALL_AT_ONCE, SMALL_NBYTES // largest))


def _finish(batch: Batch, filling: list[Future[None]], pad: str) -> Batch:
    for part in filling:
        part.result()
    if pad == LONGEST:
        batch.shorten()
    return batch


def _plan_batches(
    plan: LoadPlan, reader: Reader, steps: range, places: range | None
) -> Iterator[Batch]:
    """Yield the batches to read, and announce their samples to shards that are fetched.

    They are announced a group of steps before they are read, and at the same time as those that
    come after, so that neighbours are fetched together. The first group is announced alone: the
    less is fetched, the sooner it comes.
    """
    fetches = any(shards.fetches for shards in chain.from_iterable(reader.sources))
    groups = _groups(plan, steps, places, fetches=fetches)
    if not fetches:
        for group_steps, samples, _ in groups:
            yield from _make_batches(plan, group_steps, samples)
        return
    announced: Iterator[Batch] = iter(())
    for number, (group, after) in enumerate(pairwise(chain(groups, [END]))):
        soon = wanted_by_source(reader, *after[1:]) if number else {}
        for shards, wanted in wanted_by_source(reader, *group[1:]).items():
            shards.expect(wanted, soon.get(shards, NO_ROWS))
        yield from announced
        announced = _make_batches(plan, *group[:2])
    yield from announced


def wanted_by_source(
    reader: Reader, samples: Samples, choice: Ints | None, *, first: int = 0
) -> dict[Shards, WantedRows]:
    """Return the samples that will be read, in the order of training, by the shards they are in.

    `choice` has the number of each sample's caption, if captions are picked by chance. Slots before
    `first` are left out.
    """
    by_source: dict[Shards, list[tuple[Ints, Ints, Ints]]] = {}
    for number, (dataset, sources) in enumerate(zip(reader.datasets, reader.sources, strict=True)):
        here = np.flatnonzero(samples.stream.ravel() == number)
        if not len(here):
            continue
        pairs = samples.shard.ravel()[here], samples.index.ravel()[here]
        for slot in range(first, len(sources)):
            takes = np.array([wanted is not None for wanted in reader.wanted[number][slot]])
            mask = takes[choice.ravel()[here]] if len(takes) > 1 and choice is not None else takes
            mask = np.broadcast_to(mask, here.shape)
            places = dataset.joined[slot - 1].locate(*pairs) if slot else pairs
            rows = here[mask], places[0][mask], places[1][mask]
            by_source.setdefault(sources[slot], []).append(rows)
    wanted: dict[Shards, WantedRows] = {}
    for source, parts in by_source.items():
        in_order, shards, indices = map(np.concatenate, zip(*parts, strict=True))
        by = np.argsort(in_order, kind="stable")
        wanted[source] = shards[by], indices[by]
    return wanted


def _groups(
    plan: LoadPlan, steps: range, places: range | None, *, fetches: bool
) -> Iterator[Group]:
    """Yield a few steps at a time.

    The first group is one step, so that the first batch comes soon; the next ones double in size
    up to a limit. `places` are numbers of samples, counted through all steps; the stream of other
    samples is set to NOBODY. With `fetches`, the bytes of a group are limited too.
    """
    most = max(STEPS_AT_ONCE, ORDERED_AT_ONCE // plan.share)
    if fetches:
        nbytes = plan.share * max(dataset.served_nbytes for dataset in plan.datasets)
        most = min(most, max(1, AHEAD_NBYTES // nbytes))
    done, count = 0, 1
    while done < len(steps):
        part = steps[done : done + count]
        every = plan.order.steps(part[0], part[-1] - part[0] + 1, rank=plan.rank, world=plan.world)
        samples = every[:: steps.step]
        locate_in_tars(plan.datasets, samples)
        if places is not None:
            numbers = np.arange(part.start * plan.share, part.stop * plan.share) - places.start
            others = (numbers < 0) | (numbers % places.step != 0)
            samples.stream[others.reshape(samples.stream.shape)] = NOBODY
        choice = None
        if plan.picks_captions:
            first = plan.rank * plan.share
            choice = np.stack([plan.pick_captions(n, first, plan.share) for n in part])
        yield part, samples, choice
        done, count = done + count, min(2 * count, most)


def locate_in_tars(datasets: Sequence[Dataset], samples: Samples) -> None:
    """Replace places in selections, as the order gives them, by places in the tars."""
    for number, dataset in enumerate(datasets):
        if dataset.part_of is not None and (here := samples.stream == number).any():
            where = dataset.selection.locate(samples.shard[here], samples.index[here])
            samples.shard[here], samples.index[here] = where


def _make_batches(plan: LoadPlan, steps: range, samples: Samples) -> Iterator[Batch]:
    """Yield the batches of these steps one at a time, without positions that have no sample."""
    for row, step in enumerate(steps):
        wanted = samples[row][samples.stream[row] != NOBODY]
        yield begin_batch(step, plan.rank * plan.share, wanted)


def begin_batch(step: int, first: int, samples: Samples) -> Batch:
    """Return the batch of some samples of a step, the first of which has this place in it."""
    return Batch(step, first, samples.stream.tolist(), np.array([[samples.shard, samples.index]]))
