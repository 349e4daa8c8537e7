"""The output of `wdsprep verify`: progress, then findings and notes."""

from collections.abc import Iterator, Mapping
from typing import Any

from wdsprep.checks.dataset_check import DatasetSurvey
from wdsprep.checks.findings import Finding
from wdsprep.checks.verify import Verified
from wdsprep.cli.exit_codes import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import CommandOutput, KeptLine
from wdsprep.runners.job import JobListener, JobStatus
from wdsprep.text import human_bytes, human_time, plural


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
        yield _facts(verified)

    def summary(self, verified: Verified) -> Iterator[str]:
        return _lines(verified, self.line.elapsed_s)


def _lines(verified: Verified, elapsed_s: float) -> Iterator[str]:
    yield from map(KeptLine, verified.findings)
    yield from (f"note: {note}" for note in verified.notes)
    for found in verified.surveys:
        wrong = sum(not finding.kind.is_note for finding in found.findings)
        verdict = plural(wrong, "finding") if wrong else "sound"
        how = "receipts and sizes" if verified.is_quick else "every byte"
        yield (
            f"{found.place.shown}: {verdict}: {_size(found)} checked ({how}) "
            f"in {human_time(elapsed_s)}"
        )


def _size(found: DatasetSurvey) -> str:
    shards = [shard for receipt in found.receipts for shard in receipt.shards]
    samples = plural(sum(shard.samples for shard in shards), "sample")
    return f"{samples} in {plural(len(shards), 'shard')}, {human_bytes(found.nbytes)}"


def _facts(verified: Verified) -> dict[str, Any]:
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
