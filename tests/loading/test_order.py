"""The global order: property tests over random configurations, and digests that never change."""

import hashlib
import json
import math
import pickle
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wdsprep.dataset.random_numbers import draw, key_of
from wdsprep.errors import FingerprintError, FormatError, OtherFormatError, UsageError
from wdsprep.loading.order.global_order import VERSION, Order, OrderStream, Samples
from wdsprep.loading.order.mixing import StreamAmount, compute_shares, huffman_tree, split
from wdsprep.loading.order.shuffle import Passes, permute_rows, shuffle_range
from wdsprep.loading.shard_access import group_neighbours

PROPERTY = settings(max_examples=60, deadline=None)
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)
SEEDS = st.integers(0, 2**63 - 1)


def stream(name: str, *sizes: int, **amount: float) -> OrderStream:
    return OrderStream(digest=name, sizes=np.array(sizes), amount=StreamAmount(**amount))


@st.composite
def orders(draw: st.DrawFn) -> Order:
    sizes = draw(st.lists(SIZES, min_size=1, max_size=4))
    weights = draw(st.none() | st.just([draw(st.floats(0.01, 50)) for _ in sizes]))
    wants = [{} if weights is None else {"weight": weights[b]} for b in range(len(sizes))]
    return Order(
        streams=tuple(stream(f"s{b}", *some, **wants[b]) for b, some in enumerate(sizes)),
        seed=draw(SEEDS),
        global_batch=draw(st.integers(1, 200)),
        window=draw(st.integers(1, 200)),
        run=draw(st.integers(1, 12)),
        homogeneous=draw(st.booleans()),
    )


def table(found: Samples) -> np.ndarray:
    return np.stack([found.stream, found.shard, found.index], axis=-1)


def digest(*arrays: np.ndarray) -> str:
    data = b"".join(array.astype("<i8").tobytes() for array in arrays)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


# Each sample exactly once a pass


@PROPERTY
@given(SIZES, st.integers(1, 70), st.integers(1, 9), st.integers(1, 400), st.integers(1, 30), SEEDS)
def test_every_pass_serves_every_sample_once(
    sizes: list[int], slots: int, block: int, window: int, run: int, seed: int
) -> None:
    passes = Passes(
        sizes=np.array(sizes), slots=slots, block=block, window=window, run=run, name=(seed, "s")
    )
    everything = [(shard, i) for shard, size in enumerate(sizes) for i in range(size)]
    for number in (0, 1, 2, 12_345_678):
        places = np.arange(number * passes.samples, (number + 1) * passes.samples)
        shards, indices = passes.find(places)
        assert sorted(zip(shards.tolist(), indices.tolist(), strict=True)) == everything


@pytest.mark.parametrize("samples", [1, 2, 63, 64, 65, 1023, 1025, 16_385, 99_991, 300_000])
@pytest.mark.parametrize("shard", [7, 1000])
def test_every_pass_is_whole_at_all_sizes(samples: int, shard: int) -> None:
    sizes = np.diff(np.append(np.arange(0, samples, shard), samples))
    order = Order(streams=(OrderStream(digest="d", sizes=sizes),), global_batch=1024)
    passes = Passes(
        sizes=sizes,
        slots=order.slots,
        block=order.block,
        window=order.window,
        run=order.run,
        name=(VERSION, "d"),
    )
    for number in (0, 3):
        places = np.arange(number * samples, (number + 1) * samples)
        shards, indices = passes.find(places)
        assert (np.bincount(shards * shard + indices) == 1).all()
        assert len(shards) == samples


@PROPERTY
@given(orders(), st.integers(0, 15))
def test_after_any_step_every_sample_of_a_stream_was_served_equally_often(
    order: Order, steps: int
) -> None:
    """But for the pass that is not yet complete: counts differ by one at most."""
    found = table(order.steps(0, steps + 1)).reshape(-1, 3)
    for number, one in enumerate(order.streams):
        served = Counter(map(tuple, found[found[:, 0] == number, 1:].tolist()))
        whole, more = divmod(sum(served.values()), one.samples)
        places = [(k, i) for k, size in enumerate(one.sizes.tolist()) for i in range(size)]
        assert Counter(served[place] - whole for place in places)[1] == more
        assert {served[place] - whole for place in places} <= {0, 1}


# The same sequence on any cluster, from any step


