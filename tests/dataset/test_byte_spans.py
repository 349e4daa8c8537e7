"""Spans hold each sample once, in order; and what an index says after samples are gone."""

import random

import numpy as np
import pytest

from wdsprep.dataset.byte_spans import offsets_without, spans

OFFSETS = np.array([0, 10, 30, 60, 100, 150], np.int64)


def numbers(*given: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    return np.array(given, np.uint32)


def test_neighbours_are_one_span_and_others_where_the_gap_is_small_enough() -> None:
    assert [*spans(OFFSETS, numbers(0, 1, 3))] == [(0, 2, 0, 30), (2, 3, 60, 100)]
    assert [*spans(OFFSETS, numbers(0, 1, 3), gap_nbytes=30)] == [(0, 3, 0, 100)]
    assert [*spans(OFFSETS, numbers(0, 1, 3), gap_nbytes=29)] == [(0, 2, 0, 30), (2, 3, 60, 100)]
    assert [*spans(OFFSETS, numbers())] == []


def test_no_span_is_longer_than_asked_for_but_for_a_single_sample() -> None:
    found = [*spans(OFFSETS, numbers(0, 1, 2, 3, 4), most_nbytes=45)]
    assert found == [(0, 2, 0, 30), (2, 3, 30, 60), (3, 4, 60, 100), (4, 5, 100, 150)]


@pytest.mark.parametrize("seed", range(5))
def test_offsets_without_samples_are_those_of_a_tar_made_of_the_rest(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [512 * chance.randint(1, 9) for _ in range(50)]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    gone = sorted(chance.sample(range(50), chance.randint(0, 50)))
    left = np.delete(sizes, gone)
    assert [*offsets_without(offsets, gone)] == [0, *np.cumsum(left).tolist()]
