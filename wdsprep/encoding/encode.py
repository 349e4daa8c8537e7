"""`encode`: turn image shards into latent shards, on any number of workers.

An image shard is a unit of work; its latent shard has the same name, keys and order. Without
latents, a run makes a text dataset from the captions alone. Each of several resolutions makes a
separate dataset, as a run for it alone would. A unit is then an image shard with the datasets that
lack it, so its images are decoded and its captions encoded once for all of them. Text may be stored
in a separate dataset, made from the captions of all images. Then it is stored once, and the text of
a rejected image is kept.

All is looked up and checked before anything is written. `make_plan` finds, in this order, the
images for each dataset (`_find_sources`), the workers, the model and with it the settings
(`_find_settings`), the captions (`_find_captions`), and what lies in the places of the datasets,
with the image shards that are missing there. `run_plan` has this last step, and carries out the
plan, as it does for `score`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, cast

from wdsprep.dataset.samples import TARGET
from wdsprep.encoding import HALF
from wdsprep.encoding.captions.table import CaptionTable, warn_of_field
from wdsprep.encoding.gpus import prepare_allocator
from wdsprep.encoding.image_shards import ImageShard, ImageShards, find_image_shards, first_shards
from wdsprep.encoding.models.find_model import Model, check_weights, find_model
from wdsprep.encoding.options import EncodeOne, EncodeOptions, EncodeWorkerOptions
from wdsprep.encoding.progress import Speeds
from wdsprep.encoding.recipe_defaults import settings_of, settle_recipe, with_defaults
from wdsprep.encoding.recipe_options import Encode
from wdsprep.encoding.run_plan import DatasetPlan, RunPlan, do_plan, plan_dataset
from wdsprep.encoding.worker_plan import EncodeJob, settle_workers
from wdsprep.errors import UsageError
from wdsprep.options import OverloadedFunction, takes_options
from wdsprep.runners.base import Call
from wdsprep.runners.job import JobListener
from wdsprep.runners.run import Outcome
from wdsprep.sources.patterns import is_glob
from wdsprep.store.base import absolute, check_apart
from wdsprep.text import plural

if TYPE_CHECKING:
    from wdsprep.encoding.captions.join_captions import CaptionLayout
    from wdsprep.encoding.models.device import Encoder


P = ParamSpec("P")
Q = ParamSpec("Q")


def _overload(
    _one: Callable[P, EncodeOne], _several: Callable[Q, EncodeOptions]
) -> Callable[[object], OverloadedFunction[P, Outcome, Q, list[Outcome]]]:
    """Declare two signatures of `encode` for type checkers.

    A call for one dataset returns an outcome, a call for several returns a list of them.
    """
    return lambda function: cast("Any", function)


@_overload(EncodeOne, EncodeOptions)
@takes_options(EncodeOptions)
def encode(options: EncodeOptions) -> Outcome | list[Outcome]:
    """Encode the image shards in `images` into the dataset `out`.

    By default `out` lies beside the images: it is `shards/latents-RESOLUTION` of `shards/images`,
    or `shards/text` for text alone, and `shards/cats-latents-RESOLUTION` of `shards/cats`.

        encoded = wdsprep.encode("shards/images", resolution=256)
        encoded.samples, encoded.manifest.rejects, encoded.is_damaged

    Several resolutions are encoded in one pass, which decodes each image and encodes each caption
    once. Each makes the dataset that a run for it alone would make, at `out` with its number in
    place of `{resolution}`, and has an outcome of its own:

        low, high = wdsprep.encode("shards/images", resolution=(256, 512))

    With `latents="none"` only text is encoded, from the captions of all images, or of the images
    that latents of `resolution` are made from:

        text = wdsprep.encode("shards/images", latents="none")

    With `text_out` the text of all resolutions becomes such a dataset, made in the same pass, and
    the latents are stored without text. The outcome of the text comes last:

        low, high, text = wdsprep.encode(resolution=(256, 512), text_out="shards/text")

    With `captions`, samples that a table lists get their captions from the table; with
    `caption_field`, all captions come from a field of the json. Several fields at once make several
    text datasets, at `out` with the name of each field in place of `{caption}`:

        alt, long = wdsprep.encode("shards/images", latents="none", caption_fields="alt,long")

    The options are those of `wdsprep encode`, spelled as there ("4:32" workers, "auto") or as plain
    numbers; `shapes` may also be a list of widths and heights; `track` is wandb or tensorboard.
    After an interruption, the same call continues the run.
    """
    listener = options.listener_or_mute
    plan = make_plan(options, listener)

    def extra_entries(dataset: DatasetPlan) -> dict[str, Any]:
        entries = {"model": plan.model.name}
        if not options.limit:
            return entries
        # Of several in one pass nobody can tell how fast each would be alone.
        trial = plan.speeds if len(plan.datasets) == 1 else Speeds()
        return entries | trial.trial(dataset.claim.manifest.extra.get("trial"))

    outcomes = do_plan(
        plan,
        open_worker,
        listener=listener,
        limit=options.limit,
        track=options.track,
        extra=extra_entries,
    )
    is_several = isinstance(options.resolution, Sequence) or options.paths or options.text_out
    return outcomes if is_several else outcomes[0]


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
    wanted = []
    for dataset in plan.datasets:
        settings, shards = dataset.settings, plural(dataset.shards, "shard")
        noun = "caption" if settings["latents"] == "none" else "image"
        counted = f", {plural(dataset.samples, noun)}" if dataset.samples else ""
        shapes = settings.get("shapes", ())
        in_shapes = f" in {plural(len(shapes), 'shape')}" if shapes else ""
        wanted.append(f"{shards}{counted} for resolution {settings['resolution']}{in_shapes}")
    yield (
        f"{plan.images}: {', '.join(wanted)}; model {plan.model.name} in {precision} on "
        f"{plan.job.worker_plan.device}"
    )
    if plan.model.note:
        yield plan.model.note
    if plan.source.roles and not plan.recipe.roles and not plan.recipe.is_of_text:
        roles = ",".join((TARGET, *plan.source.roles))
        yield f"latents are of targets alone: --roles {roles} encodes the images in roles too"
    if not plan.source.is_whole:
        yield f"{plan.images} is not completely packed: run the same command again after pack"


class _Phase(NamedTuple):
    """A dataset to be made: its recipe, its place, and all image shards that it is made from."""

    recipe: Encode
    place: str
    source: ImageShards
    wanted: tuple[ImageShard, ...]


def make_plan(options: EncodeOptions, listener: JobListener) -> EncodePlan:
    """Return the plan of a run of `encode`, or raise an error if the run is impossible.

    Nothing is written to the datasets, but the model may be downloaded. The listener hears lines
    for the user, and how many foreign tars have been compared, of how many.
    """
    told = listener.on_message
    phases, table = _find_sources(options), None
    if options.captions:
        place = absolute(options.captions)
        table = CaptionTable.find(place, options.captions_by, options.caption_column)
    recipes = [phase.recipe for phase in phases]
    worker_plan = settle_workers(options.part(EncodeWorkerOptions), told)
    # A worker encodes a sample for all datasets together: the largest image, and the last text.
    of_images = [recipe for recipe in recipes if not recipe.is_of_text] or recipes
    largest, last = max(of_images, key=lambda recipe: recipe.resolution), recipes[-1]
    joint = replace(largest, text=last.text, text_length=last.text_length)
    recipe, model, settings = _find_settings(recipes, joint, worker_plan.device, told)
    has_text_of_images = any("text_roles" in of_dataset for of_dataset in settings)
    if recipe.is_of_text and (recipe.roles or options.empty) and not has_text_of_images:
        raise UsageError(
            f"{'--empty' if options.empty else '--roles'} with --latents none is for text that "
            f"depends on images, and that of {model.name} does not: leave it out"
        )
    if recipe.flip and has_text_of_images:
        raise UsageError(
            f"--flip: the text of {model.name} depends on the images of a sample, and there is "
            "none of their mirror images: leave --flip out, or give --text none"
        )
    datasets, captions = _plan_datasets(phases, settings, options, table, listener)
    return EncodePlan(
        images=str(options.images),
        source=replace(phases[0].source, shards=()),
        model=model,
        recipe=recipe,
        job=EncodeJob(
            tars=phases[0].source.tars,
            make_encoder=partial(make_encoder, model, recipe, worker_plan.device),
            worker_plan=worker_plan,
            max_area=recipe.max_area,
            batch_size=int(recipe.batch_size),
        ),
        captions=captions,
        datasets=datasets,
    )


def _find_sources(options: EncodeOptions) -> list[_Phase]:
    """Return a phase for each dataset to make, with its image shards.

    Text that is stored apart takes the lowest resolution that covers the images of all latents.
    That can be below theirs, as shapes may use images of lower buckets. Raise UsageError for
    foreign tars with several resolutions.
    """
    images, *places = map(absolute, (options.images, *options.places.values()))
    phases = list[_Phase]()
    for place, recipe in zip(places, options.recipes, strict=True):
        others = [phase for phase in phases if not phase.recipe.is_of_text]
        resolution = recipe.resolution
        if recipe.is_of_text and others:
            if len(others) > 1 and others[0].source.is_foreign:
                raise UsageError(
                    f"{images} was not made by pack, so its text goes into a folder that is named "
                    "after one resolution: give --text-out with one --resolution"
                )
            resolution = min(phase.source.text_resolution for phase in others)
        source = find_image_shards(
            images,
            resolution,
            shapes=recipe.sizes,
            upscale=recipe.upscale,
            roles=recipe.roles,
            max_nbytes=int(recipe.max_bytes),
        )
        check_apart(source.tars.url if is_glob(images) else images, place)
        recipe = replace(recipe, resolution=source.resolution)
        wanted = first_shards(source.shards, options.limit, source.count)
        phases.append(_Phase(recipe, place, source, wanted))
    return phases


def _find_settings(
    recipes: Sequence[Encode], joint: Encode, device: str, told: Callable[[str], None]
) -> tuple[Encode, Model, list[dict[str, Any]]]:
    """Return the recipe of the whole run with its defaults, its model, and each dataset's settings.

    `joint` is that recipe without the defaults. The settings lack those of captions. Text that is
    stored apart, and latents without text, get the settings that a run for them alone would have,
    with a model of their own. But all are computed in fp32 if the whole run is. Raise UsageError if
    the model cannot encode the resolution or the shapes of a recipe.
    """
    models: dict[tuple[str, bool], Model] = {}  # by what they depend on
    settled = list[tuple[Encode, Model]]()
    for recipe in (joint, *recipes):
        needs = text, has_vae = recipe.text, not recipe.is_of_text
        model = models.get(needs) or find_model(
            recipe.model, text=text, has_vae=has_vae, listener=told
        )
        if needs not in models:
            _, models[needs] = settle_recipe(recipe, model, device)
        settled.append((with_defaults(recipe, models[needs], device), models[needs]))
    (joint, joint_model), *alone = settled
    settings = []
    for recipe, model in alone:
        if joint.dtype == "fp32":  # where text has no bf16, what is beside it is not in fp16 either
            recipe = replace(recipe, dtype="fp32")
        settings.append(settings_of(model, recipe))
    return joint, joint_model, settings


def _plan_datasets(
    phases: Sequence[_Phase],
    settings: Sequence[dict[str, Any]],
    options: EncodeOptions,
    table: CaptionTable | None,
    listener: JobListener,
) -> "tuple[tuple[DatasetPlan, ...], CaptionLayout | None]":
    """Return the plan of each dataset, and the captions of a table, if any."""
    with ExitStack() as closing:
        captions, layout = _find_captions(phases, options, table, listener.on_message)
        if layout:
            closing.callback(layout.close)
        datasets = tuple(
            plan_dataset(
                phase.place,
                phase.source,
                phase.wanted,
                {**of_dataset, **of_captions},
                overwrite=options.overwrite,
                redo_changed=options.redo_changed,
                compared=listener.on_comparison,
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
    return datasets, layout


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
    tars, settings, layout = captioned[0].source.tars, options.caption_settings, None
    for field in (said["caption_field"] for said in settings if "caption_field" in said):
        if warning := warn_of_field(field, tars, captioned[0].wanted[0].item):
            told(warning)
    if table:
        from wdsprep.encoding.captions.join_captions import CaptionLayout  # DuckDB, which few need

        layout = CaptionLayout(
            table,
            tars,
            [phase.place for phase in captioned],
            is_kept=not options.overwrite,
            told=told,
        )
        settings = [{**settings[0], "captions": layout.digest, "captions_by": table.by}]
    settings *= len(captioned) // len(settings)  # the same for all resolutions
    return [{}] * (len(phases) - len(captioned)) + settings, layout


def open_worker(job: EncodeJob) -> Call:
    prepare_allocator()
    from wdsprep.encoding.worker import EncodeWorker  # torch and models: for workers alone

    return EncodeWorker(job)


def make_encoder(model: Model, recipe: Encode, device: str) -> "Encoder":
    """Load the encoder in a worker, after a check of the worker's GPU and of the weights.

    Raise RuntimeError if the GPU is too old for torch or for the recipe, and WorkError if torch
    cannot use one, or if the weights are not those of the driver.
    """
    from wdsprep.encoding.models.device import check_gpu
    from wdsprep.encoding.models.encoder import load_encoder

    has_bf16_text = bool(model.components) and recipe.text == "emb"
    check_gpu(device, recipe.dtype, has_bf16_text=has_bf16_text)
    return load_encoder(check_weights(model), recipe, device)
