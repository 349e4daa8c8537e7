"""`encode`: turn image shards into latent shards, on any number of workers.

An image shard is a unit of work; its latent shard has the same name, keys and order. Without
latents, a run makes a text dataset from the captions alone. Each of several resolutions makes a
separate dataset, as a run for it alone would. A unit is then an image shard with the datasets that
lack it, so its images are decoded and its captions encoded once for all of them. Text may be stored
in a separate dataset, made from the captions of all images. Then it is stored once, and the text of
a rejected image is kept.

A whole run is planned before anything is written (`run_plan`); here the plan is
carried out.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from wdsprep.dataset.stored_dataset import take_claim
from wdsprep.encoding.dataset_plan import DatasetPlan, joint_units
from wdsprep.encoding.gpus import prepare_allocator, require_gpu
from wdsprep.encoding.models.find_model import Model, check_weights
from wdsprep.encoding.options import EncodeOne, EncodeOptions
from wdsprep.encoding.progress import Speeds
from wdsprep.encoding.recipe_options import Recipe
from wdsprep.encoding.run_plan import RunPlan, make_plan
from wdsprep.encoding.worker_plan import EncodeJob
from wdsprep.options import OverloadedFunction, takes_options
from wdsprep.runners.base import Call, Runner
from wdsprep.runners.job import JobListener
from wdsprep.runners.make_runner import make_runner
from wdsprep.runners.run import Outcome, Run, RunProgress, do_runs, remove_units, sweep_to_begin

if TYPE_CHECKING:
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
    recipe = plan.recipe

    def extra_entries(dataset: DatasetPlan, speeds: Speeds) -> dict[str, Any]:
        entries = {"model": plan.model.name}
        if not options.limit:
            return entries
        # Of several in one pass nobody can tell how fast each would be alone.
        trial = speeds if len(plan.datasets) == 1 else Speeds()
        return entries | trial.trial(dataset.claim.manifest.extra.get("trial"))

    outcomes = do_plan(
        plan,
        partial(
            EncodeJob,
            make_encoder=partial(make_encoder, plan.model, recipe, plan.worker_plan.device),
            max_area=recipe.max_area,
            batch_size=int(recipe.batch_size),
        ),
        open_worker,
        listener=listener,
        limit=options.limit,
        track=options.track,
        extra=extra_entries,
    )
    is_several = isinstance(options.resolution, Sequence) or options.paths or options.text_out
    return outcomes if is_several else outcomes[0]


def do_plan(
    plan: RunPlan,
    make_job: Callable[..., EncodeJob],
    open_worker: Callable[[EncodeJob], Call],
    *,
    listener: JobListener,
    limit: int,
    track: str,
    extra: Callable[[DatasetPlan, Speeds], Mapping[str, Any]],
    name: str = "encode",
) -> list[Outcome]:
    """Do what a plan says, and return the outcome of each dataset.

    `make_job` gets what follows from the plan: the images, the datasets and the workers. These
    begin by `open_worker`. `extra` returns further entries of the manifest of a dataset, once it is
    published, which may say how fast the workers were.
    """
    speeds = Speeds()

    def on_step(progress: RunProgress) -> None:
        speeds.take(progress)
        listener.on_step(progress)

    # No earlier step of a run writes to the datasets.
    with closing(plan.captions) if plan.captions else nullcontext():
        editions = [take_claim(dataset.claim).edition for dataset in plan.datasets]
        planned = list(zip(plan.datasets, editions, strict=True))
        for dataset, edition in planned:
            sweep_to_begin(edition.store, dataset.claim.manifest)
            remove_units(edition, dataset.stale)
        if plan.captions:
            plan.captions.put({dataset.place: edition.store for dataset, edition in planned})
    for dataset in plan.datasets:
        for line in dataset.removals:
            listener.on_message(line)
    listener.on_begin(plan)
    runner = _runner_of(plan, name)
    runs = [
        Run(
            edition,
            dataset.claim.manifest,
            count=len(dataset.packed),
            samples=dataset.missing_samples,
            limit=limit if dataset.is_limited else 0,
            whole=plan.source.is_whole,
            extra=partial(extra, dataset, speeds),
        )
        for dataset, edition in planned
    ]
    job = make_job(
        tars=plan.source.tars,
        datasets=[(dataset.place, dataset.settings, ed.mark) for dataset, ed in planned],
        worker_plan=plan.worker_plan,
    )
    return do_runs(
        runs,
        runner,
        partial(open_worker, job),
        joint_units(dataset.hand_out() for dataset in plan.datasets),
        listener=listener,
        track=track,
        figures=speeds.figures,
        on_step=on_step,
    )


def _runner_of(plan: RunPlan, name: str) -> Runner | None:
    """Return a runner with no more workers than there are units, or None if there is no unit."""
    units = len(plan.datasets[0].packed)
    if len(plan.datasets) > 1:
        units = sum(1 for _ in joint_units(dataset.pending for dataset in plan.datasets))
    if not units:
        return None
    workers = plan.worker_plan
    settings = replace(
        workers,
        workers=min(workers.workers, units),
        max_workers=min(workers.max_workers, units),
        name=name,
        phase=",".join(dataset.place for dataset in plan.datasets),
        units=units,
    )
    return make_runner(workers.runner, settings)


def open_worker(job: EncodeJob) -> Call:
    prepare_allocator()
    from wdsprep.encoding.worker import EncodeWorker  # torch and models: for workers alone

    return EncodeWorker(job)


def make_encoder(model: Model, recipe: Recipe, device: str) -> "Encoder":
    """Load the encoder in a worker, after a check of the worker's GPU and of the weights.

    Raise RuntimeError if the GPU is too old for torch or for the recipe, and WorkError if torch
    cannot use one, or if the weights are not those of the driver.
    """
    from torch import device as torch_device

    from wdsprep.encoding.models.device import check_age, check_precision
    from wdsprep.encoding.models.encoder import load_encoder

    require_gpu(device)
    check_age(torch_device(device))
    has_bf16_text = bool(model.components) and recipe.text == "emb"
    check_precision(torch_device(device), recipe.dtype, has_bf16_text=has_bf16_text)
    return load_encoder(check_weights(model), recipe, device)
