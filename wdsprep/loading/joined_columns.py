"""Lay out the columns of tables and scores that are joined to a dataset (`tables.lay_out`)."""

from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from wdsprep.dataset.sample_table import KEY, table_schema
from wdsprep.dataset.score_columns import TEXT, columns_of
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import UsageError
from wdsprep.loading.dataset_tables import TablesBeside, open_tables
from wdsprep.loading.served_datasets import Dataset, JoinedDataset
from wdsprep.loading.shard_access.sample_cache import CacheDir, cache_folder
from wdsprep.sources.patterns import is_table
from wdsprep.tables.key_join import NAMES
from wdsprep.tables.laid_out import LaidOut
from wdsprep.tables.lay_out import JoinedSamples, lay_out_scores, lay_out_table
from wdsprep.tables.other_tables import WantedColumns, encode_names
from wdsprep.tables.query import read_texts


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


def _read_names(files: Dataset, by: str) -> Iterator[pa.Array | pa.ChunkedArray]:
    """Yield a column of names of the samples of each shard."""
    tables = open_tables(files)
    columns = tables.read(partial(read_texts, name=by))
    for shard, names in zip(tables.shards, columns, strict=True):
        if by == KEY and pc.any(pc.match_substring(names, "?")).as_py():
            # Tables have it in place of bytes that are not UTF-8, which tell keys apart.
            with ShardReader(files.store, shard, is_foreign=files.kind == "tars") as reader:
                yield encode_names([*reader.keys()])
        else:
            yield names.cast(pa.large_string()).cast(NAMES)


def _read_scores(
    files: Dataset, other: JoinedDataset, names: Collection[str]
) -> Iterator[pa.Table]:
    """Yield the scores of the samples of each shard, null for samples that have none."""
    kinds = {KEY: TEXT, **columns_of(other.dataset.settings)}
    columns = {name: kinds[name] for name in names or [KEY]}
    beside, lacking = TablesBeside(other), table_schema(columns).empty_table()

    def read(shard: int) -> pa.Table:
        count = int(files.sizes[shard])
        rows = beside.read(lambda file: file.read(columns), shard, count)
        return lacking.take(pa.nulls(count, pa.int64())) if rows is None else rows

    return map_ahead(read, range(len(files.names)), beside.tables.threads)
