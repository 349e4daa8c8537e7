"""`encode`: turn the image shards of a phase into latent shards, on any number of workers.

A shard is a unit of work; its output has its name, its keys and its order. Without latents it is a
text dataset, made of the shards' captions alone. Of several resolutions each makes a dataset of its
own, as a run for it alone would: a unit is an image shard with the datasets that lack it, so that
its images are decoded and its captions encoded once for all. Their text may be a dataset of its own
among them, of the captions of all their images; then it is stored once, and no refused image takes
its text along.

What a run does is planned whole before anything is written (`plan`, `make_plan`); here it is done.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from wdsprep.dataset.edition import Edition
from wdsprep.dataset.names import SELECTION
from wdsprep.dataset.state import take_claim
from wdsprep.encoding.captions.table import report_captions
from wdsprep.encoding.make_plan import make_plan
from wdsprep.encoding.models.find import Model, check_weights
from wdsprep.encoding.options import EncodeOne, EncodeOptions
from wdsprep.encoding.pending import joint_units, remove_stale_units
from wdsprep.encoding.plan import DatasetPlan, EncodePlan, area_warning
from wdsprep.encoding.progress import Speeds
from wdsprep.encoding.recipe import Recipe
from wdsprep.encoding.work import EncodeTarget, EncodeWork
from wdsprep.encoding.worker_plan import runner_of
from wdsprep.options import TwoWays, taking
from wdsprep.runners.base import Runner
from wdsprep.runners.job import JobListener
from wdsprep.runners.run import Outcome, Run, RunProgress, do_runs, sweep
from wdsprep.runners.track import tracked

if TYPE_CHECKING:
    from wdsprep.encoding.models.base import Encoder


EncodeListener = JobListener

P = ParamSpec("P")
Q = ParamSpec("Q")


def _overloaded(
    _one: Callable[P, EncodeOne], _several: Callable[Q, EncodeOptions]
) -> Callable[[object], TwoWays[P, Outcome, Q, list[Outcome]]]:
    """Tell type checkers that a call for one dataset has an outcome, one for several a list."""
    return lambda function: cast("Any", function)


@_overloaded(EncodeOne, EncodeOptions)
@taking(EncodeOptions)
def encode(options: EncodeOptions) -> Outcome | list[Outcome]:
    """Encode the image shards in `images` into the dataset `out`.

    Where `out` is empty it is `shards/latents-RESOLUTION`, or `shards/text` of text alone.

        encoded = wdsprep.encode("shards/images", resolution=256)
        encoded.samples, encoded.manifest.rejects, encoded.is_damaged

    Several resolutions take one pass, which decodes each image and encodes each caption once. Each
    makes the dataset that a run for it alone would make, where `out` has `{resolution}` in it, and
    has an outcome of its own:

        low, high = wdsprep.encode("shards/images", resolution=(256, 512))

    With `latents="none"` it is text alone, made of the captions of all images, or of those that
    latents of `resolution` are made of:

        text = wdsprep.encode("shards/images", latents="none")

    With `text_out` the text of all resolutions is such a dataset, made in the same pass, and the
    latents are those of `text="none"`. Its outcome comes last:

        low, high, text = wdsprep.encode(resolution=(256, 512), text_out="shards/text")

    With `captions` of a table, what it names has its caption from there; with `caption_field` all
    captions are from a field of the json. Several fields at once give a list of text datasets,
    where `out` has `{caption}` in it:

        alt, long = wdsprep.encode("shards/images", latents="none", caption_fields="alt,long")

    The options are those of `wdsprep encode`, with its spellings ("4:32" workers, "auto") or plain
    numbers; `shapes` may be a list of widths and heights too; `track` is wandb or tensorboard.
    Interrupted or killed, the same call goes on where it was.
    """
    outcomes = _encoded(options, options.heard_by)
    is_several = isinstance(options.resolution, Sequence) or options.paths or options.text_out
    return outcomes if is_several else outcomes[0]


def _encoded(options: EncodeOptions, listener: EncodeListener) -> list[Outcome]:
    plan = make_plan(options, told=listener.told, compared=listener.compared)
    with closing(plan.captions):
        editions = _begin_datasets(plan)
    for line in chain.from_iterable(dataset.removals for dataset in plan.datasets):
        listener.told(line)
    if warning := area_warning(plan):
        listener.told(warning)
    listener.begun(plan)
    speeds = Speeds()
    # Of several in one pass nobody can tell how fast each would be alone.
    trial = speeds if len(plan.datasets) == 1 else Speeds()
    runs = _runs(plan, editions, options.limit, trial if options.limit else None)
    places = [dataset.place for dataset in plan.datasets]
    runner = _runner(plan, places) if plan.units else None
    work = _work(plan, editions)
    with tracked(
        options.track if runner else "",
        places,
        listener,
        settings=plan.datasets[0].settings,
        before=sum(dataset.claim.manifest.samples for dataset in plan.datasets),
        more=speeds.figures,
    ) as status:

        def heard(progress: RunProgress) -> None:
            speeds.heard(progress)
            listener.heard(progress)

        units = joint_units([dataset.pending for dataset in plan.datasets])
        outcomes = do_runs(runs, runner, work, units, heard, status)
    for target, outcome in zip(work.targets, outcomes, strict=True):
        if target.captions.settings and SELECTION not in outcome.manifest.extra:  # it is not told
            report = report_captions(
                plan.captions, target.captions, target.latents, outcome.manifest
            )
            listener.captioned(outcome, report)
    return outcomes


def _begin_datasets(plan: EncodePlan) -> list[Edition]:
    """Write what has to be there before the work: this is the first that is written."""
    editions = [take_claim(dataset.claim) for dataset in plan.datasets]
    for dataset, edition in zip(plan.datasets, editions, strict=True):
        sweep(edition.store, dataset.claim.manifest)
        if dataset.captions.digest:
            plan.captions.put(edition.store)
        remove_stale_units(edition, dataset.stale)
    return editions


def _runner(plan: EncodePlan, places: Sequence[str]) -> Runner:
    return runner_of(
        plan.worker_options, plan.worker_plan, units=plan.units, phase=",".join(places)
    )


def _work(plan: EncodePlan, editions: Sequence[Edition]) -> EncodeWork:
    worker_plan, recipe = plan.worker_plan, plan.recipe
    return EncodeWork(
        images=plan.url,
        targets=tuple(map(_target, plan.datasets, editions)),
        make_encoder=partial(make_encoder, plan.model, recipe, worker_plan.device),
        max_area=recipe.max_area,
        max_nbytes=int(recipe.max_bytes),
        batch_size=int(recipe.batch_size),
        decoders=worker_plan.threads,
        threads=worker_plan.threads,
        gpus=worker_plan.gpus_per_worker,
        gpu_share=worker_plan.gpu_share,
    )


def _target(dataset: DatasetPlan, edition: Edition) -> EncodeTarget:
    return EncodeTarget(
        latents=dataset.place,
        settings=dataset.settings,
        edition=edition.mark,
        keeps_content=dataset.keeps_content,
        captions=dataset.captions,
    )


def _runs(
    plan: EncodePlan, editions: Sequence[Edition], limit: int, trial: Speeds | None
) -> list[Run]:
    """Return a run for each dataset."""
    return [
        Run(
            edition,
            dataset.claim.manifest,
            count=dataset.missing,
            limit=limit if dataset.is_limited else 0,
            whole=plan.is_whole,
            extra=partial(
                _extra, plan.model.name, trial, dataset.claim.manifest.extra.get("trial")
            ),
        )
        for dataset, edition in zip(plan.datasets, editions, strict=True)
    ]


def _extra(model: str, speeds: Speeds | None, known: Any) -> dict[str, Any]:
    """Return what else a manifest says; `speeds` are of a trial, and `known` of one before."""
    return {"model": model} | (speeds.trial(known) if speeds else {})


def make_encoder(model: Model, recipe: Recipe, device: str) -> "Encoder":
    """Load the models in a worker, if they are those of the driver."""
    from torch import device as torch_device

    from wdsprep.encoding.models.device import check_age
    from wdsprep.encoding.models.encoder import load_encoder

    check_age(torch_device(device))
    return load_encoder(check_weights(model), recipe, device)
