"""Wanted texts are found in columns as a set of Python finds them."""

import random

import pytest

from wdsprep.dataset.removed_samples import mark_of
from wdsprep.tables.query import WantedTexts


@pytest.mark.parametrize("count", [0, 1, 300])
def test_texts_are_found_as_in_a_set(count: int) -> None:
    rng = random.Random(count)
    every = ["", "\0", "a", "A", "a ", "\u00e9", *(f"https://a.com/{n}.jpg" for n in range(400))]
    wanted = rng.sample(every[1:], count) * 2
    texts = [None, *rng.choices(every, k=500)]
    found = WantedTexts("url", wanted)
    assert len(found) == count
    numbers = found.find(texts).tolist()
    assert numbers == [n for n, text in enumerate(texts) if text in wanted]
    unseen = {*wanted} - {*texts}
    assert {*found.unseen(wanted)} == unseen
    assert int((~found.seen).sum()) == len(unseen)


def test_a_text_with_the_hash_of_a_wanted_one_is_not_taken_for_it() -> None:
    class Text(str):
        def __hash__(self) -> int:
            return 7

    found = WantedTexts("key", [Text("a"), Text("b")])
    assert found.find([Text("c"), Text("b"), Text("")]).tolist() == [1]
    assert [*found.unseen(["a", "b"])] == ["a"]
    assert mark_of("key", "b") in found.marks
