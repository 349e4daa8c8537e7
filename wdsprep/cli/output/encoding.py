"""The output of `wdsprep encode`: headlines, progress, and the result of each dataset."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wdsprep.cli.output.shared import (
    LOADS_TORCH,
    CommandOutput,
    KeptLine,
    captionless_lines,
    left_out_lines,
    load_step,
    shapes_lines,
)
from wdsprep.dataset.file_names import SELECTION
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.shapes import shape_counts
from wdsprep.encoding.captions.options import EMPTY, OWN, PER_SAMPLE
from wdsprep.encoding.captions.table import CaptionRecord
from wdsprep.encoding.encode import EncodePlan, headlines
from wdsprep.encoding.options import EncodeOptions
from wdsprep.encoding.progress import Speeds
from wdsprep.options import remedies_of
from wdsprep.runners.job import JobStatus
from wdsprep.runners.run import Outcome
from wdsprep.sources.base import left_out_among
from wdsprep.store.base import absolute
from wdsprep.text import plural

CAPTIONLESS = (
    "warning: no image has a caption, so all embeddings are of the empty caption: pack again with "
    "captions, "
)
REMEDIES = {
    **remedies_of(EncodeOptions),
    Code.NOT_FINITE: "the model gives no finite numbers for them, not even in fp32: if it is so "
    "for all images, fetch its weights again, or choose another --model",
}


class EncodeOutput(CommandOutput["Outcome | list[Outcome]"]):
    """The output of `encode`: model and images, a progress line, and the result of each dataset."""

    touched, done, counted = "touched tar", "encoded", "image"
    first, waiting, place_name = "computing the first batch", LOADS_TORCH, "latents"

    def __init__(self, options: Mapping[str, Any], *, as_json: bool) -> None:
        """Prepare the output of `encode`.

        The places of latents are keyed by resolution. Places of text that is stored apart, and of
        several captions, are keyed by the name of the captions.
        """
        super().__init__(options, as_json=as_json)
        self._places = places = EncodeOptions(**options).places
        self._texts = [place for name, place in places.items() if isinstance(name, str)]
        self._has_latents = len(self._texts) < len(places)
        if len(places) > 1:  # an image is counted once for each dataset
            self.counted = "sample"
        self._speeds = Speeds()
        self._records: Mapping[str, CaptionRecord | None] = {}
        """The record of the table that the captions of a dataset are from, by its URL."""
        self._table = ""
        self._noun = "image"

    def on_begin(self, plan: EncodePlan) -> None:
        self._speeds = plan.speeds
        for line in headlines(plan):
            self.on_message(line)
        if plan.captions:
            self._records, self._table = plan.captions.records, plan.captions.table.url
        if plan.recipe.is_of_text:
            self._noun = "caption"
            self.counted = "caption" if self.counted == "image" else self.counted
        self.start_counting()

    def details(self, _status: JobStatus) -> list[str]:
        """Return how busy the devices are, once a rate is known."""
        return [str(self._speeds)] if self._speeds.rates() else []

    def summary(self, encoded: Outcome | list[Outcome]) -> list[str]:
        outcomes = _outcomes(encoded)
        lines = [self.headline(outcomes, has_size=True)]
        if rates := self._speeds.rates().values():
            rate = f"{sum(rates) / len(rates):,.1f} {self._noun}s/s{' each' * (len(rates) > 1)}"
            lines.append(f"{plural(len(rates), 'worker')}: {rate}, {self._speeds}")
            exact = sum(worker.exact for worker in self._speeds.workers.values())
            if exact and any(outcome.manifest.samples for outcome in outcomes):
                lines.append(
                    f"{plural(exact, self._noun)} overflowed and had to be computed again in fp32: "
                    "--dtype fp32 may be faster"
                )
        for outcome in outcomes:
            lines += self._dataset(outcome)
        lines += self.retry_lines(outcomes)
        for outcome in outcomes:
            if outcome.manifest.shards and not outcome.quarantined and not outcome.is_void:
                lines.append(self._next_step(outcome, outcomes))
        return list(dict.fromkeys(lines))  # some lines are the same for all datasets

    def _next_step(self, outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
        """Return the next step, which loads what was encoded.

        Text that is stored apart is joined to its latents.
        """
        places = [self._place(outcome)]
        if self._has_latents and self._texts:
            latents = [place for name, place in self._places.items() if isinstance(name, int)]
            places = latents[:1] if outcome.manifest.settings["latents"] == "none" else places
            places.append(self._texts[0])
        if outcome.manifest.settings.get("caption_name") == EMPTY:
            return (
                f'next: wdsprep.load(LATENTS, join="{places[0]}", drop_text=0.1) takes it for '
                "texts that are dropped"
            )
        return load_step(places, (o.manifest for o in outcomes if self._place(o) in places))

    def _place(self, outcome: Outcome) -> str:
        if len(self._places) == 1:
            (place,) = self._places.values()
            return place
        settings = outcome.manifest.settings
        if settings["latents"] == "none":
            return self._places[settings.get("caption_name", OWN)]
        return self._places[settings["resolution"]]

    def _dataset(self, outcome: Outcome) -> Iterator[str]:
        """Yield the lines about one dataset."""
        manifest, place = outcome.manifest, self._place(outcome)
        settings = manifest.settings
        is_empty = settings.get("caption_name") == EMPTY
        before = shapes_lines(manifest)
        if cut := manifest.counts.get("cut"):
            before.append(f"{plural(cut, 'caption')} cut to the length of the text encoder")
        if _has_other_captions(manifest):
            before += _captions_lines(manifest, self._table, self._records.get(absolute(place)))
        if upscaled := manifest.counts.get("upscaled"):
            most = settings.get("upscale", 1.0)
            before.append(f"{plural(upscaled, 'image')} scaled up, by at most {most:g} times")
        if "text_roles" in settings and not is_empty:
            before.append(
                "its text depends on images: for drop_text=, encode the empty caption of each "
                f"sample into another place (--latents none --empty {PER_SAMPLE})"
            )
        after = left_out_lines(left_out_among(manifest.counts))
        if outcome.has_captions and settings["text"] != "none" and not is_empty:
            after += captionless_lines(outcome, "sample" if manifest.is_of_text else "image")
        elif settings["text"] != "none" and not is_empty:
            step = "then encode with" if manifest.is_of_text else "or encode with --text none and"
            line = f"{CAPTIONLESS}{step} --overwrite"
            after.append(KeptLine(self._name_dataset(line, manifest)))
        remedies = {code: self._name_dataset(line, manifest) for code, line in REMEDIES.items()}
        yield from self.dataset_lines(outcome, place, before=before, after=after, remedies=remedies)

    def _name_dataset(self, line: str, manifest: Manifest) -> str:
        """Add the options that choose one dataset of several to a hint with --overwrite."""
        if len(self._places) == 1:
            return line
        settings = manifest.settings
        alone = [f"--resolution {settings['resolution']}"]
        if settings["latents"] == "none":
            alone = ["--latents none", *alone] if self._has_latents else []
            if len(self._texts) > 1:
                alone.append(f"--caption-field {settings.get('caption_field', OWN)}")
        return line.replace("--overwrite", " ".join([*alone, "--overwrite"]))

    def facts(self, encoded: Outcome | list[Outcome]) -> Iterator[dict[str, Any]]:
        speeds, rates = self._speeds, self._speeds.rates()
        for outcome in _outcomes(encoded):
            manifest, place = outcome.manifest, self._place(outcome)
            captions: dict[str, Any] | None = None
            if _has_other_captions(manifest):
                record, named = self._records.get(absolute(place)), manifest.counts.get("named", 0)
                captions = {
                    "named": named,
                    "twice": record.twice if record else 0,
                    "unmatched": record.unused if record and manifest.complete else None,
                    "unnamed": manifest.samples - named,
                }
            yield {
                **self.outcome_facts(outcome, place),
                "captions": captions,
                "busy": round(speeds.busy, 4),
                "cut": manifest.counts.get("cut", 0),
                "images_per_s": round(sum(rates.values()), 2),
                "launching": round(speeds.launching, 4),
                "left_out": left_out_among(manifest.counts),
                "shapes": shape_counts(manifest.settings, manifest.counts),
                "text_share": round(speeds.text, 4),
                "workers": {name: round(rate, 2) for name, rate in rates.items()},
            }


def _outcomes(encoded: Outcome | list[Outcome]) -> list[Outcome]:
    return encoded if isinstance(encoded, list) else [encoded]


def _has_other_captions(manifest: Manifest) -> bool:
    """Return whether captions come from a table or another field, of all samples of a run."""
    is_whole = SELECTION not in manifest.extra
    return is_whole and not manifest.settings.keys().isdisjoint(("caption_field", "captions"))


def _captions_lines(manifest: Manifest, table: str, read: CaptionRecord | None) -> Iterator[str]:
    """Yield the lines about captions that come from a table or another field."""
    by = manifest.settings.get("captions_by", "")
    named = manifest.counts.get("named", 0)
    whence = f"{table}, by {by}" if read else f"the field {manifest.settings.get('caption_field')}"
    line = f"{plural(named, 'caption')} from {whence}"
    if unnamed := manifest.samples - named:
        names = _in_brackets(read.unnamed_examples, unnamed) if read else ""
        line += f"; {plural(unnamed, 'sample')} not in it kept their own{names}"
    yield line
    if read is None:
        return
    if read.blank:
        yield f"{plural(read.blank, 'row')} of the table without a {by} or a caption"
    if read.twice:
        names = _in_brackets(read.twice_examples, read.twice)
        yield f"{plural(read.twice, by)} twice in it, of which the first row counts{names}"
    if read.unused and manifest.complete:  # before that, a sample that is missing may have the name
        names = _in_brackets(read.unused_examples, read.unused)
        yield f"{plural(read.unused, by)} of it that no sample has{names}"


def _in_brackets(names: Sequence[str], of: int) -> str:
    more = ", ..." if of > len(names) else ""
    return f" ({', '.join(names)}{more})" if names else ""
