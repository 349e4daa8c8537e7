"""`encode`: turn the image shards of a phase into latent shards, on any number of workers.

A shard is a unit of work; its output has its name, its keys and its order.
"""

import gc
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from wdsprep.dataset.arrays import layout
from wdsprep.dataset.digests import FORM, DigestKind
from wdsprep.dataset.edition import Edition
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.state import form_there, retract
from wdsprep.encoding import HALF
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
from wdsprep.encoding.progress import Speeds
from wdsprep.encoding.recipe import Encode, Recipe
from wdsprep.encoding.shape_lists import Given
from wdsprep.encoding.work import EncodeWork
from wdsprep.errors import FingerprintError, FormatError, NotFoundError, UsageError
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.runners.base import least_and_most
from wdsprep.runners.run import (
    Outcome,
    Run,
    RunProgress,
    RunStatus,
    mark_incomplete,
    opened_dataset,
)
from wdsprep.sources.contents import changed
from wdsprep.sources.patterns import is_glob
from wdsprep.sources.tars import TarsSource
from wdsprep.store.base import Store, absolute, check_apart
from wdsprep.text import at_least, command, examples, plural

if TYPE_CHECKING:
    from wdsprep.encoding.models.base import Encoder


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeBegun:
    """What is known before the first worker starts."""

    model: Model
    recipe: Recipe
    crew: EncodeCrew
    shards: int
    samples: int
    """0 where nobody has counted them."""
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


def encode(
    images: "str | os.PathLike[str]" = "shards/images",
    out: "str | os.PathLike[str]" = "",
    *,
    resolution: int,
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
) -> Outcome:
    """Encode the image shards in `images` into the dataset `out` (`shards/latents-RESOLUTION` if
    it is empty).

        encoded = wdsprep.encode("shards/images", resolution=256)
        encoded.samples, encoded.manifest.rejects, encoded.is_damaged

    The options are those of `wdsprep encode`, with its spellings ("4:32" workers, "auto") or plain
    numbers; `shapes` may be a list of widths and heights too. Interrupted or killed, the same call
    goes on where it was.
    """
    at_least(0, limit=limit)
    least, most = least_and_most(workers)
    return _encoded(
        images,
        place_of(out, resolution),
        how=Encode(
            resolution=resolution,
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
        ),
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
        limit=limit,
        overwrite=overwrite,
        redo_changed=redo_changed,
        listener=listener or EncodeListener(),
    )


def _encoded(
    images: "str | os.PathLike[str]",
    latents: "str | os.PathLike[str]",
    *,
    how: Encode,
    options: EncodeCrewOptions,
    limit: int,
    overwrite: bool,
    redo_changed: bool,
    listener: EncodeListener,
) -> Outcome:
    images, latents = absolute(images), absolute(latents)  # workers may run in other folders
    form = form_there(latents, overwrite=overwrite)
    kind = DigestKind.of(form)
    source = find_image_shards(images, how.resolution, shapes=how.sizes, kind=kind)
    check_apart(source.url if is_glob(images) else images, latents)
    options = settled(options, listener.told)
    model = hashed_with(find_model(how.model, text=how.text, listener=listener.told), kind)
    check_resolution(model, how.resolution)
    check_shapes(model, how.sizes)
    crew = find_crew(options)
    how, model = settled_for(how, model, crew.device)
    settings = settings_of(model, how, form)
    edition, manifest = opened_dataset(latents, "latents", settings, overwrite=overwrite)
    _check_empty(edition.store, manifest)
    keeps_content = manifest.keeps_content
    wanted = source.first(limit)
    before = len(manifest.receipts)
    manifest, pending = pending_shards(
        edition,
        manifest,
        source.shards,
        wanted,
        redo_changed=redo_changed,
        is_whole=source.is_whole,
        tars=tars_of(source.url, int(how.max_bytes)),
        compared=listener.compared,
    )
    if gone := before - len(manifest.receipts):
        listener.told(f"{plural(gone, 'shard')} of latents removed: their images changed or went")
    if source.max_area > how.max_area:
        listener.told(
            f"{images} was packed with --max-area {source.max_area}: images of more than "
            f"{how.max_area:,} pixels are rejected here, unless --max-area says otherwise"
        )
    listener.begun(_begun(model, how, crew, source, wanted))
    speeds, known = Speeds(), manifest.extra.get("trial")

    def heard(progress: RunProgress) -> None:
        speeds.heard(progress)
        listener.heard(progress)

    run = Run(
        edition,
        manifest,
        count=len(pending),
        limit=limit if wanted != source.shards else 0,
        whole=source.is_whole,
        extra=lambda: {"model": model.name} | (speeds.trial(known) if limit else {}),
        status=listener.status,
        heard=heard,
    )
    work = EncodeWork(
        images=source.url,
        latents=latents,
        settings=settings,
        edition=edition.mark,
        keeps_content=keeps_content,
        make_encoder=partial(make_encoder, model, how, crew.device),
        max_area=how.max_area,
        max_nbytes=int(how.max_bytes),
        batch_size=int(how.batch_size),
        decoders=crew.threads,
        threads=crew.threads,
        gpu_share=crew.gpu_share,
    )
    runner = None
    if pending:
        runner = runner_of(options, crew, units=len(pending), phase=str(how.resolution))
    del source, wanted, manifest
    return run.carry_out(runner, work, drained(pending))


