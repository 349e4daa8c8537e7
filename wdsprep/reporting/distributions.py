"""What samples are like: histograms of sizes, captions and scores, and the statistics of latents.

Receipts count caption lengths and shorter sides of all images, in coarse ranges. Everything else
comes from a few hundred samples, picked by chance over the whole dataset.

A diffusion model begins with noise of mean 0 and deviation 1, and latents are scaled to have the
same. If a channel is far from that, look first for a wrong scale, shift or VAE.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import erf, sqrt
from typing import Any

import numpy as np

from wdsprep.dataset.coarse_histograms import bin_name, histogram
from wdsprep.dataset.npy_arrays import LATENT, field_of, fields_of, patchify, values_of
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.shapes import cut_size, fields_in_shape, shapes_of
from wdsprep.errors import FormatError
from wdsprep.reporting.datasets import ReadSample, ReportDataset, pick, read_samples
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


Bar = dict[str, Any]
"""A bar of a histogram: its `label`, its whole `range`, and its `height`, which counts samples."""


def _bar(label: str, range: str, height: float) -> Bar:
    return {"label": label, "range": range, "height": height}


def survey_of(dataset: ReportDataset, seed: str, heard: Counting) -> dict[str, Any]:
    """Read some random samples of a dataset, and return them with their histograms.

    `picked` counts the samples that were picked; `samples` are those that could be read.
    """
    places = pick(dataset.manifest.shards, SAMPLES, seed)
    members = ("json", LATENT) if dataset.has_latents else ("json",)
    read = read_samples(dataset, places, only=members, done=lambda count: heard(count, len(places)))
    samples = [sample for sample in read if not sample.problem]
    histograms = [
        {"title": title, "unit": unit, "bars": bars, "is_of_all": is_of_all, "total": total}
        for title, unit, bars, is_of_all in _histograms(dataset, samples)
        if (total := sum(bar["height"] for bar in bars))
    ]
    return {"picked": len(places), "samples": samples, "histograms": histograms}


def _histograms(
    dataset: ReportDataset, samples: Sequence[ReadSample]
) -> Iterator[tuple[str, str, list[Bar], bool]]:
    """Yield the title, the unit and the bars of each histogram, and whether it is of all samples.

    Otherwise it is of a random part of them.
    """
    counts: Mapping[str, int] = dataset.manifest.counts
    sizes = [size for sample in samples if (size := _size(sample))]
    is_every = len(samples) == dataset.manifest.samples
    is_counted = bool(histogram(counts, "side"))
    if not is_counted:
        names = [bin_name("side", min(size)) for size in sizes]
        if not dataset.manifest.is_scored:  # how long captions are is a column of scores
            captions = (str(sample.facts.get("caption", "")) for sample in samples)
            names += [bin_name("caption", len(caption)) for caption in captions]
        counts = Counter(names)
    ratios = [width / height for width, height in sizes]
    heights = np.bincount(np.searchsorted(RATIOS, ratios, side="right"), minlength=len(ASPECTS))
    aspects = [
        _bar(name.replace("about ", "").replace("under ", "<").replace("over ", ">"), name, count)
        for name, count in zip(ASPECTS, heights.tolist(), strict=True)
    ]
    yield "Shorter side", "pixels", _coarse_bars(counts, "side"), is_counted or is_every
    yield "Aspect ratio", "", aspects, is_every
    yield "Caption length", "characters", _coarse_bars(counts, "caption"), is_counted or is_every
    for name in dataset.columns:
        yield name, "", column_bars(name, samples), is_every


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
        most = least + step - 1
        label = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        bars.append(_bar(f"{least:,}", label, heights.get((least, most), 0)))
        least += step
    return bars


def column_bars(name: str, samples: Sequence[ReadSample]) -> list[Bar]:
    """Return the bars of a column: equal ranges of numbers, or its most frequent values."""
    values = [sample.facts.get(name) for sample in samples]
    numbers = [n for n in values if isinstance(n, int | float) and abs(n) < LARGEST]
    frequent = Counter(numbers or (value for value in values if isinstance(value, str)))
    if not numbers or len(frequent) <= STEPS:
        shown = sorted(frequent.items()) if numbers else frequent.most_common(STEPS)
        texts = [(f"{value:.4g}" if numbers else str(value), count) for value, count in shown]
        return [_bar(text, text, count) for text, count in texts]
    heights, edges = np.histogram(numbers, STEPS)
    ranges = zip(edges.tolist(), edges[1:].tolist(), heights.tolist(), strict=False)
    return [_bar(f"{at:.3g}", f"{at:.4g} to {end:.4g}", height) for at, end, height in ranges]


SIDES = 5.0  # the end of the histogram: larger values count into its last bin
BINS = 40
FAR, VERY_FAR = 3.0, 5.0
EXTREMES = 5


def usual_share(beyond: float) -> float:
    """Return the share of a normal distribution beyond some standard deviations, on both sides."""
    return 1 - erf(beyond / sqrt(2))


def latent_of(sample: ReadSample, settings: Settings) -> Any:
    """Return the latent of a sample in fp32, as a trainer takes it; for moments, the mean.

    Raise FormatError if it is not a finite array of the shape that the dataset states: of several
    shapes, the one that the size of the crop has.
    """
    array, size = array_in(sample, LATENT), cut_size(sample.facts)
    fields = fields_of(settings["layout"])
    if sizes := shapes_of(settings):
        if size not in sizes:
            raise FormatError(f"{sample.key} has none of the shapes of the dataset")
        fields = fields_in_shape(settings, size)
    wanted = next(field.shape for field in fields if field.name == LATENT)
    if array.shape != wanted:
        raise FormatError(f"{LATENT} of {sample.key} has shape {array.shape}, not {wanted}")
    if settings["latents"] != "moments":
        return array
    mean = patchify(array[: len(array) // 2], settings.get("patch", 1))
    shift, scale = (
        np.reshape(np.float32(settings[name]), (-1, 1, 1)) for name in ("shift", "scale")
    )
    return (mean - shift) * scale


def array_in(sample: ReadSample, name: str) -> Any:
    """Return the array of an image of a sample: a latent in fp32, a mask or pixels as stored.

    Raise FormatError if it is none of these, or has values that are not finite.
    """
    data = sample.members.get(name, b"")
    stored = field_of(name, data)
    values, has_levels = values_of(stored, data), stored.dtype == "|u1"
    channels = stored.shape[:-2]
    is_of_image = channels in ((), (3,)) if has_levels else len(stored.shape) == 3
    if not is_of_image or 0 in stored.shape:
        raise FormatError(f"{name} of {sample.key} has shape {stored.shape}, which no image has")
    if not np.isfinite(values).all():
        raise FormatError(f"{name} of {sample.key} has values that are not finite")
    return values if has_levels else values.astype(np.float32)


def spectrum_of(samples: Sequence[ReadSample], settings: Settings) -> dict[str, Any] | None:
    """Return the distribution of latents by channel, or None if no latent could be used.

    `unsound` counts the samples that had a latent of another shape than the dataset states, or one
    that is not finite.
    """
    latents = []
    for sample in samples:
        with suppress(FormatError):
            latents.append((sample.key, latent_of(sample, settings)))
    if not latents:
        return None
    channels = zip(*(latent for _, latent in latents), strict=True)
    extremes = []  # the samples with extreme values: key, channel and value of each
    for key, latent in sorted(latents, key=lambda pair: -abs(pair[1]).max())[:EXTREMES]:
        place = np.unravel_index(abs(latent).argmax(), latent.shape)
        extremes.append((key, int(place[0]), float(latent[place])))
    return {
        "samples": len(latents),
        "unsound": len(samples) - len(latents),
        "channels": [
            _channel(np.concatenate([part.ravel() for part in parts])) for parts in channels
        ],
        "extremes": extremes,
    }


def _channel(values: Any) -> dict[str, Any]:
    """Return the distribution of the values in one channel of latents.

    `far` and `very_far` are the shares of values whose absolute value is above 3 and above 5.
    `shares` are those in each bin from -5 to 5; the outer bins also have all values beyond.
    """
    wide = values.astype(np.float64)
    counts, _ = np.histogram(wide.clip(-SIDES, SIDES), bins=BINS, range=(-SIDES, SIDES))
    measures = {"mean": wide.mean(), "std": wide.std(), "least": wide.min(), "most": wide.max()}
    measures |= {"far": (abs(wide) > FAR).mean(), "very_far": (abs(wide) > VERY_FAR).mean()}
    shares = (counts / wide.size).tolist()
    return {"shares": shares, **{name: float(value) for name, value in measures.items()}}
