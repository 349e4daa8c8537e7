"""Which files of a folder are meant: by a name, a glob, a `{000..010}` pattern, or their kind."""

import fnmatch
import os
import re
from collections.abc import Iterator

from wdsprep.errors import SourceError
from wdsprep.sources.base import Told, ignore_left_out
from wdsprep.store import did_you_mean_place, shared_store
from wdsprep.store.base import Entry, is_hidden
from wdsprep.text import plural

MAX_BRACES = 1_000_000
PARQUET = frozenset({"parquet"})
TEXT_TABLES = frozenset({"csv", "tsv", "jsonl", "txt"})
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz")
MDS_ENDINGS = (".mds", ".mds.zstd", ".mds.br", ".mds.bz2", ".mds.gz", ".mds.snappy")
ARROW = ".arrow"
ARROW_STATE = "state.json"
ABOUT_ARROW = frozenset({ARROW_STATE, "dataset_info.json", "dataset_dict.json"})
"""Files that `datasets` writes beside its data."""
ALL_TARS = f"{{{','.join(f'*{ending}' for ending in TAR_ENDINGS)}}}"


class Pattern:
    """A name or several, with wildcards and braces. It remembers which plain names it has met."""

    def __init__(self, pattern: str) -> None:
        wanted = expand_braces(pattern)
        self._count = len(wanted)
        self._missing = {name for name in wanted if not is_glob(name)}
        self._globs = [re.compile(fnmatch.translate(name)) for name in wanted if is_glob(name)]
        ends = [re.split(r"[*?\[]", name)[0] for name in (min(wanted), max(wanted))]
        self.start = os.path.commonprefix(ends)  # noqa: RUF071  (characters are meant)
        """The text that every match begins with, so that a listing passes over what cannot be
        one."""

    def takes(self, name: str) -> bool:
        """Return whether a name matches.

        A name that the pattern gives without a wildcard matches once, and is then noted as met.
        Wildcards match no hidden file.
        """
        if name in self._missing:
            self._missing.discard(name)
            return True
        return not is_hidden(name) and any(glob.match(name) for glob in self._globs)

    def check_met(self, url: str, noun: str) -> None:
        """Raise SourceError if a name given without a wildcard has not been met by `takes`.

        `noun` is what the message calls the files.
        """
        if self._missing:
            place, count = f"{url}/{min(self._missing)}", len(self._missing)
            missing = did_you_mean_place(place)
            if self._count > 1:
                missing = f" ({count:,} of {plural(self._count, noun)} missing)"
            raise SourceError(f"{place} does not exist{missing}: check the path, or bring it back")


def table_files(
    url: str, pattern: str, kinds: frozenset[str], left_out: Told = ignore_left_out
) -> Iterator[Entry]:
    """Yield the tables below `url` that are of one of `kinds` and match the pattern.

    An empty pattern takes all tables of these kinds; only then does `left_out` get the kinds of
    other files. At the end, raise SourceError if a file that the pattern names is missing, or no
    table was found.
    """
    found = 0
    wanted = Pattern(pattern) if pattern else None
    for entry in shared_store(url).list(wanted.start if wanted else ""):
        is_meant = wanted.takes(entry.name) if wanted else not is_hidden(entry.name)
        if is_meant and table_kind(entry.name) in kinds:
            found += 1
            yield entry
        elif not wanted and not is_hidden(entry.name):
            left_out(kind_of(entry.name))
    if wanted:
        wanted.check_met(url, "table")
    if not found:
        named = f"matches {url}/{pattern}" if pattern else f"of {' or '.join(kinds)} is in {url}"
        raise SourceError(f"no table {named}: give another source")


def table_kind(name: str) -> str:
    """Return the kind of a table, by its name, or "" if it is none.

    The kind is `parquet`, `csv`, `tsv`, `jsonl` or `txt`; all but the first may be gzipped.
    """
    match = re.search(r"[^/]\.(?:(parquet)|(csv|tsv|jsonl|ndjson|txt)(\.gz)?)$", name.lower())
    if match is None:
        return ""
    kind = match[1] or match[2]
    return "jsonl" if kind == "ndjson" else kind


def is_table(place: str) -> bool:
    """Return whether a path or URL names a table with columns, and not a dataset."""
    return table_kind(place) not in ("", "txt")


def extension(name: str) -> str:
    base, dot, kind = name.rpartition(".")
    return kind.lower() if dot and "/" not in kind and base else ""


def kind_of(name: str) -> str:
    """Return the extension of a name, such as `.mov`, or "" if it has none."""
    found = extension(name)
    return f".{found}" if found else ""


def is_tar(name: str) -> bool:
    return name.endswith(TAR_ENDINGS)


def tar_stem(name: str) -> str:
    """Return the name of a tar without its ending, which is one of TAR_ENDINGS."""
    return next((name.removesuffix(end) for end in TAR_ENDINGS if name.endswith(end)), name)


def expand_braces(pattern: str) -> list[str]:
    """Return the names that `{000..010}` or `{a,b}` in a pattern stands for, as in webdataset.

    Wildcards stay in the names. Raise SourceError if there are more than MAX_BRACES names.
    """
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    choices = match[1].split(",")
    if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", match[1]):
        first, last = int(numbers[1]), int(numbers[2])
        if last - first >= MAX_BRACES:
            raise SourceError(f"{match[0]} stands for over {MAX_BRACES:,} files: give fewer")
        choices = [str(n).zfill(len(numbers[1])) for n in range(first, last + 1)]
    names = [
        rest
        for part in choices
        for rest in expand_braces(pattern[: match.start()] + part + pattern[match.end() :])
    ]
    if len(names) > MAX_BRACES:
        raise SourceError(f"{pattern} stands for over {MAX_BRACES:,} files: give fewer")
    return names


def is_glob(name: str) -> bool:
    return any(character in name for character in "*?[")
