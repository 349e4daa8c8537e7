"""Columns that are joined to the samples of a dataset, laid out in the order of these samples.

They are those of a table of others or of a dataset of scores. `join_columns` reads them once, and
keeps them in a file that is mapped (`kept_file`): for each column of numbers an array with a value
for each sample, and a mask of the samples that have a row. Batches take numbers from there, by the
places of samples, and conditions the columns that they name, also those of texts.

Which columns there are stands in a small file of its own. A selection that was kept needs no more
than that, and so reads none of the columns, of which 10 million samples have 90 MB.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from wdsprep.dataset.kept_file import KeptFile
from wdsprep.dataset.random_numbers import Ints

if TYPE_CHECKING:
    import pyarrow as pa

    from wdsprep.tables.column_conditions import Mask

HAS_ROW, STARTS = "has row", "starts"
"""Arrays of the file: the mask, and the place of the first sample of each shard."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LaidOut:
    """Columns of what lies at `url`, laid out in a `file` in the order of the samples of a dataset.

    `numbers` has the dtype of each column of numbers, `texts` lists the columns of texts, and
    `offered` all columns that there are. `digest` is that of what was joined, whatever
    it was joined to. `open_file` opens the file, and makes it again if it is damaged.
    """

    url: str
    open_file: Callable[[], KeptFile]
    numbers: Mapping[str, str]
    texts: Sequence[str]
    offered: Sequence[str]
    digest: str

    @cached_property
    def file(self) -> KeptFile:
        return self.open_file()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, with the file opened: how to make it is known here alone."""
        return {**self.__dict__, "file": self.file, "open_file": None}

    @property
    def has_row(self) -> "Mask":
        return self.file.arrays[HAS_ROW]

    def column(self, name: str) -> NDArray[Any]:
        """Return the values of a column for all samples: 0 for a sample without a row."""
        return self.file.arrays[f"numbers {name}"]

    def values_of(self, shards: Ints, indices: Ints) -> dict[str, NDArray[Any]]:
        """Return for each column the values of samples, given by their shards and places there."""
        places = self._starts[shards] + indices
        return {name: self.column(name)[places] for name in self.numbers}

    def rows_of(self, shard: int) -> slice:
        """Return the places of the samples of a shard among all."""
        return slice(int(self._starts[shard]), int(self._starts[shard + 1]))

    def table(self, rows: slice, names: Collection[str]) -> "pa.Table":
        """Return those of these columns that there are, for the samples at some places."""
        import pyarrow as pa  # which processes that only serve batches do not need
        from pyarrow import compute as pc

        lacking = ~self.has_row[rows]
        own = [name for name in dict.fromkeys(names) if name in self.numbers]
        columns = {name: pa.array(self.column(name)[rows], mask=lacking) for name in own}
        for name in set(names) & {*self.texts}:
            ends = self.file.arrays[f"ends {name}"][rows.start : rows.stop + 1]
            data = self.file.arrays[f"texts {name}"][ends[0] : ends[-1]]
            buffers = [None, pa.py_buffer(ends - ends[0]), pa.py_buffer(data)]
            texts = pa.Array.from_buffers(pa.large_string(), len(ends) - 1, buffers)
            columns[name] = pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)
        return pa.table(columns)

    @property
    def _starts(self) -> Ints:
        return self.file.arrays[STARTS]
