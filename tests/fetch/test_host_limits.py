"""Who is asked next, on an event loop but with no network."""

import asyncio
import gc
from collections import Counter
from collections.abc import Coroutine
from typing import Any
from weakref import ref

import pytest

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.fetch.host_limits import FAILURES_IN_A_ROW, HostLimits

LONG_S = 60.0


def play(game: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(game, LONG_S))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_hosts_are_called_in_turn_and_within_both_bounds() -> None:
    async def game() -> None:
        turns, busy, called = HostLimits(in_flight=3, per_host=2), Counter[str](), list[str]()

        async def work(host: str) -> None:
            await turns.take(host)
            called.append(host)
            busy[host] += 1
            assert busy[host] <= 2
            assert busy.total() <= 3
            await asyncio.sleep(0)
            busy[host] -= 1
            turns.give_back(host, None)

        await asyncio.gather(*(work(host) for host in ["a"] * 20 + ["b"] * 4 + ["c"]))
        assert called[:9].count("b") >= 3
        assert "c" in called[:6]
        assert Counter(called) == {"a": 20, "b": 4, "c": 1}

    play(game())


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
        turns.give_back("a", None, pause_s=0.05)
        await others
        assert called == ["b", "b", "a", "a", "a"]

    play(game())


def test_those_who_wait_for_a_dead_host_share_the_fate_of_one() -> None:
    async def game() -> None:
        turns, failed, asked = HostLimits(in_flight=4, per_host=4), list[str](), 0

        async def work() -> None:
            nonlocal asked
            try:
                await turns.take("a")
            except RejectedError as error:
                failed.append(error.detail)
                return
            asked += 1
            await asyncio.sleep(0)
            turns.give_back("a", RejectedError(Code.TIMEOUT, "late"))

        await asyncio.gather(*(work() for _ in range(100)))
        assert FAILURES_IN_A_ROW <= asked < FAILURES_IN_A_ROW + 4
        assert failed == ["late, as others there"] * (100 - asked)

    play(game())


@pytest.mark.parametrize("between", [None, RejectedError(Code.HTTP_4XX, "HTTP 404")])
def test_any_answer_shows_that_a_host_lives(between: RejectedError | None) -> None:
    async def game() -> None:
        turns = HostLimits(in_flight=1, per_host=1)
        for number in range(4 * FAILURES_IN_A_ROW):
            await turns.take("a")
            waits = asyncio.create_task(turns.take("a"))
            await settle()
            late = RejectedError(Code.TIMEOUT, "late")
            turns.give_back("a", late if number % 10 else between)
            await waits
            turns.give_back("a", None if number % 10 == 0 else late)

    play(game())


def test_a_turn_that_nobody_waits_for_any_more_goes_to_the_next() -> None:
    async def game() -> None:
        turns = HostLimits(in_flight=1, per_host=1)
        await turns.take("a")
        waits = [asyncio.create_task(turns.take(host)) for host in "aab"]
        await settle()
        waits[0].cancel()
        await settle()
        turns.give_back("a", None)  # the turn is given in the moment of the cancellation below
        waits[1].cancel()
        await waits[2]
        turns.give_back("b", None)

    play(game())


class Host(str):
    """The name of a host, of which can be seen whether anything keeps it."""


@pytest.mark.parametrize("end", ["an answer", "a pause", "a cancellation", "one too late"])
def test_nothing_is_kept_of_a_host_that_nobody_waits_for(end: str) -> None:
    async def game() -> None:
        turns, host = HostLimits(in_flight=1, per_host=1), Host("a")
        await turns.take(host)
        if end in ("a cancellation", "one too late"):
            waits = asyncio.create_task(turns.take(host))
            await settle()
            if end == "one too late":  # in the moment in which it gets its turn
                turns.give_back(host, None)
            waits.cancel()
            await asyncio.wait([waits])
            del waits
        if end != "one too late":
            turns.give_back(host, None, pause_s=0.01 if end == "a pause" else 0)
        await asyncio.sleep(0.05)
        kept = ref(host)
        del host
        gc.collect()
        assert kept() is None

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
