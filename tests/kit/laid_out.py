"""Columns of a table, laid out in the order of samples that have nothing but names."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

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
    return lay_out_table(table, samples, cache, named=named, for_batches=for_batches)
