"""Parts of a dataset: the samples of one shape, those that a condition leaves, or both.

A part is a dataset of its own to the order: so many samples in each shard. Where these are in the
tars it alone knows (`DatasetPart.located`): neighbours from one number on, or any numbers at all,
which then lie in an array or in a file that is mapped.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.chance import Ints
from wdsprep.dataset.digests import DigestKind
from wdsprep.dataset.shapes import Size, shape_name

if TYPE_CHECKING:
    from wdsprep.dataset.kept import KeptFile, KeptWriter
    from wdsprep.loading.catalog import Dataset

SAMPLES_AT_ONCE = 1 << 20  # samples
NUMBERS = "numbers"
Numbers = NDArray[np.uint32]
"""Of samples in their tars."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Positions:
    """Some samples of each shard of a dataset, by their numbers in its tar: those of shard n stand
    from starts[n] to starts[n + 1], and rise. The digest is of all of this."""

    numbers: Numbers
    starts: Ints
    digest: str
    file: "KeptFile | None" = None

    @classmethod
    def of(cls, each: Iterable[Numbers]) -> "Positions":
        """From the numbers of each shard in turn; a shard of which nothing is wanted has none."""
        found = [np.asarray(some, np.uint32) for some in each]
        starts = np.cumsum([0, *map(len, found)])
        numbers = np.concatenate([np.empty(0, np.uint32), *found])
        digest = RunningDigest()
        digest.update(numbers)
        return cls(numbers=numbers, starts=starts, digest=digest.of(starts))

    @classmethod
    def kept_in(cls, file: "KeptFile") -> "Positions":
        """Those that `keep_positions` has left there."""
        return cls(
            numbers=file.arrays[NUMBERS],
            starts=file.arrays["starts"],
            digest=file.facts["digest"],
            file=file,
        )


def keep_positions(writer: "KeptWriter", shards: int, each: Iterable[tuple[int, Numbers]]) -> None:
    """Write them as they come: of so many shards, whose numbers come in their order, each with the
    shard that it is of, all at once or in parts."""
    counts, digest = np.zeros(shards + 1, np.int64), RunningDigest()

    def numbers() -> Iterator[Numbers]:
        for shard, some in each:
            counts[shard + 1] += len(some)
            digest.update(some)
            yield some

    writer.add(NUMBERS, "<u4", numbers())
    starts = np.cumsum(counts)
    writer.add("starts", "<i8", [starts])
    writer.facts["digest"] = digest.of(starts)


class RunningDigest:
    """Of positions, whose numbers come in parts, and where those of each shard start at the end."""

    def __init__(self) -> None:
        self._numbers = DigestKind.BLAKE3.new()

    def update(self, numbers: Numbers) -> None:
        self._numbers.update(np.ascontiguousarray(numbers, "<u4").tobytes())

    def of(self, starts: Ints) -> str:
        self._numbers.update(np.ascontiguousarray(starts, "<i8").tobytes())
        return self._numbers.hexdigest()


class DatasetPart(NamedTuple):
    """Some samples of a dataset: in which of its shards, and for each of them the number of the
    first in the tar, from which on they are neighbours. Where there are `positions`, it is the
    place of the first among these. `size` is the shape that all of them have, if it was asked;
    `file` has the positions, where they are mapped."""

    whole: "Dataset"
    shards: NDArray[np.int32]
    starts: "NDArray[np.int32] | Ints"
    positions: Numbers | None = None
    size: Size | None = None
    file: "KeptFile | None" = None

    def located(self, shards: Ints, indices: Ints) -> tuple[Ints, Ints]:
        """Where samples of the part lie: the number of the shard, and of the sample in its tar."""
        places = indices + self.starts[shards]
        if self.positions is not None:
            places = self.positions[places].astype(np.int64)
        return self.shards[shards].astype(np.int64), places


def _for_a_process(part: DatasetPart) -> Any:
    """Positions that are mapped are mapped again by a process that is started here."""
    whole, shards, starts, positions, size, file = part
    if file is None:
        return DatasetPart, (whole, shards, starts, positions, size)
    return _with_positions_of, (file, whole, shards, starts, size)


