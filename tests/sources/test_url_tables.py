"""Tables of URLs: their rows are read alike from every kind of table, fetched once, and packed."""

import contextlib
import csv
import gzip
import hashlib
import io
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit.packs import (
    BUCKETS,
    by_source,
    command,
    jpeg,
    manifest_of,
    outcome,
    pack,
    rejects_of,
    rows_of,
    run_pack,
    samples_of,
    source_of,
    temporaries,
    upload,
    write_files,
)
from tests.kit.sites import (
    FAST,
    KINDS,
    MENDED,
    Site,
    kill_when_asked,
    open_site,
    table_of,
    write_parquet,
)
from tests.kit.webserver import (
    Behaviour,
    Connection,
    Request,
    WebServer,
    black_hole,
    in_turn,
    ok,
    redirect,
    response,
    stall,
    status,
)
from wdsprep.cli import cli
from wdsprep.downloads import ASKED_AHEAD, FIRST_ASKED, HELD_NBYTES, Downloads, Pace
from wdsprep.errors import FingerprintError, SourceError, StoreError, UsageError, WorkError
from wdsprep.fetch import Fetched
from wdsprep.judging import Rules, judged
from wdsprep.outage import NO_SUCH_NAME, Outage, Witnesses
from wdsprep.samples import Code, Sample
from wdsprep.sources import Columns, Refusal, slices
from wdsprep.sources.recognise import recognise
from wdsprep.store import open_store


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> Path:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(out.getvalue(), newline="")
    return path


# --- reading tables

CAPTIONS = ['one, "two"', "three\nfour", "", "fünf", "six\tseven", 'eight " nine', "ten"]
ROWS = [{"url": f"http://x/{n}.jpg", "caption": text} for n, text in enumerate(CAPTIONS)]


@pytest.fixture
def site() -> Iterator[tuple[Site, WebServer]]:
    with open_site() as opened:
        yield opened


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """The same rows in every kind of table."""
    write_csv(tmp_path / "t.csv", ROWS)
    write_csv(tmp_path / "t.tsv", ROWS, "\t")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    write_parquet(tmp_path / "t.parquet", ROWS, row_group_size=5)
    for kind in ("csv", "tsv", "jsonl"):
        packed = gzip.compress((tmp_path / f"t.{kind}").read_bytes())
        (tmp_path / f"t.{kind}.gz").write_bytes(packed)
    return tmp_path


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet", "csv.gz", "tsv.gz", "jsonl.gz"])
def test_every_kind_of_table_gives_the_same_rows_however_it_is_cut(
    tables: Path, kind: str, rows: int
) -> None:
    source = source_of(tables / f"t.{kind}", rows=rows)
    items = list(source.items())
    assert source.kind == "urls"
    assert all(item.samples <= rows for item in items)
    found = [(item, row) for item in items for row in source.read(item)]
    assert [source.count(item) for item in items] == [
        sum(one is item for one, _ in found) for item in items
    ]
    for number, (_, row) in enumerate(found):
        assert isinstance(row, Sample)
        assert row.source == f"t.{kind}#{number}"
        assert (row.url, row.caption) == (ROWS[number]["url"], CAPTIONS[number].strip())
    assert len(found) == len(ROWS)


def test_a_list_of_urls_is_a_table_and_a_folder_of_captions_is_none(tmp_path: Path) -> None:
    lists = {"lists/a.txt": "\ufeffhttp://x/0\r\n\n http://x/1 \n", "lists/b.txt": "s3://x/2"}
    write_files(tmp_path, {**lists, "texts/a.txt": "a cat"})
    found = rows_of(tmp_path / "lists")
    assert [row.url for row in found] == ["http://x/0", "http://x/1", "s3://x/2"]
    assert [row.source for row in found] == ["a.txt#0", "a.txt#1", "b.txt#0"]
    assert source_of(tmp_path / "texts").kind == "folder"


def test_tables_are_found_by_folder_glob_and_braces(tables: Path) -> None:
    write_parquet(tables / "deep/u.parquet", ROWS)
    write_csv(tables / "c0.csv", ROWS)
    for pattern, names in {
        "": {"t.parquet", "deep/u.parquet"},
        "*.csv": {"t.csv", "c0.csv"},
        "{t,c0}.csv": {"t.csv", "c0.csv"},
        "deep": {"u.parquet"},
    }.items():
        found = {item.parts[0][0] for item in source_of(f"{tables}/{pattern}").items()}
        assert found == names
    with pytest.raises(SourceError, match=r"c9.csv is not there \(1 of 2 tables are missing\)"):
        rows_of(f"{tables}/{{t,c9}}.csv")


