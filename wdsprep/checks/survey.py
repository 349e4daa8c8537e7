"""Survey a dataset: compare its receipts with a listing of its files, without reading these.

The receipts are believed before the manifest, which only repeats them. A file that nothing speaks
of is a finding, unless a run that has not come to its end explains it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from wdsprep.checks import CheckedDataset, Finding, Kind
from wdsprep.dataset.arrays import empty_fields
from wdsprep.dataset.edition import Edition
from wdsprep.dataset.manifest import Manifest, sorted_receipts
from wdsprep.dataset.names import (
    CAPTION_TABLE,
    EDITION,
    HUB_FILES,
    MANIFEST,
    OURS,
    REMOVED,
    empty_name,
    held_name,
    index_name,
    inputs_name,
    is_retry,
    lookup_name,
    maker_of,
    receipt_name,
    rejects_name,
    retry_of_inputs,
    rows_name,
    taken_name,
    unit_of_file,
    unit_of_receipt,
)
from wdsprep.dataset.read_ahead import read_each
from wdsprep.dataset.receipts import RETRIED, Receipt
from wdsprep.dataset.rejects import UNSETTLED
from wdsprep.dataset.removed import NONE_REMOVED, Removed, removed_from
from wdsprep.dataset.rows import NBYTES, keys_may_tell, may_have_rows
from wdsprep.errors import DamageError, NotAFileError, NotFoundError, StoreError
from wdsprep.store.base import Entry, Store, is_hidden
from wdsprep.store.local import TEMPORARY
from wdsprep.text import human_bytes, plural


@dataclass(frozen=True, kw_only=True)
class DatasetSurvey:
    """A dataset as its receipts describe it.

    `there` has each file, and `manifest` what the manifest says where it can be read.
    """

    place: CheckedDataset
    edition: Edition
    there: Mapping[str, Entry]
    receipts: tuple[Receipt, ...]
    manifest: Manifest | None
    removing: frozenset[str] = frozenset()
    """Units that a removal has begun to change, and may have left in the middle of that."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.manifest is not None and self.manifest.complete

    @property
    def is_at_its_end(self) -> bool:
        """Return whether its last run left nothing to do, of all or of what a limit asked for."""
        return self.is_complete or bool(self.manifest and "limit" in self.manifest.extra)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for receipt in self.receipts for shard in receipt.shards)

    def find(self, name: str, kind: Kind, what: str, unit: str = "") -> None:
        if not self.removing.isdisjoint({unit, unit_of_file(name, self.place.dataset)}):
            return
        if kind is Kind.MANIFEST and self.removing:
            return
        self.findings.append(Finding(place=self.place, name=name, kind=kind, what=what, unit=unit))


def survey(store: Store, shown: str, heard: Callable[[int], None]) -> DatasetSurvey:
    """Survey a dataset: read its receipts and manifest, and note whatever is wrong with it.

    Files that are missing, of another size or unexpected count too, as do removals under way.
    `heard` is told how many receipts were read. Raise NotFoundError without a manifest or a
    sound receipt.
    """
    edition = Edition.from_store(store)
    there = {entry.name: entry for entry in store.list()}
    manifest, complaint = _manifest(store)
    read = _Receipts(store, there, manifest)
    read.all(heard)
    if manifest is None and not read.sound:
        raise NotFoundError(
            f"{shown} holds no dataset: neither its {MANIFEST} nor any receipt is there and "
            "sound: name the folder or URL that pack or encode wrote"
        )
    said = manifest or read.sound[0]
    maker = maker_of(said.dataset, said.settings)
    removed, broken_list = _removed(store)
    found = DatasetSurvey(
        place=CheckedDataset(url=store.url, shown=shown, dataset=said.dataset, maker=maker),
        edition=edition,
        there=there,
        receipts=sorted_receipts(read.sound),
        manifest=manifest,
        removing=frozenset(unit.unit for unit in removed.units),
    )
    if broken_list:
        found.find(REMOVED, Kind.REMOVED, broken_list)
    if removed.units:
        samples = plural(sum(unit.samples for unit in removed.units), "sample")
        what = f"a removal of {samples} goes on, or was killed"
        found.find(REMOVED, Kind.REMOVING, what)
    for unit, what in read.broken.items():
        found.find(receipt_name(unit), Kind.DAMAGED, what, unit)
    if complaint:
        found.find(MANIFEST, Kind.MANIFEST, complaint)
    _check_manifest(found, read.broken)
    _check_presence(found, store)
    _check_unexpected(found, store, read.broken)
    return found


def _manifest(store: Store) -> tuple[Manifest | None, str]:
    """Return the manifest, or the reason why there is none."""
    try:
        manifest = Manifest.from_bytes(store.read(MANIFEST), MANIFEST)
        manifest.ledger.check()
    except NotFoundError:
        return None, "it is missing"
    except DamageError as error:
        return None, _how(error)
    return manifest, ""


