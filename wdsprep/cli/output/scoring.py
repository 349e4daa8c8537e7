"""The output of `wdsprep score`: models, progress, and the result."""

from collections.abc import Iterator
from typing import Any

from wdsprep.cli.output.shared import LOADS_TORCH, CommandOutput
from wdsprep.dataset.npy_arrays import fields_of
from wdsprep.dataset.settings import columns_of
from wdsprep.encoding.run_plan import RunPlan
from wdsprep.runners.run import Outcome
from wdsprep.scoring.score import example_condition
from wdsprep.text import command_line, plural


class ScoreOutput(CommandOutput[Outcome]):
    """The output of `score`: the models, a progress line, and the result."""

    done, waiting, place_name = "scored", LOADS_TORCH, "scores"

    def on_begin(self, plan: RunPlan) -> None:
        (dataset,) = plan.datasets
        of = f"{plural(dataset.samples, 'image')} in {plural(dataset.shards, 'shard')}"
        arrays = (f"{field.name} {field}" for field in fields_of(dataset.settings["layout"]))
        fields = [*columns_of(dataset.settings), *arrays]
        self.on_message(f"{self.options['images']}: {of}; each gets {', '.join(fields)}")
        self.start_counting()

    def summary(self, outcome: Outcome) -> Iterator[str]:
        place = self.options["out"]
        yield self.headline([outcome], has_size=True)
        yield from self.dataset_lines(outcome, place)
        yield from self.retry_lines([outcome])
        if not outcome.quarantined and (where := example_condition(place, outcome.manifest)):
            words = ("select", self.options["images"], "OUT", "--join", place, "--where", where)
            yield f"next: {command_line(*words)}"

    def facts(self, outcome: Outcome) -> Iterator[dict[str, Any]]:
        columns = columns_of(outcome.manifest.settings)
        yield {**self.outcome_facts(outcome, self.options["out"]), "columns": columns}
