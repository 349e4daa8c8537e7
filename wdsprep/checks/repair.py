"""`repair`: remove what is damaged, so that the next `pack` or `encode` makes exactly that again.

A damaged file costs its unit of work: without its receipt a unit never happened, so receipts go
first, and a repair that is killed leaves nothing worse than a unit to do again. An index and the
manifest need no unit: they are made again on the spot, from the tar and from the receipts.

Images may have gone from the web. So if only files beside their shards are damaged, the shards
stay: rejects that can be read stay too, and the others become rejects whose record was lost; a list
of inputs is removed, and the next `pack` writes it again from the table.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import count, islice

from wdsprep.checks.dataset_check import DatasetSurvey
from wdsprep.checks.findings import REDONE, Finding, Kind
from wdsprep.checks.options import RepairOptions
from wdsprep.checks.verify import check_datasets
from wdsprep.dataset.file_names import (
    MANIFEST,
    OURS,
    inputs_name,
    is_retry,
    is_table,
    receipt_name,
    rejects_name,
    sample_key,
    tar_of,
    unit_of_file,
)
from wdsprep.dataset.manifest import Manifest, Receipt
from wdsprep.dataset.reindex import UNTOLD, write_index, write_table
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, is_moved, read_rejects, rejects_file
from wdsprep.dataset.samples import key_order
from wdsprep.dataset.stored_dataset import read_receipt, rewrite_manifest, write_manifest
from wdsprep.dataset.tar.read import open_tape, read_samples
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.options import takes_options
from wdsprep.packing.retry_rejected import read_retries
from wdsprep.store.base import Store, write_bytes
from wdsprep.text import NotebookTable, plural

MOST_MENDED = 1_000_000
"""The most inputs of a unit whose rejects are made again; a damaged receipt may claim more."""


@takes_options(RepairOptions)
def repair(options: RepairOptions) -> "Repair":
    """Remove what is damaged in a dataset, so that the next `pack` or `encode` makes it again.

        repair = wdsprep.repair("shards/images")            # verifies, and says what it would do
        repair = wdsprep.repair("shards/images", yes=True)  # does it

    The options are those of `wdsprep repair`.
    """
    listener = options.listener_or_mute
    plan = plan_repair(check_datasets([options.dataset], options).surveys[0])
    listener.on_begin(plan)
    if plan.is_needed and (options.yes or listener.confirm(plan)):
        return do_repair(plan, lambda files: listener.on_change(files, 0))
    return plan


@dataclass(frozen=True, kw_only=True)
class Repair(NotebookTable):
    """The plan of a repair, and its result once it is `done`.

    `units` of work are done again, each because of the findings beside it. The files `names` are
    removed in this order. Of the slices in `kept` only the list of inputs stays, which tells the
    next run what an earlier append had put into them.
    """

    survey: DatasetSurvey
    units: Mapping[str, tuple[Finding, ...]]
    names: tuple[str, ...]
    kept: tuple[str, ...]
    mended: Mapping[str, tuple[Finding, ...]]
    """Units whose shards stay, while a file beside them is made again or removed."""
    unsettled: tuple[Finding, ...]
    """Findings about a retry that was killed before rejects and rows agreed again."""
    indexes: tuple[str, ...]
    writes_manifest: bool
    beyond: tuple[Finding, ...]
    """Findings that a repair does nothing about."""
    changed: tuple[str, ...] = ()
    """Files that other runs had changed before the repair came to them."""
    done: bool = False

    def table_rows(self) -> Iterator[tuple[str, object]]:
        yield "dataset", self.survey.shown
        yield "units to make again", len(self.units)
        yield "units to mend", len(self.mended)
        yield "indexes to write", len(self.indexes)
        yield "writes the manifest", self.writes_manifest
        yield "findings left alone", len(self.beyond)
        yield "done", self.done

    def __repr__(self) -> str:
        parts = [
            f"{plural(len(self.units), 'unit')} to make again" * bool(self.units),
            f"{plural(len(self.mended), 'unit')} to mend" * bool(self.mended),
            f"{plural(len(self.indexes), 'index', 'indexes')} to write" * bool(self.indexes),
            "a retry to finish" * bool(self.unsettled),
            "the manifest to write" * self.writes_manifest,
        ]
        parts = ["done"] if self.done else [part for part in parts if part] or ["nothing to do"]
        parts += [f"{len(self.changed)} changed by other runs"] if self.changed else []
        parts += [f"{plural(len(self.beyond), 'finding')} left alone"] if self.beyond else []
        return f"<Repair {self.survey.shown!r}: {', '.join(parts)}>"

    @property
    def is_whole(self) -> bool:
        """Return whether nothing is wrong any more: all was repaired, or nothing was wrong."""
        return self.done is self.is_needed and not self.beyond and not self.changed

    @property
    def is_needed(self) -> bool:
        mends = self.mended or self.unsettled
        return bool(self.units or mends or self.indexes or self.writes_manifest)

    @property
    def redone(self) -> frozenset[str]:
        """Return the units that are made again.

        Units whose receipt belongs to another kind of dataset are not among them.
        """
        receipt, _rest = OURS[self.survey.dataset]
        return frozenset(unit for unit in self.units if receipt.fullmatch(receipt_name(unit)))

    @property
    def samples(self) -> int:
        """Return how many samples the shards to remove have, as far as receipts can be read."""
        lost = (r for r in self.survey.receipts if r.unit in self.units)
        return sum(shard.samples for receipt in lost for shard in receipt.shards)


def plan_repair(survey: DatasetSurvey) -> Repair:
    """Plan what to do about the findings of a verification."""
    units: dict[str, list[Finding]] = {}
    indexes, beyond = [], []
    lost = {
        finding.unit
        for finding in survey.findings
        if is_retry(finding.unit) and finding.name == inputs_name(finding.unit)
    }
    for finding in survey.findings:
        if finding.kind in REDONE and finding.unit not in lost:
            units.setdefault(finding.unit, []).append(finding)
        elif finding.kind is Kind.INDEX:
            indexes.append(finding)
        elif finding.kind is not Kind.MANIFEST and not finding.kind.is_note:
            beyond.append(finding)
    staying = [r.unit for r in survey.receipts if _can_stay(survey, r, units.get(r.unit, ()))]
    mended = {unit: tuple(units.pop(unit)) for unit in sorted(staying)}
    names, kept = _files_to_remove(survey, units)
    unsettled = tuple(f for f in survey.findings if f.kind is Kind.UNSETTLED)
    changes = units or mended or unsettled
    return Repair(
        survey=survey,
        units={unit: tuple(findings) for unit, findings in sorted(units.items())},
        names=names,
        kept=kept,
        mended=mended,
        unsettled=unsettled,
        # tables last, which are read by the indexes
        indexes=tuple(sorted((f.name for f in indexes if f.unit not in units), key=is_table)),
        writes_manifest=bool(changes)
        or any(f.kind is Kind.MANIFEST or is_table(f.name) for f in survey.findings),
        beyond=tuple(beyond),
    )


def _can_stay(survey: DatasetSurvey, receipt: Receipt, findings: Collection[Finding]) -> bool:
    """Return whether a repair mends a unit and leaves its shards as they are.

    It does if only the rejects or the list of inputs are damaged, and the images are from the web,
    where some may have gone. Shards do not stay if the receipt states more than `MOST_MENDED`
    inputs, or if a removal has begun to change them. `findings` are those about the unit.
    """
    unit, is_of_web = receipt.unit, receipt.settings.get("source") == "urls"
    is_changing = unit in survey.begun and survey.removing[unit].shards
    if not findings or not is_of_web or receipt.inputs > MOST_MENDED or is_changing:
        return False
    return {finding.name for finding in findings} <= {rejects_name(unit), inputs_name(unit)}


def _files_to_remove(
    survey: DatasetSurvey, units: Mapping[str, Iterable[Finding]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files to remove, receipts first, and the lists of inputs that stay.

    These are of retries, and of slices that an earlier append made: the order of the source no
    longer tells which samples are in them.
    """
    generations = survey.manifest.generations if survey.manifest else ()
    last = max((*generations, *(receipt.generation for receipt in survey.receipts)), default=0)
    receipts = [name for unit in units if (name := receipt_name(unit)) in survey.files]
    named = {finding.name for findings in units.values() for finding in findings}
    kept = sorted(
        name
        for unit in units
        if (name := inputs_name(unit)) in survey.files and name not in named
        if is_retry(unit) or (survey.dataset == "images" and unit.isdecimal() and int(unit) < last)
    )
    rest = sorted(
        name
        for name in survey.files.keys() - {*receipts, *kept}
        if _is_ours(survey, name) and (name in named or unit_of_file(name, survey.dataset) in units)
    )
    return (*receipts, *rest), tuple(kept)


