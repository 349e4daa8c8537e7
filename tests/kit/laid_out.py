"""Tables of scores, and their columns laid out in the order of samples that have only names."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from wdsprep.tables.join_columns import JoinedSamples, lay_out_table
from wdsprep.tables.joined_columns import LaidOut
from wdsprep.tables.other_tables import encode_names


def lay_out(
    table: str,
    cache: Path,
    names: Mapping[str, Sequence[str]],
    sizes: Sequence[int],
    *named: str,
    for_batches: bool = True,
) -> LaidOut:
    """Lay out a table for shards of so many samples, given the names of these by their column."""

    def read(by: str) -> list[pa.Array]:
        ends = np.cumsum(sizes).tolist()
        pairs = zip([0, *ends], ends, strict=False)
        return [encode_names(names[by][start:end]) for start, end in pairs]

    content = [f"{names} {sizes}"]
    samples = JoinedSamples(url="set", sizes=np.array(sizes), contents=content, read_names=read)
    return lay_out_table(table, samples, cache, wanted=(named, for_batches))


COUNT = 90


def key(number: int) -> str:
    return f"{number:012d}"


def rows_of(numbers: Any = range(COUNT)) -> dict[str, list[Any]]:
    chance = np.random.default_rng(0)
    order = chance.permutation([*numbers]).tolist()
    return {
        "key": [key(n) for n in order],
        "score": [n / 8 for n in order],
        "hash": [(n << 50) + 1 for n in order],
        "good": [n % 3 == 0 for n in order],
        "license": [["nc", "by", "cc0"][n % 3] for n in order],
    }


def write_table(path: Path, rows: dict[str, list[Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(rows), path, row_group_size=17)
        return str(path)
    lines = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    with path.open("w", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(line) + "\n" for line in lines)
        else:
            cells = csv.DictWriter(file, list(rows))
            cells.writeheader()
            cells.writerows(lines)
    return str(path)
