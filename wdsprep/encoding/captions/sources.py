"""Captions in place of the samples' own: their options, and the search for them in a worker.

`CaptionOptions` are the options of a user, and `CaptionSource` is what follows for one dataset: its
settings, and what a worker needs to find captions. `table` reads a table, `lookup` stores it.
"""

import json
import os
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from wdsprep.changed_settings import SettingWords
from wdsprep.dataset.names import lookup_name
from wdsprep.dataset.records import Text, between, read_record
from wdsprep.dataset.samples import Sample, value_at_path
from wdsprep.errors import FormatError, UsageError
from wdsprep.limits import MAX_TABLE_ROWS
from wdsprep.options import Options, about
from wdsprep.runners.base import HopelessError
from wdsprep.sources.captions import caption_at
from wdsprep.text import EXAMPLES, brief, parse_names

if TYPE_CHECKING:
    from wdsprep.encoding.captions.lookup import OpenLookup

OWN = "caption"
"""The name of the samples' own captions, and of captions that replace them."""
CAPTION = "{caption}"
"""The part of a place that is replaced by the name of the dataset's captions."""
BY = ("key", "source", "url", "sha256")
"""The columns that may identify samples in a table: the first that it has is used, by default."""
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionSource:
    """The source of the captions of a dataset.

    They are the samples' own unless a `field` of their json is given, or the `digest` of a lookup.
    The lookup lies in the dataset `at`, in a file with the digest `file_digest`. `name` is the name
    by which a loader selects the captions.
    """

    name: str = OWN
    field: str = ""
    by: str = ""
    digest: str = ""
    file_digest: str = ""
    at: str = ""

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of a dataset that say where its captions come from.

        Settings with their default values are left out.
        """
        said = {
            "caption_field": self.field,
            "caption_name": self.name if self.name != OWN else "",
            "captions": self.digest,
            "captions_by": self.by,
        }
        return {name: value for name, value in said.items() if value}

    def open(self) -> "Captions":
        if self.digest:
            from wdsprep.encoding.captions.lookup import open_lookup  # no help needs it

            lookup = open_lookup(self.at, lookup_name(self.digest), self.file_digest)
            return TableCaptions(self.by, lookup)
        return FieldCaptions(self.field) if self.field else Captions()


CAPTIONS = "Captions"


def _say_captions(before: str | None, now: str | None) -> str:
    """Say how --captions has changed. Of a digest nobody knows what it is of."""
    if not before or not now:
        return "--captions is given (was not)" if now else "no --captions (was given)"
    return "--captions says other captions than those it was made with"


def _check_path(given: Any) -> str:
    """Check that a value is a path in a json, such as meta.long, and return it."""
    if not isinstance(given, str) or not all(given.split(".")):
        raise UsageError(f"{brief(given)} is not a path in a json, such as meta.long or captions.1")
    return given


def _check_paths(given: Any) -> tuple[str, ...]:
    return tuple(map(_check_path, parse_names(given)))


@dataclass(frozen=True, kw_only=True)
class OneCaption(Options):
    """The options of captions if each sample has one caption."""

    captions: "str | os.PathLike[str]" = field(
        default="",
        metadata=about(
            "Take captions from this table: Parquet, CSV, TSV or JSON lines, or a folder or "
            "pattern of them, with a column key, source, url or sha256. Samples that it does not "
            "list keep their own.",
            CAPTIONS,
            is_place=True,
            metavar="TABLE",
            page="take captions from a table, [in place of the samples' own](#other-captions)",
            settings={"captions": SettingWords(say=_say_captions)},
        ),
    )
    captions_by: str = field(
        default="",
        metadata=about(
            "Find samples in the table by this column.",
            CAPTIONS,
            choices=BY,
            metavar="COLUMN",
            usual="the first of those that it has",
            example="key|source|url|sha256",
            page="which column of the table names the samples",
        ),
    )
    caption_column: str = field(
        default="",
        metadata=about(
            "Take captions from this column.",
            CAPTIONS,
            usual="caption",
            example="NAME",
            page="which column of the table has the captions",
        ),
    )
    caption_field: str = field(
        default="",
        metadata=about(
            "Take captions from this field of the json of each sample, such as meta.long or "
            "captions.1.",
            CAPTIONS,
            read=_check_path,
            metavar="PATH",
            example="meta.long",
            page="take captions from a field of the samples' json",
        ),
    )
    caption_name: str = field(
        default="",
        metadata=about(
            "Give the captions this name, by which a loader selects them.",
            CAPTIONS,
            usual="the field's last part",
            order=1,
            example="long",
            page="the name of the captions for the loader's `captions=`",
        ),
    )

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths in the json whose captions each make a separate dataset."""
        return ()

    def check_together(self) -> None:
        super().check_together()
        self._check_apart()
        found = [source.name for source in self.sources]
        for name in found:
            if not NAME.fullmatch(name):
                raise UsageError(
                    f"captions cannot be named {name!r}: give a --caption-name of letters and "
                    "digits"
                )
            if found.count(name) > 1:
                raise UsageError(
                    f"two of --caption-fields end in {name!r}, after which their captions are "
                    "named: encode one of them with --caption-field and a --caption-name"
                )

    def _check_apart(self) -> None:
        given = {
            "--captions": self.captions,
            "--caption-field": self.caption_field,
            "--caption-fields": self.paths,
        }
        if len(several := [option for option, value in given.items() if value]) > 1:
            raise UsageError(f"{several[0]} and {several[1]} both choose captions: give one")
        of_table = {"--captions-by": self.captions_by, "--caption-column": self.caption_column}
        if (alone := [option for option, value in of_table.items() if value]) and not self.captions:
            raise UsageError(f"{alone[0]} is for a table: give --captions TABLE too")
        if self.caption_name and self.paths:
            raise UsageError(
                "--caption-fields names the captions after the last part of each field: leave "
                "--caption-name out"
            )

    @property
    def sources(self) -> tuple[CaptionSource, ...]:
        """Return the sources of captions that the options name, one for each text dataset.

        A table has not been read yet.
        """
        return tuple(map(self._source, self.paths or (self.caption_field,)))

    def _source(self, path: str) -> CaptionSource:
        usual = path.rpartition(".")[2] or OWN
        return CaptionSource(name=self.caption_name or usual, field="" if path == OWN else path)