def _how(error: DamageError) -> str:
    """Return why a file is damaged, as a finding has it, which names the file itself."""
    return f"it is damaged: {error.cause}"


def _removed(store: Store) -> tuple[Removed, str]:
    """Return the removed samples, and what is wrong with the list of them."""
    try:
        return removed_from(store), ""
    except DamageError as error:
        return NONE_REMOVED, _how(error)


class _Receipts:
    """Reads all receipts: the sound ones, and what is wrong with the others by unit."""

    def __init__(self, store: Store, there: Iterable[str], manifest: Manifest | None) -> None:
        self._store, self._manifest = store, manifest
        self._units = list(filter(None, map(unit_of_receipt, there)))
        self.sound: list[Receipt] = []
        self.broken: dict[str, str] = {}

    def all(self, heard: Callable[[int], None]) -> None:
        found = read_each(self._read, self._units, self._store.readers, heard)
        self._settle([receipt for receipt in found if receipt is not None])

    def _read(self, unit: str) -> Receipt | None:
        try:
            receipt = Receipt.from_bytes(self._store.read(receipt_name(unit)), unit)
        except DamageError as error:
            self.broken[unit] = _how(error)
        except NotFoundError:
            self.broken[unit] = "it went away just now"
        else:
            if receipt.unit == unit:
                return receipt
            self.broken[unit] = f"it is the receipt of {receipt.unit}"
        return None

    def _settle(self, found: list[Receipt]) -> None:
        """Sort out receipts with another fingerprint than the manifest's, or than most have."""
        marks = [(r.dataset, repr(sorted(r.settings.items()))) for r in found]
        ours = Counter(marks).most_common(1)[0][0] if marks else None
        if self._manifest is not None:
            settings = repr(sorted(self._manifest.settings.items()))
            ours = (self._manifest.dataset, settings)
        for receipt, mark in zip(found, marks, strict=True):
            if mark == ours:
                self.sound.append(receipt)
            else:
                self.broken[receipt.unit] = "it is of another dataset, with other settings"


def _check_manifest(found: DatasetSurvey, broken: Mapping[str, str]) -> None:
    """Note as findings where the manifest and the sound receipts disagree.

    An incomplete manifest may lack receipts, and is noted as unfinished. One that is behind a
    retry is noted as unsettled. `broken` says by unit why a receipt is not sound.
    """
    manifest = found.manifest
    if manifest is None:
        return
    stated = {receipt.unit: receipt for receipt in manifest.receipts}
    sound = {receipt.unit: receipt for receipt in found.receipts}
    for unit in stated.keys() - sound.keys() - broken.keys():
        found.find(receipt_name(unit), Kind.MISSING, "it is missing", unit)
    changed = {unit for unit in stated.keys() & sound.keys() if stated[unit] != sound[unit]}
    lacking = sound.keys() - stated.keys()
    if not all(_is_of_a_retry(sound[unit]) for unit in changed):
        found.find(MANIFEST, Kind.MANIFEST, "it does not say what the receipts say")
    elif manifest.complete and not all(_is_of_a_retry(sound[unit]) for unit in lacking):
        found.find(MANIFEST, Kind.MANIFEST, f"it lacks what {plural(len(lacking), 'receipt')} say")
    elif changed or (manifest.complete and lacking):
        found.find(MANIFEST, Kind.UNSETTLED, "it is behind a retry that was killed or goes on")
    if not manifest.complete:
        count = plural(len(sound), "unit")
        found.find("", Kind.UNFINISHED, f"it is not complete: {count} finished so far")


