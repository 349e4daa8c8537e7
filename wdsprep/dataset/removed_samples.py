"""The file `removed`: samples that must stay away, and a removal that is not finished.

Both are in one file, `removed`, so that they change at one moment: a line with its digest, a line
of JSON, and sorted marks. A *mark* is 16 bytes of the BLAKE3 of what a sample is known by: its
`source`, the `url` it was fetched from, the `sha256` of its image. Nothing of it can be read from
them, and `pack` can ask of each input whether it is one of these.

The JSON says what of a removal is still to be done, by units, and how often the file was changed:
who made a unit while that happened makes it again.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, pairwise

from blake3 import blake3

from wdsprep.dataset.damage import naming_next_step
from wdsprep.dataset.file_names import REMOVED
from wdsprep.dataset.manifest import Receipt, image_shard_digest
from wdsprep.dataset.sealed_json import (
    FORMAT,
    OTHER_DIGEST,
    Count,
    Fields,
    Hex,
    Name,
    Nbytes,
    Text,
    canonical_json,
    check_format,
    check_record,
    make_record,
    read_record,
)
from wdsprep.errors import BusyError, DamageError, NotFoundError
from wdsprep.store.base import Entry, Store, write_bytes
from wdsprep.text import command

MARK_NBYTES = 16
KEPT = 4  # datasets of which a process keeps what it has read


def mark_of(kind: str, value: str) -> bytes:
    """Return the digest that stands for the `source`, `url` or `sha256` of a sample."""
    return blake3(f"{kind}\0{value}".encode("utf-8", "surrogatepass")).digest(MARK_NBYTES)


@dataclass(frozen=True, slots=True)
class Marks:
    """A set of marks, in no more memory than they are long: of 10 million, 160 MB.

    `data` has them one after another, sorted.
    """

    data: bytes = b""

    @classmethod
    def sort(cls, marks: Iterable[bytes]) -> "Marks":
        by_first = [bytearray() for _ in range(256)]  # as objects, all at once take four times that
        for mark in marks:
            by_first[mark[0]] += mark
        parts = []
        for group in by_first:
            parts.append(b"".join(sorted(set(Marks(bytes(group))))))
            group.clear()
        return cls(b"".join(parts))

    def __len__(self) -> int:
        return len(self.data) // MARK_NBYTES

    def __iter__(self) -> Iterator[bytes]:
        return map(self._at, range(len(self)))

    def __contains__(self, mark: bytes) -> bool:
        at = bisect_left(range(len(self)), mark, key=self._at)
        return at < len(self) and self._at(at) == mark

    def _at(self, number: int) -> bytes:
        return self.data[number * MARK_NBYTES : (number + 1) * MARK_NBYTES]

    def __or__(self, other: "Marks") -> "Marks":
        return Marks.sort(chain(self, other)) if other else self


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRemoval:
    """The samples that leave a shard, by their numbers in it and by their keys.

    `samples`, `nbytes` and `digest` are those of the shard before, so that a changed shard can be
    told from it.
    """

    name: Name
    samples: Count
    nbytes: Nbytes
    digest: Hex
    rows: tuple[Count, ...]
    keys: tuple[str, ...]

    @property
    def is_all(self) -> bool:
        return len(self.rows) == self.samples

    @property
    def fits(self) -> bool:
        """Return whether the rows rise, are in the shard, and have a key each."""
        rises = all(a < b for a, b in pairwise((-1, *self.rows, self.samples)))
        return rises and len(self.rows) == len(self.keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRemoval:
    """The shards and rejects that a removal changes in a unit.

    `rejects` are the keys of those that lose what can be read of them. Of latents, `made_of` is
    the digest of the image shard where that loses the same samples: the unit then counts as
    made of the new image shard, in which samples after the `lost_rows` have lower numbers, and
    its lost samples are no rejects.
    """

    unit: Name
    shards: tuple[ShardRemoval, ...] = ()
    rejects: tuple[str, ...] = ()
    made_of: str = ""
    lost_rows: tuple[Count, ...] = ()

    @property
    def samples(self) -> int:
        return sum(len(shard.rows) for shard in self.shards)

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of the samples and of the rejects."""
        return (*(key for shard in self.shards for key in shard.keys), *self.rejects)

    def is_ahead_of(self, receipt: Receipt) -> bool:
        """Return whether this removal has changed no file of the unit yet, by the unit's receipt.

        A removal changes the receipt first. If a unit of images loses rejects alone, its
        receipt shows nothing, and the answer is False.
        """
        if self.shards:
            digests = {shard.name: shard.digest for shard in receipt.shards}
            return all(digests.get(removal.name) == removal.digest for removal in self.shards)
        return bool(self.made_of) and image_shard_digest(receipt.input) == self.made_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSuccessor:
    """An image shard after it lost samples: its new digest, or "" if it lost all.

    `rows` are the numbers that the lost samples had in it.
    """

    digest: Text
    rows: tuple[Count, ...]


