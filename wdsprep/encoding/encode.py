"""`encode`: turn the image shards of a phase into latent shards, on any number of workers.

A shard is a unit of work; its output has its name, its keys and its order. Without latents it is a
text dataset, made of the shards' captions alone. Of several resolutions
each makes a dataset of its own, as a run for it alone would: a unit is an image shard with the
datasets that lack it, so that its images are decoded and its captions encoded once for all.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from wdsprep.dataset.arrays import layout
from wdsprep.dataset.digests import FORM, DigestKind
from wdsprep.dataset.edition import Edition
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.receipts import Settings
from wdsprep.dataset.state import check_claim, form_there
from wdsprep.encoding import HALF
from wdsprep.encoding.caption_table import (
    CaptionReport,
    CaptionTable,
    ReadyCaptions,
    ready_captions,
    report_of,
    table_of,
)
from wdsprep.encoding.captions import (
    CAPTION,
    OWN,
    OWN_CAPTIONS,
    CaptionOptions,
    CaptionSource,
)
from wdsprep.encoding.crew import EncodeCrew, EncodeCrewOptions, find_crew, runner_of, settled
from wdsprep.encoding.fields import fields
from wdsprep.encoding.gpus import has_bf16
from wdsprep.encoding.image_shards import ImageShard, ImageShards, find_image_shards, tars_of
from wdsprep.encoding.models.find import (
    Model,
    check_resolution,
    check_shapes,
    check_weights,
    find_model,
    hashed_with,
    rule_of,
)
from wdsprep.encoding.models.presets import PRESETS
from wdsprep.encoding.pending import Left, count_units, joint_units, pending_shards, take_back
from wdsprep.encoding.progress import Speeds
from wdsprep.encoding.recipe import Encode, Recipe, resolutions_of
from wdsprep.encoding.shape_lists import Given, check_serves
from wdsprep.encoding.work import EncodeTarget, EncodeWork
from wdsprep.errors import FormatError, NotFoundError, UsageError
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.runners.base import least_and_most
from wdsprep.runners.run import (
    Outcome,
    Run,
    RunProgress,
    RunStatus,
    carry_out,
    opened_dataset,
    together,
)
from wdsprep.sources.patterns import is_glob
from wdsprep.store import open_store
from wdsprep.store.base import Store, absolute, check_apart
from wdsprep.text import at_least, command, names, plural

if TYPE_CHECKING:
    from wdsprep.encoding.models.base import Encoder

RESOLUTION = "{resolution}"
"""What stands in a place for the resolution of what lies there."""
LATENTS_PLACE, TEXT_PLACE = f"shards/latents-{RESOLUTION}", "shards/text"
"""Where latents go, and text alone, unless a place is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodePhase:
    """What there is for a resolution."""

    resolution: int
    shapes: int
    """0 where it is the square alone."""
    shards: int
    samples: int
    """0 where nobody has counted them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeBegun:
    """What is known before the first worker starts."""

    model: Model
    recipe: Recipe
    """Of the highest resolution."""
    crew: EncodeCrew
    phases: tuple[EncodePhase, ...]
    is_whole: bool
    """Whether the image dataset is packed to its end, as far as it says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeListener:
    """Hears how a run goes; each call may be left out."""

    told: Callable[[str], None] = lambda _text: None
    compared: Callable[[int, int], None] = lambda _done, _of: None
    """How many tars of another date have been compared with what was encoded, of how many."""
    begun: Callable[[EncodeBegun], None] = lambda _begun: None
    status: Callable[[Callable[[], RunStatus]], None] = lambda _status: None
    heard: Callable[[RunProgress], None] = lambda _progress: None
    captioned: Callable[[Outcome, CaptionReport], None] = lambda _outcome, _report: None
    """What became of captions that are not the samples' own, for each dataset at the end."""


