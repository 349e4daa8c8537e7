"""Survey a dataset: compare its receipts with a listing of its files, without reading these.

Where they disagree, the receipts are believed and not the manifest, which only repeats them. A file
that no receipt lists is a finding, unless a run that has not finished explains it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from wdsprep.checks.findings import CheckedDataset, Finding, Kind
from wdsprep.dataset.file_names import (
    CAPTION_TABLE,
    CAPTIONS,
    EDITION,
    HUB_FILES,
    MANIFEST,
    OURS,
    REMOVED,
    captions_name,
    empty_name,
    held_name,
    index_name,
    inputs_name,
    is_retry,
    is_table,
    maker_of,
    receipt_name,
    rejects_name,
    retry_of_inputs,
    table_name,
    unit_of_file,
    unit_of_receipt,
)
from wdsprep.dataset.manifest import Manifest, sorted_receipts
from wdsprep.dataset.npy_arrays import empty_fields
from wdsprep.dataset.receipts import RETRIED, Receipt
from wdsprep.dataset.reindex import can_make_table
from wdsprep.dataset.rejects import UNSETTLED
from wdsprep.dataset.removed_samples import NONE_REMOVED, Removed, UnitRemoval, removed_from
from wdsprep.dataset.thread_map import read_each
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import DamageError, NotAFileError, NotFoundError, StoreError
from wdsprep.store import did_you_mean_place
from wdsprep.store.base import Entry, Store, is_hidden
from wdsprep.store.local import TEMPORARY
from wdsprep.text import human_bytes, plural


@dataclass(frozen=True, kw_only=True)
class DatasetSurvey:
    """A dataset as its receipts describe it, with what is wrong.

    `files` is the listing of the store, by name. `manifest` is None if it cannot be read.
    """

    place: CheckedDataset
    edition: Edition
    files: Mapping[str, Entry]
    receipts: tuple[Receipt, ...]
    manifest: Manifest | None
    removing: Mapping[str, UnitRemoval] = field(default_factory=dict)
    """The units that a removal which is under way is to change."""
    begun: frozenset[str] = frozenset()
    """Those units of them whose files it may have changed in part."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.manifest is not None and self.manifest.complete

    @property
    def has_run_finished(self) -> bool:
        """Return whether the last run finished, with all units or with those within its limit."""
        return self.is_complete or bool(self.manifest and "limit" in self.manifest.extra)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for receipt in self.receipts for shard in receipt.shards)

    def has_changed(self, names: Collection[str]) -> bool:
        """Return whether another run has written or deleted one of these files since the survey."""
        listed = (e for name in names for e in self.edition.store.list(name) if e.name == name)
        now = {entry.name: entry for entry in listed}
        return now != {name: self.files[name] for name in names if name in self.files}

    def add_finding(self, name: str, kind: Kind, what: str, unit: str = "") -> None:
        """Add a finding, unless a removal that is under way explains it.

        A removal changes images before their latents, and writes the manifest last.
        """
        units = {unit, unit_of_file(name, self.place.dataset)}
        explained = self.removing if kind in (Kind.CHANGED, Kind.UNMATCHED) else self.begun
        is_behind = kind is Kind.MANIFEST and self.manifest is not None and self.removing
        if is_behind or not units.isdisjoint(explained):
            return
        self.findings.append(Finding(place=self.place, name=name, kind=kind, what=what, unit=unit))


