"""Tells from a path alone what kind of source lies there, unless the user says it.

A folder may hold several kinds. Where one of them is plainly a part of the other, as tables beside
images are, it is left out and counted; where not, the user is asked to name one.
"""

import posixpath
import re
from dataclasses import replace
from itertools import islice
from typing import Any

from wdsprep.dataset.chunks import Chunks
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.dataset.stored_dataset import read_manifest
from wdsprep.errors import SourceError, UsageError
from wdsprep.images.headers import IMAGES
from wdsprep.limits import MAX_NBYTES
from wdsprep.sources.base import Columns, Role, Source
from wdsprep.sources.folder import FolderSource
from wdsprep.sources.patterns import (
    ABOUT_ARROW,
    ALL_TARS,
    ARROW,
    ARROW_STATE,
    MDS_ENDINGS,
    PARQUET,
    TEXT_TABLES,
    Pattern,
    expand_braces,
    extension,
    is_tar,
    table_files,
    table_kind,
)
from wdsprep.sources.tars import TarsSource
from wdsprep.store import did_you_mean_place, open_store, shared_store, split_url
from wdsprep.store.base import Entry, absolute, expand_home, is_hidden, is_web, lies_in
from wdsprep.store.schemes import ANY_PLACE, KEYED
from wdsprep.text import command, examples

LOOKED_AT = 2_000  # files of a folder: enough to see what it is full of
GLOB = re.compile(r"[*?\[{]")
LISTS = frozenset({"txt"})
SAVED = ("arrow", "mds")
"""Whole datasets of other libraries, by their folders."""
TABLES = (TEXT_TABLES | PARQUET) - LISTS
"""Extensions of tables that have columns."""


class UnclearSourceError(SourceError):
    """An error for a place that holds nothing that can be packed, or several kinds of input.

    `what` says which. The rest of the message is for the user of `pack`.
    """

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}: {advice}")
        self.what = what


def recognise(
    url: str,
    *,
    columns: Columns,
    rows_per_item: int,
    max_nbytes: int = MAX_NBYTES,
    input_format: str = "auto",
) -> Source:
    """Return the source at `url`.

    The source is a folder of images, tars, tables of images, tables of URLs, or what `datasets` or
    MosaicML streaming have written. Tars and tables may be given by a glob or braces. Images of
    more than `max_nbytes` in folders and tars are not read. Raise SourceError or UsageError if
    nothing there can be packed, or if it is unclear which files are meant.
    """
    if url.startswith("pipe:"):
        raise UsageError(f"pack cannot read {url}: give {ANY_PLACE}, or a table by https://")
    kinds, place, pattern = _find(url, input_format)
    if kinds == {"images"}:
        roles = tuple(_find_role_folder(role, place) for role in columns.roles)
        columns = replace(columns, roles=roles)
        return FolderSource(url=place, columns=columns, max_nbytes=max_nbytes)
    if kinds == {"tars"}:
        if elsewhere := next((role for role in columns.roles if "/" in role.where), None):
            raise UsageError(
                f"--role {elsewhere.name}={elsewhere.where}: {url} holds tars, which have images "
                "in roles as members: give their ending, such as .source.jpg"
            )
        pattern = pattern or ALL_TARS
        return TarsSource(url=place, pattern=pattern, columns=columns, max_nbytes=max_nbytes)
    if kinds <= {*SAVED}:
        from wdsprep.sources.table_sources import ArrowSource, MdsSource

        return (MdsSource if "mds" in kinds else ArrowSource)(url=place, columns=columns)
    # Tables are read for URLs, and Parquet for images, unless the user named a column of URLs, or
    # the first file has a column of URLs and none of images.
    from wdsprep.sources.table_sources import TableSource, UrlSource, holds_bytes, url_column

    tables: dict[str, Any] = {"url": place, "pattern": pattern, "columns": columns}
    if kinds == PARQUET and not columns.url:
        from wdsprep.sources.tables.parquet import ParquetTable

        first = next(table_files(place, pattern, PARQUET)).name
        table = ParquetTable(shared_store(place), first)
        has_images = columns.image or any(map(holds_bytes, table.schema.types))
        if has_images or not url_column(table.texts()):
            return TableSource(**tables, rows_per_item=rows_per_item)
    return UrlSource(**tables, rows_per_item=rows_per_item, kinds=kinds)