@overload
def encode(
    images: "str | os.PathLike[str]" = ...,
    out: "str | os.PathLike[str]" = ...,
    *,
    resolution: int,
    **options: Any,
) -> Outcome: ...
@overload
def encode(
    images: "str | os.PathLike[str]" = ...,
    out: "str | os.PathLike[str]" = ...,
    *,
    resolution: Sequence[int],
    **options: Any,
) -> list[Outcome]: ...
def encode(  # type: ignore[misc]  # the overloads tell the resolution's types alone
    images: "str | os.PathLike[str]" = "shards/images",
    out: "str | os.PathLike[str]" = "",
    *,
    resolution: int | Sequence[int] = 0,
    model: str = Encode.model,
    latents: str = Encode.latents,
    flip: bool = Encode.flip,
    text: str = Encode.text,
    text_length: int = Encode.text_length,
    dtype: str = Encode.dtype,
    seed: int = Encode.seed,
    compile: bool = Encode.compile,
    max_area: int = Encode.max_area,
    max_bytes: int | str = 0,
    shapes: Given = Encode.shapes,
    max_crop: float = Encode.max_crop,
    captions: "str | os.PathLike[str]" = "",
    captions_by: str = "",
    caption_column: str = "",
    caption_field: str = "",
    caption_fields: str | Sequence[str] = (),
    caption_name: str = "",
    limit: int = 0,
    batch_size: int | str = Encode.batch_size,
    device: str = EncodeCrewOptions.device,
    workers: int | str = "auto",
    gpus_per_worker: float = EncodeCrewOptions.gpus_per_worker,
    cpus_per_worker: float = EncodeCrewOptions.cpus_per_worker,
    accelerator_type: str | None = EncodeCrewOptions.accelerator_type,
    runner: str = EncodeCrewOptions.runner,
    ray_address: str | None = EncodeCrewOptions.ray_address,
    max_attempts: int = EncodeCrewOptions.max_attempts,
    overwrite: bool = False,
    redo_changed: bool = False,
    listener: EncodeListener | None = None,
) -> Outcome | list[Outcome]:
    """Encode the image shards in `images` into the dataset `out` (`shards/latents-RESOLUTION` if
    it is empty; `shards/text` of text alone).

        encoded = wdsprep.encode("shards/images", resolution=256)
        encoded.samples, encoded.manifest.rejects, encoded.is_damaged

    Several resolutions take one pass, which decodes each image and encodes each caption once. Each
    makes the dataset that a run for it alone would make, where `out` has `{resolution}` in it, and
    has an outcome of its own:

        low, high = wdsprep.encode("shards/images", resolution=(256, 512))

    With `latents="none"` it is text alone, made of the captions of all images, or of those that
    latents of `resolution` are made of:

        text = wdsprep.encode("shards/images", latents="none")

    With `captions` of a table, what it names has its caption from there; with `caption_field` all
    captions are from a field of the json. Several fields at once give a list of text datasets,
    where `out` has `{caption}` in it:

        alt, long = wdsprep.encode("shards/images", latents="none", caption_fields="alt,long")

    The options are those of `wdsprep encode`, with its spellings ("4:32" workers, "auto") or plain
    numbers; `shapes` may be a list of widths and heights too. Interrupted or killed, the same call
    goes on where it was.
    """
    at_least(0, limit=limit)
    least, most = least_and_most(workers)
    resolutions = resolutions_of(resolution)
    wanted = CaptionOptions(
        captions=absolute(captions) if captions else "",
        by=captions_by,
        column=caption_column,
        field=caption_field,
        fields=names(caption_fields),
        name=caption_name,
    )
    places = places_of(out, resolutions, latents, wanted)
    check_serves(shapes, resolutions)
    how = partial(
        Encode,
        model=model,
        latents=latents,
        flip=flip,
        text=text,
        text_length=text_length,
        dtype=dtype,
        seed=seed,
        compile=compile,
        max_area=max_area,
        max_bytes=max_bytes,
        shapes=shapes,
        max_crop=max_crop,
        batch_size=batch_size,
        device=device,
    )
    outcomes = _encoded(
        absolute(images),
        [absolute(place) for place in places.values()],
        hows=[how(resolution=number) for number in resolutions] * len(wanted.sources),
        captions=wanted,
        options=EncodeCrewOptions(
            runner=runner,
            device=device,
            workers=least,
            max_workers=most,
            cpus_per_worker=cpus_per_worker,
            gpus_per_worker=gpus_per_worker,
            accelerator_type=accelerator_type,
            ray_address=ray_address,
            max_attempts=max_attempts,
        ),
        run_options=RunOptions(limit=limit, overwrite=overwrite, redo_changed=redo_changed),
        listener=listener or EncodeListener(),
    )
    is_several = isinstance(resolution, Sequence) or wanted.fields
    return outcomes if is_several else outcomes[0]


