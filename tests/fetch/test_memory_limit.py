"""As many bodies begin as will fit by what is known, and never more stay than fit."""

from wdsprep.fetch.memory_limit import ROOM_NBYTES, USUAL_NBYTES, BodyLimit, body_limit_for


def begun(room: BodyLimit) -> int:
    while room.takes_one_more:
        room.bodies += 1
    return room.bodies


def test_hundreds_of_usual_bodies_have_room_and_few_large_ones() -> None:
    room = body_limit_for(50_000_000)
    assert room.max_nbytes == ROOM_NBYTES
    assert begun(room) == 1 + 2 * ROOM_NBYTES // USUAL_NBYTES > 2_000
    room.bodies = 0
    for _ in range(100):
        room.learn(50_000_000)
    assert 3 <= begun(room) <= 6


def test_what_has_come_already_counts() -> None:
    room = BodyLimit(1_000)
    room.bodies, room.nbytes, room.usual_nbytes = 2, 500, 10
    assert not room.takes_one_more
    assert not room.is_crowded()
    room.nbytes = 1_001
    assert room.is_crowded()


def test_where_it_was_crowded_fewer_begin() -> None:
    room = BodyLimit(1_000, usual_nbytes=100)
    assert begun(room) == 20
    room.nbytes = 1_001
    assert room.is_crowded()
    room.nbytes = room.bodies = 0
    assert begun(room) == 5


def test_one_body_always_has_room() -> None:
    room = body_limit_for(1_000_000_000)
    assert room.max_nbytes == 2_000_000_000
    room.learn(10**12)
    assert begun(room) == 1
