"""Batches in their order, read ahead by threads: between what is served and how it is read."""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from wdsprep.errors import UsageError
from wdsprep.loading.arguments import LONGEST, LoadPlan
from wdsprep.loading.catalog import Dataset
from wdsprep.loading.memory import Batch, Memory
from wdsprep.loading.order import Samples
from wdsprep.loading.order.chance import Ints
from wdsprep.loading.reading import Reader
from wdsprep.loading.shelves.cache import CacheDir
from wdsprep.loading.shelves.local import LocalShelf, Shelf
from wdsprep.loading.shelves.remote import RemoteShelf
from wdsprep.loading.worker_memory import Shared
from wdsprep.store.local import LocalStore
from wdsprep.store.s3 import S3Store

ROWS_AT_ONCE = 64  # that one thread reads at a time
SMALL_AT_ONCE = 256  # of latents that take together no more than
SMALL_NBYTES = 8 << 20
FIRST_ROWS = 16  # of the first batch, which all threads read
CROPS_AT_ONCE = 8  # that it reads and decodes
ORDERED_AT_ONCE = 1 << 15  # samples; of many shapes each costs the same anew each time
STEPS_AT_ONCE = 32  # at least, that are ordered at a time
FETCHERS = 16  # requests to S3 at a time
AHEAD_NBYTES = 128 << 20  # fetched from S3 before it is needed, twice, and what belongs to its runs
NOBODY = -1  # the stream of a sample that another worker reads
NOTHING = np.empty(0, np.int64), np.empty(0, np.int64)