@pytest.mark.system
@PROPERTY
@given(orders(), st.data())
def test_a_run_of_stops_with_other_ranks_and_workers_is_the_run_without_any(
    order: Order, data: st.DataObject
) -> None:
    """Over the end of several epochs; each stop is a fresh process with nothing but the state."""
    steps = min(3 * order.steps_per_epoch + 2, 40)
    worlds = [w for w in range(1, 65) if order.global_batch % w == 0]
    seen: list[np.ndarray] = []
    while len(seen) < steps:
        saved = json.dumps(order.state(len(seen)))
        fresh = pickle.loads(pickle.dumps(order))
        first, world = fresh.resume(json.loads(saved)), data.draw(st.sampled_from(worlds))
        stop = first + data.draw(st.integers(1, 9))
        rows: dict[int, list[np.ndarray]] = {}
        workers = data.draw(st.integers(1, 4))
        for rank, worker in np.ndindex(world, workers):
            for step in range(first + worker, stop, workers):
                share = table(fresh.step(step, rank=rank, world=world))
                rows.setdefault(step, []).append(share)
        seen += [np.concatenate(rows[step]) for step in range(first, stop)]
        if len(worlds) > 3:
            worlds = random.Random(len(seen)).sample(worlds, 3)
    assert (np.stack(seen) == table(order.steps(0, len(seen)))).all()