def survey(store: Store, shown: str, heard: Callable[[int], None]) -> DatasetSurvey:
    """Survey a dataset: read its receipts and manifest, and note whatever is wrong.

    Files that are missing, of another size or unexpected are noted too, as are removals under way.
    `heard` gets the number of receipts read. Raise NotFoundError if there is neither a manifest
    nor a sound receipt.
    """
    edition = Edition.from_store(store)
    there = {entry.name: entry for entry in store.list()}
    manifest, complaint = _read_manifest(store)
    read = _Receipts(store, there, manifest)
    read.all(heard)
    if manifest is None and not read.sound:
        raise NotFoundError(
            f"{shown} holds no dataset, since it has neither a sound {MANIFEST} nor a sound "
            f"receipt: give the folder or URL that pack or encode wrote{did_you_mean_place(shown)}"
        )
    said = manifest or read.sound[0]
    maker = maker_of(said.dataset, said.settings)
    removed, broken_list = _read_removed(store)
    found = DatasetSurvey(
        place=CheckedDataset(url=store.url, shown=shown, dataset=said.dataset, maker=maker),
        edition=edition,
        files=there,
        receipts=sorted_receipts(read.sound),
        manifest=manifest,
        removing={unit.unit: unit for unit in removed.units},
        begun=_begun_units(removed, read),
    )
    if broken_list:
        found.add_finding(REMOVED, Kind.REMOVED, broken_list)
    if removed.units:
        samples = plural(sum(unit.samples for unit in removed.units), "sample")
        what = f"a removal of {samples} is running, or was killed"
        found.add_finding(REMOVED, Kind.REMOVING, what)
    for unit, what in read.broken.items():
        found.add_finding(receipt_name(unit), Kind.DAMAGED, what, unit)
    if complaint:
        found.add_finding(MANIFEST, Kind.MANIFEST, complaint)
    _check_manifest(found, read.broken)
    _check_presence(found, store)
    _check_unexpected(found, store, read.broken)
    return found


def _read_manifest(store: Store) -> tuple[Manifest | None, str]:
    """Return the manifest, or None and the reason why it cannot be read."""
    try:
        manifest = Manifest.from_bytes(store.read(MANIFEST), MANIFEST)
        manifest.ledger.check()
    except NotFoundError:
        return None, "it is missing"
    except DamageError as error:
        return None, damage_text(error)
    return manifest, ""


def damage_text(error: DamageError) -> str:
    """Return the text of a finding about a damaged file, which does not repeat its name."""
    return f"it is damaged: {error.cause}"


def _read_removed(store: Store) -> tuple[Removed, str]:
    """Return the list of removed samples, and what is wrong with it, or "" if nothing is."""
    try:
        return removed_from(store), ""
    except DamageError as error:
        return NONE_REMOVED, damage_text(error)


def _begun_units(removed: Removed, read: "_Receipts") -> frozenset[str]:
    """Return the units of a removal whose files it may have changed in part."""
    sound = {receipt.unit: receipt for receipt in read.sound}
    return frozenset(
        unit.unit
        for unit in removed.units
        if unit.unit not in read.broken
        if unit.unit not in sound or not unit.is_ahead_of(sound[unit.unit])
    )


class _Receipts:
    """A reader of all receipts: the sound ones, and by unit what is wrong with the others."""

    def __init__(self, store: Store, there: Iterable[str], manifest: Manifest | None) -> None:
        self._store, self._manifest = store, manifest
        self._units = list(filter(None, map(unit_of_receipt, there)))
        self.sound: list[Receipt] = []
        self.broken: dict[str, str] = {}

    def all(self, heard: Callable[[int], None]) -> None:
        found = read_each(self._read, self._units, self._store.readers, heard)
        self._sort_out([receipt for receipt in found if receipt is not None])

    def _read(self, unit: str) -> Receipt | None:
        try:
            receipt = Receipt.from_bytes(self._store.read(receipt_name(unit)), unit)
        except DamageError as error:
            self.broken[unit] = damage_text(error)
        except NotFoundError:
            self.broken[unit] = "it was removed while it was checked"
        else:
            if receipt.unit == unit:
                return receipt
            self.broken[unit] = f"it is the receipt of {receipt.unit}"
        return None

    def _sort_out(self, found: list[Receipt]) -> None:
        """Keep the receipts with the settings of the manifest; the others are broken.

        Without a manifest the settings that most receipts have are the right ones.
        """
        marks = [(r.dataset, repr(sorted(r.settings.items()))) for r in found]
        ours = Counter(marks).most_common(1)[0][0] if marks else None
        if self._manifest is not None:
            settings = repr(sorted(self._manifest.settings.items()))
            ours = (self._manifest.dataset, settings)
        for receipt, mark in zip(found, marks, strict=True):
            if mark == ours:
                self.sound.append(receipt)
            else:
                self.broken[receipt.unit] = "it belongs to another dataset, with other settings"


