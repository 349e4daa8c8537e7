"""The pause before a URL is asked for again."""

import datetime

import pytest

from wdsprep.fetch.backoff import pause_s, retry_after_s

NOW = datetime.datetime(2026, 11, 21, 8, 0, 0, tzinfo=datetime.timezone.utc)


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
