"""`wdsprep plan`: estimate what encoding and scoring take, and print it."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from wdsprep.cli.commands.plan_options import PlanOptions, sizes
from wdsprep.dataset.shapes import shape_name
from wdsprep.dataset.stored_dataset import open_dataset
from wdsprep.encoding.cost_estimate import (
    Bucket,
    Choice,
    Fleet,
    OneRun,
    Phase,
    Speed,
    derived_rate,
    estimate,
    estimate_one_run,
    find_gpu,
    sample_nbytes,
    stored_by_choice,
)
from wdsprep.encoding.measured_speeds import nearest_speed, read_trial
from wdsprep.encoding.models.presets import DC
from wdsprep.encoding.shape_lists import ShapesGiven, sizes_of
from wdsprep.encoding.worker_plan import SHARDS_PER_WORKER
from wdsprep.errors import UsageError
from wdsprep.options import takes_options
from wdsprep.reporting.overview import overview
from wdsprep.scoring.cost_estimate import ScoreEstimate, estimate_scores
from wdsprep.text import human_bytes, join_lines, plural

SHARD_SIZES = (1_000, 10_000, 100_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """A run that others have published, with the figures that they gave."""

    name: str
    buckets: Mapping[int, Bucket]
    gpu: str
    devices: int
    told: str
    hours: float
    why: str


PUBLISHED = (
    PublishedRun(
        name="MosaicML, Stable Diffusion 2 for under $50k",
        buckets={256: Bucket(samples=490_000_000), 512: Bucket(samples=300_000_000)},
        gpu="A100",
        devices=128,
        told="790M images of at least 256 pixels, 300M of them of at least 512, each phase encoded",
        hours=3784,
        why="batches, precision and how busy the cards were are not published. For all 790M at "
        "both sizes, this plan says 3,198 h",
    ),
    PublishedRun(
        name="Anyscale, 2 billion images with Ray",
        buckets={256: Bucket(samples=2_000_000_000)},
        gpu="A10G",
        devices=48,
        told="48 A10G with 8 CPUs each, batches of 120 at 256; images of phase 512 not published",
        hours=0,
        why="hours of encoding are not published. Their 8 CPUs a GPU scale with Pillow, make fp32 "
        "of it and pass that through the object store; uint8 crops in the GPU's process need fewer",
    ),
)


@takes_options(PlanOptions)
def plan_lines(options: PlanOptions) -> str:
    """Return the text that `wdsprep plan` prints."""
    if options.published:
        return join_lines(_published())
    choice = Choice(
        model=options.model,
        latents=options.latents,
        flip=options.flip,
        text=options.text,
        tokens=options.tokens,
        samples_per_shard=options.samples_per_shard,
        decode=options.decode,
    )
    if choice.latents == "moments" and choice.preset.vae == DC:
        raise UsageError(f"--latents moments: the VAE of {choice.model} gives no distribution")
    gpu, price = options.gpu, options.price
    counts = sizes(options.counts) if options.counts else {}
    given = {name: Bucket(samples=round(count)) for name, count in counts.items()}
    buckets = given or buckets_in(os.fspath(options.images))
    rates = sizes(options.rates) if options.rates else {}
    speeds = _speeds(sorted(buckets), rates, options.trials, gpu, choice)
    fleet = Fleet(devices=options.gpus, price=price or (find_gpu(gpu).price if gpu else 0.0))
    phases = estimate(buckets, speeds, choice, fleet)
    lists = shape_lists(options.shapes, [phase.resolution for phase in phases])
    one_run = estimate_one_run(phases, choice, fleet) if len(phases) > 1 else None
    scored = None
    if options.score:
        samples = sum(bucket.samples for bucket in buckets.values())
        nbytes_read = max(phase.nbytes_read for phase in phases)
        found = find_gpu(gpu) if gpu else None
        scored = estimate_scores(options.score, samples, nbytes_read, found, fleet)
    if options.as_json:
        listed = [facts(phase) | {"shapes": lists[phase.resolution]} for phase in phases]
        together = None if one_run is None else asdict(one_run)
        scores = {"scores": asdict(scored)} if scored else {}
        return json.dumps({"phases": listed, "one_run": together, **scores}, sort_keys=True)
    price_of = find_gpu(gpu).price_of if gpu and not price else ""
    lines = _lines(phases, one_run, choice, fleet, price_of, lists)
    return join_lines([*(_scores(scored, fleet) if scored else ()), *lines])


def _scores(scored: ScoreEstimate, fleet: Fleet) -> Iterator[str]:
    each = human_bytes(scored.nbytes_written / max(1, scored.samples))
    yield f"scores by {' and '.join(scored.models)}: {plural(scored.samples, 'image')}"
    if scored.device_hours:
        dollars = f", ${scored.dollars:,.0f}" if scored.dollars else ""
        wall = f"{scored.wall_hours / 24:,.1f} days on {fleet.devices:,}"
        hours = f"{scored.device_hours:,.1f} GPU hours"
        yield f"  GPUs      {hours}{dollars}; {wall} (derived, not measured)"
    yield (
        f"  bytes     {human_bytes(scored.nbytes_read)} read, "
        f"{human_bytes(scored.nbytes_written)} written ({each} a sample, without embeddings)"
    )
    yield ""


def shape_lists(given: ShapesGiven, resolutions: Sequence[int]) -> dict[int, list[str]]:
    """Return the names of the shapes for each resolution.

    A list that fits one resolution has no shapes for the others. Raise UsageError if the list fits
    none.
    """
    found, why = {}, {}
    for resolution in resolutions:
        try:
            found[resolution] = list(map(shape_name, sizes_of(given, resolution)))
        except UsageError as error:
            found[resolution], why[resolution] = [], error
    if len(why) == len(found):
        raise why[resolutions[-1]]
    return found


def buckets_in(images: str) -> dict[int, Bucket]:
    """Count the images that a dataset has so far, by bucket."""
    _, manifest = open_dataset(images)
    if manifest.dataset != "images":
        raise UsageError(f"{images} is a dataset of {manifest.dataset}: give a dataset of images")
    return {int(name): Bucket(**row) for name, row in overview(manifest)["buckets"].items()}


def _speeds(
    resolutions: Sequence[int],
    rates: Mapping[int, float],
    trials: Sequence[str],
    gpu: str | None,
    choice: Choice,
) -> dict[int, Speed]:
    """Return the speed for each resolution: given, measured in a trial, or from the GPU table.

    Resolutions without any of these are left out. Raise UsageError if no speed is known.
    """
    found = {}
    tried = dict(map(read_trial, trials))
    for resolution in resolutions:
        if resolution in rates:
            found[resolution] = Speed(each=rates[resolution], source="given")
        elif tried:
            found[resolution] = nearest_speed(tried, resolution, choice)
        elif gpu:
            each = derived_rate(find_gpu(gpu), resolution, choice)
            found[resolution] = Speed(each=each, source=f"derived for {gpu.upper()}, not measured")
    if not found:
        raise UsageError(
            'give a --gpu of the table, --rate 256=N,512=N, or the --trial of a "wdsprep encode '
            '--limit"'
        )
    return found


def _lines(
    phases: Sequence[Phase],
    one_run: OneRun | None,
    choice: Choice,
    fleet: Fleet,
    price_of: str,
    lists: Mapping[int, Sequence[str]],
) -> Iterator[str]:
    for phase in phases:
        yield from _phase(phase, fleet, choice)
        if names := lists[phase.resolution]:
            yield f"  shapes    {_shapes(names, phase)}"
        yield ""
    if one_run is not None:
        yield from _one_run(one_run, phases, choice, fleet)
        yield ""
    last = phases[-1]
    if choice.preset.is_trimmed and choice.text == "emb":
        longest = max(run.length for run in choice.preset.runs)
        whole = sample_nbytes(last.resolution, replace(choice, tokens=longest))
        yield (
            f"captions: {choice.tokens} tokens each (--tokens); if all had {longest}, phase "
            f"{last.resolution} would take {human_bytes(last.samples * whole)}"
        )
    elif choice.tokens != Choice.tokens and choice.text == "emb":
        yield f"captions: {choice.model} stores each whole, so --tokens changes nothing"
    yield f"stored by choice, phase {last.resolution}:"
    for (latents, text), nbytes in stored_by_choice(last.samples, last.resolution, choice).items():
        yield f"  --latents {latents:8} --text {text:7} {human_bytes(nbytes):>10}"
    yield f"shards by choice of --samples-per-shard, phase {last.resolution}:"
    for size in SHARD_SIZES:
        each = human_bytes(size * last.nbytes_written / last.samples)
        yield f"  {size:>7,}  {-(-last.samples // size):>12,} shards of {each}"
    if price_of:
        yield f"price: ${fleet.price:g} an hour ({price_of}); --price gives yours"
    yield "S3: list prices of S3 Standard in us-east-1; traffic within the region is free"


def _phase(phase: Phase, fleet: Fleet, choice: Choice) -> Iterator[str]:
    speed = phase.speed
    noun = "caption" if choice.is_of_text else "image"
    of = "text alone" if choice.is_of_text else f"phase {phase.resolution}"
    yield f"{of}: {plural(phase.samples, noun)}"
    yield f"  speed     {speed.each:,.0f} {noun}s/s a GPU ({speed.source})"
    yield f"  GPUs      {_hours(phase, fleet)}"
    if choice.flip:
        yield f"  flip      {_flip(phase, choice)}"
    if phase.text_nbytes:
        yield f"  text      {_text(phase)}"
    decoding = "" if choice.is_of_text else f"{phase.cores_each:.1f} a GPU to decode, and "
    yield f"  cores     {decoding}one to read, write and hash"
    each = human_bytes(phase.bytes_a_second_each)
    yield (
        f"  bytes     {human_bytes(phase.nbytes_read)} read, {human_bytes(phase.nbytes_written)} "
        f"written, {each}/s for a GPU"
    )
    yield (
        f"  S3        {plural(phase.shards, 'shard')}, "
        f"{plural(phase.gets + phase.puts, 'request')} "
        f"(${phase.request_dollars:,.2f}), ${phase.month_dollars:,.0f} a month to keep"
    )


def _one_run(
    one_run: OneRun, phases: Sequence[Phase], choice: Choice, fleet: Fleet
) -> Iterator[str]:
    apart = sum(phase.device_hours for phase in phases)
    read_apart = sum(phase.nbytes_read for phase in phases)
    yield f"all in one run (--resolution {','.join(str(phase.resolution) for phase in phases)}):"
    yield f"  GPUs      {_hours(one_run, fleet)}; apart {apart:,.1f} GPU hours"
    yield (
        f"  bytes     {human_bytes(one_run.nbytes_read)} read, apart {human_bytes(read_apart)}; "
        f"{human_bytes(one_run.nbytes_written)} written"
    )
    if choice.text != "none":
        once = human_bytes(one_run.nbytes_written_text_once)
        yield f"  text      stored once (--text-out): {once} written"


def _shapes(names: Sequence[str], phase: Phase) -> str:
    """Return a line on the shapes, and on the bytes that wait until a shard is complete."""
    ends = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    waits = human_bytes(SHARDS_PER_WORKER * phase.nbytes_written / max(1, phase.shards))
    return (
        f"{plural(len(names), 'shape')}, {ends}: one tar for each image shard, as without; up to "
        f"{waits} for each worker in TMPDIR; sizes and images are estimated as for squares"
    )


def _flip(phase: Phase, choice: Choice) -> str:
    """Return a line on what mirrored images take of the output."""
    both, one = (
        sample_nbytes(phase.resolution, replace(choice, flip=flip)) for flip in (True, False)
    )
    nbytes = human_bytes(phase.samples * (both - one))
    share = (both - one) / both
    return f"{nbytes} ({share:.0%} of what is written); the VAE's work twice"


def _text(phase: Phase) -> str:
    """Return a line on what captions take of the work and of the output."""
    nbytes = human_bytes(phase.text_nbytes)
    share = phase.text_nbytes / phase.nbytes_written
    each = human_bytes(phase.text_nbytes / phase.samples)
    stored = f"{nbytes} ({share:.0%} of what is written, {each} a caption)"
    if not phase.text_share:
        return stored
    hours = phase.text_share * phase.device_hours
    return f"{hours:,.1f} of these GPU hours, by the operations; {stored}"


def _hours(of: Phase | OneRun, fleet: Fleet) -> str:
    dollars = "" if of.dollars is None else f", ${of.dollars:,.0f}"
    hours = of.wall_hours
    wall = f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:,.1f} h"
    return f"{of.device_hours:,.1f} GPU hours{dollars}; {wall} on {fleet.devices:,}"


def facts(phase: Phase) -> dict[str, Any]:
    """Return the facts about a phase for --json."""
    return asdict(phase) | {
        "request_dollars": phase.request_dollars,
        "month_dollars": phase.month_dollars,
    }


def _published() -> Iterator[str]:
    """Yield lines on the published runs, each with the plan that this command would make."""
    for run in PUBLISHED:
        gpu = find_gpu(run.gpu)
        speeds = {
            resolution: Speed(each=derived_rate(gpu, resolution, Choice()), source="derived")
            for resolution in run.buckets
        }
        fleet = Fleet(devices=run.devices, price=gpu.price)
        phases = estimate(run.buckets, speeds, Choice(), fleet)
        hours = sum(phase.device_hours for phase in phases)
        yield f"{run.name}: {run.told}"
        days = f"{hours / run.devices / 24:.1f} days on {run.devices}"
        yield f"  estimated {hours:,.0f} {run.gpu} hours, {days}"
        if run.hours:
            times = f"{run.hours / hours:.1f} times as many"
            yield f"  published {run.hours:,.0f} {run.gpu} hours: {times}"
        yield f"  why       {run.why}"
