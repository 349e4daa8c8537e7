"""The plan of a run of `encode`: what it makes, from which images and with which model.

All is looked up and checked before anything is written. `make_plan` finds, in this order, the
images for each dataset (`_find_phases`), the model and with it the settings (`_find_model`), the
captions (`_find_captions`), and what lies in the places of the datasets, with the image shards that
are missing there (`plan_dataset`, by which `score` plans too). These, perhaps a million, are kept
pickled in the plan, and are handed out one after another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from wdsprep.dataset.damage import UNLIKE_RECEIPT, repair_step
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.samples import TARGET
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.stored_dataset import DatasetClaim, find_claim, refresh_manifest
from wdsprep.encoding import HALF
from wdsprep.encoding.captions.table import CaptionTable, warn_of_field
from wdsprep.encoding.image_shards import (
    ImageShard,
    ImageShards,
    count_samples,
    find_image_shards,
    tars_of,
)
from wdsprep.encoding.models.find_model import Model, check_resolution, check_shapes, find_model
from wdsprep.encoding.options import Encode, EncodeOptions, EncodeWorkerOptions
from wdsprep.encoding.pending_shards import PackedShards, count_units, pending_shards
from wdsprep.encoding.recipe_defaults import choices_for, settings_of, settle_recipe
from wdsprep.encoding.recipe_options import Recipe, check_roles
from wdsprep.encoding.worker_plan import EncodeWorkerPlan, plan_for_machines, settle_runner
from wdsprep.errors import DamageError, NotFoundError, UsageError
from wdsprep.sources.patterns import is_glob
from wdsprep.sources.tars import TarsSource
from wdsprep.store import open_store
from wdsprep.store.base import Store, absolute, check_apart
from wdsprep.text import plural

if TYPE_CHECKING:
    from wdsprep.encoding.captions.join_captions import CaptionLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetPlan:
    """A dataset that a run begins or continues, with the image shards that it lacks."""

    place: str
    claim: DatasetClaim
    """The claim on what lies at the place, without the stale units."""
    settings: Settings
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The plan of a run of `encode` or `score`: everything that the run will do."""

    source: ImageShards
    """What is known of the images, without their shards."""
    worker_plan: EncodeWorkerPlan
    worker_options: EncodeWorkerOptions
    """The options of the workers, with the runner that was chosen."""
    datasets: tuple[DatasetPlan, ...]
    units: int
    """The number of units of work: of image shards that at least one dataset lacks."""
    captions: "CaptionLayout | None" = None
    """The captions of a table, if the user gives one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodePlan(RunPlan):
    """The plan of a run of `encode`."""

    images: str
    """The place of the images, as the user gave it."""
    model: Model
    recipe: Encode
    """The recipe by which a worker encodes for all datasets, with the defaults filled in."""


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
    if plan.source.roles and not plan.recipe.roles and not plan.recipe.is_of_text:
        roles = ",".join((TARGET, *plan.source.roles))
        yield f"latents are of targets alone: --roles {roles} encodes the images in roles too"
    if not plan.source.is_whole:
        yield f"{plan.images} is not completely packed: run the same command again after pack"


def _describe_images(dataset: DatasetPlan) -> str:
    settings = dataset.settings
    noun = "caption" if settings["latents"] == "none" else "image"
    counted = f", {plural(dataset.samples, noun)}" if dataset.samples else ""
    sizes = settings.get("shapes", ())
    shapes = f" in {plural(len(sizes), 'shape')}" if sizes else ""
    resolution = settings["resolution"]
    return f"{plural(dataset.shards, 'shard')}{counted} for resolution {resolution}{shapes}"


class _Phase(NamedTuple):
    """A dataset to be made: its recipe, its place, and all image shards that it is made from."""

    recipe: Encode
    place: str
    source: ImageShards
    wanted: tuple[ImageShard, ...]


def make_plan(
    options: EncodeOptions,
    *,
    told: Callable[[str], None],
    compared: Callable[[int, int], object] = lambda _done, _of: None,
) -> EncodePlan:
    """Return the plan of a run of `encode`, or raise an error if the run is impossible.

    Nothing is written to the datasets, but the model may be downloaded. `told` is called with lines
    for the user, `compared` with the number of foreign tars that have been compared and the number
    of all.
    """
    phases = _find_phases(options)
    recipe = _joint_recipe([phase.recipe for phase in phases])
    worker_options = settle_runner(options.part(EncodeWorkerOptions), told)
    table = None  # found before a model is fetched for what cannot be
    if options.captions:
        place = absolute(options.captions)
        table = CaptionTable.find(place, options.captions_by, options.caption_column)
    incomplete = _find_model(phases, recipe, told)
    worker_plan = plan_for_machines(worker_options)
    recipe, model = settle_recipe(recipe, incomplete, worker_plan.device)
    settings = _find_settings(phases, recipe, model, worker_plan.device)
    if options.empty and "text_roles" not in settings[0]:
        raise UsageError(
            f"--empty {options.empty} is for text that depends on images, and {model.name} gets "
            "none: leave it out, as text is always stored with its one empty caption"
        )
    if recipe.is_of_text and recipe.roles and "text_roles" not in settings[0]:
        raise UsageError(
            "--roles is for latents, and for text that depends on images: leave it out with "
            "--latents none"
        )
    if any(phase.recipe.flip for phase in phases) and any("text_roles" in of for of in settings):
        raise UsageError(
            f"--flip: the text of {model.name} depends on the images of a sample, and there is "
            "none of their mirror images: leave --flip out, or give --text none"
        )
    max_nbytes = int(options.max_bytes)
    with ExitStack() as closing:
        captions, layout = _find_captions(phases, options, table, told)
        if layout:
            closing.callback(layout.close)
        datasets = tuple(
            plan_dataset(
                phase.place,
                phase.source,
                phase.wanted,
                {**of_dataset, **of_captions},
                tars=tars_of(phase.source.url, max_nbytes, phase.recipe.images_in_roles),
                overwrite=options.overwrite,
                redo_changed=options.redo_changed,
                compared=compared,
            )
            for phase, of_dataset, of_captions in zip(phases, settings, captions, strict=True)
        )
        if layout:
            layout.match(
                [
                    (dataset.place, phase.wanted, {(s.name, s.input) for s in dataset.pending})
                    for phase, dataset in zip(phases, datasets, strict=True)
                    if "captions" in dataset.settings
                ]
            )
        closing.pop_all()
    if (packed_area := phases[0].source.max_area) > recipe.max_area and not recipe.is_of_text:
        told(
            f"{options.images} was packed with --max-area {packed_area}, but encode rejects "
            f"images of more than {recipe.max_area:,} pixels: give the same --max-area to keep them"
        )
    return EncodePlan(
        images=str(options.images),
        source=replace(phases[0].source, shards=()),
        model=model,
        recipe=recipe,
        worker_plan=worker_plan,
        worker_options=worker_options,
        captions=layout,
        datasets=datasets,
        units=count_units([dataset.pending for dataset in datasets]),
    )


def _find_phases(options: EncodeOptions) -> list[_Phase]:
    """Return a phase for each dataset to make, with its recipe and its image shards.

    Text that is stored apart takes the lowest resolution that covers the images of all latents.
    That can be below theirs, as shapes may use images of lower buckets. Raise UsageError for
    foreign tars with several resolutions.
    """
    images, phases = absolute(options.images), list[_Phase]()
    for place, recipe in zip(options.places.values(), options.recipes, strict=True):
        others = [phase for phase in phases if not phase.recipe.is_of_text]
        resolution = recipe.resolution
        if recipe.is_of_text and others:
            if len(others) > 1 and others[0].source.is_foreign:
                raise UsageError(
                    f"{images} was not made by pack, so its text goes into a folder that is named "
                    "after one resolution: give --text-out with one --resolution"
                )
            resolution = min(phase.source.text_resolution for phase in others)
        source = find_image_shards(images, resolution, shapes=recipe.sizes, upscale=recipe.upscale)
        if not source.is_foreign:
            check_roles(str(options.images), recipe.roles, source.roles)
        place = absolute(place)
        check_apart(source.url if is_glob(images) else images, place)
        recipe = replace(recipe, resolution=source.resolution)
        phases.append(_Phase(recipe, place, source, source.first(options.limit)))
    return phases


def _joint_recipe(recipes: Sequence[Encode]) -> Encode:
    """Return the recipe by which a worker encodes a sample for all datasets together.

    It has the largest resolution, and the text of the last dataset.
    """
    of_images = [recipe for recipe in recipes if not recipe.is_of_text]
    largest = max(of_images or recipes, key=lambda recipe: recipe.resolution)
    return replace(largest, text=recipes[-1].text, text_length=recipes[-1].text_length)


def _find_model(phases: Sequence[_Phase], recipe: Encode, told: Callable[[str], None]) -> Model:
    """Find the model; raise UsageError if it cannot encode a phase's resolution or shapes."""
    text, has_vae = _needs_of(recipe)
    model = find_model(recipe.model, text=text, has_vae=has_vae, listener=told)
    for phase in phases:
        if not phase.recipe.is_of_text:
            check_resolution(model, phase.recipe.resolution)
            check_shapes(model, phase.recipe.sizes)
            for role, sizes in phase.recipe.shape_lists.items():
                check_shapes(model, sizes, f"--role-size {role}")
    return model