def named(path: Path, **columns: str) -> list[Sample | Refusal]:
    source = recognise(str(path), columns=Columns(**columns), rows_per_item=100)
    return [row for item in source.items() for row in source.read(item)]


def test_the_columns_are_recognised_or_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", [{"TOP_URL": "http://x/a", "TEXT": "a", "n": 1}])
    (row,) = rows_of(path)
    assert isinstance(row, Sample)
    assert (row.url, row.caption) == ("http://x/a", "a")
    path = write_parquet(tmp_path / "u.parquet", [{"jpg": b"x", "where": "http://x/a", "alt": "b"}])
    assert source_of(path).kind == "table"
    (row,) = named(path, url="where", caption="alt")
    assert isinstance(row, Sample)
    assert (row.url, row.caption, row.image) == ("http://x/a", "b", b"")
    with pytest.raises(UsageError, match=r"no column 'wo' \(--url-col\): it has jpg, where, alt"):
        named(path, url="wo")
    write_files(tmp_path, {"v.csv": "http://x/a.jpg,a\nhttp://x/b.jpg,b\n", "w.csv": "a,b\n1,2\n"})
    with pytest.raises(SourceError, match="its first line is no header"):
        rows_of(tmp_path / "v.csv")
    with pytest.raises(SourceError, match="it has a, b: give --url-col"):
        rows_of(tmp_path / "w.csv")


def test_a_row_that_cannot_be_used_is_refused_alone(tmp_path: Path) -> None:
    rows = (
        b'{"url": "http://x/0"}\nno json\n[]\n{"caption": "x"}\n{"url": 5}\n{"url": "http://x/5"}'
    )
    table = b"url,caption\nhttp://x/0,a\nhttp://x/1,\xff\n,c\nhttp://x/3,d\n"
    write_files(tmp_path, {"a.jsonl": rows, "b.csv": table})
    codes = {
        name: row.code.value if isinstance(row, Refusal) else ""
        for kind in ("a.jsonl", "b.csv")
        for name, row in by_source(tmp_path / kind).items()
    }
    assert codes == {
        "a.jsonl#0": "",
        "a.jsonl#1": "bad_json",
        "a.jsonl#2": "bad_json",
        "a.jsonl#3": "bad_url",
        "a.jsonl#4": "bad_url",
        "a.jsonl#5": "",
        "b.csv#0": "",
        "b.csv#1": "bad_caption",
        "b.csv#2": "bad_url",
        "b.csv#3": "",
    }


DEEP = "[" * 900 + "]" * 900


def bad_text(count: int) -> pa.Array:
    """Texts of Parquet, the second of which is not UTF-8."""
    offsets = b"".join(n.to_bytes(4, "little") for n in range(0, 4 * count + 4, 4))
    data = b"a 0 " + b"\xff\xfe\xff\xfe" + b"a 9 " * (count - 2)
    return pa.Array.from_buffers(pa.string(), count, [None, *map(pa.py_buffer, (offsets, data))])


def late_date(count: int) -> pa.Array:
    return pa.array([0, 2**62, *[0] * (count - 2)], pa.timestamp("us"))


def deep_struct(count: int) -> pa.Array:
    kind: pa.DataType = pa.int8()
    value: object = 1
    for _ in range(70):
        kind, value = pa.struct([("a", kind)]), {"a": value}
    return pa.array([None, value, *[None] * (count - 2)], kind)


