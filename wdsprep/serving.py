"""Batches in their order, read ahead by threads: between what is served and how it is read."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from wdsprep.batches import Batch, Memory
from wdsprep.load_plan import Plan
from wdsprep.order import Samples
from wdsprep.permute import Ints
from wdsprep.reading import Reader
from wdsprep.shelf import open_shelf

ROWS_AT_ONCE = 64  # that one thread reads at a time
STEPS_AT_ONCE = 32  # that are ordered at a time
FETCHERS = 16  # requests to S3 at a time
AHEAD_NBYTES = 128 << 20  # fetched from S3 before it is needed, twice


def serve(plan: Plan, steps: range) -> Iterator[tuple[int, dict[str, Any]]]:
    """Batches in order. Threads fill them in any order, a few steps ahead."""
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
    queue: deque[tuple[Batch, list[Future[None]]]] = deque()
    try:
        for batch in _planned(plan, reader, steps):
            reader.begin(batch)
            tops = range(0, len(batch), ROWS_AT_ONCE)
            parts = [range(top, min(top + ROWS_AT_ONCE, len(batch))) for top in tops]
            queue.append((batch, [pool.submit(reader.fill, batch, part) for part in parts]))
            if len(queue) > plan.ahead:
                yield _finished(*queue.popleft())
        while queue:
            yield _finished(*queue.popleft())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for shelf in shelves:
            shelf.close()


def _finished(batch: Batch, filling: list[Future[None]]) -> tuple[int, dict[str, Any]]:
    for part in filling:
        part.result()
    return batch.step, batch.out


def _planned(plan: Plan, reader: Reader, steps: range) -> Iterator[Batch]:
    """Which samples each batch has. Shelves hear of them a group of steps before they are read."""
    nbytes = plan.share * max(dataset.sample_nbytes for dataset in plan.datasets)
    most = min(STEPS_AT_ONCE, max(1, AHEAD_NBYTES // nbytes))
    told: deque[list[Batch]] = deque()
    for group in _groups(plan, steps, most):
        for number, shelf in enumerate(reader.shelves):
            shelf.expect(_wanted(group, number))
        told.append(group)
        if len(told) > 1:
            yield from told.popleft()
    for group in told:
        yield from group


def _groups(plan: Plan, steps: range, most: int) -> Iterator[list[Batch]]:
    """The first groups are small, so that the first batch comes soon."""
    done, count = 0, 1
    while done < len(steps):
        some = steps[done : done + count]
        found = plan.order.steps(some[0], some[-1] - some[0] + 1, rank=plan.rank, world=plan.world)
        yield [_batch(plan, step, found, step - some[0]) for step in some]
        done, count = done + count, min(2 * count, most)


def _batch(plan: Plan, step: int, found: Samples, row: int) -> Batch:
    return Batch(
        step=step,
        first=plan.rank * plan.share,
        stream=found.stream[row].tolist(),
        shard=found.shard[row].tolist(),
        index=found.index[row].tolist(),
    )


def _wanted(group: list[Batch], number: int) -> tuple[Ints, Ints]:
    stream, shard, index = (
        np.array([value for batch in group for value in getattr(batch, name)], np.int64)
        for name in ("stream", "shard", "index")
    )
    return shard[stream == number], index[stream == number]
