"""The phases of a run of `encode`: the datasets that it makes, each with its images, its settings
and its captions.

They come about in this order, before anything is written: what there is to encode (`phases_of`);
the model, and with it the settings (`with_models`); captions (`with_captions`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wdsprep.dataset.digests import DigestKind
from wdsprep.encoding.caption_table import CaptionTable, ReadyCaptions, ready_captions
from wdsprep.encoding.captions import CaptionOptions, CaptionSource
from wdsprep.encoding.choices import choices_for, form_at, settings_of, settled_for
from wdsprep.encoding.crew import EncodeCrew, EncodeCrewOptions, find_crew
from wdsprep.encoding.image_shards import ImageShard, ImageShards, find_image_shards, tars_of
from wdsprep.encoding.models.find import (
    Model,
    Wanted,
    check_resolution,
    check_shapes,
    find_model,
    hashed_with,
)
from wdsprep.encoding.recipe import Encode, Recipe
from wdsprep.errors import UsageError
from wdsprep.sources.patterns import is_glob
from wdsprep.store.base import check_apart


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetPhase:
    """What there is for a dataset that a run makes, and where it goes."""

    how: Encode
    latents: str
    form: Mapping[str, Any]
    source: ImageShards
    wanted: tuple[ImageShard, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Once a model is chosen."""
    captions: CaptionSource = field(default_factory=CaptionSource)

    @property
    def is_of_text(self) -> bool:
        return self.how.is_of_text

    @property
    def needs(self) -> Wanted:
        """What of the model decides its settings."""
        return Wanted(self.how.text, not self.is_of_text)

    @property
    def kind(self) -> DigestKind:
        return DigestKind.of(self.form)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenEncoding:
    """With what images and captions are encoded."""

    model: Model
    recipe: Recipe
    crew: EncodeCrew


def phases_of(
    images: str, places: Sequence[str], hows: Sequence[Encode], *, limit: int, overwrite: bool
) -> list[DatasetPhase]:
    """Text that is stored apart is of the images of all others, also of those that are in a lower
    bucket than the resolution, for a shape."""
    phases: list[DatasetPhase] = []
    for place, how in zip(places, hows, strict=True):
        if how.is_of_text and (others := [each for each in phases if not each.is_of_text]):
            if len(others) > 1 and others[0].source.is_foreign:
                raise UsageError(
                    f"{images} was not made by pack, and text lies in the folder of the resolution "
                    "that it is for: give --text-out with one resolution"
                )
            how = replace(how, resolution=min(each.source.lowest for each in others))
        phases.append(_phase(images, place, how, limit=limit, overwrite=overwrite))
    return phases


def whole_of(hows: Sequence[Encode]) -> Encode:
    """What a worker makes of a sample for all of them."""
    of_images = [how for how in hows if not how.is_of_text]
    largest = max(of_images or hows, key=lambda how: how.resolution)
    apart = hows[-1]
    return replace(largest, text=apart.text, text_length=apart.text_length)


def _phase(images: str, latents: str, how: Encode, *, limit: int, overwrite: bool) -> DatasetPhase:
    form = form_at(latents, how, overwrite=overwrite)
    kind = DigestKind.of(form)
    source = find_image_shards(images, how.resolution, shapes=how.sizes, kind=kind)
    check_apart(source.url if is_glob(images) else images, latents)
    return DatasetPhase(
        how=replace(how, resolution=source.resolution),
        latents=latents,
        form=form,
        source=source,
        wanted=source.first(limit),
    )


def with_models(
    phases: Sequence[DatasetPhase],
    how: Encode,
    options: EncodeCrewOptions,
    told: Callable[[str], None],
) -> tuple[ChosenEncoding, list[DatasetPhase]]:
    """What encodes for all phases, and the phases with their settings."""
    needs = Wanted(how.text, not how.is_of_text)
    found = find_model(how.model, text=needs.text, has_vae=needs.vae, listener=told)
    for phase in phases:
        if not phase.is_of_text:
            check_resolution(found, phase.how.resolution)
            check_shapes(found, phase.how.sizes)
    crew = find_crew(options)
    recipe, model = settled_for(how, hashed_with(found, phases[0].kind), crew.device)
    settings = _settings(phases, recipe, {needs: found}, crew.device)
    both = zip(phases, settings, strict=True)
    chosen = ChosenEncoding(model=model, recipe=recipe, crew=crew)
    return chosen, [replace(phase, settings=own) for phase, own in both]


def _settings(
    phases: Sequence[DatasetPhase], whole: Recipe, models: dict[Wanted, Model], device: str
) -> list[dict[str, Any]]:
    """Those of each, but for captions. Of text that is stored apart, and of latents without text,
    they are of what a run for them alone would need of the model."""
    settled: dict[tuple[Wanted, DigestKind], Model] = {}
    settings = []
    for phase in phases:
        needs, how = phase.needs, phase.how
        if needs not in models:
            models[needs] = find_model(how.model, text=needs.text, has_vae=needs.vae)
        if (needs, phase.kind) not in settled:
            model = hashed_with(models[needs], phase.kind)
            settled[needs, phase.kind] = settled_for(how, model, device)[1]
        model = settled[needs, phase.kind]
        recipe = replace(how, **choices_for(how, model, device))
        if whole.dtype == "fp32":  # where text has no bf16, what is beside it is not in fp16 either
            recipe = replace(recipe, dtype="fp32")
        settings.append(settings_of(model, recipe, phase.form))
    return settings


def with_captions(
    phases: Sequence[DatasetPhase],
    options: CaptionOptions,
    table: CaptionTable | None,
    how: Encode,
    told: Callable[[str], None],
    *,
    is_kept: bool,
) -> tuple[list[DatasetPhase], ReadyCaptions]:
    """Those that have text know whose captions it is of. What there is of captions in datasets that
    are started over goes with them."""
    own = [phase for phase in phases if phase.is_of_text] or phases  # or latents with their text
    source = own[0].source
    ready = ready_captions(
        options,
        table,
        tars_of(source.url, int(how.max_bytes)),
        own[0].wanted,
        [phase.latents for phase in own],
        is_kept=is_kept,
        hashed_by=source.hashed_by,
        told=told,
    )
    sources = ready.sources * (len(own) // len(ready.sources))  # the same for all resolutions
    found = [
        replace(phase, captions=said, settings={**phase.settings, **said.settings})
        for phase, said in zip(own, sources, strict=True)
    ]
    return [*phases[: len(phases) - len(own)], *found], ready