def _needs_of(recipe: Recipe) -> tuple[str, bool]:
    """Return the kind of text, and whether the settings of a dataset depend on the VAE."""
    return recipe.text, not recipe.is_of_text


def _find_settings(
    phases: Sequence[_Phase], joint: Recipe, joint_model: Model, device: str
) -> list[dict[str, Any]]:
    """Return the settings of each dataset, without those of captions.

    Text that is stored apart, and latents without text, get the settings that a run for them alone
    would have, with a model that is found here. But all are computed in fp32 if `joint`, the recipe
    of the whole run, is in fp32.
    """
    models, settings = {_needs_of(joint): joint_model}, []
    for recipe in (phase.recipe for phase in phases):
        text, has_vae = needs = _needs_of(recipe)
        if needs not in models:
            model = find_model(recipe.model, text=text, has_vae=has_vae)
            models[needs] = settle_recipe(recipe, model, device)[1]
        chosen = choices_for(recipe, models[needs], device)
        if joint.dtype == "fp32":  # where text has no bf16, what is beside it is not in fp16 either
            chosen["dtype"] = "fp32"
        settings.append(settings_of(models[needs], replace(recipe, **chosen)))
    return settings


def _find_captions(
    phases: Sequence[_Phase],
    options: EncodeOptions,
    table: CaptionTable | None,
    told: Callable[[str], None],
) -> tuple[list[dict[str, str]], "CaptionLayout | None"]:
    """Return the settings of each dataset's captions, and the captions of a table, if any.

    The caller closes these. If text is stored apart, only the datasets of text get captions. A
    table is read again if datasets are started over.
    """
    of_text = [phase for phase in phases if phase.recipe.is_of_text]
    captioned = of_text or phases  # latents with their text
    source, settings = captioned[0].source, options.caption_settings
    tars, layout = tars_of(source.url, int(options.max_bytes)), None
    for field in (said["caption_field"] for said in settings if "caption_field" in said):
        if warning := warn_of_field(field, tars, captioned[0].wanted):
            told(warning)
    if table:
        from wdsprep.encoding.captions.join_captions import CaptionLayout  # DuckDB, which few need

        layout = CaptionLayout(
            table,
            tars,
            [phase.place for phase in captioned],
            is_kept=not options.overwrite,
            hashed_by=source.hashed_by,
            told=told,
        )
        settings = [{**settings[0], "captions": layout.digest, "captions_by": table.by}]
    settings *= len(captioned) // len(settings)  # the same for all resolutions
    return [{}] * (len(phases) - len(captioned)) + settings, layout


