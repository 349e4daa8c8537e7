"""What samples are like: histograms of sizes, captions and scores, and the statistics of latents.

Receipts count caption lengths and shorter sides of all images, in coarse ranges. Everything else
comes from a few hundred samples, picked by chance over the whole dataset.

A diffusion model begins with noise of mean 0 and deviation 1, and latents are scaled to have the
same. If a channel is far from that, look first for a wrong scale, shift or VAE.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import erf, sqrt
from typing import Any, NamedTuple

import numpy as np

from wdsprep.dataset.coarse_histograms import bin_name, histogram
from wdsprep.dataset.npy_arrays import LATENT, field_of, fields_of, patchify, values_of
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.shapes import cut_size, fields_in_shape, shapes_of
from wdsprep.dataset.thread_map import read_each
from wdsprep.errors import FormatError
from wdsprep.reporting.datasets import ReadSample, ReportDataset, pick, read_sample
from wdsprep.text import Counting

SAMPLES = 256
STEPS = 12
"""The most bins in the histogram of a column."""
MAX_AREA = 1 << 60  # a larger area cannot be a real size
LARGEST = 1e300  # larger numbers of strangers overflow a float
RATIOS = (1 / 3, 0.5, 0.6, 0.7, 0.8, 0.95, 1.05, 1.25, 1.43, 1.67, 2.0, 3.0)
ASPECTS = (
    *("under 1:3", "1:3 to 1:2", "about 9:16", "about 2:3", "about 3:4", "about 7:8", "square"),
    *("about 8:7", "about 4:3", "about 3:2", "about 16:9", "2:1 to 3:1", "over 3:1"),
)
"""The ranges of aspect ratios between `RATIOS`, alike on both sides of the square."""


class Bar(NamedTuple):
    """A bar of a histogram: a short label, its whole range, and how many samples it counts."""

    label: str
    range: str
    height: float


class Histogram(NamedTuple):
    """A histogram of samples: of all of them with `is_of_all`, otherwise of a random part."""

    title: str
    unit: str
    bars: Sequence[Bar]
    is_of_all: bool

    @property
    def total(self) -> int:
        return int(sum(bar.height for bar in self.bars))


class SampleSurvey(NamedTuple):
    """The samples that could be read of the `picked` ones of a dataset, with their histograms."""

    picked: int
    samples: Sequence[ReadSample]
    histograms: Sequence[Histogram]


def survey_of(dataset: ReportDataset, seed: str, heard: Counting) -> SampleSurvey:
    """Read some random samples of a dataset, and return them with their histograms."""
    places = pick(dataset.manifest.shards, SAMPLES, seed)
    wanted = ("json", LATENT) if dataset.has_latents else ("json",)
    read = read_each(
        lambda place: read_sample(dataset, place, only=wanted),
        places,
        dataset.store.readers,
        lambda done: heard(done, len(places)),
    )
    samples = [sample for sample in read if not sample.problem]
    charts = [chart for chart in _histograms(dataset, samples) if chart.total]
    return SampleSurvey(len(places), samples, charts)


def _histograms(dataset: ReportDataset, samples: Sequence[ReadSample]) -> list[Histogram]:
    counts = dataset.manifest.counts
    sizes = [size for sample in samples if (size := _size(sample))]
    captions = (
        []  # scores have none; how long the images' captions are is one of their columns
        if dataset.manifest.is_scored
        else [len(str(sample.facts.get("caption", ""))) for sample in samples]
    )
    is_counted = bool(histogram(counts, "side"))
    is_every = len(samples) == dataset.manifest.samples
    coarse: Mapping[str, int] = counts
    if not is_counted:
        names = [bin_name("side", min(size)) for size in sizes]
        coarse = Counter([*names, *(bin_name("caption", length) for length in captions)])
    is_of_all = is_counted or is_every
    ratios = [width / height for width, height in sizes]
    heights = np.bincount(np.searchsorted(RATIOS, ratios, side="right"), minlength=len(ASPECTS))
    aspects = [
        Bar(name.replace("about ", "").replace("under ", "<").replace("over ", ">"), name, count)
        for name, count in zip(ASPECTS, heights.tolist(), strict=True)
    ]
    return [
        Histogram("Shorter side", "pixels", _coarse_bars(coarse, "side"), is_of_all),
        Histogram("Aspect ratio", "", aspects, is_every),
        Histogram("Caption length", "characters", _coarse_bars(coarse, "caption"), is_of_all),
        *(column_histogram(name, samples, is_every) for name in dataset.columns),
    ]


def _size(sample: ReadSample) -> tuple[int, int] | None:
    width, height = sample.facts.get("width"), sample.facts.get("height")
    if isinstance(width, int) and isinstance(height, int) and 0 < width * height <= MAX_AREA:
        return width, height
    return None


def _coarse_bars(counts: Mapping[str, int], what: str) -> list[Bar]:
    """Return the bars of a coarse histogram, from the first to the last that is not empty.

    Empty bars between are kept. `what` is `side` or `caption`, the histogram within `counts`. The
    ranges begin at 1, 2, 3, 4, 6, 8, 12, 16 and so on.
    """
    heights = dict(histogram(counts, what))
    bars: list[Bar] = []
    least, last = (min(heights)[0], max(heights)[0]) if heights else (0, -1)
    while least <= last:
        step = max(1, (1 << max(0, least.bit_length() - 1)) // 2)
        bars.append(_range_bar(least, least + step - 1, heights.get((least, least + step - 1), 0)))
        least += step
    return bars


def _range_bar(least: int, most: int, height: int) -> Bar:
    """Return the bar of a range of whole numbers, both ends included."""
    return Bar(f"{least:,}", f"{least:,}" if least == most else f"{least:,} to {most:,}", height)


def column_histogram(name: str, samples: Sequence[ReadSample], is_every: bool) -> Histogram:
    """Return the histogram of a column: equal ranges of numbers, or its most frequent texts."""
    values = [sample.facts.get(name) for sample in samples]
    numbers = [n for n in values if isinstance(n, int | float) and abs(n) < LARGEST]
    texts = Counter(value for value in values if isinstance(value, str))
    bars = [Bar(text, text, height) for text, height in texts.most_common(STEPS)]
    return Histogram(name, "", _equal_bars(numbers) if numbers else bars, is_every)


def _equal_bars(numbers: Sequence[float]) -> list[Bar]:
    """Return at most 12 bars of equal ranges; each has whole ends if all numbers are whole."""
    least, most = min(numbers), max(numbers)
    is_whole = all(isinstance(number, int) for number in numbers)
    width = -(-(most - least + 1) // STEPS) if is_whole else (most - least) / STEPS
    last = (most - least) // width if is_whole else STEPS - 1 if width else 0
    steps = [min(int(last), int((number - least) // (width or 1))) for number in numbers]
    heights = enumerate(np.bincount(steps, minlength=int(last) + 1).tolist())
    starts = ((least + step * width, height) for step, height in heights)
    if is_whole:
        return [_range_bar(int(at), int(at + width) - 1, height) for at, height in starts]
    return [
        Bar(f"{at:.3g}", f"{at:.4g} to {at + width:.4g}" if width else f"{at:.4g}", height)
        for at, height in starts
    ]


SIDES = 5.0  # the end of the histogram: larger values count into its last bin
BINS = 40
FAR, VERY_FAR = 3.0, 5.0
EXTREMES = 5


class Channel(NamedTuple):
    """The distribution of the values in one channel of latents.

    `far` and `very_far` are the shares of values whose size is above 3 and above 5, and `shares`
    those in each bin from -5 to 5.
    """

    mean: float
    std: float
    least: float
    most: float
    far: float
    very_far: float
    shares: Sequence[float]


class Extreme(NamedTuple):
    """A sample with an extreme value in a channel of its latent."""

    key: str
    channel: int
    value: float


class Spectrum(NamedTuple):
    """The distribution of latents by channel.

    `unsound` samples had a latent of another shape than the dataset states, or one that is not
    finite.
    """

    samples: int
    unsound: int
    channels: Sequence[Channel]
    extremes: Sequence[Extreme]


def usual_share(beyond: float) -> float:
    """Return the share of a normal distribution beyond some standard deviations, on both sides."""
    return 1 - erf(beyond / sqrt(2))


def latent_of(sample: ReadSample, settings: Settings) -> Any:
    """Return the latent of a sample in fp32, as a trainer takes it; for moments, the mean.

    Raise FormatError if it is not a finite array of the shape that the dataset states.
    """
    data = sample.members.get(LATENT, b"")
    stored = field_of(LATENT, data)
    wanted = _latent_shape(sample, settings)
    if stored.shape != wanted:
        raise FormatError(f"{LATENT} of {sample.key} has shape {stored.shape}, not {wanted}")
    array = values_of(stored, data).astype(np.float32)
    if not np.isfinite(array).all():
        raise FormatError(f"{LATENT} of {sample.key} has values that are not finite")
    if settings["latents"] != "moments":
        return array
    mean = patchify(array[: len(array) // 2], settings.get("patch", 1))
    shift, scale = (
        np.reshape(np.float32(settings[name]), (-1, 1, 1)) for name in ("shift", "scale")
    )
    return (mean - shift) * scale


def _latent_shape(sample: ReadSample, settings: Settings) -> tuple[int, ...]:
    """Return the shape that the latent of a sample has to have.

    In a dataset of several shapes, the size of the crop decides.
    """
    fields, size = fields_of(settings["layout"]), cut_size(sample.facts)
    if sizes := shapes_of(settings):
        if size not in sizes:
            raise FormatError(f"{sample.key} has none of the shapes of the dataset")
        fields = fields_in_shape(settings, size)
    return next(field.shape for field in fields if field.name == LATENT)


def spectrum_of(samples: Sequence[ReadSample], settings: Settings) -> Spectrum | None:
    """Return the distribution of latents, or None if no latent could be used."""
    latents = []
    for sample in samples:
        try:
            latents.append((sample.key, latent_of(sample, settings)))
        except FormatError:
            continue
    if not latents:
        return None
    channels = zip(*(latent for _, latent in latents), strict=True)
    return Spectrum(
        samples=len(latents),
        unsound=len(samples) - len(latents),
        channels=[_channel(np.concatenate([part.ravel() for part in parts])) for parts in channels],
        extremes=_extremes(latents),
    )


def _channel(values: Any) -> Channel:
    wide = values.astype(np.float64)
    counts, _ = np.histogram(wide.clip(-SIDES, SIDES), bins=BINS, range=(-SIDES, SIDES))
    far, very_far = (float((abs(wide) > beyond).mean()) for beyond in (FAR, VERY_FAR))
    mean, std, least, most = map(float, (wide.mean(), wide.std(), wide.min(), wide.max()))
    return Channel(mean, std, least, most, far, very_far, (counts / wide.size).tolist())


def _extremes(latents: Sequence[tuple[str, Any]]) -> list[Extreme]:
    """Return at most five samples: those with the most extreme values, the most extreme first."""
    extremes = []
    for key, latent in sorted(latents, key=lambda pair: -abs(pair[1]).max())[:EXTREMES]:
        place = np.unravel_index(abs(latent).argmax(), latent.shape)
        extremes.append(Extreme(key, int(place[0]), float(latent[place])))
    return extremes
