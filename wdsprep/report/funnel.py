"""The way from the source to the shards, as rows of what is left and what was lost on the way."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from wdsprep.report.given import Datasets, Given
from wdsprep.samples import by_stage

LOST_BY_STAGE = {
    "read": "could not be read",
    "fetch": "could not be fetched",
    "filter": "left out by a filter",
    "check": "failed the image check",
    "encode": "could not be encoded",  # of latents, all rejects are
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What is left after a step, or what was lost in one: `count` samples, drawn from `start`."""

    label: str
    count: int
    start: int = 0
    is_lost: bool = False


def stages(rejects: Mapping[str, int]) -> dict[str, int]:
    """The rejects by stage, in the order of the stages."""
    found = by_stage(rejects)
    return {stage: found[stage] for stage in LOST_BY_STAGE if found[stage]}


def funnel(datasets: Datasets) -> list[Row]:
    rows: list[Row] = []
    images = datasets.images
    if images:
        rows.append(Row(label="samples in the source", count=images.inputs))
        rows += _lost(images, images.inputs)
        rows.append(Row(label="packed", count=images.samples))
    for latents in datasets.latents:
        rows += _encoded(images, latents)
    return rows


def _lost(given: Given, left: int) -> Iterator[Row]:
    for stage, count in stages(given.manifest.rejects).items():
        left -= count
        yield Row(label=LOST_BY_STAGE[stage], count=count, start=left, is_lost=True)


def _encoded(images: Given | None, latents: Given) -> Iterator[Row]:
    resolution, wanted = latents.resolution, latents.inputs
    if images:
        fit = [shard.samples for shard in images.manifest.shards if shard.bucket >= resolution]
        wanted = max(wanted, sum(fit))
    yield Row(label=f"for phase {resolution}", count=wanted)
    if missing := wanted - latents.inputs:
        label = f"not encoded at {resolution} so far"
        yield Row(label=label, count=missing, start=latents.inputs, is_lost=True)
    if lost := latents.rejected:
        label = f"could not be encoded at {resolution}"
        yield Row(label=label, count=lost, start=latents.inputs - lost, is_lost=True)
    yield Row(label=f"encoded at {resolution}", count=latents.samples)
