"""Downloads of pack: what becomes of each row, where URLs may lead, and who has opted out."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.kit.fetches import IMAGE, LONG_S, Answers, fetch, fetcher
from tests.kit.webserver import WebServer, ok
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.samples import Sample
from wdsprep.fetch.answer_rules import opt_out
from wdsprep.fetch.downloads import ASKED_AHEAD, HELD_NBYTES, Downloads, DownloadTurns
from wdsprep.fetch.options import Fetched


def numbered(urls: list[str]) -> Iterator[tuple[int, Sample | Reject]]:
    return enumerate(Sample(source=f"t#{n}", image=b"", url=url) for n, url in enumerate(urls))


def idle_until(
    found: Iterator[tuple[int, Sample | Reject] | None], claim: Callable[[], bool]
) -> None:
    """Nothing has come yet, and the caller can do something else."""
    while not claim():
        assert next(found) is None


def downloads_of(client: Answers, repeated: Any = Counter, pace: Any = None) -> Downloads:
    pace = pace or DownloadTurns(heard=ASKED_AHEAD)
    return Downloads(client, repeated, pace=pace, minds_outage=True)


class Body(bytes):
    """A body that is counted while it is in memory."""

    held_nbytes = 0

    def __init__(self, _data: bytes) -> None:
        Body.held_nbytes += len(self)

    def __del__(self) -> None:
        Body.held_nbytes -= len(self)


def test_a_slow_answer_holds_up_no_request_behind_it_and_keeps_its_place() -> None:
    client, urls = Answers(), [str(n) for n in range(500)]
    with downloads_of(client) as downloads:
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


def test_fewer_are_asked_for_where_images_are_large() -> None:
    client, urls = Answers(), [str(n) for n in range(2_000)]
    with downloads_of(client) as downloads:
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

    def rows() -> Iterator[tuple[int, Sample | Reject]]:
        read.set()
        yield from numbered(["a", "b"])

    def repeated() -> Counter[str]:
        going.wait()
        return Counter()

    with pace.turn, downloads_of(client, repeated, pace) as downloads:
        found = downloads.take(rows())
        assert next(found) is None
        going.set()
        idle_until(found, read.is_set)
        assert not client.asked


def test_a_repeated_url_is_asked_for_once_however_far_apart() -> None:
    client = Answers()
    urls = ["a", *(str(n) for n in range(50)), "a", "a"]
    answered = threading.Event()
    with downloads_of(client, partial(Counter, {"a": 3})) as downloads:
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


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("noai", "noai"),
        ("NoImageAI", "noimageai"),
        ("nofollow, noml", "noml"),
        ("unavailable_after: 25 Jun 2026 15:00:00 PST, noai", "noai"),
        ("wdsprep: noai", "noai"),
        ("*: noai", "noai"),
        ("otherbot: noindex, wdsprep: noai", "noai"),
        ("otherbot: noindex, noai", ""),
        ("nofollow, noarchive, nosnippet, all", ""),
        ("", ""),
    ],
)
def test_opt_outs_for_all_or_for_us_are_found(value: str, reason: str) -> None:
    found = opt_out({"x-robots-tag": ["nofollow", value]})
    assert found == (f"X-Robots-Tag: {reason}" if reason else "")
    assert opt_out({"tdm-reservation": ["1"]}) == "TDM-Reservation: 1"
    assert not opt_out({"tdm-reservation": ["0"]})


def test_objects_are_not_asked_for_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With whose credentials else would they be read?"""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with WebServer(ok(IMAGE)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.url)
        for url in ("s3://payroll/2026.jpg", " S3://payroll/2026.jpg"):
            fetched = fetch(url, allow_s3=False)
            assert (fetched.code, fetched.host) == (Code.PRIVATE_ADDRESS, "payroll")
            assert fetched.detail.endswith("with your credentials: --allow-s3 does that")
        assert endpoint.connections == 0
        assert fetch("s3://payroll/2026.jpg").data == IMAGE
        asked = endpoint.requests[-1]
        assert "mine" in f"{asked.path} {asked.headers}"


def test_objects_are_read_through_the_store(bucket: str) -> None:
    from tests.kit.s3 import s3_client

    with s3_client() as client:
        client.put_object(Bucket=bucket, Key="a b/ü.jpg", Body=IMAGE)
        client.put_object(Bucket=bucket, Key="empty", Body=b"")
    with fetcher(max_nbytes=len(IMAGE)) as one:
        urls = ["a b/ü.jpg", "empty", "none.jpg", "../x"]
        found = [one.submit(f"s3://{bucket}/{name}").result(LONG_S) for name in urls]
        none = one.submit("s3://no-such-bucket-at-all/x").result(LONG_S)
    assert found[0] == Fetched(data=IMAGE, host=bucket)
    assert [one.code for one in found[1:]] == [Code.EMPTY, Code.HTTP_4XX, Code.BAD_URL]
    assert none.code is Code.HTTP_4XX
    assert fetch(f"s3://{bucket}/a b/ü.jpg", max_nbytes=100).code is Code.TOO_MANY_BYTES