def test_epochs_are_runs_of_steps_and_drop_nothing() -> None:
    order = Order(streams=(stream("a", 10, 15),), global_batch=8)
    assert order.steps_per_epoch == 3
    assert [order.epoch(step) for step in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert Order(streams=(stream("a", 3),), global_batch=8).steps_per_epoch == 1
    assert Order(streams=order.streams, global_batch=8, epoch_steps=5).epoch(5) == 1


# The mixture


@PROPERTY
@given(orders(), st.integers(0, 10**12 // 200))
def test_mixture_is_within_two_blocks_at_any_prefix(order: Order, first: int) -> None:
    """Up to a first step, which may be far off, in closed form; from there sample by sample."""
    streams = order.streams
    shares, _ = compute_shares([[s.samples] for s in streams], [s.amount for s in streams])
    total, block = sum(shares), order.global_batch if order.homogeneous else order.block
    found = order.steps(first, 5).stream.ravel()
    blocks_before = first if order.homogeneous else first * order.slots
    before = split(huffman_tree(shares), blocks_before, np.zeros(1, np.int64))
    for number, share in enumerate(shares):
        off = (before[number][0] * total - blocks_before * share) / total
        mine = np.cumsum(found == number) / block
        target = np.arange(1, len(found) + 1) * (share / total) / block
        assert np.abs(off + mine - target).max() < 2


@PROPERTY
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.integers(0, 10**15))
@example([1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377], 0)
@example([1, 1, 1, 1, 1, 1, 1, 1000], 0)
def test_splitting_is_exact_rising_and_never_two_blocks_off(shares: list[int], first: int) -> None:
    more = np.arange(2000)
    total = sum(shares)
    counts = split(huffman_tree(shares), first, more)
    assert (np.sum([c for _, c in counts.values()], axis=0) == more).all()
    assert sum(count for count, _ in counts.values()) == first
    for number, share in enumerate(shares):
        start, added = counts[number]
        assert set(np.diff(added).tolist()) <= {0, 1}
        off = (start * total - first * share) / total + added - more * (share / total)
        assert np.abs(off).max() < 1.69


def test_an_epoch_holds_the_wanted_amounts() -> None:
    streams = (stream("a", 1000), stream("b", 500, repeat=2.5), stream("c", 9000, count=300))
    order = Order(streams=streams, global_batch=10)
    assert order.steps_per_epoch == 255
    counts = np.bincount(order.steps(0, 255).stream.ravel())
    assert np.abs(counts - [1000, 1250, 300]).max() <= 1


@pytest.mark.parametrize(
    "wants",
    [
        [{"weight": 1.0, "repeat": 2.0}],
        [{"weight": 0.0}],
        [{"repeat": -1}],
        [{"weight": float("nan")}],
        [{"weight": 1.0}, {}],
    ],
)
def test_amounts_that_make_no_sense_are_refused(wants: list[dict[str, float]]) -> None:
    with pytest.raises(UsageError):
        _ = Order(
            streams=tuple(stream("a", 5, **amount) for amount in wants), global_batch=1
        ).steps_per_epoch


# State


@pytest.mark.parametrize("shape_batch", [None, 64])
def test_shapes_have_one_order_for_worlds_of_1_to_64(shape_batch: int | None) -> None:
    """Those that divide a batch of 576. Each `shape_batch` neighbours are of one shape, every shape
    gives each sample once a pass, and none is ever 2 groups from its proportion."""
    sizes = {"a": [3, 0, 40] * 20, "b": [1], "c": [500, 7], "d": [64] * 9}
    shapes = [
        OrderStream(digest=name, sizes=np.array(some), amount=StreamAmount(weight=2), part_of=0)
        for name, some in sizes.items()
    ]
    order = Order(
        streams=(*shapes, stream("square", 900, weight=1)),
        global_batch=576,
        homogeneous=True,
        shape_batch=shape_batch,
    )
    count = 60
    whole = table(order.steps(0, count))
    for world in filter(lambda world: not 576 % world, range(1, 65)):
        first = world % 7  # a cut
        ranks = [table(order.steps(first, 3, rank=r, world=world)) for r in range(world)]
        assert np.array_equal(np.concatenate(ranks, axis=1), whole[first : first + 3])
    groups = whole[:, :, 0].reshape(-1, order.group)
    assert (groups == groups[:, :1]).all()
    total = sum(map(sum, sizes.values()))
    proportions = [2 * sum(some) / total / 3 for some in sizes.values()] + [1 / 3]
    for number, (one, part) in enumerate(zip(order.streams, proportions, strict=True)):
        served = np.cumsum(groups[:, 0] == number)
        assert np.abs(served - part * np.arange(1, len(served) + 1)).max() < 2
        own = whole.reshape(-1, order.group, 3)[groups[:, 0] == number, :, 1:]
        for stop in range(1, len(own), 5):
            _, times = np.unique(own[:stop].reshape(-1, 2), axis=0, return_counts=True)
            least, rest = divmod(stop * order.group, one.samples)
            assert times.max() == least + (rest > 0)
            assert len(times) == min(one.samples, stop * order.group)
            assert times.min() == max(1, least)


def test_a_state_is_under_1_kb_whatever_the_streams() -> None:
    for count in (1, 8, 100):
        streams = tuple(
            OrderStream(
                digest=f"{b}" * 64, sizes=[10**12 + b], amount=StreamAmount(weight=math.pi + b)
            )
            for b in range(count)
        )
        order = Order(streams=streams, seed=2**63 - 1, global_batch=1 << 19, window=1 << 16)
        assert len(json.dumps(order.state(10**12))) < 1024


def test_a_state_of_another_order_is_refused_with_what_differs() -> None:
    def made(**changes: object) -> Order:
        options = {"streams": (stream("a", 50), stream("b", 60)), "seed": 1, "global_batch": 8}
        return Order(**(options | changes))  # type: ignore[arg-type]

    order = made()
    state = order.state(17)
    assert order.resume(state) == 17
    for line, changes in {
        "seed: 1 -> 2": {"seed": 2},
        "window: 256 -> 9": {"window": 9},
        "run: 16 -> 1": {"run": 1},
        "homogeneous: false -> true": {"homogeneous": True},
        "global-batch: 8 -> 16": {"global_batch": 16},
        "steps-per-epoch: 13 -> 7": {"epoch_steps": 7},
        "50 samples, share 5 -> ": {"streams": (stream("a2", 50), stream("b", 60))},
        "share 6 -> (none)": {"streams": (stream("a", 50),)},
        "share 6 -> a32b3e3498363906, 60 samples, share 3": {
            "streams": (stream("a", 50, repeat=2), stream("b", 60))
        },
    }.items():
        other = made(**changes)
        with pytest.raises(FingerprintError) as caught:
            other.resume(state)
        assert line in str(caught.value)


def test_what_is_no_state_is_refused() -> None:
    order = Order(streams=(stream("a", 50),), global_batch=8)
    for broken in ({}, {"version": 1}, {"version": 1, "step": -1}, {"version": "1", "step": 1}):
        with pytest.raises(FormatError):
            order.resume(broken)
    with pytest.raises(OtherFormatError):
        order.resume(order.state(3) | {"version": VERSION + 1})


@pytest.mark.parametrize(
    ("rank", "world"), [(0, 3), (4, 4), (-1, 2), (0, 0)], ids=["share", "rank", "below", "none"]
)
def test_a_share_that_does_not_exist_is_refused(rank: int, world: int) -> None:
    order = Order(streams=(stream("a", 50),), global_batch=8)
    with pytest.raises(UsageError):
        order.step(0, rank=rank, world=world)


# Reading


Places = list[tuple[int, int]]
PLACES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=80)


@PROPERTY
@given(PLACES, PLACES, st.integers(0, 4), st.integers(1, 20))
def test_pieces_cover_what_is_wanted_and_reach_over_what_comes_soon(
    wanted: Places, soon: Places, gap: int, most: int
) -> None:
    arrays = [np.array(some, np.int64).reshape(-1, 2).T for some in (wanted, soon)]
    pieces = list(group_neighbours(tuple(arrays[0]), tuple(arrays[1]), gap=gap, most=most))
    found = [(shard, index) for shard, indices in pieces for index in indices]
    assert set(wanted) <= set(found) <= {*wanted, *soon}
    assert len({(shard, indices[0]) for shard, indices in pieces}) == len(pieces)
    urgencies = []
    for shard, indices in pieces:
        assert indices[-1] - indices[0] < most
        assert max(np.diff(indices), default=0) <= gap + 1
        urgencies.append(min(wanted.index(p) for i in indices if (p := (shard, i)) in wanted))
    assert urgencies == sorted(urgencies)


def requests(order: Order, steps: int, *, rank: int = 0, world: int = 1) -> list[list[int]]:
    """The indices of each request that reading so many steps at once makes."""
    found = order.steps(0, steps, rank=rank, world=world)
    wanted = found.shard.ravel(), found.index.ravel()
    nothing = np.empty(0, np.int64), np.empty(0, np.int64)
    return [indices for _, indices in group_neighbours(wanted, nothing, gap=0, most=1000)]


def test_a_slot_serves_runs_of_neighbours_and_a_rank_stays_with_few_windows() -> None:
    """2 steps of 16 samples a slot: 2 runs of 16, which now and then are neighbours. 16 steps of a
    rank that holds 8 of the 64 slots: 8 windows, each a range or two."""
    order = Order(streams=(stream("a", *[1000] * 500),), global_batch=1024)
    assert 64 * 2 * 0.8 < len(requests(order, 2)) < 64 * 2 * 1.05
    alone = Order(streams=order.streams, global_batch=1024, run=1)
    assert len(requests(alone, 2)) > 64 * 32 * 0.7
    of_rank = requests(order, 16, rank=3, world=8)
    assert len(of_rank) <= 8 * 2 + 1
    assert sum(map(len, of_rank)) == 8 * 256


# Shuffling, measured by `tools/bench order`


def test_neighbours_are_seldom_of_one_shard_and_serial_correlation_is_low() -> None:
    correlations = []
    for seed in range(8):
        order = Order(streams=(stream("a", *[500] * 200),), global_batch=1024, seed=seed)
        numbers = order.steps(0, order.steps_per_epoch)
        shards = numbers.shard.ravel()
        served = shards * 500 + numbers.index.ravel()
        correlations.append(np.corrcoef(served[:-1], served[1:])[0, 1])
        assert (shards[1:] == shards[:-1]).mean() < 0.02
    assert abs(np.mean(correlations)) < 0.05


def test_passes_and_seeds_are_shuffled_anew() -> None:
    def served(seed: int, number: int) -> np.ndarray:
        order = Order(streams=(stream("a", *[50] * 40),), global_batch=100, seed=seed)
        return table(order.steps(number * 20, 20)).reshape(-1, 3)

    for other in (served(0, 1), served(1, 0)):
        assert (served(0, 0) == other).all(axis=1).mean() < 0.01


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_of_a_window_are_equally_likely(size: int) -> None:
    count = math.factorial(size) * 500
    rows = np.repeat(np.arange(count), size)
    places = np.tile(np.arange(size), count)
    keys = draw(key_of("test"), np.arange(count))
    found = permute_rows(places, rows, np.full(count, size), keys).reshape(count, size)
    seen = Counter(map(tuple, found.tolist()))
    assert len(seen) == math.factorial(size)
    chi_square = sum((n - 500) ** 2 / 500 for n in seen.values())
    assert chi_square < 2 * len(seen) + 12


# Frozen for ever: a change here is a new version of the state


def test_golden_hashes_and_permutations() -> None:
    assert f"{key_of(1, 'a', 2):016x}" == "7e5628f470ee8763"
    # The reference SplitMix64 with state 0
    assert draw(0, np.arange(2)).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert shuffle_range(10, 7).tolist() == [1, 8, 5, 7, 0, 9, 4, 6, 3, 2]
    assert digest(shuffle_range(100_003, 7)) == "38c5f39fc79eea29"


ONE = (OrderStream(digest="a", sizes=[500] * 199 + [17]),)
TWO = (stream("a", 100, 1, 0, 37, weight=1), stream("b", *[64] * 90, weight=2.5))
HUGE = (OrderStream(digest="h", sizes=[10**6] * 10**4),)
GOLDEN = {
    "6a7212dd587a61b8": Order(streams=ONE, global_batch=1024),
    "916c043073c193a1": Order(streams=ONE, global_batch=1024, seed=1),
    "aa5c690ca6ebcd9c": Order(streams=ONE, global_batch=1024, window=33),
    "ccf0fa213512e986": Order(streams=ONE, global_batch=1024, run=1),
    "d6e17bfb0333fc40": Order(streams=ONE, global_batch=129),
    "b8d287d6f1316599": Order(streams=(stream("t", 2, 1),), global_batch=70),
    "46f00303c990cd07": Order(streams=TWO, global_batch=96),
    "6b965c5e8749437d": Order(streams=TWO, global_batch=96, homogeneous=True),
    "4ed56a9b599ddac0": Order(streams=HUGE, global_batch=4096),
}


@pytest.mark.parametrize("golden", GOLDEN)
def test_golden_orders(golden: str) -> None:
    order = GOLDEN[golden]
    near, far = order.steps(0, 5), order.steps(10**7 + 3, 3)
    assert digest(table(near), table(far)) == golden
