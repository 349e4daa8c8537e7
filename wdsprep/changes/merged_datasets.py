"""Group the datasets of a selection, and join columns to them.

Datasets with the same output place become one dataset. Latents follow the images that they were
made of.

Conditions of `select` and `duplicates` may use joined columns beside the json of samples. They are
those of `--join`, and of scores that are selected together with images.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from wdsprep.dataset.file_names import SHARD, latent_unit, maker_of
from wdsprep.dataset.manifest import Manifest, Shard
from wdsprep.dataset.sample_selection import Numbers, SampleSelection, ShardSamples
from wdsprep.dataset.sample_table import KEY
from wdsprep.dataset.samples import roles_of
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.settings import Settings, changed_settings, say_changes
from wdsprep.dataset.shapes import buckets_encoded
from wdsprep.dataset.stored_dataset import open_current_dataset
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import UsageError
from wdsprep.loading.join import join_datasets
from wdsprep.loading.open_datasets import open_stream
from wdsprep.loading.options import Stream
from wdsprep.loading.subsets import Subset, find_subset
from wdsprep.options import Place
from wdsprep.sources.patterns import is_table
from wdsprep.store import shared_store
from wdsprep.store.base import Store, absolute, absolute_places
from wdsprep.tables.stored_tables import ShardTables

NAME, SPLIT = "{name}", "{split}"


class Origin:
    """A dataset to select from, with its manifest."""

    def __init__(self, place: Place) -> None:
        """Open a dataset. Raise UsageError if it is not complete."""
        self.url, self.shown = absolute(place), os.fspath(place).rstrip("/")
        _, self.manifest = open_current_dataset(self.url, self.shown)
        if not self.manifest.complete:
            maker = maker_of(self.manifest.dataset, self.manifest.settings)
            raise UsageError(
                f'{self.shown} is not complete: run the same "{maker}" again, to its end, and then '
                "select"
            )

    @property
    def store(self) -> Store:
        return shared_store(self.url)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Return the shards in the order in which pack numbered their samples, by bucket."""
        return tuple(sorted(self.manifest.shards, key=_shard_order))

    @cached_property
    def units(self) -> Mapping[str, str]:
        """Return the unit that made each shard, by the name of the shard."""
        ledger = self.manifest.ledger
        made = zip(ledger.units(), ledger.column("shards"), strict=True)
        return {shard["name"]: unit for unit, shards in made for shard in shards}

    @cached_property
    def content(self) -> str:
        """Return a digest of the content of its shards, wherever the dataset is."""
        shards = "".join(f"{shard.name} {shard.digest}\n" for shard in self.shards)
        return hex_digest(shards.encode())


def _shard_order(shard: Shard) -> tuple[int, int, int, str]:
    match = SHARD.fullmatch(shard.name)
    if match is None:  # latents of tars that another program packed
        return shard.bucket, 0, 0, shard.name
    return shard.bucket, int(match[2]), int((match[3] or "_0")[1:]), shard.name


@dataclass(frozen=True, kw_only=True)
class Group:
    """Datasets that become one, in `place`, which may still have `{split}` in it.

    Latents whose images are selected too follow the group of those images.
    """

    place: str
    origins: tuple[Origin, ...]
    follows: "Group | None" = None

    @property
    def dataset(self) -> str:
        return self.origins[0].manifest.dataset

    @property
    def shown(self) -> str:
        return " and ".join(origin.shown for origin in self.origins)

    @property
    def settings(self) -> Settings:
        return self.origins[0].manifest.settings

    @cached_property
    def content(self) -> list[str]:
        return [origin.content for origin in self.origins]

    def place_of(self, part: str) -> str:
        """Return the place of a part of a split."""
        return self.place.replace(SPLIT, part)

    # --- its shards
    @cached_property
    def shards(self) -> tuple[tuple[int, Shard], ...]:
        """Return all shards, each with the number of its dataset, by bucket and then by dataset."""
        pairs = [(at, shard) for at, origin in enumerate(self.origins) for shard in origin.shards]
        return tuple(sorted(pairs, key=lambda pair: pair[1].bucket))

    @property
    def readers(self) -> int:
        """Return how many threads are useful for the store that gains from the most."""
        return max(origin.store.readers for origin in self.origins)

    def read_keys(self, selection: SampleSelection) -> Iterator[tuple[ShardSamples, pa.Array]]:
        """Yield the selected samples of each shard, and their keys, which its table has."""
        tables = [
            ShardTables(origin.store, origin.manifest.shards, origin.manifest)
            for origin in self.origins
        ]

        def read(samples: ShardSamples) -> tuple[ShardSamples, pa.Array]:
            number, shard = self.shards[samples.shard]
            table = tables[number].read_shard(lambda file: file.read([KEY]), shard)
            return samples, table.column(KEY).take(samples.numbers).combine_chunks()

        return map_ahead(read, selection.per_shard(), self.readers)


def group_datasets(datasets: Sequence[Place], out: str) -> list[Group]:
    """Return the groups of the given datasets, images first.

    A group has the datasets with the same place in `out`. Raise UsageError if the datasets cannot
    be selected from together.
    """
    if not datasets:
        raise UsageError("nothing to select from: give the path or URL of a dataset")
    by_place: dict[str, list[Origin]] = {}
    for origin in map(Origin, datasets):
        name = origin.url.rstrip("/").rpartition("/")[2]
        by_place.setdefault(out.replace(NAME, name), []).append(origin)
    absolute_places([origin.url for origins in by_place.values() for origin in origins])
    groups = [_group(place, origins) for place, origins in by_place.items()]
    images = [group for group in groups if group.dataset == "images"]
    rest = [group for group in groups if group.dataset != "images"]
    if len(images) > 1:
        raise UsageError(
            f"{images[0].place} and {images[1].place} would both be images: give one place for "
            f"all of them, or select from one after the other"
        )
    if not images and len(rest) > 1:
        raise UsageError(
            f"{rest[0].origins[0].shown} and {rest[1].origins[0].shown} were made of images: give "
            "these too, so that the same samples are selected from all"
        )
    return [*images, *(_follow_images(group, images[0]) if images else group for group in rest)]