def _check_alone(latents: str, resolutions: Sequence[int]) -> None:
    """Text has no resolution: one may say which images it is made of."""
    if latents != "none":
        if 0 in resolutions:
            raise UsageError("no --resolution: give 1 or more pixels, such as --resolution 256")
    elif len(resolutions) > 1:
        raise UsageError(
            "--latents none makes one dataset, of the images for one resolution: give the lowest "
            "alone, or none for all images"
        )


def places_of(
    out: "str | os.PathLike[str]",
    resolutions: Sequence[int],
    latents: str = "",
    captions: CaptionOptions = OWN_CAPTIONS,
) -> dict[int | str, str]:
    """Where the latents of each resolution go, or their text; of several captions, by their
    names."""
    _check_alone(latents, resolutions)
    called = [source.name for source in captions.sources]
    text_place = TEXT_PLACE if called == [OWN] else f"{TEXT_PLACE}-{CAPTION}"
    place = os.fspath(out) or (text_place if latents == "none" else LATENTS_PLACE)
    _check_place(place, resolutions, latents, captions)
    if captions.fields:
        place = place.replace(RESOLUTION, str(resolutions[0]))
        return _places_of_captions(place, latents, called)
    place = place.replace(CAPTION, called[0])
    if len(resolutions) > 1 and RESOLUTION not in place:
        raise UsageError(
            f"{place} is one place, and each of {len(resolutions)} resolutions makes a dataset: "
            f"write {RESOLUTION} where their names differ, as in {place.rstrip('/')}-{RESOLUTION}"
        )
    return {number: place.replace(RESOLUTION, str(number)) for number in resolutions}


def _check_place(
    place: str, resolutions: Sequence[int], latents: str, captions: CaptionOptions
) -> None:
    """What stands for something in it has to be given."""
    if CAPTION in place and not (captions.field or captions.fields or captions.name):
        raise UsageError(
            f"{place} needs a name for its captions: give --caption-field, --caption-fields or "
            f"--caption-name, or a place without {CAPTION}"
        )
    if RESOLUTION in place and latents == "none" and 0 in resolutions:
        raise UsageError(
            f"{place} needs a resolution: give --resolution, or a place without {RESOLUTION}"
        )