def _is_of_a_retry(receipt: Receipt) -> bool:
    """Return whether a retry has made the unit, or taken rows from it."""
    return RETRIED in receipt.counts or is_retry(receipt.unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """A file that a receipt speaks of; `nbytes` is -1 where it does not say its size."""

    name: str
    unit: str
    nbytes: int = -1
    kind: Kind = Kind.DAMAGED


def expected_files(receipt: Receipt) -> Iterator[Expected]:
    """Yield the files that a finished unit has left in the dataset."""
    unit = receipt.unit
    yield Expected(name=receipt_name(unit), unit=unit)
    yield Expected(name=rejects_name(unit), unit=unit)
    if receipt.dataset == "images":
        yield Expected(name=inputs_name(unit), unit=unit)
    if (taken := taken_name(unit)) in receipt.files:
        yield Expected(name=taken, unit=unit)
    for shard in receipt.shards:
        yield Expected(name=shard.name, unit=unit, nbytes=shard.nbytes)
        index_nbytes = 8 * (shard.samples + 1)
        index = index_name(shard.name)
        yield Expected(name=index, unit=unit, nbytes=index_nbytes, kind=Kind.INDEX)
        if (rows := rows_name(shard.name)) in receipt.files:
            kind = Kind.INDEX if keys_may_tell(receipt) else Kind.DAMAGED
            yield Expected(name=rows, unit=unit, nbytes=NBYTES * shard.samples, kind=kind)


def _is_obstructed(store: Store, name: str) -> bool:
    """Check whether something that no listing shows, such as a folder, has the name of a file."""
    if store.root is None:
        return False
    try:
        store.read(name, nbytes=0)
    except NotAFileError:
        return True
    except StoreError:
        return False
    return False


def _check_presence(found: DatasetSurvey, store: Store) -> None:
    for receipt in found.receipts:
        for file in expected_files(receipt):
            entry = found.there.get(file.name)
            if entry is None:
                kind = file.kind if file.kind is Kind.INDEX else Kind.MISSING
                if _is_obstructed(store, file.name):
                    what = "a folder, a pipe or a device stands in its place"
                    found.find(file.name, Kind.FOREIGN, what, file.unit)
                else:
                    found.find(file.name, kind, "it is missing", file.unit)
            elif file.nbytes not in (-1, entry.nbytes):
                found.find(file.name, file.kind, _other_size(file.nbytes, entry.nbytes), file.unit)
        if UNSETTLED in receipt.files:
            what = "a retry has taken rows over, and was killed before they left it"
            found.find(rejects_name(receipt.unit), Kind.UNSETTLED, what, receipt.unit)
    for name in set(empty_names(found)) - found.there.keys():
        if found.is_at_its_end:
            found.find(name, Kind.MISSING, "it is missing", smallest_unit(found))
        else:
            found.find(name, Kind.UNFINISHED, "it is missing, and the next worker writes it")


def _other_size(expected: int, nbytes: int) -> str:
    how = "it is truncated" if nbytes < expected else "it is longer than it should be"
    sizes = human_bytes(expected), human_bytes(nbytes)
    if sizes[0] == sizes[1]:
        sizes = f"{expected:,} B", f"{nbytes:,} B"
    return f"{how} (expected {sizes[0]}, found {sizes[1]})"


def empty_names(found: DatasetSurvey) -> list[str]:
    """Return the files for the empty caption. Latents have one for each text array."""
    if found.place.dataset == "images" or not found.receipts:
        return []
    return [empty_name(item.name) for item in empty_fields(found.receipts[0].settings)]


def smallest_unit(found: DatasetSurvey) -> str:
    """Return the unit that is done again to write the files for the empty caption again."""
    return min(found.receipts, key=lambda receipt: (receipt.inputs, receipt.unit)).unit


def _check_unexpected(found: DatasetSurvey, store: Store, broken: Iterable[str]) -> None:
    ours = {MANIFEST, EDITION, REMOVED, *HUB_FILES}
    known = {*ours, *empty_names(found), *map(receipt_name, broken)}
    settings = (found.manifest or found.receipts[0]).settings
    if digest := settings.get("captions"):
        known |= {CAPTION_TABLE, lookup_name(digest)}  # which may be gone: encode makes them again
    known.update(file.name for receipt in found.receipts for file in expected_files(receipt))
    with_rows = filter(may_have_rows, found.receipts)
    known.update(rows_name(shard.name) for receipt in with_rows for shard in receipt.shards)
    stated = found.manifest.receipts if found.manifest else ()
    gone = {*broken, *(r.unit for r in stated)} - {r.unit for r in found.receipts}
    for name in sorted(found.there.keys() - known):
        if unit_of_file(name, found.place.dataset) in gone:
            continue  # what is wrong is said of the receipt
        _unexpected(found, name)
    if store.root:
        for path in store.root.rglob(".wdsprep-*.tmp"):
            if TEMPORARY.fullmatch(path.name):
                what = "it is being written, or was left by a run that was killed"
                found.find(path.relative_to(store.root).as_posix(), Kind.LEFTOVER, what)


def _unexpected(found: DatasetSurvey, name: str) -> None:
    """Note a file of no finished unit. A run that is under way or was killed leaves some."""
    _receipt, ours = OURS[found.place.dataset]
    if retry_of_inputs(name):
        found.find(name, Kind.UNFINISHED, "rejects that are to be tried again")
    elif held_name(name):
        what = "a run is changing a unit there, or was killed then"
        found.find(name, Kind.LEFTOVER, what)
    elif is_hidden(name):
        found.find(name, Kind.LEFTOVER, "it is hidden, and not of wdsprep")
    elif ours.fullmatch(name) and not found.is_complete:
        what = "no receipt speaks of it: a run is under way or was killed"
        found.find(name, Kind.LEFTOVER, what)
    else:
        found.find(name, Kind.FOREIGN, "no receipt speaks of it")