def _find_role_folder(role: Role, place: str) -> Role:
    """Return a role of the folder at `place`, with the URL of the folder of its own, if it has one.

    Raise UsageError if that is a file, or lies in `place`.
    """
    if role.is_ending or not ("/" in role.where or is_folder(role.where)):
        return role
    url = absolute(role.where)
    if _is_file(url):
        raise UsageError(f"--role {role.name}: {role.where} is a file: give its folder")
    url = shared_store(url).url
    if lies_in(url, place):
        raise UsageError(
            f"--role {role.name}: {role.where} lies in {place}, of which all images are targets: "
            "give a folder beside it, an ending such as .source.jpg, or a field of metadata.jsonl"
        )
    return replace(role, url=url)


def recognise_tables(url: str) -> tuple[str, list[Entry]]:
    """Return the tables at `url`, other than plain lists, after the URL of their store.

    `url` may be a file, a glob, a folder, or a file on the web. Raise SourceError if there are no
    tables, and UsageError if Parquet lies beside tables of other kinds.
    """
    kind, in_folder = _kind_of_place(url), is_folder(url)
    place, pattern = url, ""
    if not in_folder and not is_web(url) and (kind or GLOB.search(url)):
        place, pattern = split_pattern(url)
    kinds = frozenset({kind}) & TABLES
    if in_folder or not (kinds or kind or is_web(url) or (not pattern and _is_file(url))):
        wanted = Pattern(pattern or "*")
        there = shared_store(place).list(wanted.start)
        names = list(islice((e.name for e in there if wanted.takes(e.name)), LOOKED_AT))
        kinds = frozenset(map(table_kind, names)) & TABLES
        if not kinds:
            holds = "holds no table" if names else "is empty or does not exist"
            meant = "" if names else did_you_mean_place(url)
            raise SourceError(
                f"{url} {holds}: give .parquet, .csv, .tsv or .jsonl, or their folder{meant}"
            )
        if kinds > PARQUET:
            firsts = (next(n for n in names if table_kind(n) == kind) for kind in sorted(kinds))
            raise UsageError(
                f"{url} holds Parquet and other tables ({', '.join(firsts)}): give those that are "
                "meant, as in FOLDER/*.parquet"
            )
    if not kinds:
        raise SourceError(f"{url} is not a table: give .parquet, .csv, .tsv or .jsonl")
    return shared_store(place).url, list(table_files(place, pattern, kinds))


Inputs = tuple[frozenset[str], str, str]
"""The kinds of files that are packed, their folder, and the pattern of their names, "" for all."""


def _kind_of_place(url: str) -> str:
    """Return `tars` or the kind of table that a path or URL names, or "" if it names neither."""
    path = url.partition("?")[0] if is_web(url) else url
    return "tars" if is_tar(path) else table_kind(path)


def _find(url: str, wanted: str) -> Inputs:
    """Return the inputs at `url`: in a folder those of the format `wanted`.

    If that is "auto", these are the ones that are plainly meant. Raise UsageError if `url` names
    files of a kind that cannot be read so.
    """
    kind, is_pattern = _kind_of_place(url), bool(GLOB.search(url))
    is_auto, is_image = wanted == "auto", extension(url) in IMAGES
    if is_web(url):
        if kind in ("", "tars"):
            raise UsageError(
                f"{url}: only tables are read from the web, and by pack (.parquet, .csv, .tsv, "
                f".jsonl, .txt): download it, and give {ANY_PLACE}"
            )
    elif is_folder(url) or not (kind or is_pattern or is_image):  # whatever characters it has
        if is_auto:
            return _find_in_folder(url)
        return frozenset({wanted}), shared_store(url).url, ""
    elif wanted in ("images", *SAVED) or (is_auto and is_image):
        what = "" if is_auto else f", as --input-format {wanted} needs"
        raise UsageError(f"{url} is not a folder{what}: give the one that the files are in")
    elif is_pattern:
        return (frozenset({kind or "tars"} if is_auto else {wanted}), *split_pattern(url))
    if wanted not in ("auto", kind):
        raise UsageError(
            f"{url}: a single file is read by its extension, not by --input-format {wanted}: "
            "leave the option out, or rename the file"
        )
    if is_web(url):
        return frozenset({kind}), url, ""
    if kind != "tars" and not _is_file(url):
        return _find_in_folder(url)
    store, name = split_url(url)
    if kind in LISTS and not _begins_with_a_url(store.url, name):
        raise SourceError(
            f"{url} is not a list of URLs, as its first line shows: give one, or for a caption "
            "the folder that its image is in"
        )
    return frozenset({kind}), store.url, name


