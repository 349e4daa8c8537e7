"""Gather everything that a report says, as values from which the page is written."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from wdsprep.reporting.contact_sheet import ColumnEnds, Sheet, SheetItem, column_ends, count_items
from wdsprep.reporting.datasets import Datasets, ReportDataset
from wdsprep.reporting.distributions import SampleSurvey, Spectrum, spectrum_of, survey_of
from wdsprep.reporting.funnel import (
    FunnelRow,
    RejectSummary,
    RunPace,
    funnel,
    look_at_rejects,
    pace_of,
)
from wdsprep.reporting.pictures import Decoders, Decoding, find_decoding, model_name
from wdsprep.text import Counting, plural

if TYPE_CHECKING:
    from wdsprep.reporting.copies import ShownCopies


class Chapter(NamedTuple):
    """The facts about one dataset of a report."""

    dataset: ReportDataset
    refused: RejectSummary
    pace: RunPace | None
    surveyed: SampleSurvey
    spectrum: Spectrum | None
    decoding: Decoding | None
    ends: Sequence[ColumnEnds]


class ReportFacts(NamedTuple):
    """The facts of a whole report."""

    datasets: Datasets
    funnel: Sequence[FunnelRow]
    chapters: Sequence[Chapter]
    groups: Mapping[str, Sequence[SheetItem]]
    copies: "ShownCopies | None"
    seed: int

    @property
    def samples(self) -> int:
        return sum(map(len, self.groups.values()))


def plan_of(datasets: Datasets, samples: int, model: str) -> str:
    """Return a line for the user that says what the report will show and decode."""
    shown, latents = count_items(datasets, samples)
    names = {model_name(dataset, model) for dataset in datasets.latents if dataset.has_latents}
    plan = f"{datasets.title}: {plural(shown, 'sample')} to show"
    if not latents or not any(names):
        return plan
    return (
        f"{plan}, up to {plural(latents, 'latent')} to decode with "
        f"{' and '.join(sorted(filter(None, names)))}: without a GPU this can take minutes "
        "(--model none leaves it out)"
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
        from wdsprep.reporting.copies import choose_copies  # pyarrow is slow to import

        copies = choose_copies(datasets, duplicates, max_area, heard)
    decodings = {
        dataset.shown: find_decoding(dataset, model)
        for dataset in datasets.latents
        if dataset.has_latents
    }

    def chapter(dataset: ReportDataset) -> Chapter:
        def counts(noun: str, many: str = "") -> Counting:
            return lambda done, of: heard(
                f"{done:,} of {plural(of, noun, many)} read: {dataset.shown}"
            )

        surveyed = survey_of(dataset, f"survey {seed}", counts("sample"))
        samples, settings = surveyed.samples, dataset.manifest.settings
        of_files = counts("file of rejects", "files of rejects")
        return Chapter(
            dataset=dataset,
            refused=look_at_rejects(dataset, f"rejects {seed}", of_files),
            pace=pace_of(dataset),
            surveyed=surveyed,
            spectrum=spectrum_of(samples, settings) if dataset.has_latents else None,
            decoding=decodings.get(dataset.shown),
            ends=list(column_ends(datasets.images, dataset, samples=samples, max_area=max_area)),
        )

    return ReportFacts(
        datasets=datasets,
        funnel=list(funnel(datasets)),
        chapters=list(map(chapter, datasets.every)),
        groups=Sheet(datasets, decodings, Decoders(told), max_area, heard).groups(
            samples, f"sheet {seed}"
        ),
        copies=copies,
        seed=seed,
    )
