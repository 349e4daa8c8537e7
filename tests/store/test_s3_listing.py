"""Long listings: whatever the names, the same as one page after the other, and many at once."""

import threading
from bisect import bisect_right
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wdsprep.store.base import Entry
from wdsprep.store.s3.listing import ALONE, STRETCHES, Page, Stretch, guesses, listing

DIGESTS = [f"{n * 2654435761 % 2**32:08x}" for n in range(1_500)]
KINDS = {
    "counted": [f"receipts/256/{n:06d}.json" for n in range(1_500)],
    "two buckets": [f"receipts/{b}/{n:06d}.json" for b in (256, 512) for n in range(900)],
    "unpadded": [f"img_{n}.jpg" for n in range(1_500)],
    "digests": [f"data/{name}.jpg" for name in DIGESTS],
    "words": [f"{chr(97 + n % 26)}{chr(65 + n % 23)}{n}" for n in range(1_500)],
    "gaps": [f"x/{n:09d}" for n in [*range(300), *range(7 * 10**8, 7 * 10**8 + 900)]],
    "not ASCII": [f"Bild {chr(0xE4 + n % 40)}{n:05d}.jpg" for n in range(700)],
    "one long name": [*("a" * n for n in range(1, 600)), "b"],
}


class Server:
    """Pages of ten names; counts them."""

    def __init__(self, names: Sequence[str], size: int = 10) -> None:
        self.names, self.size = sorted(names, key=str.encode), size
        self.pages = 0

    def ask(self, stretch: Stretch) -> Page:
        self.pages += 1
        after = stretch.token or stretch.after
        start = bisect_right(self.names, after)
        page = self.names[start : start + self.size]
        entries = [Entry(name=name, nbytes=0, stamp="") for name in page]
        return Page(entries=entries, token=page[-1] if page != self.names[start:] else "")


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_is_listed_once_in_order_for_few_pages_more(kind: str) -> None:
    server = Server(KINDS[kind])
    assert [entry.name for entry in listing(server.ask, "")] == server.names
    needed = len(server.names) / server.size
    assert server.pages <= 1.7 * needed + 2 * STRETCHES


@settings(max_examples=100, deadline=None)
@given(
    st.sets(st.text("019afzAZ/._-é~ ", min_size=1, max_size=5), max_size=200),
    st.integers(1, 7),
    st.sampled_from(["", "0", "a/"]),
)
def test_whatever_the_names(names: set[str], size: int, prefix: str) -> None:
    server = Server([prefix + name for name in names], size)
    with patch("wdsprep.store.s3.listing.MOST", 2), patch("wdsprep.store.s3.listing.ALONE", 3):
        assert [entry.name for entry in listing(server.ask, prefix)] == server.names


def test_pages_of_a_long_listing_are_asked_for_side_by_side() -> None:
    """After the first pages, the server answers only when all places are taken."""

    class Patient(Server):
        def __init__(self) -> None:
            super().__init__(KINDS["counted"])
            self.barrier = threading.Barrier(STRETCHES)

        def ask(self, stretch: Stretch) -> Page:
            if stretch.after and not stretch.token and stretch.until < "receipts/256/0010":
                self.barrier.wait(timeout=60)
            return super().ask(stretch)

    server = Patient()
    assert [entry.name for entry in listing(server.ask, "receipts/")] == server.names


def test_a_short_listing_and_one_that_is_left_cost_the_pages_that_were_read() -> None:
    server = Server(KINDS["counted"][: 10 * ALONE])
    assert len(list(listing(server.ask, ""))) == 10 * ALONE
    assert server.pages == ALONE
    server = Server(KINDS["counted"])
    found = listing(server.ask, "")
    next(found)
    found.close()
    assert server.pages == 1


def test_an_error_in_a_later_stretch_reaches_the_reader_in_its_place() -> None:
    class Broken(Server):
        def ask(self, stretch: Stretch) -> Page:
            if stretch.after.startswith("receipts/256/001"):
                raise OSError("gone")
            return super().ask(stretch)

    found = []
    with pytest.raises(OSError, match="gone"):
        found.extend(entry.name for entry in listing(Broken(KINDS["counted"]).ask, "receipts/"))
    found_before = [name for name in KINDS["counted"] if name < "receipts/256/001"]
    assert found[: len(found_before)] == found_before[: len(found)]


def test_guesses_count_on_and_leave_the_prefix_alone() -> None:
    marks = list(guesses("r/256/000000.json", "r/256/007999.json", floor=2))
    assert marks[:3] == ["r/256/01", "r/256/02", "r/256/03"]
    assert marks[-1] == "r/256/99"
    assert list(guesses("r/8", "r/9", floor=2)) == []
    assert next(guesses("a b", "a c", floor=0)) == "a d"
    assert list(guesses("x", "x", floor=0)) == []
