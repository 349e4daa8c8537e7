"""Batches under way on one device: how many, and what becomes of them."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

from tests.kit.encodes import Broken, Means
from wdsprep.encoding.batching import MOST_LAUNCHED, DeviceBatches
from wdsprep.encoding.models.device import Device, ImageBatch


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
