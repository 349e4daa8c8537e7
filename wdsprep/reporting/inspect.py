"""`inspect`: what a dataset is, by its manifest alone, and one sample of it by positioned reads.

A key tells its slice, which the shard's name tells too, and keys rise in a shard, or in each shape
of it: so a sample is found by bisection over headers, whatever the size of the dataset. Keys of
tars that something else packed follow no rule. For them the first header of every shard is read,
and if that leads nowhere, all headers are.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, cast

from wdsprep.dataset.arrays import BFLOAT16, field_of, values_of
from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.names import SELECTION, latent_unit
from wdsprep.dataset.reading import ShardReader, ShardSize, read_shards
from wdsprep.dataset.receipts import Shard
from wdsprep.dataset.rejects import Reject, rejects_in
from wdsprep.dataset.samples import parse_json
from wdsprep.dataset.shapes import shape_ranges, shapes_of
from wdsprep.dataset.state import open_dataset
from wdsprep.errors import FormatError, NotFoundError, UsageError
from wdsprep.options import TwoWays, taking
from wdsprep.reporting.options import InspectOptions, OverviewOptions
from wdsprep.reporting.overview import Overview
from wdsprep.store import open_store
from wdsprep.store.base import Store, write_bytes
from wdsprep.text import command

CountHeard = Callable[[int], None]


P = ParamSpec("P")
Q = ParamSpec("Q")


def _overloaded(
    _whole: Callable[P, OverviewOptions], _sample: Callable[Q, InspectOptions]
) -> "Callable[[object], TwoWays[P, Overview, Q, Overview | Looked | Reject]]":
    """Tell type checkers which call gives what."""
    return lambda function: cast("Any", function)


@_overloaded(OverviewOptions, InspectOptions)
@taking(InspectOptions)
def inspect(options: InspectOptions) -> "Overview | Looked | Reject":
    """Return what a dataset is, by its manifest; or the sample with the key `key`, or its reject.

        wdsprep.inspect("shards/images").facts["phases"]
        wdsprep.inspect("shards/images", "000000000012").facts
        webdataset.WebDataset(wdsprep.inspect("shards/images").urls, shardshuffle=100)

    `out` is a folder, or a URL of a bucket or the hub, to write the members of the sample to.
    `heard` is told how many shards were looked at, of how many.
    """
    dataset, out, key = os.fspath(options.dataset), os.fspath(options.out), options.key
    if out and not key:
        raise UsageError("-o is for the sample of a KEY")
    store, manifest = open_dataset(dataset)
    if not key:
        return Overview(dataset=dataset, manifest=manifest)
    found = look(store, manifest, key, lambda count: options.heard(count, len(manifest.shards)))
    if out and isinstance(found, Looked):
        found = replace(found, written=tuple(found.write(out)))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """The place of a sample: its shard, its number there, and the byte at which it begins.

    The shape is given where there are several.
    """

    shard: str
    number: int
    start: int
    shape: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Looked:
    """A sample as it lies in its shard."""

    key: str
    place: Located
    members: tuple[tuple[str, bytes], ...]
    written: tuple[str, ...] = ()

    def __repr__(self) -> str:
        names = ", ".join(name for name, _ in self.members)
        return f"<Looked {self.key!r}: sample {self.place.number:,} of {self.place.shard}: {names}>"

    @property
    def facts(self) -> dict[str, Any]:
        place = self.place
        return {
            "json": next((_json(data) for name, data in self.members if name == "json"), {}),
            "key": self.key,
            "members": {name: member_facts(name, data) for name, data in self.members},
            "number": place.number,
            "shape": place.shape,
            "shard": place.shard,
            "start": place.start,
        }

    def write(self, folder: str) -> list[str]:
        """Write its members as files into a folder, a bucket or the hub.

        No name leads out of it.
        """
        store = open_store(folder)
        stem = self.key.rpartition("/")[2]
        named = {f"{stem}.{name}": data for name, data in self.members}
        for name, data in named.items():
            write_bytes(store, name, data)
        store.publish(named)
        return [f"{store.url}/{name}" for name in named]


def _json(data: bytes) -> Any:
    try:
        return parse_json(data)
    except (ValueError, RecursionError):
        return {}


def member_facts(name: str, data: bytes) -> dict[str, Any]:
    """Return the size of a member; of an array also its shape, dtype and statistics."""
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


def look(store: Store, manifest: Manifest, key: str, heard: CountHeard) -> Looked | Reject:
    """Return the sample with this key, or the reject.

    `heard` is told how many shards were looked at.
    """
    finder = _Finder(store, manifest, heard)
    with naming_repair(store):
        if found := finder.find(key):
            return found
        for reject in finder.rejects(key):
            if reject.key == key:
                return reject
    raise NotFoundError(
        f"{store.url} has no sample {key!r}, and none of its rejects is called so: take a key of a "
        f"batch, of a json or of {store.url}/rejects/"
    )


class _Finder:
    def __init__(self, store: Store, manifest: Manifest, heard: CountHeard) -> None:
        self._store, self._manifest, self._heard = store, manifest, heard
        self._counts: dict[str, Mapping[str, int]] = {}  # of receipts that were asked for them

    @property
    def _is_packed(self) -> bool:
        """Return whether keys tell where their samples are."""
        is_selection = self._manifest.settings.get("source") == SELECTION
        return self._manifest.dataset == "images" and not is_selection

    def find(self, key: str) -> Looked | None:
        likely = [shard for shard in self._manifest.shards if _may_hold(shard.name, key)]
        for shard in likely:
            if found := self._among_rising(shard, key):
                return found
        return None if self._is_packed else self._anywhere(key)

    def _anywhere(self, key: str) -> Looked | None:
        """Look in the shard that begins before the key, then at all keys."""
        shards = self._manifest.shards
        first_keys = read_shards(self._store, shards, ShardReader.key_at)
        firsts = sorted(zip(first_keys, range(len(shards)), strict=True))
        at = bisect_right(firsts, (key, len(shards)))
        if at and (found := self._among_rising(shards[firsts[at - 1][1]], key)):
            return found

        def scan(reader: ShardReader) -> Looked | None:
            keys = enumerate(reader.keys(one_by_one=True))
            numbers = (number for number, other in keys if other == key)
            return self._looked(reader, key, numbers)

        with closing(read_shards(self._store, shards, scan)) as scans:
            for count, found in enumerate(scans, 1):
                self._heard(count)
                if found:
                    return found
        return None

    def rejects(self, key: str) -> Iterator[Reject]:
        """Yield the rejects of the units that may have had the key."""
        for receipt in self._manifest.receipts:
            if receipt.rejects and (not self._is_packed or _may_hold(receipt.unit, key)):
                yield from rejects_in(self._store, receipt.unit)

    def _among_rising(self, shard: Shard, key: str) -> Looked | None:
        """Look where keys rise, so that a dozen headers lead to the sample."""
        with ShardReader(self._store, shard) as reader:
            found = reader.find_rising([key], self._runs(shard).values())
            return self._looked(reader, key, iter(found))

    def _looked(self, reader: ShardReader, key: str, numbers: Iterator[int]) -> Looked | None:
        """Return the first sample of these."""
        number = next(numbers, None)
        if number is None:
            return None
        shard, members = reader.shard, reader.sample(number).fields
        shape = next((name for name, run in self._runs(shard).items() if number in run), "")
        start, _ = reader.span(number)
        place = Located(shard=shard.name, number=number, start=start, shape=shape)
        return Looked(key=key, place=place, members=tuple(members.items()))

    def _runs(self, shard: ShardSize) -> Mapping[str, range]:
        """Return the samples of each shape, where there are several: keys rise in each."""
        settings, unit = self._manifest.settings, latent_unit(shard.name)
        if not shapes_of(settings):
            return {}
        if unit not in self._counts:
            ledger = self._manifest.ledger
            lines = [line for name, line in ledger.named_lines() if name == unit]
            if not lines:
                lost = FormatError(f"{self._store.url} has no unit of {shard.name}")
                raise lost.with_next_step(f"run {command('rebuild', self._store.url)}")
            self._counts[unit] = ledger.with_lines(lines)[0].counts
        return shape_ranges(settings, self._counts[unit])


def _may_hold(name: str, key: str) -> bool:
    """Return whether the key begins with the number in the shard's name."""
    stem = name.rpartition("/")[2].partition(".")[0].partition("_")[0]
    return key.rpartition("/")[2].startswith(stem)
