"""Tells from a path alone what kind of source lies there."""

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

from wdsprep.errors import SourceError, UsageError
from wdsprep.images import IMAGES
from wdsprep.limits import MAX_NBYTES
from wdsprep.sources import Columns, Source
from wdsprep.sources.folder import FolderSource
from wdsprep.sources.patterns import (
    ALL_TARS,
    TEXT_TABLES,
    expand_braces,
    extension,
    is_tar,
    table_files,
    table_kind,
)
from wdsprep.sources.tars import TarsSource
from wdsprep.store import open_store, opened, split_url
from wdsprep.store.base import is_hidden, is_web, stream

LOOKED_AT = 2_000  # files of a folder: enough to see what it is full of
PARQUET = frozenset({"parquet"})
LISTS = frozenset({"txt"})


def recognise(
    url: str, *, columns: Columns, rows_per_item: int, max_nbytes: int = MAX_NBYTES
) -> Source:
    """The source at `url`: a folder, tars, Parquet tables of images, or tables of URLs; the last
    three also by glob or braces. Of a file that is larger than `max_nbytes` nothing is read."""
    found = _recognise(url, columns, rows_per_item)
    if isinstance(found, FolderSource | TarsSource):
        return replace(found, max_nbytes=max_nbytes)
    return found


def _recognise(url: str, columns: Columns, rows_per_item: int) -> Source:
    if is_web(url):
        return _of_the_web(url, columns, rows_per_item)
    if re.match(r"pipe:", url):
        raise UsageError(f"{url}: pack reads local paths, s3:// and tables by https://")
    if _is_folder(url):  # whatever characters are in its name
        return _folder(url, columns, rows_per_item)
    kind = table_kind(url)
    if not kind and (is_tar(url) or re.search(r"[*?\[{]", url)):
        folder, pattern = _split_pattern(url)
        return TarsSource(url=folder, pattern=pattern, columns=columns)
    if kind and re.search(r"[*?\[{]", url):
        folder, pattern = _split_pattern(url)
        return _tables(folder, pattern, frozenset({kind}), columns, rows_per_item)
    if kind and _is_file(url):
        store, name = split_url(url)
        return _tables(store.url, name, frozenset({kind}), columns, rows_per_item)
    return _folder(url, columns, rows_per_item)


def _of_the_web(url: str, columns: Columns, rows_per_item: int) -> Source:
    name = url.partition("?")[0].rpartition("/")[2]
    if not table_kind(name):
        raise UsageError(
            f"{url}: only tables are read from the web, and by pack (.parquet, .csv, .tsv, .jsonl, "
            ".txt): download it, and give a local path or s3://"
        )
    kinds = frozenset({table_kind(name)})
    return _tables(url, "", kinds, columns, rows_per_item)


def _is_folder(url: str) -> bool:
    return "://" not in url and Path(url).expanduser().is_dir()


def _tables(
    url: str, pattern: str, kinds: frozenset[str], columns: Columns, rows_per_item: int
) -> Source:
    """Tables with images in a column, unless there is none but one of URLs."""
    if kinds == PARQUET and not columns.url and not _has_urls_alone(url, pattern, columns):
        from wdsprep.sources.image_tables import TableSource

        return TableSource(url=url, pattern=pattern, columns=columns, rows_per_item=rows_per_item)
    from wdsprep.sources.url_tables import UrlSource

    return UrlSource(
        url=url, pattern=pattern, columns=columns, rows_per_item=rows_per_item, kinds=kinds
    )


def _has_urls_alone(url: str, pattern: str, columns: Columns) -> bool:
    """What the first of some Parquet files has."""
    from wdsprep.sources.image_tables import image_column
    from wdsprep.sources.tables.parquet import ParquetTable
    from wdsprep.sources.url_tables import url_column

    first = next(table_files(url, pattern, PARQUET))
    table = ParquetTable(opened(url), first.name)
    has_images = bool(columns.image or image_column(table.schema))
    return not has_images and bool(url_column(table.texts()))


def _folder(url: str, columns: Columns, rows_per_item: int) -> Source:
    store = opened(url)
    seen = (entry.name for entry in store.list() if not is_hidden(entry.name))
    names = list(islice(seen, LOOKED_AT))
    kinds = {extension(name) for name in names}
    tars = [name for name in names if is_tar(name)]
    if tars and IMAGES & kinds:
        raise SourceError(f"{url} holds both images and tars: name the tars as '{url}/*.tar'")
    if tars:
        return TarsSource(url=store.url, pattern=ALL_TARS, columns=columns)
    if not kinds and _is_file(url):
        raise SourceError(
            f"{url} is a file of a kind that pack does not know: give a folder of images, tars or "
            "tables"
        )
    if not kinds:
        raise SourceError(f"{url} is empty or not there: put images in it, or name another source")
    tables = frozenset() if IMAGES & kinds else _table_kinds(store.url, names)
    if tables:
        return _tables(store.url, "", tables, columns, rows_per_item)
    return FolderSource(url=store.url, columns=columns)


def _table_kinds(url: str, names: Iterable[str]) -> frozenset[str]:
    """The kinds of table that a folder without images is there for. Texts are lists of URLs only
    where the first of them looks like one: otherwise they are captions."""
    kinds = frozenset(map(table_kind, names)) - {""}
    if "parquet" in kinds:
        return PARQUET
    if kinds & TEXT_TABLES - LISTS:
        return kinds - LISTS
    first = next((name for name in names if table_kind(name) == "txt"), "")
    return LISTS if first and _begins_with_a_url(url, first) else frozenset()


def _begins_with_a_url(url: str, name: str) -> bool:
    if name.endswith(".gz"):
        return True
    with stream(opened(url), name, chunk_nbytes=100) as text:
        return bool(re.match(rb"(\xef\xbb\xbf)?\s*(https?|s3)://", text.read(50)))


def _is_file(url: str) -> bool:
    store, name = split_url(url)
    return any(entry.name == name for entry in store.list(name))


def _split_pattern(url: str) -> tuple[str, str]:
    """The folder above the first wildcard, and the pattern below it."""
    wild = re.search(r"[*?\[{]", url)
    slash = url.rfind("/", 0, wild.start() if wild else len(url))
    folder = url[:slash] if slash > 0 else "/" if slash == 0 else "."
    expand_braces(url)  # refuse an absurd one before anything is listed
    return open_store(folder).url, url[slash + 1 :]
