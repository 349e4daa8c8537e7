"""Captions in place of the samples' own: the search for them in a worker.

`CaptionSource` is what follows from the options of a user for one dataset: its settings, and what a
worker needs to find captions. `table` reads a table, `lookup` stores it.
"""

import json
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, TypedDict

from wdsprep.dataset.file_names import lookup_name
from wdsprep.dataset.json_records import Text, between, read_record
from wdsprep.dataset.samples import Sample, value_at_path
from wdsprep.errors import FormatError
from wdsprep.limits import MAX_TABLE_ROWS
from wdsprep.runners.base import HopelessError
from wdsprep.sources.captions import caption_at
from wdsprep.text import EXAMPLES

if TYPE_CHECKING:
    from wdsprep.encoding.captions.lookup import OpenLookup

OWN = "caption"
"""The name of the samples' own captions, and of captions that replace them."""
CAPTION = "{caption}"
"""The part of a place that is replaced by the name of the dataset's captions."""


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


@dataclass(frozen=True, slots=True)
class FoundCaption:
    """A caption that was found for a sample, and the number of its row in a lookup."""

    caption: str
    row: int = -1


class Captions:
    """A search for captions, for any number of threads; this one leaves samples their own."""

    def find(self, key: str, sample: Sample, *, is_packed: bool) -> FoundCaption | None:
        """Return the caption that was found for a sample, or None if it keeps its own.

        `is_packed` is true if `pack` has made the sample's shard.
        """
        del key, sample, is_packed
        return None

    def close(self) -> None:
        """Close the files in which captions are searched."""


class FieldCaptions(Captions):
    def __init__(self, path: str) -> None:
        self._path = path

    def find(self, key: str, sample: Sample, *, is_packed: bool) -> FoundCaption | None:
        del key, is_packed
        found = caption_at(sample.facts, self._path)
        return None if found is None else FoundCaption(found)


class TableCaptions(Captions):
    def __init__(self, by: str, lookup: "OpenLookup") -> None:
        self._by, self._lookup = by, lookup

    def find(self, key: str, sample: Sample, *, is_packed: bool) -> FoundCaption | None:
        """Return the caption that a table has for a sample, or None if it keeps its own.

        A key of digits that is not found is searched again without leading zeros, since tables that
        store keys as numbers lose them. Raise HopelessError if the lookup is damaged.
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
    """Return the name by which a table of captions lists a sample, or "" if the sample has none.

    `by` is "key", "source" or the path of a field of the json. If `is_packed`, `pack` has made the
    sample's shard, and the json tells the sample's source.
    """
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
    """The rows of a caption table that samples of one shard use.

    Rejected samples count as well. `unnamed` has the keys of a few samples for which the table has
    no row, but none of rejected ones. This is stored beside the shard: together, the uses of all
    shards tell which rows no sample uses, whichever runs made the shards.
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