def _with_positions_of(
    file: "KeptFile",
    whole: "Dataset",
    shards: NDArray[np.int32],
    starts: "NDArray[np.int32] | Ints",
    size: Size | None,
) -> DatasetPart:
    return DatasetPart(whole, shards, starts, file.arrays[NUMBERS], size, file)


ForkingPickler.register(DatasetPart, _for_a_process)


def in_shapes(
    whole: "Dataset",
    shapes: Sequence[Size],
    counts: NDArray[np.int32],
    positions: Positions | None = None,
) -> "tuple[Dataset, ...]":
    """A dataset for each of the shapes of which there are samples. `counts` has a row for each
    shard: how many of each shape stand in it, one shape after the other; or how many in its
    `positions`, which rise within a shape."""
    starts: NDArray[np.int32] | Ints
    starts = np.cumsum(counts, axis=1, dtype=np.int32) - counts
    if positions is not None:
        starts = starts + positions.starts[:-1, None]
    found = []
    for number, size in enumerate(shapes):
        own = np.ascontiguousarray(counts[:, number])
        shards = np.flatnonzero(own).astype(np.int32)
        if not len(shards):
            continue
        numbers, file = (positions.numbers, positions.file) if positions else (None, None)
        part = DatasetPart(whole, shards, starts[shards, number], numbers, size, file)
        digest = of_shape(whole.digest, size, own)
        found.append(_of_part(whole, part, own[shards].astype(np.int64), digest))
    return tuple(found)


def without_rejects(
    images: "Dataset",
    settings: Mapping[str, Any],
    shapes: Sequence[Size],
    counts: NDArray[np.int32],
    positions: Positions,
) -> "tuple[Dataset, ...]":
    """The latents that images will be where some are rejected, or go to several shapes: what
    `encode` would store, by how many samples of each shard go where. `counts` and `positions` are
    as in `in_shapes`; without shapes there is one column."""
    left = np.flatnonzero(counts.any(axis=1)).astype(np.int32)
    sizes = counts[left].sum(axis=1, dtype=np.int64)
    images = of_shards(images, left)
    whole = replace(
        images,
        kind="latents",
        sizes=sizes,
        digest=digest_of_shards(zip(images.names, sizes.tolist(), images.contents, strict=True)),
        settings=settings,
        images=images,
    )
    starts = np.append(positions.starts[left], positions.starts[-1])
    positions = replace(positions, starts=starts)
    if shapes:
        return in_shapes(whole, shapes, counts[left], positions)
    shards = np.arange(len(left), dtype=np.int32)
    part = DatasetPart(whole, shards, starts[:-1], positions.numbers, file=positions.file)
    return (_of_part(whole, part, sizes, whole.digest),)


def of_shards(dataset: "Dataset", shards: Iterable[int]) -> "Dataset":
    """A dataset of these shards alone."""
    some = list(map(int, shards))
    names, contents = (tuple(each[n] for n in some) for each in (dataset.names, dataset.contents))
    made_of = tuple(dataset.made_of[n] for n in some) if dataset.made_of else ()
    sizes = dataset.sizes[some]
    return replace(
        dataset,
        names=names,
        sizes=sizes,
        contents=contents,
        made_of=made_of,
        inputs=dataset.inputs[some] if len(dataset.inputs) else dataset.inputs,
        nbytes=round(dataset.nbytes * (int(sizes.sum()) / dataset.samples)),
        digest=digest_of_shards(zip(names, sizes.tolist(), contents, strict=True)),
    )


