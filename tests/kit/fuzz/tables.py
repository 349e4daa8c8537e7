"""Tables in each form that users have, and changes to one of them."""

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.kit.fuzz.mutations import change_digit, mutate, mutate_json_line, mutate_text


def write_tables(place: Path, rows: list[dict[str, Any]]) -> None:
    for ending, mark in (("csv", ","), ("tsv", "\t")):
        lines = [mark.join(rows[0]), *(mark.join(map(str, row.values())) for row in rows)]
        (place / f"t.{ending}").write_text("\n".join(lines) + "\n")
    (place / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "t.csv.gz").write_bytes(gzip.compress((place / "t.csv").read_bytes()))
    pq.write_table(pa.Table.from_pylist(rows), place / "t.parquet")


def change_table(place: Path, rng: Random) -> str:
    """Keep one of the tables, changed."""
    path = rng.choice(sorted(place.glob("t.*")))
    ways = [mutate, change_digit]
    if path.suffix == ".jsonl":
        ways += [mutate_json_line] * 3
    elif path.suffix in (".csv", ".tsv"):
        ways += [mutate_text] * 3
    data = rng.choice(ways)(path.read_bytes(), rng)
    for other in place.glob("t.*"):
        other.unlink()
    path.write_bytes(data)
    return path.name
