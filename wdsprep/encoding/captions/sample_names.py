"""The keys of the samples of image shards, and the names by which a table of captions lists them.

They stand in the tables of shards that pack made. A tar that another program packed is read, unless
`wdsprep index` has made its table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import pyarrow as pa

from wdsprep.dataset.file_names import foreign_table_name, index_name
from wdsprep.dataset.reindex import is_older
from wdsprep.dataset.sample_table import KEY, REST
from wdsprep.dataset.samples import META, Sample, parse_object, value_at_path
from wdsprep.dataset.shard_reader import NamedShard
from wdsprep.dataset.stored_dataset import dated_manifest, refresh_manifest
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.encoding.captions.sources import replace_surrogates
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.errors import FingerprintError, FormatError, NotFoundError
from wdsprep.sources.tables.parquet import OpenParquet
from wdsprep.sources.tars import TarsSource
from wdsprep.store import shared_store
from wdsprep.store.base import Store
from wdsprep.tables.stored_tables import MOST_THREADS, ForeignTables, StoredTables
from wdsprep.text import command, plural, shown

SOURCE = "source"


class SampleNames(NamedTuple):
    """The keys of the samples of a shard, in order, and the name of each, null if it has none."""

    keys: pa.Array
    names: pa.Array


Tables = Mapping[str, Callable[[], SampleNames]]
"""What reads the table of a shard, by the name of its tar."""


def read_names(
    tars: TarsSource, shards: Sequence[ImageShard], by: str, *, told: Callable[[str], object]
) -> Iterator[SampleNames]:
    """Yield the names of the samples of each shard, up to the number that is to be encoded.

    Of a foreign tar that is damaged, those before the damage: a worker says what is wrong with it.
    """
    store = shared_store(tars.url)
    is_foreign = any(shard.is_foreign for shard in shards)
    tables = (_foreign_tables if is_foreign else _stored_tables)(store, shards, by)
    if bare := sum(shard.item.name not in tables for shard in shards):
        way = f"{command('index', tars.url)} would spare that"
        told(f"{tars.url}: reading {plural(bare, 'tar')} to know their samples; {way}")

    def read(shard: ImageShard) -> SampleNames:
        if not (read_table := tables.get(shard.item.name)):
            return _read_tar(replace(tars, has_images=False), shard, by)
        keys, names = read_table()
        take = shard.item.take or len(keys)
        return SampleNames(keys[:take], names[:take])

    return map_ahead(read, shards, min(store.readers, MOST_THREADS))


def _stored_tables(store: Store, shards: Sequence[ImageShard], by: str) -> Tables:
    manifest = dated_manifest(store)
    there = refresh_manifest(store, manifest) if manifest else None
    known = {shard.name: shard for shard in there.shards} if there else {}
    wanted = {shard.item.name: shard.digest for shard in shards}
    same = [shard for name, shard in known.items() if shard.digest == wanted.get(name)]
    if there is None or len(same) < len(wanted):
        raise FingerprintError(f"{store.url} has just been changed: run the same command again")
    read = partial(StoredTables(store, there, same).read_shard, partial(_read_table, by=by))
    return {shard.name: partial(read, shard) for shard in same}


def _foreign_tables(store: Store, shards: Sequence[ImageShard], by: str) -> Tables:
    folders = {shard.item.name.rpartition("/")[0] for shard in shards}
    listed = (entry for name in folders for entry in store.list(f"{name}/" if name else ""))
    files = {entry.name: entry for entry in listed}
    named = []
    for name, parts in ((shard.item.name, shard.item.parts) for shard in shards):
        index, table = files.get(index_name(name)), files.get(foreign_table_name(name))
        tells_all = by in (KEY, SOURCE) or len(parts) == 1  # and no file of img2dataset tells more
        if tells_all and index and table and not is_older(table, files[name]):
            named.append(NamedShard(name, index.nbytes // 8 - 1))
    tables = ForeignTables(store, named)
    return {
        shard.name: partial(tables.read_shard, partial(_read_table, by=by, tar=shard.name), shard)
        for shard in named
    }


def _read_tar(tars: TarsSource, shard: ImageShard, by: str) -> SampleNames:
    """Return the names of the samples in a foreign tar."""
    keys, names = list[str](), list[str]()
    with suppress(NotFoundError, FormatError):
        for key, row in islice(tars.read_keyed(shard.item), shard.item.take or None):
            keys.append(replace_surrogates(key))
            known = {KEY: key, SOURCE: row.source}
            facts = row.facts if isinstance(row, Sample) else {}
            name = known[by] if by in known else value_at_path(facts, by)
            names.append("" if name is None else replace_surrogates(str(name)))
    return SampleNames(pa.array(keys, pa.string()), pa.array(names, pa.string()))


def _read_table(file: OpenParquet, by: str, tar: str = "") -> SampleNames:
    """Return the names in a table of samples; `tar` is the name of a foreign tar."""
    table = file.read({KEY} if tar and by == SOURCE else {KEY, by})
    if by not in table.column_names:
        keys = table.column(KEY)
        names: list[str | None] = [shown(f"{tar}/{key}") for key in keys.to_pylist()]
    elif table.column(by).null_count:
        table = file.read({KEY, by, REST, META})
        texts = (table.column(name).to_pylist() for name in (by, REST, META))
        names = [_find_name(by, *row) for row in zip(*texts, strict=True)]
    else:
        return SampleNames(*(table.column(name).combine_chunks() for name in (KEY, by)))
    return SampleNames(table.column(KEY).combine_chunks(), pa.array(names, pa.string()))


def _find_name(by: str, own: str | None, rest: str | None, meta: str | None) -> str | None:
    """Return what a sample has in the column `by`, or else in its other facts, as a text."""
    if own is not None or f'"{by}"' not in f"{rest}{meta}":
        return own
    facts = {**(parse_object(rest or "") or {}), META: parse_object(meta or "")}
    found = value_at_path(facts, by)
    return None if found is None else str(found)
