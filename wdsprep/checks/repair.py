"""`repair`: remove what is damaged, so that the next `pack` or `encode` makes exactly that again.

A damaged file costs its unit of work: without its receipt a unit never happened, so receipts go
first, and a repair that is killed leaves nothing worse than a unit to do again. Indexes, tables of
samples and the manifest cost no unit: they are made again on the spot, from tars and receipts.

Images may have gone from the web. So if only files beside their shards are damaged, the shards
stay: rejects that can be read stay too, and the others become rejects whose record was lost; a list
of inputs is removed, and the next `pack` writes it again from the table.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
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
from wdsprep.text import examples, plural

MayRepair = Callable[[str, Collection[str]], bool]
OnFile = Callable[[], None]
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
    verified = check_datasets([options.dataset], options)
    plan = plan_repair(verified.surveys[0], is_quick=options.quick)
    listener.on_begin(plan)
    if plan.is_needed and (options.yes or listener.confirm(plan)):
        return do_repair(plan, lambda files: listener.on_change(files, 0))
    return plan


@dataclass(frozen=True, kw_only=True)
class Repair:
    """The plan of a repair, and its result once it is `done`.

    `units` of work are done again, each because of the findings beside it. The files `names` are
    removed in this order.
    """

    survey: DatasetSurvey
    is_quick: bool
    """Whether no shard was read: then damage that keeps the size of a file was not looked for."""
    units: Mapping[str, tuple[Finding, ...]]
    names: tuple[str, ...]
    mended: Mapping[str, tuple[Finding, ...]]
    """Units whose shards stay, while a file beside them is made again or removed."""
    unsettled: tuple[Finding, ...]
    """Findings about a retry that was killed before rejects and rows agreed again."""
    remade: tuple[str, ...]
    """Indexes and tables of samples that are made again from their tars, tables last."""
    writes_manifest: bool
    beyond: tuple[Finding, ...]
    """Findings that a repair does nothing about."""
    changed: tuple[str, ...] = ()
    """Files that other runs had changed before the repair came to them."""
    done: bool = False

    def __repr__(self) -> str:
        parts = [
            f"{plural(len(self.units), 'unit')} to make again" * bool(self.units),
            f"{plural(len(self.mended), 'unit')} to mend" * bool(self.mended),
            f"{plural(len(self.remade), 'index or table', 'indexes or tables')} to write"
            * bool(self.remade),
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
        is_repaired = self.done or not self.is_needed
        return is_repaired and not self.beyond and not self.changed

    @property
    def is_needed(self) -> bool:
        mends = self.mended or self.unsettled
        return bool(self.units or mends or self.remade or self.writes_manifest)

    @property
    def redone(self) -> frozenset[str]:
        """Return the units that are made again.

        Units whose receipt belongs to another kind of dataset are not among them.
        """
        pattern, _ = OURS[self.survey.dataset]
        return frozenset(unit for unit in self.units if pattern.fullmatch(receipt_name(unit)))

    @property
    def samples(self) -> int:
        """Return how many samples the shards to remove have, as far as receipts can be read."""
        removed = (receipt for receipt in self.survey.receipts if receipt.unit in self.units)
        return sum(shard.samples for receipt in removed for shard in receipt.shards)


def plan_repair(survey: DatasetSurvey, *, is_quick: bool = False) -> Repair:
    """Plan what to do about the findings of a verification. It `is_quick` if it read no shard."""
    units: dict[str, list[Finding]] = {}
    remade, beyond = [], []
    # Retry slices without a sound list of inputs: nothing else tells what to make them from.
    retries_without_inputs = {
        finding.unit
        for finding in survey.findings
        if is_retry(finding.unit) and finding.name == inputs_name(finding.unit)
    }
    for finding in survey.findings:
        if finding.kind in REDONE and finding.unit not in retries_without_inputs:
            units.setdefault(finding.unit, []).append(finding)
        elif finding.kind is Kind.INDEX:
            remade.append(finding)
        elif finding.kind is not Kind.MANIFEST and not finding.kind.is_note:
            beyond.append(finding)
    mended: dict[str, tuple[Finding, ...]] = {}
    for receipt in survey.receipts:
        unit = receipt.unit
        names = {finding.name for finding in units.get(unit, ())}
        is_beside = bool(names) and names <= {rejects_name(unit), inputs_name(unit)}
        is_of_web = receipt.settings.get("source") == "urls" and receipt.inputs <= MOST_MENDED
        is_half_removed = unit in survey.begun and bool(survey.removing[unit].shards)
        if is_beside and is_of_web and not is_half_removed:
            mended[unit] = tuple(units.pop(unit))
    unsettled = tuple(f for f in survey.findings if f.kind is Kind.UNSETTLED)
    changes = units or mended or unsettled
    return Repair(
        survey=survey,
        is_quick=is_quick,
        units={unit: tuple(findings) for unit, findings in sorted(units.items())},
        names=_files_to_remove(survey, units),
        mended=mended,
        unsettled=unsettled,
        # tables last, which are read by the indexes
        remade=tuple(sorted((f.name for f in remade if f.unit not in units), key=is_table)),
        # A new table may have another digest, which its receipt and so the manifest record.
        writes_manifest=bool(changes)
        or any(f.kind is Kind.MANIFEST or is_table(f.name) for f in survey.findings),
        beyond=tuple(beyond),
    )


def _files_to_remove(
    survey: DatasetSurvey, units: Mapping[str, Iterable[Finding]]
) -> tuple[str, ...]:
    """Return the files to remove, receipts first.

    The lists of inputs of retries stay, and those of slices that an earlier append made: the order
    of the source no longer tells which samples are in them.
    """
    generations = survey.manifest.generations if survey.manifest else ()
    last = max((*generations, *(receipt.generation for receipt in survey.receipts)), default=0)
    receipts = [name for unit in units if (name := receipt_name(unit)) in survey.files]
    named = {finding.name for findings in units.values() for finding in findings}
    staying = {
        inputs_name(unit)
        for unit in units
        if is_retry(unit) or (survey.dataset == "images" and unit.isdecimal() and int(unit) < last)
    }
    receipt_pattern, file_pattern = OURS[survey.dataset]
    rest = []
    for name in sorted(survey.files.keys() - {*receipts, *(staying - named)}):
        match = file_pattern.fullmatch(name)
        if survey.dataset == "images" and match and match[1]:
            is_ours = int(match[1]) in survey.settings["buckets"]
        else:
            is_ours = bool(match or receipt_pattern.fullmatch(name))
        if is_ours and (name in named or unit_of_file(name, survey.dataset) in units):
            rest.append(name)
    return (*receipts, *rest)


def do_repair(repair: Repair, on_count: Callable[[int], None] = lambda _count: None) -> Repair:
    """Carry out a repair, and return it with what was done.

    `on_count` gets the number of files removed or written. Units that have changed since they were
    found are left as they are. If a table cannot be made, raise FormatError once all else is done.
    """
    survey, store = repair.survey, repair.survey.edition.store
    file_numbers, changed = count(1), list[str]()

    def on_file() -> None:
        on_count(next(file_numbers))

    def may_repair(what: str, names: Collection[str]) -> bool:
        """Return whether these files are as they were found. If not, note in `changed` what is."""
        if has_changed := survey.has_changed(names):
            changed.append(what)
        return not has_changed

    _remove_units(repair, may_repair, on_file)
    _mend_units(repair, may_repair, on_file)
    if repair.unsettled:
        receipts = survey.receipts
        known = Manifest(dataset="images", settings=receipts[0].settings, receipts=receipts)
        read_retries(survey.edition).settle(known)
    unmade = _write_indexes_and_tables(repair, may_repair, on_file)
    if repair.writes_manifest:
        _write_manifest(survey)
    store.sweep()
    if unmade:
        raise FormatError(
            f"{store.url}/{examples(unmade)} cannot be made, as {UNTOLD}: run the same "
            f'"{survey.maker}" again with --overwrite'
        )
    return replace(repair, changed=tuple(changed), done=True)


def _remove_units(repair: Repair, may_repair: MayRepair, on_file: OnFile) -> None:
    """Remove the files of the units that are made again, if none of a unit's has changed."""
    survey = repair.survey
    files_by_unit = {unit: {f.name for f in findings} for unit, findings in repair.units.items()}
    for name in survey.files:
        if (unit := unit_of_file(name, survey.dataset)) in files_by_unit:
            files_by_unit[unit].add(name)
    order = {name: place for place, name in enumerate(repair.names)}
    for unit, names in files_by_unit.items():
        with survey.edition.holding(unit):
            if may_repair(unit, names):
                for name in sorted(names & order.keys(), key=order.__getitem__):
                    survey.edition.store.delete(name)
                    on_file()


