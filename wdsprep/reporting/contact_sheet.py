"""The samples that a report shows: picked in each bucket, or those with extreme scores.

With images and latents, an item is one key: the image as it came, the crop, and for each dataset of
latents what was made of it. With latents alone, an item is a latent sample.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from wdsprep.dataset.samples import TARGET, names_in_roles, roles_of
from wdsprep.dataset.settings import TEXT
from wdsprep.dataset.shapes import shapes_of
from wdsprep.dataset.thread_map import read_each
from wdsprep.errors import FormatError, WdsprepError, without_secrets
from wdsprep.reporting.datasets import (
    Datasets,
    ReadSample,
    ReportDataset,
    SamplePlace,
    find_image,
    find_latent,
    pick,
    read_samples,
)
from wdsprep.reporting.distributions import array_in, latent_of
from wdsprep.reporting.options import ReportOptions
from wdsprep.reporting.pictures import (
    Decoding,
    LoadDecoder,
    SheetPicture,
    crop_of,
    draw_latent,
    draw_levels,
    format_sides,
    open_picture,
    psnr,
    thumbnail,
)
from wdsprep.text import plural

LONGEST_FACT = 400
FactPairs = list[tuple[str, str]]


SheetItem = dict[str, Any]
"""One sample on the contact sheet: key, caption, facts and pictures, or key and `problem`.

`score` is the name and value that it is shown for, if that is why.
"""


def count_items(datasets: Datasets, count: int) -> tuple[int, int]:
    """Count the samples that a report shows, and how many latents they have at most."""
    shown = latents = 0
    for base in _bases(datasets):
        for bucket, shards in base.buckets.items():
            samples = min(count, sum(shard.samples for shard in shards))
            shown += samples
            latents += samples * sum(
                d.has_latents for d in _made_of_bucket(datasets, base, bucket=bucket)
            )
    return shown, latents


def _bases(datasets: Datasets) -> Sequence[ReportDataset]:
    """Return the datasets whose samples become items: the images, or else all latents."""
    return (datasets.images,) if datasets.images else datasets.latents


def _made_of_bucket(datasets: Datasets, base: ReportDataset, *, bucket: str) -> list[ReportDataset]:
    """Return the datasets of latents that were made of a bucket of images, or latents alone."""
    if not base.is_of_images:
        return [base]
    return [latents for latents in datasets.latents if int(bucket) in latents.encoded_buckets(base)]


class Sheet(NamedTuple):
    """The datasets behind a contact sheet, and the tools that make its pictures."""

    datasets: Datasets
    decodings: Mapping[str, Decoding]
    """The model of each dataset of latents, by its path."""
    load_decoder: LoadDecoder
    options: ReportOptions

    def groups(self) -> dict[str, list[SheetItem]]:
        """Return items of each bucket, as many as the options say, by the name of their group."""
        count, seed = self.options.samples, f"sheet {self.options.seed}"
        on_step = self.options.listener_or_mute.on_step
        total, _ = count_items(self.datasets, count)
        groups: dict[str, list[SheetItem]] = {}
        drawn = 0
        for base in _bases(self.datasets):
            for bucket, shards in base.buckets.items():
                name = f"bucket {bucket}" if base.is_of_images else f"{base.shown}, {bucket}"
                for item in self._items(base, bucket, pick(shards, count, f"{seed} {bucket}")):
                    groups.setdefault(name, []).append(item)
                    drawn += 1
                    on_step(f"{drawn:,} of {plural(total, 'sample')} drawn")
        return groups

    def _items(
        self, base: ReportDataset, bucket: str, places: Sequence[SamplePlace]
    ) -> Iterator[SheetItem]:
        samples = read_samples(base, places)
        made = _made_of_bucket(self.datasets, base, bucket=bucket)
        columns = [samples]
        if base.is_of_images:
            columns = [
                read_each(partial(find_latent, latents), samples, latents.store.readers)
                for latents in made
            ]
        for number, sample in enumerate(samples):
            if sample.problem:
                yield unread_item(sample)
                continue
            image, pictures = None, []
            facts = fact_pairs(sample.facts) if base.is_of_images else []
            if base.is_of_images:
                roles = (member.partition(".")[0] for member in sample.members if "." in member)
                opened = [
                    open_picture(sample, self.options.max_area, name=name) for name in ("", *roles)
                ]
                image, pictures = opened[0][0], [picture for _, picture in opened]
            for dataset, latent in zip(made, (column[number] for column in columns), strict=True):
                if latent.problem:
                    facts.append((dataset.label, latent.problem))
                    continue
                facts += fact_pairs(latent.facts, dataset.label)
                if dataset.has_latents:
                    pictures += self._latent_pictures(dataset, latent, image)
                    pictures += self._role_pictures(dataset, latent)
            yield sheet_item(sample, facts, pictures)

    def _latent_pictures(
        self, latents: ReportDataset, sample: ReadSample, image: Any
    ) -> Iterator[SheetPicture]:
        """Yield pictures of the crop, of its latent, and of what the decoder makes of the latent.

        There are none where targets were not encoded. The crop is left out without an image. Any
        other picture that cannot be made has a note.
        """
        settings, crop = latents.manifest.settings, None
        if TARGET not in settings.get("roles", (TARGET,)):
            return
        side = settings["resolution"]
        if image is not None:
            try:
                crop = crop_of(image, sample.facts, shapes_of(settings) or ((side, side),))
            except (KeyError, TypeError, ValueError, ZeroDivisionError):
                yield {"title": "crop", "note": "its json states no crop", "kind": "crop"}
            else:
                size = format_sides(*crop.size)
                alt = f"the part that was encoded, at {size} pixels"
                yield thumbnail(crop, "crop", alt=alt, measure=size) | {"kind": "crop"}
        try:
            latent = latent_of(sample, settings)
        except FormatError as error:
            yield {"title": "latent", "note": str(error)}
            return
        yield draw_latent(latent, "latent", f"its latent for {side} pixels in false colours")
        yield from self._decoded(latents, latent, crop=crop)

    def _role_pictures(self, latents: ReportDataset, sample: ReadSample) -> Iterator[SheetPicture]:
        """Yield pictures of the arrays of images in roles: latents, masks and pixels."""
        for name in names_in_roles(sample.members, roles_of(latents.manifest.settings)):
            try:
                array = array_in(sample, f"{name}.npy")
            except FormatError as error:
                yield {"title": name, "note": str(error)}
                continue
            if array.dtype == np.uint8:
                yield draw_levels(array, name, f"the {name} as it was encoded")
                continue
            yield draw_latent(array, name, f"the latent of the {name} in false colours")
            yield from self._decoded(latents, array, name)

    def _decoded(
        self, latents: ReportDataset, latent: Any, name: str = "", *, crop: Any = None
    ) -> Iterator[SheetPicture]:
        """Yield what the decoder makes of a latent, or a note that says why it makes nothing.

        The latent is of the target, or of the image of this name in a role. There is no picture
        without a model. The measure is the PSNR against `crop`, if it is as large.
        """
        title = f"{name} decoded".strip()
        model, _ = self.decodings[latents.shown]
        if model is None:
            return
        decoder = self.load_decoder(model)
        if isinstance(decoder, WdsprepError):
            yield {"title": title, "note": str(decoder)}
            return
        shown = Image.fromarray(decoder.decode(latent))
        is_like = crop is not None and crop.size == shown.size
        measure = f"{psnr(crop, shown):.1f} dB" if crop and is_like else format_sides(*shown.size)
        alt = f"what the VAE's decoder makes of the {name or 'latent'}"
        yield thumbnail(shown, title, alt=alt, measure=measure)


def sheet_item(sample: ReadSample, facts: FactPairs, pictures: Sequence[SheetPicture]) -> SheetItem:
    """Return the item of a sample with its facts and its pictures."""
    about = {"key": sample.key, "caption": sample.caption}
    return {**about, "facts": facts, "pictures": pictures}


def unread_item(sample: ReadSample) -> SheetItem:
    """Return the item of a sample that could not be read."""
    place = sample.place
    return {"key": f"sample {place.number:,} of {place.shard.name}", "problem": sample.problem}


def fact_pairs(facts: Mapping[str, Any], of: str = "") -> FactPairs:
    """Return the json of a sample as pairs of texts.

    Its key, its caption and what is empty are left out. `of` is put before the names. Long texts
    are cut, and URLs lose their secrets.
    """
    pairs = []
    for name, value in facts.items():
        if name not in ("key", "caption") and value not in ("", [], {}):
            text = without_secrets(_shown_value(value))
            short = text if len(text) <= LONGEST_FACT else f"{text[:LONGEST_FACT]}…"
            pairs.append((f"{of} {name}".strip(), short))
    return pairs


def _shown_value(value: Any) -> str:
    """Return a value as text, with four digits of a float."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


