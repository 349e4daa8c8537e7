"""The captions that a table has for the samples of each unit, laid out before the work begins.

One join finds the rows of all samples. Then each unit that is to be made has its captions in a file
of its dataset (`unit_captions`), so a worker, wherever it runs, reads those of its unit alone.

A record beside these files says what was joined. So a run that continues reads the table again only
if its files have another size or date, or if there are other image shards.

`read_names` reads the keys of samples, and the names by which a table may list them. They stand in
the tables of shards that pack made. A tar that another program packed is read, unless `wdsprep
index` has made its table.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdsprep.dataset.file_names import (
    CAPTION_TABLE,
    CAPTIONS,
    captions_name,
    foreign_table_name,
    index_name,
)
from wdsprep.dataset.manifest import Shard
from wdsprep.dataset.reindex import is_older
from wdsprep.dataset.sample_table import KEY
from wdsprep.dataset.samples import Sample, value_at_path
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.stored_dataset import dated_manifest, refresh_manifest
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.encoding.captions.options import replace_surrogates
from wdsprep.encoding.captions.table import CaptionRecord, CaptionTable
from wdsprep.encoding.captions.unit_captions import CAPTION, SCHEMA, encode_captions
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.errors import FingerprintError, FormatError, NotFoundError, SourceError, UsageError
from wdsprep.sources.tables.parquet import OpenParquet
from wdsprep.sources.tables.text import BY
from wdsprep.sources.tars import TarsSource
from wdsprep.store import open_store, shared_store
from wdsprep.store.base import Store, write_bytes
from wdsprep.store.spool import Place, Spool
from wdsprep.tables.key_join import CHOICE, NAME, SAMPLE, KeyJoin, open_join
from wdsprep.tables.query import read_texts
from wdsprep.tables.stored_tables import MOST_THREADS, ShardTables
from wdsprep.text import EXAMPLES, command, plural, shortened, shown

KEYS = pa.schema([(KEY, pa.string())])
NOTHING = np.zeros(0, np.int64), pa.nulls(0, pa.string())
WAITING = "keys of samples wait there for their captions"


CaptionedDataset = tuple[str, Sequence[ImageShard], Collection[tuple[str, str]]]
"""The place of a dataset with captions of a table, all its image shards, and the name and input of
each that it lacks."""


class CaptionLayout:
    """The captions of a table for the datasets of a run, which have image shards in `tars`.

    The table is read at once if its digest is not known from records that are kept, and later if
    captions have to be laid out. `told` gets lines for the user.
    """

    def __init__(
        self,
        table: CaptionTable,
        tars: TarsSource,
        places: Sequence[str],
        *,
        is_kept: bool,
        told: Callable[[str], object],
    ) -> None:
        self.table, self._tars, self._told = table, tars, told
        self._closing = ExitStack()
        self._spool = self._closing.enter_context(closing(Spool(WAITING)))
        self._join: KeyJoin | None = None
        self._datasets: Sequence[CaptionedDataset] = ()
        self._units: list[tuple[ImageShard, Place]] = []
        records = (CaptionRecord.of(open_store(place)) if is_kept else None for place in places)
        self.records = dict(zip(places, records, strict=True))
        known = {
            record.digest if record and record.identity == table.identity else ""
            for record in self.records.values()
        }
        self.digest = (known.pop() if len(known) == 1 else "") or self._read()

    def _read(self) -> str:
        """Read the table into a join, and return its digest."""
        table = self.table
        self._told(f"{table.url}: reading captions by {table.by}; they are kept beside the shards")
        rows = 0
        self._join = join = self._closing.enter_context(open_join())
        for count, names, captions in table.read():
            rows += count
            join.add(pa.array(names, pa.string()), {CAPTION: pa.array(captions, pa.large_string())})
        if not join.rows:
            none = "no row" if not rows else f"no row with a {table.by} and a {table.column}"
            raise SourceError(f"{table.url} has {none}: give the path of a table of captions")
        join.find_first()
        twice, examples = join.repeated_names(EXAMPLES)
        self._read_record = CaptionRecord(
            identity=table.identity,
            digest=join.digest(CAPTION),
            shards="0",  # until samples are joined
            rows=rows,
            blank=rows - join.rows,
            twice=twice,
            twice_examples=_texts(examples),
        )
        return self._read_record.digest

    def match(self, datasets: Sequence[CaptionedDataset]) -> None:
        """Find the captions of all samples, unless all that are needed are laid out.

        Nothing is written to the datasets. Raise UsageError if there are samples, and the table
        lists none of them, and SourceError if the table has just changed.
        """
        self._datasets = datasets
        shards = {_unit(shard): shard for _, shards, _ in datasets for shard in shards}
        self._shards_digest = hex_digest("\n".join(map(" ".join, sorted(shards))).encode())
        if self._join is None:
            if all(map(self._is_laid_out, datasets)):
                return
            if self._read() != self.digest:
                raise SourceError(f"{self.table.url} has just changed: run the same command again")
        assert self._join is not None  # noqa: S101  for mypy: it was read
        self._keyed = self._named = 0
        self._example = ""
        is_any = self._join.match(self._samples([shards[unit] for unit in sorted(shards)]))
        if self._keyed and not self._named:  # else workers say why no tar can be read
            raise UsageError(
                f"no sample of {self._tars.url} has a {self.table.by}, by which --captions lists "
                f"them: give a table with another of {', '.join(BY)} (images have the last one if "
                "they were packed with --compute-hash sha256)"
            )
        if self._named and not is_any:
            listed, by = _texts(self._join.unused(1)[1])[0], self.table.by
            raise UsageError(
                f"{self.table.url} lists no sample of {self._tars.url}: each {by} is such as "
                f"{shortened(listed)!r} there, and such as {shortened(self._example)!r} here: "
                "write both alike, or give another table"
            )

    def _is_laid_out(self, dataset: CaptionedDataset) -> bool:
        """Return whether a dataset has the captions of all units that it lacks."""
        place, _, pending = dataset
        store, record = open_store(place), self.records[place]
        if record is None or record.shards != self._shards_digest:
            return False
        there = {entry.name for entry in store.list(CAPTIONS)} if pending else set()
        return all(captions_name(unit) in there for unit, _ in pending)

    def _samples(self, shards: Sequence[ImageShard]) -> Iterator[pa.RecordBatch]:
        """Yield the names of the samples of all shards with the number of each, and keep its key.

        If the table lists keys, those of digits come without leading zeros as well, since tables
        that store keys as numbers lose them. They count if a key as it is has no row.
        """
        start = 0
        every = read_names(self._tars, shards, self.table.by, told=self._told)
        for shard, (keys, names) in zip(shards, every, strict=True):
            data = memoryview(pa.record_batch([keys], [KEY]).serialize())
            self._units.append((shard, self._spool.put(data)))
            numbers = pa.array(np.arange(start, start := start + len(keys)))
            has_name = pc.greater(pc.fill_null(pc.binary_length(names), 0), 0)
            self._keyed += pc.sum(pc.greater(pc.binary_length(keys), 0)).as_py() or 0
            self._named += pc.sum(has_name).as_py() or 0
            samples = pa.table({NAME: names, SAMPLE: numbers}).filter(has_name)
            if not self._example and len(samples):
                self._example = samples[NAME][0].as_py()
            if self.table.by == KEY:
                own = samples[NAME]
                samples = samples.append_column(CHOICE, pa.array(np.zeros(len(own), np.int64)))
                is_padded = pc.and_(pc.starts_with(own, "0"), pc.utf8_is_decimal(own))
                padded = samples.filter(is_padded)
                short = pc.utf8_ltrim(padded[NAME], "0")
                short = pc.if_else(pc.equal(short, ""), "0", short)
                second = pa.array(np.ones(len(short), np.int64))
                columns = {NAME: short, SAMPLE: padded[SAMPLE], CHOICE: second}
                samples = pa.concat_tables([samples, pa.table(columns)])
            yield from filter(len, samples.to_batches())

    def put(self, stores: Mapping[str, Store]) -> None:
        """Write for each dataset the captions of the units that lack theirs, then its record.

        `stores` has the stores of the datasets by their places.
        """
        if not self._units or self._join is None:
            return
        unnamed: dict[str, list[str]] = {place: [] for place, _, _ in self._datasets}
        threads = max(store.readers for store in stores.values())
        for _ in map_ahead(lambda job: write_bytes(*job), self._jobs(stores, unnamed), threads):
            pass
        unused, examples = self._join.unused(EXAMPLES)
        for place, _, _ in self._datasets:
            record = replace(
                self._read_record,
                shards=self._shards_digest,
                unused=unused,
                unused_examples=_texts(examples),
                unnamed_examples=tuple(unnamed[place]),
            )
            data = json.dumps(asdict(record), indent=1).encode() + b"\n"
            write_bytes(stores[place], CAPTION_TABLE, data)
            self.records[place] = record

    def _jobs(
        self, stores: Mapping[str, Store], unnamed: Mapping[str, list[str]]
    ) -> Iterator[tuple[Store, str, bytes]]:
        """Yield the files to write; note in `unnamed` some keys of each dataset without caption."""
        wanted = {place: {*map(_unit, shards)} for place, shards, _ in self._datasets}
        for shard, rows in self._laid_out():
            data = b""
            for place, _, pending in self._datasets:
                unit, examples = _unit(shard), unnamed[place]
                if unit in wanted[place] and len(examples) < EXAMPLES:
                    lacking = rows.filter(pc.is_null(rows[CAPTION]))[KEY]
                    examples += lacking.slice(0, EXAMPLES - len(examples)).to_pylist()
                if unit in pending:
                    data = data or encode_captions(rows, self.digest, shard)
                    yield stores[place], captions_name(shard.name), data

    def _laid_out(self) -> Iterator[tuple[ImageShard, pa.Table]]:
        """Yield the keys and captions of the samples of each shard."""
        assert self._join is not None  # noqa: S101  for mypy: `put` has looked
        found = ((samples, own[CAPTION]) for samples, _, own in self._join.read([CAPTION]))
        numbers, texts = next(found, NOTHING)
        start = 0
        for shard, place in self._units:
            batch = pa.ipc.read_record_batch(pa.py_buffer(self._spool.get(place)), KEYS)
            keys = batch.column(0)
            places, end = np.full(len(keys), -1), start + len(keys)
            captions: list[pa.Array] = []
            while count := int(np.searchsorted(numbers, end)):
                before = sum(map(len, captions))
                places[numbers[:count] - start] = np.arange(before, before + count)
                captions.append(texts[:count].cast(pa.string()))
                numbers, texts = numbers[count:], texts[count:]
                if not len(numbers):
                    numbers, texts = next(found, NOTHING)
            column = pa.chunked_array(captions, pa.string()).take(pa.array(places, mask=places < 0))
            yield shard, pa.table([keys, column], schema=SCHEMA)
            start = end

    def close(self) -> None:
        """Drop all but the records: the names of a million shards take half a GB."""
        self._closing.close()
        self._join, self._datasets = None, ()
        self._units.clear()


def _unit(shard: ImageShard) -> tuple[str, str]:
    return shard.name, shard.input


def _texts(names: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(name.decode("utf-8", "replace") for name in names)


SOURCE = "source"


SampleNames = tuple[pa.Array, pa.Array]
"""The keys of the samples of a shard, in order, and the name of each, null if it has none."""
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
        return keys[:take], names[:take]

    return map_ahead(read, shards, min(store.readers, MOST_THREADS))


def _stored_tables(store: Store, shards: Sequence[ImageShard], by: str) -> Tables:
    manifest = dated_manifest(store)
    there = refresh_manifest(store, manifest) if manifest else None
    known = {shard.name: shard for shard in there.shards} if there else {}
    wanted = {shard.item.name: shard.digest for shard in shards}
    same = [shard for name, shard in known.items() if shard.digest == wanted.get(name)]
    if there is None or len(same) < len(wanted):
        raise FingerprintError(f"{store.url} has just been changed: run the same command again")
    read = partial(ShardTables(store, same, there).read_shard, partial(_read_table, by=by))
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
            named.append(Shard(name, index.nbytes // 8 - 1))
    tables = ShardTables(store, named)
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
    return pa.array(keys, pa.string()), pa.array(names, pa.string())


def _read_table(file: OpenParquet, by: str, tar: str = "") -> SampleNames:
    """Return the names in a table of samples; `tar` is the name of a foreign tar."""
    keys = file.read({KEY}).column(KEY).combine_chunks()
    if tar and by == SOURCE:
        return keys, pa.array([shown(f"{tar}/{key}") for key in keys.to_pylist()])
    return keys, keys if by == KEY else read_texts(file, by).combine_chunks()
