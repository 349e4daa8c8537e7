"""Select samples of a dataset: those of a shape, of a condition, or of some shards.

To the order, each selection is a dataset of its own. Its digest says which samples it has and what
they were made of, not where they lie. So stored latents and latents made on the fly have the same
order.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.sample_selection import (
    SampleSelection,
    digest_of_selected,
    digest_of_shape,
    digest_of_shards,
)
from wdsprep.dataset.shapes import Size, shape_name
from wdsprep.loading.served_datasets import Dataset


def split_by_shape(
    whole: Dataset,
    shapes: Sequence[Size],
    counts: NDArray[np.int32],
    selection: SampleSelection | None = None,
) -> tuple[Dataset, ...]:
    """Return a dataset for each shape that has samples.

    `counts` has a row for each shard, or for each run of `selection`: how many samples of each
    shape stand in it, one shape after another.
    """
    parts = (selection or whole.selection).split(counts)
    return tuple(
        _with_selection(whole, part, digest_of_shape(whole.digest, shape_name(size), own), size)
        for size, own, part in zip(shapes, counts.T, parts, strict=True)
        if len(part.shards)
    )


def latents_without_rejects(
    images: Dataset,
    settings: Mapping[str, Any],
    shapes: Sequence[Size],
    counts: NDArray[np.int32],
    selection: SampleSelection,
) -> tuple[Dataset, ...]:
    """Return the latents that images will become, without the rejected images.

    There is a dataset for each shape. `counts` and `selection` have a row and a run for each
    shard, without its rejects, as in `split_by_shape`. Without shapes, `counts` has one column,
    and all latents are one dataset.
    """
    left = np.flatnonzero(counts.any(axis=1)).astype(np.int32)
    sizes = counts[left].sum(axis=1, dtype=np.int64)
    images = select_shards(images, left)
    whole = replace(
        images,
        kind="latents",
        selection=SampleSelection.all_of(sizes),
        digest=digest_of_shards(zip(images.names, sizes.tolist(), images.contents, strict=True)),
        settings=settings,
        images=images,
    )
    selection = replace(selection.pick(left), shards=np.arange(len(left), dtype=np.int32))
    if shapes:
        return split_by_shape(whole, shapes, counts[left], selection)
    return (_with_selection(whole, replace(selection, counts=sizes), whole.digest),)


def select_shards(dataset: Dataset, shards: Iterable[int]) -> Dataset:
    """Return a dataset of these shards only."""
    some = list(map(int, shards))
    names, contents = (tuple(each[n] for n in some) for each in (dataset.names, dataset.contents))
    made_of = tuple(dataset.made_of[n] for n in some) if dataset.made_of else ()
    sizes = dataset.sizes[some]
    return replace(
        dataset,
        names=names,
        selection=SampleSelection.all_of(sizes),
        contents=contents,
        made_of=made_of,
        inputs=dataset.inputs[some] if len(dataset.inputs) else dataset.inputs,
        nbytes=round(dataset.nbytes * (int(sizes.sum()) / dataset.samples)),
        digest=digest_of_shards(zip(names, sizes.tolist(), contents, strict=True)),
    )


def select(dataset: Dataset, keep: SampleSelection) -> Dataset | None:
    """Return the samples of a dataset that `keep` selects, or None if there are none.

    `keep` has a run for each shard of `dataset.whole`, with the numbers of samples in the tar.
    """
    own = dataset.selection
    left = own.intersect(keep)
    if not left.samples:
        return None
    digest = digest_of_selected(dataset.digest, own, left, len(dataset.names))
    return _with_selection(dataset, left, digest, dataset.size)


def _with_selection(
    dataset: Dataset, selection: SampleSelection, digest: str, size: Size | None = None
) -> Dataset:
    """Return a dataset with this selection, also of the images that it is made from."""
    images = dataset.images
    return replace(
        dataset,
        selection=selection,
        nbytes=round(dataset.nbytes * (selection.samples / dataset.samples)),
        digest=digest,
        size=size,
        part_of=dataset.whole,
        images=None if images is None else _with_selection(images, selection, digest, size),
    )
