"""Lay out columns of tables of others and of scores in the order of the samples of a dataset.

The rows of a table are joined by a name that samples have (`key_join`), those of scores by their
places. A row counts as missing if its name or one of its numbers is missing, or is NaN. All columns
of numbers are laid out for batches, else only those that have to be: so what the others hold is of
no weight.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from wdsprep.dataset.kept_file import KeptWriter, open_or_make, release_pages
from wdsprep.dataset.random_numbers import Ints, key_of
from wdsprep.dataset.settings import NUMBER, WHOLE
from wdsprep.dataset.settings import TEXT as SCORED_TEXT
from wdsprep.errors import NotFoundError, UsageError
from wdsprep.sources.captions import first_of
from wdsprep.sources.tables.text import BY, open_table
from wdsprep.store import did_you_mean_place, split_url
from wdsprep.tables.column_conditions import mask_of, numbers_of, whole_numbers
from wdsprep.tables.joined_columns import HAS_ROW, STARTS, LaidOut
from wdsprep.tables.key_join import NAME, SAMPLE, open_join
from wdsprep.tables.other_tables import TEXT, Wanted, add_rows, is_wanted, text_bytes
from wdsprep.text import list_columns, plural

BLOCK = 1 << 20
"""Samples whose texts are counted at a time."""
JoinedRows = tuple[Ints, Mapping[str, pa.Array]]
"""The places of samples that have rows among all, and columns of these."""
DTYPES = {NUMBER: "<f8", WHOLE: "<i8"}
_log = logging.getLogger("wdsprep")


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedSamples:
    """The samples of a dataset that something is joined to, in the order of its shards.

    `sizes` counts the samples of each shard, and `contents` changes whenever they do. `read_names`
    yields a column of names of each shard.
    """

    url: str
    sizes: Ints
    contents: Sequence[str]
    read_names: Callable[[str], Iterable[pa.Array | pa.ChunkedArray]]


def lay_out_table(
    place: str, samples: JoinedSamples, cache: Path | None, *, wanted: Wanted
) -> LaidOut:
    """Lay out the columns of a table of others, or open them if that was done before.

    Its rows are joined by the first of the columns `BY` that it has.
    """
    store, name = split_url(place)
    entry = next((entry for entry in store.list(name) if entry.name == name), None)
    if entry is None:
        meant = did_you_mean_place(place)
        raise NotFoundError(f"{place} does not exist: give the path or URL of a table{meant}")
    table = open_table(store.url, name)
    columns = table.columns()
    if not (by := first_of(BY, columns)):
        raise UsageError(
            f"{place} has no column {', '.join(BY[:-1])} or {BY[-1]} (it has "
            f"{list_columns(columns)}): add one"
        )
    named, for_batches = {*wanted[0]} & {*columns} - {by}, wanted[1]
    what = f"{store.url}/{name}", entry.stamp, str(entry.nbytes), f"{for_batches}", *sorted(named)

    def number_names() -> Iterator[pa.RecordBatch]:
        first = 0
        for column in samples.read_names(by):
            for names in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
                numbers = whole_numbers(np.arange(first, first + len(names)))
                yield pa.record_batch([names, numbers], names=[NAME, SAMPLE])
                first += len(names)

    def make(writer: KeptWriter, path: Path) -> None:
        told = "%s: reading the table; its columns, in the order of %s, are kept in %s"
        _log.info(told, place, samples.url, path)
        with open_join() as join:
            numbers, texts, digest = add_rows(join, place, table, by, (named, for_batches))
            join.find_first(numbers if join.rows else ())  # no rows have no columns
            for why, count in (
                (f"without a {by} or a number", join.unnamed + join.lacking),
                (f"with a {by} that an earlier row has", join.repeated),
            ):
                if count:
                    _log.warning("%s: left out %s %s", place, plural(count, "row"), why)
            if not join.names:
                raise UsageError(f"{place} has no row with a {by} and numbers")
            join.match(number_names())

            def read(names: Sequence[str]) -> Iterator[JoinedRows]:
                return ((places, columns) for places, _, columns in join.read(names))

            _write(writer, samples.sizes, numbers, texts, read)
            writer.facts |= {"digest": digest, "offered": sorted(columns)}

    return _open(place, samples, cache, what, make, has_texts=bool(named))


def lay_out_scores(
    url: str,
    contents: Sequence[str],
    kinds: Mapping[str, str],
    samples: JoinedSamples,
    cache: Path | None,
    *,
    wanted: Wanted,
    read: Callable[[Collection[str]], Iterable[pa.Table]],
) -> LaidOut:
    """Lay out the columns of a dataset of scores, or open them if that was done before.

    `kinds` says what each column holds, and `contents` identifies its shards. `read` yields for
    each shard of the samples the rows of these, all null for samples without scores.
    """
    dtypes = {name: DTYPES[kind] for name, kind in kinds.items() if kind in DTYPES}
    numbers = {name: dtype for name, dtype in dtypes.items() if is_wanted(name, dtype, wanted)}
    texts = [name for name in sorted(wanted[0]) if kinds.get(name) == SCORED_TEXT]
    what = "scores", *contents, *numbers, "", *texts

    def read_columns(names: Sequence[str]) -> Iterator[JoinedRows]:
        starts = np.cumsum([0, *samples.sizes])
        for start, rows in zip(starts.tolist(), read({*numbers, *names}), strict=False):
            has_row = np.ones(len(rows), np.bool_)
            for name in numbers:
                has_row &= ~mask_of(pc.is_null(rows[name], nan_is_null=True))
            found = rows.select(names).filter(pa.array(has_row)).combine_chunks()
            columns = {name: found[name].combine_chunks() for name in names}
            yield start + np.flatnonzero(has_row), columns

    def make(writer: KeptWriter, path: Path) -> None:
        _log.info("%s: reading scores; their columns are kept in %s", url, path)
        _write(writer, samples.sizes, numbers, texts, read_columns)
        writer.facts |= {"digest": f"{key_of(*what):016x}", "offered": sorted(kinds)}

    return _open(url, samples, cache, what, make, has_texts=bool(texts))


def _open(
    url: str,
    samples: JoinedSamples,
    cache: Path | None,
    what: Sequence[str],
    make: Callable[[KeptWriter, Path], None],
    *,
    has_texts: bool,
) -> LaidOut:
    told_by = ("laid out", *what, "", *samples.contents)
    open_file = partial(open_or_make, cache, told_by, make, has_texts=has_texts)

    def keep_facts(writer: KeptWriter, _path: Path) -> None:
        writer.facts |= open_file().facts

    facts = open_or_make(cache, ("facts", *told_by), keep_facts).facts
    return LaidOut(url=url, open_file=open_file, **facts)


def _write(
    writer: KeptWriter,
    sizes: Ints,
    numbers: Mapping[str, str],
    texts: Sequence[str],
    read: Callable[[Sequence[str]], Iterable[JoinedRows]],
) -> None:
    """Write columns of numbers, given their dtypes, and of texts, for samples in shards of `sizes`.

    `read` yields some columns of the samples that have a row, in the order of the samples.
    """
    samples = int(sizes.sum())
    writer.reserve(STARTS, "<i8", len(sizes) + 1)[1:] = np.cumsum(sizes)
    has_row = writer.reserve(HAS_ROW, "|b1", samples)
    values = {
        name: writer.reserve(f"numbers {name}", dtype, samples) for name, dtype in numbers.items()
    }
    for places, columns in read([*numbers]):
        has_row[places] = True
        for name, dtype in numbers.items():
            column = columns[name]
            if column.type == TEXT:
                column = pc.utf8_trim_whitespace(column)
            values[name][places] = numbers_of(column.cast(pa.from_numpy_dtype(dtype)))
        for array in (has_row, *values.values()):  # which are written, and take no more memory
            release_pages(array)
    for name in texts:
        ends = writer.reserve(f"ends {name}", "<i8", samples + 1)
        writer.add(f"texts {name}", "|u1", _text_parts(name, read([name]), ends))
        for start in range(1, len(ends), BLOCK):
            ends[start] += ends[start - 1]
            np.cumsum(ends[start : start + BLOCK], out=ends[start : start + BLOCK])
    writer.facts |= {"numbers": numbers, "texts": texts}


def _text_parts(name: str, rows: Iterable[JoinedRows], ends: Ints) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of a column's texts; put how many each has behind its place in `ends`."""
    for places, columns in rows:
        filled = columns[name].cast(TEXT).fill_null("")
        ends[places + 1] = numbers_of(pc.binary_length(filled))
        yield np.frombuffer(text_bytes(filled), np.uint8)
