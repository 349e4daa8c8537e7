"""All that a report says, gathered: values alone, from which the page is written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wdsprep.reporting.facts.datasets import Datasets, ReportDataset
from wdsprep.reporting.facts.funnel import FunnelRow, RunPace, funnel, pace_of
from wdsprep.reporting.facts.histograms import Surveyed, histograms_of
from wdsprep.reporting.facts.rejects import Refused, look_at_rejects
from wdsprep.reporting.facts.spectrum import Spectrum, spectrum_of
from wdsprep.reporting.sheet.decoding import Decoders, Decoding, find_decoding
from wdsprep.reporting.sheet.items import Sheet, SheetItem


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    """What there is to say of one dataset."""

    given: ReportDataset
    refused: Refused
    pace: RunPace | None
    surveyed: Surveyed
    spectrum: Spectrum | None
    decoding: Decoding | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFacts:
    """The whole report."""

    datasets: Datasets
    rows: tuple[FunnelRow, ...]
    chapters: tuple[Chapter, ...]
    items: tuple[SheetItem, ...]
    seed: int


def gather(
    datasets: Datasets,
    *,
    samples: int,
    seed: int,
    model: str,
    max_area: int,
    heard: Callable[[str], None],
) -> ReportFacts:
    """Read receipts, and of samples and rejects a bounded number."""
    decodings = {given.url: find_decoding(given, model) for given in datasets.latents}
    chapters = tuple(
        _chapter(given, decodings.get(given.url), seed, heard) for given in datasets.every
    )
    sheet = Sheet(
        datasets=datasets,
        decodings=decodings,
        decoders=Decoders(heard),
        max_area=max_area,
        heard=heard,
    )
    return ReportFacts(
        datasets=datasets,
        rows=tuple(funnel(datasets)),
        chapters=chapters,
        items=tuple(sheet.items(samples, f"sheet {seed}")),
        seed=seed,
    )


def _chapter(
    given: ReportDataset, decoding: Decoding | None, seed: int, heard: Callable[[str], None]
) -> Chapter:
    def counts(what: str) -> Callable[[int], None]:
        return lambda number: heard(f"{given.shown}: {number:,} {what} read")

    surveyed = histograms_of(given, f"survey {seed}", counts("samples"))
    is_latents = given.manifest.dataset == "latents"
    return Chapter(
        given=given,
        refused=look_at_rejects(given, f"rejects {seed}", counts("files of rejects")),
        pace=pace_of(given),
        surveyed=surveyed,
        spectrum=spectrum_of(surveyed.samples, given.manifest.settings) if is_latents else None,
        decoding=decoding,
    )


def shown_names(given: Sequence[ReportDataset]) -> str:
    names = [one.shown for one in given]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
