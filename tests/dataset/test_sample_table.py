"""Tables of samples say what the json says, and where samples stand in their image shard."""

import json
import sys
from io import BytesIO
from subprocess import run
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from wdsprep.dataset import sample_table
from wdsprep.dataset.sample_table import (
    GROUP_ROWS,
    IMAGE_COLUMNS,
    LATENT_COLUMNS,
    Columns,
    TableWriter,
    read_table,
    table_columns,
    table_schema,
    table_without,
)
from wdsprep.dataset.samples import facts_bytes, parse_object
from wdsprep.errors import DamageError

ODD: list[dict[str, Any]] = [
    {},
    {
        "width": 512,
        "height": True,
        "bucket": 256.0,
        "original_width": 2**63,
        "original_height": -(2**63),
    },
    {"captions": ["a", 1], "changes": "format", "caption": ["a"], "source": {"a": 1}},
    {"captions": [], "changes": ["é", ""], "caption": "", "url": None, "meta": None},
    {"meta": [1, None], "rest": 1, "score": 0.5, "none": None},
    {"meta": "text", "key": "another", "caption": "\ud800x\0"},
    {"meta": {"meta": {"a": 1e300}, "z": float("nan")}, "caption": ',"meta":{'},
    {"cut": True, "upscaled": 1.5, "crop": [0, -1, 2**62, 3], "scaled_width": 7},
    {"cut": 1, "upscaled": 2**53 + 1, "crop": [0, None], "tokens": False},
    {"cut": False, "upscaled": True, "crop": [0, 1.0], "captions": [None]},
    {"upscaled": "1.5", "crop": [2**63], "tokens": -1},
    {"crop": []},
]
LATENTS = [{**facts, "row": 3 * number} for number, facts in enumerate(ODD)]


def made(facts: list[dict[str, Any]], columns: Columns = IMAGE_COLUMNS) -> bytes:
    writer = TableWriter(columns)
    for number, one in enumerate(facts):
        writer.add(f"{number:06d}", one)
    return writer.finish()


def back(row: dict[str, Any], key: str) -> dict[str, Any]:
    """The json that a row stands for."""
    assert row.pop("key") == key
    rest = json.loads(row.pop("rest") or "{}")
    found = {name: value for name, value in row.items() if value is not None}
    if "meta" in found:
        found["meta"] = json.loads(found["meta"])
    assert not found.keys() & rest.keys()
    return found | rest


@pytest.mark.parametrize(("columns", "odd"), [(IMAGE_COLUMNS, ODD), (LATENT_COLUMNS, LATENTS)])
def test_every_field_is_in_its_column_or_in_the_rest(
    columns: Columns, odd: list[dict[str, Any]]
) -> None:
    read = [parse_object(json.dumps(one)) or {} for one in odd]
    table = read_table(made(read, columns), columns, what="t")
    assert table.schema.equals(table_schema(columns))
    for number, row in enumerate(table.to_pylist()):
        there = {name: value for name, value in read[number].items() if value is not None}
        wanted = json.loads(facts_bytes(there))
        assert back(row, f"{number:06d}") == wanted
    assert table["width"].to_pylist()[1] == 512
    assert table["original_height"].to_pylist()[1] == -(2**63)
    assert table["captions"].to_pylist()[3] == []
    if columns is LATENT_COLUMNS:
        assert table["cut"].to_pylist()[-5:] == [True, None, False, None, None]
        assert table["upscaled"].to_pylist()[-5:] == [1.5, None, None, None, None]
        assert table["crop"].to_pylist()[-5:] == [[0, -1, 2**62, 3], None, None, None, []]


def test_scores_have_their_columns_and_nothing_else() -> None:
    settings = {"scores": {"columns": {"a": "number", "b": "whole", "c": "text"}}}
    columns = table_columns("latents", settings)
    facts = [
        {"row": 0, "a": 1, "b": 2, "c": "x", "source": "s", "meta": {"a": 1}},
        {"row": 4, "a": 2**60, "b": 2.5, "c": 1},
    ]
    assert read_table(made(facts, columns), columns, what="t").to_pylist() == [
        {"key": "000000", "row": 0, "source": "s", "a": 1.0, "b": 2, "c": "x"},
        {"key": "000001", "row": 4, "source": None, "a": None, "b": None, "c": None},
    ]


def test_equal_rows_have_equal_bytes_however_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [{"caption": f"caption {n}", "width": n, "meta": {"a": n}} for n in range(50)] * 200
    assert len(facts) > 2 * GROUP_ROWS
    whole = made(facts)
    monkeypatch.setattr(sample_table, "BATCH_ROWS", 100)
    assert made(facts) == whole
    groups = pq.ParquetFile(BytesIO(whole)).metadata
    rows = [groups.row_group(n).num_rows for n in range(groups.num_row_groups)]
    assert rows == [GROUP_ROWS, GROUP_ROWS, len(facts) - 2 * GROUP_ROWS]
    gone = {0, 7, 4096, 9999}
    writer = TableWriter(IMAGE_COLUMNS)
    for number, one in enumerate(facts):
        if number not in gone:
            writer.add(f"{number:06d}", one)
    assert table_without(whole, IMAGE_COLUMNS, rows=gone, what="t") == writer.finish()


def test_positions_become_lower_as_the_image_shard_loses_samples() -> None:
    table = table_without(
        made(LATENTS[:6], LATENT_COLUMNS), LATENT_COLUMNS, rows=[2, 3], lost=[1, 6, 9, 13], what="t"
    )
    rows = read_table(table, LATENT_COLUMNS, what="t")
    assert rows["row"].to_pylist() == [0, 2, 9, 11]
    assert rows["key"].to_pylist() == ["000000", "000001", "000004", "000005"]


@pytest.mark.parametrize("columns", [IMAGE_COLUMNS, LATENT_COLUMNS])
def test_tables_of_any_rows_have_the_same_columns(columns: Columns) -> None:
    some = [read_table(made(LATENTS[:n], columns), columns, what="t") for n in (0, 1, 5)]
    assert len(pa.concat_tables(some)) == 6
    assert table_schema(columns).names == [*columns]


@pytest.mark.parametrize("data", [b"", b"PAR1", b"no table", made(ODD[:3])[:-9]])
def test_what_is_no_table_is_damage(data: bytes) -> None:
    with pytest.raises(DamageError, match="t is damaged: it is no Parquet file"):
        read_table(data, IMAGE_COLUMNS, what="t")


def test_the_file_of_another_program_is_no_table() -> None:
    out = BytesIO()
    pq.write_table(pa.table({"key": ["a"], "width": [1]}), out)
    with pytest.raises(DamageError, match="its columns are not those of a table of samples"):
        read_table(out.getvalue(), IMAGE_COLUMNS, what="t")


def test_writing_loads_no_pandas() -> None:
    code = (
        "import sys\nfrom wdsprep.dataset.sample_table import LATENT_COLUMNS, TableWriter\n"
        "writer = TableWriter(LATENT_COLUMNS)\n"
        "facts = {'captions': ['b'], 'crop': [1], 'row': 1, 'cut': True, 'upscaled': 1.5}\n"
        "writer.add('a', facts)\n"
        "assert writer.finish()\nassert 'pandas' not in sys.modules, 'pandas'"
    )
    assert run([sys.executable, "-c", code], check=False).returncode == 0
