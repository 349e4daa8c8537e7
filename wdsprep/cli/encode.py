"""What `wdsprep encode` says on the way and at the end."""

from typing import Any

from wdsprep.cli.output import (
    Kept,
    RunShow,
    broken_tars_lines,
    left_out_lines,
    memory_lines,
    rejects_lines,
    void_line,
)
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.shapes import shape_counts
from wdsprep.encoding import HALF
from wdsprep.encoding.encode import EncodeBegun, EncodeListener
from wdsprep.encoding.progress import Speeds
from wdsprep.runners.run import Outcome, RunStatus
from wdsprep.sources import LeftOut
from wdsprep.text import human_bytes, human_counts, plural

CAPTIONLESS = Kept(
    "warning: no image has a caption, so all embeddings are of the empty one: pack again with "
    "captions, or encode with --text none and --overwrite"
)

REMEDIES = {
    Code.TOO_SMALL: "a smaller --resolution takes smaller images",
    Code.ASPECT_RATIO: "--overwrite with a larger --max-crop, or more --shapes, takes more images",
    Code.TOO_LARGE: "--overwrite with a larger --max-area takes larger images",
}


class EncodeShow(RunShow):
    """Prints what is encoded with what, a progress line, and at the end what came of it."""

    unit, touched, done = "shard", "touched tar", "encoded"

    def __init__(self, images: str, latents: str, *, as_json: bool) -> None:
        super().__init__(as_json=as_json)
        self._images, self._latents = images, latents
        self._speeds = Speeds()
        self.listener = EncodeListener(
            told=self.told,
            compared=self.compared,
            begun=self._begin,
            status=self.status,
            heard=self._speeds.heard,
        )

    def _begin(self, begun: EncodeBegun) -> None:
        for line in describe(self._images, begun):
            self.told(line)
        self.start_counting()

    def details(self, _status: RunStatus) -> list[str]:
        """The rate of each worker and how busy the devices are, once there is something to tell."""
        if not (rates := self._speeds.rates().values()):
            return []
        parts = [str(self._speeds)]
        if len(rates) > 1:
            span = f"{min(rates):,.1f} to {max(rates):,.1f}"
            parts.append(f"{span} on each of {len(rates)} workers")
        return parts

    def summary(self, outcome: Outcome) -> list[str]:
        manifest = outcome.manifest
        made = f", {human_bytes(outcome.nbytes)}"
        lines = [self.headline(outcome, made), *self._speed(manifest.samples)]
        shards = plural(len(manifest.shards), "shard")
        size = human_bytes(manifest.nbytes)
        lines.append(f"{self._latents}: {plural(manifest.samples, 'sample')} in {shards}, {size}")
        if shapes := shape_counts(manifest.settings, manifest.counts):
            lines.append(f"in {plural(len(shapes), 'shape')}: {human_counts(shapes, 8)}")
        if cut := manifest.counts.get("cut"):
            lines.append(f"{plural(cut, 'caption')} cut to what the text encoder takes")
        lines += rejects_lines(manifest.rejects, self._latents)
        lines += left_out_lines(LeftOut.among(manifest.counts))
        if not outcome.has_captions and manifest.settings["text"] != "none":
            lines.append(CAPTIONLESS)
        lines += broken_tars_lines(outcome.broken_tars, self._latents)
        for failed in outcome.quarantined:
            lines.append(Kept(f"shard {failed.unit.name} is left out: {failed.reason}"))
        if outcome.quarantined:
            lines += memory_lines(outcome.quarantined, "--batch-size or --max-area")
            lines.append(Kept("run the same command again to retry what is left out"))
        elif outcome.is_void:
            lines.append(self._void(manifest))
        elif manifest.shards:
            lines.append(f'next: wdsprep.load("{self._latents}", global_batch=64) in your trainer')
        return lines

    def _void(self, manifest: Manifest) -> str:
        """What to do where nothing came of any image."""
        if manifest.rejects.get(Code.NOT_FINITE.value, 0) < sum(manifest.rejects.values()):
            return void_line(manifest.rejects, self._latents, REMEDIES)
        model, dtype = manifest.extra["model"], manifest.settings["dtype"]
        where = "fp32" if dtype == "fp32" else f"{dtype} or in fp32"
        return Kept(
            f"{model} gives no finite numbers for any image, in {where}: its weights are damaged, "
            "or not what its configuration says: fetch them again, or choose another --model"
        )

    def _speed(self, samples: int) -> list[str]:
        if not (rates := self._speeds.rates().values()):
            return []
        workers, each = plural(len(rates), "worker"), " each" if len(rates) > 1 else ""
        rate = f"{sum(rates) / len(rates):,.1f} images/s{each}"
        lines = [f"{workers}: {rate}, device {self._speeds}"]
        exact = sum(w.exact for w in self._speeds.workers.values())
        if exact and samples:
            lines.append(
                f"{plural(exact, 'image')} overflowed and had to be computed again in fp32: "
                "--dtype bf16 or fp32 may be faster"
            )
        return lines

    def facts(self, outcome: Outcome) -> dict[str, Any]:
        manifest = outcome.manifest
        rates = self._speeds.rates()
        return {
            "broken_tars": outcome.broken_tars,
            "busy": round(self._speeds.busy, 4),
            "complete": manifest.complete,
            "cut": manifest.counts.get("cut", 0),
            "encoded": outcome.samples,
            "encoded_bytes": outcome.nbytes,
            "has_captions": outcome.has_captions,
            "images_per_s": round(sum(rates.values()), 2),
            "latents": self._latents,
            "launching": round(self._speeds.launching, 4),
            "left_out": LeftOut.among(manifest.counts),
            "quarantined": [failed.unit.name for failed in outcome.quarantined],
            "rejects": manifest.rejects,
            "samples": manifest.samples,
            "shapes": shape_counts(manifest.settings, manifest.counts),
            "shards": len(manifest.shards),
            "shards_before": outcome.units_before,
            "text_share": round(self._speeds.text, 4),
            "workers": {name: round(rate, 2) for name, rate in rates.items()},
        }


def describe(images: str, begun: EncodeBegun) -> list[str]:
    """What is encoded with what, before anything is done."""
    recipe, crew = begun.recipe, begun.crew
    counted = f", {plural(begun.samples, 'image')}" if begun.samples else ""
    shapes = f" in {plural(len(recipe.sizes), 'shape')}" if recipe.sizes else ""
    precision = "fp16 and bf16" if recipe.dtype == HALF else recipe.dtype
    lines = [
        f"{images}: {plural(begun.shards, 'shard')}{counted} for resolution {recipe.resolution}"
        f"{shapes}; model {begun.model.name} in {precision} on {crew.device}"
    ]
    if begun.model.note:
        lines.append(begun.model.note)
    if not begun.is_whole:
        lines.append(f"{images} is not packed to its end: run the same again after pack has ended")
    return lines
