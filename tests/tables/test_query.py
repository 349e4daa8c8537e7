"""Columns select the rows that the closures of a condition select, whatever the rows hold."""

import io
import itertools
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit.conditions import KEYS, a_condition, a_row, json_value
from wdsprep.dataset.condition_syntax import Condition
from wdsprep.dataset.sample_table import IMAGE_COLUMNS, TableWriter, read_table
from wdsprep.dataset.samples import facts_bytes, parse_json, value_at_path
from wdsprep.sources.tables.parquet import open_parquet
from wdsprep.store.local import LocalStore
from wdsprep.tables import query
from wdsprep.tables.query import MOST_ROWS, Query, WantedTexts, open_engine, read_named

SCHEMA = {
    "width": pa.int64(), "height": pa.int64(), "score": pa.float64(), "caption": pa.string(),
    "source": pa.large_string(), "nsfw": pa.bool_(), "tags": pa.list_(pa.string()),
    "small": pa.float32(), "meta": pa.string(),
}  # fmt: skip


def table_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    columns = {
        name: pa.array([row[name] for row in rows], kind)
        for name, kind in SCHEMA.items()
        if name != "meta"
    }
    encoded = [None if row["meta"] is None else facts_bytes(row["meta"]).decode() for row in rows]
    return pa.table({**columns, "meta": pa.array(encoded, pa.string())})


def facts_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "meta": parse_json(facts_bytes({"m": row["meta"]}))["m"]} for row in rows]


def by_closures(condition: Condition, *tables: Sequence[Any]) -> list[bool]:
    """Ask the facts of each row, of which a name has the value of the first table that has one."""

    def value(places: Sequence[Any], name: Any) -> Any:
        values = (value_at_path(facts, name) for facts in places)
        return next((one for one in values if one is not None), None)

    rows = zip(*tables, strict=True)
    return [condition.holds([value(row, name) for name in condition.names]) for row in rows]


def met(condition: Condition, *tables: pa.Table) -> list[bool]:
    with open_engine() as engine:
        masks = Query(condition, engine).masks([table] for table in tables)
        return np.concatenate([*masks]).tolist()


def sample_facts(rng: random.Random) -> dict[str, Any]:
    """Return the json of a sample, now and then with fields that no table has a column for."""
    row = {name: value for name, value in a_row(rng).items() if name not in ("score", "small")}
    row["captions"] = row.pop("tags")
    if rng.random() < 0.3:
        return {**row, **{rng.choice([*KEYS, *SCHEMA]): json_value(rng) for _ in range(3)}}
    return row


def sample_table(facts: Sequence[dict[str, Any]]) -> pa.Table:
    writer = TableWriter(IMAGE_COLUMNS)
    for number, one in enumerate(facts):
        writer.add(f"{number:06d}", one)
    return read_table(writer.finish(), IMAGE_COLUMNS, what="a table")


def check_conditions(
    rng: random.Random, count: int, *, tables: Sequence[pa.Table], facts: Sequence[Any]
) -> None:
    """Ask so many conditions, drawn by chance, of rows that stand in all of these tables."""
    with open_engine() as engine:
        for _ in range(count):
            condition = Condition(a_condition(rng))
            (mask,) = Query(condition, engine).masks([tables])
            assert mask.tolist() == by_closures(condition, *facts), condition.text


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.system)])
def test_conditions_select_of_1000_samples_what_their_closures_do_of_their_json(count: int) -> None:
    rng = random.Random(7)
    facts = [sample_facts(rng) for _ in range(1_000)]
    known = [parse_json(facts_bytes(one)) for one in facts]
    check_conditions(rng, count, tables=[sample_table(facts)], facts=[known])


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.system)])
def test_conditions_select_of_other_tables_what_their_closures_do(count: int) -> None:
    rng = random.Random(8)
    rows = [a_row(rng) for _ in range(200)]
    check_conditions(rng, count, tables=[table_of(rows)], facts=[facts_of(rows)])


@pytest.mark.parametrize("rounds", [2, pytest.param(8, marks=pytest.mark.system)])
def test_a_name_has_the_value_of_the_first_table_that_has_one(rounds: int) -> None:
    rng = random.Random(9)
    few = ["width", "caption", "tags", "score", "source"]
    for _ in range(rounds):
        sides = [[sample_facts(rng) for _ in range(60)] for _ in range(2)]
        facts = [[parse_json(facts_bytes(one)) for one in side] for side in sides]
        tables = [sample_table(side) for side in sides]
        rows = [a_row(rng) for _ in range(60)]
        drawn = table_of(rows).select(rng.sample(few, 2))
        tables.insert(rng.randrange(3), drawn)
        known = [{n: v for n, v in row.items() if n in drawn.column_names} for row in rows]
        facts.insert(tables.index(drawn), known)
        check_conditions(rng, 20, tables=tables, facts=facts)


# --- what a condition cannot do
HOSTILE = "'); DROP VIEW rows; SELECT ('"