def _mend_units(repair: Repair, may_repair: MayRepair, on_file: OnFile) -> None:
    """Write the rejects of units whose shards stay again, and remove their lists of inputs."""
    edition = repair.survey.edition
    for unit, findings in repair.mended.items():
        names = {finding.name for finding in findings}
        with edition.holding(unit):
            if not may_repair(unit, {receipt_name(unit), *names}):
                continue
            if rejects_name(unit) in names:
                gone = read_retries(edition).taken_from(unit)
                mend_rejects(edition.store, read_receipt(edition.store, unit), gone)
                on_file()
            if inputs_name(unit) in names:
                edition.store.delete(inputs_name(unit))
                on_file()


def _write_indexes_and_tables(repair: Repair, may_repair: MayRepair, on_file: OnFile) -> list[str]:
    """Make indexes and tables again from their tars. Return the tables that cannot be made."""
    store, unmade = repair.survey.edition.store, list[str]()
    units = {finding.name: finding.unit for finding in repair.survey.findings}
    for name in repair.remade:
        with repair.survey.edition.holding(units[name]):
            if not may_repair(name, {tar_of(name), name}):
                continue
            if not is_table(name):
                write_index(store, tar_of(name))
            elif not write_table(store, read_receipt(store, units[name]), tar_of(name)):
                unmade.append(name)
                continue
            on_file()
    return unmade


