"""The json and key of every sample of a dataset, without reading its images or arrays.

On a local disk the index says where each sample ends, and the json stands near there, before the
caption: one read of the last 4 KB brings it, many in a system call. Where more is needed, or
another program packed the tar, the sample's headers are walked.

From S3, shards whose samples have `LARGE_NBYTES` or less come whole, in ranges of 8 MB; of others
come the ends alone, one request each (`wdsprep.dataset.tar.ends` says why).

A thread reads a shard, piece by piece, so memory is bounded by threads, not by shards.

What is found decides the order, which a dataset has by what its manifest says. So a sample that
cannot be read here is an error, or another machine would have another order; but for tars without a
manifest, which are what they hold.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from wdsprep.cpus import usable_cpus
from wdsprep.dataset.ahead import ahead
from wdsprep.dataset.aio import address_of, read_all
from wdsprep.dataset.chance import Ints
from wdsprep.dataset.damage import verify_step
from wdsprep.dataset.names import index_name
from wdsprep.dataset.open_shards import OPEN_SHARDS, OpenShard, OpenShards
from wdsprep.dataset.samples import FROM_OUTSIDE, parse_object
from wdsprep.dataset.tar import BLOCK
from wdsprep.dataset.tar.ends import LARGE_NBYTES, near_the_end, walked
from wdsprep.errors import FormatError, NotFoundError, ShortReadError, UsageError
from wdsprep.loading.catalog import Dataset, bring_back
from wdsprep.store.base import RemoteStore
from wdsprep.store.local import open_file
from wdsprep.store.places import ANY_PLACE
from wdsprep.text import command, plural

if TYPE_CHECKING:
    from wdsprep.loading.joining import Joined

END_NBYTES = 4 << 10  # of a sample: json and caption are mostly in there
SAMPLES_AT_ONCE = 1024  # samples
PIECE_NBYTES = 8 << 20
FETCHERS = 16  # shards of S3 that are read at a time
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class SomeFacts:
    """Neighbours in a shard: their keys, and what the json of each says; None where it is damaged
    or lacking, and no key where the sample is. `damaged` are the places of these in the lists."""

    shard: int
    first: int
    keys: list[str]
    facts: list[dict[str, Any] | None]
    damaged: list[int]


def look_at_all(
    dataset: Dataset, found: Callable[[SomeFacts], Found], *, parses: bool = True
) -> Iterator[tuple[int, list[Found]]]:
    """What is found in each piece of each shard, shard by shard; in threads. Without `parses`, it
    is keys alone that are looked at. An error at the end, where any sample of ours is damaged."""
    whole = dataset.files
    damaged: list[tuple[int, int]] = []
    reader = _Reader(whole, parses=parses)
    threads = max(2, usable_cpus()) if whole.store.root else FETCHERS

    def look(shard: int) -> tuple[int, list[Found]]:
        made = []
        for some in reader.pieces(shard):
            made.append(found(some))
            damaged.extend((shard, some.first + number) for number in some.damaged)
        return shard, made

    yield from ahead(look, range(len(whole.names)), threads)
    if damaged and whole.kind != "tars":
        raise _unknown(whole, damaged)


def _unknown(whole: Dataset, damaged: Sequence[tuple[int, int]]) -> FormatError:
    """Of samples, by shard and number, it is not known whether they are served."""
    shard, number = min(damaged)
    what = plural(len(damaged), "sample is", "samples are")
    return FormatError(
        f"{whole.store.url}: {what} damaged, first number {number} of {whole.names[shard]}, "
        "and which samples are served depends on what all say"
    ).with_next_step(verify_step(whole.store.url))


class FactsBeside:
    """What the json of samples says that stand beside others, for any number of threads. A shard is
    read as a whole: where samples have moved, neighbours there stand anywhere here."""

    def __init__(self, joined: "Joined") -> None:
        self._joined = joined
        self._reader = _Reader(joined.dataset.whole, parses=True)
        self._of_shard = lru_cache(FETCHERS)(self._read_shard)

    def of(self, shard: int, numbers: Ints) -> list[dict[str, Any] | None]:
        """By where the others are; None where there is none."""
        own, places = self._joined.located(np.full(len(numbers), shard), numbers)
        if not len(own) or own[0] < 0:
            return [None] * len(numbers)
        facts = self._of_shard(int(own[0]))
        return [facts[place] if place < len(facts) else None for place in places.tolist()]

    def _read_shard(self, shard: int) -> list[dict[str, Any] | None]:
        pieces = list(self._reader.pieces(shard))
        damaged = [(shard, some.first + number) for some in pieces for number in some.damaged]
        if damaged:
            raise _unknown(self._joined.dataset, damaged)
        return [one for some in pieces for one in some.facts]


class _Reader:
    def __init__(self, dataset: Dataset, *, parses: bool) -> None:
        self._dataset, self._parses, store = dataset, parses, dataset.store
        if not (store.root or isinstance(store, RemoteStore)):
            raise UsageError(f"{store.url}: loading is from {ANY_PLACE}")
        self._store = store
        self._is_ours = dataset.kind != "tars"
        self._comes_whole = store.root is None and dataset.sample_nbytes <= LARGE_NBYTES
        self._shards = OpenShards(dataset, self._open_tar, lambda: OPEN_SHARDS, bring_back(dataset))

    def _open_tar(self, name: str) -> int:
        if self._store.root:
            return open_file(self._store.root / name)[0]
        return -1

    def pieces(self, shard: int) -> Iterator[SomeFacts]:
        if not self._dataset.sizes[shard]:
            return
        try:
            opened = self._shards.get(shard)
        except NotFoundError as error:
            what = str(error).replace(", or load with skip_missing=True", "")
            raise NotFoundError(f"{what}: all shards are looked at once") from None
        offsets = np.frombuffer(opened.offsets, np.uint64).astype(np.int64)
        first, count = 0, len(offsets) - 1
        while first < count:
            stop = min(first + SAMPLES_AT_ONCE, count)
            if self._comes_whole:
                reached = np.searchsorted(offsets, offsets[first] + PIECE_NBYTES, side="right") - 1
                stop = max(first + 1, min(stop, int(reached)))
            yield self._some(shard, opened, first, offsets[first : stop + 1])
            first = stop

    def _some(self, shard: int, opened: OpenShard, first: int, offsets: Any) -> SomeFacts:
        sizes = np.diff(offsets)
        sound = (sizes > 0) & (offsets[:-1] % BLOCK == 0) & (offsets[1:] % BLOCK == 0)
        if self._is_ours:  # what another program's tar lacks is an error where it is read
            sound &= offsets[1:] <= opened.nbytes
        ends = self._ends(shard, opened, offsets, np.where(sound, sizes, 0))
        members = [near_the_end(data) if self._is_ours else None for data in ends]
        for number, member in enumerate(members):
            if member is None and sound[number]:
                members[number] = walked(
                    partial(self._part, shard, opened, int(offsets[number])),
                    int(sizes[number]),
                    ends[number],
                )
        keys = [member[0] if member else "" for member in members]
        facts: list[dict[str, Any] | None] = [None] * len(keys)
        if self._parses:
            facts = [_parsed(member[1]) if member else None for member in members]
        asked: Sequence[Any] = facts if self._parses else members
        damaged = [number for number, one in enumerate(asked) if one is None]
        return SomeFacts(shard, first, keys, facts, damaged)

    def _ends(self, shard: int, opened: OpenShard, offsets: Any, sizes: Any) -> list[bytes]:
        """The last bytes of each sample, or all of them."""
        if self._comes_whole and sizes.all():
            buffer = bytearray(int(offsets[-1] - offsets[0]))
            self._fill(shard, opened, memoryview(buffer), int(offsets[0]))
            places = (offsets - offsets[0]).tolist()
            return [bytes(buffer[a:b]) for a, b in pairwise(places)]
        some = np.minimum(sizes, END_NBYTES)
        starts = offsets[1:] - some
        if opened.fd < 0:
            return [
                self._read(shard, start, nbytes)
                for start, nbytes in zip(starts.tolist(), some.tolist(), strict=True)
            ]
        rows = np.zeros((len(sizes), END_NBYTES), np.uint8)
        vectors = np.empty((len(sizes), 1, 2), np.uint64)
        vectors[:, 0, 0] = address_of(rows) + np.arange(len(sizes)) * END_NBYTES
        vectors[:, 0, 1] = some
        came = read_all([opened.fd] * len(sizes), starts.tolist(), vectors)
        ends = [row[:nbytes].tobytes() for row, nbytes in zip(rows, some.tolist(), strict=True)]
        for number in np.flatnonzero(came != some).tolist():  # again, to learn why
            ends[number] = self._read(shard, int(starts[number]), int(some[number]))
        return ends

    def _read(self, shard: int, start: int, nbytes: int) -> bytes:
        data = self._store.read(self._dataset.names[shard], start=start, nbytes=nbytes)
        if len(data) != nbytes:
            raise self._too_short(shard)
        return data

    def _fill(self, shard: int, opened: OpenShard, view: memoryview, start: int) -> None:
        if isinstance(self._store, RemoteStore):
            came = self._store.read_into(self._dataset.names[shard], view, start=start)
        else:
            try:
                came = os.preadv(opened.fd, [view], start)
            except OSError:
                came = 0
        if came != len(view):  # again, to learn why
            view[:] = self._read(shard, start, len(view))

    def _part(self, shard: int, opened: OpenShard, start: int, offset: int, nbytes: int) -> bytes:
        """Of the sample that begins there."""
        buffer = memoryview(bytearray(nbytes))
        self._fill(shard, opened, buffer, start + offset)
        return bytes(buffer)

    def _too_short(self, shard: int) -> ShortReadError:
        url, name = self._dataset.store.url, self._dataset.names[shard]
        mend = f"delete {index_name(name)} and run {command('index', url)}"
        short = ShortReadError(f"{url}/{name} ends before its last sample does")
        return short.with_next_step(verify_step(url) if self._is_ours else mend)


def _parsed(member: bytes) -> dict[str, Any] | None:
    """The quick way, which is that of nearly all."""
    try:
        text = member.decode()
        found, end = FROM_OUTSIDE.raw_decode(text)
        if end == len(text) and type(found) is dict:
            return found
    except (ValueError, RecursionError):
        pass
    return parse_object(member)
