"""What a robots.txt allows, by the rules and examples of RFC 9309."""

import random
import re
import threading
import time
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise

import pytest

from tests.kit.fetches import IMAGE
from tests.kit.webserver import WebServer, ok
from wdsprep.dataset.reject_codes import Code
from wdsprep.fetch.client import Fetcher
from wdsprep.fetch.options import FetchRules
from wdsprep.fetch.robots import read_robots


def allowed(text: str, path: str) -> bool:
    return read_robots(text.encode()).allows(path)


@pytest.mark.parametrize(
    ("rules", "path", "expected"),
    [
        ("", "/a", True),
        ("Disallow:", "/a", True),
        ("Disallow: /", "/a", False),
        ("disallow : /a # comment", "/a/b", False),
        ("Disallow: /a", "/A", True),
        ("Disallow: /a\nAllow: /a/b", "/a/b/c", True),
        ("Allow: /a/b\nDisallow: /a", "/a/c", False),
        ("Disallow: /a\nAllow: /a", "/a", True),
        ("Allow: /a\nDisallow: /a", "/a", True),
        ("Disallow: /*.gif", "/x/y.gif?z", False),
        ("Disallow: /*.gif$", "/x/y.gif?z", True),
        ("Disallow: /*.gif$", "/x/y.gif.gif", False),
        ("Disallow: /a$", "/a", False),
        ("Disallow: /a$", "/ab", True),
        ("Disallow: *", "/a", False),
        ("Disallow: /a*b*c$", "/axbxc", False),
        ("Disallow: /a*bc*bc$", "/abc", True),
        ("Disallow: /a*$", "/abc", False),
        ("Disallow: /$", "/", False),
        ("Disallow: /$", "/x", True),
        ("Disallow: /foo/bar/\u30c4", "/foo/bar/%E3%83%84", False),
        ("Disallow: /foo/bar/%E3%83%84", "/foo/bar/%e3%83%84", False),
        ("Disallow: /%62%61z", "/baz", False),
        ("Disallow: /a%3Cd", "/a%3cd", False),
        ("Disallow: /a?q=1", "/a?q=12", False),
        ("Crawl-delay: 1000\nSitemap: x\nnonsense\nDisallow: /b", "/a", True),
    ],
)
def test_the_longest_rule_that_matches_decides(rules: str, path: str, expected: bool) -> None:
    assert allowed(f"User-agent: *\n{rules}\n", path) is expected


BY_NAME = """\ufeff
User-agent: otherbot
Disallow: /

User-agent: foo
User-agent: WDSprep/2.0 (like others)
Disallow: /ours

User-agent: *
Disallow: /anyone

user-agent: wdsprep
disallow: /more
"""


@pytest.mark.parametrize(
    ("path", "expected"), [("/ours", False), ("/more", False), ("/anyone", True), ("/x", True)]
)
def test_the_groups_that_name_us_count_together_and_alone(path: str, expected: bool) -> None:
    assert allowed(BY_NAME, path) is expected
    assert allowed(BY_NAME.replace("\n", "\r\n"), path) is expected


def test_a_name_that_only_begins_like_ours_is_another() -> None:
    assert allowed("User-agent: wdsprepper\nDisallow: /\n", "/a")


def test_an_empty_group_of_our_name_lifts_what_holds_for_all() -> None:
    assert allowed("User-agent: wdsprep\nDisallow:\n\nUser-agent: *\nDisallow: /", "/a")


def test_rules_before_any_name_bind_nobody() -> None:
    assert allowed("Disallow: /\nUser-agent: x\n", "/a")


@pytest.mark.parametrize("junk", [b"\xff\xfe\x00" * 99, b"<html>" * 999, b"\0" * 600_000])
def test_junk_forbids_nothing(junk: bytes) -> None:
    assert read_robots(junk).allows("/a")


def test_what_follows_the_first_half_megabyte_is_not_read() -> None:
    late = b"User-agent: *\nDisallow: /a\n" + b"#" * 600_000 + b"\nDisallow: /b\n"
    assert not read_robots(late).allows("/a")
    assert read_robots(late).allows("/b")


