"""The samples with the lowest and highest scores of each column, among those picked by chance."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wdsprep.dataset.file_names import latent_unit
from wdsprep.dataset.reindex import read_positions
from wdsprep.dataset.score_columns import TEXT
from wdsprep.reporting.facts.datasets import ReportDataset
from wdsprep.reporting.sheet.items import SheetItem, facts_of_latent, open_picture, shown_value
from wdsprep.reporting.sheet.picking import DAMAGE, SheetPlace, SheetSample, read_sample

EACH = 4
"""The number of samples that are shown of each end."""
MOST_COLUMNS = 12
ScoreSamples = tuple[ReportDataset, Sequence[SheetSample]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnEnds:
    """The samples with the lowest and the highest numbers of a column.

    `of` counts the samples that were compared.
    """

    scores: str
    column: str
    low: tuple[SheetItem, ...]
    high: tuple[SheetItem, ...]
    of: int


def find_column_ends(
    images: ReportDataset | None, surveyed: Sequence[ScoreSamples], max_area: int
) -> tuple[ColumnEnds, ...]:
    """Return the samples with the lowest and highest numbers of each column, among those surveyed.

    Of each dataset only the first MOST_COLUMNS columns of numbers are looked at. Return nothing
    without images.
    """
    if images is None:
        return ()
    return tuple(
        _ends(images, given, column, samples, max_area)
        for given, samples in surveyed
        for column in _numeric(given)
        if samples
    )


def _numeric(given: ReportDataset) -> list[str]:
    return [name for name, holds in given.columns.items() if holds != TEXT][:MOST_COLUMNS]


def _ends(
    images: ReportDataset,
    scores: ReportDataset,
    column: str,
    samples: Sequence[SheetSample],
    max_area: int,
) -> ColumnEnds:
    known = [each for each in samples if isinstance(each.facts.get(column), int | float)]
    known.sort(key=lambda each: (each.facts[column], each.key))
    each = min(EACH, len(known) // 2)
    low, high = known[:each], known[len(known) - each :]
    return ColumnEnds(
        scores=scores.shown,
        column=column,
        low=tuple(_items(images, scores, column, low, max_area)),
        high=tuple(_items(images, scores, column, high, max_area)),
        of=len(known),
    )


def _items(
    images: ReportDataset,
    scores: ReportDataset,
    column: str,
    samples: Sequence[SheetSample],
    max_area: int,
) -> Iterator[SheetItem]:
    for sample in samples:
        image = _image_of(images, scores, sample)
        yield SheetItem(
            group=column,
            key=sample.key,
            caption=image.member("txt").decode("utf-8", "replace"),
            facts=facts_of_latent(scores, sample.facts),
            pictures=() if image.problem else (open_picture(image, max_area)[1],),
            problem=image.problem,
            score=(column, shown_value(sample.facts[column])),
        )


def _image_of(images: ReportDataset, scores: ReportDataset, sample: SheetSample) -> SheetSample:
    """Return the image of a sample of scores, or the problem that kept it from being read."""
    place = sample.place
    shard = next((s for s in images.manifest.shards if s.name == place.shard.name), None)
    receipt = scores.units.get(latent_unit(place.shard.name))
    if shard is None or receipt is None:
        return SheetSample(place=place, problem=f"there is no image shard {place.shard.name}")
    try:
        number = int(read_positions(scores.store, receipt).positions[place.number])
    except DAMAGE as error:
        return SheetSample(place=place, problem=str(error))
    found = read_sample(images.store, SheetPlace(shard=shard, number=number))
    if not found.problem and found.key != sample.key:
        return SheetSample(place=place, problem=f"{shard.name} has {found.key} in its place")
    return found
