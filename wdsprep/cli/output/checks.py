"""What `verify` and `repair` print: progress, findings, what `repair` will do and has done."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from wdsprep.checks.findings import Finding
from wdsprep.checks.repair import Repair
from wdsprep.checks.verify import Verified
from wdsprep.cli.base_command import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import CommandOutput, KeptLine, echo
from wdsprep.dataset.file_names import MAKERS
from wdsprep.runners.job import JobStatus
from wdsprep.text import EXAMPLES, command, examples, human_bytes, human_time, join_lines, plural

T = TypeVar("T")


class CheckOutput(CommandOutput[T]):
    """The output of a command that verifies: the receipts that were read, then findings."""

    unit = "unit"

    def on_message(self, text: str) -> None:
        super().on_message(text)
        self.line.wait_for("waiting for the first worker")

    def on_listing(self, url: str, receipts: int, _of: int) -> None:
        self.line.show(f"{url}: {plural(receipts, 'receipt')} read")

    def details(self, status: JobStatus) -> list[str]:
        return [plural(status.findings, "finding")]


class VerifyOutput(CheckOutput[Verified]):
    """The output of `verify`: a progress line, and at the end the findings."""

    def exit_code(self, verified: Verified) -> int:
        return DONE_WITH_DAMAGE if verified.findings else 0

    def facts(self, verified: Verified) -> Iterator[dict[str, Any]]:
        yield {
            "datasets": [
                {
                    "complete": survey.is_complete,
                    "dataset": survey.shown,
                    "kind": survey.dataset,
                    "nbytes": sum(shard.nbytes for shard in survey.shards),
                    "samples": sum(shard.samples for shard in survey.shards),
                    "shards": len(survey.shards),
                    "units": len(survey.receipts),
                }
                for survey in verified.surveys
            ],
            "findings": [*map(finding_facts, verified.findings)],
            "notes": [*map(finding_facts, verified.notes)],
            "quick": verified.is_quick,
        }

    def summary(self, verified: Verified) -> Iterator[str]:
        yield from map(KeptLine, verified.findings)
        yield from (f"note: {note}" for note in verified.notes)
        how = "receipts and sizes" if verified.is_quick else "every byte"
        for survey in verified.surveys:
            wrong = sum(not finding.kind.is_note for finding in survey.findings)
            samples = plural(sum(shard.samples for shard in survey.shards), "sample")
            nbytes = human_bytes(sum(shard.nbytes for shard in survey.shards))
            size = f"{samples} in {plural(len(survey.shards), 'shard')}, {nbytes}"
            yield (
                f"{survey.shown}: {plural(wrong, 'finding') if wrong else 'sound'}: {size} "
                f"checked ({how}) in {human_time(self.line.elapsed_s)}"
            )


def finding_facts(finding: Finding) -> dict[str, str]:
    """Return a finding as an object for `--json`."""
    return {
        "dataset": finding.shown,
        "kind": finding.kind.value,
        "name": finding.name,
        "next": finding.next_step,
        "unit": finding.unit,
        "what": finding.what,
    }


class RepairOutput(CheckOutput[Repair]):
    """The output of `repair`: what it will do, a question, and what it has done."""

    def on_begin(self, repair: Repair) -> None:
        """Print what would be repaired. With --json it is in the result at the end."""
        self.line.clear()
        if not self.as_json and (intent := join_lines(_intent_lines(repair))):
            echo(intent)

    def on_change(self, done: int, of: int) -> None:
        self.unit = "file"
        super().on_change(done, of)

    def exit_code(self, repair: Repair) -> int:
        return DONE_WITH_DAMAGE if not repair.is_whole else 0

    def facts(self, repair: Repair) -> Iterator[dict[str, Any]]:
        yield {
            "changed": repair.changed,
            "beyond": [*map(finding_facts, repair.beyond)],
            "dataset": repair.survey.shown,
            "done": repair.done,
            "indexes": repair.remade,
            "manifest": repair.writes_manifest,
            "mended": _by_unit(repair.mended),
            "quick": repair.is_quick,
            "removed": repair.names,
            "unsettled": [*map(finding_facts, repair.unsettled)],
            "units": _by_unit(repair.units),
        }

    def summary(self, repair: Repair) -> Iterator[str]:
        shown = repair.survey.shown
        if not repair.is_needed:
            sound = f"{shown}: nothing to repair{_how(repair)}"
            yield sound if not repair.beyond else f"{sound}, but see above"
        elif not repair.done:
            again = command("repair", shown)
            yield KeptLine(f"nothing was done: give --yes, or run {again} at a terminal")
        else:
            yield from _repaired_lines(repair)


def _intent_lines(repair: Repair) -> Iterator[str]:
    noun = "slice" if repair.survey.dataset == "images" else "shard"
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
    for name in repair.remade:
        yield f"write {name} again, from its tar"
    if repair.writes_manifest:
        yield "write wdsprep.json again, from the receipts"
    for finding in repair.beyond:
        yield f"leave alone {finding}"
    if repair.redone:
        needed = "source is needed, unchanged, to make them again; without it they are lost"
        if repair.survey.maker == MAKERS["latents"]:
            needed = "image shards are needed, undamaged, to make them again"
        files = plural(len(repair.names), "file")
        yield f"{files} with {plural(repair.samples, 'sample')} would go: their {needed}"


def _how(repair: Repair) -> str:
    return " by receipts and sizes alone (without --quick, every byte is read)" * repair.is_quick


def _repaired_lines(repair: Repair) -> Iterator[str]:
    if repair.changed:
        units = examples(repair.changed)
        yield KeptLine(
            f"another run has changed {units} since, so repair left that alone: verify again"
        )
    if repair.redone - set(repair.changed):
        yield f'repaired: now run the same "{repair.survey.maker}" again to make what is missing'
    elif not repair.changed:
        yield f"repaired: {repair.survey.shown} lacks nothing{_how(repair)}"
    if repair.beyond:
        left = plural(len(repair.beyond), "finding")
        yield f"{left} left alone, see above: the exit code is 3 until that is mended"


def _by_unit(findings: Mapping[str, Sequence[Finding]]) -> dict[str, list[dict[str, str]]]:
    return {unit: [*map(finding_facts, of_unit)] for unit, of_unit in findings.items()}
