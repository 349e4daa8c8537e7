"""What a robots.txt allows, by the rules and examples of RFC 9309."""

import time

import pytest

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


def test_a_hostile_pattern_takes_no_longer_than_its_length() -> None:
    robots = read_robots(b"User-agent: *\nDisallow: /" + b"*a" * 5_000 + b"*b$\n")
    started = time.process_time()
    assert robots.allows("/" + "a" * 10_000)
    assert time.process_time() - started < 5  # a backtracking matcher would take ages
