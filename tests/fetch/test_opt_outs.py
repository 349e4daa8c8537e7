"""Headers by which an owner reserves an image."""

import pytest

from wdsprep.fetch.opt_outs import opt_out


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
