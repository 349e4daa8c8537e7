"""How many requests at once: by host, by memory, and after failures."""

import asyncio
import datetime
import socket
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.kit.fetches import Answers
from wdsprep.dataset.reject_codes import Code
from wdsprep.errors import WorkError
from wdsprep.fetch.answer_rules import LaterError, pause_s, retry_after_s
from wdsprep.fetch.limits import ROOM_NBYTES, USUAL_NBYTES, BodyLimit, HostLimits, body_limit_for
from wdsprep.fetch.options import Fetched
from wdsprep.fetch.outage import NO_SUCH_NAME, OutageCheck, Witnesses

LONG_S = 60.0


def play(game: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(game, LONG_S))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_host_that_pauses_does_not_hold_the_others() -> None:
    async def game() -> None:
        turns, called = HostLimits(in_flight=1, per_host=1), list[str]()

        async def work(host: str) -> None:
            await turns.take(host)
            called.append(host)
            turns.give_back(host, None)

        await turns.take("a")
        others = asyncio.gather(*(work(host) for host in "aaabb"))
        await settle()
        turns.give_back("a", LaterError(Code.HTTP_429, "busy", 0.05))
        await others
        assert called == ["b", "b", "a", "a", "a"]

    play(game())


def test_none_starts_while_too_much_is_held() -> None:
    async def game() -> None:
        held = 0
        turns = HostLimits(in_flight=9, per_host=9, may_start=lambda: held < 2)
        await turns.take("a")
        held = 2
        waits = asyncio.create_task(turns.take("a"))
        await settle()
        assert not waits.done()
        held = 1
        turns.give_back("a", None)
        await waits

    play(game())


NOW = datetime.datetime(2026, 11, 21, 8, 0, 0, tzinfo=datetime.timezone.utc)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("120", 120),
        (" 7 ", 7),
        ("Sat, 21 Nov 2026 08:00:30 GMT", 30),
        ("Sat, 21 Nov 2026 07:00:00 GMT", 0),
        ("9" * 40, 999_999_999),
        ("soon", 0),
        ("٣", 0),
        ("Sat, 99 Nov 2026 08:00:30 GMT", 0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str, expected: float) -> None:
    assert retry_after_s({"retry-after": [value]}, NOW) == expected


def test_pauses_are_spread_up_to_a_bound_that_doubles() -> None:
    for attempt, bound in enumerate((1, 2, 4, 8, 16, 30, 30)):
        pauses = [pause_s(attempt) for _ in range(500)]
        assert 0 <= min(pauses) < bound * 0.2
        assert bound * 0.8 < max(pauses) <= bound


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
    room.nbytes = room.max_nbytes + 1
    assert room.is_crowded()
    room.nbytes = room.bodies = 0
    assert begun(room) == 2, "all that was ever crowded is counted in full"


def noted(pairs: list[tuple[str, Code | None]]) -> OutageCheck:
    outage = OutageCheck(Answers().submit, Witnesses())
    for url, code in pairs:
        outage.note(url, code)
    return outage


def suspected(pairs: list[tuple[str, Code | None]], *, at_end: bool = False) -> bool:
    return noted(pairs).is_suspected(at_end=at_end)


def test_an_outage_is_suspected_where_many_sites_give_no_answer() -> None:
    many = [(f"http://a.b{n % 9}.org/x", Code.DNS) for n in range(200)]
    assert suspected(many)
    assert not suspected(many[:199])
    assert not suspected([*many[:199], ("http://x.org", Code.HTTP_5XX), *many[:199]])
    assert suspected([*many[:199], ("file:///x", Code.BAD_URL), *many[:1]])
    assert not suspected([("http://dead.org/x", Code.DNS)] * 10_000, at_end=True)
    assert not suspected([(f"http://a{n}.dead.org/x", Code.DNS) for n in range(999)])
    few = [(f"http://a.b{n}.org/x", Code.UNREACHABLE) for n in range(20)]
    assert suspected(few, at_end=True)
    assert not suspected(few)
    assert not suspected(few[:19], at_end=True)
    assert not suspected([("http://ok.org", None), *many[:100]], at_end=True)


NO_NAME, NO_DATA = NO_SUCH_NAME


@pytest.mark.parametrize(
    ("code", "says", "of_the_internet", "is_outage"),
    [
        (Code.DNS, NO_NAME, 0, False),  # nobody has these names
        (Code.DNS, NO_DATA, 0, False),
        (Code.DNS, NO_NAME, NO_NAME, True),  # a name service that knows of no internet
        (Code.DNS, socket.EAI_AGAIN, socket.EAI_AGAIN, True),  # one that does not answer
        (Code.DNS, socket.EAI_FAIL, 0, True),
        (Code.TIMEOUT, NO_NAME, 0, True),  # whoever they are, they are silent
    ],
)
def test_before_anybody_has_answered_the_name_service_decides(
    monkeypatch: pytest.MonkeyPatch, code: Code, says: int, of_the_internet: int, is_outage: bool
) -> None:
    def getaddrinfo(name: str, _port: None) -> list[object]:
        error = of_the_internet if name.endswith("root-servers.net") else says
        if error:
            raise socket.gaierror(error, "x")
        return []

    monkeypatch.setattr("wdsprep.fetch.outage.socket.getaddrinfo", getaddrinfo)
    outage = noted([(f"http://dead{n}.org/x", code) for n in range(30)])
    assert outage.is_suspected(at_end=True)
    if is_outage:
        with pytest.raises(WorkError, match="if it is up and these hosts are gone, add --ignore-o"):
            outage.confirm()
    else:
        outage.confirm()
        assert not outage.is_suspected(at_end=True)


@pytest.mark.parametrize("answer", [None, Code.HTTP_5XX, Code.TIMEOUT, Code.DISALLOWED])
def test_a_host_that_answered_before_decides(answer: Code | None) -> None:
    client, witnesses = Answers(), Witnesses()
    OutageCheck(client.submit, witnesses).note("http://ok.org/1", Code.HTTP_4XX)  # of another slice
    outage = OutageCheck(client.submit, witnesses)
    for n in range(30):
        outage.note(f"http://dead{n}.org/x", Code.TIMEOUT)
    with ThreadPoolExecutor(1) as threads:
        told = threads.submit(outage.confirm)
        while "http://ok.org/1" not in client.asked:
            time.sleep(0.001)
        client.asked["http://ok.org/1"][0].set_result(Fetched(code=answer))
        if answer in (Code.TIMEOUT, Code.DISALLOWED):  # the latter is known without asking
            with pytest.raises(WorkError, match="nor do hosts that did before"):
                told.result()
        else:
            told.result()