@pytest.mark.parametrize(
    "text",
    [
        f"caption == {HOSTILE!r} or meta[{HOSTILE!r}] == 1",
        f"like(caption, {HOSTILE!r}) or {HOSTILE!r} in caption or {HOSTILE!r} in meta.marks",
        f"caption in [{HOSTILE!r}, 'x'] and {HOSTILE!r} < meta.lang",
        "json0 is None and first0 is None and found is None and document is None",
        "like(caption, 'a\\0b') or like(caption, '%\\0%') or like(caption, '[^a]_')",
        "like(caption, '%\\\\') or caption == '\\ud800' or 'a\\0b' in caption",
    ],
)
def test_text_of_a_user_is_never_code(text: str) -> None:
    rng = random.Random(1)
    captions = [HOSTILE, "x", "a\\", "a\0b", "bc"]
    rows = [{**a_row(rng), "caption": rng.choice(captions)} for _ in range(99)]
    condition = Condition(text)
    assert met(condition, table_of(rows)) == by_closures(condition, facts_of(rows))


@pytest.mark.parametrize(
    "asked",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "COPY (SELECT 1) TO '/tmp/made-by-duckdb'",
        "ATTACH '/tmp/made-by-duckdb'",
        "SELECT * FROM 'https://example.org/x.parquet'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET threads = 4",
        "SET enable_external_access = true",
        "SET python_enable_replacements = true",
        "SELECT * FROM secret",
    ],
)
def test_the_engine_reaches_no_files_network_settings_or_variables(asked: str) -> None:
    secret = pa.table({"x": [1]})
    with open_engine() as engine, pytest.raises(duckdb.Error):
        engine.sql(asked).fetchall()
    assert len(secret) == 1


# --- rows that should not be
def test_damaged_meta_counts_as_missing_and_raises_nothing() -> None:
    meta = ['{"a": 7}', '{"a":', "", "nul", '{"a": 7} x', "7", '{"a": 1e999}', "\0", None]
    meta += ["[" * 5_000, '{"a": "\\ud800"}', '{"a": "\\u0000"}']
    table = pa.table({"key": [f"{n}" for n in range(len(meta))], "meta": meta})
    assert met(Condition("a is None"), table) == [False] + [True] * 9 + [False] * 2
    assert met(Condition("a == 7 or a > 7 or a == '\\0'"), table) == [True] + [False] * 10 + [True]


@pytest.mark.parametrize(
    "numbers",
    [
        pa.array([1, 2, None]),
        pa.array([2**64 - 1, 0, None], pa.uint64()),
        pa.array([1.5, math.nan, None]),
        pa.array([math.inf, -0.0, None], pa.float32()),
        pa.array([True, False, None]),
    ],
    ids=lambda numbers: str(numbers.type),
)
def test_numbers_that_a_table_of_others_calls_meta_or_rest_are_no_json(numbers: pa.Array) -> None:
    table = pa.table({"meta": numbers, "rest": numbers, "other": numbers})
    facts = table.drop_columns("rest").to_pylist()
    for text in ["a == 7", "a is None", "meta.a > 7 or other > 1", "meta > 1", "not meta"]:
        condition = Condition(text)
        assert met(condition, table) == by_closures(condition, facts), text


def test_texts_of_digits_dots_and_signs_are_the_numbers_that_python_reads() -> None:
    texts = ["".join(signs) for n in range(6) for signs in itertools.product("09.-", repeat=n)]
    table = pa.table({"a": texts})
    facts = table.to_pylist()
    for text in ["a > 5", "a * 2 <= 0.9", "a in [0, 9, 0.9]", "a + 0 is None", "-1 < a < 1"]:
        assert met(Condition(text), table) == by_closures(Condition(text), facts)


def test_sql_by_hand_differs_as_the_page_says() -> None:
    rows = pa.table(
        {"width": [2**62, 640], "score": [None, 5.0], "captions": [["a", "b"], ["b", "a"]],
         "caption": ["7", "car"], "meta": ['{"aesthetic": 10}', '{"aesthetic": 9}']}
    )  # fmt: skip

    def by_hand(where: str) -> list[int]:
        with open_engine() as engine:
            engine.register("samples", rows)
            found = engine.sql(f"SELECT width FROM samples WHERE {where}").fetchall()
        return [width for (width,) in found]

    differing = {
        "not score > 5": ([2**62, 640], [640]),
        "captions[1] == 'a'": ([640], [2**62]),
        "width / 0 > 1": ([], [2**62, 640]),
        "width * 4 > 1": ([2**62, 640], None),
        "caption > 5": ([2**62], None),
    }
    for text, (ours, sql) in differing.items():
        assert rows.filter(met(Condition(text), rows))["width"].to_pylist() == ours
        if sql is None:
            with pytest.raises(duckdb.Error):
                by_hand(text)
        else:
            assert by_hand(text) == sql
    assert by_hand("meta ->> 'aesthetic' > '5'") == [640]


