"""`verify`: check datasets, and latents against the images that they were made of.

Latents and their images have the same shards, with the same keys in the same order, apart from
rejects.

Billions of keys fit into no memory. Keys rise in a packed shard, and so in a latent shard or in
each of its shapes: the keys of a latent shard and of its rejects, sorted together, must be those of
the image shard, and a digest of them is enough.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import cast

from wdsprep.checks.dataset_check import DatasetSurvey, expected_files, survey_dataset
from wdsprep.checks.findings import Finding, Kind
from wdsprep.checks.options import VerifyOptions
from wdsprep.checks.unit_check import CheckUnit, check_empty, check_unit
from wdsprep.dataset.file_names import latent_shard, latent_unit, receipt_name
from wdsprep.dataset.manifest import image_shard_digest
from wdsprep.dataset.removed_samples import NONE_REMOVED, removed_from
from wdsprep.dataset.shapes import buckets_encoded
from wdsprep.errors import DamageError, UsageError
from wdsprep.options import Place, takes_datasets
from wdsprep.runners.make_runner import Job
from wdsprep.store import shared_store
from wdsprep.store.base import absolute_places
from wdsprep.text import plural

_log = logging.getLogger("wdsprep")


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The result of a verification, by dataset; with `is_quick` no shard was read."""

    surveys: tuple[DatasetSurvey, ...]
    is_quick: bool

    def __repr__(self) -> str:
        shown = ", ".join(repr(survey.shown) for survey in self.surveys)
        verdict = plural(len(self.findings), "finding") if self.findings else "sound"
        return f"<Verified {shown}: {verdict}{' (quick)' if self.is_quick else ''}>"

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
    return check_datasets(datasets, options)


def check_datasets(datasets: Sequence[Place], options: VerifyOptions) -> Verified:
    """Check datasets, and compare latents with the images among them."""
    stores = map(shared_store, absolute_places(datasets))
    shown = [os.fspath(dataset).rstrip("/") or "/" for dataset in datasets]
    on_listing = options.listener_or_mute.on_listing
    surveys = tuple(survey_dataset(*pair, on_listing) for pair in zip(stores, shown, strict=True))
    latents = [survey for survey in surveys if survey.dataset == "latents"]
    pairs = [(dataset, images) for dataset in latents if (images := find_images(dataset, surveys))]
    for pair in pairs:
        check_pairs(*pair)
    if not options.quick:
        _check_bytes(surveys, pairs, options)
    for dataset in surveys:
        dataset.findings.sort(key=lambda finding: (finding.kind.is_note, finding.name))
    return Verified(surveys=surveys, is_quick=options.quick)


def _check_bytes(
    surveys: Sequence[DatasetSurvey],
    pairs: Sequence[tuple[DatasetSurvey, DatasetSurvey]],
    options: VerifyOptions,
) -> None:
    """Check every byte of some datasets, and add what is wrong to their findings."""
    by_url = {survey.url: survey for survey in surveys}
    keys: dict[str, dict[str, str]] = {url: {} for url in by_url}

    def counts() -> dict[str, int]:
        findings = (f for dataset in surveys for f in dataset.findings)
        return {"findings": sum(not f.kind.is_note for f in findings)}

    units = [unit for survey in surveys for unit in _units(survey, pairs)]
    job = Job(options, check_unit, units, name="verify", is_safe=True, counts=counts)
    with closing(job):
        for unit, (findings, digests) in job.results():
            _log.info("%s is checked: %s", unit.name, plural(len(findings), "finding"))
            keys[unit.url] |= digests
            dataset = by_url[unit.url]
            is_in_removal = findings and unit.receipt.unit in dataset.removing
            names = [name for name, *_ in expected_files(unit.receipt)] if is_in_removal else []
            if not dataset.has_changed(names):  # by the removal, while it was checked
                for name, kind, what in findings:
                    dataset.keep_finding(name, kind, what, unit.receipt.unit)
    for failed in job.quarantined:
        unit = cast("CheckUnit", failed.unit)
        what = f"its unit could not be checked ({failed.reason})"
        by_url[unit.url].add_finding(receipt_name(unit.receipt.unit), Kind.UNCHECKED, what)
    for dataset in surveys:
        check_empty(dataset)
    what = "the keys of its shard and its rejects, or their order, are not the image shard's"
    for latents, images in pairs:
        for receipt in latents.receipts:
            both = [keys[place].get(receipt.input) for place in (latents.url, images.url)]
            if None not in both and both[0] != both[1]:
                _find(latents, receipt.unit, Kind.UNMATCHED, what)


