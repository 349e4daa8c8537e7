"""Select samples by a condition, and divide datasets by the images that samples have in roles.

`where="aesthetic >= 6 and width >= 768"` is a condition of `wdsprep.dataset.condition_syntax`. The
tables beside the shards, and what is joined to them, are asked (`dataset_tables`). The samples that
meet it are kept (`kept_file`), by the contents of the dataset and the condition, so the next run
finds them there.

A batch has one shape of the target, and one of each further image. So a dataset becomes one dataset
for each combination of sizes, as it does for each shape of the target. The tables beside the shards
say the sizes, those of a joined dataset too, and no tar is read. They are read once: which samples
have which combination is kept on this machine, as what a condition selects is.

Samples with fewer images in a role are apart from those with more, unless they are to be padded:
then an image that a sample lacks has the size of its first one in that role. A sample without any
image in a role stays apart, since nothing says how large one would be.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain, count, groupby
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wdsprep.dataset.condition_syntax import EVALUATOR, Condition
from wdsprep.dataset.kept_file import KeptWriter, open_or_make
from wdsprep.dataset.random_numbers import key_of
from wdsprep.dataset.sample_selection import SampleSelection, ShardSamples, keep_selection
from wdsprep.dataset.sample_table import REST
from wdsprep.dataset.samples import image_name, parse_object, role_of, roles_of
from wdsprep.dataset.shapes import Size
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import UsageError
from wdsprep.loading.open_datasets import SIDES, keep_groups, select
from wdsprep.loading.served_datasets import Dataset
from wdsprep.sources.patterns import is_table
from wdsprep.text import examples, plural

if TYPE_CHECKING:
    from wdsprep.loading.dataset_tables import SampleSearch
    from wdsprep.loading.join import JoinedDataset
    from wdsprep.tables.joined_columns import LaidOut


SHOWN = 200
"""The longest condition, in characters, that a state has in full; a longer one is shortened."""
_log = logging.getLogger("wdsprep")


@dataclass(frozen=True, kw_only=True, eq=False)
class Subset:
    """A selection of samples, by a condition, by tables in which they need a row, or by both."""

    whole: Dataset
    condition: Condition | None
    tables: "tuple[LaidOut, ...]"
    joined: "tuple[JoinedDataset, ...]" = ()

    @property
    def is_whole(self) -> bool:
        return self.condition is None and not self.tables

    @property
    def shown(self) -> str:
        return shorten_for_state(self.condition.plain) if self.condition else ""

    @property
    def joined_digests(self) -> list[str]:
        """Return digests of the tables and datasets that are joined, wherever these are."""
        tables = (table.digest for table in self.tables)
        return [*tables, *(other.dataset.whole.digest for other in self.joined)]

    def selection(self, folder: Path | None) -> SampleSelection:
        """Return the selection, which is searched for once and then kept in a folder.

        By default that is the folder of this machine. Log how many samples are left out because
        they are damaged or have no row in a table.
        """
        files, url = self.whole.files, self.whole.store.url
        kind, plain = "where", ""
        if self.condition is not None:
            kind, plain = f"where {EVALUATOR}", self.condition.plain
        key = (kind, *files.names, *files.contents, plain, *self.joined_digests)
        kept = open_or_make(folder, key, self._search)
        if damaged := kept.facts["damaged"]:
            what = plural(damaged, "sample")
            _log.warning("%s: left out %s whose json is damaged or missing", url, what)
        if lacking := kept.facts["lacking"]:
            what = plural(lacking, "sample")
            places = examples([table.url for table in self.tables])
            _log.warning("%s: left out %s without a row in %s", url, what, places)
        return SampleSelection.from_file(kept)

    def search(self) -> "SampleSearch":
        # pyarrow and DuckDB, which few need
        from wdsprep.loading.dataset_tables import SampleSearch

        return SampleSearch(self, self.condition or Condition("True"))

    def _search(self, writer: KeptWriter, path: Path) -> None:
        files, tables = self.whole.files, plural(len(self.tables), "table")
        url, samples = files.store.url, plural(files.samples, "sample")
        asking = "%s: asking the tables of %s for where=%r and %s; the selection is kept in %s"
        _log.info(asking, url, samples, self.shown, tables, path)
        left_out = {"damaged": 0, "lacking": 0}

        def select_shards() -> Iterator[ShardSamples]:
            for number, (mask, damaged, lacking) in enumerate(self.search().run()):
                left_out["damaged"] += damaged
                left_out["lacking"] += lacking
                yield ShardSamples(number, np.flatnonzero(mask).astype(np.uint32))

        keep_selection(writer, len(files.names), select_shards())
        writer.facts |= left_out


def select_where(
    datasets: Sequence[Dataset], where: str | None, folder: Path | None
) -> tuple[Dataset, ...]:
    """Return datasets with only the samples that meet their conditions and have rows in all tables.

    A sample must meet both `where` and the condition of its own stream. The joined tables are
    opened and set in the datasets. Raise UsageError if a dataset has no sample left.
    """
    selected: list[Dataset] = []
    for whole, of_whole in groupby(datasets, lambda dataset: dataset.whole):
        parts = [*of_whole]
        subset = find_subset(parts[0], where, folder)
        if not subset.is_whole:
            selection = subset.selection(folder)
            left = (select(part, selection) for part in parts)
            changes: dict[str, Any] = {"where": subset.shown, "tables": subset.tables}
            parts = [replace(part, **changes) for part in left if part is not None]
        if not parts:
            raise UsageError(
                f"no sample of {whole.store.url} meets where={subset.shown!r}: ask for less"
                if subset.condition
                else f"{whole.store.url}: no sample has a row in each of the joined tables "
                f"({examples([table.url for table in subset.tables])}), so compare their keys"
            )
        selected += parts
    return tuple(selected)


def find_subset(
    dataset: Dataset,
    where: str | None,
    folder: Path | None,
    *,
    columns: Sequence[str] | None = None,
) -> Subset:
    """Return the subset that conditions and joined tables select.

    The tables are opened; the samples are not searched yet. If `columns` are given, the tables have
    only the columns that these or the conditions name; else they have all that batches take.
    """
    texts = [text for text in (dataset.where, where) if text is not None and text != ""]
    conditions = [*map(Condition, texts)]
    condition = conditions[0] if conditions else None
    if len(conditions) > 1:
        condition = Condition(" and ".join(f"({part.plain})" for part in conditions))
    tables: tuple[LaidOut, ...] = ()
    if any(map(is_table, dataset.join)) or any(o.dataset.has_columns for o in dataset.joined):
        from wdsprep.loading.dataset_tables import lay_out_joined  # DuckDB, which few need

        paths = condition.names if condition else ()
        named = {*(columns or ()), *(str(name[0]) for name in paths if len(name) == 1)}
        tables = lay_out_joined(dataset, folder, named=named, for_batches=columns is None)
    return Subset(whole=dataset.whole, condition=condition, tables=tables, joined=dataset.joined)


def shorten_for_state(plain: str) -> str:
    """Return a condition for a saved state; a long one as its beginning and a digest."""
    return plain if len(plain) <= SHOWN else f"{plain[:60]}... {key_of(plain):016x}"


NO_SIZE = (0, 0)
"""The size of images that come as they are, or are cropped to one size."""
ImageSizes = tuple[tuple[str, Size], ...]
"""The images that a sample has in roles, in their order: the name and the size of each."""
Combination = tuple[ImageSizes, ...]
"""The images of a sample in each of the datasets that have roles."""


def divide_by_roles(
    datasets: Iterable[Dataset], folder: Path | None, *, pad: bool
) -> tuple[Dataset, ...]:
    """Return for each dataset those of its samples whose images in roles have equal sizes.

    With `pad`, samples with different numbers of images in a role may come together.
    """
    divided: list[Dataset] = []
    for _, of_whole in groupby(datasets, lambda dataset: dataset.whole):
        parts = [*of_whole]
        slots = [slot for slot, d in enumerate(parts[0].with_joined) if roles_of(d.settings)]
        if not slots:
            divided += parts
            continue
        for by_slot, selection in _find_combinations(parts[0], slots, folder, pad=pad):
            for part in parts:
                if (left := select(part, selection)) is not None:
                    joined = tuple(
                        replace(other, dataset=_with_sizes(other.dataset, by_slot[slot]))
                        if slot in by_slot
                        else other
                        for slot, other in enumerate(left.joined, 1)
                    )
                    divided.append(replace(left, joined=joined, **by_slot.get(0, {})))
    return tuple(divided)


def _with_sizes(dataset: Dataset, sizes: Mapping[str, Any]) -> Dataset:
    """Return a joined dataset with the sizes of its images, as a part of the one that is open."""
    return replace(dataset, part_of=dataset.whole, **sizes)


def _find_combinations(
    dataset: Dataset, slots: Sequence[int], folder: Path | None, *, pad: bool
) -> Iterator[tuple[dict[int, dict[str, Any]], SampleSelection]]:
    """Yield each combination of sizes, and the samples that have it.

    Of a combination there is for each slot what its dataset then knows of its samples.
    """
    files = dataset.whole.files
    holders = [files, *(dataset.with_joined[slot].whole for slot in slots if slot)]
    what = [f"roles {slots} {pad}", *(c for d in holders for c in (*d.names, *d.contents))]
    kept = open_or_make(folder, what, lambda writer, path: _keep(dataset, slots, writer, path, pad))
    counts = kept.arrays["counts"].reshape(len(files.names), -1)
    whole = SampleSelection.from_file(kept)
    starts = whole.starts
    for column, combination in zip(counts.T, kept.facts["combinations"], strict=True):
        by_slot = {
            slot: {"role_sizes": {name: (w, h) for name, (w, h) in images}, "lacks_images": lacks}
            for slot, (images, lacks) in zip(slots, combination, strict=True)
        }
        in_shards = column.astype(np.int64)
        yield by_slot, replace(whole, starts=starts, counts=in_shards)
        starts = starts + in_shards


def _keep(
    dataset: Dataset, slots: Sequence[int], writer: KeptWriter, path: Path, pad: bool
) -> None:
    """Write which samples have which combination of sizes of images in roles, shard by shard.

    `slots` are the datasets to read them from. With `pad`, images at the end of a role that are as
    large as its first one do not count (`_without_repeats`).
    """
    files = dataset.whole.files
    what = f"the sizes of images in roles of {plural(files.samples, 'sample')}"
    _log.info("%s: reading %s, which are kept in %s", files.store.url, what, path)
    groups: dict[Combination, tuple[int, list[Combination]]] = {}

    @cache
    def number_of(combination: Combination) -> int:
        key = tuple(map(_without_repeats, combination)) if pad else combination
        number, members = groups.setdefault(key, (len(groups), []))
        members.append(combination)
        return number

    combinations = _read_combinations(dataset, slots)
    keep_groups(writer, len(files.names), (map(number_of, of_shard) for of_shard in combinations))
    writer.facts["combinations"] = [
        [*map(_merge, zip(*members, strict=True))] for _, members in groups.values()
    ]


def _read_combinations(dataset: Dataset, slots: Sequence[int]) -> Iterator[list[Combination]]:
    """Yield for each shard the combination of each of its samples."""
    # pyarrow and DuckDB, which few need
    from wdsprep.loading.dataset_tables import TablesBeside, open_tables

    files = dataset.whole.files
    tables = open_tables(files)
    beside = {slot: TablesBeside(dataset.joined[slot - 1]) for slot in slots if slot}

    def read(shard: int) -> list[Combination]:
        by_slot = []
        for slot in slots:
            part, samples = dataset.with_joined[slot], int(files.sizes[shard])
            roles = roles_of(part.settings)
            columns = {f"{role}_{side}" for role in roles for side in SIDES} | {REST}
            read_columns = methodcaller("read", columns)
            if slot:
                rows = beside[slot].read(read_columns, shard, samples)
            else:
                rows = tables.read_shard(read_columns, tables.shards[shard])
            sizes = [()] * samples if rows is None else _sizes_in(rows.to_pydict(), roles)
            if part.kind != "latents":  # they come as they are, or cropped to one size
                sizes = [tuple((name, NO_SIZE) for name, _ in images) for images in sizes]
            by_slot.append(sizes)
        return [*zip(*by_slot, strict=True)]

    return map_ahead(read, range(len(files.names)), tables.threads, most=tables.threads)


def _sizes_in(columns: Mapping[str, Sequence[Any]], roles: Sequence[str]) -> list[ImageSizes]:
    """Return the images of each row of a table.

    The sizes of the first image of each role are in columns, and those of the next ones in `rest`.
    """
    names = [f"{role}_{side}" for role in roles for side in SIDES]

    @lru_cache(1 << 8)
    def images_of(rest: str | None, *sides: int | None) -> ImageSizes:
        facts = (parse_object(rest) if rest else None) or {}
        facts |= dict(zip(names, sides, strict=True))
        images = []
        for role in roles:
            for name in (image_name(role, number) for number in count()):
                width, height = (facts.get(f"{name}_{side}") for side in SIDES)
                if type(width) is not int or type(height) is not int:
                    break
                images.append((name, (width, height)))
        return tuple(images)

    return [*map(images_of, columns[REST], *(columns[name] for name in names))]


def _without_repeats(images: ImageSizes) -> ImageSizes:
    """Return images without the last ones of each role that are as large as its first one."""
    kept: list[tuple[str, Size]] = []
    for _, of_role in groupby(images, lambda image: role_of(image[0])[0]):
        first, *others = of_role
        while others and others[-1][1] == first[1]:
            others.pop()
        kept += [first, *others]
    return tuple(kept)


def _merge(samples: Sequence[ImageSizes]) -> tuple[list[tuple[str, Size]], bool]:
    """Return all images that any of these samples has, in order, and whether a sample lacks some.

    All have images in the same roles.
    """
    images = {*chain.from_iterable(samples)}
    roles = [name for name, _ in samples[0]]

    def place(image: tuple[str, Size]) -> tuple[int, int]:
        role, number = role_of(image[0])
        return roles.index(role), number

    merged = sorted(images, key=place)
    return merged, any(len(sample) < len(merged) for sample in samples)
