"""The client: what a caller gets of each URL, and the thread that fetches."""

import threading
import time
from collections import Counter
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from itertools import count

import pytest

from tests.kit.fetches import (
    ANSWERS,
    IMAGE,
    LONG_S,
    SHORT_S,
    fetch,
    fetcher,
    reset_in_the_body,
    robots,
)
from tests.kit.webserver import (
    Behaviour,
    Connection,
    Request,
    WebServer,
    black_hole,
    in_turn,
    ok,
    redirect,
    response,
    status,
)
from wdsprep.dataset.reject_codes import Code
from wdsprep.errors import UsageError
from wdsprep.fetch.client import Fetcher
from wdsprep.fetch.limits import FAILURES_IN_A_ROW
from wdsprep.fetch.options import TRANSIENT, Fetched, FetchRules


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("first", ["500", "429", "reset", "nothing", "408"])
def test_what_may_pass_is_tried_again(first: str) -> None:
    again = ANSWERS[first][0]
    with WebServer({"/": in_turn(again, ok(IMAGE)), "/never": again}) as server:
        assert fetch(server.url, retries=1).data == IMAGE
        assert server.paths() == ["/", "/"]
        assert fetch(f"{server.url}/never", retries=2).code is ANSWERS[first][1]
        assert server.paths() == ["/", "/", *["/never"] * 3]


@pytest.mark.parametrize("name", ["404", "noai", "page", "empty", "circle", "too-long"])
def test_what_will_not_pass_is_not(answering: WebServer, name: str) -> None:
    before = len(answering.requests)
    assert fetch(f"{answering.url}/{name}", retries=5, max_nbytes=100_000).code not in TRANSIENT
    assert len(answering.requests) == before + 1


@pytest.mark.usefixtures("no_pauses")
def test_retry_after_is_obeyed_by_all_that_want_this_host() -> None:
    asked: list[tuple[str, float]] = []

    def note(connection: Connection, request: Request) -> bool:
        asked.append((request.path, time.monotonic()))
        busy = len(asked) == 1
        answer = status(429, Retry_After="1") if busy else ok(IMAGE)
        return answer(connection, request)

    with WebServer(note) as server, fetcher(retries=1, per_host=1) as one:
        futures = [one.submit(f"{server.url}/{n}") for n in range(3)]
        assert [future.result(LONG_S).data for future in futures] == [IMAGE] * 3
    assert len(asked) == 4
    assert asked[1][1] - asked[0][1] >= 0.95


@pytest.mark.usefixtures("no_pauses")
def test_a_host_that_asks_for_too_long_a_pause_is_left_alone() -> None:
    """By what waits for it, too: it is not asked again."""
    with WebServer({"/0": status(429, Retry_After="3600")}) as server:
        with fetcher(retries=3, per_host=1) as one:
            futures = [one.submit(f"{server.url}/{n}") for n in range(5)]
            found = [future.result(LONG_S) for future in futures]
        assert {fetched.code for fetched in found} == {Code.HTTP_429}
        assert all("HTTP 429, Retry-After 3600 s" in fetched.detail for fetched in found)
        assert server.paths() == ["/0"]


def test_robots_txt_is_asked_for_once_and_obeyed() -> None:
    rules = robots("User-agent: wdsprep\nDisallow: /no\n")
    routes = {"/robots.txt": rules, "/yes": ok(IMAGE), "/no": ok(IMAGE)}
    with WebServer(routes) as server, fetcher(ignore_robots=False) as one:
        futures = [one.submit(server.url + path) for path in ("/yes", "/no", "/x/%2e./no") * 10]
        found = {(future.result(LONG_S).code, future.result().detail) for future in futures}
        assert found == {(None, ""), (Code.DISALLOWED, "robots.txt")}
        paths = server.paths(robots=True)
        assert paths[0] == "/robots.txt"
        assert paths.count("/robots.txt") == 1
        assert "/no" not in paths


def test_robots_txt_of_where_a_redirect_leads_is_obeyed() -> None:
    with WebServer({"/robots.txt": robots("User-agent: *\nDisallow: /")}) as closed:
        with WebServer({"/": redirect(f"{closed.url}/x")}) as server:
            assert fetch(server.url, ignore_robots=False).code is Code.DISALLOWED
        assert closed.paths(robots=True) == ["/robots.txt"]


@pytest.mark.parametrize(
    "answer",
    [
        *(status(404), status(403), ok(b"<html>", Content_Type="text/html"), ok(b"")),
        *(redirect("/robots.txt"), redirect("file:///x"), robots("junk\0" * 200_000)),
    ],
)
def test_a_robots_txt_that_is_not_there_allows_all(answer: Behaviour) -> None:
    with WebServer({"/robots.txt": answer, "/x": ok(IMAGE)}) as server:
        assert fetch(f"{server.url}/x", ignore_robots=False).data == IMAGE


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (status(503), Code.HTTP_5XX),
        (status(429), Code.HTTP_429),
        (reset_in_the_body, Code.BROKEN_OFF),
    ],
)
def test_a_robots_txt_that_cannot_be_had_now_forbids_all_for_now(
    answer: Behaviour, code: Code
) -> None:
    with WebServer({"/robots.txt": answer, "/x": ok(IMAGE)}) as server:
        fetched = fetch(f"{server.url}/x", ignore_robots=False)
        assert fetched.code is code
        assert fetched.detail.startswith("robots.txt: ")
        assert not server.paths()
    answers = in_turn(answer, robots(""))  # at the second attempt it comes
    with WebServer({"/robots.txt": answers, "/x": ok(IMAGE)}) as server:
        assert fetch(f"{server.url}/x", ignore_robots=False, retries=1).data == IMAGE