EACH = 4
"""The number of samples that are shown of each end."""
MOST_COLUMNS = 12


def column_ends(
    images: ReportDataset | None,
    scores: ReportDataset,
    *,
    samples: Sequence[ReadSample],
    max_area: int,
) -> Iterator[dict[str, Any]]:
    """Yield the samples with the lowest and highest numbers of each column, of those given.

    `compared` counts the samples that were compared. Only the first MOST_COLUMNS columns of numbers
    are looked at. Without images there are none.
    """
    if images is None:
        return

    def item(column: str, sample: ReadSample) -> SheetItem:
        image = find_image(images, scores, sample)
        shown = {"key": sample.key, "score": (column, _shown_value(sample.facts[column]))}
        if image.problem:
            return {**shown, "problem": image.problem}
        pictures = [open_picture(image, max_area)[1]]
        return sheet_item(image, fact_pairs(sample.facts), pictures) | shown

    numeric = [name for name, holds in scores.columns.items() if holds != TEXT]
    for column in numeric[:MOST_COLUMNS]:
        known = [sample for sample in samples if isinstance(sample.facts.get(column), int | float)]
        known.sort(key=lambda sample, column=column: (sample.facts[column], sample.key))  # type: ignore[misc]
        if items := min(EACH, len(known) // 2):
            low, high = (
                [item(column, sample) for sample in end] for end in (known[:items], known[-items:])
            )
            yield {"column": column, "low": low, "high": high, "compared": len(known)}
