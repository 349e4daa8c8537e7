"""`verify`: check datasets, and latents against their images."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from wdsprep.checks.dataset_check import DatasetSurvey, expected_files, survey
from wdsprep.checks.findings import Finding, Kind, UnitFindings
from wdsprep.checks.matching_images import check_keys, check_pairs, find_images, find_limited_shards
from wdsprep.checks.options import VerifyOptions
from wdsprep.checks.unit_check import Checking, CheckUnit, check_empty
from wdsprep.dataset.file_names import receipt_name
from wdsprep.dataset.receipts import Receipt
from wdsprep.errors import UsageError
from wdsprep.options import Place, takes_datasets
from wdsprep.runners.base import Runner
from wdsprep.runners.in_process import runner_for
from wdsprep.runners.job import JobListener, JobStatus, job_largest_first
from wdsprep.store import shared_store
from wdsprep.store.base import absolute
from wdsprep.text import NotebookTable, plural

_log = logging.getLogger("wdsprep")


@dataclass(frozen=True, kw_only=True)
class Verified(NotebookTable):
    """The result of a verification, by dataset; with `is_quick` no shard was read."""

    surveys: tuple[DatasetSurvey, ...]
    is_quick: bool

    def table_rows(self) -> Iterator[tuple[str, object]]:
        for one in self.surveys:
            yield (
                one.place.shown,
                plural(len(one.findings), "finding") if one.findings else "sound",
            )
        yield from ((f"{finding.name or finding.unit}", finding.what) for finding in self.findings)

    def __repr__(self) -> str:
        shown = ", ".join(repr(survey.place.shown) for survey in self.surveys)
        found = plural(len(self.findings), "finding") if self.findings else "sound"
        return f"<Verified {shown}: {found}{' (quick)' if self.is_quick else ''}>"

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(f for survey in self.surveys for f in survey.findings if not f.kind.is_note)

    @property
    def notes(self) -> tuple[Finding, ...]:
        return tuple(f for survey in self.surveys for f in survey.findings if f.kind.is_note)


@takes_datasets(VerifyOptions)
def verify(datasets: Sequence[Place], options: VerifyOptions) -> Verified:
    """Check every byte of datasets; given images and their latents, also that they match.

        verified = wdsprep.verify("shards/images", "shards/latents-256")
        [str(finding) for finding in verified.findings]  # what is wrong, and what to do

    The options are those of `wdsprep verify`. Nothing is changed.
    """
    if not datasets:
        raise UsageError("nothing to verify: give the path or URL of a dataset")
    listener = options.heard_by
    make_runner = partial(runner_for, options, told=listener.told, name="verify", is_safe=True)
    return check_datasets(datasets, make_runner=make_runner, quick=options.quick, listener=listener)


def check_datasets(
    urls: "Sequence[str | os.PathLike[str]]",
    *,
    make_runner: Callable[[int, int], Runner],
    quick: bool = False,
    listener: JobListener | None = None,
) -> Verified:
    """Check the datasets at `urls`, and compare latents with the images among them.

    `make_runner(units, nbytes)` returns the runner whose workers read the shards.
    """
    listener = listener or JobListener()
    places = [absolute(url) for url in urls]
    if len(set(places)) < len(places):
        raise UsageError("the same dataset is given twice: give it once")
    shown = [os.fspath(url) for url in urls]
    surveys = tuple(_survey(*both, listener) for both in zip(places, shown, strict=True))
    pairs = _pairs(surveys)
    for latents, images in pairs:
        check_pairs(latents, images)
    if not quick:
        _ByteCheck(surveys, pairs, listener).check(make_runner)
    for found in surveys:
        found.findings.sort(key=lambda finding: (finding.kind.is_note, finding.name))
    return Verified(surveys=surveys, is_quick=quick)


def _survey(url: str, shown: str, listener: JobListener) -> DatasetSurvey:
    shown = shown.rstrip("/") or "/"
    return survey(shared_store(url), shown, lambda count: listener.listed(shown, count, 0))


def _pairs(surveys: Sequence[DatasetSurvey]) -> list[tuple[DatasetSurvey, DatasetSurvey]]:
    latents = [survey for survey in surveys if survey.place.dataset == "latents"]
    found = [(survey, find_images(survey, surveys)) for survey in latents]
    return [(survey, images) for survey, images in found if images is not None]


class _ByteCheck:
    """A check of every byte of some datasets."""

    def __init__(
        self,
        surveys: Sequence[DatasetSurvey],
        pairs: Sequence[tuple[DatasetSurvey, DatasetSurvey]],
        listener: JobListener,
    ) -> None:
        self._surveys, self._pairs, self._listener = surveys, pairs, listener
        self._by_url = {survey.place.url: survey for survey in surveys}
        self._keys: dict[str, dict[str, str]] = {url: {} for url in self._by_url}

    def check(self, make_runner: Callable[[int, int], Runner]) -> None:
        units = [unit for survey in self._surveys for unit in self._units(survey)]
        job = job_largest_first(make_runner, Checking(), units, heard=self._heard)
        with closing(job):
            for unit, made in job.results():
                self._take(unit, made)
        for failed in job.quarantined:
            unit = cast("CheckUnit", failed.unit)
            what = f"its unit could not be checked ({failed.reason})"
            found = self._by_url[unit.place.url]
            found.add_finding(receipt_name(unit.receipt.unit), Kind.UNCHECKED, what)
        for found in self._surveys:
            check_empty(found)
        for latents, images in self._pairs:
            made, those = (self._keys[found.place.url] for found in (latents, images))
            check_keys(latents, made, those)

    def _units(self, found: DatasetSurvey) -> Iterable[CheckUnit]:
        known: dict[str, set[str]] = {}
        for finding in found.findings:
            if finding.kind is Kind.UNSETTLED:
                continue
            known.setdefault(finding.unit, set()).add(finding.name)
        cut: dict[str, int] = {}
        for latents, images in self._pairs:
            cut |= find_limited_shards(latents) if images is found else {}
        for receipt in found.receipts:
            shards = {shard.name for shard in receipt.shards}
            yield CheckUnit(
                place=found.place,
                receipt=receipt,
                known=frozenset(known.get(receipt.unit, ())),
                firsts={name: cut[name] for name in shards & cut.keys()},
                begun=found.removing[receipt.unit] if receipt.unit in found.begun else None,
            )

    def _take(self, unit: CheckUnit, made: UnitFindings) -> None:
        _log.info("%s is checked: %s", unit.name, plural(len(made.findings), "finding"))
        self._keys[unit.place.url] |= made.keys
        found = self._by_url[unit.place.url]
        if made.findings and not self._is_being_changed(found, unit.receipt):
            found.findings.extend(made.findings)

    def _is_being_changed(self, found: DatasetSurvey, receipt: Receipt) -> bool:
        """Return whether a removal has changed a unit while it was checked."""
        if receipt.unit not in found.removing:
            return False
        return found.has_changed([file.name for file in expected_files(receipt)])

    def _heard(self, status: Callable[[], JobStatus]) -> None:
        self._listener.status(lambda: replace(status(), findings=self._findings))

    @property
    def _findings(self) -> int:
        return sum(not f.kind.is_note for found in self._surveys for f in found.findings)
