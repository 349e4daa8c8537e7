"""Coarse histograms that add up: how often a number was below 256, 384, 512, ...

A receipt has few bytes for each number that is counted, and the sum over a million receipts must
not depend on their order. So a histogram is a few counts by name, `side<512` for what is at least
384 and below 512, and a quantile is told as a range. The edges are powers of two and the halves
between them.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from wdsprep.dataset.settings import SCORES

COUNTED = ("caption", "width", "height", "repeats", "cut", "upscaled")
"""The fields of json, and the columns of tables, by which samples are counted, but for roles."""
REPEATS = "repeats:"
"""The start of the names of counts of images by how often they come in an epoch."""
IN_ROLE = "role:"
"""The start of the names of counts of samples that have an image in a role."""


def counted_columns(roles: Iterable[str]) -> tuple[str, ...]:
    """Return the columns by which samples are counted, if they have images in these roles."""
    return (*COUNTED, *(f"{role}_width" for role in roles))


def count_sample(
    counts: Counter[str],
    dataset: str,
    facts: Mapping[str, Any],
    shape: str = "",
    *,
    roles: Iterable[str] = (),
) -> None:
    """Count one sample in `counts`, by its facts in `counted_columns` and the name of its shape.

    Of an image, the length of the caption and the shorter side are counted, in bins, how often it
    comes in an epoch, if its json says that, and which of the `roles` it has; of latents or text, a
    cut or an empty caption, an image that was scaled up and the shape; of scores, nothing.
    """
    if dataset == "images":
        counts[bin_name("caption", len(facts["caption"]))] += 1
        counts[bin_name("side", min(facts["width"], facts["height"]))] += 1
        if type(repeats := facts.get("repeats")) is int:
            counts[f"{REPEATS}{repeats}"] += 1
        for role in roles:
            if facts.get(f"{role}_width") is not None:
                counts[f"{IN_ROLE}{role}"] += 1
        return
    if dataset == SCORES:
        return
    counts["cut"] += bool(facts.get("cut"))
    counts["empty_caption"] += not facts.get("caption")
    if facts.get("upscaled") is not None:
        counts["upscaled"] += 1
    if shape:
        counts[shape] += 1


@functools.lru_cache(1 << 13)
def bin_name(what: str, number: int) -> str:
    """Return the name of the bin that a number falls into, such as `side<512` for 384 to 511.

    `what` says what the number measures, such as `side` or `caption`.
    """
    power = max(0, number.bit_length() - 2)
    edge = number + 1 if number < 3 else (number >> power) + 1 << power
    return f"{what}<{edge}"


def quantile(counts: Mapping[str, int], what: str, share: float) -> tuple[int, int] | None:
    """Return the least and the greatest number of the bin in which the quantile `share` lies.

    `what` is the start of the names of the bins, such as `side`. Return None if none has a count.
    """
    bins = histogram(counts, what)
    left = share * sum(number for _, number in bins)
    for (least, most), number in bins:
        left -= number
        if left <= 0:
            return least, most
    return None


def histogram(counts: Mapping[str, int], what: str) -> list[tuple[tuple[int, int], int]]:
    """Return the bins that have a count, in rising order: both ends, included, and the count.

    `what` is the start of the names of the bins, such as `side`.
    """
    start = f"{what}<"
    bins = sorted((int(n[len(start) :]), c) for n, c in counts.items() if n.startswith(start))
    return [((_edge_below(edge), edge - 1), count) for edge, count in bins]


def _edge_below(edge: int) -> int:
    """Return the lower edge of the bin that has this upper edge."""
    if edge <= 3:
        return edge - 1
    power = edge.bit_length() - 2
    return edge - (1 << power) if edge >> power == 3 else 3 << power - 1


def sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum many counts by name, sorted by name."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items()))
