"""Tables of samples: each row says what the json says, whatever that is, and nothing else."""

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
    COLUMNS,
    GROUP_ROWS,
    TableWriter,
    read_table,
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
        "source_width": 2**63,
        "source_height": -(2**63),
    },
    {"captions": ["a", 1], "changes": "format", "caption": ["a"], "source": {"a": 1}},
    {"captions": [], "changes": ["é", ""], "caption": "", "url": None, "meta": None},
    {"meta": [1, None], "rest": 1, "score": 0.5, "none": None},
    {"meta": "text", "key": "another", "caption": "\ud800x\0"},
    {"meta": {"meta": {"a": 1e300}, "z": float("nan")}, "caption": ',"meta":{'},
]


def made(facts: list[dict[str, Any]]) -> bytes:
    writer = TableWriter()
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


def test_every_field_is_in_its_column_or_in_the_rest() -> None:
    read = [parse_object(json.dumps(one)) or {} for one in ODD]
    table = read_table(made(read), "t")
    assert table.schema.equals(table_schema())
    for number, row in enumerate(table.to_pylist()):
        there = {name: value for name, value in read[number].items() if value is not None}
        wanted = json.loads(facts_bytes(there))
        assert back(row, f"{number:06d}") == wanted
    assert table["width"].to_pylist()[1] == 512
    assert table["source_height"].to_pylist()[1] == -(2**63)
    assert table["captions"].to_pylist()[3] == []


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
    writer = TableWriter()
    for number, one in enumerate(facts):
        if number not in gone:
            writer.add(f"{number:06d}", one)
    assert table_without(whole, gone, what="t") == writer.finish()


def test_tables_of_any_rows_have_the_same_columns() -> None:
    assert pa.concat_tables(read_table(made(some), "t") for some in ([], ODD[:1], ODD[:5])).num_rows
    assert table_schema().names == [*COLUMNS]


@pytest.mark.parametrize("data", [b"", b"PAR1", b"no table", made(ODD[:3])[:-9]])
def test_what_is_no_table_is_damage(data: bytes) -> None:
    with pytest.raises(DamageError, match="t is damaged: it is no Parquet file"):
        read_table(data, "t")


def test_the_file_of_another_program_is_no_table() -> None:
    out = BytesIO()
    pq.write_table(pa.table({"key": ["a"], "width": [1]}), out)
    with pytest.raises(DamageError, match="its columns are not those of a table of samples"):
        read_table(out.getvalue(), "t")


def test_writing_loads_no_pandas() -> None:
    code = (
        "import sys\nfrom wdsprep.dataset.sample_table import TableWriter\n"
        "writer = TableWriter()\nwriter.add('a', {'captions': ['b'], 'width': 1})\n"
        "assert writer.finish()\nassert 'pandas' not in sys.modules, 'pandas'"
    )
    assert run([sys.executable, "-c", code], check=False).returncode == 0
