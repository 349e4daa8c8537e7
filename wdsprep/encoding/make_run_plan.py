"""The planning of a run of `encode`: all is looked up and checked before anything is written.

It finds, in this order, the images for each dataset (`_find_phases`), the model and with it the
settings (`_choose_model`), the captions (`_find_captions`), and what lies in the places of the
datasets, with the image shards that are missing there (`_plan_dataset`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.damage import UNLIKE_RECEIPT, repair_step
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.stored_dataset import find_claim, refresh_manifest
from wdsprep.encoding.captions.options import CaptionSource
from wdsprep.encoding.captions.table import CaptionTable, find_table, warn_of_field
from wdsprep.encoding.image_shards import (
    ImageShard,
    ImageShards,
    count_samples,
    find_image_shards,
    tars_of,
)
from wdsprep.encoding.models.find_model import (
    Model,
    check_resolution,
    check_shapes,
    find_model,
)
from wdsprep.encoding.options import Encode, EncodeOptions, EncodeWorkerOptions
from wdsprep.encoding.pending_shards import PackedShards, pending_shards
from wdsprep.encoding.recipe_defaults import choices_for, settings_of, settle_recipe
from wdsprep.encoding.recipe_options import Recipe
from wdsprep.encoding.run_plan import DatasetPlan, EncodePlan, units_of
from wdsprep.encoding.worker_plan import EncodeWorkerPlan, plan_for_machines, settle_runner
from wdsprep.errors import DamageError, NotFoundError, UsageError
from wdsprep.sources.patterns import is_glob
from wdsprep.store import open_store
from wdsprep.store.base import Store, absolute, check_apart

if TYPE_CHECKING:
    from wdsprep.encoding.captions.laid_out import CaptionedDataset, CaptionLayout


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
    places = [absolute(place) for place in options.places.values()]
    phases = _find_phases(options, places)
    recipe = joint_recipe([phase.recipe for phase in phases])
    worker_options = settle_runner(options.part(EncodeWorkerOptions), told)
    table = find_table(options.of_captions)  # before a model is fetched for what cannot be
    chosen, phases = _choose_model(phases, recipe, worker_options, told)
    phases, captions = _find_captions(phases, options, table, recipe, told)
    try:
        datasets = tuple(_plan_dataset(phase, options, recipe, compared) for phase in phases)
        both = zip(phases, datasets, strict=True)
        if captions:
            captions.match([_captioned(*each) for each in both if each[0].captions.digest])
    except BaseException:
        if captions:
            captions.close()
        raise
    source = phases[0].source
    return EncodePlan(
        images=str(options.images),
        url=source.url,
        is_whole=source.is_whole,
        packed_area=source.max_area,
        model=chosen.model,
        recipe=chosen.recipe,
        worker_plan=chosen.worker_plan,
        worker_options=worker_options,
        captions=captions,
        datasets=datasets,
        units=units_of(datasets),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """A dataset to be made: its recipe, its place, and all image shards that it is made from."""

    recipe: Encode
    place: str
    source: ImageShards
    wanted: tuple[ImageShard, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Empty until a model is chosen."""
    captions: CaptionSource = field(default_factory=CaptionSource)

    @property
    def is_of_text(self) -> bool:
        return self.recipe.is_of_text

    @property
    def needs(self) -> tuple[str, bool]:
        """Return the kind of text, and whether the settings of the dataset depend on the VAE."""
        return self.recipe.text, not self.is_of_text


@dataclass(frozen=True, kw_only=True, slots=True)
class _ModelChoice:
    """The model that was chosen, with the recipe and the workers that go with it."""

    model: Model
    recipe: Encode
    worker_plan: EncodeWorkerPlan


def _find_phases(options: EncodeOptions, places: Sequence[str]) -> list[_Phase]:
    """Return a phase for each dataset to make, with its recipe and its image shards.

    Text that is stored apart takes the lowest resolution that covers the images of all latents.
    That can be below theirs, as shapes may use images of lower buckets. Raise UsageError for
    foreign tars with several resolutions.
    """
    images, phases = absolute(options.images), list[_Phase]()
    for place, own in zip(places, options.recipes, strict=True):
        recipe, others = own, [each for each in phases if not each.is_of_text]
        if own.is_of_text and others:
            if len(others) > 1 and others[0].source.is_foreign:
                raise UsageError(
                    f"{images} was not made by pack, so its text goes into a folder that is named "
                    "after one resolution: give --text-out with one --resolution"
                )
            resolution = min(each.source.text_resolution for each in others)
            recipe = replace(own, resolution=resolution)
        phases.append(_find_phase(images, place, recipe, options))
    return phases


def joint_recipe(recipes: Sequence[Encode]) -> Encode:
    """Return the recipe by which a worker encodes a sample for all datasets together.

    It has the largest resolution, and the text of the last dataset.
    """
    of_images = [recipe for recipe in recipes if not recipe.is_of_text]
    largest = max(of_images or recipes, key=lambda recipe: recipe.resolution)
    apart = recipes[-1]
    return replace(largest, text=apart.text, text_length=apart.text_length)


def _find_phase(images: str, place: str, recipe: Encode, options: EncodeOptions) -> _Phase:
    source = find_image_shards(
        images, recipe.resolution, shapes=recipe.sizes, upscale=recipe.upscale
    )
    check_apart(source.url if is_glob(images) else images, place)
    return _Phase(
        recipe=replace(recipe, resolution=source.resolution),
        place=place,
        source=source,
        wanted=source.first(options.limit),
    )


