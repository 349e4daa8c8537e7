"""Tables of URLs: their rows are read alike from every kind of table, wherever it lies."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit.packs import codes, jpeg, rows_of, source_of, write_files, write_table
from tests.kit.webserver import WebServer, in_turn, ok, ranges_of, raw, redirect, response, status
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.samples import Sample
from wdsprep.errors import SourceError, StoreError, UsageError
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
def tables(tmp_path: Path) -> Path:
    """The same rows in every kind of table."""
    write_csv(tmp_path / "t.csv", ROWS)
    write_csv(tmp_path / "t.tsv", ROWS, "\t")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    write_table(tmp_path / "t.parquet", ROWS, row_group_size=5)
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
    found = [list(source.read(item)) for item in items]
    assert [source.count(item) for item in items] == [*map(len, found)]
    assert [(row.source, row.url, row.caption) for rows in found for row in rows] == [
        (f"t.{kind}#{n}", row["url"], row["caption"].strip()) for n, row in enumerate(ROWS)
    ]


def test_a_list_of_urls_is_a_table_and_a_folder_of_captions_is_none(tmp_path: Path) -> None:
    lists = {"lists/a.txt": "\ufeffhttp://x/0\r\n\n http://x/1 \n", "lists/b.txt": "s3://x/2"}
    write_files(tmp_path, {**lists, "texts/a.txt": "a cat"})
    assert [(row.url, row.source) for row in rows_of(tmp_path / "lists")] == [
        *(("http://x/0", "a.txt#0"), ("http://x/1", "a.txt#1"), ("s3://x/2", "b.txt#0"))
    ]
    assert source_of(tmp_path / "texts").kind == "folder"


def test_tables_are_found_by_folder_glob_and_braces(tables: Path) -> None:
    write_table(tables / "deep/u.parquet", ROWS)
    write_csv(tables / "c0.csv", ROWS)
    for pattern, names in {
        "": {"t.parquet", "deep/u.parquet"},
        "*.csv": {"t.csv", "c0.csv"},
        "{t,c0}.csv": {"t.csv", "c0.csv"},
        "deep": {"u.parquet"},
    }.items():
        found = {item.parts[0][0] for item in source_of(f"{tables}/{pattern}").items()}
        assert found == names
    with pytest.raises(SourceError, match=r"c9.csv does not exist \(1 of 2 tables missing\)"):
        rows_of(f"{tables}/{{t,c9}}.csv")


def test_the_columns_are_recognised_or_named(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.parquet", [{"TOP_URL": "http://x/a", "TEXT": "a", "n": 1}])
    (row,) = rows_of(path)
    assert isinstance(row, Sample)
    assert (row.url, row.caption) == ("http://x/a", "a")
    path = write_table(tmp_path / "u.parquet", [{"jpg": b"x", "where": "http://x/a", "alt": "b"}])
    assert source_of(path).kind == "table"
    (row,) = rows_of(path, url="where", caption="alt")
    assert isinstance(row, Sample)
    assert (row.url, row.caption, row.image) == ("http://x/a", "b", b"")
    with pytest.raises(UsageError, match=r"no column 'wo' \(--url-col\): it has jpg, where, alt"):
        rows_of(path, url="wo")
    write_files(tmp_path, {"v.csv": "http://x/a.jpg,a\nhttp://x/b.jpg,b\n", "w.csv": "a,b\n1,2\n"})
    with pytest.raises(SourceError, match="or write the columns' names above its first line"):
        rows_of(tmp_path / "v.csv")
    with pytest.raises(SourceError, match="it has a, b: give --url-col"):
        rows_of(tmp_path / "w.csv")


def test_a_row_that_cannot_be_used_is_refused_alone(tmp_path: Path) -> None:
    rows = (
        b'{"url": "http://x/0"}\nno json\n[]\n{"caption": "x"}\n{"url": 5}\n{"url": "http://x/5"}'
    )
    table = b"url,caption\nhttp://x/0,a\nhttp://x/1,\xff\n,c\nhttp://x/3,d\n"
    write_files(tmp_path, {"a.jsonl": rows, "b.csv": table})
    for name, found in {
        "a.jsonl": {1: "bad_json", 2: "bad_json", 3: "bad_url", 4: "bad_url"},
        "b.csv": {1: "bad_caption", 2: "bad_url"},
    }.items():
        assert codes(tmp_path / name) == {f"{name}#{n}": code for n, code in found.items()}
        assert len(rows_of(tmp_path / name)) == len(found) + 2


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


def long_lines(line: str, filling: str) -> str:
    """Four lines, the second of which is longer than any may be."""
    return "".join(line.replace("|", filling * (17 << 20) * (n == 1)) + "\n" for n in range(4))


ODD: dict[str, Callable[[], str | pa.Array]] = {
    "long.jsonl": lambda: long_lines('{"url": "http://x"|}', " "),
    "long.csv": lambda: "url,a\n" + long_lines('http://x,|"b"', ","),
    "text.parquet": lambda: bad_text(4),
    "date.parquet": lambda: late_date(4),
    "deep.parquet": lambda: deep_struct(4),
    "images.parquet": lambda: bad_text(4),
}
"""Tables of text, or a column beside the URLs or the images of a table of Parquet."""


@pytest.mark.parametrize("name", ODD)
def test_a_row_that_python_cannot_read_costs_no_other(tmp_path: Path, name: str) -> None:
    path, odd = tmp_path / name, ODD[name]()
    if isinstance(odd, str):
        path.write_text(odd)
    else:
        images = {"jpg": [jpeg(0)] * 4} if name == "images.parquet" else {"url": ["http://x"] * 4}
        pq.write_table(pa.table({**images, "odd": odd}), path)
    assert [isinstance(row, Reject) for row in rows_of(path)] == [False, True, False, False]


def test_facts_may_be_nested_as_deep_as_anybody_needs_and_no_deeper(tmp_path: Path) -> None:
    """By a number of ours, not by how much stack is left where they happen to be read."""
    rows = [f'{{"url": "http://x", "a": {"[" * n}{"]" * n}}}' for n in (63, 64)]
    write_files(tmp_path, {"a.jsonl": "\n".join(rows)})
    fine, deep = rows_of(tmp_path / "a.jsonl")
    assert isinstance(fine, Sample)
    assert isinstance(deep, Reject)
    assert (deep.code, deep.detail) == (Code.BAD_JSON, "nested more than 64 deep")


@pytest.mark.parametrize("kind", [KeyError, RecursionError, AttributeError, StopIteration])
def test_an_exception_of_any_kind_at_a_row_is_the_refusal_of_that_row(
    tables: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def throw(facts: dict[str, Any]) -> Any:
        if facts["url"] == ROWS[3]["url"]:
            raise kind("x")
        return facts

    monkeypatch.setattr("wdsprep.sources.table_sources.plain_facts", throw)
    for name in ("t.csv", "t.jsonl", "t.parquet"):
        rows = rows_of(tables / name)
        assert [isinstance(row, Sample) for row in rows] == [n != 3 for n in range(len(ROWS))]
        (refusal,) = (row for row in rows if isinstance(row, Reject))
        assert refusal.code is Code.UNREADABLE
        assert refusal.detail.startswith(f"a bug: {kind.__name__} at wdsprep.sources")


def test_a_quote_that_swallows_rows_is_an_error_not_a_lost_row(tmp_path: Path) -> None:
    rows = "".join(f"http://x/{n},caption {n}\n" for n in range(10_000))
    for name, text in {
        "a.csv": f'http://x/a,"open\n{rows}',
        "b.csv": 'http://x/a,"o\nhttp://x/b,c\n',
        "c.csv": 'http://x/a,"o\nhttp://x/b,two\nhttp://x/c,"x"\nhttp://x/d,4\n',
    }.items():
        write_files(tmp_path, {name: f"url,caption\n{text}"})
        with pytest.raises(SourceError, match="a quote opened in line 2 is not closed"):
            rows_of(tmp_path / name)


@pytest.mark.parametrize(("kind", "comma"), [("csv", ","), ("tsv", "\t")])
def test_a_caption_with_a_comma_that_nobody_quoted_is_refused_not_cut(
    tmp_path: Path, kind: str, comma: str
) -> None:
    lines = (["url", "caption"], ["http://x/a", "red", " green"], ["http://x/b", "blue", "", ""])
    write_files(tmp_path, {f"t.{kind}": "".join(f"{comma.join(line)}\n" for line in lines)})
    cut, whole = rows_of(tmp_path / f"t.{kind}")
    assert isinstance(cut, Reject)
    assert cut.detail == "it has 3 cells, and the header 2: quote its text"
    assert isinstance(whole, Sample)
    assert whole.caption == "blue", "empty cells beyond the header lose nothing"


# --- a table by URL


def test_a_table_on_a_web_server_is_read_by_ranges(tmp_path: Path) -> None:
    data = write_table(tmp_path / "t.parquet", ROWS, row_group_size=2).read_bytes()
    broken = response(206, data[:1], Content_Range=f"bytes 0-0/{len(data)}", Content_Length=9)
    routes = {
        "/t.parquet": in_turn(status(503), raw(broken), ranges_of(data)),
        "/moved.parquet?key=a.tar": redirect("/t.parquet"),
        "/whole.parquet": ok(data),
    }
    with WebServer(routes) as server:
        here = rows_of(tmp_path / "t.parquet")
        assert rows_of(f"{server.url}/moved.parquet?key=a.tar") == [
            replace(row, source=row.source.replace("t.", "moved.")) for row in here
        ]
        with pytest.raises(StoreError, match="does not serve ranges of bytes: download the file"):
            rows_of(f"{server.url}/whole.parquet")
        with pytest.raises(StoreError, match="does not exist"):
            rows_of(f"{server.url}/nothing.parquet")
        with pytest.raises(UsageError, match="a web server is only read"):
            open_store(f"{server.url}/t.parquet").delete("t.parquet")
    with pytest.raises(UsageError, match="only tables are read from the web"):
        rows_of("https://example.org/a.tar")


def test_a_table_without_urls_is_told_in_a_line_however_wide_or_odd_it_is(tmp_path: Path) -> None:
    wide = ",".join(f"{'column' * 20}{n}" for n in range(300))
    write_files(tmp_path, {"wide.csv": f"{wide}\n1\n", "odd.csv": bytes(range(256)) * 40})
    write_files(tmp_path, {"open.jsonl": '{"url": "http://x/0}\n{"url": "http://x/1"}\n'})
    write_files(
        tmp_path, {"none.csv": "\n", "none.jsonl": "", "excel.csv": "url;text\nhttp://x;a\n"}
    )
    with pytest.raises(
        SourceError, match=r"columncolumncolumn.*and 288 more: give --url-col"
    ) as told:
        list(source_of(tmp_path / "wide.csv").items())
    assert len(str(told.value)) < 1_000
    with pytest.raises(SourceError, match="has no column of URLs: it has"):
        list(source_of(tmp_path / "odd.csv").items())
    for name, said in {
        "open.jsonl": "has no column of URLs: its first row cannot be read",
        "none.csv": "has no column of URLs: it is empty",
        "none.jsonl": "has no column of URLs: it is empty",
        "excel.csv": "separates its columns by a semicolon: write it with commas",
    }.items():
        with pytest.raises(SourceError, match=said):
            list(source_of(tmp_path / name).items())
