"""The plan of a run of `encode`: what it makes, from which images and with which model.

`make_run_plan` makes a whole plan and checks it before anything is written; `str(plan)` describes
it in plain words. The image shards that are missing, perhaps a million, are kept pickled in the
plan, and are handed out one after another.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wdsprep.dataset.settings import Settings
from wdsprep.dataset.stored_dataset import DatasetClaim
from wdsprep.encoding import HALF
from wdsprep.encoding.captions.options import CaptionSource
from wdsprep.encoding.models.find_model import Model
from wdsprep.encoding.options import Encode, EncodeWorkerOptions
from wdsprep.encoding.pending_shards import PackedShards, count_units
from wdsprep.encoding.worker_plan import EncodeWorkerPlan
from wdsprep.text import plural

if TYPE_CHECKING:
    from wdsprep.encoding.captions.laid_out import CaptionLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetPlan:
    """A dataset that a run of `encode` begins or continues, with the shards that it lacks."""

    place: str
    claim: DatasetClaim
    """The claim on what lies at the place, without the stale units."""
    settings: Settings
    recipe: Encode
    captions: CaptionSource
    shards: int
    """The number of image shards that the dataset is made from."""
    samples: int
    """The number of images in these shards; 0 if nobody has counted them."""
    pending: PackedShards
    """The image shards that are missing, the largest first."""
    missing: int
    """The number of shards that are missing before the run."""
    stale: Mapping[str, str]
    """The units that are removed first, each with the input that it was made from."""
    removals: tuple[str, ...]
    """Lines that tell the user how many units are removed, and why."""
    missing_samples: int
    """The number of images in the missing shards; 0 if nobody has counted them."""
    is_limited: bool
    """True if --limit leaves some images out."""
    """True if receipts record what foreign tars held."""

    @property
    def is_of_text(self) -> bool:
        return self.recipe.is_of_text

    def __str__(self) -> str:
        return "\n".join(_dataset_lines(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodePlan:
    """The plan of a run of `encode`: everything that the run will do."""

    images: str
    """The place of the images, as the user gave it."""
    url: str
    is_whole: bool
    """True if the manifest of the images says that they are completely packed."""
    packed_area: int
    """The `--max-area` with which the images were packed, in pixels; 0 if it is not known."""
    model: Model
    recipe: Encode
    """The recipe by which a worker encodes for all datasets, with the defaults filled in."""
    worker_plan: EncodeWorkerPlan
    worker_options: EncodeWorkerOptions
    """The options of the workers, with the runner that was chosen."""
    captions: "CaptionLayout | None"
    """The captions of a table, if the user gives one."""
    datasets: tuple[DatasetPlan, ...]
    units: int
    """The number of units of work: of image shards that at least one dataset lacks."""

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))


def headlines(plan: EncodePlan) -> Iterator[str]:
    """Yield the first lines of a plan: the images, the datasets, the model and the device."""
    text, _, vae = plan.recipe.dtype.partition("+")
    precision = "fp16 and bf16" if text == HALF else text
    precision += f", its VAE in {vae}," if vae else ""
    wanted = ", ".join(map(_describe_images, plan.datasets))
    device = plan.worker_plan.device
    yield f"{plan.images}: {wanted}; model {plan.model.name} in {precision} on {device}"
    if plan.model.note:
        yield plan.model.note
    if not plan.is_whole:
        yield f"{plan.images} is not completely packed: run the same command again after pack"


def plan_lines(plan: EncodePlan) -> Iterator[str]:
    """Yield lines that describe everything a run of `encode` will do."""
    yield from headlines(plan)
    if most := area_warning(plan):
        yield most
    for dataset in plan.datasets:
        yield from _dataset_lines(dataset)
    yield f"{plural(plan.units, 'image shard')} to encode, by {_describe_workers(plan)}"


def area_warning(plan: EncodePlan) -> str:
    """Return a warning if pack kept images that encode rejects as too large, or "" if none."""
    if plan.packed_area <= plan.recipe.max_area or plan.recipe.is_of_text:
        return ""
    return (
        f"{plan.images} was packed with --max-area {plan.packed_area}, but encode rejects images "
        f"of more than {plan.recipe.max_area:,} pixels: give the same --max-area to keep them"
    )


def _describe_images(dataset: DatasetPlan) -> str:
    noun = "caption" if dataset.is_of_text else "image"
    counted = f", {plural(dataset.samples, noun)}" if dataset.samples else ""
    sizes = dataset.recipe.sizes
    shapes = f" in {plural(len(sizes), 'shape')}" if sizes else ""
    resolution = dataset.recipe.resolution
    return f"{plural(dataset.shards, 'shard')}{counted} for resolution {resolution}{shapes}"


def _dataset_lines(dataset: DatasetPlan) -> Iterator[str]:
    claim = dataset.claim
    begins = "starts over" if claim.starts_over else "goes on" if claim.is_there else "begins"
    missing = f"{dataset.missing:,} of {plural(dataset.shards, 'shard')} missing"
    yield f"{dataset.place} {begins}: {_describe_images(dataset)}, {missing}"
    if not dataset.is_of_text:
        yield f"  latents: {dataset.settings['latents']}"
    if dataset.settings["text"] != "none":
        yield f"  text: {dataset.settings['text']}, of {_describe_captions(dataset.captions)}"
    yield from (f"  {line}" for line in dataset.removals)
    if dataset.is_limited:
        yield "  --limit leaves the other images out"


def _describe_captions(source: CaptionSource) -> str:
    if source.digest:
        return f"the captions of a table, by {source.by}"
    if source.field:
        return f"the captions in the field {source.field}"
    return "the samples' own captions"


def _describe_workers(plan: EncodePlan) -> str:
    worker_plan, kind = (
        plan.worker_plan,
        "GPU worker" if plan.worker_plan.device == "cuda" else "CPU worker",
    )
    where = "in a Ray cluster" if plan.worker_options.runner == "ray" else "on this machine"
    workers = (
        plural(worker_plan.workers, kind)
        if worker_plan.workers
        else f"as many {kind}s as have room"
    )
    return f"{workers} {where}"


def units_of(datasets: "tuple[DatasetPlan, ...]") -> int:
    """Return the number of units of work: of image shards that at least one dataset lacks.

    A shard of which datasets lack different numbers of samples counts once for each number.
    """
    return count_units([dataset.pending for dataset in datasets])
