"""Survey a dataset: compare its receipts with a listing of its files, without reading these.

Where they disagree, the receipts are believed and not the manifest, which only repeats them. A file
that no receipt lists is a finding, unless a run that has not finished explains it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from wdsprep.checks.findings import Finding, Kind
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
from wdsprep.dataset.manifest import RETRIED, Manifest, Receipt, Shard
from wdsprep.dataset.npy_arrays import empty_fields
from wdsprep.dataset.reindex import can_make_table
from wdsprep.dataset.rejects import UNSETTLED
from wdsprep.dataset.removed_samples import NONE_REMOVED, UnitRemoval, removed_from
from wdsprep.dataset.samples import key_order
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.stored_dataset import no_dataset_error
from wdsprep.dataset.thread_map import read_each
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import DamageError, NotFoundError
from wdsprep.store.base import Entry, Store, is_hidden
from wdsprep.store.local import TEMPORARY
from wdsprep.text import plural


@dataclass(frozen=True, kw_only=True)
class DatasetSurvey:
    """A dataset as its receipts describe it, with what is wrong.

    The user calls it `shown`. `files` is the listing of the store, by name. `manifest` is None if
    it cannot be read.
    """

    shown: str
    dataset: str
    settings: Settings
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
    def url(self) -> str:
        return self.edition.store.url

    @property
    def maker(self) -> str:
        """Return the command that continues the dataset."""
        return maker_of(self.dataset, self.settings)

    @property
    def is_complete(self) -> bool:
        return self.manifest is not None and self.manifest.complete

    @property
    def shards(self) -> list[Shard]:
        return [shard for receipt in self.receipts for shard in receipt.shards]

    def has_changed(self, names: Collection[str]) -> bool:
        """Return whether another run has written or deleted one of these files since the survey."""
        listed = (e for name in names for e in self.edition.store.list(name) if e.name == name)
        now = {entry.name: entry for entry in listed}
        return now != {name: self.files[name] for name in names if name in self.files}

    def add_finding(
        self, name: str, kind: Kind, what: str, unit: str = "", *, maker: str = ""
    ) -> None:
        """Add a finding, unless a removal that is under way explains it.

        A removal changes images before their latents, and writes the manifest last. `maker` is the
        command of the next step, if that is not the one that makes this dataset.
        """
        units = {unit, unit_of_file(name, self.dataset)}
        is_of_pairs = kind in (Kind.CHANGED, Kind.UNPACKED, Kind.UNMATCHED)
        explained = self.removing if is_of_pairs else self.begun
        is_behind = kind is Kind.MANIFEST and self.manifest is not None and self.removing
        if not is_behind and units.isdisjoint(explained):
            self.keep_finding(name, kind, what, unit, maker=maker)

    def keep_finding(self, name: str, kind: Kind, what: str, unit: str, *, maker: str = "") -> None:
        maker = maker or self.maker
        fault = Finding(shown=self.shown, maker=maker, name=name, kind=kind, what=what, unit=unit)
        self.findings.append(fault)


def survey_dataset(
    store: Store, shown: str, on_listing: Callable[[str, int, int], None]
) -> DatasetSurvey:
    """Survey a dataset: read its receipts and manifest, and note whatever is wrong.

    Files that are missing, of another size or unexpected are noted too, as are removals under way.
    `on_listing` gets what is `shown`, and the number of receipts read. Raise NotFoundError if there
    is neither a manifest nor a sound receipt.
    """
    edition = Edition.from_store(store)
    files = {entry.name: entry for entry in store.list()}
    manifest, complaint = None, ""
    try:
        manifest = Manifest.from_bytes(store.read(MANIFEST), MANIFEST)
        manifest.ledger.check()
    except NotFoundError:
        complaint = "it is missing"
    except DamageError as error:
        manifest, complaint = None, damage_text(error)
    sound, broken = _read_receipts(store, files, manifest, lambda n: on_listing(shown, n, 0))
    if manifest is None and not sound:
        lacking = f"neither a sound {MANIFEST} nor a sound receipt"
        raise no_dataset_error(shown, f"holds no dataset, since it has {lacking}")
    known = manifest or sound[0]
    removed, broken_list = NONE_REMOVED, ""
    try:
        removed = removed_from(store)
    except DamageError as error:
        broken_list = damage_text(error)
    by_unit = {receipt.unit: receipt for receipt in sound}
    survey = DatasetSurvey(
        shown=shown,
        dataset=known.dataset,
        settings=known.settings,
        edition=edition,
        files=files,
        receipts=tuple(sorted(sound, key=lambda receipt: key_order(receipt.unit))),
        manifest=manifest,
        removing={unit.unit: unit for unit in removed.units},
        begun=frozenset(
            unit.unit
            for unit in removed.units
            if unit.unit not in broken
            if unit.unit not in by_unit or not unit.is_ahead_of(by_unit[unit.unit])
        ),
    )
    if broken_list:
        survey.add_finding(REMOVED, Kind.REMOVED, broken_list)
    if removed.units:
        samples = plural(sum(unit.samples for unit in removed.units), "sample")
        what = f"a removal of {samples} is running, or was killed"
        survey.add_finding(REMOVED, Kind.REMOVING, what)
    for unit, what in broken.items():
        survey.add_finding(receipt_name(unit), Kind.DAMAGED, what, unit)
    if complaint:
        survey.add_finding(MANIFEST, Kind.MANIFEST, complaint)
    _check_manifest(survey, broken)
    _check_presence(survey)
    _check_unexpected(survey, broken)
    return survey


def damage_text(error: DamageError) -> str:
    """Return the text of a finding about a damaged file, which does not repeat its name."""
    return f"it is damaged: {error.cause}"


def _read_receipts(
    store: Store, files: Iterable[str], manifest: Manifest | None, on_count: Callable[[int], None]
) -> tuple[list[Receipt], dict[str, str]]:
    """Return the sound receipts, and by unit what is wrong with the others.

    Sound receipts have the settings of the manifest. Without a manifest the settings that most
    receipts have are the right ones. `on_count` gets the number of receipts read.
    """
    broken: dict[str, str] = {}

    def read(unit: str) -> Receipt | None:
        try:
            receipt = Receipt.from_bytes(store.read(receipt_name(unit)), unit)
        except DamageError as error:
            broken[unit] = damage_text(error)
        except NotFoundError:
            broken[unit] = "it was removed while it was checked"
        else:
            if receipt.unit == unit:
                return receipt
            broken[unit] = f"it is the receipt of {receipt.unit}"
        return None

    def mark(record: Receipt | Manifest) -> tuple[str, str]:
        return record.dataset, repr(sorted(record.settings.items()))

    units = list(filter(None, map(unit_of_receipt, files)))
    receipts = list(filter(None, read_each(read, units, store.readers, on_count)))
    marks = [mark(receipt) for receipt in receipts]
    ours = mark(manifest) if manifest else Counter(marks).most_common(1)[0][0] if marks else None
    for receipt, own_mark in zip(receipts, marks, strict=True):
        if own_mark != ours:
            broken[receipt.unit] = "it belongs to another dataset, with other settings"
    return [receipt for receipt in receipts if receipt.unit not in broken], broken


def _check_manifest(survey: DatasetSurvey, broken: Mapping[str, str]) -> None:
    """Add findings if the manifest and the sound receipts disagree.

    An incomplete manifest may lack receipts, and is noted as unfinished. A manifest that lacks only
    what a retry changed is noted as unsettled. `broken` says by unit why a receipt is not sound.
    """
    manifest = survey.manifest
    if manifest is None:
        return
    stated = {receipt.unit: receipt for receipt in manifest.receipts}
    sound = {receipt.unit: receipt for receipt in survey.receipts}
    for unit in stated.keys() - sound.keys() - broken.keys():
        survey.add_finding(receipt_name(unit), Kind.MISSING, "it is missing", unit)
    changed = {unit for unit in stated.keys() & sound.keys() if stated[unit] != sound[unit]}
    if manifest.complete:
        changed |= sound.keys() - stated.keys()
    # A retry makes units, and takes rows from others.
    if not all(is_retry(unit) or RETRIED in sound[unit].counts for unit in changed):
        survey.add_finding(MANIFEST, Kind.MANIFEST, "it does not say what the receipts say")
    elif changed:
        what = "it lacks the changes of a retry that is running, or was killed"
        survey.add_finding(MANIFEST, Kind.UNSETTLED, what)
    if not manifest.complete:
        count = plural(len(sound), "unit")
        survey.add_finding("", Kind.UNFINISHED, f"it is not complete: {count} finished so far")


def expected_files(receipt: Receipt) -> Iterator[tuple[str, Kind, int]]:
    """Yield the files that a finished unit has left in the dataset.

    Each comes with the kind of its finding if it is not as it was, and with its size, or -1 if the
    receipt does not state that.
    """
    unit = receipt.unit
    yield receipt_name(unit), Kind.DAMAGED, -1
    yield rejects_name(unit), Kind.DAMAGED, -1
    if receipt.dataset == "images":
        yield inputs_name(unit), Kind.DAMAGED, -1
    if (captions := captions_name(unit)) in receipt.files:
        yield captions, Kind.DAMAGED, -1
    for shard in receipt.shards:
        yield shard.name, Kind.DAMAGED, shard.nbytes
        if not is_table(shard.name):
            yield index_name(shard.name), Kind.INDEX, 8 * (shard.samples + 1)
            kind = Kind.INDEX if can_make_table(receipt) else Kind.DAMAGED
            yield table_name(shard.name), kind, -1


def _check_presence(survey: DatasetSurvey) -> None:
    root = survey.edition.store.root
    for receipt in survey.receipts:
        for name, kind, nbytes in expected_files(receipt):
            if entry := survey.files.get(name):
                if nbytes in (-1, entry.nbytes):
                    continue
                how = "truncated" if entry.nbytes < nbytes else "longer than it should be"
                what = f"it is {how} ({entry.nbytes:,} of {nbytes:,} bytes)"
            elif root and (root / name).exists() and not (root / name).is_file():
                kind, what = Kind.FOREIGN, "a folder, a pipe or a device stands in its place"
            else:
                kind, what = kind if kind is Kind.INDEX else Kind.MISSING, "it is missing"
            survey.add_finding(name, kind, what, receipt.unit)
        if UNSETTLED in receipt.files:
            what = "a retry took some of its lines over, and was killed before it removed them here"
            survey.add_finding(rejects_name(receipt.unit), Kind.UNSETTLED, what, receipt.unit)
    # with all units, or with those within its limit
    has_finished = survey.manifest and (survey.is_complete or "limit" in survey.manifest.extra)
    for name in set(empty_names(survey)) - survey.files.keys():
        if has_finished:
            survey.add_finding(name, Kind.MISSING, "it is missing", smallest_unit(survey))
        else:
            what = "it is missing, and the next worker writes it"
            survey.add_finding(name, Kind.UNFINISHED, what)


def empty_names(survey: DatasetSurvey) -> list[str]:
    """Return the names of the files for the empty caption. Latents have one for each text array."""
    if survey.dataset == "images" or not survey.receipts:
        return []
    return [empty_name(item.name) for item in empty_fields(survey.settings)]


def smallest_unit(survey: DatasetSurvey) -> str:
    """Return the unit with the fewest inputs, which is cheapest to do again.

    It is named in findings about files that belong to all units.
    """
    return min(survey.receipts, key=lambda receipt: (receipt.inputs, receipt.unit)).unit


def _check_unexpected(survey: DatasetSurvey, broken: Iterable[str]) -> None:
    """Add findings about files that no finished unit lists.

    A run that is under way, or was killed, leaves such files.
    """
    store = survey.edition.store
    known = {MANIFEST, EDITION, REMOVED, *HUB_FILES}
    known |= {*empty_names(survey), *map(receipt_name, broken)}
    if survey.settings.get("captions"):
        waits = () if survey.is_complete else survey.files  # captions that encode has laid out
        known |= {CAPTION_TABLE, *(name for name in waits if name.startswith(CAPTIONS))}
    known.update(name for receipt in survey.receipts for name, *_ in expected_files(receipt))
    stated = survey.manifest.receipts if survey.manifest else ()
    gone = {*broken, *(r.unit for r in stated)} - {r.unit for r in survey.receipts}
    _receipt, ours = OURS[survey.dataset]
    for name in sorted(survey.files.keys() - known):
        if unit_of_file(name, survey.dataset) in gone:  # their receipts have a finding
            continue
        kind, what = Kind.LEFTOVER, "no receipt lists it, as a run is under way or was killed"
        if retry_of_inputs(name):
            kind, what = Kind.UNFINISHED, "it lists rejects that are to be tried again"
        elif is_hidden(name):
            what = "it is hidden, and wdsprep did not write it"
        elif not held_name(name) and (survey.is_complete or not ours.fullmatch(name)):
            kind, what = Kind.FOREIGN, "no receipt lists it"
        survey.add_finding(name, kind, what)
    if store.root:
        for path in store.root.rglob(".wdsprep-*.tmp"):
            if TEMPORARY.fullmatch(path.name):
                what = "it is being written, or was left by a run that was killed"
                survey.add_finding(path.relative_to(store.root).as_posix(), Kind.LEFTOVER, what)
