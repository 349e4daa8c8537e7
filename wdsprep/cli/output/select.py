"""The output of `wdsprep select`: progress, and the result of each place."""

from collections.abc import Iterator
from typing import Any

from wdsprep.changes.select import Selected
from wdsprep.cli.exit_codes import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import CommandOutput, rejects_lines
from wdsprep.runners.run import Outcome
from wdsprep.text import command_line, human_bytes, plural


class SelectOutput(CommandOutput[Selected]):
    """The output of `select`: a progress line, and the result of each place."""

    unit, done, counted = "shard", "copied", "sample"
    spared = "--max-shard-size"

    def exit_code(self, selected: Selected) -> int:
        return DONE_WITH_DAMAGE if selected.is_damaged else 0

    def facts(self, selected: Selected) -> Iterator[dict[str, Any]]:
        for place, outcome in selected.outcomes.items():
            manifest = outcome.manifest
            yield {
                "complete": manifest.complete,
                "copied": outcome.samples,
                "copied_bytes": outcome.nbytes,
                "dataset": place,
                "kind": manifest.dataset,
                "quarantined": [failed.unit.name for failed in outcome.quarantined],
                "rejects": manifest.rejects,
                "samples": manifest.samples,
                "shards": len(manifest.shards),
                "shards_before": outcome.units_before,
            }

    def summary(self, selected: Selected) -> Iterator[str]:
        outcomes = list(selected.outcomes.values())
        yield self.headline(outcomes)
        for place, outcome in selected.outcomes.items():
            yield from self._dataset(place, outcome)
        yield from self.retry_lines(outcomes) or [
            f"next: {command_line('verify', *selected.outcomes)}"
        ]

    def _dataset(self, place: str, outcome: Outcome) -> Iterator[str]:
        manifest = outcome.manifest
        held = f"{plural(manifest.samples, 'sample')} in {plural(len(manifest.shards), 'shard')}"
        yield f"{place}: {held}, {human_bytes(manifest.nbytes)}"
        yield from rejects_lines(manifest.rejects, place)
        yield from self.failed_units(outcome)