def place_of(out: "str | os.PathLike[str]", resolution: int) -> str:
    """Where latents go that are given no place."""
    return os.fspath(out) or f"shards/latents-{resolution}"


def drained(shards: list[ImageShard]) -> Iterator[ImageShard]:
    """Give away what is in the list, from its start, until nothing is. What waits is packed: where
    a million shards lie scattered over half a GB, no part of that is free before the last goes."""
    waiting = [shard.packed() for shard in reversed(shards)]
    shards.clear()
    gc.collect()  # tuples that Python keeps for reuse hold on to all the memory around them
    while waiting:
        yield ImageShard.unpacked(waiting.pop())


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
    usual ones."""
    limits = {
        "max_area": recipe.max_area,
        "max_bytes": recipe.max_bytes,
        "max_crop": recipe.max_crop,
        "shapes": list(map(list, recipe.sizes)),
    }
    usual = {"max_area": MAX_AREA, "max_bytes": MAX_NBYTES, "max_crop": 1.0, "shapes": []}
    return {
        **form,
        "crop": "centre",
        "dtype": recipe.dtype,
        "latents": recipe.latents,
        "layout": layout(fields(model, recipe)),
        "resolution": recipe.resolution,
        "seed": recipe.seed,
        "text": recipe.text,
        "weights": model.weights,
        **rule_of(model),
        **model.text_settings,
        **({"flip": True} if recipe.flip else {}),
        **{name: limit for name, limit in limits.items() if limit != usual[name]},
    }


def pending_shards(
    edition: Edition,
    manifest: Manifest,
    known: Sequence[ImageShard],
    wanted: Sequence[ImageShard],
    *,
    redo_changed: bool = False,
    is_whole: bool = True,
    tars: TarsSource | None = None,
    compared: Callable[[int, int], object] = lambda _done, _of: None,
) -> tuple[Manifest, list[ImageShard]]:
    """The manifest and the shards that are left to do: those wanted minus receipts present. One
    that an earlier --limit has cut is done anew, and so are those that were packed anew if that is
    asked for, so what was made of them goes. So does what has no image any more, if packing
    `is_whole`: else it may be packed again. `tars` reads foreign tars, to tell those that have
    changed from those that have another date."""
    ledger = manifest.ledger
    done = dict(zip(ledger.units(), ledger.column("input"), strict=True))
    made_of = {shard.name: shard.whole_input for shard in known}
    stale = {name for name, of in done.items() if made_of.get(name) != of.partition(":")[0]}
    is_foreign = any(shard.is_foreign for shard in known)
    same = {}
    if stale and is_foreign and tars:
        same = _only_dated(manifest, known, stale, tars, compared)
    stale -= same.keys()
    now = done | same
    if stale and not redo_changed:
        is_dated = is_foreign and not manifest.keeps_content
        raise _changed(edition.store, sorted(stale), is_dated=is_dated)
    if not is_whole:
        stale &= made_of.keys()
    pending = [shard for shard in wanted if not shard.is_done_by(now.get(shard.name, ""))]
    stale.update(shard.name for shard in pending if shard.name in done)
    if stale:
        mark_incomplete(edition)
    for name in sorted(stale):
        retract(edition, name, done[name])
    kept = [line for unit, line in ledger.named_lines() if unit not in stale]
    return replace(manifest, receipts=ledger.with_lines(kept)), largest_first(pending)


def _only_dated(
    manifest: Manifest,
    known: Sequence[ImageShard],
    stale: Collection[str],
    tars: TarsSource,
    compared: Callable[[int, int], object],
) -> dict[str, str]:
    """The foreign tars among the stale that hold what they held, and what their input is now."""
    shards = {shard.name: shard for shard in known if shard.name in stale and shard.is_foreign}
    receipts = {r.unit: r for r in manifest.receipts if r.unit in shards and r.content}
    takes = {unit: int(r.input.partition(":")[2] or 0) for unit, r in receipts.items()}
    shards = {
        unit: replace(shards[unit], item=replace(shards[unit].item, take=take))
        for unit, take in takes.items()
    }
    other = changed(
        tars,
        {unit: receipt.content for unit, receipt in receipts.items()},
        lambda unit: [shards[unit].item],
        heard=lambda done: compared(done, len(receipts)),
    )
    return {unit: shard.input for unit, shard in shards.items() if unit not in other}


def _changed(store: Store, names: Sequence[str], *, is_dated: bool) -> FingerprintError:
    """`is_dated` is whether their dates may be all that is other, and nothing can tell."""
    what = "changed or went away"
    if is_dated:
        what += ", or has another date, and no digest tells more in a dataset of an older wdsprep"
    return FingerprintError(
        f"{store.url} was encoded from other images: {plural(len(names), 'image shard')} of then "
        f"{what} ({examples(names)}): name another place for the new latents; or, "
        "if these are the same images packed anew, wdsprep encode --redo-changed encodes what "
        "changed again, and removes what has no image any more"
    )


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


def largest_first(shards: Iterable[ImageShard]) -> list[ImageShard]:
    """So that no worker begins a large one when the others have ended."""
    return sorted(shards, key=lambda shard: -(shard.item.take or shard.item.samples))


RecipeT = TypeVar("RecipeT", bound=Recipe)


def settled_for(recipe: RecipeT, model: Model, device: str) -> tuple[RecipeT, Model]:
    """What is left to choose, chosen for a model; and the model with what its pipeline makes of a
    caption. All that needs torch is imported for pipelines alone."""
    latents = latents_of(recipe.latents, model)
    recipe = replace(recipe, dtype=dtype_of(recipe.dtype, device, model), latents=latents)
    if model.pipeline is None:
        if recipe.text_length:
            raise UsageError(f"--text-length: {model.name} has but one length of text")
        return recipe, model
    preset = PRESETS.get(model.name.partition("@")[0])
    usual = preset.text_length if preset else 0
    recipe = replace(recipe, text_length=recipe.text_length or usual)
    from wdsprep.encoding.models.dry_run import asked

    return recipe, asked(model, recipe)


def latents_of(wanted: str, model: Model) -> str:
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
    VAE that is known to overflow, where the GPU has that."""
    if wanted != "auto":
        return wanted
    if device != "cuda":
        return "fp32"
    is_plain = model.pipeline is None and model.vae_kind == "AutoencoderKL"
    if not is_plain:
        return HALF if has_bf16() else "fp32"
    if not model.upcast:
        return "fp16"
    return "bf16" if has_bf16() else "fp32"


def _begun(
    model: Model,
    recipe: Recipe,
    crew: EncodeCrew,
    source: ImageShards,
    wanted: Sequence[ImageShard],
) -> EncodeBegun:
    return EncodeBegun(
        model=model,
        recipe=recipe,
        crew=crew,
        shards=len(wanted),
        samples=sum(shard.item.take or shard.item.samples for shard in wanted),
        is_whole=source.is_whole,
    )