def _units(
    dataset: DatasetSurvey, pairs: Sequence[tuple[DatasetSurvey, DatasetSurvey]]
) -> Iterator[CheckUnit]:
    known: dict[str, set[str]] = {}
    for finding in dataset.findings:
        if finding.kind is not Kind.UNSETTLED:
            known.setdefault(finding.unit, set()).add(finding.name)
    firsts = {  # the image shards of which only the first samples were encoded
        latent_shard(receipt.unit): int(number)
        for latents, images in pairs
        if images is dataset
        for receipt in latents.receipts
        if (number := receipt.input.partition(":")[2])
    }
    for receipt in dataset.receipts:
        shards = {shard.name for shard in receipt.shards}
        yield CheckUnit(
            url=dataset.url,
            receipt=receipt,
            known=frozenset(known.get(receipt.unit, ())),
            firsts={name: firsts[name] for name in shards & firsts.keys()},
            begun=dataset.removing[receipt.unit] if receipt.unit in dataset.begun else None,
        )


def find_images(latents: DatasetSurvey, others: Sequence[DatasetSurvey]) -> DatasetSurvey | None:
    """Return the image dataset that latents were made of, or None if there is no image dataset.

    It is the one whose shards most of the latents were made of.
    """
    inputs = {image_shard_digest(receipt.input) for receipt in latents.receipts}

    def shared(images: DatasetSurvey) -> int:
        return sum(shard.digest in inputs for shard in images.shards)

    return max((o for o in others if o.dataset == "images"), key=shared, default=None)


def check_pairs(latents: DatasetSurvey, images: DatasetSurvey) -> None:
    """Compare the receipts of latents with those of images, and add findings to the latents."""
    image_shards = {shard.name: shard for shard in images.shards}
    removed = NONE_REMOVED
    with suppress(DamageError):  # of which the images have a finding
        removed = removed_from(images.edition.store)
    for receipt in latents.receipts:
        name, inputs = latent_shard(receipt.unit), receipt.inputs
        shard, shown = image_shards.get(name), images.shown
        successor = removed.follow(image_shard_digest(receipt.input))
        if successor and successor.digest == (shard.digest if shard else ""):
            lost = plural(len(successor.rows), "sample has", "samples have")
            what = f"{lost} been removed from the {name} of {shown} since"
            _find(latents, receipt.unit, Kind.BEHIND, what)
        elif shard is None and not images.is_complete:
            what = f"{shown} has no shard {name}, and is not complete"
            latents.add_finding(name, Kind.UNPACKED, what, receipt.unit, maker=images.maker)
        elif shard is None:
            _find(latents, receipt.unit, Kind.CHANGED, f"{shown} has no shard {name}")
        elif image_shard_digest(receipt.input) != shard.digest:
            what = f"it was not made of the {name} that {shown} has now"
            _find(latents, receipt.unit, Kind.CHANGED, what)
        elif inputs != (samples := int(receipt.input.partition(":")[2] or shard.samples)):
            what = f"its shard and rejects have {inputs:,} of {plural(samples, 'sample')}"
            _find(latents, receipt.unit, Kind.UNMATCHED, what)
    if not (latents.receipts and latents.is_complete):
        return
    # Image shards without latents, but for those in buckets that are not encoded.
    encoded = buckets_encoded(latents.settings, images.settings["buckets"])
    units = {receipt.unit for receipt in latents.receipts}
    if latents.manifest:
        units.update(latents.manifest.ledger.units())
    for name, shard in image_shards.items():
        if shard.bucket in encoded and latent_unit(name) not in units:
            _find(latents, latent_unit(name), Kind.CHANGED, f"nothing was made of {name}")


def _find(latents: DatasetSurvey, unit: str, kind: Kind, what: str) -> None:
    latents.add_finding(latent_shard(unit), kind, what, unit)
