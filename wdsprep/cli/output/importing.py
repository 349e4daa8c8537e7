"""The output of `wdsprep import`: columns, progress, and the result."""

from collections.abc import Iterator, Mapping
from typing import Any

from wdsprep.cli.base_command import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import (
    CommandOutput,
    broken_tars_lines,
    load_step,
    rejects_lines,
    shapes_lines,
    void_line,
)
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.shapes import shape_counts
from wdsprep.importing.import_latents import ImportBegun
from wdsprep.runners.job import JobListener
from wdsprep.runners.run import Outcome
from wdsprep.text import human_bytes, plural

REMEDIES: dict[str, str] = {
    Code.OTHER_SHAPE: "give other columns with --columns, the longest caption with --text-length, "
    "or the sizes of the images with --shapes",
    Code.NO_ARRAY: "give other columns with --columns",
}
FILES = {"mds": "MDS shard", "arrow": "Arrow file", "parquet": "Parquet file", "tars": "tar"}


class ImportOutput(CommandOutput[Outcome]):
    """The output of `import`: what is imported, a progress line, and the result."""

    unit, done, counted = "file", "imported", "sample"

    def __init__(self, options: Mapping[str, Any], *, as_json: bool) -> None:
        super().__init__(options, as_json=as_json)
        self._source, self._latents = options["source"], options["latents"]
        self.listener = JobListener(told=self.told, begun=self._begin, status=self.status)

    def _begin(self, begun: ImportBegun) -> None:
        taken = ", ".join(f"{role} from {name!r}" for role, name in begun.columns.items())
        self.told(f"{self._source}: {plural(begun.files, FILES[begun.kind])}, {taken}")
        self.told(f"each sample has {', '.join(begun.fields)}")
        if begun.bits:
            self.told(f"{', '.join(begun.bits)}: uint16, read as the bits of bfloat16")
        self.start_counting()

    def exit_code(self, outcome: Outcome) -> int:
        return DONE_WITH_DAMAGE if outcome.is_damaged else 0

    def summary(self, outcome: Outcome) -> list[str]:
        manifest, place = outcome.manifest, self._latents
        lines = [self.headline([outcome], f", {human_bytes(outcome.nbytes)}")]
        held = f"{plural(manifest.samples, 'sample')} in {plural(len(manifest.shards), 'shard')}"
        lines.append(f"{place}: {held}, {human_bytes(manifest.nbytes)}")
        lines += shapes_lines(manifest)
        lines += rejects_lines(manifest.rejects, place)
        lines += broken_tars_lines(outcome.broken_tars, place)
        lines += self.failed_units(outcome)
        lines += self.retry_lines([outcome])
        if outcome.is_void and not outcome.quarantined:
            lines.append(void_line(manifest.rejects, place, REMEDIES))
        elif manifest.shards and not outcome.quarantined:
            lines.append(load_step([place], [manifest]))
        return lines

    def facts(self, outcome: Outcome) -> Iterator[dict[str, Any]]:
        manifest = outcome.manifest
        yield {
            "broken_tars": outcome.broken_tars,
            "complete": manifest.complete,
            "files_before": outcome.units_before,
            "has_captions": outcome.has_captions,
            "imported": outcome.samples,
            "imported_bytes": outcome.nbytes,
            "latents": self._latents,
            "quarantined": [failed.unit.name for failed in outcome.quarantined],
            "rejects": manifest.rejects,
            "samples": manifest.samples,
            "shapes": shape_counts(manifest.settings, manifest.counts),
            "shards": len(manifest.shards),
        }
