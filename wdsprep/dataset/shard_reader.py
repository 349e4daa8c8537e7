"""Reading samples of a shard, on a local disk or over a network, at what each question costs.

    offsets   where samples begin: the index, one request, 8 bytes a sample
    keys      the first header of each sample: 512 bytes, over a network a request
    sample    a request with all of it, or one for each of a few members
    walk      of all samples what is wanted of their members, from header to header
    json      of all samples, in the same way

`HashedTape` reads every byte of a shard, and makes its digest. A shard of scores is a table, or, if
embeddings are kept, a tar of arrays with a table beside it: `ScoreReader` makes the json of a
sample of its row.

Json and caption stand at the ends of samples, behind an image or arrays that nobody wants. From S3,
one read costs the processor half a millisecond, and as long brings a megabyte of a range that is
read anyway (the figures are in `store.s3.reads`). On a network that brings each of the threads
100 MB/s, and answers after some ten milliseconds, the two are even at a few hundred KB; with 32
requests at once, of 20 ms each, beside a stream of 400 MB/s, at `LARGE_NBYTES`. So over a network
the ends come alone where samples are larger, and else the whole shard.

What is wrong is raised as a `DamageError` with its place; whoever reads adds what to do about it.
"""

import os
import struct
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from wdsprep.dataset.chunks import Chunks
from wdsprep.dataset.damage import UNLIKE_RECEIPT, naming_place
from wdsprep.dataset.file_names import index_name, is_table, table_name
from wdsprep.dataset.manifest import Shard
from wdsprep.dataset.sample_table import KEY, ROW, read_table, table_columns
from wdsprep.dataset.samples import facts_bytes
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.settings import Settings, is_scored
from wdsprep.dataset.tar import BLOCK, END
from wdsprep.dataset.tar.members import (
    BadSampleError,
    Tape,
    decode_index,
    members,
    name_of,
    split_member,
    truncated,
)
from wdsprep.dataset.tar.read import ChunkTape, TarSample, Wants, open_tape, scan
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import DamageError, NotFoundError
from wdsprep.store.base import Store, check_name
from wdsprep.store.local import open_file

if TYPE_CHECKING:
    import pyarrow as pa

Offsets: TypeAlias = NDArray[np.int64]

LARGE_NBYTES = 256 << 10
"""The bytes of an average sample from which a shard counts as large: over a network only the ends
of its samples are read."""
TAIL_NBYTES = 8 << 10
"""The bytes read at the end of a sample over a network, where a second request costs more."""
WINDOW_NBYTES = 4 << 10  # read at least, where a few bytes are asked for


