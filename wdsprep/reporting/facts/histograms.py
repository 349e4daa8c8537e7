"""Histograms of samples, some of which are read: sizes, aspect ratios, captions, scores.

Receipts count caption lengths and shorter sides of all images, in coarse ranges. Everything else
comes from a few hundred samples, picked by chance over the whole dataset.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from wdsprep.dataset.coarse_histograms import bin_name, histogram
from wdsprep.dataset.npy_arrays import LATENT
from wdsprep.dataset.thread_map import read_each
from wdsprep.reporting.facts.datasets import ReportDataset
from wdsprep.reporting.sheet.picking import SheetSample, pick, read_sample
from wdsprep.text import Counting

SAMPLES = 256
STEPS = 12
"""The number of bins in the histogram of a column."""
MAX_AREA = 1 << 60  # a larger area cannot be a real size
LARGEST = 1e300  # larger numbers of strangers overflow a float
ASPECTS = (
    (0.0, 1 / 3, "under 1:3"),
    (1 / 3, 0.5, "1:3 to 1:2"),
    (0.5, 0.6, "about 9:16"),
    (0.6, 0.7, "about 2:3"),
    (0.7, 0.8, "about 3:4"),
    (0.8, 0.95, "about 7:8"),
    (0.95, 1.05, "square"),
    (1.05, 1.25, "about 8:7"),
    (1.25, 1.43, "about 4:3"),
    (1.43, 1.67, "about 3:2"),
    (1.67, 2.0, "about 16:9"),
    (2.0, 3.0, "2:1 to 3:1"),
    (3.0, inf, "over 3:1"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A bar of a histogram: a short label, its whole range, and its count."""

    label: str
    range: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """A histogram of samples: of all of them with `is_of_all`, otherwise of a random part."""

    title: str
    unit: str
    bars: tuple[Bar, ...]
    is_of_all: bool

    @property
    def count(self) -> int:
        return sum(bar.count for bar in self.bars)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSurvey:
    """The samples that were picked from a dataset and could be read, with their histograms."""

    picked: int
    """The number of samples that were picked; those that could not be read are missing below."""
    samples: tuple[SheetSample, ...]
    histograms: tuple[Histogram, ...]


def histograms_of(given: ReportDataset, seed: str, heard: Counting) -> SampleSurvey:
    """Read some random samples of a dataset, and return them with their histograms."""
    places = pick(given.manifest.shards, SAMPLES, seed)
    wanted = ("json", LATENT) if given.manifest.kind == "latents" else ("json",)
    read = read_each(
        lambda place: read_sample(given.store, place, only=wanted),
        places,
        given.store.readers,
        lambda done: heard(done, len(places)),
    )
    samples = tuple(sample for sample in read if not sample.problem)
    return SampleSurvey(
        picked=len(places), samples=samples, histograms=tuple(_histograms(given, samples))
    )


def _histograms(given: ReportDataset, samples: Sequence[SheetSample]) -> list[Histogram]:
    counts = given.manifest.counts
    sizes = [size for sample in samples if (size := _size(sample))]
    some = _count_bins("side", [min(size) for size in sizes])
    captions = (
        []  # scores have none; how long the images' captions are is one of their columns
        if given.manifest.is_scored
        else [len(str(sample.facts.get("caption", ""))) for sample in samples]
    )
    is_counted = bool(histogram(counts, "side"))
    is_every = len(samples) == given.samples
    found = [
        Histogram(
            title="Shorter side",
            unit="pixels",
            bars=_range_bars(counts if is_counted else some, "side"),
            is_of_all=is_counted or is_every,
        ),
        Histogram(title="Aspect ratio", unit="", bars=_aspect_bars(sizes), is_of_all=is_every),
        Histogram(
            title="Caption length",
            unit="characters",
            bars=_range_bars(counts if is_counted else _count_bins("caption", captions), "caption"),
            is_of_all=is_counted or is_every,
        ),
    ]
    found += (column_histogram(name, samples, is_every) for name in given.columns)
    return [histogram for histogram in found if histogram.count]