# --- many tables
@pytest.mark.parametrize("nbytes", [query.MOST_NBYTES, 50_000])
def test_tables_of_any_lengths_are_asked_in_order(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MOST_NBYTES", nbytes)
    rng = np.random.default_rng(0)
    lengths = [3, 0, MOST_ROWS - 3, 1, 2 * MOST_ROWS + 5, 0, 7]
    values = [rng.integers(0, 9, length) for length in lengths]
    tables = [pa.table({"n": value, "unused": value}) for value in values]
    tables[3] = pa.table({"n": [f"{value}" for value in values[3]]})  # another type
    with open_engine() as engine:
        masks = list(Query(Condition("n >= 5"), engine).masks([table] for table in tables))
    assert [mask.tolist() for mask in masks] == [(value >= 5).tolist() for value in values]


def test_a_long_list_keeps_the_order_of_small_tables() -> None:
    keys = [[f"{length}-{number}" for number in range(length)] for length in (60, 64, 78)]
    wanted = [key for table in keys for key in table[:33]]
    tables = [[pa.table({"key": table})] for table in keys]
    with open_engine() as engine:
        masks = list(Query(Condition(f"key in {wanted}"), engine).masks(tables))
    assert [mask.nonzero()[0].tolist() for mask in masks] == [[*range(33)]] * 3


def test_a_table_without_the_columns_asked_for_has_none_of_their_values() -> None:
    table = pa.table({"n": [1, 2]})
    assert met(Condition("x is None and y is None"), table) == [True, True]
    assert met(Condition("x > 1"), table, table) == [False] * 4
    assert met(Condition("True"), table.slice(0, 0), table) == [True, True]


def test_only_columns_that_may_matter_are_read(tmp_path: Path) -> None:
    out = io.BytesIO()
    values = {"w": [1, 2], "h": [1, None], "meta": ['{"a": 7}', None], "url": ["a", "b"]}
    pq.write_table(pa.table({**values, "rest": [None, '{"h": 3}']}), out)
    wanted = {"w > 1": ["w"], "h > w": ["w", "h", "meta", "rest"], "a > 1": ["meta", "rest"]}
    (tmp_path / "t.parquet").write_bytes(out.getvalue())
    with open_engine() as engine, open_parquet(LocalStore(tmp_path), "t.parquet") as file:
        for text, columns in wanted.items():
            query = Query(Condition(text), engine)
            table = read_named(file, query.condition.names)
            assert table.column_names == columns
            assert sum(mask.sum() for mask in query.masks([[table]])) == 1
        query = Query(Condition("1"), engine)
        (mask,) = query.masks([[read_named(file, ())]])
        assert mask.tolist() == [True, True]


def test_names_that_no_row_has_are_known_afterwards() -> None:
    rows = table_of(
        [{**a_row(random.Random(1)), "source": None, "meta": {"a": None, "b": [2**70]}}]
    )
    condition = Condition("a == 1 or b[0] > 1 or c is None or caption.x or source or width in [1]")
    with open_engine() as engine:
        asked = Query(condition, engine)
        list(asked.masks([[rows]]))
        assert asked.unseen == {("a",), ("c",), ("caption", "x"), ("source",)}
        more = table_of([{**a_row(random.Random(1)), "meta": {"a": {}, "source": 1}}])
        list(asked.masks([[more]]))
        assert asked.unseen == {("c",), ("caption", "x")}


# --- texts that are wanted
def test_a_text_with_the_hash_of_a_wanted_one_is_not_taken_for_it() -> None:
    class Text(str):
        def __hash__(self) -> int:
            return 7

    wanted = WantedTexts("key", [Text("a"), Text("b"), Text("b")])
    assert wanted.find([Text("c"), None, Text("b"), Text("")]).tolist() == [2]
    assert (len(wanted), [*wanted.unseen(["a", "b"])]) == (2, ["a"])


# --- what it costs
def nested(depth: int) -> str:
    text = "width > 3"
    for _ in range(depth):
        text = f"width > ({text}) + score"
    return text


@pytest.mark.parametrize(
    "text",
    [
        nested(30),
        "not " * 98 + "width",
        " + ".join(["width"] * 99) + " > 0",
        " <= ".join(["width"] * 9_000),
        " or ".join(["score > 5"] * 3_000),
        " or ".join(f"name{n} == 5" for n in range(500)),
        pytest.param(" or ".join(["score > 5"] * 7_000), marks=pytest.mark.system),
        pytest.param(" or ".join(f"name{n} == 5" for n in range(2_000)), marks=pytest.mark.system),
        f"width in ({', '.join(map(str, range(4_000)))})",
        f"caption not in ({', '.join(repr(f'{n:012}') for n in range(6_000))})",
        f"like(caption, '{'%a' * 40_000}%')",
        f"like(caption, '{'%a_a' * 20_000}%') or like(caption, '{'a_' * 9_000}')",
        f"like(caption, '%a{'_' * 180}b')",
        f"caption == '{'x' * 90_000}'",
    ],
    ids=lambda text: text[:20],
)
def test_long_and_deep_conditions_are_asked_in_time(text: str) -> None:
    rng = random.Random(3)
    rows = [{**a_row(rng), "caption": "a" * 2_000} for _ in range(20)]
    condition, facts = Condition(text), facts_of(rows)
    begun = time.process_time()
    found = met(condition, table_of(rows))
    assert time.process_time() - begun < 5
    assert found == by_closures(condition, facts)
