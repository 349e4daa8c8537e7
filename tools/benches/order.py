"""The global order: what seeking costs, what an epoch's order costs, and how well it shuffles.

Seeking is from the sizes of the shards to the first step at 90 % of an epoch; its memory is the
peak beyond what the interpreter and NumPy took. Shuffling is compared on one data set (200 shards
of 500 samples, batches of 1,024) with webdataset (shards shuffled, then a buffer of samples) and
with a full permutation: the serial correlation of sample numbers, how often two neighbours in the
sequence are from one shard, how often any two samples of a batch are, and how often those lie less
than 16 places apart in it.
"""

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tools.benches import Group, Rival, Role, call, note, took

SEEKS = ((10**9, 10**5), (10**9, 10**6), (10**10, 10**6))
SHARDS, SIZE, BATCH, NEAR, SEEDS = 200, 500, 1024, 16, 20
OURS = {"run=16": {}, "run=8": {"run": 8}, "run=1": {"run": 1}, "window=1024": {"window": 1024}}
THEIRS = {"webdataset, shuffle(1000)": 1_000, "webdataset, shuffle(10000)": 10_000}


def groups(_home: Path, scale: float) -> Iterator[Group]:
    yield Group(
        name="order-seek",
        title="from the sizes of shards to a step at 90 % of an epoch",
        rivals=[
            Rival(
                name=f"{samples:,} samples in {shards:,} shards",
                command=call(seek, samples, shards),
                role=Role.OURS,
            )
            for samples, shards in SEEKS
        ],
    )
    seeds = max(1, round(SEEDS * scale))
    ours = [
        Rival(name=f"wdsprep, {name}", command=call(of_wdsprep, options, seeds), role=Role.OURS)
        for name, options in OURS.items()
    ]
    theirs = [
        Rival(name=name, command=call(of_webdataset, size, seeds)) for name, size in THEIRS.items()
    ]
    yield Group(
        name="order-shuffle",
        title="the order of an epoch, batches of 1,024",
        count=SHARDS * SIZE,
        rivals=[
            *ours,
            *theirs,
            Rival(name="a full permutation", command=call(of_permutation, seeds), role=Role.LIMIT),
        ],
    )


# --- in processes of their own


def seek(samples: int, shards: int) -> None:
    """A small order is asked first, so that code is loaded and compiled."""
    from wdsprep.loading.order.global_order import Order, OrderStream

    Order(streams=(OrderStream(digest="x", sizes=[5] * 300),), global_batch=BATCH).step(1)
    sizes = np.full(shards, samples // shards)
    before, started, cpu = peak_kb(), time.perf_counter(), time.process_time()
    order = Order(streams=(OrderStream(digest="x", sizes=sizes),), global_batch=BATCH)
    order.step(order.steps_per_epoch * 9 // 10)
    took(time.perf_counter() - started)
    cpu_ms = 1e3 * (time.process_time() - cpu)
    order.step(order.steps_per_epoch + order.steps_per_epoch // 2)
    note(f"{cpu_ms:.1f} ms of processor time, {(peak_kb() - before) / 1024:.1f} MB for two passes")


def peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def of_wdsprep(options: dict[str, int], seeds: int) -> None:
    from wdsprep.loading.order.global_order import Order, OrderStream

    def sequence(seed: int) -> np.ndarray:
        streams = (OrderStream(digest="x", sizes=[SIZE] * SHARDS),)
        order = Order(streams=streams, global_batch=BATCH, seed=seed, **options)
        found = order.steps(0, order.steps_per_epoch)
        return (found.shard * SIZE + found.index).ravel()

    _judge(map(sequence, range(seeds)))


def of_webdataset(size: int, seeds: int) -> None:
    import random

    import webdataset

    def sequence(seed: int) -> np.ndarray:
        rng = random.Random(seed)
        shards = rng.sample(range(SHARDS), SHARDS)
        samples = (shard * SIZE + index for shard in shards for index in range(SIZE))
        return np.array(list(webdataset.shuffle(size, rng=rng)(samples)))

    _judge(map(sequence, range(seeds)))


def of_permutation(seeds: int) -> None:
    _judge(np.random.default_rng(seed).permutation(SHARDS * SIZE) for seed in range(seeds))


def _judge(sequences: Iterator[np.ndarray]) -> None:
    times, found, started = [], [], time.perf_counter()
    for sequence in sequences:
        times.append(time.perf_counter() - started)
        found.append(quality(sequence))
        started = time.perf_counter()
    serial, neighbours, pairs, near = np.mean(found, axis=0)
    took(float(np.median(times)))
    note(
        f"serial correlation {serial:.4f}, neighbours from one shard {neighbours:.2%}, "
        f"pairs of a batch from one shard {pairs:.1%}, near pairs {near:.3%}"
    )


def quality(numbers: np.ndarray) -> tuple[float, float, float, float]:
    serial = float(np.corrcoef(numbers[:-1], numbers[1:])[0, 1])
    shards = numbers // SIZE
    neighbours = float((shards[1:] == shards[:-1]).mean())
    batches = np.sort(numbers[: len(numbers) // BATCH * BATCH].reshape(-1, BATCH), axis=1)
    pairs = near = 0.0
    for batch in batches:
        counts = np.bincount(batch // SIZE)
        pairs += float((counts * (counts - 1)).sum()) / (BATCH * (BATCH - 1))
        close = sum(int((batch[lag:] - batch[:-lag] < NEAR).sum()) for lag in range(1, NEAR))
        near += 2 * close / (BATCH * (BATCH - 1))
    return serial, neighbours, pairs / len(batches), near / len(batches)