def column_histogram(name: str, samples: Sequence[SheetSample], is_every: bool) -> Histogram:
    """Return the histogram of a column: equal ranges of numbers, or its most frequent texts."""
    values = [value for sample in samples if (value := sample.facts.get(name)) is not None]
    numbers = [n for n in values if isinstance(n, int | float) and abs(n) < LARGEST]
    texts = Counter(value for value in values if isinstance(value, str))
    bars = tuple(Bar(label=text, range=text, count=n) for text, n in texts.most_common(STEPS))
    return Histogram(title=name, unit="", bars=_equal_bars(numbers) or bars, is_of_all=is_every)


def _equal_bars(numbers: Sequence[float]) -> tuple[Bar, ...]:
    """Return at most 12 bars of equal ranges; each has whole ends if all numbers are whole."""
    if not numbers:
        return ()
    least, most = min(numbers), max(numbers)
    if all(isinstance(number, int) for number in numbers):
        width = -(-(int(most) - int(least) + 1) // STEPS)
        counts = Counter((int(number) - int(least)) // width for number in numbers)
        starts = range(int(least), int(most) + 1, width)
        return tuple(
            _range_bar(start, start + width - 1, counts[step]) for step, start in enumerate(starts)
        )
    length = (most - least) / STEPS
    counts = Counter(min(STEPS - 1, int((n - least) / length)) if length else 0 for n in numbers)
    edges = [least + step * length for step in range(STEPS)] if length else [least]
    return tuple(
        Bar(
            label=f"{edge:.3g}",
            range=f"{edge:.4g} to {edge + length:.4g}" if length else f"{edge:.4g}",
            count=counts[step],
        )
        for step, edge in enumerate(edges)
    )


def _range_bar(least: int, most: int, count: int) -> Bar:
    """Return the bar of a range of whole numbers, both ends included."""
    shown = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return Bar(label=f"{least:,}", range=shown, count=count)


def _size(sample: SheetSample) -> tuple[int, int] | None:
    width, height = sample.facts.get("width"), sample.facts.get("height")
    if isinstance(width, int) and isinstance(height, int) and 0 < width * height <= MAX_AREA:
        return width, height
    return None


def _count_bins(what: str, numbers: Sequence[int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for number in numbers:
        name = bin_name(what, number)
        found[name] = found.get(name, 0) + 1
    return found


def _range_bars(counts: Mapping[str, int], what: str) -> tuple[Bar, ...]:
    """Return the bars of a coarse histogram, from the first to the last that is not empty.

    Empty bars between are kept. `what` is `side` or `caption`, the histogram within `counts`.
    """
    found = dict(histogram(counts, what))
    if not found:
        return ()
    first, last = min(found)[0], max(found)[0]
    bars = []
    least = first
    while least <= last:
        most = _next_edge(least) - 1
        bars.append(_range_bar(least, most, found.get((least, most), 0)))
        least = most + 1
    return tuple(bars)


def _next_edge(edge: int) -> int:
    """Return the edge after `edge` in the series 1, 2, 3, 4, 6, 8, 12, 16 and so on."""
    if edge < 4:
        return edge + 1
    return edge * 3 // 2 if edge & (edge - 1) == 0 else edge * 4 // 3


def _aspect_bars(sizes: Sequence[tuple[int, int]]) -> tuple[Bar, ...]:
    """Return the bars of the aspect ratios, with ranges alike on both sides of the square."""
    ratios = [width / height for width, height in sizes]
    return tuple(
        Bar(
            label=_aspect_label(name),
            range=name,
            count=sum(least <= ratio < most for ratio in ratios),
        )
        for least, most, name in ASPECTS
    )


def _aspect_label(name: str) -> str:
    return name.removeprefix("about ").replace("under ", "<").replace("over ", ">")
