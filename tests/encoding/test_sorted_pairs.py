"""Pairs that are sorted in runs and merged are what sorting them at once gives."""

import random

import pytest
from blake3 import blake3

from tests.kit.small_runs import sort_in_runs
from wdsprep.encoding.captions.sorted_pairs import Pairs, SortedPairs
from wdsprep.text import EXAMPLES

LETTERS = ["a", "b", "\0", "é", "\uffff", "😀"]


def some_pairs(seed: int, names: int, count: int = 500) -> list[tuple[str, str]]:
    chance = random.Random(seed)
    known = ["".join(chance.choices(LETTERS, k=chance.randint(1, 9))) for _ in range(names)]
    texts = [chance.choice(LETTERS) * chance.randint(1, 40) for _ in range(count)]
    return [(chance.choice(known), f"{text}{n}") for n, text in enumerate(texts)]


def parts(pairs: list[tuple[str, str]], size: int) -> list[Pairs]:
    some = [pairs[at : at + size] for at in range(0, len(pairs), size)]
    return [([n for n, _ in part], [c for _, c in part]) for part in some]


@pytest.mark.parametrize("names", [1, 3, 60, 5000])
@pytest.mark.parametrize(("run", "block"), [(1, 1), (600, 200), (3000, 100), (1 << 20, 1 << 20)])
def test_the_first_caption_of_each_name_comes_in_order(
    names: int, run: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sort_in_runs(monkeypatch, run, block)
    pairs = some_pairs(run + names, names)
    found = SortedPairs(pairs=[([], []), *parts(pairs, 7)], digest=blake3())
    came = [pair for some in found for pair in zip(*some, strict=True)]
    first = dict(reversed(pairs))
    expected = sorted(first.items(), key=lambda pair: pair[0].encode())
    assert came == expected
    digest = blake3("".join(f"{len(n)},{len(c)}:{n}{c}" for n, c in expected).encode())
    assert found.digest.hexdigest() == digest.hexdigest()
    every = [name for name, _ in pairs]
    twice = [name for name, _ in expected if every.count(name) > 1]
    assert (found.names, found.twice) == (len(first), len(twice))
    assert found.examples == twice[:EXAMPLES]


def test_nothing_is_sorted_to_nothing() -> None:
    found = SortedPairs(pairs=[([], [])], digest=blake3())
    assert not list(found)
    assert not found.names