def _group(place: str, origins: list[Origin]) -> Group:
    """Return a group of datasets. Raise UsageError if they cannot become one dataset."""
    first, *others = ((origin.shown, _common_settings(origin.manifest)) for origin in origins)
    for shown, settings in others:
        if changes := changed_settings(first[1], settings):
            kinds = {name: pair for name, pair in changes.items() if name == "kind"}
            differing = say_changes(kinds or changes, " and ")
            raise UsageError(
                f"{first[0]} and {shown} cannot become one dataset ({differing}): give each a "
                f"place, such as OUT/{NAME}"
            )
    return Group(place=place, origins=tuple(origins))


def _common_settings(manifest: Manifest) -> dict[str, Any]:
    """Return what datasets that become one must have in common."""
    settings = manifest.settings
    if manifest.dataset == "images":
        settings = {"buckets": settings.get("buckets"), "roles": [*roles_of(settings)]}
    return {"kind": manifest.kind, **settings}


def _follow_images(group: Group, images: Group) -> Group:
    """Return a group of latents in the order of the images that they were made of.

    Raise UsageError unless exactly one of them was made of each dataset of images.
    """
    numbers = [_images_of(origin, images) for origin in group.origins]
    if sorted(numbers) != [*range(len(images.origins))]:
        raise UsageError(
            f"{group.shown} are not the latents of {images.shown}, one of each: give latents of "
            "all datasets of images that become one, once, or of none of them"
        )
    by_number = dict(zip(numbers, group.origins, strict=True))
    return replace(group, origins=tuple(by_number[at] for at in sorted(numbers)), follows=images)


def _images_of(latents: Origin, images: Group) -> int:
    """Return the number of the dataset in `images` that latents were made of.

    Raise UsageError if the latents were not made of the present shards of any dataset there.
    """
    ledger = latents.manifest.ledger
    inputs = dict(zip(ledger.units(), ledger.column("input"), strict=True))
    buckets = buckets_encoded(latents.manifest.settings, images.settings["buckets"])
    for at, origin in enumerate(images.origins):
        shards = [shard for shard in origin.shards if shard.bucket in buckets]
        wanted = {latent_unit(shard.name): shard.digest for shard in shards}
        if wanted == inputs:
            return at
    shown = " or ".join(origin.shown for origin in images.origins)
    maker = maker_of(latents.manifest.dataset, latents.manifest.settings)
    raise UsageError(
        f'{latents.shown} was not made of {shown} as it is now: run the same "{maker}" with '
        "--redo-changed, or select from one of them alone"
    )


def find_subsets(groups: Sequence[Group], join: Sequence[str], condition: str) -> list[Subset]:
    """Return the samples of each dataset of the first group that meet a condition.

    It may use columns of what is in `join`, and of scores that are selected together with the
    group. Samples that these lack do not meet it. There are no subsets if the condition is empty.
    """
    if not condition:
        return []
    origins = groups[0].origins
    scored = [g for g in groups[1:] if g.follows and g.origins[0].manifest.is_scored]
    named = match_places([(origin.url, origin.manifest) for origin in origins], join)
    places = (
        dict.fromkeys((*(group.origins[at].url for group in scored), *others))
        for at, others in enumerate(named)
    )
    pairs = zip(origins, places, strict=True)
    return [select_samples(origin.url, tuple(joined), condition) for origin, joined in pairs]


def match_places(
    datasets: Sequence[tuple[str, Manifest]], join: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return the places in `join` that belong to each dataset, given by its place and manifest.

    Scores belong to the datasets of their images, and tables to all. A single dataset gets all
    places: those that do not fit are refused when they are joined. With several datasets, raise
    UsageError for scores that belong to none of them.
    """
    tables = [place for place in join if is_table(place)]
    scores = [Origin(place) for place in join if not is_table(place)]
    if len(datasets) == 1:
        return [(*(origin.url for origin in scores), *tables)]
    made_of = [manifest.image_digests() for _, manifest in datasets]
    joined: list[list[str]] = [[] for _ in datasets]
    for origin in scores:
        inputs = origin.manifest.image_digests()
        fits = [at for at, digests in enumerate(made_of) if not inputs.isdisjoint(digests)]
        if not fits:
            raise UsageError(
                f"--join {origin.shown} is of other images than {datasets[0][0]} and the datasets "
                "after it: give the scores of these"
            )
        for at in fits:
            joined[at].append(origin.url)
    return [(*places, *tables) for places in joined]


def select_samples(
    url: str, places: Sequence[str], condition: str, *, columns: Sequence[str] = ()
) -> Subset:
    """Return the samples of a dataset that meet a condition on its columns and joined ones.

    The joined tables have the columns that the condition names, and `columns`.
    """
    stream = Stream(url, where=condition, join=places)
    (dataset, *_) = join_datasets(open_stream(stream, has_states=False))
    return find_subset(dataset, None, None, columns=columns)


def numbers_by_shard(subset: Subset) -> dict[str, Numbers]:
    """Return the numbers of the samples of a subset in each shard, by the name of the shard."""
    per_shard = zip(subset.whole.files.names, subset.selection(None).per_shard(), strict=True)
    return {name: samples.numbers for name, samples in per_shard}
