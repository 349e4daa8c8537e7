"""The output of `wdsprep import`: columns, progress, and the result."""

from collections.abc import Iterator
from typing import Any

from wdsprep.cli.output.shared import CommandOutput, load_step, shapes_lines
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.shapes import shape_counts
from wdsprep.importing.import_latents import ImportBegun
from wdsprep.runners.run import Outcome
from wdsprep.text import plural

REMEDIES: dict[str, str] = {
    Code.OTHER_SHAPE: "give other columns with --columns, the longest caption with --text-length, "
    "or the sizes of the images with --shapes",
    Code.NO_ARRAY: "give other columns with --columns",
}
FILES = {
    "mds": "MDS shard",
    "arrow": "Arrow file",
    "parquet": "Parquet file",
    "tars": "tar",
    "musubi": "group",
    "automodel": "list",
}


class ImportOutput(CommandOutput[Outcome]):
    """The output of `import`: what is imported, a progress line, and the result."""

    unit, done, place_name = "file", "imported", "latents"

    def on_begin(self, begun: ImportBegun) -> None:
        kind, files, plan = begun
        columns = (f"{column.role} from {column.name!r}" for column in plan.columns)
        source = self.options["source"]
        self.on_message(f"{source}: {plural(files, FILES[kind])}, {', '.join(columns)}")
        fields = (f"{field.name} {field}" for field in plan.fields)
        self.on_message(f"each sample has {', '.join(fields)}")
        self.start_counting()

    def summary(self, outcome: Outcome) -> Iterator[str]:
        manifest, place = outcome.manifest, self.options["latents"]
        yield self.headline([outcome], has_size=True)
        shapes = shapes_lines(manifest)
        yield from self.dataset_lines(outcome, place, before=shapes, remedies=REMEDIES)
        yield from self.retry_lines([outcome])
        if manifest.shards and not outcome.quarantined:
            yield load_step([place], [manifest])

    def facts(self, outcome: Outcome) -> Iterator[dict[str, Any]]:
        manifest = outcome.manifest
        yield {
            **self.outcome_facts(outcome, self.options["latents"]),
            "shapes": shape_counts(manifest.settings, manifest.counts),
        }
