"""How much may be inside the engine at once."""

import threading

from wdsprep.encoding.memory_limit import EngineLimit


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
