"""Read the json and key of every sample of a dataset, without its images or arrays.

A thread reads a shard piece by piece (`ShardReader.json`), so the number of threads bounds memory,
not the size of shards.

The order depends on what is found here, and it must be the same on every machine. So a sample that
cannot be read is an error. Tars without a manifest are an exception: they are what they hold.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from wdsprep.cpus import usable_cpus
from wdsprep.dataset.damage import naming_next_step, verify_step
from wdsprep.dataset.file_names import index_name
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.samples import FROM_OUTSIDE, parse_object
from wdsprep.dataset.shard_reader import NamedShard, ShardReader
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import FormatError, UsageError
from wdsprep.loading.served_datasets import Dataset, JoinedDataset
from wdsprep.store.base import RemoteStore
from wdsprep.store.schemes import ANY_PLACE
from wdsprep.text import command, plural

FETCHERS = 16  # shards of S3 that are read at a time
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class MetadataBlock:
    """The keys and the parsed json of neighbouring samples in a shard.

    The json of a sample is None if it is damaged or missing; a damaged sample has no key
    either. `damaged` has the places of these samples in the lists.
    """

    shard: int
    first: int
    keys: list[str]
    facts: list[dict[str, Any] | None]
    damaged: list[int]


def scan_metadata(
    dataset: Dataset, found: Callable[[MetadataBlock], Found], *, parses: bool = True
) -> Iterator[tuple[int, list[Found]]]:
    """Yield each shard with the results of `found`, which is called for each of its blocks.

    Threads read shards ahead. Without `parses`, the json is not parsed and only keys are of
    use. Raise an error at the end if a sample is damaged, except in tars without a manifest.
    """
    whole = dataset.files
    damaged: list[tuple[int, int]] = []
    threads = max(2, usable_cpus()) if whole.store.root else FETCHERS

    def look(shard: int) -> tuple[int, list[Found]]:
        made = []
        for some in read_metadata(whole, shard, parses=parses):
            made.append(found(some))
            damaged.extend((shard, some.first + number) for number in some.damaged)
        return shard, made

    yield from map_ahead(look, range(len(whole.names)), threads)
    if damaged and whole.kind != "tars":
        raise _damaged_error(whole, damaged)


def _damaged_error(whole: Dataset, damaged: Sequence[tuple[int, int]]) -> FormatError:
    """Return the error for samples whose json cannot be read.

    `damaged` has their shards and numbers.
    """
    shard, number = min(damaged)
    what = plural(len(damaged), "sample is", "samples are")
    return FormatError(
        f"{whole.store.url}: {what} damaged, the first is number {number} of {whole.names[shard]}; "
        "the json of all samples decides which are served"
    ).with_next_step(verify_step(whole.store.url))


class JoinedMetadata:
    """A reader of the json of a joined dataset, for any number of threads.

    A shard is read as a whole: if samples have moved, neighbours of the one dataset may
    stand anywhere in a shard of the other.
    """

    def __init__(self, joined: JoinedDataset) -> None:
        self._joined = joined
        self._of_shard = lru_cache(FETCHERS)(self._read_shard)

    def read(self, shard: int, numbers: Ints) -> list[dict[str, Any] | None]:
        """Return the joined json of these samples, or None for a sample that is missing there.

        `shard` and `numbers` are those of the first dataset.
        """
        own, places = self._joined.positions.locate(np.full(len(numbers), shard), numbers)
        if not len(own) or own[0] < 0:
            return [None] * len(numbers)
        facts = self._of_shard(int(own[0]))
        return [facts[place] if place < len(facts) else None for place in places.tolist()]

    def _read_shard(self, shard: int) -> list[dict[str, Any] | None]:
        pieces = list(read_metadata(self._joined.dataset.whole, shard))
        damaged = [(shard, some.first + number) for some in pieces for number in some.damaged]
        if damaged:
            raise _damaged_error(self._joined.dataset, damaged)
        return [one for some in pieces for one in some.facts]


def read_metadata(dataset: Dataset, shard: int, *, parses: bool = True) -> Iterator[MetadataBlock]:
    """Yield the keys and json of all samples of a shard, piece by piece."""
    store, name, is_foreign = dataset.store, dataset.names[shard], dataset.kind == "tars"
    if not (store.root or isinstance(store, RemoteStore)):
        raise UsageError(f"{store.url} cannot be loaded: give {ANY_PLACE}")
    if not (count := int(dataset.sizes[shard])):
        return
    indexed = f"delete {index_name(name)} and run {command('index', store.url)}"
    with (
        naming_next_step(indexed if is_foreign else verify_step(store.url)),
        ShardReader(store, NamedShard(name, count), is_foreign=is_foreign) as reader,
    ):
        for block in reader.json():
            facts = [
                None if one is None or not parses else parse_json_object(one) for one in block.json
            ]
            asked: Sequence[object] = facts if parses else block.json
            damaged = [number for number, one in enumerate(asked) if one is None]
            yield MetadataBlock(shard, block.first, block.keys, facts, damaged)


def parse_json_object(member: bytes) -> dict[str, Any] | None:
    """Return the json object in a member, or None if there is none.

    A quick parser reads nearly all, and a careful one the rest.
    """
    try:
        text = member.decode()
        found, end = FROM_OUTSIDE.raw_decode(text)
        if end == len(text) and type(found) is dict:
            return found
    except (ValueError, RecursionError):
        pass
    return parse_object(member)
