"""Which samples share a batch, how many are under way, and how much memory they may take."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

from tests.kit.encodes import Broken, Means
from wdsprep.dataset.samples import Sample
from wdsprep.encoding.batching import MOST_LAUNCHED, Batcher, DeviceBatches
from wdsprep.encoding.engine import MOST_WAITING, EngineLimit
from wdsprep.encoding.models.base import GROUPED_BATCH, Part, Tokens, text_size
from wdsprep.encoding.models.device import Device, ImageBatch, TextBatch
from wdsprep.encoding.sample_chain import Block, EncodingSample

USUAL = 32
BLOCK = 16  # samples that come together


class Lengths(Means):
    """A GPU's encoder, for captions that say how many tokens they are of."""

    device = torch.device("cuda")
    groups_texts = True

    def tokens(self, captions: Sequence[str], _images: object = ()) -> list[Tokens]:
        return [Tokens(text, count=int(text), shape=(int(text),)) for text in captions]


class Sizes:
    """Stands for devices, and says how large batches are."""

    size = text_size = USUAL


def batcher(window: int) -> Batcher:
    return Batcher(Lengths(), Sizes(), text_window=window)  # type: ignore[arg-type]


def text_of(caption: str) -> EncodingSample:
    sample = Sample(source="", image=b"", captions=(caption,))
    return EncodingSample(caption, sample, {0: Part.TEXT})


def batches_of(lengths: Sequence[int], window: int) -> list[tuple[int, int]]:
    """Of each batch the captions that it has, and for how many there is room."""
    made, found = batcher(window), []
    for number, length in enumerate(lengths):
        made.add(text_of(str(length)))
        is_last = number == len(lengths) - 1
        if number % BLOCK and not is_last:
            continue
        while ready := made.next_batch(now=is_last):
            rows, _ = ready
            [shape] = {row.sample.tokens.shape for row in rows}
            found.append((len(rows), text_size(shape, USUAL)))
    return found


def test_long_captions_of_one_length_fill_their_batches() -> None:
    rng, share = random.Random(0), 0.9
    lengths = [max(20, round(rng.gauss(200, 25))) for _ in range(8_000)]
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
    made = batcher(99)
    first, second = Block([text_of("200")]), Block([text_of("100"), text_of("200")])
    for sample in (*first.samples, *second.samples):
        made.add(sample)
    assert made.next_batch(now=False) is None
    ready = made.next_batch(now=False, head=first)
    assert ready is not None
    rows, batch = ready
    assert isinstance(batch, TextBatch)
    assert [row.sample.sample.caption for row in rows] == ["200", "200"]
    assert made.next_batch(now=False, head=first) is None  # the next ones may wait


def batch(level: int) -> ImageBatch:
    pixels = torch.full((2, 3, 16, 16), level, dtype=torch.uint8)
    return ImageBatch.of(pixels, ["one", "other"], seed=0)


def until(holds: Any) -> None:
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is finished before this is set."""
    event, finish = threading.Event(), Device.finish

    def held(device: Device, launched: Any) -> Any:
        assert event.wait(60)
        return finish(device, launched)

    monkeypatch.setattr(Device, "finish", held)
    yield event
    event.set()


def test_several_batches_are_launched_before_the_first_is_finished(hold: threading.Event) -> None:
    encoder = Means()
    made = DeviceBatches(encoder, 2)
    rows = [made.submit(batch(level)) for level in range(10)]
    until(lambda: len(encoder.sizes) == MOST_LAUNCHED)
    time.sleep(0.1)
    assert len(encoder.sizes) == MOST_LAUNCHED
    hold.set()
    found = [[row["latent.npy"].item() for row in each.result(60) if row] for each in rows]
    assert found == [[level, level] for level in range(10)]
    made.close()


def test_what_was_not_launched_is_cancelled_on_closing(hold: threading.Event) -> None:
    encoder = Means()
    made = DeviceBatches(encoder, 2)
    rows = [made.submit(batch(level)) for level in range(10)]
    until(lambda: len(encoder.sizes) == MOST_LAUNCHED)
    closing = threading.Thread(target=made.close)
    closing.start()

    def is_closing() -> bool:
        try:
            rows.append(made.submit(batch(10)))
        except RuntimeError:  # of a pool that takes no more
            return True
        return False

    until(is_closing)
    hold.set()
    closing.join(60)
    cancelled = [True] * (len(rows) - MOST_LAUNCHED)
    assert [each.cancelled() for each in rows] == [False] * MOST_LAUNCHED + cancelled
    with pytest.raises(CancelledError):
        rows[-1].result(60)


def test_what_fails_is_raised_where_its_rows_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DeviceBatches(Broken(), 2)  # at the third
    rows = [made.submit(batch(level)) for level in range(3)]
    rows[1].result(60)
    with pytest.raises(ValueError, match="a kernel of 3"):
        rows[2].result(60)
    monkeypatch.setattr(Device, "finish", lambda *_: 1 / 0)
    other = DeviceBatches(Means(), 2)
    for level in range(2 * MOST_LAUNCHED):  # it goes on after each
        with pytest.raises(ZeroDivisionError):
            other.submit(batch(level)).result(60)
    for each in (made, other):
        each.close()


def test_samples_and_their_bytes_are_bounded_and_one_alone_may_always_come() -> None:
    room = EngineLimit(3, 100)
    assert room.enter(9, 1000, 0)  # nothing is inside
    assert not room.enter(1, 0, 0)
    room.leave(9, 1000)
    assert room.enter(2, 60, 0)
    assert not room.enter(2, 0, 0)
    assert not room.is_full  # of bytes
    assert not room.enter(1, 50, 0)
    assert room.is_full
    room.hold(-20)  # decoded
    assert room.enter(1, 50, 0)
    assert not room.is_full


def test_whoever_waits_enters_when_others_have_left() -> None:
    room = EngineLimit(4, 100)
    assert room.enter(4, 100, 0)
    entered: list[bool] = []
    waiting = threading.Thread(target=lambda: entered.append(room.enter(2, 10, 60)))
    waiting.start()
    room.leave(4, 100)
    waiting.join(60)
    assert entered == [True]