def digest_of_shards(parts: Iterable[tuple[str, int, str | int]]) -> str:
    """What a dataset is known by: the name of each shard, its samples, and what it is made of."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def of_shape(digest: str, size: Size, counts: NDArray[np.int32]) -> str:
    """The digest of a shape's samples, by the whole dataset's and how many each shard has."""
    known = f"{digest} {shape_name(size)} ".encode() + counts.astype("<i4").tobytes()
    return hashlib.sha256(known).hexdigest()


def chosen(dataset: "Dataset", keep: Positions) -> "Dataset | None":
    """What a dataset has of these samples of `dataset.whole`; None where that is nothing. Its order
    depends on the dataset's, and on which of its samples are left: not on where they lie, so that
    it is one for stored latents and for those that are made on the way."""
    part = dataset.part
    if part is None:
        shards = np.arange(len(dataset.sizes), dtype=np.int32)
        numbers, first, last = keep.numbers, keep.starts[:-1], keep.starts[1:]
        digest = keep.digest
    else:
        shards = part.shards
        numbers, first, last = _common(part, dataset.sizes, keep)
        digest = _digest_in(part, dataset.sizes, numbers, first, last)
    left = np.flatnonzero(last > first)
    if not len(left):
        return None
    file = keep.file if numbers is keep.numbers else None
    made = DatasetPart(dataset.whole, shards[left], first[left], numbers, dataset.size, file)
    digest = hashlib.sha256(f"{dataset.digest} {digest}".encode()).hexdigest()
    return _of_part(dataset, made, (last - first)[left], digest)


def _of_part(dataset: "Dataset", part: DatasetPart, sizes: Ints, digest: str) -> "Dataset":
    """With the same samples of the images that latents are yet to be made from."""
    nbytes = round(dataset.nbytes * (int(sizes.sum()) / dataset.samples))
    images = dataset.images
    if images is not None:
        images = _of_part(images, DatasetPart(images.whole, *part[1:]), sizes, digest)
    return replace(dataset, sizes=sizes, nbytes=nbytes, digest=digest, part=part, images=images)


def _common(part: DatasetPart, sizes: Ints, keep: Positions) -> tuple[Numbers, Ints, Ints]:
    """The numbers that a part has too, and where those of each of its shards begin and end."""
    low, high = keep.starts[part.shards], keep.starts[part.shards + 1]
    if part.positions is None:
        ends = part.starts + sizes
        first, last = (_bisected(keep.numbers, low, high, edge) for edge in (part.starts, ends))
        return keep.numbers, first, last
    found = []
    for start, size, a, b in zip(part.starts, sizes, low, high, strict=True):
        own = part.positions[start : start + size]
        found.append(np.intersect1d(own, keep.numbers[a:b], assume_unique=True))
    starts = np.cumsum([0, *map(len, found)])
    return np.concatenate([keep.numbers[:0], *found]), starts[:-1], starts[1:]


def _digest_in(part: DatasetPart, sizes: Ints, numbers: Numbers, first: Ints, last: Ints) -> str:
    """That of the numbers that samples have within the part, some shards at a time."""
    digest, counts = RunningDigest(), last - first
    starts = np.zeros(len(part.whole.names) + 1, np.int64)
    starts[part.shards + 1] = counts
    blocks = np.flatnonzero(np.diff(np.cumsum(counts) // SAMPLES_AT_ONCE, prepend=-1))
    for low, high in pairwise([*blocks.tolist(), len(counts)]):
        some = slice(low, high)
        here = _ranges(first[some], counts[some])
        found = numbers[here].astype(np.int64)
        if part.positions is None:
            found -= np.repeat(part.starts[some], counts[some])
        else:
            own = _ranges(part.starts[some].astype(np.int64), sizes[some])
            shards = np.arange(high - low) << 32
            known = np.repeat(shards, sizes[some]) + part.positions[own]
            found = np.searchsorted(known, np.repeat(shards, counts[some]) + found)
            found -= np.repeat(np.cumsum(sizes[some]) - sizes[some], counts[some])
        digest.update(found.astype(np.uint32))
    return digest.of(np.cumsum(starts))


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """So many numbers from each start on, one range behind the other."""
    shifts = starts - (np.cumsum(counts) - counts)
    places: Ints = np.arange(int(counts.sum())) + np.repeat(shifts, counts)
    return places


def _bisected(numbers: Numbers, low: Ints, high: Ints, wanted: NDArray[Any]) -> Ints:
    """Of each run of rising numbers, from low to high, where the first stands that is no less than
    the wanted one: for all runs at once."""
    while (is_open := low < high).any():
        middle = (low + high) // 2
        is_less = is_open.copy()
        is_less[is_open] = numbers[middle[is_open]] < wanted[is_open]
        low = np.where(is_less, middle + 1, low)
        high = np.where(is_open & ~is_less, middle, high)
    return low
