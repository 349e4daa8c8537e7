"""Read the columns of a dataset of scores as rows of a table.

They stand in the json of its samples, which are read once, some at a time, for `sorted_table`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from wdsprep.dataset.score_columns import NUMBER, TEXT, WHOLE, columns_of, is_of_kind
from wdsprep.errors import FormatError
from wdsprep.loading.sample_metadata import MetadataBlock, scan_metadata
from wdsprep.loading.served_datasets import Dataset
from wdsprep.loading.table_keys import KEY, WantedColumns, encode_keys
from wdsprep.loading.table_rows import BYTES, TableRows
from wdsprep.text import brief, shown

DTYPES = {NUMBER: "<f8", WHOLE: "<i8"}


class ScoreRows(TableRows):
    """The scores of all samples as table rows."""

    def __init__(self, dataset: Dataset, wanted: WantedColumns) -> None:
        super().__init__(dataset.store.url, wanted)
        self._dataset = dataset
        self._kinds = columns_of(dataset.settings)
        self.offered = {n: DTYPES[kind] for n, kind in self._kinds.items() if kind in DTYPES}
        self.columns = wanted.choose_numbers(self.offered)
        self.texts = [name for name in sorted(wanted.named) if self._kinds.get(name) == TEXT]

    def batches(self) -> Iterator[pa.RecordBatch]:
        for _, pieces in scan_metadata(self._dataset, self._batch):
            for batch in pieces:
                self.note_keys(batch.column(KEY))
                yield batch.filter(pc.not_equal(batch.column(KEY), b"")).drop_null()

    def _batch(self, some: MetadataBlock) -> pa.RecordBatch:
        facts: list[Mapping[str, Any]] = [one or {} for one in some.facts]
        found = {KEY: pa.array(encode_keys(some.keys), BYTES)}
        for name, dtype in self.columns.items():
            values = [one.get(name) for one in facts]
            for key, value in zip(some.keys, values, strict=True):
                if value is not None and not is_of_kind(value, self._kinds[name]):
                    raise FormatError(
                        f"{self.place} has a column {name} of kind {self._kinds[name]}, but the "
                        f"sample {shown(key)} has {brief(value)} in it"
                    ).with_next_step("score again, or leave these scores out")
            found[name] = pa.array(values, pa.from_numpy_dtype(dtype))
        for name in self.texts:
            found[name] = pa.array(encode_keys([str(one.get(name, "")) for one in facts]), BYTES)
        return pa.RecordBatch.from_pydict(found)
