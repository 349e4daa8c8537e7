"""`wdsprep plan`: say what encoding takes, and print it.

Hours are arithmetic: images, divided by the speed that a trial has measured. Without a trial nobody
knows the speed of a GPU that is not here, so only bytes are told, and what published runs took.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.stored_dataset import open_dataset
from wdsprep.encoding import LATENTS, MODELS, TEXTS
from wdsprep.encoding.models.presets import DC, TOKENS
from wdsprep.encoding.options import parse_resolutions, resolutions_of
from wdsprep.encoding.sample_sizes import Choice, sample_nbytes
from wdsprep.errors import UsageError
from wdsprep.options import Options, about, takes_options
from wdsprep.reporting.overview import images_from
from wdsprep.text import command_line, human_bytes, join_lines, plural

USUAL = (256, 512)
"""The resolutions that are planned unless others are named: the phases of Stable Diffusion."""
PUBLISHED = (
    "no trial is given, and no speed is known without one. MosaicML published 3,784 A100 hours for "
    "790 million images at 256, of which 300 million at 512 too (Stable Diffusion 2): 58 images a "
    "second for each A100. Anyscale published 48 A10G and 192 CPUs for 2 billion images, and no "
    "hours"
)
DAYS_FROM_H = 48
TRIED = 2_000
"""The images of a trial that is proposed."""
IMAGES, SPEED, MODEL = "Images", "Speed", "Model"


def parse_counts(given: Any) -> Mapping[int, float]:
    """Parse a number of images for each of some sizes: `256=490M,512=300M`, or a mapping."""
    if isinstance(given, Mapping):
        return given
    powers = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}
    counts = {}
    for part in str(given).split(","):
        match = re.fullmatch(r"\s*(\d+)\s*=\s*(\d+(?:\.\d+)?)([kMB]?)\s*", part)
        if match is None:
            raise UsageError(f"{part!r}: write 256=490M,512=300M")
        counts[int(match[1])] = float(match[2]) * powers[match[3]]
    return counts


@dataclass(frozen=True)
class PlanOptions(Options):
    """The options of `wdsprep plan`."""

    images: "str | os.PathLike[str]" = field(
        default="", metadata=about("The images to be encoded.", is_place=True)
    )
    _: KW_ONLY
    counts: Mapping[int, float] | str | None = field(
        default=None,
        metadata=about(
            "Plan for this many images of each size, by the shorter side: 256=490M,512=300M.",
            IMAGES,
            read=parse_counts,
            metavar="SIZE=N,...",
        ),
    )
    samples_per_shard: int = field(
        default=10_000,
        metadata=about("Plan --counts with so many samples in a shard.", IMAGES, least=1),
    )
    resolution: int | Sequence[int] | None = field(
        default=None,
        metadata=about(
            "Plan for these resolutions; by default those of the trials, or 256 and 512.",
            IMAGES,
            read=lambda given: None if given is None else resolutions_of(given),
            parse=parse_resolutions,
            metavar="PIXELS[,...]",
        ),
    )
    trials: Sequence[str] = field(
        default=(),
        metadata=about(
            'Use the speed and the sizes of a dataset that "encode --limit" made.',
            SPEED,
            spelling="--trial",
            is_place=True,
            is_many=True,
        ),
    )
    gpus: int = field(
        default=1, metadata=about("Plan with this many GPUs.", SPEED, least=1, usual=True)
    )
    price: float = field(
        default=0.0,
        metadata=about("Plan with this price in dollars for an hour of a GPU.", SPEED, least=0),
    )
    model: str = field(
        default="sd2",
        metadata=about(
            "Without a trial, plan for a model that wdsprep models lists, except tiny.",
            MODEL,
            choices=[name for name in MODELS if name != "tiny"],
            metavar="NAME",
            usual=True,
        ),
    )
    latents: str = field(
        default="sample",
        metadata=about("Plan with this kept of each image.", MODEL, choices=LATENTS, usual=True),
    )
    flip: bool = field(
        default=False, metadata=about("Plan with latents of mirror images too.", MODEL)
    )
    text: str = field(
        default="emb",
        metadata=about("Plan with this kept of each caption.", MODEL, choices=TEXTS, usual=True),
    )
    tokens: int = field(
        default=TOKENS,
        metadata=about(
            "Plan with captions of this many tokens, if the model stores no more than they have.",
            MODEL,
            least=1,
            usual=True,
        ),
    )
    as_json: bool = False

    def check_together(self) -> None:
        super().check_together()
        if bool(self.images) is bool(self.counts):
            raise UsageError("nothing to plan: give a dataset of images, or --counts 256=N,512=N")
        if self.latents == "none" and self.flip:
            raise UsageError(
                "--flip is for images, of which --latents none encodes none: leave one of them out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The speed of one GPU and the bytes of a sample, as a run of `encode --limit` had them."""

    resolution: int
    rate: float
    nbytes_each: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """The images that a resolution takes, as far as is known: their bytes, and their shards."""

    samples: int
    shards: int
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """The time and bytes of encoding at one resolution; hours and dollars are None if not known."""

    resolution: int
    samples: int
    rate: float | None
    source: str
    gpu_hours: float | None
    wall_hours: float | None
    dollars: float | None
    nbytes_read: int
    nbytes_written: int
    shards: int


