"""The contact sheet's items: samples picked in each bucket, with all that is known and to be seen.

Of images and latents together, an item is one key: the image as it came, the crop, and for each
dataset of latents what it was made into. Latents alone are items of their own.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wdsprep.dataset.read_ahead import read_each
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.shapes import shapes_of
from wdsprep.encoding.models.find import Model
from wdsprep.errors import FormatError, WdsprepError, without_secrets
from wdsprep.reporting.facts.datasets import Datasets, ReportDataset
from wdsprep.reporting.facts.spectrum import latent_of
from wdsprep.reporting.page.markup import by
from wdsprep.reporting.sheet.decoding import Decoders, Decoding
from wdsprep.reporting.sheet.picking import JoinedSample, Joiner, SheetSample, pick, read_sample
from wdsprep.reporting.sheet.pictures import (
    SheetPicture,
    coloured,
    crop_of,
    from_levels,
    likeness,
    open_image,
    thumbnail,
)
from wdsprep.text import plural

META_LENGTH = 400
FactPairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SheetItem:
    """One sample of the sheet, in the group of its dataset and bucket."""

    group: str
    key: str
    caption: str
    facts: FactPairs
    pictures: tuple[SheetPicture, ...]
    problem: str = ""


def to_show(datasets: Datasets, count: int) -> tuple[int, int]:
    """Count the samples to show, and at most how many latents they have."""
    shown = latents = 0
    for base in _bases(datasets):
        for bucket, shards in base.buckets.items():
            samples = min(count, sum(shard.samples for shard in shards))
            shown += samples
            made = _takers(datasets, bucket) if datasets.images else [base]
            latents += samples * sum(each.has_latents for each in made)
    return shown, latents


def _bases(datasets: Datasets) -> Sequence[ReportDataset]:
    return (datasets.images,) if datasets.images else datasets.latents


def _takers(datasets: Datasets, bucket: str) -> list[ReportDataset]:
    """Return the datasets of latents that take this bucket of images."""
    images = datasets.images
    return [each for each in datasets.latents if images and int(bucket) in each.takes(images)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """The tools that pictures are made with."""

    datasets: Datasets
    decodings: Mapping[str, Decoding]
    """by the URL of the latents"""
    decoders: Decoders
    max_area: int
    heard: Callable[[str], None]

    def items(self, count: int, seed: str) -> list[SheetItem]:
        """So many of each bucket."""
        total, _ = to_show(self.datasets, count)
        found: list[SheetItem] = []
        for base in _bases(self.datasets):
            for bucket, shards in base.buckets.items():
                places = pick(shards, count, f"{seed} {bucket}")
                samples = read_each(
                    lambda place, base=base: read_sample(base.store, place),  # type: ignore[misc]
                    places,
                    base.store.readers,
                )
                for item in self._of_bucket(base, bucket, samples):
                    found.append(item)
                    self.heard(f"{len(found):,} of {plural(total, 'sample')} drawn")
        return found

    def _of_bucket(
        self, base: ReportDataset, bucket: str, samples: Sequence[SheetSample]
    ) -> Iterator[SheetItem]:
        is_images = base is self.datasets.images
        group = f"bucket {bucket}" if is_images else f"{base.shown}, {bucket}"
        joins = self._joined(bucket, samples) if is_images else [()] * len(samples)
        for sample, joined in zip(samples, joins, strict=True):
            if sample.problem:
                yield unread(group, sample)
            elif is_images:
                yield self._of_image(group, sample, joined)
            else:
                yield self._of_latent(base, group, sample)

    def _joined(
        self, bucket: str, samples: Sequence[SheetSample]
    ) -> list[tuple[JoinedSample, ...]]:
        """Return for each image its samples in the datasets of latents that take its bucket."""
        columns = [
            read_each(Joiner(latents).find, samples, latents.store.readers)
            for latents in _takers(self.datasets, bucket)
        ]
        return list(zip(*columns, strict=True)) if columns else [()] * len(samples)

    def _of_image(
        self, group: str, sample: SheetSample, joined: Sequence[JoinedSample]
    ) -> SheetItem:
        facts = facts_of_image(sample.facts)
        image, first = opened_image(sample, self.max_area)
        pictures = [first]
        for one in joined:
            if one.sample is None:
                facts += ((one.latents.label, one.reason),)
                continue
            facts += _facts_of_latent(one.latents, one.sample.facts)
            if not one.latents.has_latents:
                continue
            pictures += self._of_pair(one.latents, one.sample, image)
        return SheetItem(
            group=group,
            key=sample.key,
            caption=_caption(sample),
            facts=facts,
            pictures=tuple(pictures),
        )

    def _of_latent(self, base: ReportDataset, group: str, sample: SheetSample) -> SheetItem:
        source = str(sample.facts.get("source", ""))
        return SheetItem(
            group=group,
            key=sample.key,
            caption=_caption(sample),
            facts=(("source", source), *_facts_of_latent(base, sample.facts)),
            pictures=tuple(self._of_pair(base, sample, None)) if base.has_latents else (),
        )

    def _of_pair(
        self, latents: ReportDataset, sample: SheetSample, image: Any
    ) -> Iterator[SheetPicture]:
        """Yield the crop, the latent made of it, and the picture that the decoder makes of that."""
        crop = None
        side = latents.resolution
        sizes = shapes_of(latents.manifest.settings) or ((side, side),)
        if image is not None:
            try:
                crop = crop_of(image, sample.facts, sizes)
            except (KeyError, TypeError, ValueError, ZeroDivisionError):
                yield SheetPicture(title="crop", note="its json names no crop", kind="crop")
            else:
                yield replace(
                    thumbnail(crop, "crop", f"what was encoded of it, at {by(*crop.size)} pixels"),
                    measure=by(*crop.size),
                    kind="crop",
                )
        try:
            latent = latent_of(sample, latents.manifest.settings)
        except FormatError as error:
            yield SheetPicture(title="latent", note=str(error))
            return
        yield coloured(latent, f"its latent for {side} pixels in false colours")
        decoding = self.decodings[latents.url]
        if decoding.model is not None:
            yield self._decoded(decoding.model, latent, crop)

    def _decoded(self, model: Model, latent: Any, crop: Any) -> SheetPicture:
        try:
            shown = from_levels(self.decoders.decode(model, latent))
        except WdsprepError as error:
            return SheetPicture(title="decoded", note=str(error))
        same = crop is not None and crop.size == shown.size
        measure = f"{likeness(crop, shown):.1f} dB" if same else by(*shown.size)
        made = thumbnail(shown, "decoded", "what the VAE's decoder makes of the latent")
        return replace(made, measure=measure)


def opened_image(sample: SheetSample, max_area: int) -> tuple[Any, SheetPicture]:
    """Open the image, and return it with its thumbnail, or with a note of why there is none."""
    try:
        image = open_image(dict(sample.members), max_area)
    except RejectedError as error:
        note = f"{error.code} {error.detail}".strip()
        return None, SheetPicture(title="original", note=note)
    made = thumbnail(image, "original", "the image")
    return image, replace(made, measure=by(*image.size))


def unread(group: str, sample: SheetSample) -> SheetItem:
    name = f"sample {sample.place.number:,} of {sample.place.shard.name}"
    return SheetItem(
        group=group, key=name, caption="", facts=(), pictures=(), problem=sample.problem
    )


def _caption(sample: SheetSample) -> str:
    return sample.member("txt").decode("utf-8", "replace")


def facts_of_image(facts: Mapping[str, Any]) -> FactPairs:
    found = [("source", str(facts.get("source", "")))]
    if "url" in facts:
        found.append(("url", without_secrets(str(facts["url"]))))
    size, came = ((facts.get(f"{of}width"), facts.get(f"{of}height")) for of in ("", "source_"))
    found.append(("size", by(*size)))
    if came != size:
        found.append(("came as", by(*came)))
    if isinstance(changes := facts.get("changes"), list) and changes:
        found.append(("converted", ", ".join(map(str, changes))))
    if meta := _meta(facts):
        found.append(("meta", meta))
    return tuple(found)


def shown_value(value: Any) -> str:
    """Return the value of a column in few digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _meta(facts: Mapping[str, Any]) -> str:
    """Return the metadata that the source has of a sample, without what is shown already."""
    meta, shown = facts.get("meta"), (facts.get("caption"), facts.get("url"))
    if isinstance(meta, dict):
        meta = {name: value for name, value in meta.items() if value not in shown}
    text = without_secrets(json.dumps(meta, ensure_ascii=False)) if meta else ""
    return text if len(text) <= META_LENGTH else f"{text[:META_LENGTH]}\N{HORIZONTAL ELLIPSIS}"


def _facts_of_latent(latents: ReportDataset, facts: Mapping[str, Any]) -> FactPairs:
    if latents.columns:
        return tuple((name, shown_value(facts.get(name))) for name in latents.columns)
    scaled = f"scaled to {by(facts.get('scaled_width'), facts.get('scaled_height'))}"
    crop = facts.get("crop")
    if isinstance(crop, list) and len(crop) == 4:
        scaled += f", cut from {crop[0]}, {crop[1]}"
    parts = [scaled] if latents.has_latents else []
    if tokens := facts.get("tokens"):
        parts.append(f"{tokens} tokens" + (", caption cut" if facts.get("cut") else ""))
    return ((latents.label, "; ".join(parts)),)
