"""What is tried again, and what a robots.txt says first."""

import time

import pytest

from tests.kit.fetches import ANSWERS, IMAGE, LONG_S, fetch, fetcher, reset_in_the_body, robots
from tests.kit.webserver import (
    Behaviour,
    Connection,
    Request,
    WebServer,
    in_turn,
    ok,
    redirect,
    status,
)
from wdsprep.dataset.reject_codes import Code
from wdsprep.fetch.options import TRANSIENT


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("first", ["500", "429", "reset", "nothing", "408"])
def test_what_may_pass_is_tried_again(first: str) -> None:
    with WebServer({"/": in_turn(ANSWERS[first][0], ok(IMAGE))}) as server:
        assert fetch(server.url, retries=1).data == IMAGE
        assert server.paths() == ["/", "/"]


@pytest.mark.usefixtures("no_pauses")
def test_attempts_end() -> None:
    with WebServer({"/": status(503)}) as server:
        assert fetch(server.url, retries=2).code is Code.HTTP_5XX
        assert len(server.paths()) == 3


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
    with WebServer(routes) as server, fetcher(robots=True) as one:
        futures = [one.submit(server.url + path) for path in ("/yes", "/no", "/x/%2e./no") * 10]
        found = [future.result(LONG_S) for future in futures]
        assert {(fetched.code, fetched.detail) for fetched in found} == {
            *((None, ""), (Code.DISALLOWED, "robots.txt"))
        }
        paths = server.paths(robots=True)
        assert paths[0] == "/robots.txt"
        assert paths.count("/robots.txt") == 1
        assert "/no" not in paths


def test_robots_txt_of_where_a_redirect_leads_is_obeyed() -> None:
    with WebServer({"/robots.txt": robots("User-agent: *\nDisallow: /")}) as closed:
        with WebServer({"/": redirect(f"{closed.url}/x")}) as server:
            assert fetch(server.url, robots=True).code is Code.DISALLOWED
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
        assert fetch(f"{server.url}/x", robots=True).data == IMAGE


def test_a_robots_txt_elsewhere_counts() -> None:
    rules = robots("User-agent: *\nDisallow: /x")
    with WebServer({"/robots.txt": redirect("/r"), "/r": rules, "/x": ok(IMAGE)}) as server:
        assert fetch(f"{server.url}/x", robots=True).code is Code.DISALLOWED


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
        fetched = fetch(f"{server.url}/x", robots=True)
        assert fetched.code is code
        assert fetched.detail.startswith("robots.txt: ")
        assert not server.paths()


@pytest.mark.usefixtures("no_pauses")
def test_a_robots_txt_that_comes_at_the_second_attempt_is_enough() -> None:
    answers = in_turn(status(503), robots(""))
    with WebServer({"/robots.txt": answers, "/x": ok(IMAGE)}) as server:
        assert fetch(f"{server.url}/x", robots=True, retries=1).data == IMAGE
