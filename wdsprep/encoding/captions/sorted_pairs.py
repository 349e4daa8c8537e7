"""Names and captions sorted by name, however many there are, in bounded memory (`sorted_rows`)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from wdsprep.sources.sorted_rows import sorted_rows
from wdsprep.text import EXAMPLES

TYPE = pa.large_string()  # in a block, captions may have more than 2 GB together
SCHEMA = pa.schema([("name", TYPE), ("caption", TYPE)])
Pairs = tuple[Sequence[str], Sequence[str]]
"""Names, and as many captions."""


@dataclass(kw_only=True, slots=True)
class SortedPairs:
    """An iterable over the names, sorted, with the first caption of each, in batches.

    An iteration updates `digest` with them. Afterwards `names` is the number of different names,
    `twice` the number of names that occurred more than once, and `examples` are some of the latter.
    """

    pairs: Iterable[Pairs]
    digest: blake3
    names: int = 0
    twice: int = 0
    examples: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Pairs]:
        with sorted_rows(map(_make_batch, self.pairs)) as batches:
            yield from self._drop_repeated(batches)

    def _drop_repeated(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Pairs]:
        last, was_twice = None, False
        for batch in batches:
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
            self.digest.update(_bytes_to_digest(left))
            self.names += len(left)
            yield left.column("name").to_pylist(), left.column("caption").to_pylist()


def _make_batch(pairs: Pairs) -> pa.RecordBatch:
    return pa.record_batch([pa.array(some, TYPE) for some in pairs], schema=SCHEMA)


def _bytes_to_digest(batch: pa.RecordBatch) -> bytes:
    """Return the bytes of names and captions for a digest, each pair as in `3,5:abcabcde`.

    Its lengths come first, so no other pairs have the same bytes.
    """
    names, captions = batch.columns
    lengths = [pc.cast(pc.utf8_length(some), TYPE) for some in (names, captions)]
    comma, colon, nothing = (pa.scalar(text, TYPE) for text in (",", ":", ""))
    before = pc.binary_join_element_wise(*lengths, comma)
    whole = pc.binary_join_element_wise(before, names, colon)
    whole = pc.binary_join_element_wise(whole, captions, nothing)
    nbytes = pc.sum(pc.binary_length(whole)).as_py() or 0
    return memoryview(whole.buffers()[2])[:nbytes].tobytes() if nbytes else b""
