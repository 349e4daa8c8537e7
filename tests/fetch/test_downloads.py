"""Downloads in order: answers come as they may, and are given on in the order of their rows."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.kit.fetches import Answers
from wdsprep.dataset.rejects import Refusal
from wdsprep.dataset.samples import Sample
from wdsprep.errors import SourceError
from wdsprep.fetch.downloads import ASKED_AHEAD, FIRST_ASKED, HELD_NBYTES, Downloads, DownloadTurns


def numbered(urls: list[str]) -> Iterator[tuple[int, Sample | Refusal]]:
    return enumerate(Sample(source=f"t#{n}", image=b"", url=url) for n, url in enumerate(urls))


def idle_until(
    found: Iterator[tuple[int, Sample | Refusal] | None], claim: Callable[[], bool]
) -> None:
    """Nothing has come yet, and the caller can do something else."""
    while not claim():
        assert next(found) is None


class Body(bytes):
    """A body that is counted while it is in memory."""

    held_nbytes = 0

    def __init__(self, _data: bytes) -> None:
        Body.held_nbytes += len(self)

    def __del__(self) -> None:
        Body.held_nbytes -= len(self)


def test_a_slow_answer_holds_up_no_request_behind_it_and_keeps_its_place() -> None:
    client, urls = Answers(), [str(n) for n in range(500)]
    with Downloads(
        client, Counter, pace=DownloadTurns(heard=ASKED_AHEAD), minds_outage=True
    ) as downloads:
        found = downloads.take(numbered(urls))
        idle_until(found, lambda: len(client.asked) == 500)
        for url in urls[:0:-1]:
            client.answer(url, Body(url.encode() * 100_000))  # far more than may stay in memory
            del client.asked[url]
        assert next(found) is None
        assert 0 < Body.held_nbytes <= HELD_NBYTES
        client.answer("0", b"0")
        rows = [row for one in found if one is not None for row in [one[1]]]
    assert [row.image[:3] for row in rows if isinstance(row, Sample)] == [
        (url.encode() * 3)[:3] if url != "0" else b"0" for url in urls
    ]


def test_a_few_are_asked_for_first_and_more_as_answers_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wdsprep.fetch.downloads.MORE_A_SECOND", 0)
    client, urls = Answers(), [str(n) for n in range(500)]
    with Downloads(client, Counter, pace=DownloadTurns(), minds_outage=True) as downloads:
        found = downloads.take(numbered(urls))
        idle_until(found, lambda: len(client.asked) == FIRST_ASKED)
        for url in urls[1:FIRST_ASKED]:
            client.answer(url)
        idle_until(found, lambda: len(client.asked) == 4 * FIRST_ASKED - 3)


def test_fewer_are_asked_for_where_images_are_large() -> None:
    client, urls = Answers(), [str(n) for n in range(2_000)]
    with Downloads(
        client, Counter, pace=DownloadTurns(heard=ASKED_AHEAD), minds_outage=True
    ) as downloads:
        found = downloads.take(numbered(urls))
        idle_until(found, lambda: len(client.asked) == ASKED_AHEAD)
        asked = list(client.asked)
        for url in asked[1:25]:
            client.answer(url, bytes(400_000))
        assert next(found) is None
        assert list(client.asked) == asked  # so many of that size are enough
        for url in asked[25:700]:
            client.answer(url)
        assert next(found) is None
        assert len(client.asked) > len(asked)


def test_what_takes_long_before_the_first_row_is_done_before_the_turn_and_not_in_silence() -> None:
    """A large table is read through to a slice while the one before is still asking."""
    client, pace, going, read = Answers(), DownloadTurns(), threading.Event(), threading.Event()

    def rows() -> Iterator[tuple[int, Sample | Refusal]]:
        read.set()
        yield from numbered(["a", "b"])

    def repeated() -> Counter[str]:
        going.wait()
        return Counter()

    with pace.turn, Downloads(client, repeated, pace=pace, minds_outage=True) as downloads:
        found = downloads.take(rows())
        assert next(found) is None
        going.set()
        idle_until(found, read.is_set)
        assert not client.asked


def test_what_fails_before_the_first_row_is_raised() -> None:
    def repeated() -> Counter[str]:
        raise SourceError("gone")

    downloads = Downloads(
        Answers(), repeated, pace=DownloadTurns(heard=ASKED_AHEAD), minds_outage=True
    )
    with downloads, pytest.raises(SourceError, match="gone"):
        list(downloads.take(numbered(["a"])))


def test_a_repeated_url_is_asked_for_once_however_far_apart() -> None:
    client = Answers()
    urls = ["a", *(str(n) for n in range(50)), "a", "a"]
    answered = threading.Event()
    with Downloads(
        client, partial(Counter, {"a": 3}), pace=DownloadTurns(heard=ASKED_AHEAD), minds_outage=True
    ) as downloads:
        rows = []
        for found in downloads.take(numbered(urls)):
            if found is None and len(client.asked) == 51 and not answered.is_set():
                answered.set()
                for url in client.asked:
                    client.answer(url, url.encode())
            elif found is not None:
                rows.append(found[1])
    assert [row.image.decode() for row in rows if isinstance(row, Sample)] == urls
    assert {len(futures) for futures in client.asked.values()} == {1}