def _check_manifest(found: DatasetSurvey, broken: Mapping[str, str]) -> None:
    """Add findings if the manifest and the sound receipts disagree.

    An incomplete manifest may lack receipts, and is noted as unfinished. A manifest that lacks only
    what a retry changed is noted as unsettled. `broken` says by unit why a receipt is not sound.
    """
    manifest = found.manifest
    if manifest is None:
        return
    stated = {receipt.unit: receipt for receipt in manifest.receipts}
    sound = {receipt.unit: receipt for receipt in found.receipts}
    for unit in stated.keys() - sound.keys() - broken.keys():
        found.add_finding(receipt_name(unit), Kind.MISSING, "it is missing", unit)
    changed = {unit for unit in stated.keys() & sound.keys() if stated[unit] != sound[unit]}
    lacking = sound.keys() - stated.keys()
    if not all(_is_of_a_retry(sound[unit]) for unit in changed):
        found.add_finding(MANIFEST, Kind.MANIFEST, "it does not say what the receipts say")
    elif manifest.complete and not all(_is_of_a_retry(sound[unit]) for unit in lacking):
        found.add_finding(MANIFEST, Kind.MANIFEST, f"it lacks {plural(len(lacking), 'receipt')}")
    elif changed or (manifest.complete and lacking):
        found.add_finding(
            MANIFEST,
            Kind.UNSETTLED,
            "it lacks the changes of a retry that is running, or was killed",
        )
    if not manifest.complete:
        count = plural(len(sound), "unit")
        found.add_finding("", Kind.UNFINISHED, f"it is not complete: {count} finished so far")