ODD_TABLES: dict[str, Callable[[Path, list[str]], object]] = {
    "deep.jsonl": lambda path, urls: path.write_text(
        "".join(
            f'{{"url": "{url}", "a": {DEEP if n == 1 else "[]"}}}\n' for n, url in enumerate(urls)
        )
    ),
    "long.jsonl": lambda path, urls: path.write_text(
        "".join(
            f'{{"url": "{url}"{" " * (17 << 20) if n == 1 else ""}}}\n'
            for n, url in enumerate(urls)
        )
    ),
    "long.csv": lambda path, urls: path.write_text(
        "url,a\n"
        + "".join(f'{url},{"," * (17 << 20) if n == 1 else ""}"b"\n' for n, url in enumerate(urls))
    ),
    "text.parquet": lambda path, urls: pq.write_table(
        pa.table({"url": urls, "caption": bad_text(len(urls))}), path
    ),
    "date.parquet": lambda path, urls: pq.write_table(
        pa.table({"url": urls, "date": late_date(len(urls))}), path
    ),
    "deep.parquet": lambda path, urls: pq.write_table(
        pa.table({"url": urls, "deep": deep_struct(len(urls))}), path
    ),
    "images.parquet": lambda path, urls: pq.write_table(
        pa.table({"jpg": [jpeg(0)] * len(urls), "caption": bad_text(len(urls))}), path
    ),
}


@pytest.mark.parametrize("name", ODD_TABLES)
def test_a_row_that_python_cannot_read_costs_no_other(
    tmp_path: Path, site: tuple[Site, WebServer], name: str
) -> None:
    path, rows = tmp_path / name, 4
    ODD_TABLES[name](path, [f"{site[1].url}/ok/{n}" for n in range(rows)])
    found = outcome(pack(path, tmp_path / "out", *FAST))
    assert found.pop(f"{name}#1") in ("bad_json", "unreadable")
    assert found == {f"{name}#{n}": "packed" for n in range(rows) if n != 1}


def test_facts_may_be_nested_as_deep_as_anybody_needs_and_no_deeper(tmp_path: Path) -> None:
    """By a number of ours, not by how much stack is left where they happen to be read."""
    rows = [f'{{"url": "http://x", "a": {"[" * n}{"]" * n}}}' for n in (63, 64)]
    write_files(tmp_path, {"a.jsonl": "\n".join(rows)})
    fine, deep = rows_of(tmp_path / "a.jsonl")
    assert isinstance(fine, Sample)
    assert isinstance(deep, Refusal)
    assert (deep.code, deep.detail) == (Code.BAD_JSON, "nested more than 64 deep")


