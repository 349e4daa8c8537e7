"""Lay out the columns of tables and scores that are joined to a dataset (`tables.lay_out`)."""

from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial

import numpy as np
import pyarrow as pa

from wdsprep.dataset.samples import value_at_path
from wdsprep.dataset.score_columns import NUMBER, TEXT, WHOLE, columns_of, is_of_kind
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import FormatError, UsageError
from wdsprep.loading.sample_metadata import MetadataBlock, read_metadata, scan_metadata
from wdsprep.loading.served_datasets import Dataset, JoinedDataset
from wdsprep.loading.shard_access.sample_cache import CacheDir, cache_folder
from wdsprep.sources.patterns import is_table
from wdsprep.tables.laid_out import LaidOut
from wdsprep.tables.lay_out import JoinedSamples, lay_out_scores, lay_out_table
from wdsprep.tables.other_tables import WantedColumns, encode_names
from wdsprep.text import brief, shown

TYPES = {NUMBER: pa.float64(), WHOLE: pa.int64(), TEXT: pa.string()}


def lay_out_joined(
    dataset: Dataset, cache: CacheDir | None, *, named: Collection[str], for_batches: bool
) -> tuple[LaidOut, ...]:
    """Return the columns of all tables, and datasets of scores, that are joined to a dataset.

    They are the columns that are `named`, and `for_batches` all columns of numbers.
    """
    wanted = WantedColumns({*named}, for_batches)
    files, folder = dataset.whole.files, cache_folder(cache)
    samples = JoinedSamples(
        url=files.store.url,
        sizes=files.sizes,
        contents=(*files.names, *files.contents),
        read_names=partial(_read_names, files),
    )
    places = dict.fromkeys(place for place in dataset.join if is_table(place))
    laid_out = [lay_out_table(place, samples, folder, wanted=wanted) for place in places]
    for other in dataset.joined:
        if other.dataset.has_columns:
            whole = other.dataset.whole
            scores = lay_out_scores(
                whole.store.url,
                (*whole.names, *whole.contents),
                columns_of(whole.settings),
                samples,
                folder,
                wanted=wanted,
                read=partial(_read_scores, files, other),
            )
            laid_out.append(scores)
    there = Counter(name for columns in laid_out for name in columns.numbers)
    if twice := sorted(name for name, count in there.items() if count > 1):
        raise UsageError(f"two joined tables have a column {twice[0]}: leave one out")
    return tuple(laid_out)


def _read_names(files: Dataset, by: str) -> Iterator[pa.Array]:
    """Yield a column of names of the samples of each shard."""

    def names(some: MetadataBlock) -> pa.Array:
        if by == "key":
            return encode_names(some.keys)
        values = [value_at_path(facts, (by,)) for facts in some.facts]
        return encode_names([None if value is None else str(value) for value in values])

    for _, pieces in scan_metadata(files, names, parses=by != "key"):
        yield from pieces


def _read_scores(
    files: Dataset, other: JoinedDataset, names: Collection[str]
) -> Iterator[pa.Table]:
    """Yield the scores of the samples of each shard, null for samples that have none."""
    shards = range(len(files.names))
    return map_ahead(partial(_read_shard, files, other, names), shards, files.store.readers)


def _read_shard(
    files: Dataset, other: JoinedDataset, names: Collection[str], shard: int
) -> pa.Table:
    count = int(files.sizes[shard])
    shards, places = other.positions.locate(np.full(count, shard), np.arange(count))
    kinds = columns_of(other.dataset.settings)
    schema = pa.schema([(name, TYPES[kinds[name]]) for name in names])
    if not count or shards[0] < 0:
        return pa.table([pa.nulls(count, field.type) for field in schema], schema)
    blocks = read_metadata(other.dataset.whole, int(shards[0]))
    pairs = [
        (key, {n: (facts or {}).get(n) for n in names})
        for block in blocks
        for key, facts in zip(block.keys, block.facts, strict=True)
    ]
    for key, values in pairs:
        for name, value in values.items():
            if value is not None and not is_of_kind(value, kinds[name]):
                raise FormatError(
                    f"{other.dataset.store.url} has a column {name} of kind {kinds[name]}, but the "
                    f"sample {shown(key)} has {brief(value)} in it"
                ).with_next_step("score again, or leave these scores out")
    rows = pa.Table.from_pylist([values for _, values in pairs], schema)
    lacking = places >= len(rows)
    return rows.take(pa.array(np.where(lacking, 0, places), mask=lacking))