@takes_options(PlanOptions)
def plan_lines(options: PlanOptions) -> str:
    """Return the text that `wdsprep plan` prints."""
    trials = {trial.resolution: trial for trial in map(read_trial, options.trials)}
    choice = Choice(
        model=options.model,
        latents=options.latents,
        flip=options.flip,
        text=options.text,
        tokens=options.tokens,
    )
    if choice.latents == "moments" and choice.preset.vae == DC:
        raise UsageError(f"--latents moments: the VAE of {choice.model} gives no distribution")
    wanted = _resolutions(options, trials)
    if missing := [side for side in wanted if trials and side not in trials]:
        how = _how_to_try(options, missing[0], count=TRIED)
        raise UsageError(f"no --trial was made at {missing[0]}: {how}, or leave {missing[0]} out")
    phases = [
        phase(side, images, trials.get(side), choice, options)
        for side, images in images_at(options, wanted).items()
        if images.samples
    ]
    if not phases:
        raise UsageError(
            f"no image is large enough for {', '.join(map(str, wanted))}: give a smaller "
            "--resolution, or other images"
        )
    if options.as_json:
        return json.dumps({"phases": [asdict(each) for each in phases]}, sort_keys=True)
    return join_lines(_lines(phases, choice, options, has_trials=bool(trials)))


def read_trial(url: str) -> Trial:
    """Return what a trial has measured; raise UsageError for a dataset that is none."""
    _, manifest = open_dataset(url)
    trial = manifest.extra.get("trial")
    if manifest.dataset != "latents" or trial is None or not manifest.samples:
        raise UsageError(f'{url} is not a trial: make one with "wdsprep encode --limit N"')
    settings, model = manifest.settings, manifest.extra["model"]
    source = f"{model} on {trial['device']}, busy {trial['busy']:.0%} of the time"
    if "launching" in trial:
        source += f", launching {trial['launching']:.0%}"
    return Trial(
        resolution=settings.get("resolution", 0),
        rate=trial["each"],
        nbytes_each=manifest.nbytes / manifest.samples,
        source=f"measured in {url}: {source}",
    )


def _resolutions(options: PlanOptions, trials: Mapping[int, Trial]) -> tuple[int, ...]:
    if options.resolution is not None:
        return resolutions_of(options.resolution)
    if trials:
        return tuple(sorted(trials))
    return USUAL[: 1 if options.latents == "none" else None]