def serve(plan: LoadPlan, steps: range) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each step with what its batch holds, of which nothing is kept here."""
    return map(_numbered, filled(plan, steps))


def serve_raw(plan: LoadPlan, places: range) -> Iterator[tuple[int, dict[str, Any]]]:
    """These samples of the rank, counted from step 0, one by one."""
    if not places:
        return iter(())
    steps = range(places.start // plan.share, -(-places.stop // plan.share))
    batches = filled(plan, steps, places=places)
    samples = (sample for batch in batches for sample in batch.out["samples"])
    return zip(places, samples, strict=True)


def _numbered(batch: Batch) -> tuple[int, dict[str, Any]]:
    return batch.step, batch.out if get_worker_info() is None else Shared(batch.out)


def open_reader(plan: LoadPlan) -> Reader:
    wholes = dict.fromkeys(dataset.whole for dataset in plan.datasets)
    shelves = {whole: open_shelf(whole, plan.cache) for whole in wholes}
    return Reader(
        datasets=plan.datasets,
        shelves=tuple(shelves[dataset.whole] for dataset in plan.datasets),
        names=plan.names,
        effects=plan.effects,
        memory=Memory(pin=plan.pinned, keep=2 * (plan.ahead + 4)),
        raw=plan.raw,
        skip_missing=plan.skip_missing,
    )


def open_shelf(dataset: Dataset, cache: CacheDir | None) -> Shelf:
    if isinstance(dataset.store, LocalStore):
        return LocalShelf(dataset, dataset.store.root)
    if isinstance(dataset.store, S3Store):
        return RemoteShelf(dataset, dataset.store, FETCHERS, cache)
    raise UsageError(f"{dataset.store.url}: loading is from a local folder or s3://")


def filled(
    plan: LoadPlan, steps: range, reader: Reader | None = None, *, places: range | None = None
) -> Iterator[Batch]:
    """Batches in order, or what they have of some places. Threads fill them in any order, a few
    steps ahead; not so the first, which would come later for it. A reader that is given is closed
    at the end."""
    reader = reader or open_reader(plan)
    pool = ThreadPoolExecutor(max(1, plan.threads), "wdsprep-load")
    # At the latest when the program ends:
    close = weakref.finalize(reader, _close, pool, reader.shelves)
    most = _rows_at_once(plan)
    queue: deque[tuple[Batch, list[Future[None]]]] = deque()
    served = 0
    try:
        for batch in _planned(plan, reader, steps, places):
            reader.begin(batch)
            at_once = most if served or queue else min(most, FIRST_ROWS)
            tops = range(0, len(batch), at_once)
            parts = [range(top, min(top + at_once, len(batch))) for top in tops]
            queue.append((batch, [pool.submit(reader.fill, batch, part) for part in parts]))
            if len(queue) > min(plan.ahead, served):
                yield _finished(*queue.popleft(), plan.pad)
                served += 1
        while queue:
            yield _finished(*queue.popleft(), plan.pad)
    finally:
        close()


def _rows_at_once(plan: LoadPlan) -> int:
    """What is done once for all of them is most of the work where samples are small."""
    if "made" in plan.names:
        return CROPS_AT_ONCE
    if plan.datasets[0].kind != "latents":
        return ROWS_AT_ONCE
    largest = max(dataset.sample_nbytes for dataset in plan.datasets)
    return max(ROWS_AT_ONCE, min(SMALL_AT_ONCE, SMALL_NBYTES // largest))


def _close(pool: ThreadPoolExecutor, shelves: tuple[Shelf, ...]) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    for shelf in dict.fromkeys(shelves):
        shelf.close()


def _finished(batch: Batch, filling: list[Future[None]], pad: str) -> Batch:
    for part in filling:
        part.result()
    if pad == LONGEST:
        batch.shorten()
    return batch


def _planned(plan: LoadPlan, reader: Reader, steps: range, places: range | None) -> Iterator[Batch]:
    """Which samples each batch has. Shelves that fetch hear of them a group of steps before they
    are read, and at the same time what comes after, so that neighbours are fetched together. For
    the first group they do not: the less is fetched, the sooner it comes."""
    fetches = any(shelf.fetches for shelf in reader.shelves)
    groups = _groups(plan, steps, places, fetches=fetches)
    if not fetches:
        for group in groups:
            yield from group.batches
        return
    streams: dict[Shelf, list[int]] = {}
    for number, shelf in enumerate(reader.shelves):
        streams.setdefault(shelf, []).append(number)
    told: Iterator[Batch] = iter(())
    now, first = next(groups, None), True
    while now is not None:
        after = next(groups, None)
        for shelf, own in streams.items():
            soon = after.of(own) if after is not None and not first else NOTHING
            shelf.expect(now.of(own), soon)
        yield from told
        told, now, first = now.batches, after, False
    yield from told


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Some steps, each made when it is its turn so that none is kept here, and where all their
    samples are."""

    batches: Iterator[Batch]
    samples: Samples

    def of(self, streams: Sequence[int]) -> tuple[Ints, Ints]:
        here = np.isin(self.samples.stream, streams)
        return self.samples.shard[here], self.samples.index[here]


def _groups(
    plan: LoadPlan, steps: range, places: range | None, *, fetches: bool
) -> Iterator[_Group]:
    """The first groups are small, so that the first batch comes soon."""
    most = max(STEPS_AT_ONCE, ORDERED_AT_ONCE // plan.share)
    if fetches:
        nbytes = plan.share * max(dataset.sample_nbytes for dataset in plan.datasets)
        most = min(most, max(1, AHEAD_NBYTES // nbytes))
    done, count = 0, 1
    while done < len(steps):
        some = steps[done : done + count]
        found = plan.order.steps(some[0], some[-1] - some[0] + 1, rank=plan.rank, world=plan.world)
        rows = slice(None, None, steps.step)
        own = Samples(stream=found.stream[rows], shard=found.shard[rows], index=found.index[rows])
        locate(plan.datasets, own)
        if places is not None:
            numbers = np.arange(some.start * plan.share, some.stop * plan.share) - places.start
            others = (numbers < 0) | (numbers % places.step != 0)
            own.stream[others.reshape(own.stream.shape)] = NOBODY
        yield _Group(batches=_batches(plan, some, own), samples=own)
        done, count = done + count, min(2 * count, most)


def locate(datasets: Sequence[Dataset], found: Samples) -> None:
    """What the order says of the samples of parts, as it is in their tars."""
    for number, dataset in enumerate(datasets):
        if dataset.part is not None and (here := found.stream == number).any():
            where = dataset.located(found.shard[here], found.index[here])
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