def _is_ours(survey: DatasetSurvey, name: str) -> bool:
    receipt, rest = OURS[survey.dataset]
    match = rest.fullmatch(name)
    if survey.dataset == "images" and match and match[1]:
        return int(match[1]) in survey.settings["buckets"]
    return bool(match or receipt.fullmatch(name))


def do_repair(repair: Repair, on_count: Callable[[int], None] = lambda _count: None) -> Repair:
    """Carry out a repair, and return it with what was done.

    `on_count` gets the number of files removed or written. Units that have changed since they were
    found are left as they are.
    """
    changed: list[str] = []
    with closing(_change_files(repair, changed)) as changes:
        for done, _ in enumerate(changes, 1):
            on_count(done)
    return replace(repair, changed=tuple(changed), done=True)


def _change_files(repair: Repair, changed: list[str]) -> Generator[None, None, None]:
    """Remove and write files, and yield after each of them.

    What is not as it was found is left as it is, and its name is added to `changed`.
    """
    survey, edition = repair.survey, repair.survey.edition
    store = edition.store

    def is_same(shown: str, names: Collection[str]) -> bool:
        if has_changed := survey.has_changed(names):
            changed.append(shown)
        return not has_changed

    names_of = {unit: {f.name for f in findings} for unit, findings in repair.units.items()}
    for name in survey.files:
        if (unit := unit_of_file(name, survey.dataset)) in names_of:
            names_of[unit].add(name)
    order = {name: place for place, name in enumerate(repair.names)}
    for unit, names in names_of.items():
        with edition.holding(unit):
            removed = sorted(names & order.keys(), key=order.__getitem__)
            for name in removed if is_same(unit, names) else ():
                store.delete(name)
                yield
    for unit, findings in repair.mended.items():
        names = {finding.name for finding in findings}
        with edition.holding(unit):
            if not is_same(unit, {receipt_name(unit), *names}):
                continue
            if rejects_name(unit) in names:
                gone = read_retries(edition).taken_from(unit)
                mend_rejects(store, read_receipt(store, unit), gone)
                yield
            if inputs_name(unit) in names:
                store.delete(inputs_name(unit))
                yield
    if repair.unsettled:
        receipts = survey.receipts
        known = Manifest(dataset="images", settings=receipts[0].settings, receipts=receipts)
        read_retries(edition).settle(known)
    units = {finding.name: finding.unit for finding in survey.findings}
    for name in repair.indexes:
        with edition.holding(units[name]):
            if is_same(name, {tar_of(name), name}):
                _write_index(store, units[name], name)
                yield
    if repair.writes_manifest:
        with edition.holding_manifest():
            _write_manifest(store, survey)
    store.sweep()


