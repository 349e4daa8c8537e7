"""`encode`: turn the image shards of a phase into latent shards, on any number of workers.

A shard is a unit of work; its output has its name, its keys and its order. Without latents it is a
text dataset, made of the shards' captions alone. Of several resolutions each makes a dataset of its
own, as a run for it alone would: a unit is an image shard with the datasets that lack it, so that
its images are decoded and its captions encoded once for all. Their text may be a dataset of its own
among them, of the captions of all their images; then it is stored once, and no refused image takes
its text along.

What a run does stands here in its order: the *phases*, one for each dataset, with the model and
captions (`wdsprep.encoding.phases`); the datasets; what is left to do. All of it is looked at
before anything is written.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from wdsprep.dataset.damage import UNLIKE_RECEIPT, repair_step
from wdsprep.dataset.digests import DigestKind
from wdsprep.dataset.edition import Edition
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.names import SELECTION
from wdsprep.dataset.receipts import Settings
from wdsprep.dataset.state import check_claim
from wdsprep.encoding.captions.table import (
    CaptionReport,
    ReadyCaptions,
    report_of,
    table_of,
)
from wdsprep.encoding.crew import EncodeCrew, EncodeCrewOptions, runner_of, settled
from wdsprep.encoding.image_shards import ImageShard, tars_of
from wdsprep.encoding.models.find import (
    Model,
    check_weights,
)
from wdsprep.encoding.options import EncodeOne, EncodeOptions
from wdsprep.encoding.pending import Left, count_units, joint_units, pending_shards, take_back
from wdsprep.encoding.phases import (
    ChosenEncoding,
    DatasetPhase,
    phases_of,
    whole_of,
    with_captions,
    with_models,
)
from wdsprep.encoding.progress import Speeds
from wdsprep.encoding.recipe import Encode, Recipe
from wdsprep.encoding.work import EncodeTarget, EncodeWork
from wdsprep.errors import DamageError, NotFoundError
from wdsprep.options import TwoWays, taking
from wdsprep.runners.base import Runner
from wdsprep.runners.job import JobListener
from wdsprep.runners.run import (
    Outcome,
    Run,
    RunProgress,
    carry_out,
    opened_dataset,
)
from wdsprep.runners.track import tracked
from wdsprep.store import open_store
from wdsprep.store.base import Store, absolute

if TYPE_CHECKING:
    from wdsprep.encoding.models.base import Encoder


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodePhase:
    """What there is for a resolution."""

    resolution: int
    shapes: int
    """0 where it is the square alone."""
    shards: int
    samples: int
    """0 where nobody has counted them."""
    is_of_text: bool = False


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
class EncodeListener(JobListener):
    """Hears how a run goes; each call may be left out."""

    heard: Callable[[RunProgress], None] = lambda _progress: None
    captioned: Callable[[Outcome, CaptionReport], None] = lambda _outcome, _report: None
    """What became of captions that are not the samples' own, for each dataset at the end."""


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
    outcomes = _encoded(options, options.listener or EncodeListener())
    is_several = isinstance(options.resolution, Sequence) or options.paths or options.text_out
    return outcomes if is_several else outcomes[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenDataset:
    """What a run writes to, which is open."""

    edition: Edition
    manifest: Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """A run before it goes. The phases are no part of it, nor what they know of all image shards,
    which would take memory as long as it goes."""

    work: EncodeWork
    captions: ReadyCaptions
    runs: list[Run]
    pending: list[list[ImageShard]]
    runner: Runner | None
    """None where nothing is left to do."""
    settings: Settings
    before: int
    """The samples that are there."""


def _encoded(options: EncodeOptions, listener: EncodeListener) -> list[Outcome]:
    speeds = Speeds()
    places = [absolute(place) for place in options.places.values()]
    # Of several in one pass nobody can tell how fast each would be alone.
    ready = _ready(options, places, speeds if len(places) == 1 else Speeds(), listener)
    with tracked(
        options.track if ready.runner else "",
        places,
        listener,
        settings=ready.settings,
        before=ready.before,
        more=speeds.figures,
    ) as status:

        def heard(progress: RunProgress) -> None:
            speeds.heard(progress)
            listener.heard(progress)

        units = joint_units(ready.pending)
        outcomes = carry_out(ready.runs, ready.runner, ready.work, units, heard, status)
    for target, outcome in zip(ready.work.targets, outcomes, strict=True):
        if target.captions.settings and SELECTION not in outcome.manifest.extra:  # it is not told
            report = report_of(ready.captions, target.captions, target.latents, outcome.manifest)
            listener.captioned(outcome, report)
    return outcomes


def _ready(
    options: EncodeOptions, places: Sequence[str], trial: Speeds, listener: EncodeListener
) -> _Ready:
    images, captions, overwrite = absolute(options.images), options.of_captions, options.overwrite
    phases = phases_of(images, places, options.recipes, limit=options.limit, overwrite=overwrite)
    how = whole_of([phase.how for phase in phases])
    by = settled(options.part(EncodeCrewOptions), listener.told)
    table = table_of(captions)  # before a model is fetched for what cannot be
    chosen, phases = with_models(phases, how, by, listener.told)
    phases, ready_captions = with_captions(
        phases, captions, table, how, listener.told, is_kept=not overwrite
    )
    with closing(ready_captions):
        datasets = _opened(phases, overwrite=overwrite)
        for phase, dataset in zip(phases, datasets, strict=True):
            if phase.captions.digest:
                ready_captions.put(dataset.edition.store)
    extra = partial(_extra, chosen.model.name, trial if options.limit else None)
    runs, pending = _runs(phases, datasets, how, options, extra, listener)
    _tell_limit(images, phases, how, listener)
    listener.begun(_begun(chosen, phases))
    units, crew = count_units(pending), chosen.crew
    return _Ready(
        work=_work(phases, datasets, how, chosen),
        captions=ready_captions,
        runs=runs,
        pending=pending,
        runner=runner_of(by, crew, units=units, phase=",".join(places)) if units else None,
        settings=phases[0].settings,
        before=sum(dataset.manifest.samples for dataset in datasets),
    )


def _opened(phases: Sequence[DatasetPhase], *, overwrite: bool) -> list[_OpenDataset]:
    """The datasets, all of which are looked at before one is written to."""
    begins = [True]
    if len(phases) > 1:  # one alone is looked at where it is opened
        begins = [
            check_claim(open_store(phase.latents), "latents", phase.settings, overwrite=overwrite)
            for phase in phases
        ]
    opened: dict[int, _OpenDataset] = {}
    for number in sorted(range(len(phases)), key=begins.__getitem__):  # what is there first
        place, own = phases[number].latents, phases[number].settings
        edition, manifest = opened_dataset(place, "latents", own, overwrite=overwrite)
        _check_empty(edition.store, manifest)
        opened[number] = _OpenDataset(edition=edition, manifest=manifest)
    return [opened[number] for number in range(len(phases))]


def _work(
    phases: Sequence[DatasetPhase],
    datasets: Sequence[_OpenDataset],
    how: Encode,
    chosen: ChosenEncoding,
) -> EncodeWork:
    crew = chosen.crew
    return EncodeWork(
        images=phases[0].source.url,
        targets=tuple(map(_target, phases, datasets)),
        make_encoder=partial(make_encoder, chosen.model, chosen.recipe, crew.device),
        max_area=how.max_area,
        max_nbytes=int(how.max_bytes),
        batch_size=int(how.batch_size),
        decoders=crew.threads,
        threads=crew.threads,
        gpus=crew.gpus_per_worker,
        gpu_share=crew.gpu_share,
    )


def _target(phase: DatasetPhase, dataset: _OpenDataset) -> EncodeTarget:
    return EncodeTarget(
        latents=phase.latents,
        settings=phase.settings,
        edition=dataset.edition.mark,
        keeps_content=dataset.manifest.keeps_content,
        captions=phase.captions,
    )


def _runs(
    phases: Sequence[DatasetPhase],
    datasets: Sequence[_OpenDataset],
    how: Encode,
    options: EncodeOptions,
    extra: Callable[[Any], Mapping[str, Any]],
    listener: EncodeListener,
) -> tuple[list[Run], list[list[ImageShard]]]:
    """A run for each dataset, and what is left to do for it, which is known of all before anything
    goes."""
    runs: list[Run] = []
    both = [*zip(phases, datasets, strict=True)]
    lefts = [_left_to_do(phase, dataset, how, options, listener) for phase, dataset in both]
    for (phase, dataset), left in zip(both, lefts, strict=True):
        take_back(dataset.edition, left.stale)
        for line in left.lines:
            listener.told(line)
        run = Run(
            dataset.edition,
            left.manifest,
            count=len(left.shards),
            limit=options.limit if phase.wanted != phase.source.shards else 0,
            whole=phase.source.is_whole,
            extra=partial(extra, dataset.manifest.extra.get("trial")),
        )
        runs.append(run)
    return runs, [left.shards for left in lefts]


def _left_to_do(
    phase: DatasetPhase,
    dataset: _OpenDataset,
    how: Encode,
    options: EncodeOptions,
    listener: EncodeListener,
) -> Left:
    source = phase.source
    return pending_shards(
        dataset.edition.store,
        dataset.manifest,
        source.shards,
        phase.wanted,
        redo_changed=options.redo_changed,
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


def _check_empty(store: Store, manifest: Manifest) -> None:
    """What became of the empty caption must be what receipts say before a further one says it."""
    files = (item for files in manifest.ledger.column("files") for item in files.items())
    known = {(name, digest) for name, digest in files if name.startswith("empty.")}
    kind = DigestKind.of(manifest.settings)
    for name in {name for name, _ in known}:
        with suppress(NotFoundError):  # the first worker writes it
            if (name, kind.hex(store.read(name))) not in known:
                damage = DamageError(f"{store.url}/{name}", UNLIKE_RECEIPT)
                raise damage.with_next_step(repair_step(store.url))


def _tell_limit(
    images: str, phases: Sequence[DatasetPhase], how: Encode, listener: EncodeListener
) -> None:
    most = phases[0].source.max_area
    if most > how.max_area and not how.is_of_text:
        listener.told(
            f"{images} was packed with --max-area {most}: images of more than "
            f"{how.max_area:,} pixels are rejected here, unless --max-area says otherwise"
        )


def _begun(chosen: ChosenEncoding, phases: Sequence[DatasetPhase]) -> EncodeBegun:
    return EncodeBegun(
        model=chosen.model,
        recipe=chosen.recipe,
        crew=chosen.crew,
        phases=tuple(
            EncodePhase(
                resolution=phase.how.resolution,
                shapes=len(phase.how.sizes),
                shards=len(phase.wanted),
                samples=sum(shard.item.take or shard.item.samples for shard in phase.wanted),
                is_of_text=phase.is_of_text,
            )
            for phase in phases
        ),
        is_whole=phases[0].source.is_whole,
    )
