"""`wdsprep plan`: say what encoding takes, and print it.

Hours are arithmetic: images, divided by the speed that a trial has measured. Without a trial nobody
knows the speed of a GPU that is not here, so only bytes are told, and what published runs took.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.samples import roles_of
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.shapes import buckets_encoded, least_side_of
from wdsprep.dataset.stored_dataset import check_of_images, open_dataset
from wdsprep.encoding import LATENTS, MODELS, TEXTS
from wdsprep.encoding.models.presets import DC, PRESETS, TOKENS
from wdsprep.encoding.options import check_resolutions, parse_resolutions, resolutions_of
from wdsprep.encoding.recipe_options import check_roles_option
from wdsprep.encoding.sample_arrays import sample_nbytes
from wdsprep.errors import UsageError
from wdsprep.options import Options, Place, option_field, takes_options
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

    images: Place = option_field("The images to be encoded.", default="", is_place=True)
    _: KW_ONLY
    counts: Mapping[int, float] | str | None = option_field(
        "Plan for this many images of each size, by the shorter side: 256=490M,512=300M.",
        IMAGES,
        default=None,
        read=parse_counts,
        metavar="SIZE=N,...",
    )
    samples_per_shard: int = option_field(
        "Plan --counts with so many samples in a shard.",
        IMAGES,
        default=10_000,
        least=1,
        usual=False,
    )
    resolution: int | Sequence[int] | None = option_field(
        "Plan for these resolutions; by default those of the trials, or 256 and 512.",
        IMAGES,
        default=None,
        read=check_resolutions,
        parse=parse_resolutions,
        metavar="PIXELS[,...]",
    )
    trials: Sequence[str] = option_field(
        'Use the speed and the sizes of a dataset that "encode --limit" made.',
        SPEED,
        default=(),
        spelling="--trial",
        is_place=True,
        is_many=True,
    )
    gpus: int = option_field("Plan with this many GPUs.", SPEED, default=1, least=1)
    price: float = option_field(
        "Plan with this price in dollars for an hour of a GPU.", SPEED, default=0.0, least=0
    )
    model: str = option_field(
        "Without a trial, plan for a model that wdsprep models lists, except tiny.",
        MODEL,
        default="sd2",
        choices=[name for name in MODELS if name != "tiny"],
        metavar="NAME",
    )
    latents: str = option_field(
        "Plan with this kept of each image.", MODEL, default="sample", choices=LATENTS
    )
    flip: bool = option_field("Plan with latents of mirror images too.", MODEL, default=False)
    roles: str | Sequence[str] = option_field(
        "Plan with the images that samples have in these roles, as in target,source, one in each; "
        "by default with the target alone.",
        MODEL,
        default=(),
        read=check_roles_option,
        metavar="ROLE,...",
        usual="target",
    )
    text: str = option_field(
        "Plan with this kept of each caption.", MODEL, default="emb", choices=TEXTS
    )
    tokens: int = option_field(
        "Plan with captions of this many tokens, if the model stores no more than they have.",
        MODEL,
        default=TOKENS,
        least=1,
    )
    as_json: bool = False

    def check_together(self) -> None:
        super().check_together()
        if bool(self.images) is bool(self.counts):
            raise UsageError("nothing to plan: give a dataset of images, or --counts 256=N,512=N")
        for_images = {"--flip": self.flip, "--roles": self.roles}
        if self.latents == "none" and (given := [name for name, on in for_images.items() if on]):
            raise UsageError(
                f"{given[0]} is for images, of which --latents none encodes none: leave one of "
                "them out"
            )


Trial = tuple[str, Manifest]
"""The place of a dataset that "encode --limit" made, and its manifest."""


@takes_options(PlanOptions)
def plan_lines(options: PlanOptions) -> str:
    """Return the text that `wdsprep plan` prints."""
    trials = dict(map(read_trial, options.trials))
    if options.latents == "moments" and PRESETS[options.model].vae == DC:
        raise UsageError(f"--latents moments: the VAE of {options.model} gives no distribution")
    resolutions = tuple(sorted(trials)) or USUAL[: 1 if options.latents == "none" else None]
    if options.resolution is not None:
        resolutions = resolutions_of(options.resolution)
    if missing := [side for side in resolutions if trials and side not in trials]:
        how = _how_to_try(options, missing[0], count=TRIED)
        raise UsageError(f"no --trial was made at {missing[0]}: {how}, or leave {missing[0]} out")
    images = open_images(options) if options.images else None
    phases = [phase_at(side, images, trials.get(side), options) for side in resolutions]
    if not (phases := [phase for phase in phases if phase["samples"]]):
        raise UsageError(
            f"no image is large enough for {', '.join(map(str, resolutions))}: give a smaller "
            "--resolution, or other images"
        )
    if options.as_json:
        return json.dumps({"phases": phases}, sort_keys=True)
    return join_lines(_lines(phases, options))


def read_trial(url: str) -> tuple[int, Trial]:
    """Return the resolution of a trial, and the trial: its URL and its manifest.

    A trial is what `encode --limit` makes. Raise UsageError for any other dataset.
    """
    _, manifest = open_dataset(url)
    if manifest.dataset != "latents" or "trial" not in manifest.extra or not manifest.samples:
        raise UsageError(f'{url} is not a trial: make one with "wdsprep encode --limit N"')
    return manifest.settings["resolution"], (url, manifest)


def open_images(options: PlanOptions) -> Manifest:
    """Return the manifest of the images. Raise UsageError if they are not images in these roles."""
    from wdsprep.encoding.image_shards import check_roles  # numpy

    place = os.fspath(options.images)
    _, manifest = open_dataset(place)
    check_of_images(place, manifest)
    check_roles(place, options.roles, roles_of(manifest.settings))
    return manifest


def phase_at(
    resolution: int, images: Manifest | None, trial: Trial | None, options: PlanOptions
) -> dict[str, Any]:
    """Return what encoding at a resolution takes; hours and dollars are None if not known.

    It takes the images whose shorter side is large enough; those that a trial has scaled up or cut
    to shapes may be smaller. Bytes that are not known are 0. Without `images`, --counts has them.
    """
    settings: Settings = trial[1].settings if trial else {"resolution": resolution}
    least = least_side_of(settings)
    if images:
        samples = images_from(images, least)
        buckets = buckets_encoded(settings, sorted(images.settings["buckets"]))
        read = [shard.nbytes for shard in images.shards if int(shard.bucket) in buckets]
        shards = len(read)
    else:
        counts = parse_counts(options.counts).items()
        samples, read = round(sum(count for size, count in counts if size >= least)), []
        shards = -(-samples // options.samples_per_shard)
    unknown = ("rate", "gpu_hours", "wall_hours", "dollars")
    speed: dict[str, Any] = {"source": "", **dict.fromkeys(unknown)}
    if trial:
        speed, nbytes_each = _measured(*trial, samples, options)
    else:
        nbytes_each = sample_nbytes(
            resolution,
            options.model,
            latents=options.latents,
            flip=options.flip,
            roles=options.roles,
            text=options.text,
            tokens=options.tokens,
        )
    return {
        "resolution": resolution,
        "samples": samples,
        "shards": shards,
        "nbytes_read": sum(read),
        "nbytes_written": round(samples * nbytes_each),
        **speed,
    }


def _measured(
    place: str, manifest: Manifest, samples: int, options: PlanOptions
) -> tuple[dict[str, Any], float]:
    """Return what a trial says of the time that samples take, and of the bytes of each."""
    speed = manifest.extra["trial"]
    hours = samples / speed["each"] / 3600
    source = f"{manifest.extra['model']} on {speed['device']}, busy {speed['busy']:.0%} of the time"
    if "launching" in speed:
        source += f", launching {speed['launching']:.0%}"
    measured = {
        "rate": speed["each"],
        "source": f"measured in {place}: {source}",
        "gpu_hours": hours,
        "wall_hours": hours / options.gpus,
        "dollars": hours * options.price if options.price else None,
    }
    return measured, manifest.nbytes / manifest.samples


def _lines(phases: Sequence[Mapping[str, Any]], options: PlanOptions) -> Iterator[str]:
    has_trials = bool(options.trials)
    for plan in phases:
        is_text = options.latents == "none" and not has_trials
        what = "text" if is_text else f"resolution {plan['resolution']}"
        yield f"{what}: {plural(plan['samples'], 'image')}"
        if plan["rate"]:
            yield f"  speed     {plan['rate']:,.1f} images/s for a GPU ({plan['source']})"
            dollars = "" if plan["dollars"] is None else f", ${plan['dollars']:,.2f}"
            hours = plan["wall_hours"]
            wall = f"{hours / 24:,.1f} days" if hours >= DAYS_FROM_H else f"{hours:,.1f} h"
            gpu_hours = f"{plan['gpu_hours']:,.1f} GPU hours"
            yield f"  GPUs      {gpu_hours}{dollars}; {wall} on {options.gpus}"
        read = f"{human_bytes(plan['nbytes_read'])} read, " if plan["nbytes_read"] else ""
        written = plan["nbytes_written"]
        yield (
            f"  bytes     {read}{human_bytes(written)} written in "
            f"{plural(plan['shards'], 'shard')}: {human_bytes(written / plan['samples'])} "
            f"a sample{'' if has_trials else f' of {options.model}'}"
        )
        yield ""
    if has_trials:
        return
    if PRESETS[options.model].is_trimmed and options.text == "emb":
        yield f"captions have {options.tokens} tokens here (--tokens)"
    yield PUBLISHED
    how = _how_to_try(options, phases[0]["resolution"], count=min(TRIED, phases[0]["samples"]))
    yield f"to measure a GPU of yours: {how}"


def _how_to_try(options: PlanOptions, resolution: int, *, count: int) -> str:
    model = () if options.model == "sd2" else ("--model", options.model)
    images = os.fspath(options.images) or "shards/images"
    roles = ("--roles", ",".join(options.roles)) if options.roles else ()
    tried = ("encode", images, "trial", "--resolution", str(resolution), *model, *roles)
    planned = command_line("plan", images, "--trial", "trial")
    return f"{command_line(*tried, '--limit', str(count))}, then {planned}"
