"""Join a table of small columns to the shards: `join=["scores.parquet"]`.

A table has a column `key` of texts, and columns of numbers, which become tensors of a batch: whole
numbers int64, others float32, booleans bool. A condition (`where`) asks for columns by name; it may
also ask for columns of texts, which batches do not have. A row counts as missing if its key or one
of its numbers is missing, or is NaN. Where no batches are served, only the named columns are read,
so that what the others hold is of no weight. Of two rows with the same key the first holds.

A table is read once, sorted by key in bounded memory (`sorted_table`), kept in a file and mapped
(`kept_file`). Datasets of scores are such tables too; their columns stand in the json of their
samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.kept_file import KeptFile, KeptWriter, open_or_make
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.score_columns import columns_of
from wdsprep.errors import NotFoundError, UsageError
from wdsprep.loading.shard_access.sample_cache import CacheDir, cache_folder
from wdsprep.loading.table_keys import (
    KEY,
    LACKING,
    WantedColumns,
    encode_keys,
    keys_to_numbers,
)
from wdsprep.sources.patterns import table_kind
from wdsprep.sources.tables.files import open_table
from wdsprep.store import did_you_mean_place, split_url
from wdsprep.text import examples

if TYPE_CHECKING:
    from wdsprep.loading.served_datasets import Dataset


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyedTable:
    """An open table that is sorted by key.

    `columns` has the dtype of each column of numbers that was read, and `offered` the names of all.
    `texts` lists the columns of texts that were asked for.
    """

    url: str
    columns: Mapping[str, str]
    offered: tuple[str, ...]
    texts: tuple[str, ...]
    digest: str
    _file: KeptFile
    _width: int
    """The number of digits of each key, or 0.

    Keys that are numbers of one length are kept as numbers, which are found sooner.
    """

    @property
    def rows(self) -> int:
        return len(self._file.arrays[KEY])

    def find_rows(self, keys: Sequence[str]) -> Ints:
        """Return the row of each key, or LACKING for a key without a row."""
        known = self._file.arrays[KEY]
        wanted = (
            keys_to_numbers(keys, self._width) if self._width else np.array(encode_keys(keys), "S")
        )
        found = np.searchsorted(known, wanted)
        inside = np.minimum(found, len(known) - 1)
        is_there = (known[inside] == wanted) if len(known) else np.zeros(len(keys), np.bool_)
        return np.where(is_there, inside, LACKING)

    def values_for(self, keys: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Return for each column the numbers of these keys.

        Raise UsageError if a key has no row.
        """
        places = self.find_rows(keys)
        if (places == LACKING).any():
            lacking = keys[int(np.flatnonzero(places == LACKING)[0])]
            raise UsageError(f"{self.url} has no row with numbers for the key {lacking}")
        return {name: self.column(name)[places] for name in self.columns}

    def column(self, name: str) -> NDArray[Any]:
        return self._file.arrays[f"numbers {name}"]

    def text(self, name: str, places: Ints) -> list[str | None]:
        """Return the texts of a column in these rows, or None for a row without a text."""
        ends, data = (self._file.arrays[f"{part} {name}"] for part in ("ends", "texts"))
        found: list[str | None] = []
        for place in places.tolist():
            start, end = (int(ends[place]), int(ends[place + 1])) if place != LACKING else (0, 0)
            found.append(data[start:end].tobytes().decode("utf-8", "replace") or None)
        return found


def is_table(place: str) -> bool:
    """Return whether a path or URL names a table and not a dataset."""
    return table_kind(place) not in ("", "txt")


def open_keyed_table(
    place: str, cache: CacheDir | None, *, named: Sequence[str] = (), for_batches: bool = True
) -> KeyedTable:
    """Open a table as one sorted by key. The first time, sort it and keep the result.

    It has the columns of texts that are `named`, and `for_batches` all columns of numbers, else
    only those that are named.
    """
    store, name = split_url(place)
    entry = next((each for each in store.list(name) if each.name == name), None)
    if entry is None:
        meant = did_you_mean_place(place)
        raise NotFoundError(f"{place} does not exist: give the path or URL of a table{meant}")
    table = open_table(store.url, name)
    there = table.columns()
    if KEY not in there:
        raise UsageError(f"{place} has no column {KEY} (it has {examples(there)}): add one")
    wanted = WantedColumns({*named} & {*there} - {KEY}, for_batches=for_batches)
    what = "table", f"{store.url}/{name}", entry.stamp, str(entry.nbytes), *wanted.cache_key

    def make(writer: KeptWriter, path: Path) -> None:
        from wdsprep.loading.sorted_table import sort_table  # pyarrow, which few need

        sort_table(place, table, wanted, writer, path)

    return _make_keyed_table(place, open_or_make(cache_folder(cache), what, make))


def open_scores_table(
    scores: "Dataset", cache: CacheDir | None, *, named: Sequence[str], for_batches: bool
) -> KeyedTable:
    """Open the scores of a dataset as a table sorted by key, which is kept for later.

    It has the columns that `open_keyed_table` describes.
    """
    wanted = WantedColumns({*named} & {*columns_of(scores.settings)}, for_batches=for_batches)
    what = "scores", *scores.names, *scores.contents, *wanted.cache_key

    def make(writer: KeptWriter, path: Path) -> None:
        from wdsprep.loading.score_rows import ScoreRows  # pyarrow, which few need
        from wdsprep.loading.sorted_table import sort_rows

        sort_rows(ScoreRows(scores, wanted), writer, path)

    return _make_keyed_table(scores.store.url, open_or_make(cache_folder(cache), what, make))


def _make_keyed_table(place: str, found: KeptFile) -> KeyedTable:
    if not found.facts["rows"]:
        raise UsageError(f"{place} has no row with a key and numbers")
    return KeyedTable(
        url=place,
        columns=found.facts["columns"],
        offered=tuple(found.facts["offered"]),
        texts=tuple(found.facts["texts"]),
        digest=found.facts["digest"],
        _file=found,
        _width=found.facts["width"],
    )
