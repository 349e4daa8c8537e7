"""Gather everything that a report says, as values from which the page is written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wdsprep.reporting.facts.datasets import Datasets, ReportDataset
from wdsprep.reporting.facts.funnel import FunnelRow, RunPace, funnel, pace_of
from wdsprep.reporting.facts.histograms import SampleSurvey, histograms_of
from wdsprep.reporting.facts.latent_statistics import Spectrum, spectrum_of
from wdsprep.reporting.facts.rejects import RejectSummary, look_at_rejects
from wdsprep.reporting.sheet.decoding import Decoders, Decoding, find_decoding, model_name
from wdsprep.reporting.sheet.items import Sheet, SheetItem, count_items
from wdsprep.reporting.sheet.score_extremes import ColumnEnds, find_column_ends
from wdsprep.text import Counting, plural

if TYPE_CHECKING:
    from wdsprep.reporting.sheet.copies import ShownCopies


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    """The facts about one dataset of a report."""

    given: ReportDataset
    refused: RejectSummary
    pace: RunPace | None
    surveyed: SampleSurvey
    spectrum: Spectrum | None
    decoding: Decoding | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFacts:
    """The facts of a whole report."""

    datasets: Datasets
    rows: tuple[FunnelRow, ...]
    chapters: tuple[Chapter, ...]
    items: tuple[SheetItem, ...]
    copies: "ShownCopies | None"
    ends: tuple[ColumnEnds, ...]
    seed: int


def plan_of(datasets: Datasets, samples: int, model: str) -> str:
    """Return a line for the user that says what the report will show and decode."""
    shown, latents = count_items(datasets, samples)
    with_latents = [given for given in datasets.latents if given.has_latents]
    models = sorted({name for given in with_latents if (name := model_name(given, model))})
    plan = f"{join_names(datasets.every)}: {plural(shown, 'sample')} to show"
    if not latents or not models:
        return plan
    return (
        f"{plan}, up to {plural(latents, 'latent')} to decode with {' and '.join(models)}: without "
        "a GPU this can take minutes (--model none leaves it out)"
    )


def gather(
    datasets: Datasets,
    *,
    samples: int,
    seed: int,
    model: str,
    max_area: int,
    duplicates: str,
    told: Callable[[str], None],
    heard: Callable[[str], None],
) -> ReportFacts:
    """Gather the facts of a report: read receipts, and a bounded number of samples and rejects.

    `told` gets a line for each model that is loaded, and `heard` what is being done now.
    """
    copies = None
    if duplicates:
        from wdsprep.reporting.sheet.copies import choose_copies  # pyarrow is slow to import

        copies = choose_copies(datasets, duplicates, max_area, heard)
    with_latents = (given for given in datasets.latents if given.has_latents)
    decodings = {given.url: find_decoding(given, model) for given in with_latents}
    chapters = tuple(
        _chapter(given, decodings.get(given.url), seed, heard) for given in datasets.every
    )
    sheet = Sheet(
        datasets=datasets,
        decodings=decodings,
        decoders=Decoders(told),
        max_area=max_area,
        heard=heard,
    )
    return ReportFacts(
        datasets=datasets,
        rows=tuple(funnel(datasets)),
        chapters=chapters,
        items=tuple(sheet.items(samples, f"sheet {seed}")),
        copies=copies,
        ends=find_column_ends(
            datasets.images,
            [(chapter.given, chapter.surveyed.samples) for chapter in chapters],
            max_area,
        ),
        seed=seed,
    )


def _chapter(
    given: ReportDataset, decoding: Decoding | None, seed: int, heard: Callable[[str], None]
) -> Chapter:
    def counts(noun: str, many: str = "") -> Counting:
        return lambda done, of: heard(f"{done:,} of {plural(of, noun, many)} read: {given.shown}")

    surveyed = histograms_of(given, f"survey {seed}", counts("sample"))
    is_latents = given.manifest.kind == "latents"
    return Chapter(
        given=given,
        refused=look_at_rejects(
            given, f"rejects {seed}", counts("file of rejects", "files of rejects")
        ),
        pace=pace_of(given),
        surveyed=surveyed,
        spectrum=spectrum_of(surveyed.samples, given.manifest.settings) if is_latents else None,
        decoding=decoding,
    )


def join_names(given: Sequence[ReportDataset]) -> str:
    """Join the paths of datasets as a user gave them: `a, b and c`."""
    names = [one.shown for one in given]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