def is_folder(url: str) -> bool:
    return "://" not in url and expand_home(url).is_dir()


def _find_in_folder(url: str) -> Inputs:
    store = shared_store(url)
    if any(entry.name == MANIFEST for entry in store.list(MANIFEST)):  # hardly to be packed again
        manifest = read_manifest(store)
        if manifest and manifest.dataset == "latents":
            raise UsageError(f"{url} holds latents, not images to pack: give another source")
        raise UsageError(
            f"{url} is packed already: {command('encode', url, '--resolution', 'N')} is next; "
            "to pack its shards into other ones, add --input-format tars"
        )
    seen = (entry.name for entry in store.list() if not is_hidden(entry.name))
    names = list(islice(seen, LOOKED_AT))
    tars = [name for name in names if is_tar(name)]
    images = [name for name in names if extension(name) in IMAGES]
    if tars and images:
        raise UnclearSourceError(
            f"{url} holds images ({examples(images)}) and tars ({examples(tars)})",
            "say which are meant by --input-format images or --input-format tars",
        )
    if not names:
        raise UnclearSourceError(
            f"{url} is empty or does not exist{did_you_mean_place(url)}, or is a file of a kind "
            "that is not known here",
            "give a folder of images, tars or tables",
        )
    about = {posixpath.basename(name) for name in names}
    tables = frozenset(map(table_kind, names)) - {""}
    first = next((name for name in names if table_kind(name) == "txt"), "")
    kinds = frozenset({"tars" if tars else "images"})
    if images or tars:
        pass
    elif any(name.endswith(MDS_ENDINGS) for name in names) or about == {"index.json"}:
        kinds = frozenset({"mds"})  # of an index alone all shards are gone, which its reader says
    elif any(name.endswith(ARROW) for name in names) or (
        ARROW_STATE in about and about <= ABOUT_ARROW
    ):
        kinds = frozenset({"arrow"})
    elif "parquet" in tables:
        kinds = PARQUET
    elif tables - LISTS:  # texts beside them are captions
        kinds = tables - LISTS
    elif first and _begins_with_a_url(store.url, first):
        kinds = LISTS
    return kinds, store.url, ""


def _begins_with_a_url(url: str, name: str) -> bool:
    """Return whether a list begins with a URL.

    A gzipped list is not read, and counts as one that does.
    """
    if name.endswith(".gz"):
        return True
    with Chunks(shared_store(url), name, chunk_nbytes=100).as_stream() as text:
        return bool(
            re.match(rb"(\xef\xbb\xbf)?\s*(https?|%s)://" % "|".join(KEYED).encode(), text.read(50))
        )


def _is_file(url: str) -> bool:
    store, name = split_url(url)
    first = next(iter(store.list(name)), None)  # it comes before all whose names begin with its own
    return first is not None and first.name == name


def split_pattern(url: str) -> tuple[str, str]:
    """Split a URL into the folder above its first wildcard, and the pattern below it.

    Without a wildcard, the pattern is the file's name. Raise SourceError if the braces of the
    pattern stand for too many names.
    """
    wild = GLOB.search(url)
    slash = url.rfind("/", 0, wild.start() if wild else len(url))
    folder = url[:slash] if slash > 0 else "/" if slash == 0 else "."
    expand_braces(url)  # refuse an absurd one before anything is listed
    return open_store(folder).url, url[slash + 1 :]
