"""What headers say about whether and when to ask, as pure functions."""

import datetime

import pytest

from wdsprep.errors import UsageError
from wdsprep.fetch.manners import opt_out, pause_s, retry_after_s
from wdsprep.fetch.transfer import user_agent

NOW = datetime.datetime(2026, 11, 21, 8, 0, 0, tzinfo=datetime.timezone.utc)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("noai", "noai"),
        ("NoImageAI", "noimageai"),
        ("nofollow, noml", "noml"),
        ("noindex", "noindex"),
        ("noimageindex", "noimageindex"),
        ("none", "none"),
        ("max-snippet:10, noai", "noai"),
        ("unavailable_after: 25 Jun 2026 15:00:00 PST, noai", "noai"),
        ("wdsprep: noai", "noai"),
        ("*: noai", "noai"),
        ("otherbot: noindex, wdsprep: noai", "noai"),
        ("otherbot: noindex, noai", ""),
        ("otherbot: noai", ""),
        ("nofollow, noarchive, nosnippet, all", ""),
        ("", ""),
    ],
)
def test_opt_outs_for_all_or_for_us_are_found(value: str, reason: str) -> None:
    found = opt_out({"x-robots-tag": ["nofollow", value]})
    assert found == (f"X-Robots-Tag: {reason}" if reason else "")


def test_a_reservation_of_text_and_data_mining_is_one() -> None:
    assert opt_out({"tdm-reservation": ["1"]}) == "TDM-Reservation: 1"
    assert not opt_out({"tdm-reservation": ["0"]})
    assert not opt_out({})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", 0),
        ("120", 120),
        (" 7 ", 7),
        ("Sat, 21 Nov 2026 08:00:30 GMT", 30),
        ("Sat, 21 Nov 2026 07:00:00 GMT", 0),
        ("Sat, 21 Nov 2026 08:00:30 -0000", 30),
        ("9" * 40, 999_999_999),
        ("-5", 0),
        ("soon", 0),
        ("٣", 0),
        ("", 0),
        ("Sat, 99 Nov 2026 08:00:30 GMT", 0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str, expected: float) -> None:
    assert retry_after_s({"retry-after": [value]}, NOW) == expected


def test_without_retry_after_there_is_no_wish() -> None:
    assert retry_after_s({}, NOW) == 0


def test_pauses_are_spread_up_to_a_bound_that_doubles() -> None:
    for attempt, bound in enumerate((1, 2, 4, 8, 16, 30, 30)):
        pauses = [pause_s(attempt) for _ in range(500)]
        assert 0 <= min(pauses) < bound * 0.2
        assert bound * 0.8 < max(pauses) <= bound


def test_the_user_agent_names_us_and_whom_to_ask() -> None:
    assert user_agent("").startswith("wdsprep/")
    assert user_agent("mailto:me@a.example").endswith(" (+mailto:me@a.example)")


@pytest.mark.parametrize("contact", ["a\r\nX-Evil: b", "mé"])
def test_a_contact_that_no_header_can_hold_is_refused(contact: str) -> None:
    with pytest.raises(UsageError, match="not a contact"):
        user_agent(contact)
