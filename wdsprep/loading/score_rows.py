"""Read the columns of a dataset of scores as rows of a table.

They stand in the json of its samples, which are read once, some at a time, for `sorted_table`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdsprep.dataset.score_columns import NUMBER, TEXT, WHOLE, columns_of
from wdsprep.loading.sample_metadata import MetadataBlock, scan_metadata
from wdsprep.loading.served_datasets import Dataset
from wdsprep.loading.table_keys import KEY, encode_keys
from wdsprep.loading.table_rows import BYTES, Columns, TableRows

DTYPES = {NUMBER: "<f8", WHOLE: "<i8"}


class ScoreRows(TableRows):
    """The scores of all samples as table rows.

    Columns of texts are left out, except those in `texts`.
    """

    def __init__(self, dataset: Dataset, texts: Sequence[str]) -> None:
        super().__init__(dataset.store.url)
        self._dataset = dataset
        columns = columns_of(dataset.settings)
        self.columns = {n: DTYPES[holds] for n, holds in columns.items() if holds in DTYPES}
        self.texts = [name for name in texts if columns.get(name) == TEXT]

    def batches(self) -> Iterator[pa.RecordBatch]:
        for _, pieces in scan_metadata(self._dataset, self._batch):
            for keys, columns in pieces:
                named = self.note_keys(keys)
                batch = pa.RecordBatch.from_pydict({KEY: named, **columns})
                yield batch.filter(pc.not_equal(named, b""))

    def _batch(self, some: MetadataBlock) -> tuple[pa.Array, dict[str, pa.Array]]:
        facts: list[Mapping[str, Any]] = [one or {} for one in some.facts]
        found: dict[str, pa.Array] = {}
        for name, dtype in self.columns.items():
            missing = np.nan if dtype == DTYPES[NUMBER] else 0
            found[name] = pa.array(np.array([one.get(name, missing) for one in facts], dtype))
        for name in self.texts:
            found[name] = pa.array(encode_keys([str(one.get(name, "")) for one in facts]), BYTES)
        return pa.array(encode_keys(some.keys), BYTES), found

    def values(self, batch: pa.RecordBatch) -> tuple[Columns, dict[str, pa.Array]]:
        numbers = {n: batch.column(n).to_numpy(zero_copy_only=False) for n in self.columns}
        return numbers, {name: batch.column(name) for name in self.texts}