def images_at(options: PlanOptions, resolutions: Sequence[int]) -> dict[int, Images]:
    """Return the images that each resolution takes: those whose shorter side is large enough."""
    if options.counts:
        counts = parse_counts(options.counts)
        samples = {
            side: round(sum(count for size, count in counts.items() if size >= side))
            for side in resolutions
        }
        a_shard = options.samples_per_shard
        return {side: Images(samples=n, shards=-(-n // a_shard)) for side, n in samples.items()}
    place = os.fspath(options.images)
    _, manifest = open_dataset(place)
    if manifest.dataset != "images":
        raise UsageError(f"{place} is a dataset of {manifest.kind}: give a dataset of images")
    return {side: _images_in(manifest, side) for side in resolutions}


def _images_in(manifest: Manifest, resolution: int) -> Images:
    samples = images_from(manifest, resolution)
    buckets = sorted(map(int, manifest.settings["buckets"]))
    last_below = max((bucket for bucket in buckets if bucket <= resolution), default=buckets[0])
    shards = [shard for shard in manifest.shards if int(shard.bucket) >= last_below]
    nbytes = sum(shard.nbytes for shard in shards)
    return Images(samples=samples, shards=len(shards), nbytes=nbytes)


def phase(
    resolution: int, images: Images, trial: Trial | None, choice: Choice, options: PlanOptions
) -> Phase:
    """Return what encoding at a resolution takes."""
    hours = images.samples / trial.rate / 3600 if trial else None
    each = trial.nbytes_each if trial else sample_nbytes(resolution, choice)
    return Phase(
        resolution=resolution,
        samples=images.samples,
        rate=trial.rate if trial else None,
        source=trial.source if trial else "",
        gpu_hours=hours,
        wall_hours=None if hours is None else hours / options.gpus,
        dollars=hours * options.price if hours and options.price else None,
        nbytes_read=images.nbytes,
        nbytes_written=round(images.samples * each),
        shards=images.shards,
    )


def _lines(
    phases: Sequence[Phase], choice: Choice, options: PlanOptions, *, has_trials: bool
) -> Iterator[str]:
    for each in phases:
        of = "text" if choice.is_of_text and not has_trials else f"resolution {each.resolution}"
        yield f"{of}: {plural(each.samples, 'image')}"
        if each.rate and each.gpu_hours is not None and each.wall_hours is not None:
            yield f"  speed     {each.rate:,.1f} images/s for a GPU ({each.source})"
            dollars = "" if each.dollars is None else f", ${each.dollars:,.2f}"
            hours = each.wall_hours
            wall = f"{hours / 24:,.1f} days" if hours >= DAYS_FROM_H else f"{hours:,.1f} h"
            yield f"  GPUs      {each.gpu_hours:,.1f} GPU hours{dollars}; {wall} on {options.gpus}"
        read = f"{human_bytes(each.nbytes_read)} read, " if each.nbytes_read else ""
        yield (
            f"  bytes     {read}{human_bytes(each.nbytes_written)} written in "
            f"{plural(each.shards, 'shard')}: {human_bytes(each.nbytes_written / each.samples)} "
            f"a sample{'' if has_trials else f' of {choice.model}'}"
        )
        yield ""
    if has_trials:
        return
    if choice.preset.is_trimmed and choice.text == "emb":
        yield f"captions have {choice.tokens} tokens here (--tokens)"
    yield PUBLISHED
    first = phases[0]
    how = _how_to_try(options, first.resolution, count=min(TRIED, first.samples))
    yield f"to measure a GPU of yours: {how}"


def _how_to_try(options: PlanOptions, resolution: int, *, count: int) -> str:
    model = () if options.model == "sd2" else ("--model", options.model)
    images = os.fspath(options.images) or "shards/images"
    tried = ("encode", images, "trial", "--resolution", str(resolution), *model)
    planned = command_line("plan", images, "--trial", "trial")
    return f"{command_line(*tried, '--limit', str(count))}, then {planned}"