# ---------------------------------------------------------------------------- many at the same time


class Gate:
    """A behaviour that holds its requests until it is opened, and counts how many it holds."""

    def __init__(self) -> None:
        self.opened, self.held, self.most = threading.Event(), 0, 0
        self._changed = threading.Condition()

    def __call__(self, connection: Connection, request: Request) -> bool:
        with self._changed:
            self.held += 1
            self.most = max(self.most, self.held)
            self._changed.notify_all()
        self.opened.wait(LONG_S)
        with self._changed:
            self.held -= 1
        return ok(IMAGE)(connection, request)

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.held == count, LONG_S)


def test_a_slow_host_holds_its_own_requests_and_no_others() -> None:
    gate = Gate()
    with ExitStack() as stack:
        slow = stack.enter_context(WebServer(gate))
        quick = stack.enter_context(WebServer({"/": ok(IMAGE)}, address="127.0.0.2"))
        one = stack.enter_context(fetcher(requests=4, per_host=3))
        stack.callback(gate.opened.set)
        stuck = [one.submit(f"{slow.url}/{n}") for n in range(50)]
        gate.wait_for(3)
        others = [one.submit(quick.url) for _ in range(50)]
        assert all(future.result(LONG_S).data == IMAGE for future in others)
        assert not any(future.done() for future in stuck)
        gate.opened.set()
        assert all(future.result(LONG_S).data == IMAGE for future in stuck)
    assert gate.most == 3


def test_no_more_requests_are_in_flight_than_allowed() -> None:
    gate = Gate()
    with ExitStack() as stack:
        places = [f"127.0.0.{n}" for n in range(2, 8)]
        servers = [stack.enter_context(WebServer(gate, address=place)) for place in places]
        one = stack.enter_context(fetcher(requests=5, per_host=2))
        stack.callback(gate.opened.set)
        futures = [one.submit(f"{server.url}/{n}") for n in range(4) for server in servers]
        gate.wait_for(5)
        gate.opened.set()
        assert all(future.result(LONG_S).data == IMAGE for future in futures)
    assert gate.most == 5


def test_bodies_that_are_too_much_together_come_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten begin, by the usual size; their first parts alone are more than there is room for."""
    monkeypatch.setattr("wdsprep.fetch.limits.ROOM_NBYTES", 2_000_000)
    body, begun, number = bytes(500_000), threading.Barrier(10), count()

    def half(connection: Connection, _: Request) -> bool:
        whole = response(200, body)
        is_early = next(number) < begun.parties
        if is_early:
            begun.wait(LONG_S)
        with suppress(OSError):  # given up
            connection.send(whole[:300_000])
        if is_early:
            begun.wait(LONG_S)
        connection.send(whole[300_000:])
        return True

    with WebServer(half) as server, fetcher(per_host=24, max_nbytes=600_000) as one:
        futures = [one.submit(f"{server.url}/{n}") for n in range(24)]
        assert all(future.result(LONG_S).data == body for future in futures)
        asked = Counter(server.paths())
    assert len(asked) == 24
    assert max(asked.values()) > 1


def test_hosts_take_turns() -> None:
    """One URL of a host that comes last does not wait for the thousand of another."""
    gate, order = Gate(), []

    def note(future: "Future[Fetched]") -> None:
        order.append(future.result().host)

    with ExitStack() as stack:
        large = stack.enter_context(WebServer(in_turn(gate, ok(IMAGE))))
        small = stack.enter_context(WebServer({"/": ok(IMAGE)}, address="127.0.0.2"))
        one = stack.enter_context(fetcher(requests=1))
        stack.callback(gate.opened.set)
        futures = [one.submit(f"{large.url}/{n}") for n in range(100)]
        gate.wait_for(1)
        futures.append(one.submit(small.url))
        for future in futures:
            future.add_done_callback(note)
        gate.opened.set()
        wait(futures, LONG_S)
    assert order.index("127.0.0.2") < 10  # it takes some turns of the loop to come to wait


def test_a_dead_host_is_given_up_without_an_attempt_for_each_url() -> None:
    with black_hole() as url, fetcher(timeout=SHORT_S, per_host=8) as one:
        futures = [one.submit(f"{url}/{n}") for n in range(500)]
        found = [future.result(LONG_S) for future in futures]
    assert {fetched.code for fetched in found} == {Code.TIMEOUT}
    asked = sum("as others there" not in fetched.detail for fetched in found)
    assert FAILURES_IN_A_ROW <= asked < FAILURES_IN_A_ROW + 8


# --------------------------------------------------------------------------------------- at the end


def fetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "wdsprep-fetch" in thread.name]


def test_closing_cancels_what_is_not_done_and_leaves_no_thread() -> None:
    before = len(fetch_threads())
    gate = Gate()
    with WebServer(gate) as server:
        one = Fetcher(FetchRules(allow_private_hosts=True, ignore_robots=True, timeout=LONG_S))
        futures = [one.submit(f"{server.url}/{n}") for n in range(50)]
        gate.wait_for(8)
        one.close()
        one.close()
        gate.opened.set()
        assert all(future.cancelled() for future in futures)
    assert len(fetch_threads()) == before
    with pytest.raises(RuntimeError, match="closed"):
        one.submit(server.url)


@pytest.mark.parametrize("contact", ["two\nlines", "a\r\nX-Evil: b", "mé"])
def test_a_contact_that_no_header_can_hold_is_refused_at_once(contact: str) -> None:
    with pytest.raises(UsageError, match="is not a contact"):
        Fetcher(FetchRules(contact=contact))


def test_more_requests_than_files_are_an_error_with_a_way_out() -> None:
    with pytest.raises(UsageError, match="ulimit -n"):
        Fetcher(FetchRules(requests=10**9))
