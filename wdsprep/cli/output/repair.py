"""The output of `wdsprep repair`: what it will do, and what it has done."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wdsprep.checks.findings import Finding
from wdsprep.checks.repair import Repair
from wdsprep.cli.exit_codes import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import CommandOutput, KeptLine, echo
from wdsprep.cli.output.verify import VerifyOutput, finding_facts
from wdsprep.dataset.file_names import MAKERS
from wdsprep.runners.job import JobListener
from wdsprep.text import EXAMPLES, command, examples, join_lines, plural


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
        if not self.as_json and (intent := join_lines(_intent(repair))):
            echo(intent)

    def exit_code(self, repair: Repair) -> int:
        return DONE_WITH_DAMAGE if not repair.is_whole else 0

    def facts(self, repair: Repair) -> Iterator[dict[str, Any]]:
        yield _repair_facts(repair)

    def summary(self, repair: Repair) -> Iterator[str]:
        return _outcome(repair)


def _intent(repair: Repair) -> Iterator[str]:
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


def _outcome(repair: Repair) -> Iterator[str]:
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