def plan_dataset(
    place: str,
    source: ImageShards,
    wanted: Sequence[ImageShard],
    settings: Settings,
    *,
    tars: TarsSource,
    overwrite: bool,
    redo_changed: bool,
    compared: Callable[[int, int], object],
) -> DatasetPlan:
    """Return the plan of one dataset: what lies at its place, and which image shards it lacks.

    It is made of the `wanted` image shards of a source, which `tars` reads.
    """
    store = open_store(place)
    claim = find_claim(store, "latents", settings, overwrite=overwrite)
    manifest = claim.manifest
    if claim.is_there or manifest.receipts:
        manifest = refresh_manifest(store, manifest)
    _check_empty_caption(store, manifest)
    pending = pending_shards(
        store,
        manifest,
        source.shards,
        wanted,
        redo_changed=redo_changed,
        is_whole=source.is_whole,
        tars=tars,
        compared=compared,
    )
    return DatasetPlan(
        place=place,
        claim=replace(claim, manifest=pending.manifest),
        settings=settings,
        shards=len(wanted),
        samples=count_samples(wanted),
        missing=len(pending.shards),
        missing_samples=count_samples(pending.shards),
        pending=PackedShards.take_from(pending.shards),
        stale=pending.stale,
        removals=tuple(pending.lines),
        is_limited=wanted != source.shards,
    )


def _check_empty_caption(store: Store, manifest: Manifest) -> None:
    """Raise DamageError if stored arrays of the empty caption differ from the digests in receipts.

    New receipts list the digests of the stored files, so damaged files would pass as sound. Files
    that are missing are no damage: the first worker writes them.
    """
    files = (item for files in manifest.ledger.column("files") for item in files.items())
    known = {(name, digest) for name, digest in files if name.startswith("empty.")}
    for name in {name for name, _ in known}:
        with suppress(NotFoundError):  # the first worker writes it
            if (name, hex_digest(store.read(name))) not in known:
                damage = DamageError(f"{store.url}/{name}", UNLIKE_RECEIPT)
                raise damage.with_next_step(repair_step(store.url))
