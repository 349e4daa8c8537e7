"""A run of `encode` before it goes: what it makes, of which images, with what, and what is missing.

`planning.make_plan` makes it whole and checks it before anything is written; `str(plan)` says it in
plain words. Of a million image shards it keeps those that are missing, packed, and hands them out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from wdsprep.dataset.receipts import Settings
from wdsprep.dataset.state import DatasetClaim
from wdsprep.encoding import HALF
from wdsprep.encoding.captions.sources import CaptionSource
from wdsprep.encoding.captions.table import PreparedCaptions
from wdsprep.encoding.models.find import Model
from wdsprep.encoding.pending import PackedShards, count_units
from wdsprep.encoding.recipe import Encode
from wdsprep.encoding.worker_plan import EncodeWorkerOptions, EncodeWorkerPlan
from wdsprep.text import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetPlan:
    """A dataset that a run makes or goes on with, and what of it is missing."""

    place: str
    claim: DatasetClaim
    """The claim on the dataset that lies there, without the units that are stale."""
    settings: Settings
    recipe: Encode
    captions: CaptionSource
    shards: int
    """The number of image shards that it is to be made of."""
    samples: int
    """The number of images in these; 0 where nobody has counted them."""
    pending: PackedShards
    """The image shards that are missing, the largest first."""
    missing: int
    """The number of missing shards at first."""
    stale: Mapping[str, str]
    """The units that are removed first, each with the input that it was made of."""
    removals: tuple[str, ...]
    """Lines that say which these are, and why."""
    is_limited: bool
    """True if --limit leaves some images out."""
    keeps_content: bool
    """True if receipts say what foreign tars held."""

    @property
    def is_of_text(self) -> bool:
        return self.recipe.is_of_text

    def __str__(self) -> str:
        return "\n".join(_dataset_lines(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodePlan:
    """The plan of a run of `encode`: all that it is going to do."""

    images: str
    """The images, as the user names them."""
    url: str
    is_whole: bool
    """True if the image dataset is packed to its end, as far as it says."""
    packed_area: int
    """The largest image that pack let pass, in pixels; 0 where nobody says."""
    model: Model
    recipe: Encode
    """The recipe of a worker for all datasets, with defaults for the model and the device."""
    worker_plan: EncodeWorkerPlan
    worker_options: EncodeWorkerOptions
    """The options of the workers, with the runner that was chosen."""
    captions: PreparedCaptions
    datasets: tuple[DatasetPlan, ...]
    units: int
    """The number of image shards to be encoded, each for the datasets that lack it."""

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))


def headlines(plan: EncodePlan) -> Iterator[str]:
    """Say what is encoded with what."""
    dtype = plan.recipe.dtype
    precision = "fp16 and bf16" if dtype == HALF else dtype
    wanted = ", ".join(map(_wanted, plan.datasets))
    device = plan.worker_plan.device
    yield f"{plan.images}: {wanted}; model {plan.model.name} in {precision} on {device}"
    if plan.model.note:
        yield plan.model.note
    if not plan.is_whole:
        yield f"{plan.images} is not packed to its end: run the same again after pack has ended"


def plan_lines(plan: EncodePlan) -> Iterator[str]:
    """Say all that a run is going to do."""
    yield from headlines(plan)
    if most := area_warning(plan):
        yield most
    for dataset in plan.datasets:
        yield from _dataset_lines(dataset)
    yield f"{plural(plan.units, 'image shard')} to encode, by {_workers(plan)}"


def area_warning(plan: EncodePlan) -> str:
    """Warn of large images that pack let pass and encode rejects."""
    if plan.packed_area <= plan.recipe.max_area or plan.recipe.is_of_text:
        return ""
    return (
        f"{plan.images} was packed with --max-area {plan.packed_area}: images of more than "
        f"{plan.recipe.max_area:,} pixels are rejected here, unless --max-area says otherwise"
    )


def _wanted(dataset: DatasetPlan) -> str:
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
    yield f"{dataset.place} {begins}: {_wanted(dataset)}, {missing}"
    if not dataset.is_of_text:
        yield f"  latents: {dataset.settings['latents']}"
    if dataset.settings["text"] != "none":
        yield f"  text: {dataset.settings['text']}, of {_captions(dataset.captions)}"
    yield from (f"  {line}" for line in dataset.removals)
    if dataset.is_limited:
        yield "  --limit leaves the other images out"


def _captions(source: CaptionSource) -> str:
    if source.digest:
        return f"the captions of a table, by {source.by}"
    if source.field:
        return f"the captions in the field {source.field}"
    return "the samples' own captions"


def _workers(plan: EncodePlan) -> str:
    worker_plan, kind = (
        plan.worker_plan,
        "GPU worker" if plan.worker_plan.device == "cuda" else "CPU worker",
    )
    where = "of a Ray cluster" if plan.worker_options.runner == "ray" else "on this machine"
    workers = (
        plural(worker_plan.workers, kind)
        if worker_plan.workers
        else f"as many {kind}s as there is room for"
    )
    return f"{workers} {where}"


def units_of(datasets: "tuple[DatasetPlan, ...]") -> int:
    """Return how many image shards are missing from any of the datasets."""
    return count_units([dataset.pending for dataset in datasets])