def _is_of_a_retry(receipt: Receipt) -> bool:
    """Return whether a retry has made the unit, or taken rows from it."""
    return RETRIED in receipt.counts or is_retry(receipt.unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedFile:
    """A file that a receipt lists; `nbytes` is -1 if the receipt does not state its size."""

    name: str
    unit: str
    nbytes: int = -1
    kind: Kind = Kind.DAMAGED


def expected_files(receipt: Receipt) -> Iterator[ExpectedFile]:
    """Yield the files that a finished unit has left in the dataset."""
    unit = receipt.unit
    yield ExpectedFile(name=receipt_name(unit), unit=unit)
    yield ExpectedFile(name=rejects_name(unit), unit=unit)
    if receipt.dataset == "images":
        yield ExpectedFile(name=inputs_name(unit), unit=unit)
    if (captions := captions_name(unit)) in receipt.files:
        yield ExpectedFile(name=captions, unit=unit)
    for shard in receipt.shards:
        yield ExpectedFile(name=shard.name, unit=unit, nbytes=shard.nbytes)
        if is_table(shard.name):
            continue
        index_nbytes = 8 * (shard.samples + 1)
        index = index_name(shard.name)
        yield ExpectedFile(name=index, unit=unit, nbytes=index_nbytes, kind=Kind.INDEX)
        kind = Kind.INDEX if can_make_table(receipt) else Kind.DAMAGED
        yield ExpectedFile(name=table_name(shard.name), unit=unit, kind=kind)


def _is_obstructed(store: Store, name: str) -> bool:
    """Return whether something that no listing shows, such as a folder, has the name of a file."""
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
            entry = found.files.get(file.name)
            if entry is None:
                kind = file.kind if file.kind is Kind.INDEX else Kind.MISSING
                if _is_obstructed(store, file.name):
                    what = "a folder, a pipe or a device stands in its place"
                    found.add_finding(file.name, Kind.FOREIGN, what, file.unit)
                else:
                    found.add_finding(file.name, kind, "it is missing", file.unit)
            elif file.nbytes not in (-1, entry.nbytes):
                found.add_finding(
                    file.name, file.kind, _other_size(file.nbytes, entry.nbytes), file.unit
                )
        if UNSETTLED in receipt.files:
            what = "a retry took some of its lines over, and was killed before it removed them here"
            found.add_finding(rejects_name(receipt.unit), Kind.UNSETTLED, what, receipt.unit)
    for name in set(empty_names(found)) - found.files.keys():
        if found.has_run_finished:
            found.add_finding(name, Kind.MISSING, "it is missing", smallest_unit(found))
        else:
            found.add_finding(name, Kind.UNFINISHED, "it is missing, and the next worker writes it")


def _other_size(expected: int, nbytes: int) -> str:
    how = "it is truncated" if nbytes < expected else "it is longer than it should be"
    sizes = human_bytes(expected), human_bytes(nbytes)
    if sizes[0] == sizes[1]:
        sizes = f"{expected:,} B", f"{nbytes:,} B"
    return f"{how} (expected {sizes[0]}, found {sizes[1]})"


def empty_names(found: DatasetSurvey) -> list[str]:
    """Return the names of the files for the empty caption. Latents have one for each text array."""
    if found.place.dataset == "images" or not found.receipts:
        return []
    return [empty_name(item.name) for item in empty_fields(found.receipts[0].settings)]


def smallest_unit(found: DatasetSurvey) -> str:
    """Return the unit with the fewest inputs, which is cheapest to do again.

    It is named in findings about files that belong to all units.
    """
    return min(found.receipts, key=lambda receipt: (receipt.inputs, receipt.unit)).unit


def _check_unexpected(found: DatasetSurvey, store: Store, broken: Iterable[str]) -> None:
    ours = {MANIFEST, EDITION, REMOVED, *HUB_FILES}
    known = {*ours, *empty_names(found), *map(receipt_name, broken)}
    if (found.manifest or found.receipts[0]).settings.get("captions"):
        waits = () if found.is_complete else found.files  # captions that encode has laid out
        known |= {CAPTION_TABLE, *(name for name in waits if name.startswith(CAPTIONS))}
    known.update(file.name for receipt in found.receipts for file in expected_files(receipt))
    stated = found.manifest.receipts if found.manifest else ()
    gone = {*broken, *(r.unit for r in stated)} - {r.unit for r in found.receipts}
    for name in sorted(found.files.keys() - known):
        if unit_of_file(name, found.place.dataset) in gone:
            continue  # there is a finding about the receipt
        _note_unexpected(found, name)
    if store.root:
        for path in store.root.rglob(".wdsprep-*.tmp"):
            if TEMPORARY.fullmatch(path.name):
                what = "it is being written, or was left by a run that was killed"
                found.add_finding(path.relative_to(store.root).as_posix(), Kind.LEFTOVER, what)


def _note_unexpected(found: DatasetSurvey, name: str) -> None:
    """Add a finding about a file that no finished unit lists.

    A run that is under way, or was killed, leaves such files.
    """
    _receipt, ours = OURS[found.place.dataset]
    if retry_of_inputs(name):
        found.add_finding(name, Kind.UNFINISHED, "it lists rejects that are to be tried again")
    elif held_name(name):
        what = "a run is changing this unit, or was killed while it did"
        found.add_finding(name, Kind.LEFTOVER, what)
    elif is_hidden(name):
        found.add_finding(name, Kind.LEFTOVER, "it is hidden, and wdsprep did not write it")
    elif ours.fullmatch(name) and not found.is_complete:
        what = "no receipt lists it, as a run is under way or was killed"
        found.add_finding(name, Kind.LEFTOVER, what)
    else:
        found.add_finding(name, Kind.FOREIGN, "no receipt lists it")
