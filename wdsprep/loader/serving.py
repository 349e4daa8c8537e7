"""Batches in their order, read ahead by threads: between what is served and how it is read."""

import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from wdsprep.loader.batches import Batch, Memory
from wdsprep.loader.plan import Plan
from wdsprep.loader.reading import Reader
from wdsprep.loader.shelf import Shelf, open_shelf
from wdsprep.order import Samples
from wdsprep.order.permute import Ints

ROWS_AT_ONCE = 64  # that one thread reads at a time
STEPS_AT_ONCE = 32  # that are ordered at a time
FETCHERS = 16  # requests to S3 at a time
AHEAD_NBYTES = 192 << 20  # fetched from S3 before it is needed, twice, and what belongs to its runs
NOTHING = np.empty(0, np.int64), np.empty(0, np.int64)


def serve(plan: Plan, steps: range) -> Iterator[tuple[int, dict[str, Any]]]:
    """Batches in order. Threads fill them in any order, a few steps ahead; not so the first, which
    would come later for it."""
    shelves = tuple(open_shelf(dataset, FETCHERS, plan.cache) for dataset in plan.datasets)
    reader = Reader(
        datasets=plan.datasets,
        shelves=shelves,
        names=plan.names,
        effects=plan.effects,
        memory=Memory(pin=plan.pinned, keep=2 * (plan.ahead + 4)),
        raw=plan.raw,
        skip_missing=plan.skip_missing,
    )
    pool = ThreadPoolExecutor(max(1, plan.threads), "wdsprep-load")
    close = weakref.finalize(reader, _close, pool, shelves)  # at the latest when the program ends
    queue: deque[tuple[Batch, list[Future[None]]]] = deque()
    served = 0
    try:
        for batch in _planned(plan, reader, steps):
            reader.begin(batch)
            tops = range(0, len(batch), ROWS_AT_ONCE)
            parts = [range(top, min(top + ROWS_AT_ONCE, len(batch))) for top in tops]
            queue.append((batch, [pool.submit(reader.fill, batch, part) for part in parts]))
            if len(queue) > min(plan.ahead, served):
                yield _finished(*queue.popleft())
                served += 1
        while queue:
            yield _finished(*queue.popleft())
    finally:
        close()


def _close(pool: ThreadPoolExecutor, shelves: tuple[Shelf, ...]) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    for shelf in shelves:
        shelf.close()


def _finished(batch: Batch, filling: list[Future[None]]) -> tuple[int, dict[str, Any]]:
    for part in filling:
        part.result()
    return batch.step, batch.out


def _planned(plan: Plan, reader: Reader, steps: range) -> Iterator[Batch]:
    """Which samples each batch has. Shelves hear of them a group of steps before they are read, and
    at the same time what comes after, so that neighbours are fetched together. For the first group
    they do not: the less is fetched, the sooner it comes."""
    groups = _groups(plan, steps)
    told: list[Batch] = []
    group = next(groups, None)
    while group is not None:
        after = next(groups, None)
        for number, shelf in enumerate(reader.shelves):
            soon = after.of(number) if after is not None and told else NOTHING
            shelf.expect(group.of(number), soon)
        yield from told
        told, group = group.batches, after
    yield from told


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Some steps, and where all their samples are."""

    batches: list[Batch]
    samples: Samples

    def of(self, stream: int) -> tuple[Ints, Ints]:
        here = self.samples.stream == stream
        return self.samples.shard[here], self.samples.index[here]


def _groups(plan: Plan, steps: range) -> Iterator[_Group]:
    """The first groups are small, so that the first batch comes soon."""
    nbytes = plan.share * max(dataset.sample_nbytes for dataset in plan.datasets)
    most = min(STEPS_AT_ONCE, max(1, AHEAD_NBYTES // nbytes))
    done, count = 0, 1
    while done < len(steps):
        some = steps[done : done + count]
        found = plan.order.steps(some[0], some[-1] - some[0] + 1, rank=plan.rank, world=plan.world)
        rows = slice(None, None, steps.step)
        own = Samples(stream=found.stream[rows], shard=found.shard[rows], index=found.index[rows])
        yield _Group(
            batches=[_batch(plan, step, own, row) for row, step in enumerate(some)], samples=own
        )
        done, count = done + count, min(2 * count, most)


def _batch(plan: Plan, step: int, found: Samples, row: int) -> Batch:
    return Batch(
        step=step,
        first=plan.rank * plan.share,
        stream=found.stream[row].tolist(),
        shard=found.shard[row].tolist(),
        index=found.index[row].tolist(),
    )
