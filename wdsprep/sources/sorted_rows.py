"""Rows sorted by their first column, however many there are, in bounded memory.

They are sorted by Arrow in *runs* of so many bytes, which wait in a file without a name; then the
runs are merged, some blocks at a time. Where SQLite sorts a table of them, reading 500,000 captions
takes 4.6 s of processor time, with this 2.8 s, of which SQLite takes over a third to write them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from wdsprep.store.spool import Place, Spool

RUN_NBYTES = 32 << 20
BLOCK_NBYTES = 512 << 10
SORTED_THERE = "rows that are sorted wait there, and take three times their size"


@contextmanager
def sorted_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[Iterator[pa.RecordBatch]]:
    """Read all rows, then yield them sorted by the first column, in bounded memory.

    The first column holds texts or bytes. Equal rows keep their order. A column that a batch
    lacks is null there.
    """
    with closing(Spool(SORTED_THERE)) as spool:
        runs = [_Run(spool, deque(blocks)) for blocks in _write_runs(spool, batches)]
        yield _merge(runs)


def _merge(runs: "list[_Run]") -> Iterator[pa.RecordBatch]:
    while runs := [run for run in runs if run.fill()]:
        ends = [run.last for run in runs if run.blocks]
        parts = [run.take_up_to(min(ends) if ends else None) for run in runs]
        yield _sort([part for part in parts if len(part)])


def _sort(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Merge a few batches, each of them sorted, into one that is sorted by the first column.

    Equal rows keep their order.
    """
    whole = _concatenate(parts)
    return whole if len(parts) == 1 else whole.take(pc.sort_indices(whole.column(0)))


def _concatenate(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    tables = [pa.Table.from_batches([part]) for part in parts]
    return pa.concat_tables(tables, promote_options="default").combine_chunks().to_batches()[0]


def _write_runs(spool: Spool, batches: Iterable[pa.RecordBatch]) -> Iterator[list[Place]]:
    """Write runs of sorted rows, and yield the places of the blocks of each run."""
    parts: list[pa.RecordBatch] = []
    nbytes = 0
    for batch in batches:
        if not len(batch):
            continue
        parts.append(batch)
        nbytes += batch.nbytes
        if nbytes >= RUN_NBYTES:
            yield _write_run(spool, parts)
            parts, nbytes = [], 0
    if parts:
        yield _write_run(spool, parts)


def _write_run(spool: Spool, parts: Sequence[pa.RecordBatch]) -> list[Place]:
    whole = _concatenate(parts)
    order = pc.sort_indices(whole.column(0))
    rows = max(1, len(whole) * BLOCK_NBYTES // max(1, whole.nbytes))
    blocks = []
    for start in range(0, len(whole), rows):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, whole.schema) as stream:
            stream.write_batch(whole.take(order[start : start + rows]))
        blocks.append(spool.put(memoryview(sink.getvalue())))
    return blocks


@dataclass(slots=True)
class _Run:
    """The rest of a sorted run: a part of a block, and the places of the blocks after it."""

    spool: Spool
    blocks: deque[Place]
    here: pa.RecordBatch | None = None

    def fill(self) -> bool:
        """Read the next block if none is at hand. Return whether any rows are left."""
        if not self.here and self.blocks:
            data = self.spool.get(self.blocks.popleft())
            self.here = pa.ipc.open_stream(data).read_next_batch()
        return bool(self.here)

    @property
    def last(self) -> Any:
        assert self.here is not None  # noqa: S101  for mypy: `fill` said so
        return self.here.column(0)[-1].as_py()

    def take_up_to(self, end: Any) -> pa.RecordBatch:
        """Remove and return the rows of the current block whose first column is at most `end`.

        None takes all of them.
        """
        assert self.here is not None  # noqa: S101  for mypy: `fill` said so
        whole, count = self.here, len(self.here)
        if end is not None:
            names = whole.column(0)
            reached = pc.less_equal(names, pa.scalar(end, names.type))
            count = pc.sum(reached).as_py()
        self.here = whole.slice(count)
        return whole.slice(0, count)
