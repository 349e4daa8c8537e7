"""Names and captions sorted by name, however many there are, in bounded memory.

They are sorted by Arrow in *runs* of so many bytes, which wait in a file without a name; then the
runs are merged, some blocks at a time. Where SQLite sorts a table of them, reading 500,000 captions
takes 4.6 s of processor time, with this 2.8 s, of which SQLite takes over a third to write them.
"""

import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from wdsprep.text import EXAMPLES

RUN_NBYTES = 32 << 20
BLOCK_NBYTES = 512 << 10
TYPE = pa.large_string()  # in a block, captions may have more than 2 GB together
SCHEMA = pa.schema([("name", TYPE), ("caption", TYPE)])
Pairs = tuple[Sequence[str], Sequence[str]]
"""Some names, and their captions."""
Block = tuple[int, int]
"""Where in the file it begins, and its bytes."""


@dataclass(kw_only=True, slots=True)
class SortedPairs:
    """The first caption of each name, sorted by name; and what is told of all of them, once they
    have been gone through."""

    pairs: Iterable[Pairs]
    digest: blake3
    names: int = 0
    twice: int = 0
    examples: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Pairs]:
        last, was_twice = None, False
        for batch in _merged(self.pairs):
            names = batch.column("name")
            is_same = np.ones(len(names), np.bool_)
            is_same[0] = names[0].as_py() == last
            same = pc.equal(names[1:], names[:-1])
            is_same[1:] = same.to_numpy(zero_copy_only=False)
            is_second = is_same & ~np.append(was_twice, is_same[:-1])
            self.twice += int(is_second.sum())
            for number in np.flatnonzero(is_second)[: EXAMPLES - len(self.examples)]:
                self.examples.append(names[int(number)].as_py())
            last, was_twice = names[-1].as_py(), bool(is_same[-1])
            left = batch.filter(pa.array(~is_same)) if is_same.any() else batch
            self.digest.update(_said(left))
            self.names += len(left)
            yield left.column("name").to_pylist(), left.column("caption").to_pylist()


def _said(batch: pa.RecordBatch) -> bytes:
    """Each name and caption behind the lengths of both: `3,5:abcabcde`."""
    names, captions = batch.columns
    lengths = [pc.cast(pc.utf8_length(some), TYPE) for some in (names, captions)]
    comma, colon, nothing = (pa.scalar(text, TYPE) for text in (",", ":", ""))
    before = pc.binary_join_element_wise(*lengths, comma)
    whole = pc.binary_join_element_wise(before, names, colon)
    whole = pc.binary_join_element_wise(whole, captions, nothing)
    nbytes = pc.sum(pc.binary_length(whole)).as_py() or 0
    return memoryview(whole.buffers()[2])[:nbytes].tobytes() if nbytes else b""


def _merged(pairs: Iterable[Pairs]) -> Iterator[pa.RecordBatch]:
    """Some at a time; where rows have one name, the first of them is before the others."""
    with tempfile.TemporaryFile(prefix="wdsprep-") as file:
        runs = [_Run(file, deque(blocks)) for blocks in _written(file, pairs)]
        while runs := [run for run in runs if run.fill()]:
            ends = [run.last for run in runs if run.blocks]
            parts = [run.taken(min(ends) if ends else None) for run in runs]
            yield _in_order([part for part in parts if len(part)])


def _in_order(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """What Arrow sorts keeps the order of what is equal."""
    whole = pa.Table.from_batches(parts, SCHEMA).combine_chunks().to_batches()[0]
    return whole if len(parts) == 1 else whole.take(pc.sort_indices(whole.column("name")))


def _written(file: BinaryIO, pairs: Iterable[Pairs]) -> Iterator[list[Block]]:
    """The blocks of each run."""
    parts: list[pa.RecordBatch] = []
    nbytes = 0
    for names, captions in pairs:
        arrays = [pa.array(some, TYPE) for some in (names, captions)]
        parts.append(pa.record_batch(arrays, schema=SCHEMA))
        nbytes += parts[-1].nbytes
        if nbytes >= RUN_NBYTES:
            yield _run_of(file, parts)
            parts, nbytes = [], 0
    if any(map(len, parts)):
        yield _run_of(file, parts)


def _run_of(file: BinaryIO, parts: Sequence[pa.RecordBatch]) -> list[Block]:
    whole = pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
    order = pc.sort_indices(whole.column("name"))
    rows = max(1, len(whole) * BLOCK_NBYTES // max(1, whole.nbytes))
    blocks = []
    for start in range(0, len(whole), rows):
        block = whole.take(order[start : start + rows])
        begin = file.tell()
        with pa.ipc.new_stream(file, SCHEMA) as stream:
            stream.write_batch(block)
        blocks.append((begin, file.tell() - begin))
    return blocks


@dataclass(slots=True)
class _Run:
    """What is left of a run: a part of a block, and the places of those after it."""

    file: BinaryIO
    blocks: deque[Block]
    here: pa.RecordBatch = field(default_factory=lambda: pa.RecordBatch.from_pylist([], SCHEMA))

    def fill(self) -> bool:
        """Have a block here, if there is one."""
        if not len(self.here) and self.blocks:
            start, nbytes = self.blocks.popleft()
            self.file.seek(start)
            self.here = pa.ipc.open_stream(self.file.read(nbytes)).read_next_batch()
        return len(self.here) > 0

    @property
    def last(self) -> str:
        name: str = self.here.column("name")[-1].as_py()
        return name

    def taken(self, end: str | None) -> pa.RecordBatch:
        """What is here up to this name, which is here no more."""
        whole = self.here
        count = len(whole)
        if end is not None:
            reached = pc.less_equal(whole.column("name"), pa.scalar(end, TYPE))
            count = pc.sum(reached).as_py()
        self.here = whole.slice(count)
        return whole.slice(0, count)