def _choose_model(
    phases: Sequence[_Phase],
    recipe: Encode,
    options: EncodeWorkerOptions,
    told: Callable[[str], None],
) -> tuple[_ModelChoice, list[_Phase]]:
    """Find the model, plan the workers, and return both with the phases and their settings.

    Raise UsageError if the model cannot encode images of a phase's resolution or shapes.
    """
    has_vae = not recipe.is_of_text
    found = find_model(recipe.model, text=recipe.text, has_vae=has_vae, listener=told)
    for phase in phases:
        if not phase.is_of_text:
            check_resolution(found, phase.recipe.resolution)
            check_shapes(found, phase.recipe.sizes)
    worker_plan = plan_for_machines(options)
    recipe, model = settle_recipe(recipe, found, worker_plan.device)
    models = {(recipe.text, has_vae): found}
    settings = _find_settings(phases, recipe, models, worker_plan.device)
    both = zip(phases, settings, strict=True)
    chosen = _ModelChoice(model=model, recipe=recipe, worker_plan=worker_plan)
    return chosen, [replace(phase, settings=own) for phase, own in both]


def _find_settings(
    phases: Sequence[_Phase], joint: Recipe, models: dict[tuple[str, bool], Model], device: str
) -> list[dict[str, Any]]:
    """Return the settings of each dataset, without those of captions.

    Text that is stored apart, and latents without text, get the settings that a run for them alone
    would have. But all are computed in fp32 if `joint`, the recipe of the whole run, is in fp32.
    `models` has the models that were found so far; others are found and added.
    """
    settled: dict[tuple[str, bool], Model] = {}
    settings = []
    for phase in phases:
        needs, recipe = phase.needs, phase.recipe
        if needs not in models:
            models[needs] = find_model(recipe.model, text=needs[0], has_vae=needs[1])
        if needs not in settled:
            settled[needs] = settle_recipe(recipe, models[needs], device)[1]
        model = settled[needs]
        own = replace(recipe, **choices_for(recipe, model, device))
        if joint.dtype == "fp32":  # where text has no bf16, what is beside it is not in fp16 either
            own = replace(own, dtype="fp32")
        settings.append(settings_of(model, own))
    return settings


def _find_captions(
    phases: Sequence[_Phase],
    options: EncodeOptions,
    table: CaptionTable | None,
    recipe: Encode,
    told: Callable[[str], None],
) -> tuple[list[_Phase], "CaptionLayout | None"]:
    """Return the phases with the sources of their captions, and the captions of a table, if any.

    The caller closes these. If text is stored apart, only the phases of text get captions. A
    table is read again if datasets are started over.
    """
    own = [phase for phase in phases if phase.is_of_text] or phases  # or latents with their text
    source = own[0].source
    tars, layout = tars_of(source.url, int(recipe.max_bytes)), None
    sources = options.of_captions.sources
    for one in sources:
        if one.field and (warning := warn_of_field(one.field, tars, own[0].wanted)):
            told(warning)
    if table:
        from wdsprep.encoding.captions.laid_out import CaptionLayout  # DuckDB, which few need

        layout = CaptionLayout(
            table,
            tars,
            [phase.place for phase in own],
            is_kept=not options.overwrite,
            hashed_by=source.hashed_by,
            told=told,
        )
        sources = tuple(replace(one, by=table.by, digest=layout.digest) for one in sources)
    sources *= len(own) // len(sources)  # the same for all resolutions
    found = [
        replace(phase, captions=said, settings={**phase.settings, **said.settings})
        for phase, said in zip(own, sources, strict=True)
    ]
    return [*phases[: len(phases) - len(own)], *found], layout


def _plan_dataset(
    phase: _Phase,
    options: EncodeOptions,
    recipe: Encode,
    compared: Callable[[int, int], object],
) -> DatasetPlan:
    """Return the plan of one dataset: what lies at its place, and which image shards it lacks."""
    store, source = open_store(phase.place), phase.source
    claim = find_claim(store, "latents", phase.settings, overwrite=options.overwrite)
    manifest = claim.manifest
    if claim.is_there or manifest.receipts:
        manifest = refresh_manifest(store, manifest)
    _check_empty_caption(store, manifest)
    found = pending_shards(
        store,
        manifest,
        source.shards,
        phase.wanted,
        redo_changed=options.redo_changed,
        is_whole=source.is_whole,
        tars=tars_of(source.url, int(recipe.max_bytes)),
        compared=compared,
    )
    return DatasetPlan(
        place=phase.place,
        claim=replace(claim, manifest=found.manifest),
        settings=phase.settings,
        recipe=phase.recipe,
        captions=phase.captions,
        shards=len(phase.wanted),
        samples=count_samples(phase.wanted),
        missing=len(found.shards),
        missing_samples=count_samples(found.shards),
        pending=PackedShards.take_from(found.shards),
        stale=found.stale,
        removals=tuple(found.lines),
        is_limited=phase.wanted != source.shards,
    )


def _captioned(phase: _Phase, dataset: DatasetPlan) -> "CaptionedDataset":
    from wdsprep.encoding.captions.laid_out import CaptionedDataset

    pending = frozenset((shard.name, shard.input) for shard in dataset.pending)
    return CaptionedDataset(phase.place, phase.wanted, pending)


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
