"""The captions and facts of an image shard that pack made, without its images.

On a local disk its headers are walked, a positioned read for each sample brings json and txt with
the next sample's header, and no byte of an image is read. On S3 each sample is a request where
images are large; where they are small, it takes less to read all of the shard and drop them
(`wdsprep.dataset.tar.ends` says why).

Where not all of a shard was read there is no digest of it that could be compared with that of its
receipt. Then its size is, and that index and headers agree: where a sample begins, and how many
there are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain, pairwise

from wdsprep.dataset.ahead import ahead
from wdsprep.dataset.names import index_name
from wdsprep.dataset.rejects import Refusal
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.tar import BLOCK, END
from wdsprep.dataset.tar.ends import LARGE_NBYTES
from wdsprep.dataset.tar.index import decode_index
from wdsprep.dataset.tar.members import BadSampleError, Tape
from wdsprep.dataset.tar.read import open_tape, scan
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.sources.tars import TarsSource
from wdsprep.store.base import Store

TAIL_NBYTES = 1 << 13
"""What is asked for of a sample: json, txt and their headers seldom have more."""


def is_read_in_parts(store: Store, shard: ImageShard) -> bool:
    """Whether less than all of it is read for its texts."""
    item = shard.item
    is_large = item.nbytes >= LARGE_NBYTES * max(1, item.samples)
    return not shard.is_foreign and (store.root is not None or is_large)


def read_texts(
    source: TarsSource, store: Store, shard: ImageShard
) -> Iterator[tuple[str, Sample | Refusal]]:
    """The samples with their keys, in order, with images that are empty; a FormatError where the
    shard is not what its index and its dataset say."""
    name, nbytes = shard.item.name, shard.item.nbytes
    sizes = {entry.name: entry.nbytes for entry in store.list(name)}
    if name not in sizes:
        raise NotFoundError(name)
    if sizes[name] != nbytes:
        raise FormatError("another size")
    offsets = decode_index(store.read(index_name(name)), index_name(name))
    with _tape(store, name, nbytes, offsets) as tape:
        starts = iter(offsets)
        for sample in scan(tape, wants=source.wants):
            if isinstance(sample, BadSampleError):
                raise FormatError(str(sample))
            if sample.start != next(starts, -1):
                raise FormatError(f"its index has {sample.key} at another place")
            for row in source.rows(sample, name):
                yield sample.key, row
        if len([*starts]) != 1:
            raise FormatError("its index has other samples")


@contextmanager
def _tape(store: Store, name: str, nbytes: int, offsets: Sequence[int]) -> Iterator[Tape]:
    if store.root:
        with open_tape(store, name) as tape:
            yield tape
        return
    ends = [(max(a, b - TAIL_NBYTES), b + BLOCK) for a, b in pairwise(offsets)]
    last = [(offsets[-1], offsets[-1] + len(END))]
    parts = chain([(0, BLOCK)], ends, last)

    def read(start: int, count: int) -> bytes:
        return store.read(name, start=start, nbytes=count)

    def bring(part: tuple[int, int]) -> tuple[int, bytes]:
        start, end = part
        return start, read(start, end - start)

    with closing(ahead(bring, parts, store.readers, most=store.readers)) as coming:
        yield _Tails(nbytes, coming, read).at


class _Tails:
    """A tape over parts of a file that are asked for ahead; what is in none of them is read when it
    is wanted."""

    def __init__(
        self,
        nbytes: int,
        coming: Iterator[tuple[int, bytes]],
        read: Callable[[int, int], bytes],
    ) -> None:
        """`coming` are parts, each with where it begins; `read` takes a start and a length."""
        self._nbytes, self._coming, self._read = nbytes, coming, read
        self._start, self._data = 0, b""

    def at(self, offset: int, nbytes: int) -> bytes:
        if offset >= self._nbytes:
            return b""
        while offset >= self._start + len(self._data) and self._advance():
            pass
        inside = offset - self._start
        if 0 <= inside <= len(self._data) - nbytes:
            return self._data[inside : inside + nbytes]
        return self._read(offset, min(nbytes, self._nbytes - offset))

    def _advance(self) -> bool:
        """Go on to the next part, if there is one."""
        part = next(self._coming, None)
        if part is None:
            return False
        self._start, self._data = part
        return True
