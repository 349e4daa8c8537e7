"""Columns of tables as they are laid out for a dataset: their rows, types and digests."""

import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest

from tests.kit.laid_out import COUNT, key, lay_out, rows_of, write_table
from wdsprep.tables import other_tables
from wdsprep.tables.joined_columns import LaidOut


def test_columns_are_opened_when_they_are_used_and_made_again_if_they_are_damaged(
    tmp_path: Path,
) -> None:
    table = write_table(tmp_path / "t.parquet", rows_of())
    right = [n / 8 for n in range(COUNT)]

    def laid_out() -> LaidOut:
        return lay_out(table, tmp_path / "cache", {"key": [*map(key, range(COUNT))]}, (COUNT,))

    path = laid_out().file.path
    whole = path.read_bytes()
    damaged = whole[:70] + bytes([whole[70] ^ 1]) + whole[71:]
    path.write_bytes(damaged)
    laid = laid_out()
    assert laid.numbers["score"] == "<f8"
    assert path.read_bytes() == damaged
    assert laid.column("score").tolist() == right
    assert path.read_bytes() == whole
    for dumps in (ForkingPickler.dumps, pickle.dumps):
        assert pickle.loads(dumps(laid_out())).column("score").tolist() == right


ODD = ["a\0", "a", "\0", "é", "b\0c", "\uffff", "😀", "9" * 4097, "07", "7", "a/b"]


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_columns_are_laid_out_by_any_names_whatever_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rows = rows_of([*range(60), *range(40)])
    odd = [name for name in ODD if "\0" not in name or kind != "csv"]
    rows["key"][: len(odd)] = odd
    rows["hash"] = [*range(100)]
    rows["score"][30] = None
    table = write_table(tmp_path / f"t.{kind}", rows)
    names = [*odd, "none", *rows["key"][:29:-1], "", "\ud800", "\udcff"]
    sizes = [len(odd), 0, len(names) - len(odd)]
    whole = lay_out(table, tmp_path / "whole", {"key": names}, sizes, "license")
    monkeypatch.setattr(other_tables, "ROWS_AT_ONCE", 7)
    laid = lay_out(table, tmp_path / "sevens", {"key": names}, sizes, "license")
    assert laid.digest == whole.digest
    assert laid.file.path.read_bytes() == whole.file.path.read_bytes()
    first = {key: place for place, key in [*enumerate(rows["key"])][::-1] if place != 30}
    there = [first.get(name) for name in names]
    assert laid.has_row.tolist() == [place is not None for place in there]
    for shard in range(3):
        some = laid.rows_of(shard)
        found = laid.table(some, ["license", "hash", "none", "score"]).to_pydict()
        for name in ("license", "hash", "score"):
            own = [None if at is None else rows[name][at] for at in there[some]]
            assert found[name] == own
    values = laid.values_of(np.array([2, 0]), np.array([1, len(odd) - 1]))
    assert values["hash"].tolist() == [there[len(odd) + 1], len(odd) - 1]


@pytest.mark.parametrize(("by", "told"), [("url", "url"), ("sha256", "sha256")])
def test_a_table_without_keys_is_joined_by_another_name(
    tmp_path: Path, by: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {by: ["b", "a", None, "a"], "caption": [*"wxyz"], "n": [1, 2, 3, 4]}
    table = write_table(tmp_path / "t.parquet", rows)
    laid = lay_out(table, tmp_path, {by: ["a", "c", "b", "a"]}, (4,))
    assert laid.column("n").tolist() == [2, 0, 1, 2]
    assert f"1 row without a {told} or a number" in caplog.text
    assert f"1 row with a {told} that an earlier row has" in caplog.text


def test_an_empty_text_beside_half_a_character_is_no_number(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.jsonl", {"key": ["a", "b", "c"], "n": ["1", "", "\ud800"]})
    laid = lay_out(table, tmp_path, {"key": ["a", "b", "c"]}, (3,), "n")
    assert (dict(laid.numbers), laid.texts) == ({}, ["n"])
    assert laid.table(slice(0, 3), ["n"]).to_pydict() == {"n": ["1", None, None]}


@pytest.mark.parametrize("at_once", [1, 100])
def test_columns_of_texts_have_the_types_that_all_their_values_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(other_tables, "ROWS_AT_ONCE", at_once)
    cells = {
        "whole": ["1", " 2", "-3", "004 "],
        "wide": ["1", "9223372036854775808", "3", "-7"],
        "real": ["1", "0.5", "inf", "1e3"],
        "text": ["1", "nan", "x", ""],
        "hex": ["0x1F", "1", "0.5", "1"],
        "nan": ["1", "2", "3", " -NaN"],
    }
    table = write_table(tmp_path / "t.csv", {"key": [*"abcd"], **cells})
    laid = lay_out(table, tmp_path, {"key": [*"abcd"]}, (4,), "text")
    dtypes = {"whole": "<i8", "wide": "<f8", "real": "<f8", "nan": "<f8"}
    assert laid.numbers == dtypes
    assert {name: laid.column(name).dtype.str for name in dtypes} == dtypes
    assert laid.has_row.tolist() == [True, True, True, False]
    assert laid.column("whole").tolist() == [1, 2, -3, 0]
    assert laid.column("wide").tolist() == [1, 2.0**63, 3, 0]
    assert laid.table(slice(0, 4), ["text"]).to_pydict() == {"text": ["1", "nan", "x", None]}
    named = lay_out(table, tmp_path, {"key": [*"abcd"]}, (4,), "whole", for_batches=False)
    assert (dict(named.numbers), named.has_row.all()) == ({"whole": "<i8"}, True)
    assert named.offered == sorted(["key", *cells])


def test_a_state_tells_a_changed_table_but_not_what_it_is_joined_to(tmp_path: Path) -> None:
    rows = rows_of()
    table = write_table(tmp_path / "t.parquet", rows)
    digest = lay_out(table, tmp_path, {"key": rows["key"]}, (90,)).digest
    assert lay_out(table, tmp_path, {"key": rows["key"][:5]}, (2, 3)).digest == digest
    for name, value in (("key", "x"), ("score", 7.0), ("hash", None)):
        other = {**rows, name: [value, *rows[name][1:]]}
        table = write_table(tmp_path / f"{name}.parquet", other)
        assert lay_out(table, tmp_path, {"key": rows["key"]}, (90,)).digest != digest