@pytest.mark.parametrize("kind", [KeyError, RecursionError, AttributeError, StopIteration])
def test_an_exception_of_any_kind_at_a_row_is_the_refusal_of_that_row(
    tables: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def throw(facts: dict[str, Any]) -> Any:
        if facts["url"] == ROWS[3]["url"]:
            raise kind("x")
        return facts

    monkeypatch.setattr("wdsprep.sources.urls.plain_facts", throw)
    for name in ("t.csv", "t.jsonl", "t.parquet"):
        rows = rows_of(tables / name)
        assert [isinstance(row, Sample) for row in rows] == [n != 3 for n in range(len(ROWS))]
        (refusal,) = (row for row in rows if isinstance(row, Refusal))
        assert refusal.code is Code.UNREADABLE
        assert refusal.detail.startswith(f"a bug: {kind.__name__} at wdsprep.sources")


def test_an_exception_of_any_kind_at_an_image_is_the_reject_of_that_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def throw(data: bytes, **_: object) -> Any:
        raise KeyError(data[:3])

    write_files(tmp_path, {"a.jpg": jpeg(0), "b.jpg": jpeg(1)})
    monkeypatch.setattr("wdsprep.judging.prepare", throw)
    source = source_of(tmp_path)
    part = next(slices(source.items(), size=9))
    found = [row for row in judged(source, Rules(), part, threads=1, downloads=None) if row]
    assert len(found) == 2
    for _, refusal in found:
        assert isinstance(refusal, Refusal)
        assert refusal.code is Code.CORRUPT
        assert refusal.detail.startswith("a bug: KeyError at wdsprep.judging")


def test_a_quote_that_is_never_closed_is_an_error_not_a_lost_row(tmp_path: Path) -> None:
    rows = "".join(f"http://x/{n},caption {n}\n" for n in range(10_000))
    for name, text in {
        "a.csv": f'http://x/a,"open\n{rows}',
        "b.csv": 'http://x/a,"o\nhttp://x/b,c\n',
    }.items():
        write_files(tmp_path, {name: f"url,caption\n{text}"})
        with pytest.raises(SourceError, match=r"a quote opened at byte 12 is never closed"):
            rows_of(tmp_path / name)


def test_a_damaged_gzip_file_is_an_error_that_names_it(tables: Path) -> None:
    whole = (tables / "t.csv.gz").read_bytes()
    for data in (whole[:-20], b"no gzip at all"):
        (tables / "bad.csv.gz").write_bytes(data)
        with pytest.raises(SourceError, match=r"bad.csv.gz is no sound gzip file"):
            rows_of(tables / "bad.csv.gz")


# --- a table by URL


def ranged(data: bytes) -> Behaviour:
    def behave(connection: Connection, request: Request) -> bool:
        start, end = request.headers["range"].removeprefix("bytes=").split("-")
        last = min(int(end) if end else len(data), len(data) - 1)
        part = data[int(start) : last + 1]
        span = f"bytes {start}-{last}/{len(data)}"
        connection.send(response(206, part, Content_Range=span, ETag='"1"'))
        return True

    return behave


def test_a_table_on_a_web_server_is_read_by_ranges(tmp_path: Path) -> None:
    data = write_parquet(tmp_path / "t.parquet", ROWS, row_group_size=2).read_bytes()
    broken = response(206, data[:1], Content_Range=f"bytes 0-0/{len(data)}", Content_Length=9)
    routes = {
        "/t.parquet": in_turn(status(503), raw_once(broken), ranged(data)),
        "/moved.parquet?key=secret": redirect("/t.parquet"),
        "/whole.parquet": ok(data),
    }
    with WebServer(routes) as server:
        here = rows_of(tmp_path / "t.parquet")
        assert rows_of(f"{server.url}/moved.parquet?key=secret") == [
            with_source(row, row.source.replace("t.", "moved.")) for row in here
        ]
        with pytest.raises(StoreError, match="does not serve ranges of bytes: download the file"):
            rows_of(f"{server.url}/whole.parquet")
        with pytest.raises(StoreError, match="is not there"):
            rows_of(f"{server.url}/nothing.parquet")
        with pytest.raises(UsageError, match="cannot be written to a web server"):
            open_store(f"{server.url}/t.parquet").delete("t.parquet")
    with pytest.raises(UsageError, match="only tables are read from the web"):
        rows_of("https://example.org/a.tar")


def test_tables_on_s3_are_read_as_those_here(tables: Path, bucket: str) -> None:
    upload(tables, f"s3://{bucket}/in")
    for name in ("t.parquet", "t.csv.gz", "t.jsonl"):
        assert rows_of(f"s3://{bucket}/in/{name}") == rows_of(tables / name)
    assert rows_of(f"s3://{bucket}/in/*.tsv") == rows_of(tables / "t.tsv")


def raw_once(data: bytes) -> Behaviour:
    def behave(connection: Connection, _: Request) -> bool:
        connection.send(data)
        return False

    return behave


def with_source(row: Sample | Refusal, source: str) -> Sample:
    assert isinstance(row, Sample)
    return Sample(source=source, image=b"", captions=row.captions, facts=row.facts, url=row.url)


# --- downloads in order


class Answers:
    """A client whose answers come when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[str, list[Future[Fetched]]] = {}

    def submit(self, url: str, /) -> "Future[Fetched]":
        future: Future[Fetched] = Future()
        self.asked.setdefault(url, []).append(future)
        return future

    def answer(self, url: str, data: bytes = b"x") -> None:
        self.asked[url][0].set_result(Fetched(data=data, host="h"))


def numbered(urls: list[str]) -> Iterator[tuple[int, Sample | Refusal]]:
    return enumerate(Sample(source=f"t#{n}", image=b"", url=url) for n, url in enumerate(urls))


def idle_until(
    found: Iterator[tuple[int, Sample | Refusal] | None], claim: Callable[[], bool]
) -> None:
    """Nothing has come yet, and the caller can do something else."""
    while not claim():
        assert next(found) is None


def test_a_slow_answer_holds_up_no_request_behind_it_and_keeps_its_place() -> None:
    client, urls = Answers(), [str(n) for n in range(500)]
    with Downloads(client, Counter, pace=Pace(heard=ASKED_AHEAD), minds_outage=True) as downloads:
        found = downloads.take(numbered(urls))
        idle_until(found, lambda: len(client.asked) == 500)
        for url in urls[:0:-1]:
            client.answer(url, url.encode() * 100_000)  # far more than may stay in memory
        assert next(found) is None
        assert downloads._held <= HELD_NBYTES < downloads._spool.nbytes
        client.answer("0", b"0")
        rows = [row for one in found if one is not None for row in [one[1]]]
    assert [row.image[:3] for row in rows if isinstance(row, Sample)] == [
        (url.encode() * 3)[:3] if url != "0" else b"0" for url in urls
    ]


def test_a_few_are_asked_for_first_and_more_as_answers_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wdsprep.downloads.MORE_A_SECOND", 0)
    client, urls = Answers(), [str(n) for n in range(500)]
    with Downloads(client, Counter, pace=Pace(), minds_outage=True) as downloads:
        found = downloads.take(numbered(urls))
        idle_until(found, lambda: len(client.asked) == FIRST_ASKED)
        for url in urls[1:FIRST_ASKED]:
            client.answer(url)
        idle_until(found, lambda: len(client.asked) == 4 * FIRST_ASKED - 3)


def test_fewer_are_asked_for_where_images_are_large() -> None:
    client, urls = Answers(), [str(n) for n in range(2_000)]
    with Downloads(client, Counter, pace=Pace(heard=ASKED_AHEAD), minds_outage=True) as downloads:
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
    client, pace, going, read = Answers(), Pace(), threading.Event(), threading.Event()

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

    downloads = Downloads(Answers(), repeated, pace=Pace(heard=ASKED_AHEAD), minds_outage=True)
    with downloads, pytest.raises(SourceError, match="gone"):
        list(downloads.take(numbered(["a"])))


def test_a_repeated_url_is_asked_for_once_however_far_apart() -> None:
    client = Answers()
    urls = ["a", *(str(n) for n in range(50)), "a", "a"]
    answered = threading.Event()
    with Downloads(
        client, partial(Counter, {"a": 3}), pace=Pace(heard=ASKED_AHEAD), minds_outage=True
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


def noted(pairs: list[tuple[str, Code | None]]) -> Outage:
    outage = Outage(Answers().submit, Witnesses())
    for url, code in pairs:
        outage.note(url, code)
    return outage


def suspected(pairs: list[tuple[str, Code | None]], *, at_end: bool = False) -> bool:
    return noted(pairs).is_suspected(at_end=at_end)


def test_an_outage_is_suspected_where_many_sites_give_no_answer() -> None:
    many = [(f"http://a.b{n % 9}.org/x", Code.DNS) for n in range(200)]
    assert suspected(many)
    assert not suspected(many[:199])
    assert not suspected([*many[:199], ("http://x.org", Code.HTTP_5XX), *many[:199]])
    assert suspected([*many[:199], ("file:///x", Code.BAD_URL), *many[:1]])
    assert not suspected([("http://dead.org/x", Code.DNS)] * 10_000, at_end=True)
    assert not suspected([(f"http://a{n}.dead.org/x", Code.DNS) for n in range(999)])
    few = [(f"http://a.b{n}.org/x", Code.UNREACHABLE) for n in range(20)]
    assert suspected(few, at_end=True)
    assert not suspected(few)
    assert not suspected(few[:19], at_end=True)
    assert not suspected([("http://ok.org", None), *many[:100]], at_end=True)


NO_NAME, NO_DATA = NO_SUCH_NAME


@pytest.mark.parametrize(
    ("code", "says", "of_the_internet", "is_outage"),
    [
        (Code.DNS, NO_NAME, 0, False),  # nobody has these names
        (Code.DNS, NO_DATA, 0, False),
        (Code.DNS, NO_NAME, NO_NAME, True),  # a name service that knows of no internet
        (Code.DNS, socket.EAI_AGAIN, socket.EAI_AGAIN, True),  # one that does not answer
        (Code.DNS, socket.EAI_FAIL, 0, True),
        (Code.TIMEOUT, NO_NAME, 0, True),  # whoever they are, they are silent
    ],
)
def test_before_anybody_has_answered_the_name_service_decides(
    monkeypatch: pytest.MonkeyPatch, code: Code, says: int, of_the_internet: int, is_outage: bool
) -> None:
    def getaddrinfo(name: str, _port: None) -> list[object]:
        error = of_the_internet if name.endswith("root-servers.net") else says
        if error:
            raise socket.gaierror(error, "x")
        return []

    monkeypatch.setattr("wdsprep.outage.socket.getaddrinfo", getaddrinfo)
    outage = noted([(f"http://dead{n}.org/x", code) for n in range(30)])
    assert outage.is_suspected(at_end=True)
    if is_outage:
        with pytest.raises(WorkError, match="if it is up and these hosts are gone, add --ignore-o"):
            outage.confirm()
    else:
        outage.confirm()
        assert not outage.is_suspected(at_end=True)


@pytest.mark.parametrize("answer", [None, Code.HTTP_5XX, Code.TIMEOUT, Code.DISALLOWED])
def test_a_host_that_answered_before_decides(answer: Code | None) -> None:
    client, witnesses = Answers(), Witnesses()
    Outage(client.submit, witnesses).note("http://ok.org/1", Code.HTTP_4XX)  # of another slice
    outage = Outage(client.submit, witnesses)
    for n in range(30):
        outage.note(f"http://dead{n}.org/x", Code.TIMEOUT)
    with ThreadPoolExecutor(1) as threads:
        told = threads.submit(outage.confirm)
        while "http://ok.org/1" not in client.asked:
            time.sleep(0.001)
        client.asked["http://ok.org/1"][0].set_result(Fetched(code=answer))
        if answer in (Code.TIMEOUT, Code.DISALLOWED):  # the latter is known without asking
            with pytest.raises(WorkError, match="nor do hosts that did before"):
                told.result()
        else:
            told.result()


# --- packing


def test_each_row_is_packed_or_rejected_with_its_code_and_its_url(
    tmp_path: Path, site: tuple[Site, WebServer], capfd: pytest.CaptureFixture[str]
) -> None:
    _, server = site
    kinds = ["ok", "gone", "html", "busy", "ok", "ok"]
    table = table_of(tmp_path, server, kinds)
    out = pack(table, tmp_path / "out", *FAST, "--compute-hash", "sha256", "--filter", "n < 5")
    codes = {"ok": "packed", "gone": "http_4xx", "html": "not_an_image", "busy": "http_5xx"}
    assert outcome(out) == {
        f"urls.parquet#{n}": "filtered" if n == 5 else codes[kind] for n, kind in enumerate(kinds)
    }
    for sample in samples_of(out):
        facts = sample["json"]
        number = facts["meta"]["n"]
        assert sample["__key__"] == f"000000{number:06d}"
        assert facts["url"] == f"{server.url}/ok/{number}"
        assert facts["sha256"] == hashlib.sha256(jpeg(number)).hexdigest()
        assert (sample["jpg"], sample["txt"]) == (jpeg(number), f"c {number}")
    assert {reject["url"] for reject in rejects_of(out) if reject["code"] == "http_4xx"} == {
        f"{server.url}/gone/1"
    }
    assert not [path for path in server.paths() if path.endswith("/5")]  # filtered before
    said = capfd.readouterr()
    assert "6 URLs to download, in column 'url', captions in 'caption'" in said.err
    assert "worst hosts: 127.0.0.1 (http_4xx) 1" in said.out
    assert "1 failed in a way that may pass: --retry-rejected" in said.out


def test_digests_are_verified_and_columns_kept_as_asked(
    tmp_path: Path, site: tuple[Site, WebServer]
) -> None:
    _, server = site
    digests = [hashlib.md5(jpeg(n)).hexdigest() for n in (0, 7)] + [""]
    table = table_of(tmp_path, server, ["ok"] * 3, md5=digests)
    options = ("--verify_hash", '["md5","md5"]', "--save_additional_columns", '["n"]')
    out = pack(table, tmp_path / "out", *FAST, *options)
    assert list(outcome(out).values()) == ["packed", "hash_mismatch", "hash_mismatch"]
    assert [sample["json"]["meta"] for sample in samples_of(out)] == [{"n": 0}]
    with pytest.raises(UsageError, match=r"no column 'sha' \(--verify-hash\)"):
        pack(table, tmp_path / "other", *FAST, "--verify-hash", "sha:sha256")


def test_what_decides_only_how_to_fetch_may_differ_on_resume_and_nothing_is_fetched_twice(
    tmp_path: Path, site: tuple[Site, WebServer]
) -> None:
    _, server = site
    table = table_of(tmp_path, server, ["ok", "gone"])
    out = pack(table, tmp_path / "out", *FAST)
    before = server.paths()
    pack(table, out, *FAST, "--timeout", "3", "--per-host", "1", "--requests", "9")
    assert server.paths() == before
    with pytest.raises(FingerprintError, match="robots: true -> false"):
        pack(table, out, *FAST, "--ignore-robots")
    with pytest.raises(UsageError, match="is no table of URLs"):
        pack(out / "32", tmp_path / "more", "--retry-rejected")


def test_rows_of_s3_are_packed_only_where_the_user_allows_it(tmp_path: Path, bucket: str) -> None:
    write_files(tmp_path, {"up/a.jpg": jpeg(0), "urls.txt": f"s3://{bucket}/in/a.jpg\n"})
    upload(tmp_path / "up", f"s3://{bucket}/in")
    table = tmp_path / "urls.txt"
    out = pack(table, tmp_path / "out", *FAST)
    (reject,) = rejects_of(out)
    assert reject["code"] == "private_address"
    assert "--allow-s3" in reject["detail"]
    with pytest.raises(FingerprintError, match=r"allow-s3: \(none\) -> true"):
        pack(table, out, *FAST, "--allow-s3")
    assert outcome(pack(table, tmp_path / "more", *FAST, "--allow-s3")) == {"urls.txt#0": "packed"}


SILENT = ("--timeout", "0.2", "--ignore-robots")


@pytest.fixture
def silent_sites() -> Iterator[list[str]]:
    """Of nine addresses, as all are where the network is down."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(black_hole(f"127.0.1.{n}")) for n in range(1, 10)]


def silent_rows(sites: list[str], count: int) -> str:
    return "".join(f"{sites[n % len(sites)]}/{n}.jpg\n" for n in range(count))


def test_a_network_that_is_down_stops_the_run_and_writes_nothing(
    tmp_path: Path, silent_sites: list[str]
) -> None:
    table, out = tmp_path / "urls.txt", tmp_path / "out"
    table.write_text(silent_rows(silent_sites, 30))
    with pytest.raises(WorkError, match=r"none of the last 30 URLs .* \(timeout 30\): the network"):
        pack(table, out, *FAST, *SILENT)
    assert not list(out.glob("*/*"))
    assert manifest_of(out).receipts == ()
    found = outcome(pack(table, out, *FAST, *SILENT, "--ignore-outage"))
    assert list(found.values()) == ["timeout"] * 30
    assert manifest_of(out).complete


def test_names_that_do_not_exist_are_rejects_however_many(tmp_path: Path) -> None:
    """Nobody has these, ever."""
    table = tmp_path / "urls.txt"
    table.write_text("".join(f"http://a.site{n}.invalid/{n}.jpg\n" for n in range(30)))
    out = pack(table, tmp_path / "out", *FAST, "--timeout", "0.5")
    assert list(outcome(out).values()) == ["dns"] * 30
    assert manifest_of(out).complete


@pytest.mark.parametrize("then", [ok(jpeg(0)), stall], ids=["up", "down"])
def test_many_silent_hosts_are_rejects_while_one_that_answered_still_does(
    tmp_path: Path, silent_sites: list[str], then: Behaviour
) -> None:
    table, rows = tmp_path / "urls.txt", 210
    with WebServer({"/0.jpg": in_turn(ok(jpeg(0)), then)}, address="127.0.2.1") as server:
        table.write_text(f"{server.url}/0.jpg\n{silent_rows(silent_sites, rows)}")
        if then is stall:
            with pytest.raises(WorkError, match="nor do hosts that did before"):
                pack(table, tmp_path / "out", *FAST, *SILENT)
        else:
            found = outcome(pack(table, tmp_path / "out", *FAST, *SILENT))
            assert Counter(found.values()) == {"packed": 1, "timeout": rows}
        assert server.paths() == ["/0.jpg"] * 2


# --- trying again

RETRY = (*FAST, "--samples-per-shard", "4")


def wanted() -> dict[str, str]:
    return {f"urls.parquet#{n}": MENDED[kind] for n, kind in enumerate(KINDS)}


def check_whole(out: Path) -> None:
    """Every row is there once, and all counts say so."""
    assert outcome(out) == wanted()
    manifest = manifest_of(out)
    assert manifest.complete
    assert sum(receipt.inputs for receipt in manifest.receipts) == len(KINDS)
    assert manifest.rejects == {"http_4xx": 1, "not_an_image": 1}
    for receipt in manifest.receipts:
        lines = (out / f"rejects/{receipt.unit}.jsonl").read_bytes()
        assert len(lines.splitlines()) == sum(receipt.rejects.values())
        assert hashlib.sha256(lines).hexdigest() == receipt.files[f"rejects/{receipt.unit}.jsonl"]


def test_retry_rejected_fetches_what_may_pass_into_new_shards(
    tmp_path: Path, site: tuple[Site, WebServer]
) -> None:
    behaviour, server = site
    table = table_of(tmp_path, server, KINDS)
    out = pack(table, tmp_path / "out", *RETRY)
    tars = {path: path.read_bytes() for path in out.glob("*/*.tar")}
    asked = len(server.paths())
    pack(table, out, *RETRY, "--retry-rejected")  # in vain
    assert set(server.paths()[asked:]) == {f"/busy/{n}" for n in (1, 4, 5, 8)}
    assert manifest_of(out).rejects["http_5xx"] == 4
    behaviour.is_mended = True
    pack(table, out, *RETRY, "--retry-rejected")
    check_whole(out)
    assert all(path.read_bytes() == data for path, data in tars.items())
    asked = len(server.paths())
    pack(table, out, *RETRY, "--retry-rejected")
    pack(table, out, *RETRY)
    assert len(server.paths()) == asked
    check_whole(out)


def test_a_retry_is_whole_after_a_kill_at_any_step_and_after_a_receipt_is_deleted(
    tmp_path: Path, site: tuple[Site, WebServer]
) -> None:
    behaviour, server = site
    table = table_of(tmp_path, server, KINDS)
    out = pack(table, tmp_path / "out", *RETRY)
    old = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    behaviour.is_mended = True
    pack(table, out, *RETRY, "--retry-rejected")
    for path, data in old.items():  # as a kill leaves it just before the older slices are settled
        path.write_bytes(data)
    pack(table, out, *RETRY)
    check_whole(out)
    first, retry = out / "receipts/000000.json", out / "receipts/1000000000.json"
    for names in ([first], [retry], [first, retry]):
        for path in names:
            path.unlink()
        pack(table, out, *RETRY)
        check_whole(out)


def test_a_retry_and_a_limit_and_an_append_leave_each_other_alone(
    tmp_path: Path, site: tuple[Site, WebServer]
) -> None:
    behaviour, server = site
    root = tmp_path / "in"
    table_of(root, server, KINDS)
    out = pack(root, tmp_path / "out", *RETRY, "--limit", "4")
    behaviour.is_mended = True
    pack(root, out, *RETRY, "--limit", "4", "--retry-rejected")
    assert outcome(out) == dict(list(wanted().items())[:4])
    pack(root, out, *RETRY)
    check_whole(out)
    behaviour.is_mended = False
    rows = [{"url": f"{server.url}/busy/{n}", "caption": "", "n": n} for n in (90, 91)]
    write_parquet(root / "vrls.parquet", rows)
    pack(root, out, *RETRY, "--append")
    behaviour.is_mended = True
    pack(root, out, *RETRY, "--retry-rejected")
    more = {f"vrls.parquet#{n}": "packed" for n in range(2)}
    assert outcome(out) == wanted() | more
    assert manifest_of(out).complete


def test_the_first_lines_of_the_help_name_tables_of_urls() -> None:
    assert "tables of URLs" in (cli.commands["pack"].help or "")


def test_killed_at_random_points_no_row_is_lost_or_doubled(
    tmp_path: Path, site: tuple[Site, WebServer]
) -> None:
    behaviour, server = site
    kinds = KINDS * 12
    table = table_of(tmp_path, server, kinds)
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")  # pytest shows it where the test fails
    chance, out = random.Random(seed), tmp_path / "out"
    for retry, kills in {(): 2, ("--retry-rejected",): 1}.items():
        words = command(table, out, *FAST, "--samples-per-shard", "15", *retry)
        for _ in range(kills):
            kill_when_asked(words, server, chance.randrange(60))
        done = run_pack(table, out, *words[4 + len(BUCKETS) :])
        assert done.returncode == 0, done.stderr
        codes = MENDED if behaviour.is_mended else MENDED | {"busy": "http_5xx"}
        assert outcome(out) == {f"urls.parquet#{n}": codes[kind] for n, kind in enumerate(kinds)}
        manifest = manifest_of(out)
        assert manifest.complete
        assert sum(receipt.inputs for receipt in manifest.receipts) == len(kinds)
        assert sum(manifest.rejects.values()) == len(rejects_of(out))
        assert not temporaries(out)
        behaviour.is_mended = True
