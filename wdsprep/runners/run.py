"""One run over the units of a dataset that are left to do, up to the published manifest.

`pack` and `encode` differ in what a unit is and what is done with it; the runner's events become
receipts, a status and at last a manifest here, for both. `encode` may fill several datasets at
once: then each has its `Run`, and a `JointUnit` is a unit of those that lack it.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

from wdsprep.dataset.coarse_histograms import bin_name, sum_counts
from wdsprep.dataset.manifest import Manifest, Receipt, Receipts, line_of, sort_by_unit
from wdsprep.dataset.reject_codes import ENDS_A_TAR
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.stored_dataset import (
    file_filter,
    find_claim,
    read_manifest,
    refresh_manifest,
    retract,
    take_claim,
    tidy,
    write_manifest,
)
from wdsprep.dataset.thread_map import read_each
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import AccessError, FormatError, StoreError, WorkError
from wdsprep.runners.base import Event, Finished, Quarantined, Runner, Step, Unit, Work
from wdsprep.runners.job import JobListener, JobStatus
from wdsprep.runners.track import Figures, track_run
from wdsprep.store import open_store
from wdsprep.store.base import Store
from wdsprep.text import human_counts, plural

_log = logging.getLogger("wdsprep")
MOST_HOSTS = 2_000
CHECKPOINT = 10_000  # receipts; reading so many from S3 takes a quarter of a minute


def share_done(inputs: int, samples: float) -> float:
    """Return the part of a unit of so many `samples` that is done after `inputs` of them.

    Return 0 if `samples` is 0, which means that nobody has counted them.
    """
    return min(1.0, inputs / samples) if samples else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """The progress of a unit.

    `share` is the part of its inputs that has been taken up, or 0 if nobody has counted
    them. `failed_hosts` counts failed downloads by host and code, such as `example.org (dns)`, for
    the hosts at which most failed.
    """

    samples: int
    nbytes: int
    share: float
    rejects: Mapping[str, int]
    failed_hosts: Mapping[str, int] = field(default_factory=dict)
    parts: "Mapping[int, RunProgress]" = field(default_factory=dict)
    """The progress of each run by its number, which is summed up here, if the unit is a
    `JointUnit`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JointUnit:
    """A unit that belongs to several runs at once; `parts` has the unit of each run by its number.

    Its progress and its result have a part for each run.
    """

    parts: Mapping[int, Unit]

    @property
    def name(self) -> str:
        return next(iter(self.parts.values())).name


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a run: the dataset as it is now, and what could not be done."""

    manifest: Manifest
    samples: int
    nbytes: int
    units_before: int
    quarantined: tuple[Quarantined, ...]
    failed_hosts: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        there = self.manifest
        state = "complete" if there.complete else "not complete"
        parts = [f"{plural(there.samples, 'sample')} in {plural(len(there.shards), 'shard')}"]
        parts += [f"rejects: {human_counts(there.rejects)}"] if there.rejects else []
        parts += [f"{plural(len(self.quarantined), 'unit')} left out"] if self.quarantined else []
        return f"<Outcome {there.dataset}, {state}: {', '.join(parts)}>"

    @property
    def broken_tars(self) -> int:
        """Return how many tars of the source could not be read to their end."""
        return sum(self.manifest.rejects.get(code.value, 0) for code in ENDS_A_TAR)

    @property
    def is_damaged(self) -> bool:
        """Return whether units failed, source tars are broken, or all samples are rejects."""
        return bool(self.quarantined or self.broken_tars or self.is_void)

    @property
    def is_void(self) -> bool:
        """Return whether all samples became rejects."""
        return bool(self.manifest.rejects and not self.manifest.samples)

    @property
    def captionless(self) -> int:
        """Return how many samples have an empty caption."""
        manifest = self.manifest
        name = "empty_caption" if manifest.dataset == "latents" else bin_name("caption", 0)
        return manifest.counts.get(name, 0)

    @property
    def has_captions(self) -> bool:
        """Return whether any sample has a caption that is not empty. True for an empty dataset."""
        return not self.manifest.samples or self.captionless < self.manifest.samples


class Run:
    """A run that makes a dataset: from the receipts of its units to the published manifest.

    `count` units are left to do, which hold `samples` samples, or 0 if nobody has counted these.
    The manifest has the units that were done before. `whole` says that these are all units there
    will ever be, unless a `limit` cuts them short. `settle` sees the
    receipts before they are published, and `extra` returns what else the manifest says. The
    manifest is first written after CHECKPOINT receipts, and then less and less often.
    """

    def __init__(
        self,
        edition: Edition,
        manifest: Manifest,
        *,
        count: int,
        samples: int = 0,
        limit: int = 0,
        whole: bool = True,
        extra: Callable[[], Mapping[str, Any]] = dict,
        settle: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    ) -> None:
        self._edition, self.store = edition, edition.store
        self.manifest, self.count = manifest, count
        self._published = manifest
        self._limit, self._whole = limit, whole
        self._extra, self._settle = extra, settle
        self._failed_hosts: Counter[str] = Counter()
        self._lines: list[bytes] = []  # receipts as lines: a million objects take 1.5 GB
        self._next_checkpoint = CHECKPOINT
        self._going: dict[str, RunProgress] = {}
        self._quarantined: list[Quarantined] = []
        self._written = before = len(manifest.receipts)
        self._total = JobStatus(units=before + count, units_done=before, samples_of=samples)

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Mark the manifest incomplete, run the block, and publish the manifest however it ends.

        It is marked only if units are left to do.
        """
        try:
            if self.count:
                mark_incomplete(self._edition)
            yield
        finally:
            self._published = self._publish()

    @property
    def outcome(self) -> Outcome:
        """Return the result of the run, whose manifest has to be published before.

        Raise WorkError if the published manifest lacks a unit that this run has finished.
        """
        published = self._published
        if unseen := set(self._receipts.units()).difference(published.ledger.units()):
            raise WorkError(
                f"{min(unseen)} was finished, but its receipt is not in {self.store.url}: "
                "another run has taken it away (run again), or the workers run on machines that "
                "see another folder there (give one that all share, or a bucket)"
            )
        return Outcome(
            manifest=published,
            samples=self._total.samples,
            nbytes=self._total.nbytes,
            units_before=len(self.manifest.receipts),
            quarantined=self._missing_units(published),
            failed_hosts=dict(self._failed_hosts.most_common()),
        )

    def take(self, event: Event) -> None:
        name = event.unit.name
        if isinstance(event, Step):
            self._going[name] = cast("RunProgress", event.value)
        elif last := self._going.pop(name, None):
            self._failed_hosts.update(last.failed_hosts)
            if len(self._failed_hosts) > MOST_HOSTS:
                most = self._failed_hosts.most_common(MOST_HOSTS // 2)
                self._failed_hosts = Counter(dict(most))
        if isinstance(event, Finished):
            receipt = cast("Receipt", event.result)
            samples = sum(shard.samples for shard in receipt.shards)
            rejects = plural(sum(receipt.rejects.values()), "reject")
            _log.info("%s is done: %s, %s", name, plural(samples, "sample"), rejects)
            self._lines.append(line_of(receipt))
            if len(self._lines) >= self._next_checkpoint:
                self._checkpoint()
            self._total = replace(
                self._total,
                samples=self._total.samples + samples,
                nbytes=self._total.nbytes + sum(shard.nbytes for shard in receipt.shards),
                rejects=sum_counts((self._total.rejects, receipt.rejects)),
                units_done=self._total.units_done + 1,
            )
        elif isinstance(event, Quarantined):
            self._quarantined.append(event)

    @property
    def _receipts(self) -> Receipts:
        return self.manifest.ledger.with_lines(self._lines)

    def _checkpoint(self) -> None:
        """Write the manifest with the receipts known so far.

        After a driver was killed, few receipts then have to be read one by one. This
        happens each time a quarter more is known than before, which writes about five times
        as much as one manifest at the end. If another run has written more meanwhile,
        its manifest stays.
        """
        known = chain(self.manifest.ledger.named_lines(), self._receipts.named_lines())
        lines = sort_by_unit(dict(known))
        with self._edition.holding_manifest():
            there = _read_manifest_or_none(self.store)
            if there is None or len(there.receipts) <= self._written:
                receipts = self._receipts.with_lines(lines)
                manifest = replace(self.manifest, receipts=receipts, complete=False)
                write_manifest(self.store, _with_appends(manifest, there))
                self._written = len(lines)
        self._next_checkpoint = len(self._lines) + max(CHECKPOINT, len(lines) // 4)

    def status(self) -> JobStatus:
        """Return the state of this run: its finished units, and the progress of those under way.

        Of a run that has ended, the published manifest says which units are finished.
        """
        has_ended = self._published is not self.manifest
        published = set(self._published.ledger.units()) if has_ended else set[str]()
        going = [progress for unit, progress in self._going.items() if unit not in published]
        finished = len(self._lines) + len(self._quarantined)
        # A unit whose samples nobody has counted is taken to hold as many as finished units do on
        # average. Until one is finished, it is at 0: a guess might be wrong by days.
        inputs = self._total.samples + sum(self._total.rejects.values())
        average = inputs / max(1, len(self._lines))
        under_way = sum(
            part.share or share_done(part.samples + sum(part.rejects.values()), average)
            for part in going
        )
        return replace(
            self._total,
            share_done=(finished + under_way) / max(1, self.count),
            units_done=max(self._total.units_done, len(published)),
            samples=self._total.samples + sum(progress.samples for progress in going),
            unfinished=sum(part.samples + sum(part.rejects.values()) for part in going),
            nbytes=self._total.nbytes + sum(progress.nbytes for progress in going),
            rejects=sum_counts((self._total.rejects, *(progress.rejects for progress in going))),
        )

    def _missing_units(self, manifest: Manifest) -> tuple[Quarantined, ...]:
        """Return the units that were given up and that the manifest does not have.

        Of several runs, one may have got its part of a unit before the worker died over
        another's part.
        """
        names = {failed.unit.name for failed in self._quarantined}
        names.difference_update(manifest.ledger.units() if names else ())
        return tuple(failed for failed in self._quarantined if failed.unit.name in names)

    def _publish(self) -> Manifest:
        """Write the manifest with all receipts that are in the store, and return it.

        The dataset is complete if the units are `whole`, each has a receipt, and no other run has
        begun an append meanwhile. Under a limit, it must have been complete already, with nothing
        to do for this run. If it becomes complete, files that belong to no receipt are removed.
        What killed workers left is removed if this run had units to do.
        """
        held: set[str] = set()
        with self._edition.holding_manifest():
            there = _read_manifest_or_none(self.store)
            manifest = refresh_manifest(
                self.store, self.manifest, self._receipts, there, locks=held
            )
            manifest = self._settle(manifest)
            if self._limit:
                complete = bool(not self.count and manifest.complete and there and there.complete)
            else:
                kept = len(self._quarantined) - len(self._missing_units(manifest))
                done, units = self._total.units_done + kept, self._total.units
                appended = there is not None and {*there.generations} - {*manifest.generations}
                complete = self._whole and done == units == len(manifest.receipts) and not appended
            if complete and not (there and there.complete):
                tidy(self._edition, manifest)
            extra = {**self._extra(), **({"limit": self._limit} if self._limit else {})}
            has_nothing_to_do = self._limit and not self.count
            if has_nothing_to_do and there and (there.complete or "limit" in there.extra):
                extra = dict(there.extra)
            manifest = replace(manifest, complete=complete, extra=extra)
            manifest = _with_appends(manifest, there)
            write_manifest(self.store, manifest)
        if self.count:
            sweep(self.store, manifest)  # a worker that was killed cleans up nothing

        def let_go(name: str) -> None:
            with contextlib.suppress(StoreError):  # all is published: another run may do it
                self.store.let_go(name)

        if held:  # perhaps by such a worker of an earlier run, which has left nothing else to do
            read_each(let_go, sorted(held), self.store.readers)
        return manifest


def do_runs(
    runs: Sequence[Run],
    runner: Runner | None,
    work: Work,
    units: Iterable[Unit],
    *,
    listener: JobListener | None = None,
    track: str = "",
    figures: Callable[[], Figures] = dict,
    on_step: Callable[[RunProgress], None] = lambda _progress: None,
) -> list[Outcome]:
    """Do the units of one run or of several, publish the manifests, and return the outcomes.

    The units of several runs are all `JointUnit`s. Without a runner no unit is done. The
    manifests are published however this ends. `on_step` is called with the progress of each step.

    The listener hears of the state of all runs together at each event. Where units are done, the
    tracker of the kind `track` gets it too, with the `figures` that only these runs have.
    """
    tracking = track_run(
        track if runner else "",
        [run.store.url for run in runs],
        listener or JobListener(),
        settings=runs[0].manifest.settings,
        before=sum(run.manifest.samples for run in runs),
        more=figures,
    )
    with tracking as on_status, contextlib.ExitStack() as under_way:
        for run in runs:
            under_way.enter_context(run.under_way())
        if runner is not None:
            with contextlib.closing(runner.run(work, units)) as events:
                for event in events:
                    if isinstance(event, Step):
                        on_step(cast("RunProgress", event.value))
                    for number, part in _parts(event):
                        runs[number].take(part)
                    on_status(lambda: joint_status(runs))
    return [run.outcome for run in runs]


def _parts(event: Event) -> Iterator[tuple[int, Event]]:
    """Yield the part of an event that each run gets, with the number of the run."""
    if not isinstance(event.unit, JointUnit):
        yield 0, event
        return
    for number, unit in event.unit.parts.items():
        part: dict[str, Any] = {"unit": unit}
        if isinstance(event, Step):
            part["value"] = cast("RunProgress", event.value).parts[number]
        elif isinstance(event, Finished):
            part["result"] = cast("Mapping[int, object]", event.result)[number]
        yield number, replace(event, **part)


def joint_status(runs: Sequence[Run]) -> JobStatus:
    """Return the states of several runs, added up."""
    statuses = [run.status() for run in runs]
    pairs = [*zip(statuses, runs, strict=True)]
    done = sum(status.share_done * run.count for status, run in pairs)
    samples_of = [status.samples_of for status, run in pairs if run.count]
    return JobStatus(
        samples=sum(status.samples for status in statuses),
        samples_of=sum(samples_of) if all(samples_of) else 0,
        unfinished=sum(status.unfinished for status in statuses),
        nbytes=sum(status.nbytes for status in statuses),
        rejects=sum_counts(status.rejects for status in statuses),
        units_done=sum(status.units_done for status in statuses),
        units=sum(status.units for status in statuses),
        share_done=done / max(1, sum(run.count for run in runs)),
    )


def _read_manifest_or_none(store: Store) -> Manifest | None:
    """Return the manifest that is in the store, or None if there is none, or a damaged one."""
    try:
        return read_manifest(store)
    except FormatError:
        return None


def _with_appends(manifest: Manifest, there: Manifest | None) -> Manifest:
    """Add the generations that another run has begun meanwhile to a manifest."""
    begun = there.generations if there else ()
    return replace(manifest, generations=tuple(sorted({*manifest.generations, *begun})))


def mark_incomplete(edition: Edition) -> None:
    """Write the manifest again as incomplete, if it is complete, before the dataset is changed."""
    with edition.holding_manifest():
        there = _read_manifest_or_none(edition.store)
        if there is not None and there.complete:
            write_manifest(edition.store, replace(there, complete=False))


def remove_units(edition: Edition, units: Mapping[str, str]) -> None:
    """Remove units from a dataset, with all files that were made for them.

    `units` has the input that each unit was made from: a unit that by now was made from another
    input is kept. If `units` is not empty, the manifest is marked as incomplete first.
    """
    if units:
        mark_incomplete(edition)
    for unit, input_digest in units.items():
        retract(edition, unit, input_digest)


def write_generations(
    edition: Edition, manifest: Manifest, generations: tuple[int, ...]
) -> Manifest:
    """Write and return the manifest as incomplete, with the generation of an append that begins.

    Generations that other runs have begun meanwhile stay in the manifest.
    """
    with edition.holding_manifest():
        begun = replace(manifest, generations=generations, complete=False)
        begun = _with_appends(begun, _read_manifest_or_none(edition.store))
        write_manifest(edition.store, begun)
    return begun


def open_dataset_to_write(
    url: str, dataset: str, settings: Settings, *, overwrite: bool
) -> tuple[Edition, Manifest]:
    """Open or begin a dataset to write; with `overwrite`, remove the one that is there first.

    Raise an error if the dataset there is of another kind or, without `overwrite`, was made with
    other settings. What killed workers left is removed. The manifest that is returned has exactly
    the receipts that are in the store.
    """
    store = open_store(url)
    claim = take_claim(find_claim(store, dataset, settings, overwrite=overwrite))
    sweep_to_begin(store, claim.manifest)
    return claim.edition, claim.manifest


def sweep_to_begin(store: Store, manifest: Manifest) -> None:
    """Remove what killed workers have left, and log a warning of another run that is at work."""
    _, unfinished = sweep(store, manifest)
    if unfinished:
        _log.warning(
            "%s: another run seems to be at work on it now: both would do the same work, and do "
            "each other no harm; end one of them",
            store.url,
        )


def sweep(store: Store, manifest: Manifest) -> tuple[int, int]:
    """Remove what killed workers have left in a dataset, as `Store.sweep` does."""
    with contextlib.suppress(AccessError):  # S3 credentials that may write need not list uploads
        return store.sweep(file_filter(manifest))
    return 0, 0