def test_rules_decide_as_a_matcher_that_tries_each_of_them() -> None:
    chance = random.Random(7)

    def text(letters: str, most: int) -> str:
        return "/" + "".join(chance.choices(letters, k=chance.randrange(most)))

    for _ in range(400):
        rules = [
            (chance.random() < 0.5, text("ab*", 6) + chance.choice(["", "", "$"]))
            for _ in range(chance.randrange(12))
        ]
        lines = "".join(f"{'Allow' if allow else 'Disallow'}: {path}\n" for allow, path in rules)
        robots = read_robots(f"User-agent: *\n{lines}".encode())
        for path in (text("ab", 7) for _ in range(20)):
            matching = [(len(rule), allow) for allow, rule in rules if naive(rule).match(path)]
            assert robots.allows(path) is max(matching, default=(0, True))[1], (lines, path)


def naive(rule: str) -> "re.Pattern[str]":
    end = r"\Z" if rule.endswith("$") else ""
    return re.compile(".*".join(map(re.escape, rule.removesuffix("$").split("*"))) + end)


LONG = "/" + "ab" * 8_000
HOSTILE: dict[str, Callable[[int], str]] = {
    "plain": lambda n: f"Disallow: /{n:x}",
    "lengths": lambda n: f"Disallow: /{'a' * n}{n}",
    "wildcards": lambda n: f"Disallow: /*ab{n:x}",
    "repeated": lambda n: f"Disallow: /*{'ab' * 9}{n:x}",
    "stars": lambda n: f"Disallow: /{'*a' * 20}{n:x}",
    "escapes": lambda n: f"Disallow: /{'%41' * 300}{n:x}",
    "junk": lambda n: f"Disallow: /{'é' * 300}{n:x}",
}


def hostile(name: str) -> bytes:
    """A file of 490 kB."""
    lines, nbytes = ["User-agent: *"], 0
    while nbytes < 490_000:
        lines.append(HOSTILE[name](len(lines)))
        nbytes += len(lines[-1].encode()) + 1
    return "\n".join(lines).encode()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_holds_up_no_other_host(name: str) -> None:
    """Between two answers of another, the client's thread is at work for a moment alone."""
    spent: list[float] = []
    is_over = threading.Event()

    routes = {"/robots.txt": ok(hostile(name), Content_Type="text/plain")}
    rules = FetchRules(allow_private=True, retries=0, timeout_s=60)
    with (
        WebServer(routes) as server,
        WebServer({"/ok": ok(IMAGE)}, address="127.0.0.2") as other,
        closing(Fetcher(rules)) as fetcher,
    ):

        def ask_again(_answer: object) -> None:
            """Note the processor time of the client's thread, which calls this."""
            spent.append(time.thread_time())
            if not is_over.is_set():
                fetcher.submit(f"{other.url}/ok").add_done_callback(ask_again)

        fetcher.submit(f"{other.url}/ok").add_done_callback(ask_again)
        asked = [fetcher.submit(f"{server.url}{LONG}{n}") for n in range(8)]
        codes = {one.result(60).code for one in asked}
        until = time.monotonic() + 60
        while len(spent) <= 2 and time.monotonic() < until:
            time.sleep(0.01)
        is_over.set()
    assert codes <= {Code.DISALLOWED, Code.HTTP_4XX}
    assert len(spent) > 2
    assert max(later - sooner for sooner, later in pairwise(spent)) < 0.5


def test_a_path_that_nobody_could_check_in_time_is_not_fetched() -> None:
    robots = read_robots(hostile("wildcards"))
    assert robots.is_too_much_for("/a")
    lines = "".join(f"Disallow: /*/{n}/*.gif$\n" for n in range(1_000))
    robots = read_robots(f"User-agent: *\n{lines}".encode())
    assert not robots.is_too_much_for("/" + "a" * 700)
    assert not robots.allows("/x/999/y.gif")
    assert robots.allows("/x/1000/y.gif")


def test_a_hostile_pattern_takes_no_longer_than_its_length() -> None:
    robots = read_robots(b"User-agent: *\nDisallow: /" + b"*a" * 5_000 + b"*b$\n")
    started = time.process_time()
    assert robots.allows("/" + "a" * 10_000)
    assert time.process_time() - started < 5  # a backtracking matcher would take ages