def _write_manifest(survey: DatasetSurvey) -> None:
    """Make the manifest again from the receipts. If none is left, it lists none, or goes too."""
    store = survey.edition.store
    with survey.edition.holding_manifest():
        if rewrite_manifest(store):
            return
        if survey.manifest is not None:
            write_manifest(store, replace(survey.manifest, receipts=(), complete=False))
        else:
            store.delete(MANIFEST)


def mend_rejects(store: Store, receipt: Receipt, gone: Collection[str]) -> None:
    """Write the rejects of a unit again, and correct its receipt.

    Rejects that can be read stay, but for those that a retry has taken over (`gone`). Inputs that
    are then neither samples nor rejects become rejects whose record was lost. A second call changes
    nothing.
    """
    unit, name = receipt.unit, rejects_name(receipt.unit)
    taken: set[str] = set()
    for shard in receipt.shards:
        with open_tape(store, shard.name) as tape:
            taken.update(sample.key for sample in read_samples(tape, shard.name))
    known: dict[str, Reject] = {}
    with suppress(NotFoundError):
        for line in store.read(name).splitlines():
            with suppress(FormatError):
                for reject in read_rejects(line, unit):
                    is_of_unit = reject.key.startswith(unit) and reject.key not in taken
                    if is_of_unit and not is_moved(reject, gone):
                        known[reject.key] = reject
    unrecorded = receipt.inputs - len(taken) - len(known)
    free = (sample_key(unit, number) for number in count())
    for key in islice((k for k in free if k not in taken and k not in known), max(0, unrecorded)):
        known[key] = Reject(key=key, source="", code=Code.RECORD_LOST)
    data, rejects = rejects_file(known[key] for key in sorted(known, key=key_order))
    write_bytes(store, name, data)
    mended = replace(
        receipt,
        inputs=len(taken) + len(known),
        rejects=dict(rejects.counts),
        files={**{n: d for n, d in receipt.files.items() if is_table(n)}, name: rejects.digest},
    )
    write_bytes(store, receipt_name(unit), mended.to_bytes())