class ShardSize(Protocol):
    """The name and the size of a shard; `nbytes` are 0 if nobody knows them."""

    @property
    def name(self) -> str: ...
    @property
    def samples(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class ShardReader:
    """A reader of the samples of one shard.

    Closing it closes the local file, which is opened once.
    """

    def __init__(self, store: Store, shard: ShardSize, *, is_foreign: bool = False) -> None:
        """Take a shard of a store, which `is_foreign` if another program packed it.

        Then its index cannot be compared with anything, and json may stand anywhere in a sample.
        """
        self.store, self.shard, self._is_foreign = store, shard, is_foreign
        self.place = f"{store.url}/{shard.name}"

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *_: object) -> None:
        if "_file" in self.__dict__:
            os.close(self._file[0])
            del self.__dict__["_file"]

    @cached_property
    def _file(self) -> tuple[int, int]:
        """Return the open local file, and how many bytes it has."""
        return open_file(f"{self.store.root}/{check_name(self.shard.name)}")

    @property
    def threads(self) -> int:
        return 1 if self.store.root else self.store.readers

    def _read(self, start: int, nbytes: int) -> bytes:
        """Return so many bytes of the tar, or fewer if it ends."""
        return self.store.read(self.shard.name, start=start, nbytes=nbytes)

    # --- where they are
    @cached_property
    def offsets(self) -> Sequence[int]:
        """Return where each sample begins, and last where the samples end.

        Raise DamageError if the index is missing, damaged, or does not fit the shard.
        """
        name, nbytes = index_name(self.shard.name), self.shard.nbytes
        offsets: Sequence[int] = ()
        with suppress(NotFoundError, DamageError):
            data = self.store.read(name)
            if self._is_foreign:
                offsets = struct.unpack_from(f"<{len(data) // 8}Q", data)
            else:
                offsets = decode_index(data, name)
        is_of_size = not nbytes or offsets[-1:] == (nbytes - len(END),)
        if len(offsets) != self.shard.samples + 1 or not is_of_size:
            raise DamageError(self.place, f"{name} is not its index")
        return offsets

    def span(self, number: int) -> tuple[int, int]:
        """Return where a sample begins and ends.

        That takes 16 bytes of the index, unless the index has been read.
        """
        if "offsets" in self.__dict__:
            return self.offsets[number], self.offsets[number + 1]
        name = index_name(self.shard.name)
        data = self.store.read(name, start=8 * number, nbytes=16)
        if len(data) == 16:
            start, end = struct.unpack("<2Q", data)
            if start % BLOCK == 0 and start < end <= (self.shard.nbytes or end):
                return start, end
        raise DamageError(f"{self.store.url}/{name}", f"it has no sample {number:,}")

    @property
    def sizes(self) -> Offsets:
        """Return how many bytes each sample takes."""
        ends = np.array(self.offsets, np.int64)
        return ends[1:] - ends[:-1]

    # --- by their keys
    def keys(self, numbers: Iterable[int] | None = None) -> Generator[str, None, None]:
        """Yield the keys of all samples, or of those with these numbers, in their order.

        Over a network many are read at a time.
        """
        starts = self.offsets[:-1] if numbers is None else map(self.offsets.__getitem__, numbers)
        return map_ahead(self.key_at, starts, self.threads)

    def key_at(self, start: int) -> str:
        """Return the key of the sample that begins at this byte."""
        header = b""
        if self.store.root:  # opened once, for thousands of them
            with suppress(OSError):
                header = os.pread(self._file[0], BLOCK, start)
        header = header or self._read(start, BLOCK)  # or says why it cannot be read
        split = split_member(name_of(header)) if len(header) == BLOCK else None
        if split is None:
            raise DamageError(self.place, f"no sample begins at byte {start:,}")
        return split[0]

    # --- some of them
    def sample(self, number: int, *, only: Collection[str] = ()) -> TarSample:
        """Return a sample with all of its members, or with `only` these."""
        start, end = self.span(number)
        held = [] if only else [(0, self._read(start, end - start))]
        tape = self._tape(end - start, held, start=start)
        with naming_place(self.place):
            sample = _read_members(tape, only) if only else next(scan(tape), None)
            if isinstance(sample, BadSampleError):
                raise sample
        if sample is None:
            raise DamageError(self.place, f"sample {number:,} has no member")
        return replace(sample, start=start)

    def samples(self, numbers: Collection[int]) -> Generator[TarSample, None, None]:
        """Yield samples whole, by their numbers, in order; over a network many are read at once."""
        if numbers:
            _ = self.offsets  # one request before all others
        return map_ahead(self.sample, numbers, self.threads, most=self.store.readers)

    # --- all of them, from header to header
    def walk(self, wants: Wants) -> Iterator[TarSample]:
        """Yield all samples with those of their members that `wants` accepts; no other one is read.

        Without all bytes there is no digest to be compared with the receipt's. So index and headers
        have to agree: where each sample begins, and how many there are. Over a network the end of
        each sample is a request, which brings the next one's first header.
        """
        starts = iter(self.offsets)
        with self._tape_of_ends() as tape:
            for sample in scan(tape, wants=wants):
                if isinstance(sample, BadSampleError):
                    raise DamageError(self.place, str(sample), sample.key)
                if sample.start != next(starts, -1):
                    raise DamageError(self.place, f"its index has {sample.key} at another place")
                yield sample
        if len([*starts]) != 1:
            raise DamageError(self.place, "its index has other samples")

    def json(self) -> Iterator[tuple[str, bytes | None]]:
        """Yield the key and the json of each sample, which is b"" if it has none.

        In a tar of another program, a sample with a field twice has no key, and None for its json.
        """
        left = self.shard.samples
        with self._tape_of_ends() as tape:
            for sample in scan(tape, wants=lambda name, *_: name == "json"):
                if (left := left - 1) < 0:
                    break
                if isinstance(sample, TarSample):
                    yield sample.key, sample.fields.get("json", b"")
                elif self._is_foreign and sample.code == "repeated_field":
                    yield "", None
                else:
                    raise DamageError(self.place, str(sample), sample.key)
        if left:
            raise DamageError(self.place, "its index has other samples")

    @contextmanager
    def _tape_of_ends(self) -> Iterator[Tape]:
        """Open a tape of the tar for reads of the ends of samples.

        Over a network these alone come where samples are large, and else everything.
        """
        nbytes = self.offsets[-1]
        if self.store.root or nbytes <= LARGE_NBYTES * self.shard.samples:
            with open_tape(self.store, self.shard.name, expected=nbytes + len(END)) as tape:
                yield tape
            return
        ends = [(max(a, b - TAIL_NBYTES), b + BLOCK) for a, b in pairwise(self.offsets)]
        last = (self.offsets[-1], self.offsets[-1] + len(END))

        def bring(part: tuple[int, int]) -> tuple[int, bytes]:
            start, end = part
            return start, self._read(start, end - start)

        parts = map_ahead(bring, chain([(0, BLOCK)], ends, [last]), self.threads, most=self.threads)
        with closing(parts):
            yield self._tape(last[1], parts)

    def _tape(self, nbytes: int, parts: Iterable[tuple[int, bytes]], *, start: int = 0) -> Tape:
        """Return a tape, which reads by offsets, of so many bytes of the tar from `start` on.

        Parts of these that follow one another are there already; each comes with where it begins.
        What is in none of them is read, a little more than is asked for. Behind the last byte is
        the end of a tar.
        """
        rest = iter(chain(parts, [(nbytes, END)]))
        part = window = (0, b"")

        def at(offset: int, wanted: int) -> bytes:
            nonlocal part, window
            while offset >= part[0] + len(part[1]):
                if (following := next(rest, None)) is None:
                    return b""
                part = following
            for begin, data in (part, window):
                inside = offset - begin
                if 0 <= inside <= len(data) - wanted:
                    return data[inside : inside + wanted]
            here = max(0, min(max(wanted, WINDOW_NBYTES), nbytes - offset))
            window = offset, self._read(start + offset, here)
            return window[1][:wanted]

        return at


