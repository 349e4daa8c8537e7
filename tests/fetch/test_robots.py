"""Which hosts let us in: what robots.txt says, and where URLs may lead."""

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
from wdsprep.dataset.rejects import RejectedError
from wdsprep.fetch.client import Fetcher
from wdsprep.fetch.options import FetchRules
from wdsprep.fetch.robots import read_robots
from wdsprep.fetch.urls import follow, is_public, parse


def allowed(text: str, path: str) -> bool:
    return read_robots(text.encode()).allows(path)


@pytest.mark.parametrize(
    ("rules", "path", "expected"),
    [
        ("", "/a", True),
        ("Disallow: /", "/a", False),
        ("disallow : /a # comment", "/a/b", False),
        ("Disallow: /a", "/A", True),
        ("Disallow: /a\nAllow: /a/b", "/a/b/c", True),
        ("Allow: /a\nDisallow: /a", "/a", True),
        ("Disallow: /*.gif", "/x/y.gif?z", False),
        ("Disallow: /*.gif$", "/x/y.gif?z", True),
        ("Disallow: /a$", "/a", False),
        ("Disallow: /a$", "/ab", True),
        ("Disallow: *", "/a", False),
        ("Disallow: /a*bc*bc$", "/abc", True),
        ("Disallow: /$", "/x", True),
        ("Disallow: /foo/bar/\u30c4", "/foo/bar/%E3%83%84", False),
        ("Disallow: /foo/bar/%E3%83%84", "/foo/bar/%e3%83%84", False),
        ("Disallow: /%62%61z", "/baz", False),
        ("Disallow: /a%3Cd", "/a%3cd", False),
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
    ("text", "allowed_paths", "forbidden_paths"),
    [
        (BY_NAME, "/anyone /x", "/ours /more"),
        (BY_NAME.replace("\n", "\r\n"), "/anyone /x", "/ours /more"),
        ("User-agent: wdsprepper\nDisallow: /\n", "/a", ""),  # only begins like ours
        ("User-agent: wdsprep\nDisallow:\n\nUser-agent: *\nDisallow: /", "/a", ""),
        ("Disallow: /\nUser-agent: x\n", "/a", ""),  # binds nobody
        ("User-agent: *\nDisallow: /a\n" + "#" * 600_000 + "\nDisallow: /b\n", "/b", "/a"),
        *(("\xff\xfe\x00" * 99, "/a", ""), ("<html>" * 999, "/a", ""), ("\0" * 600_000, "/a", "")),
    ],
)
def test_the_groups_that_name_us_count_together_and_alone(
    text: str, allowed_paths: str, forbidden_paths: str
) -> None:
    """Junk forbids nothing, and what follows the first half megabyte is not read."""
    for path in allowed_paths.split():
        assert allowed(text, path)
    for path in forbidden_paths.split():
        assert not allowed(text, path)


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
    rules = FetchRules(allow_private_hosts=True, retries=0, timeout=60)
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


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("http://a.example/x.jpg", "http://a.example/x.jpg"),
        ("  HTTP://A.Example:80/x.jpg#part \n", "http://a.example/x.jpg"),
        ("https://a.example:443", "https://a.example/"),
        ("http://a.example?q", "http://a.example/?q"),
        ("http://a.example/big cat.jpg?a b", "http://a.example/big%20cat.jpg?a%20b"),
        ("http://a.example/ü/100%.jpg", "http://a.example/%C3%BC/100%25.jpg"),
        ("http://a.example/%C3%bc?x=%20+y", "http://a.example/%C3%bc?x=%20+y"),
        ("http://a.example/a\tb\nc.jpg", "http://a.example/abc.jpg"),
        ("http:\\\\a.example\\x.jpg", "http://a.example/x.jpg"),
        ("http://a.example\\@b.example/x", "http://a.example/@b.example/x"),
        ("http://bücher.example/x", "http://xn--bcher-kva.example/x"),
        ("http://straße.example./x", "http://xn--strae-oqa.example/x"),
        ("http://\uff11\uff12\uff17.0.0.1/x", "http://127.0.0.1/x"),
        ("http://%31%32%37.0.0.1/x", "http://127.0.0.1/x"),
        ("http://a.example/a/./b/../../c/%2E%2e/x/", "http://a.example/x/"),
        ("http://a.example/../..", "http://a.example/"),
        ("http://a.example/a/b/..", "http://a.example/a/"),
        ("http://a.example//a//b/...?/../x", "http://a.example//a//b/...?/../x"),
        ("http://my_bucket.example/x", "http://my_bucket.example/x"),
        ("http://[2001:DB8::0:1]:81/x", "http://[2001:db8::1]:81/x"),
        ("http://a.example/\udcff", "http://a.example/%3F"),
    ],
)
def test_a_url_is_read_as_browsers_read_it(written: str, meant: str) -> None:
    assert parse(written).url == meant
    assert parse(meant).url == meant


