"""Find out which latents the images will be, before any image is opened.

Squares of a bucket's size are easy: every image of the bucket is large enough for one, so the
samples are those of the image shards. If squares are larger, if there are shapes, or if a crop may
lose only so much, the widths and heights in the tables of samples decide. They say which shape an
image gets, or that it is rejected, as `encode` would decide (`Shapes.fit`). They are read once, and
two things are kept: how many samples of each shard have which shape, and which samples these are.
From there on everything is as with stored latents.
"""

import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from wdsprep.dataset.kept_file import KeptWriter, open_or_make
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.sample_selection import SampleSelection, ShardSamples, keep_selection
from wdsprep.dataset.shapes import Size, shape_name, shapes_of
from wdsprep.errors import UsageError
from wdsprep.images.nearest_shape import Shapes, cut_of
from wdsprep.loading.open_datasets import latents_of_images, latents_without_rejects
from wdsprep.loading.sample_cache import CacheDir, cache_folder
from wdsprep.loading.served_datasets import Dataset
from wdsprep.text import plural

SIDES = ("width", "height")
NO_SHAPE = -1
"""The number that stands for no shape: the image is rejected."""
_log = logging.getLogger("wdsprep")


def find_latent_shapes(
    images: Dataset, settings: Mapping[str, Any], cache: CacheDir | None
) -> tuple[Dataset, ...]:
    """Return the latents that images will become: a dataset for each of their shapes.

    If all are squares, that is a single dataset. Images whose size `encode` would reject are left
    out, and a warning counts them.
    """
    latents = latents_of_images(images, settings)
    shapes = shapes_of(settings)
    if not shapes and settings.get("max_crop", 1.0) == 1 and _all_hold_square(latents):
        return (latents,)
    chosen, cut = latents.files, cut_of(settings)
    what = "shapes", *chosen.names, *chosen.contents, repr(cut)
    found = open_or_make(
        cache_folder(cache), what, lambda writer, path: _find_shapes(chosen, cut, writer, path)
    )
    counts = found.arrays["counts"].reshape(-1, len(cut.sizes))
    if not counts.any():
        raise UsageError(
            f"all images of {images.store.url} are too small or would lose too much: choose a "
            "lower resolution, other shapes, a greater max_crop or upscale"
        )
    if rejected := chosen.samples - int(counts.sum()):
        _log.warning(
            "%s: left out %s of %s, which are too small (upscale= takes some) or would lose more "
            "than max_crop",
            images.store.url,
            plural(rejected, "image"),
            f"{chosen.samples:,}",
        )
    sizes = cut.sizes if shapes else ()
    return latents_without_rejects(
        chosen, settings, sizes, counts, SampleSelection.from_file(found)
    )


def _all_hold_square(latents: Dataset) -> bool:
    """Return whether every image is large enough for the square, according to the buckets alone."""
    buckets = {int(name.partition("/")[0]) for name in latents.names}
    resolution: int = latents.settings["resolution"]
    return min(buckets) >= resolution


def _find_shapes(images: Dataset, cut: Shapes, writer: KeptWriter, path: Path) -> None:
    from wdsprep.loading.dataset_tables import open_tables  # pyarrow and DuckDB, which few need

    _log.info(
        "%s: reading the sizes of %s for %s; their shapes are kept in %s",
        images.store.url,
        plural(images.samples, "image"),
        ", ".join(map(shape_name, cut.sizes)),
        path,
    )
    fit = lru_cache(1 << 16)(lambda size: _shape(cut, size))
    counts = np.zeros((len(images.names), len(cut.sizes)), np.int32)

    def group_by_shape() -> Iterator[ShardSamples]:
        for shard, table in enumerate(open_tables(images).columns(SIDES)):
            sides = ([length or 0 for length in table[side].to_pylist()] for side in SIDES)
            found = np.array([*map(fit, zip(*sides, strict=True))], np.int16)
            by_shape = np.argsort(found, kind="stable")
            own = by_shape[found[by_shape] != NO_SHAPE].astype(np.uint32)
            counts[shard] = np.bincount(found[own], minlength=len(cut.sizes))
            yield ShardSamples(shard, own)

    keep_selection(writer, len(images.names), group_by_shape())
    writer.add("counts", "<i4", [counts])


def _shape(cut: Shapes, size: Size) -> int:
    """Return the number of the shape that an image of this size gets, or NO_SHAPE.

    A size is 0 where the table lacks it.
    """
    try:
        fit = cut.fit(*size) if min(size) > 0 else None
    except RejectedError:
        fit = None
    return NO_SHAPE if fit is None else cut.sizes.index((fit.width, fit.height))
