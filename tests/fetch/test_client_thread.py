"""Many requests at the same time, each host at its own pace, and the end of them all."""

import os
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import CancelledError, Future, wait
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

import pytest

from tests.kit.fetches import IMAGE, LONG_S, SHORT_S, fetcher
from tests.kit.webserver import (
    Connection,
    Request,
    WebServer,
    black_hole,
    in_turn,
    ok,
    response,
    stall,
)
from wdsprep.dataset.reject_codes import Code
from wdsprep.errors import UsageError
from wdsprep.fetch.client_thread import Fetcher
from wdsprep.fetch.options import Fetched, FetchRules

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
        one = stack.enter_context(fetcher(in_flight=4, per_host=3))
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
        one = stack.enter_context(fetcher(in_flight=5, per_host=2))
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
    monkeypatch.setattr("wdsprep.fetch.memory_limit.ROOM_NBYTES", 2_000_000)
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
        one = stack.enter_context(fetcher(in_flight=1))
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
    with black_hole() as url, fetcher(timeout_s=SHORT_S, per_host=8) as one:
        futures = [one.submit(f"{url}/{n}") for n in range(500)]
        found = [future.result(LONG_S) for future in futures]
    assert {fetched.code for fetched in found} == {Code.TIMEOUT}
    assert sum("as others there" in fetched.detail for fetched in found) > 400


def test_thousands_may_wait(answering: WebServer, patient: Fetcher) -> None:
    futures = [patient.submit(f"{answering.url}/good?{n}") for n in range(2_000)]
    assert all(future.result(LONG_S).code is Code.HTTP_4XX for future in futures)


# --------------------------------------------------------------------------------------- at the end


def fetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "wdsprep-fetch" in thread.name]


def test_closing_cancels_what_is_not_done_and_leaves_no_thread() -> None:
    before = len(fetch_threads())
    gate = Gate()
    with WebServer(gate) as server:
        one = Fetcher(FetchRules(allow_private=True, robots=False, timeout_s=LONG_S))
        futures = [one.submit(f"{server.url}/{n}") for n in range(50)]
        gate.wait_for(8)
        one.close()
        one.close()
        gate.opened.set()
        assert all(future.cancelled() for future in futures)
    assert len(fetch_threads()) == before
    with pytest.raises(RuntimeError, match="closed"):
        one.submit(server.url)


def test_a_cancelled_future_gives_its_place_to_another() -> None:
    with WebServer({"/": stall, "/x": ok(IMAGE)}) as server, fetcher(in_flight=1) as one:
        stuck, waits = one.submit(server.url), one.submit(f"{server.url}/x")
        stuck.cancel()
        assert waits.result(LONG_S).data == IMAGE
        with pytest.raises(CancelledError):
            stuck.result()


def test_any_thread_may_submit(answering: WebServer, patient: Fetcher) -> None:
    found: list[Fetched] = []

    def work() -> None:
        found.extend(patient.submit(f"{answering.url}/good").result(LONG_S) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [fetched.data for fetched in found] == [IMAGE] * 160


FORGETFUL = """
import sys
from wdsprep.fetch import Fetcher, FetchRules
fetcher = Fetcher(FetchRules(allow_private=True, robots=False))
fetcher.submit(sys.argv[1])
fetcher.submit(sys.argv[2]).result()
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "status"), [("", 0), ("raise KeyboardInterrupt", -2), ("import os; os._exit(3)", 3)]
)
def test_a_program_that_forgets_to_close_ends_all_the_same(ending: str, status: int) -> None:
    with WebServer({"/": stall, "/x": ok(IMAGE)}) as server:
        command = [sys.executable, "-c", FORGETFUL.format(ending=ending)]
        command += [server.url, f"{server.url}/x"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == status, done.stderr
    assert "KeyboardInterrupt" in done.stderr if ending.startswith("raise") else not done.stderr


def test_open_files_are_few_when_it_ends() -> None:
    with WebServer({"/": ok(IMAGE)}) as server:
        with fetcher() as one:
            one.submit(server.url).result(LONG_S)
        before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        for _ in range(5):
            with fetcher() as one:
                wait([one.submit(server.url) for _ in range(20)])
        after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after <= before + 40  # the server's own ends of connections, at the most


def test_wrong_settings_are_told_at_once() -> None:
    with pytest.raises(UsageError, match="is not a contact"):
        Fetcher(FetchRules(contact="two\nlines"))


def test_more_requests_than_files_are_an_error_with_a_way_out() -> None:
    with pytest.raises(UsageError, match="ulimit -n"):
        Fetcher(FetchRules(in_flight=10**9))
