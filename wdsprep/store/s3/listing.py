"""Long listings of S3, many pages at once.

A page has a thousand names and says where the next page begins: one after the other, at 100 ms a
page, a million names take 100 s. But a page can be asked for from any name on. Once a listing has
proven long, names further on are guessed from how those so far count up, and the stretches between
them are listed side by side. What is listed does not depend on the guesses: a bad one makes a
stretch empty, which costs a page, or long.

What a page says of each file is read in a tenth of the time that boto3 takes: boto3 builds each of
a thousand entries a page by the model of its API, and reads each time of day by guessing at its
format: a million names took two minutes of processor time. Here a page's entries are taken out
before boto3 sees them, and put in when it is done with the rest.

100,000 names take 1.7 s of the processor. obstore 0.12 takes 0.27 of that, by `tools/bench s3`, and
0.37 of the time; of a million names, from a server that only makes them up, 2.7 s where 14 s go
here, in 23 MB where these take 85. It is not taken for this alone, since reads are slower with it
(`reads`) and it finds credentials in other places than boto3. Look again when it reads into a
buffer.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from itertools import chain, islice, product, takewhile
from operator import attrgetter
from string import ascii_letters, digits, hexdigits
from typing import Any, NamedTuple
from xml.etree import ElementTree

from wdsprep.errors import StoreError
from wdsprep.store.base import Entry

ALONE = 8  # pages, before a listing counts as long
STRETCHES = 8  # at once
MOST = 16  # pages of a stretch that are held at once
STEPS = 2  # of what counts: where it takes more for the first pages, stretches are tens of them
ALPHABETS = (digits, hexdigits[:16], "".join(sorted(digits + ascii_letters)))


Page = tuple[list[Entry], str]
"""The entries of a page of a listing, and the token of the next page; empty after the last."""


class Stretch(NamedTuple):
    """A part of a listing: the names after `after`, and up to `until` or to the end."""

    after: str = ""
    until: str = ""
    token: str = ""


AskForPage = Callable[[Stretch], Page]
Listed = tuple[list[Entry], Stretch | None, str]
"""The entries of a stretch and the part of it that is not listed yet. If all is listed, the third
is the name after the stretch, or "" if there is none."""
Asked = tuple[Stretch, "Future[Listed]"]


def listing(ask: AskForPage, prefix: str) -> Iterator[Entry]:
    """Yield all entries whose names begin with `prefix`, in the order of their names.

    `ask` returns the page with which a stretch begins. It lists only such names, and may reach
    beyond the stretch's end.
    """
    left: Stretch | None = Stretch()
    while left is not None:
        ends: list[Entry] = []
        for entries, token in islice(_pages(ask, left), ALONE):
            yield from entries
            ends += entries[:1] + entries[-1:]
            left = Stretch(token=token) if token else None
        if left is not None and ends:
            marks = guesses(ends[0].name, ends[-1].name, floor=len(prefix))
            left = yield from _list_stretches(ask, left, marks)


def _pages(ask: AskForPage, stretch: Stretch) -> Iterator[Page]:
    while True:
        entries, token = ask(stretch)
        yield entries, token
        if not token:
            return
        stretch = stretch._replace(token=token)


def _list_stretches(
    ask: AskForPage, left: Stretch, marks: Iterator[str]
) -> Generator[Entry, None, Stretch | None]:
    """List the stretches between marks, many at a time, and yield their entries in order.

    Return what is then left to be listed: the stretch after the last mark, or after a gap so wide
    that the marks do not help; None if all is listed.
    """
    pool, lanes = ThreadPoolExecutor(STRETCHES), deque[Asked]()
    try:
        while True:
            for mark in islice(marks, STRETCHES - len(lanes)):
                stretch = left._replace(until=mark)
                lanes.append((stretch, pool.submit(_list, ask, stretch)))
                left = Stretch(after=mark)
            if not lanes:
                return left
            entries, rest, beyond = lanes.popleft()[1].result()
            yield from entries
            if rest is not None:
                lanes.appendleft((rest, pool.submit(_list, ask, rest)))
            elif not beyond:
                return None
            else:
                while lanes and lanes[0][0].until < beyond:  # it is empty
                    lanes.popleft()[1].cancel()
                if not lanes:
                    return left  # behind so wide a gap, guess anew
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _list(ask: AskForPage, stretch: Stretch) -> Listed:
    listed: list[Entry] = []
    for entries, token in islice(_pages(ask, stretch), MOST):
        end = bisect_right(entries, stretch.until, key=attrgetter("name"))
        listed += entries[:end]
        if end < len(entries):
            return listed, None, entries[end].name
        if not token:
            return listed, None, ""
    return listed, stretch._replace(token=token), ""


def guesses(first: str, last: str, *, floor: int) -> Iterator[str]:
    """Yield names at which to cut what a listing has after `last`, in order.

    They are guessed from how `first` and `last` differ: by letters and digits, which are counted
    up as in a number. The first `floor` characters stay.
    """
    at = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    runs = (takewhile(str.isalnum, name[at:]) for name in (first, last))
    known = set(chain(*runs))  # what counts up, or spells on
    letters = next((alphabet for alphabet in ALPHABETS if known.issubset(alphabet)), "")
    if first == last or last[at] not in letters:
        return
    steps = letters.index(last[at]) - letters.find(first[at : at + 1])
    if steps > STEPS and at > floor and last[at - 1] in letters:
        at -= 1
    for place in range(at, floor - 1, -1):
        if last[place] not in letters:
            return
        for letter in letters[letters.index(last[place]) + 1 :]:
            for more in product(letters, repeat=at - place):
                yield last[:place] + letter + "".join(more)


def quicken_listings(client: Any) -> None:
    """Let a client of boto3 parse listings faster."""
    # By this name it comes before botocore's own, which looks through the answer for an error.
    client.meta.events.register_first("before-parse.*.ListObjectsV2", _take_entries)


def _take_entries(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object
) -> None:
    """Parse the entries of a listing page, and take them out of what botocore parses.

    This handles botocore's event `before-parse`. An answer that cannot be parsed is left to
    botocore.
    """
    if response_dict["status_code"] != 200:
        return
    try:
        root = ElementTree.fromstring(response_dict["body"])  # noqa: S314  as boto3 reads it
        entries = [_entry(node) for node in root if _is_entry(node)]
    except (ElementTree.ParseError, KeyError, ValueError):  # boto3 knows more, or says why
        return
    root[:] = [node for node in root if not _is_entry(node)]
    response_dict["body"] = ElementTree.tostring(root)
    customized_response_dict["Contents"] = entries


def _entry(node: ElementTree.Element) -> dict[str, Any]:
    said = {part.tag.rpartition("}")[2]: part.text or "" for part in node}
    return {
        "Key": said["Key"],
        "ETag": said["ETag"],
        "Size": int(said["Size"]),
        "LastModified": datetime.fromisoformat(said["LastModified"].replace("Z", "+00:00")),
    }


def _is_entry(node: ElementTree.Element) -> bool:
    return node.tag.rpartition("}")[2] == "Contents"  # a namespace comes first, or not


def page_of(answer: Mapping[str, Any], start: int, stretch: Stretch, what: str) -> Page:
    """Return the page of a listing in an answer of boto3.

    Names are the keys without their first `start` characters, the store's prefix. Raise
    StoreError, which names the store `what`, if the server ignores where `stretch` begins.
    """
    entries = []
    for item in answer.get("Contents", ()):
        name = item["Key"][start:]
        if name and not name.endswith("/"):  # a console's idea of a folder
            stamp, at = item["ETag"].strip('"'), item["LastModified"].timestamp()
            entries.append(Entry(name=name, nbytes=item["Size"], stamp=stamp, written_s=at))
    if entries and entries[0].name <= stretch.after:
        raise StoreError(f"{what}: the server ignores start-after, so wdsprep cannot list it")
    token = answer["NextContinuationToken"] if answer["IsTruncated"] else ""
    return entries, token
