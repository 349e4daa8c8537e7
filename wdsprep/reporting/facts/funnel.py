"""The way from the source to the shards, as rows of the samples that are left or were lost.

The pace too: receipts hold no times, so that equal input gives equal bytes, but a store knows when
each receipt was written, which is when its unit was done. A copy of a dataset may have lost these
times, and a unit that was done again has the later time.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from wdsprep.dataset.file_names import RECEIPTS, receipt_name
from wdsprep.dataset.reject_codes import Code, by_stage
from wdsprep.reporting.facts.datasets import Datasets, ReportDataset

LOST_BY_STAGE = {
    "absent": "captions without an image",  # not an error: there is nothing to pack
    "read": "could not be read",
    "fetch": "could not be fetched",
    "filter": "left out by a filter",
    "check": "failed the image check",
    "encode": "could not be encoded",
    "remove": "removed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FunnelRow:
    """A row of the funnel: the samples left after a step, or lost in a step.

    It is drawn as `count` samples that begin at `start`.
    """

    label: str
    count: int
    start: int = 0
    is_lost: bool = False


def losses(rejects: Mapping[str, int]) -> dict[str, int]:
    """Count the rejects by the label of their stage, in the order of the stages."""
    found = by_stage(rejects)
    found["absent"] = rejects.get(Code.NO_IMAGE.value, 0)
    found["read"] -= found["absent"]
    return {label: found[stage] for stage, label in LOST_BY_STAGE.items() if found[stage]}


def funnel(datasets: Datasets) -> list[FunnelRow]:
    """Return the rows of the funnel, from the source to each dataset of latents."""
    rows: list[FunnelRow] = []
    images = datasets.images
    if images:
        rows.append(FunnelRow(label="samples in the source", count=images.inputs))
        rows += _loss_rows(images, images.inputs)
        rows.append(FunnelRow(label="packed", count=images.samples))
    labels = Counter(latents.label for latents in datasets.latents)
    for latents in datasets.latents:
        phase = latents.label if not latents.has_latents else str(latents.resolution)
        whose = "" if labels[latents.label] == 1 else f" ({latents.shown})"
        rows += _phase_rows(images, latents, f"{phase}{whose}")
    return rows


def _loss_rows(given: ReportDataset, left: int) -> Iterator[FunnelRow]:
    for label, count in losses(given.manifest.rejects).items():
        left -= count
        yield FunnelRow(label=label, count=count, start=left, is_lost=True)


def _phase_rows(
    images: ReportDataset | None, latents: ReportDataset, phase: str
) -> Iterator[FunnelRow]:
    wanted = latents.inputs
    if images:
        buckets = latents.encoded_buckets(images)
        fit = [shard.samples for shard in images.manifest.shards if shard.bucket in buckets]
        wanted = max(wanted, sum(fit))
    of, at = ("for phase", "at") if latents.has_latents else ("for", "as")
    done = "given" if latents.manifest.is_scored else "encoded"
    at = "" if latents.manifest.is_scored else f"{at} "
    yield FunnelRow(label=f"{of} {phase}", count=wanted)
    if missing := wanted - latents.inputs:
        label = f"not {done} {at}{phase} so far"
        yield FunnelRow(label=label, count=missing, start=latents.inputs, is_lost=True)
    left, removed = latents.inputs, latents.manifest.rejects.get(Code.REMOVED.value, 0)
    lost = {f"could not be {done}": latents.rejected - removed, "removed": removed}
    for label, count in lost.items():
        left -= count
        if count:
            yield FunnelRow(label=f"{label} {at}{phase}", count=count, start=left, is_lost=True)
    yield FunnelRow(label=f"{done} {at}{phase}", count=latents.samples)


BINS = 48
PAUSE_S = 600.0
SHORT_PAUSE_S = 60.0
PAUSE_TIMES = 8
"""How many times as long as usual a step takes that is a pause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPace:
    """The pace of a run over time.

    `rates` are inputs a second, over equal parts of the time in which work was done. Pauses, such
    as between a kill and a resume, are left out.
    """

    first_s: float
    last_s: float
    active_s: float
    pauses: int
    inputs: int
    """The inputs of all units, except those done at `first_s`."""
    rates: tuple[float, ...]

    @property
    def mean(self) -> float:
        return self.inputs / self.active_s


def pace_of(given: ReportDataset) -> RunPace | None:
    """Return the pace of a run by the times of its receipts; None with fewer than three times."""
    times = {entry.name: entry.written_s for entry in given.store.list(RECEIPTS)}
    done: dict[float, int] = {}
    for receipt in given.manifest.receipts:
        at = times.get(receipt_name(receipt.unit), 0.0)
        done[at] = done.get(at, 0) + receipt.inputs
    moments = sorted((at, inputs) for at, inputs in done.items() if at)
    return _pace(moments) if len(moments) > 2 else None


def _pace(moments: Sequence[tuple[float, int]]) -> RunPace:
    """Return the pace of a run without its pauses.

    A pause is a step of over 10 minutes that takes 8 times as long as is usual for its inputs, or
    one of over a minute that takes 8 times as long as all other steps together. It counts as long
    as is usual. What is usual is taken from the faster steps, since of a few steps most may be
    pauses.
    """
    gaps = [(b - a, inputs) for (a, _), (b, inputs) in pairwise(moments)]
    whole = sum(gap for gap, _ in gaps)
    usual = sorted(gap / max(1, inputs) for gap, inputs in gaps)[(len(gaps) - 1) // 3]
    steps: list[tuple[float, int]] = []  # seconds, and the inputs done in them
    pauses = 0
    for gap, inputs in gaps:
        length = usual * max(1, inputs)
        is_long = gap > PAUSE_S and gap > PAUSE_TIMES * length
        is_most = gap > SHORT_PAUSE_S and gap > PAUSE_TIMES * (whole - gap)
        pauses += is_long or is_most
        steps.append((min(gap, length) if is_long or is_most else gap, inputs))
    return RunPace(
        first_s=moments[0][0],
        last_s=moments[-1][0],
        active_s=sum(length for length, _ in steps),
        pauses=pauses,
        inputs=sum(inputs for _, inputs in steps),
        rates=_rates(steps),
    )


def _rates(steps: Sequence[tuple[float, int]]) -> tuple[float, ...]:
    """Return the inputs per second in equal periods of the time that all steps took.

    A step is its length in seconds and the number of its inputs, which count as spread evenly over
    it.
    """
    count = min(BINS, len(steps))
    width = sum(length for length, _ in steps) / count
    done = [0.0] * count
    start = 0.0
    for length, inputs in steps:
        end = start + length
        first, last = int(start / width), min(count - 1, int(end / width))
        for at in range(min(first, count - 1), last + 1):
            inside = min(end, (at + 1) * width) - max(start, at * width)
            done[at] += inputs * max(0.0, inside) / length
        start = end
    return tuple(inputs / width for inputs in done)
