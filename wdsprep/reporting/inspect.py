"""`inspect`: what a dataset is, by its manifest alone, or its samples, by a few small reads.

Samples are found in the tables beside the shards, also those that meet a condition. A key of `pack`
begins with the number of its slice, as the name of its shard does, so few tables are read, whatever
the size of the dataset. Other keys follow no rule, and are looked for in all tables.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any, ParamSpec, cast

from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.file_names import SELECTION
from wdsprep.dataset.manifest import Manifest, Shard
from wdsprep.dataset.npy_arrays import BFLOAT16, field_of, values_of
from wdsprep.dataset.rejects import Reject, rejects_in
from wdsprep.dataset.samples import parse_object
from wdsprep.dataset.shapes import cut_size, shape_name, shapes_of
from wdsprep.dataset.shard_reader import open_shard
from wdsprep.dataset.stored_dataset import open_dataset
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import DamageError, FormatError, NotFoundError, UsageError
from wdsprep.options import OverloadedFunction, takes_options
from wdsprep.reporting.options import InspectOptions, OverviewOptions
from wdsprep.reporting.overview import Overview
from wdsprep.store import open_store
from wdsprep.store.base import Store, write_bytes
from wdsprep.tables.stored_tables import read_keys
from wdsprep.text import plural

SHOWN = ("key", "width", "height", "caption")


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchingSamples:
    """The samples of a dataset that meet a condition: how many of all, and the first of them.

    Each of the first has its `shard`, its `number` there, `key`, `width`, `height` and `caption`.
    """

    dataset: str
    where: str
    matching: int
    samples: int
    first: tuple[Mapping[str, Any], ...]

    def __repr__(self) -> str:
        of = f"{self.matching:,} of {plural(self.samples, 'sample')}"
        return f"<MatchingSamples {self.dataset!r}: {of} meet {self.where!r}>"

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "first": list(self.first),
            "matching": self.matching,
            "samples": self.samples,
            "where": self.where,
        }


def _find_matching(options: InspectOptions) -> MatchingSamples:
    """Return how many samples meet the condition, and the first `limit` of them."""
    # DuckDB takes 0.2 s, which few need
    from wdsprep.changes.merged_datasets import select_samples
    from wdsprep.loading.open_datasets import join_places

    subset = select_samples(os.fspath(options.dataset), join_places(options.join), options.where)
    search = subset.search()
    shards = search.tables.shards
    numbers: dict[int, list[int]] = {}
    matching = 0
    for count, (mask, _, _) in enumerate(search.run()):
        options.heard(count + 1, len(shards))
        left = max(0, options.limit - matching)
        if first_numbers := mask.nonzero()[0][:left].tolist():
            numbers[count] = first_numbers
        matching += int(mask.sum())
    shown = search.tables.read(methodcaller("read", SHOWN), [shards[number] for number in numbers])
    first = [
        {"shard": shards[shard].name, "number": number, **dict.fromkeys(SHOWN), **row}
        for (shard, there), table in zip(numbers.items(), shown, strict=True)
        for number, row in zip(there, table.take(there).to_pylist(), strict=True)
    ]
    return MatchingSamples(
        dataset=subset.whole.store.url,
        where=options.where,
        matching=matching,
        samples=subset.whole.samples,
        first=tuple(first),
    )


P = ParamSpec("P")
Q = ParamSpec("Q")


def _overloaded(
    _whole: Callable[P, OverviewOptions], _sample: Callable[Q, InspectOptions]
) -> "Callable[[object], OverloadedFunction[P, Overview, Q, Inspected]]":
    """Tell type checkers that `inspect` returns an overview, or samples if it is told which."""
    return lambda function: cast("Any", function)


@_overloaded(OverviewOptions, InspectOptions)
@takes_options(InspectOptions)
def inspect(options: InspectOptions) -> "Inspected":
    """Return an overview of a dataset, or the sample with the key `key`, or its reject.

    With `where`, return how many samples meet that condition, and the first `limit` of them. The
    condition may name columns of the scores and tables in `join`.

        wdsprep.inspect("shards/images").facts["phases"]
        wdsprep.inspect("shards/images", "000000000012").facts
        wdsprep.inspect("shards/images", where="width >= 768").first
        webdataset.WebDataset(wdsprep.inspect("shards/images").urls, shardshuffle=100)

    `out` is a folder, or a URL of a bucket, to write the members of the sample to.
    `heard` gets the number of shards looked at, and of all.
    """
    dataset, out, key = os.fspath(options.dataset), os.fspath(options.out), options.key
    if out and not key:
        raise UsageError("-o writes the sample with a KEY: give the KEY too")
    if options.where and key:
        raise UsageError("--where finds samples by a condition: leave out KEY")
    if (options.join or options.limit != InspectOptions.limit) and not options.where:
        raise UsageError("--join and --limit are for --where: give a condition too")
    if options.where:
        return _find_matching(options)
    store, manifest = open_dataset(dataset)
    if not key:
        return Overview(dataset=dataset, manifest=manifest)
    found = find_sample(
        store, manifest, key, lambda count: options.heard(count, len(manifest.shards))
    )
    if out and isinstance(found, FoundSample):
        found = replace(found, written=tuple(found.write(out)))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSample:
    """A sample that was found by its key: its place, and the bytes of its members.

    It is number `number` in `shard`, and begins at the byte `start`. `shape` is empty unless the
    dataset has several shapes.
    """

    key: str
    shard: str
    number: int
    start: int
    shape: str
    members: Mapping[str, bytes]
    written: tuple[str, ...] = ()

    def __repr__(self) -> str:
        names = ", ".join(self.members)
        return f"<FoundSample {self.key!r}: {self.number:,} of {self.shard}: {names}>"

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "json": parse_object(self.members.get("json", b"")) or {},
            "key": self.key,
            "members": {name: member_facts(name, data) for name, data in self.members.items()},
            "number": self.number,
            "shape": self.shape,
            "shard": self.shard,
            "start": self.start,
        }

    def write(self, folder: str) -> list[str]:
        """Write the members as files into a folder or a bucket, and return their URLs.

        The last part of the key names them, so no key leads out of the folder.
        """
        store = open_store(folder)
        stem = self.key.rpartition("/")[2]
        named = {f"{stem}.{name}": data for name, data in self.members.items()}
        for name, data in named.items():
            write_bytes(store, name, data)
        return [f"{store.url}/{name}" for name in named]


Inspected = Overview | FoundSample | Reject | MatchingSamples


def member_facts(name: str, data: bytes) -> dict[str, Any]:
    """Return the size of a member; for an array also its shape, dtype and statistics.

    An array that cannot be read has its `problem` instead of these.
    """
    facts: dict[str, Any] = {"nbytes": len(data)}
    if name.endswith(".npy"):
        try:
            item = field_of(name, data)
        except FormatError as error:
            return facts | {"problem": str(error)}
        import numpy as np

        array = values_of(item, data)
        values = array.astype(np.float64)
        sound = values[np.isfinite(values)]
        dtype = BFLOAT16 if item.dtype == BFLOAT16 else str(array.dtype)
        facts |= {"dtype": dtype, "finite": sound.size == values.size, "shape": list(item.shape)}
        if sound.size:
            measures = {"max": sound.max(), "mean": sound.mean(), "min": sound.min()}
            measures["std"] = sound.std()
            facts |= {measure: float(value) for measure, value in measures.items()}
    return facts


def find_sample(
    store: Store, manifest: Manifest, key: str, heard: Callable[[int], None]
) -> FoundSample | Reject:
    """Return the sample with a key, or its reject. Raise NotFoundError if there is neither.

    The shards that the key names are searched first, then all others if any may have it. `heard`
    gets the number of others searched.
    """
    # keys of packed images tell the shards of their samples
    is_packed = manifest.dataset == "images" and manifest.settings.get("source") != SELECTION
    with naming_repair(store):
        likely, others = list[Shard](), list[Shard]()
        for shard in manifest.shards:
            (likely if _may_hold(shard.name, key) else others).append(shard)
        for shards in (likely, () if is_packed else others):
            numbers = map_ahead(
                partial(_find_in_shard, store, manifest, key), shards, store.readers
            )
            with closing(numbers):
                for count, (shard, number) in enumerate(zip(shards, numbers, strict=True), 1):
                    if number >= 0:
                        return _read_sample(store, manifest, shard, number, key)
                    if shards is others:  # many, and not the few that the key names
                        heard(count)
        for receipt in manifest.receipts:
            if receipt.rejects and (not is_packed or _may_hold(receipt.unit, key)):
                for reject in rejects_in(store, receipt.unit):
                    if reject.key == key:
                        return reject
    raise NotFoundError(
        f"{store.url} has neither a sample nor a reject with the key {key!r}: take a key from a "
        f"batch, from a json or from {store.url}/rejects/"
    )


def _find_in_shard(store: Store, manifest: Manifest, key: str, shard: Shard) -> int:
    """Return the number of the sample with a key, or -1 if a shard has none."""
    import pyarrow.compute as pc

    keys = read_keys(store, shard, manifest)
    return int(pc.index(keys, key.encode("utf-8", "replace").decode()).as_py())


def _read_sample(
    store: Store, manifest: Manifest, shard: Shard, number: int, key: str
) -> FoundSample:
    with open_shard(store, shard, manifest.settings) as reader:
        sample = reader.sample(number)
    if sample.key != key:
        raise DamageError(reader.place, "its table or its index leads to others", key)
    size = cut_size(parse_object(sample.fields.get("json", b"")) or {})
    shape = shape_name(size) if size in shapes_of(manifest.settings) else ""
    return FoundSample(
        key=key,
        shard=shard.name,
        number=number,
        start=sample.start,
        shape=shape,
        members=sample.fields,
    )


def _may_hold(name: str, key: str) -> bool:
    """Return whether a key begins with the number in the name of a shard or unit."""
    stem = name.rpartition("/")[2].partition(".")[0].partition("_")[0]
    return key.rpartition("/")[2].startswith(stem)