def _read_members(at: Tape, only: Collection[str]) -> TarSample | None:
    """Return the first sample of a tar with the members in `only`, and read no further than these.

    Return None if no member belongs to a sample.
    """
    sample: TarSample | None = None
    for path, start, data_start, nbytes, target in members(at):
        if (split := split_member(path)) and not target:
            key, name = split
            sample = sample or TarSample(key=key, start=start)
            if name in only:
                sample.fields[name] = data = at(data_start, nbytes)
                if len(data) < nbytes:
                    raise truncated(data_start, path)
            if sample.fields.keys() >= set(only):
                break
    return sample


class ScoreReader(ShardReader):
    """A reader of a shard of scores. The json of a sample is made of its row."""

    def __init__(self, store: Store, shard: Shard, settings: Settings) -> None:
        super().__init__(store, shard)
        self._settings, self._digest = settings, shard.digest
        self._has_tar = not is_table(shard.name)

    @cached_property
    def table(self) -> "pa.Table":
        """Return the table. Raise DamageError if digest, columns or rows are not the shard's."""
        place = f"{self.store.url}/{table_name(self.shard.name)}"
        data = self.store.read(table_name(self.shard.name))
        if not self._has_tar and hex_digest(data) != self._digest:
            raise DamageError(place, UNLIKE_RECEIPT)
        columns, rows = table_columns("latents", self._settings), self.shard.samples
        return read_table(data, columns, what=place, rows=rows)

    def facts(self, numbers: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """Return what the rows of samples say, without nulls and without their positions."""
        table = self.table if numbers is None else self.table.take(np.fromiter(numbers, np.int64))
        rows = table.drop_columns([ROW]).to_pylist()
        return [{name: value for name, value in row.items() if value is not None} for row in rows]

    def sample(self, number: int, *, only: Collection[str] = ()) -> TarSample:
        return next(self._read_samples([number], only))

    def samples(self, numbers: Collection[int]) -> Generator[TarSample, None, None]:
        if self._has_tar and numbers:
            _ = self.offsets  # one request before all others
        return self._read_samples(numbers, ())

    def _read_samples(
        self, numbers: Collection[int], only: Collection[str]
    ) -> Generator[TarSample, None, None]:
        rows = self.facts(numbers)
        samples: Iterable[TarSample] = (TarSample(key=row[KEY], start=0) for row in rows)
        arrays = [name for name in only if name != "json"]
        if self._has_tar and (arrays or not only):
            read = partial(super().sample, only=arrays)
            samples = map_ahead(read, numbers, self.threads, most=self.store.readers)
        for sample, row in zip(samples, rows, strict=True):
            if sample.key != row[KEY]:
                raise DamageError(self.place, "its table has another key", sample.key)
            sample.fields["json"] = facts_bytes(row)
            yield sample


def open_shard(store: Store, shard: Shard, settings: Settings) -> ShardReader:
    """Return a reader of a shard of a dataset with these settings."""
    is_of_scores = is_scored(settings)
    return ScoreReader(store, shard, settings) if is_of_scores else ShardReader(store, shard)


class HashedTape(ChunkTape):
    """A tape, which reads a tar by offsets, over a shard whose bytes are all hashed.

    Each byte is read once.
    """

    def __init__(self, store: Store, shard: ShardSize) -> None:
        self._place = f"{store.url}/{shard.name}"
        self._hash = blake3()
        watch = self._hash.update
        self._chunks = Chunks(store, shard.name, watch=watch, expected=shard.nbytes)
        super().__init__(self._chunks.next)

    def __enter__(self) -> "HashedTape":
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks.close()

    def digest(self) -> str:
        """Return the digest of the whole shard, of which the rest is read first."""
        for _ in self.rest():
            pass
        self._chunks.close()
        return self._hash.hexdigest()

    def check(self, digest: str) -> None:
        """Raise an error if the shard has another digest than this one, which its receipt says."""
        if self.digest() != digest:
            raise DamageError(self._place, UNLIKE_RECEIPT)
