"""The items of the contact sheet: samples picked in each bucket, with their pictures and facts.

With images and latents, an item is one key: the image as it came, the crop, and for each dataset of
latents what was made of it. With latents alone, an item is a latent sample.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.shapes import shapes_of
from wdsprep.dataset.thread_map import read_each
from wdsprep.encoding.models.find_model import Model
from wdsprep.errors import FormatError, WdsprepError, without_secrets
from wdsprep.reporting.facts.datasets import Datasets, ReportDataset
from wdsprep.reporting.facts.latent_statistics import latent_of
from wdsprep.reporting.page.markup import format_sides
from wdsprep.reporting.sheet.decoding import Decoders, Decoding
from wdsprep.reporting.sheet.picking import JoinedSample, Joiner, SheetSample, pick, read_sample
from wdsprep.reporting.sheet.pictures import (
    SheetPicture,
    crop_of,
    draw_latent,
    image_from_levels,
    open_image,
    psnr,
    thumbnail,
)
from wdsprep.text import plural

META_LENGTH = 400
FactPairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SheetItem:
    """One sample on the contact sheet, in the group of its dataset and bucket."""

    group: str
    key: str
    caption: str
    facts: FactPairs
    pictures: tuple[SheetPicture, ...]
    problem: str = ""
    score: tuple[str, str] | None = None
    """The name and value of the score that the sample is shown for."""


def count_items(datasets: Datasets, count: int) -> tuple[int, int]:
    """Count the samples that a report shows, and how many latents they have at most."""
    shown = latents = 0
    for base in _bases(datasets):
        for bucket, shards in base.buckets.items():
            samples = min(count, sum(shard.samples for shard in shards))
            shown += samples
            made = _latents_of_bucket(datasets, bucket) if datasets.images else [base]
            latents += samples * sum(each.has_latents for each in made)
    return shown, latents


def _bases(datasets: Datasets) -> Sequence[ReportDataset]:
    """Return the datasets whose samples become items: the images, or else all latents."""
    return (datasets.images,) if datasets.images else datasets.latents


def _latents_of_bucket(datasets: Datasets, bucket: str) -> list[ReportDataset]:
    """Return the datasets of latents that were made of a bucket of images."""
    images = datasets.images
    return [
        each for each in datasets.latents if images and int(bucket) in each.encoded_buckets(images)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """The contact sheet of a report: its datasets, and the tools that make its pictures."""

    datasets: Datasets
    decodings: Mapping[str, Decoding]
    """The model of each dataset of latents, by its URL."""
    decoders: Decoders
    max_area: int
    heard: Callable[[str], None]

    def items(self, count: int, seed: str) -> list[SheetItem]:
        """Return `count` items of each bucket, or all that it has."""
        total, _ = count_items(self.datasets, count)
        found: list[SheetItem] = []
        for base in _bases(self.datasets):
            for bucket, shards in base.buckets.items():
                places = pick(shards, count, f"{seed} {bucket}")
                samples = read_each(
                    lambda place, base=base: read_sample(base.store, place),  # type: ignore[misc]
                    places,
                    base.store.readers,
                )
                for item in self._bucket_items(base, bucket, samples):
                    found.append(item)
                    self.heard(f"{len(found):,} of {plural(total, 'sample')} drawn")
        return found

    def _bucket_items(
        self, base: ReportDataset, bucket: str, samples: Sequence[SheetSample]
    ) -> Iterator[SheetItem]:
        is_images = base is self.datasets.images
        group = f"bucket {bucket}" if is_images else f"{base.shown}, {bucket}"
        joins = self._find_latents(bucket, samples) if is_images else [()] * len(samples)
        for sample, joined in zip(samples, joins, strict=True):
            if sample.problem:
                yield unread_item(group, sample)
            elif is_images:
                yield self._image_item(group, sample, joined)
            else:
                yield self._latent_item(base, group, sample)

    def _find_latents(
        self, bucket: str, samples: Sequence[SheetSample]
    ) -> list[tuple[JoinedSample, ...]]:
        """Return for each image its samples in the datasets of latents made of its bucket."""
        columns = [
            read_each(Joiner(latents).find, samples, latents.store.readers)
            for latents in _latents_of_bucket(self.datasets, bucket)
        ]
        return list(zip(*columns, strict=True)) if columns else [()] * len(samples)

    def _image_item(
        self, group: str, sample: SheetSample, joined: Sequence[JoinedSample]
    ) -> SheetItem:
        facts = facts_of_image(sample.facts)
        image, first = open_picture(sample, self.max_area)
        pictures = [first]
        for one in joined:
            if one.sample is None:
                facts += ((one.latents.label, one.reason),)
                continue
            facts += facts_of_latent(one.latents, one.sample.facts)
            if not one.latents.has_latents:
                continue
            pictures += self._latent_pictures(one.latents, one.sample, image)
        return SheetItem(
            group=group,
            key=sample.key,
            caption=_caption(sample),
            facts=facts,
            pictures=tuple(pictures),
        )

    def _latent_item(self, base: ReportDataset, group: str, sample: SheetSample) -> SheetItem:
        source = str(sample.facts.get("source", ""))
        return SheetItem(
            group=group,
            key=sample.key,
            caption=_caption(sample),
            facts=(("source", source), *facts_of_latent(base, sample.facts)),
            pictures=tuple(self._latent_pictures(base, sample, None)) if base.has_latents else (),
        )

    def _latent_pictures(
        self, latents: ReportDataset, sample: SheetSample, image: Any
    ) -> Iterator[SheetPicture]:
        """Yield pictures of the crop, of its latent, and of what the decoder makes of the latent.

        The crop is left out without an image, and the decoded picture without a model or a readable
        latent. Any other picture that cannot be made has a note.
        """
        crop = None
        side = latents.resolution
        sizes = shapes_of(latents.manifest.settings) or ((side, side),)
        if image is not None:
            try:
                crop = crop_of(image, sample.facts, sizes)
            except (KeyError, TypeError, ValueError, ZeroDivisionError):
                yield SheetPicture(title="crop", note="its json states no crop", kind="crop")
            else:
                size = format_sides(*crop.size)
                made = thumbnail(crop, "crop", f"the part that was encoded, at {size} pixels")
                yield replace(made, measure=size, kind="crop")
        try:
            latent = latent_of(sample, latents.manifest.settings)
        except FormatError as error:
            yield SheetPicture(title="latent", note=str(error))
            return
        yield draw_latent(latent, f"its latent for {side} pixels in false colours")
        decoding = self.decodings[latents.url]
        if decoding.model is not None:
            yield self._decode(decoding.model, latent, crop)

    def _decode(self, model: Model, latent: Any, crop: Any) -> SheetPicture:
        try:
            shown = image_from_levels(self.decoders.decode(model, latent))
        except WdsprepError as error:
            return SheetPicture(title="decoded", note=str(error))
        same = crop is not None and crop.size == shown.size
        measure = f"{psnr(crop, shown):.1f} dB" if same else format_sides(*shown.size)
        made = thumbnail(shown, "decoded", "what the VAE's decoder makes of the latent")
        return replace(made, measure=measure)


def open_picture(sample: SheetSample, max_area: int) -> tuple[Any, SheetPicture]:
    """Open an image, and return it with its thumbnail, or None with a note that says why."""
    try:
        image = open_image(dict(sample.members), max_area)
    except RejectedError as error:
        note = f"{error.code} {error.detail}".strip()
        return None, SheetPicture(title="original", note=note)
    made = thumbnail(image, "original", "the image")
    return image, replace(made, measure=format_sides(*image.size))


def unread_item(group: str, sample: SheetSample) -> SheetItem:
    """Return the item of a sample that could not be read."""
    name = f"sample {sample.place.number:,} of {sample.place.shard.name}"
    return SheetItem(
        group=group, key=name, caption="", facts=(), pictures=(), problem=sample.problem
    )


def _caption(sample: SheetSample) -> str:
    return sample.member("txt").decode("utf-8", "replace")


def facts_of_image(facts: Mapping[str, Any]) -> FactPairs:
    """Return the facts that the sheet shows of an image, as pairs of texts."""
    found = [("source", str(facts.get("source", "")))]
    if "url" in facts:
        found.append(("url", without_secrets(str(facts["url"]))))
    size, came = ((facts.get(f"{of}width"), facts.get(f"{of}height")) for of in ("", "source_"))
    found.append(("size", format_sides(*size)))
    if came != size:
        found.append(("came as", format_sides(*came)))
    if isinstance(changes := facts.get("changes"), list) and changes:
        found.append(("converted", ", ".join(map(str, changes))))
    if meta := _meta(facts):
        found.append(("meta", meta))
    return tuple(found)


def shown_value(value: Any) -> str:
    """Return the value of a column as text, with four digits of a float."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _meta(facts: Mapping[str, Any]) -> str:
    """Return the metadata from the source, without what the sheet shows already."""
    meta, shown = facts.get("meta"), (facts.get("caption"), facts.get("url"))
    if isinstance(meta, dict):
        meta = {name: value for name, value in meta.items() if value not in shown}
    text = without_secrets(json.dumps(meta, ensure_ascii=False)) if meta else ""
    return text if len(text) <= META_LENGTH else f"{text[:META_LENGTH]}\N{HORIZONTAL ELLIPSIS}"


def facts_of_latent(latents: ReportDataset, facts: Mapping[str, Any]) -> FactPairs:
    if latents.columns:
        return tuple((name, shown_value(facts.get(name))) for name in latents.columns)
    scaled = f"scaled to {format_sides(facts.get('scaled_width'), facts.get('scaled_height'))}"
    crop = facts.get("crop")
    if isinstance(crop, list) and len(crop) == 4:
        scaled += f", cut from {crop[0]}, {crop[1]}"
    parts = [scaled] if latents.has_latents else []
    if tokens := facts.get("tokens"):
        parts.append(f"{tokens} tokens" + (", caption cut" if facts.get("cut") else ""))
    return ((latents.label, "; ".join(parts)),)