def _write_index(store: Store, unit: str, name: str) -> None:
    """Write an index or a table anew."""
    if not is_table(name):
        write_index(store, tar_of(name))
    elif not write_table(store, read_receipt(store, unit), tar_of(name)):
        raise FormatError(
            f"{store.url}/{name} cannot be made, as {UNTOLD}: run the same "
            '"wdsprep encode" again with --overwrite'
        )


def mend_rejects(store: Store, receipt: Receipt, gone: Collection[str]) -> None:
    """Write the rejects of a unit again, and correct its receipt.

    Rejects that can be read stay, but for those that a retry has taken over (`gone`). Inputs that
    are then neither samples nor rejects become rejects whose record was lost. A second call changes
    nothing.
    """
    name = rejects_name(receipt.unit)
    left = [r for r in _read_sound_rejects(store, receipt.unit) if not is_moved(r, gone)]
    taken: set[str] = set()
    for shard in receipt.shards:
        with open_tape(store, shard.name) as tape:
            taken.update(sample.key for sample in read_samples(tape, shard.name))
    known = {reject.key: reject for reject in left if reject.key not in taken}
    lost = receipt.inputs - len(taken) - len(known)
    free = (sample_key(receipt.unit, number) for number in count())
    for key in islice((k for k in free if k not in taken and k not in known), max(0, lost)):
        known[key] = Reject(key=key, source="", code=Code.RECORD_LOST)
    data, rejects = rejects_file(known[key] for key in sorted(known, key=key_order))
    write_bytes(store, name, data)
    mended = replace(
        receipt,
        inputs=len(taken) + len(known),
        rejects=dict(rejects.counts),
        files={**{n: d for n, d in receipt.files.items() if is_table(n)}, name: rejects.digest},
    )
    write_bytes(store, receipt_name(receipt.unit), mended.to_bytes())


def _read_sound_rejects(store: Store, unit: str) -> Iterator[Reject]:
    """Yield the rejects of a unit that can still be read, and none if the file is missing."""
    with suppress(NotFoundError):
        for line in store.read(rejects_name(unit)).splitlines():
            with suppress(FormatError):
                yield from (r for r in read_rejects(line, unit) if r.key.startswith(unit))


def _write_manifest(store: Store, survey: DatasetSurvey) -> None:
    if rewrite_manifest(store):
        return
    if survey.manifest is not None:
        write_manifest(store, replace(survey.manifest, receipts=(), complete=False))
    else:
        store.delete(MANIFEST)  # nothing is left to make a manifest from