def _places_of_captions(place: str, latents: str, called: Sequence[str]) -> dict[int | str, str]:
    if latents != "none":
        raise UsageError(
            "--caption-fields makes a text dataset of each field: give --latents none too, or one "
            "field by --caption-field"
        )
    if len(called) > 1 and CAPTION not in place:
        raise UsageError(
            f"{place} is one place, and each of {len(called)} fields makes a dataset: write "
            f"{CAPTION} where their names differ, as in {place.rstrip('/')}-{CAPTION}"
        )
    return {name: place.replace(CAPTION, name) for name in called}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How a run deals with what is there, and how much it takes up."""

    limit: int
    overwrite: bool
    redo_changed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """What there is for a resolution, and where its latents go."""

    how: Encode
    latents: str
    form: Mapping[str, Any]
    source: ImageShards
    wanted: tuple[ImageShard, ...]
    captions: CaptionSource = field(default_factory=CaptionSource)

    @property
    def kind(self) -> DigestKind:
        return DigestKind.of(self.form)


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenDataset:
    """What a run writes to, which is open."""

    settings: Settings
    edition: Edition
    manifest: Manifest


def _encoded(
    images: str,
    places: Sequence[str],
    *,
    hows: Sequence[Encode],
    captions: CaptionOptions,
    options: EncodeCrewOptions,
    run_options: RunOptions,
    listener: EncodeListener,
) -> list[Outcome]:
    both = zip(places, hows, strict=True)
    phases = [_phase(images, place, how, run_options) for place, how in both]
    hows = [phase.how for phase in phases]
    how = max(hows, key=lambda how: how.resolution)
    options = settled(options, listener.told)
    table = table_of(captions)  # before a model is fetched for what cannot be
    has_vae = how.latents != "none"
    found = find_model(how.model, text=how.text, has_vae=has_vae, listener=listener.told)
    for each in hows if has_vae else ():
        check_resolution(found, each.resolution)
        check_shapes(found, each.sizes)
    crew = find_crew(options)
    kinds = {phase.kind for phase in phases}
    chosen = {kind: settled_for(how, hashed_with(found, kind), crew.device) for kind in kinds}
    models = {kind: model for kind, (_, model) in chosen.items()}
    ready = _ready(captions, table, phases, how, run_options, listener)
    with closing(ready):
        sources = ready.sources * (len(phases) // len(ready.sources))
        captioned = zip(phases, sources, strict=True)
        phases = [replace(phase, captions=source) for phase, source in captioned]
        datasets = _opened(phases, models, crew.device, overwrite=run_options.overwrite)
        for dataset in datasets:
            ready.put(dataset.edition.store)
    recipe, model = chosen[phases[0].kind]
    speeds = Speeds()
    work = EncodeWork(
        images=phases[0].source.url,
        targets=tuple(map(_target, phases, datasets)),
        make_encoder=partial(make_encoder, model, recipe, crew.device),
        max_area=how.max_area,
        max_nbytes=int(how.max_bytes),
        batch_size=int(how.batch_size),
        decoders=crew.threads,
        threads=crew.threads,
        gpu_share=crew.gpu_share,
    )
    # Of several in one pass nobody can tell how fast each would be alone.
    timed = speeds if len(phases) == 1 else Speeds()
    extra = partial(_extra, model.name, timed if run_options.limit else None)
    runs, pending = _runs(phases, datasets, how, run_options, extra, listener)
    most = phases[0].source.max_area
    if most > how.max_area and has_vae:
        listener.told(
            f"{images} was packed with --max-area {most}: images of more than "
            f"{how.max_area:,} pixels are rejected here, unless --max-area says otherwise"
        )
    listener.begun(_begun(model, recipe, crew, phases))

    def heard(progress: RunProgress) -> None:
        speeds.heard(progress)
        listener.heard(progress)

    runner = None
    if units := count_units(pending):
        runner = runner_of(options, crew, units=units, phase=",".join(map(str, places)))
    phases.clear()  # and all the image shards with them
    datasets.clear()
    outcomes = carry_out(runs, runner, work, joint_units(pending), heard)
    for source, place, outcome in zip(sources, places, outcomes, strict=True):
        if source.settings:
            report = report_of(ready, source, place, outcome.manifest)
            listener.captioned(outcome, report)
    return outcomes


def _phase(images: str, latents: str, how: Encode, run_options: RunOptions) -> _Phase:
    form = form_there(latents, overwrite=run_options.overwrite)
    kind = DigestKind.of(form)
    source = find_image_shards(images, how.resolution, shapes=how.sizes, kind=kind)
    check_apart(source.url if is_glob(images) else images, latents)
    return _Phase(
        how=replace(how, resolution=source.resolution),
        latents=latents,
        form=form,
        source=source,
        wanted=source.first(run_options.limit),
    )


def _ready(
    options: CaptionOptions,
    table: CaptionTable | None,
    phases: Sequence[_Phase],
    how: Encode,
    run_options: RunOptions,
    listener: EncodeListener,
) -> ReadyCaptions:
    """What there is of captions in datasets that are started over goes with them."""
    source = phases[0].source
    return ready_captions(
        options,
        table,
        tars_of(source.url, int(how.max_bytes)),
        phases[0].wanted,
        [phase.latents for phase in phases],
        is_kept=not run_options.overwrite,
        hashed_by=source.hashed_by,
        told=listener.told,
    )


def _opened(
    phases: Sequence[_Phase], models: Mapping[DigestKind, Model], device: str, *, overwrite: bool
) -> list[_OpenDataset]:
    """The datasets, all of which are looked at before one is written to."""
    settings = []
    for phase in phases:
        model = models[phase.kind]
        recipe = replace(phase.how, **choices_for(phase.how, model, device))
        settings.append(settings_of(model, recipe, phase.form) | phase.captions.settings)
    begins = [True]
    if len(phases) > 1:  # one alone is looked at where it is opened
        stores = [open_store(phase.latents) for phase in phases]
        begins = [
            check_claim(store, "latents", own, overwrite=overwrite)
            for store, own in zip(stores, settings, strict=True)
        ]
    opened: dict[int, _OpenDataset] = {}
    for number in sorted(range(len(phases)), key=begins.__getitem__):  # what is there first
        place, own = phases[number].latents, settings[number]
        edition, manifest = opened_dataset(place, "latents", own, overwrite=overwrite)
        _check_empty(edition.store, manifest)
        opened[number] = _OpenDataset(settings=own, edition=edition, manifest=manifest)
    return [opened[number] for number in range(len(phases))]


def _target(phase: _Phase, dataset: _OpenDataset) -> EncodeTarget:
    return EncodeTarget(
        latents=phase.latents,
        settings=dataset.settings,
        edition=dataset.edition.mark,
        keeps_content=dataset.manifest.keeps_content,
        captions=phase.captions,
    )


def _runs(
    phases: Sequence[_Phase],
    datasets: Sequence[_OpenDataset],
    how: Encode,
    run_options: RunOptions,
    extra: Callable[[Any], Mapping[str, Any]],
    listener: EncodeListener,
) -> tuple[list[Run], list[list[ImageShard]]]:
    """A run for each dataset, and what is left to do for it, which is known of all before anything
    goes."""
    runs: list[Run] = []
    both = [*zip(phases, datasets, strict=True)]
    lefts = [_left_to_do(phase, dataset, how, run_options, listener) for phase, dataset in both]
    for (phase, dataset), left in zip(both, lefts, strict=True):
        take_back(dataset.edition, left.stale)
        if gone := len(left.stale):
            went = f"{plural(gone, 'shard')} of latents removed"
            listener.told(f"{went}: their images changed or went")
        run = Run(
            dataset.edition,
            left.manifest,
            count=len(left.shards),
            limit=run_options.limit if phase.wanted != phase.source.shards else 0,
            whole=phase.source.is_whole,
            extra=partial(extra, dataset.manifest.extra.get("trial")),
            status=lambda _status: listener.status(lambda: together(runs)),
        )
        runs.append(run)
    return runs, [left.shards for left in lefts]


def _left_to_do(
    phase: _Phase,
    dataset: _OpenDataset,
    how: Encode,
    run_options: RunOptions,
    listener: EncodeListener,
) -> Left:
    source = phase.source
    return pending_shards(
        dataset.edition.store,
        dataset.manifest,
        source.shards,
        phase.wanted,
        redo_changed=run_options.redo_changed,
        is_whole=source.is_whole,
        tars=tars_of(source.url, int(how.max_bytes)),
        compared=listener.compared,
    )


def _extra(model: str, speeds: Speeds | None, known: Any) -> dict[str, Any]:
    """What else a manifest says; `speeds` are those of a trial, and `known` of one before."""
    return {"model": model} | (speeds.trial(known) if speeds else {})


def make_encoder(model: Model, recipe: Recipe, device: str) -> "Encoder":
    """What a worker does when it begins: load the models, if they are those of the driver."""
    from torch import device as torch_device

    from wdsprep.encoding.models.device import check_age
    from wdsprep.encoding.models.encoder import load_encoder

    check_age(torch_device(device))
    return load_encoder(check_weights(model), recipe, device)


def settings_of(model: Model, recipe: Recipe, form: Mapping[str, Any] = FORM) -> dict[str, Any]:
    """Everything that decides the bytes of the dataset, but for the images, and all that a reader
    needs to know of the arrays. Limits and shapes of images are among it where they are not the
    usual ones; of text alone nothing is that images alone depend on."""
    limits = {
        "max_area": recipe.max_area,
        "max_bytes": recipe.max_bytes,
        "max_crop": recipe.max_crop,
        "shapes": list(map(list, recipe.sizes)),
    }
    usual = {"max_area": MAX_AREA, "max_bytes": MAX_NBYTES, "max_crop": 1.0, "shapes": []}
    of_images = {"crop": "centre", "seed": recipe.seed, **rule_of(model)}
    if recipe.latents == "none":
        of_images, limits = {}, {"max_bytes": recipe.max_bytes}
    return {
        **form,
        "dtype": recipe.dtype,
        "latents": recipe.latents,
        "layout": layout(fields(model, recipe)),
        "resolution": recipe.resolution,
        "text": recipe.text,
        "weights": model.weights,
        **of_images,
        **model.text_settings,
        **({"flip": True} if recipe.flip else {}),
        **{name: limit for name, limit in limits.items() if limit != usual[name]},
    }


def _check_empty(store: Store, manifest: Manifest) -> None:
    """What became of the empty caption must be what receipts say before a further one says it."""
    files = (item for files in manifest.ledger.column("files") for item in files.items())
    known = {(name, digest) for name, digest in files if name.startswith("empty.")}
    kind = DigestKind.of(manifest.settings)
    for name in {name for name, _ in known}:
        with suppress(NotFoundError):  # the first worker writes it
            if (name, kind.hex(store.read(name))) not in known:
                raise FormatError(
                    f"{store.url}/{name} is damaged: "
                    f"run {command('repair', store.url)}, then the same command again"
                )


RecipeT = TypeVar("RecipeT", bound=Recipe)


def settled_for(recipe: RecipeT, model: Model, device: str) -> tuple[RecipeT, Model]:
    """What is left to choose, chosen for a model; and the model with what its pipeline makes of a
    caption and of sizes. All that needs torch is imported for pipelines alone."""
    recipe = replace(recipe, **choices_for(recipe, model, device))
    if not model.pipeline_kind:
        return recipe, model
    from wdsprep.encoding.models.dry_run import asked

    return recipe, asked(model, recipe)


def choices_for(recipe: Recipe, model: Model, device: str) -> dict[str, Any]:
    """What a recipe leaves to the model and the device, by the field."""
    chosen: dict[str, Any] = {
        "latents": latents_of(recipe.latents, model),
        "dtype": dtype_of(recipe.dtype, device, model),
    }
    if model.pipeline is not None:
        preset = PRESETS.get(model.name.partition("@")[0])
        usual = preset.text_length if preset else 0
        chosen["text_length"] = recipe.text_length or usual
    elif recipe.text_length:
        raise UsageError(f"--text-length: {model.name} has but one length of text")
    return chosen


def latents_of(wanted: str, model: Model) -> str:
    if wanted == "none":
        return wanted
    if model.is_sampled:
        return "sample" if wanted == "auto" else wanted
    if wanted not in ("auto", "mean"):
        raise UsageError(
            f"--latents {wanted}: the VAE of {model.name} ({model.vae_kind}) gives latents, and no "
            "distribution of them: leave --latents out"
        )
    return "mean"


def dtype_of(wanted: str, device: str, model: Model) -> str:
    """Half precision on a GPU: each network's own in a pipeline; else with the range of fp32 for a
    VAE that is known to overflow, where the GPU has that. Text alone has what it has beside
    latents."""
    if wanted != "auto":
        return wanted
    if device != "cuda":
        return "fp32"
    is_plain = model.pipeline is None and model.is_plain
    if not is_plain:
        return HALF if has_bf16() else "fp32"
    if not model.upcast:
        return "fp16"
    return "bf16" if has_bf16() else "fp32"


def _begun(model: Model, recipe: Recipe, crew: EncodeCrew, phases: Sequence[_Phase]) -> EncodeBegun:
    return EncodeBegun(
        model=model,
        recipe=recipe,
        crew=crew,
        phases=tuple(
            EncodePhase(
                resolution=phase.how.resolution,
                shapes=len(phase.how.sizes),
                shards=len(phase.wanted),
                samples=sum(shard.item.take or shard.item.samples for shard in phase.wanted),
            )
            for phase in phases
        ),
        is_whole=phases[0].source.is_whole,
    )
