"""The output of `wdsprep score`: models, progress, and the result."""

from collections.abc import Iterator, Mapping
from typing import Any

from wdsprep.cli.base_command import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import LOADS_TORCH, CommandOutput, rejects_lines
from wdsprep.dataset.settings import columns_of
from wdsprep.runners.job import JobListener
from wdsprep.runners.run import Outcome
from wdsprep.scoring.score import ScorePlan, example_condition
from wdsprep.text import command_line, human_bytes, plural


class ScoreOutput(CommandOutput[Outcome]):
    """The output of `score`: the models, a progress line, and the result."""

    unit, done, counted, waiting = "shard", "scored", "sample", LOADS_TORCH

    def __init__(self, options: Mapping[str, Any], *, as_json: bool) -> None:
        super().__init__(options, as_json=as_json)
        self._images, self._scores = options["images"], options["out"]
        self.listener = JobListener(
            told=self.told, compared=self.compared, begun=self._begin, status=self.status
        )

    def _begin(self, plan: ScorePlan) -> None:
        for tried in plan.tried:
            self.told(f"{tried.model.name}: {tried.model.role.value}, {tried.processor}")
        samples = sum(shard.item.take or shard.item.samples for shard in plan.wanted)
        of = f"{plural(samples, 'image')} in {plural(len(plan.wanted), 'shard')}"
        given = [*plan.columns, *(f"{field.name} {field}" for field in plan.fields)]
        self.told(f"{self._images}: {of}; each gets {', '.join(given)}")
        self.start_counting()

    def exit_code(self, outcome: Outcome) -> int:
        return DONE_WITH_DAMAGE if outcome.is_damaged else 0

    def summary(self, outcome: Outcome) -> list[str]:
        manifest, place = outcome.manifest, self._scores
        lines = [self.headline([outcome], f", {human_bytes(outcome.nbytes)}")]
        held = f"{plural(manifest.samples, 'sample')} in {plural(len(manifest.shards), 'shard')}"
        lines.append(f"{place}: {held}, {human_bytes(manifest.nbytes)}")
        lines += rejects_lines(manifest.rejects, place)
        lines += self.failed_units(outcome)
        lines += self.retry_lines([outcome])
        condition = "" if outcome.quarantined else example_condition(place, manifest)
        if condition:
            words = ("select", self._images, "OUT", "--join", place, "--where", condition)
            lines.append(f"next: {command_line(*words)}")
        return lines

    def facts(self, outcome: Outcome) -> Iterator[dict[str, Any]]:
        manifest = outcome.manifest
        yield {
            "columns": columns_of(manifest.settings),
            "complete": manifest.complete,
            "quarantined": [failed.unit.name for failed in outcome.quarantined],
            "rejects": manifest.rejects,
            "samples": manifest.samples,
            "scored": outcome.samples,
            "scored_bytes": outcome.nbytes,
            "scores": self._scores,
            "shards": len(manifest.shards),
            "shards_before": outcome.units_before,
        }