@pytest.mark.parametrize(
    ("written", "detail"),
    [
        ("", "no URL"),
        ("a.example/x.jpg", "no URL"),
        ("file:///etc/hostname", "file: is not http, https, s3, gs, az or hf"),
        ("data:image/png;base64,AAAA", "data: is not http, https, s3, gs, az or hf"),
        ("http:a.example", "no // after http:"),
        ("http://", "no host"),
        ("http://:80/", "no host"),
        ("http://user:secret@a.example/", "a user name or password in it"),
        ("http://a.example:99999/", "not a port"),
        ("http://[::1/", "not a port"),
        ("http://[::g]/", "not an IPv6 address"),
        ("http://[fe80::1%25eth0]/", "not an IPv6 address"),
        ("http://a b.example/", "not a host"),
        ("http://" + "a" * 64 + ".example/", "not a host"),
        ("http://%00.example/", "not a host"),
        ("http://☃" + "☃" * 70 + "/", "not a host"),
        ("http://a.example/" + "x" * 20_000, "20017 characters long"),
    ],
)
def test_what_is_no_url_for_us_is_refused_with_the_reason(written: str, detail: str) -> None:
    with pytest.raises(RejectedError) as refused:
        parse(written)
    assert (refused.value.code, refused.value.detail) == (Code.BAD_URL, detail)


@pytest.mark.parametrize(
    ("location", "meant"),
    [
        ("/y", "https://a.example/y"),
        ("y?z", "https://a.example/x/y?z"),
        ("//b.example/y", "https://b.example/y"),
        ("http://b.example:81/y#z", "http://b.example:81/y"),
        (" ../y z ", "https://a.example/y%20z"),
    ],
)
def test_a_redirect_is_read_beside_the_url_it_comes_from(location: str, meant: str) -> None:
    assert follow(parse("https://a.example/x/1.jpg"), location).url == meant


@pytest.mark.parametrize("location", ["file:///etc/passwd", "gopher://b/", "http://[", "s3://b/c"])
def test_a_redirect_to_anything_else_is_refused(location: str) -> None:
    with pytest.raises(RejectedError, match="redirect: ") as refused:
        follow(parse("https://a.example/x/1.jpg"), location)
    assert refused.value.code is Code.BAD_URL


PUBLIC = "8.8.8.8 1.1.1.1 172.15.0.1 172.32.0.1 100.63.255.255 193.0.0.1 2606:4700::1111 "
PUBLIC += "2a00:1450::1 64:ff9b::808:808 ::ffff:8.8.8.8 2002:808:808::1"
OTHERS = "127.0.0.1 127.8.9.1 0.0.0.0 0.1.2.3 10.0.0.3 172.16.0.1 172.31.9.9 192.168.1.1 "
OTHERS += "169.254.169.254 100.64.0.1 192.0.2.1 198.18.0.1 203.0.113.9 224.0.0.1 239.255.255.250 "
OTHERS += "240.0.0.1 255.255.255.255 :: ::1 fe80::1 fe80::1%eth0 fec0::1 fc00::1 fd00::2 ff02::1 "
OTHERS += "::ffff:127.0.0.1 ::ffff:10.0.0.3 ::127.0.0.1 2002:7f00:1:: 2002:a00:3::1 "
OTHERS += "64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1 100::1 2001:db8::1 2001::1 3fff::1 "
OTHERS += "4000::1 5f00::1"


def test_addresses_of_the_public_internet_and_no_others_are_public() -> None:
    assert [address for address in PUBLIC.split() if not is_public(address)] == []
    assert [address for address in OTHERS.split() if is_public(address)] == []