_FORMAT = Fields({"format": Count})
_HEAD = Fields(
    {
        "changes": Nbytes,
        "images": str,
        "successors": dict[Hex, ShardSuccessor],
        "units": list[UnitRemoval],
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """The removed samples of a dataset, as digests.

    `units` are what a removal has still to do. `images` is the place of the images that latents
    among these were made of. `successors` has what became of image shards, by the digests that they
    had, so that latents of the old ones can follow them later.
    """

    marks: Marks
    changes: int = 0
    units: tuple[UnitRemoval, ...] = ()
    images: str = ""
    successors: Mapping[str, ShardSuccessor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.marks)

    def has(self, kind: str, value: str) -> bool:
        return mark_of(kind, value) in self.marks

    def follow(self, digest: str) -> ShardSuccessor | None:
        """Return what became of an image shard by all removals, or None if it lost nothing.

        Its rows have the numbers of the shard with this digest.
        """
        lost: list[int] = []
        last, known = self.successors.get(digest), {digest}
        while last is not None:
            before, numbers = 0, list[int]()  # that the samples had before the `lost` ones went
            for row in last.rows:
                while before < len(lost) and lost[before] <= row + before:
                    before += 1
                numbers.append(row + before)
            lost = sorted([*lost, *numbers])
            after = self.successors.get(last.digest)
            if after is None or last.digest in known:
                return ShardSuccessor(digest=last.digest, rows=tuple(lost))
            known.add(last.digest)
            last = after
        return None

    def to_bytes(self) -> bytes:
        head = {**asdict(replace(self, marks=Marks())), "format": FORMAT}
        del head["marks"]
        body = canonical_json(head) + b"\n" + self.marks.data
        return blake3(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "Removed":
        digest, _, body = data.partition(b"\n")
        if digest != blake3(body).hexdigest().encode():
            raise DamageError(what, OTHER_DIGEST)
        head, _, marks = body.partition(b"\n")
        fields = read_record(_FORMAT, head, what)
        check_format(fields["format"], what)
        check_record(_HEAD, fields, what)
        units = []
        for unit in fields["units"]:
            shards = [make_record(ShardRemoval, shard) for shard in unit.get("shards", ())]
            units.append(make_record(UnitRemoval, {**unit, "shards": shards}))
        if len(marks) % MARK_NBYTES or not all(s.fits for unit in units for s in unit.shards):
            raise DamageError(what, "its marks or rows cannot be right")
        digests = fields["successors"].items()
        successors = {old: make_record(ShardSuccessor, new) for old, new in digests}
        known = {"marks": Marks(marks), "units": units, "successors": successors}
        return make_record(cls, fields | known)


NONE_REMOVED = Removed(marks=Marks())
AS_IT_WAS = "put it back from a copy, or delete it, and remove again what must stay away"
_last: dict[str, tuple[Entry, Removed]] = {}


def removed_from(store: Store) -> Removed:
    """Return the removed samples of a dataset. The file is read again only if it has changed."""
    entry = next((entry for entry in store.list(REMOVED) if entry.name == REMOVED), None)
    if entry is None:
        return NONE_REMOVED
    known, removed = _last.get(store.url, (None, NONE_REMOVED))
    if known != entry:
        try:
            data = store.read(REMOVED)
        except NotFoundError:  # deleted just now
            return NONE_REMOVED
        with naming_next_step(AS_IT_WAS):
            removed = Removed.from_bytes(data, f"{store.url}/{REMOVED}")
        if len(_last) >= KEPT:
            _last.clear()
        _last[store.url] = entry, removed
    return removed


def write_removed(store: Store, removed: Removed) -> Removed:
    """Write the file `removed` with `changes` one higher, and return what it holds now.

    The caller must have locked the manifest.
    """
    changed = replace(removed, changes=removed.changes + 1)
    write_bytes(store, REMOVED, changed.to_bytes())
    return changed


def forget_removal(store: Store) -> None:
    """Delete from the file `removed` what an unfinished removal has still to do.

    This is for a dataset whose units are gone. The marks stay, so removed samples stay away from a
    dataset that is packed over this one too:
    --overwrite is for other settings, and nobody who asked to be left out has changed his mind.
    """
    removed = removed_from(store)
    if removed.units:
        write_removed(store, replace(removed, units=(), images=""))


def check_no_removal(store: Store) -> None:
    """Raise an error if a removal of samples from the dataset is not finished."""
    if removed_from(store).units:
        raise BusyError(
            f"samples are being removed from {store.url}: wait for that to end, or, if it was "
            f"killed, run {command('remove', store.url)} to finish it, then the same command again"
        )
