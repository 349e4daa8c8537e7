"""Tells from a path alone what kind of source lies there."""

import re
from itertools import islice
from pathlib import Path

from wdsprep.errors import SourceError, UsageError
from wdsprep.sources import Columns, Source, is_hidden, opened, url_table_error
from wdsprep.sources.folder import IMAGES, FolderSource, extension
from wdsprep.sources.tars import TarsSource, expand_braces
from wdsprep.store import open_store, split_url

LOOKED_AT = 2_000  # files of a folder: enough to see what it is full of
URL_TABLES = ("csv", "tsv", "jsonl", "ndjson", "txt", "gz")


def recognise(url: str, *, columns: Columns, rows_per_item: int) -> Source:
    """The source at `url`: a folder, tars (also by glob or braces) or Parquet tables."""
    if re.match(r"(https?|pipe):", url):
        raise UsageError(f"{url}: pack reads local paths and s3://")
    if _is_folder(url):  # whatever characters are in its name
        return _folder(url, columns, rows_per_item)
    if url.endswith(".tar") or re.search(r"[*?\[{]", url):
        folder, pattern = _split_pattern(url)
        return TarsSource(url=folder, pattern=pattern, columns=columns)
    kind = extension(url)
    if kind == "parquet" or kind in URL_TABLES:
        store, name = split_url(url)
        if any(entry.name == name for entry in store.list(name)):
            return _table(store.url, name, kind, columns, rows_per_item)
    return _folder(url, columns, rows_per_item)


def _is_folder(url: str) -> bool:
    return "://" not in url and Path(url).expanduser().is_dir()


def _table(url: str, name: str, kind: str, columns: Columns, rows_per_item: int) -> Source:
    from wdsprep.sources.table import TableSource

    if kind in URL_TABLES:
        raise url_table_error(f"{url}/{name}")
    return TableSource(url=url, name=name, columns=columns, rows_per_item=rows_per_item)


def _folder(url: str, columns: Columns, rows_per_item: int) -> Source:
    store = opened(url)
    seen = (entry.name for entry in store.list() if not is_hidden(entry.name))
    kinds = {extension(name) for name in islice(seen, LOOKED_AT)}
    held = {"images": IMAGES & kinds, "tars": {"tar"} & kinds}
    if all(held.values()):
        raise SourceError(f"{url} holds both images and tars: name the tars as '{url}/*.tar'")
    if held["tars"]:
        return TarsSource(url=store.url, pattern="*.tar", columns=columns)
    if "parquet" in kinds and not held["images"]:
        return _table(store.url, "", "parquet", columns, rows_per_item)
    if not kinds and _is_file(url):
        raise SourceError(
            f"{url} is a file of a kind that pack does not know: give a folder of images, tars or "
            "Parquet tables"
        )
    if not kinds:
        raise SourceError(f"{url} is empty or not there: put images in it, or name another source")
    if kinds & set(URL_TABLES[:4]) and not held["images"]:
        raise url_table_error(url)
    return FolderSource(url=store.url, columns=columns)


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
