"""What `verify` and `repair` print: progress, findings, what `repair` will do and has done."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wdsprep.checks.dataset_check import DatasetSurvey
from wdsprep.checks.findings import Finding
from wdsprep.checks.repair import Repair
from wdsprep.checks.verify import Verified
from wdsprep.cli.base_command import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import CommandOutput, KeptLine, echo
from wdsprep.dataset.file_names import MAKERS
from wdsprep.runners.job import JobListener, JobStatus
from wdsprep.text import EXAMPLES, command, examples, human_bytes, human_time, join_lines, plural


class VerifyOutput(CommandOutput[Verified]):
    """The output of `verify`: a progress line, and at the end the findings."""

    unit = "unit"

    def __init__(self, options: Mapping[str, Any], *, as_json: bool) -> None:
        super().__init__(options, as_json=as_json)
        self.listener = JobListener(told=self.told, listed=self.listed, status=self.status)

    def told(self, text: str) -> None:
        super().told(text)
        self.line.wait_for("waiting for the first worker")

    def listed(self, url: str, receipts: int, _of: int) -> None:
        self.line.show(f"{url}: {plural(receipts, 'receipt')} read")

    def details(self, status: JobStatus) -> list[str]:
        return [plural(status.findings, "finding")]

    def exit_code(self, verified: Verified) -> int:
        return DONE_WITH_DAMAGE if verified.findings else 0

    def facts(self, verified: Verified) -> Iterator[dict[str, Any]]:
        yield _verified_facts(verified)

    def summary(self, verified: Verified) -> Iterator[str]:
        return _verified_lines(verified, self.line.elapsed_s)


def _verified_lines(verified: Verified, elapsed_s: float) -> Iterator[str]:
    yield from map(KeptLine, verified.findings)
    yield from (f"note: {note}" for note in verified.notes)
    for found in verified.surveys:
        wrong = sum(not finding.kind.is_note for finding in found.findings)
        verdict = plural(wrong, "finding") if wrong else "sound"
        how = "receipts and sizes" if verified.is_quick else "every byte"
        yield (
            f"{found.place.shown}: {verdict}: {_survey_size(found)} checked ({how}) "
            f"in {human_time(elapsed_s)}"
        )


def _survey_size(found: DatasetSurvey) -> str:
    shards = [shard for receipt in found.receipts for shard in receipt.shards]
    samples = plural(sum(shard.samples for shard in shards), "sample")
    return f"{samples} in {plural(len(shards), 'shard')}, {human_bytes(found.nbytes)}"


def _verified_facts(verified: Verified) -> dict[str, Any]:
    return {
        "datasets": [
            {
                "complete": found.is_complete,
                "dataset": found.place.shown,
                "kind": found.place.dataset,
                "nbytes": found.nbytes,
                "samples": sum(s.samples for r in found.receipts for s in r.shards),
                "shards": sum(len(r.shards) for r in found.receipts),
                "units": len(found.receipts),
            }
            for found in verified.surveys
        ],
        "findings": [finding_facts(finding) for finding in verified.findings],
        "notes": [finding_facts(note) for note in verified.notes],
        "quick": verified.is_quick,
    }


def finding_facts(finding: Finding) -> dict[str, str]:
    """Return a finding as an object for `--json`."""
    return {
        "dataset": finding.place.shown,
        "kind": finding.kind.value,
        "name": finding.name,
        "next": finding.next_step,
        "unit": finding.unit,
        "what": finding.what,
    }


class RepairOutput(CommandOutput[Repair]):
    """The output of `repair`: what it will do, a question, and what it has done."""

    unit, waits = "file", False

    def __init__(self, options: Mapping[str, Any], *, as_json: bool) -> None:
        super().__init__(options, as_json=as_json)
        verifying = VerifyOutput(options, as_json=as_json)
        self.line = verifying.line
        self.listener = JobListener(
            told=verifying.told,
            listed=verifying.listed,
            status=verifying.status,
            begun=self._planned,
            asked=self.asked,
            changed=self.changed,
        )

    def _planned(self, repair: Repair) -> None:
        """Print what would be repaired. With --json it is in the result at the end."""
        self.line.clear()
        if not self.as_json and (intent := join_lines(_intent_lines(repair))):
            echo(intent)

    def exit_code(self, repair: Repair) -> int:
        return DONE_WITH_DAMAGE if not repair.is_whole else 0

    def facts(self, repair: Repair) -> Iterator[dict[str, Any]]:
        yield _repair_facts(repair)

    def summary(self, repair: Repair) -> Iterator[str]:
        return _repaired_lines(repair)


def _intent_lines(repair: Repair) -> Iterator[str]:
    noun = "slice" if repair.survey.place.dataset == "images" else "shard"
    for unit, findings in repair.units.items():
        why = "; ".join(f"{finding.name}: {finding.what}" for finding in findings[:EXAMPLES])
        more = f"; and {len(findings) - EXAMPLES:,} more" if len(findings) > EXAMPLES else ""
        is_redone = unit in repair.redone
        what = f"{noun} {unit}, to be made again" if is_redone else f"files of no {noun} here"
        yield f"remove {what} ({why}{more})"
    for unit, findings in repair.mended.items():
        for finding in findings:
            yield f"keep {noun} {unit}, and write {finding.name} again ({finding.what})"
    for finding in repair.unsettled:
        yield f"finish what a retry has begun ({finding.name}: {finding.what})"
    for name in repair.indexes:
        yield f"write {name} again, from its tar"
    if repair.writes_manifest:
        yield "write wdsprep.json again, from the receipts"
    for finding in repair.beyond:
        yield f"leave alone {finding}"
    if repair.redone:
        noun = plural(len(repair.names), "file")
        yield f"{noun} with {plural(repair.samples, 'sample')} would go: {_needs(repair)}"


def _needs(repair: Repair) -> str:
    place = repair.survey.place
    if place.maker == MAKERS["latents"]:
        return "their image shards are needed, undamaged, to make them again"
    return "their source is needed, unchanged, to make them again; without it they are lost"


def _repaired_lines(repair: Repair) -> Iterator[str]:
    place = repair.survey.place
    if not repair.is_needed:
        sound = f"{place.shown}: nothing to repair"
        yield sound if not repair.beyond else f"{sound}, but see above"
    elif not repair.done:
        yield KeptLine(f"nothing was done: give --yes, or run {_again(repair)} at a terminal")
    else:
        yield from _done(repair)
        if repair.beyond:
            left = plural(len(repair.beyond), "finding")
            yield f"{left} left alone, see above: the exit code is 3 until that is mended"


def _done(repair: Repair) -> Iterator[str]:
    place = repair.survey.place
    if repair.changed:
        some = examples(repair.changed)
        yield KeptLine(
            f"another run has changed {some} since, so repair left that alone: verify again"
        )
    if repair.redone - set(repair.changed):
        yield f'repaired: now run the same "{place.maker}" again to make what is missing'
    elif not repair.changed:
        yield f"repaired: {place.shown} lacks nothing"


def _again(repair: Repair) -> str:
    return command("repair", repair.survey.place.shown)


def _repair_facts(repair: Repair) -> dict[str, Any]:
    return {
        "changed": repair.changed,
        "beyond": [finding_facts(finding) for finding in repair.beyond],
        "dataset": repair.survey.place.shown,
        "done": repair.done,
        "indexes": repair.indexes,
        "manifest": repair.writes_manifest,
        "mended": _by_unit(repair.mended),
        "removed": repair.names,
        "unsettled": [finding_facts(finding) for finding in repair.unsettled],
        "units": _by_unit(repair.units),
    }


def _by_unit(findings: Mapping[str, Sequence[Finding]]) -> dict[str, list[dict[str, str]]]:
    return {unit: [*map(finding_facts, found)] for unit, found in findings.items()}