@dataclass(frozen=True, kw_only=True)
class CaptionOptions(OneCaption):
    """The options of captions if a sample may have several, each in a separate dataset."""

    caption_fields: str | Sequence[str] = field(
        default=(),
        metadata=about(
            "Encode the captions of several fields in one pass, with --latents none, each into a "
            "separate dataset.",
            CAPTIONS,
            read=_check_paths,
            metavar="A,B,...",
            example="alt,long",
            page="take captions from several fields at once, each into a separate text dataset",
        ),
    )

    @property
    def paths(self) -> tuple[str, ...]:
        return parse_names(self.caption_fields)


OWN_CAPTIONS = CaptionOptions()


@dataclass(frozen=True, slots=True)
class FoundCaption:
    """A caption that was found for a sample, and the number of its row in a lookup."""

    caption: str
    row: int = -1


class Captions:
    """A search for captions, for any number of threads; this one leaves samples their own."""

    def find(self, key: str, sample: Sample, *, is_packed: bool) -> FoundCaption | None:
        """Return the caption that was found for a sample, or None if it keeps its own."""
        del key, sample, is_packed
        return None

    def close(self) -> None:
        """Close the files in which captions are searched."""


class FieldCaptions(Captions):
    def __init__(self, path: str) -> None:
        self._check_path = path

    def find(self, key: str, sample: Sample, *, is_packed: bool) -> FoundCaption | None:
        del key, is_packed
        found = caption_at(sample.facts, self._check_path)
        return None if found is None else FoundCaption(found)


class TableCaptions(Captions):
    def __init__(self, by: str, lookup: "OpenLookup") -> None:
        self._by, self._lookup = by, lookup

    def find(self, key: str, sample: Sample, *, is_packed: bool) -> FoundCaption | None:
        """Return the caption that a table has for a sample, or None if it keeps its own.

        A key that is not found is searched again without leading zeros, which tables lose that
        store keys as numbers.
        """
        name = name_of(self._by, key, sample, is_packed=is_packed)
        try:
            found = self._lookup.find(replace_surrogates(name)) if name else None
            if found is None and self._by == "key" and key.isdecimal():
                found = self._lookup.find(key.lstrip("0") or "0")
        except FormatError as error:
            raise HopelessError(str(error)) from error
        return FoundCaption(*found) if found else None

    def close(self) -> None:
        self._lookup.close()


def name_of(by: str, key: str, sample: Sample, *, is_packed: bool) -> str:
    """Return the name by which a table lists a sample, or "" if the sample has none."""
    if by == "key":
        return key
    if by == "source" and not is_packed:
        return sample.source
    found = value_at_path(sample.facts, by)
    return "" if found is None else str(found)


def replace_surrogates(text: str) -> str:
    """Return a text with lone surrogates replaced, as it is stored."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


@dataclass(slots=True)
class CaptionUse:
    """The rows of a lookup that samples of a shard use, and the keys of some samples without one.

    Samples that are rejected for their images count too. The record is stored beside the shard. All
    of them together tell which rows no sample uses, whichever runs made the shards.
    """

    rows: "array[int]" = field(default_factory=lambda: array("I"))
    unnamed: list[str] = field(default_factory=list)

    def note_row(self, named: FoundCaption | None) -> None:
        if named is not None and named.row >= 0:
            self.rows.append(named.row)

    def note_unnamed(self, key: str) -> None:
        if len(self.unnamed) < EXAMPLES:
            self.unnamed.append(key)

    def to_bytes(self) -> bytes:
        said = {"rows": sorted(set(self.rows)), "unnamed": self.unnamed}
        return json.dumps(said, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> "CaptionUse":
        said = read_record(_CaptionUseRecord, data, "a list of captions")
        return cls(rows=array("I", said["rows"]), unnamed=list(said["unnamed"]))


class _CaptionUseRecord(TypedDict):
    rows: list[Annotated[int, between(0, MAX_TABLE_ROWS, "the number of a row")]]
    unnamed: list[Text]
