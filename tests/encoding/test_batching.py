"""Which samples share a batch."""

import random
from collections.abc import Sequence

import pytest
import torch

from tests.kit.encodes import Means
from wdsprep.encoding.batching import Batcher
from wdsprep.encoding.encoded_samples import NO_CROP, PendingBlock, SampleUnderWay
from wdsprep.encoding.engine import MOST_WAITING
from wdsprep.encoding.models.base import Part, Tokens
from wdsprep.encoding.models.batch_size import GROUPED_BATCH, text_size

USUAL = 32
BLOCK = 16  # samples that come together


class Lengths(Means):
    """A GPU's encoder, for captions that say how many tokens they are of."""

    device = torch.device("cuda")
    groups_texts = True

    def tokens(self, captions: Sequence[str]) -> list[Tokens]:
        return [Tokens(text, count=int(text), shape=(int(text),)) for text in captions]


def batches_of(lengths: Sequence[int], window: int) -> list[tuple[int, int]]:
    """Of each batch the captions that it has, and for how many there is room."""
    made = Batcher(Lengths(), lambda *_: None, flips=False, image_window=0, text_window=window)
    block, found = PendingBlock(lambda _: None), []
    for number, length in enumerate(lengths):
        made.add(SampleUnderWay(str(number), str(length), [Part.TEXT], block, [NO_CROP]))
        is_last = number == len(lengths) - 1
        if number % BLOCK and not is_last:
            continue
        while batch := made.next_texts(USUAL, now=is_last, head=None):
            shape, rows, size = batch
            assert {row.sample.tokens.shape for row in rows} == {shape}
            found.append((len(rows), size))
    return found


@pytest.mark.parametrize(("spread", "share"), [(25, 0.9), (60, 0.75)])
def test_long_captions_of_one_length_fill_their_batches(spread: int, share: float) -> None:
    rng = random.Random(0)
    lengths = [max(20, round(rng.gauss(200, spread))) for _ in range(16_000)]
    found = batches_of(lengths, MOST_WAITING)
    assert sum(rows for rows, _ in found) == len(lengths)
    assert sum(rows for rows, _ in found) / sum(size for _, size in found) > share
    before = batches_of(lengths, 512)
    assert sum(rows for rows, _ in before) / sum(size for _, size in before) < share - 0.2


@pytest.mark.parametrize(
    ("length", "size"), [((), 32), ((10,), 32), ((77,), 13), ((300,), GROUPED_BATCH)]
)
def test_a_batch_of_long_captions_has_fewer_of_them(length: tuple[int, ...], size: int) -> None:
    assert text_size(length, 32) == size
    assert text_size(length, 1) == 1


def test_the_oldest_block_gets_its_batch_when_there_is_no_room_for_more() -> None:
    made = Batcher(Lengths(), lambda *_: None, flips=False, image_window=0, text_window=99)
    first, second = (PendingBlock(lambda _: None) for _ in range(2))
    for block, length in ((first, "200"), (second, "100"), (second, "200")):
        made.add(SampleUnderWay(length, length, [Part.TEXT], block, [NO_CROP]))
    assert made.next_texts(USUAL, now=False, head=None) is None
    batch = made.next_texts(USUAL, now=False, head=first)
    assert batch is not None
    assert [row.sample.caption for row in batch[1]] == ["200", "200"]
    assert made.next_texts(USUAL, now=False, head=first) is None  # the next ones may wait
