"""The options that choose the captions to encode, and the settings of datasets that follow.

`table` reads a table of captions, `join_captions` joins it with the samples of each unit, and
`unit_captions` finds them there for a worker.
"""

import os
import re
from dataclasses import dataclass
from typing import Any

from wdsprep.errors import UsageError
from wdsprep.options import Options, option_field
from wdsprep.sources.tables.text import BY
from wdsprep.text import brief, parse_names

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
CAPTIONS = "Captions"
OWN = "caption"
"""The name of the samples' own captions, and of captions that replace them."""
EMPTY = "empty"
"""The name of captions that are empty for each sample, for text that depends on its images too."""
PER_SAMPLE = "per-sample"
CAPTION = "{caption}"
"""The part of a place that is replaced by the name of the dataset's captions."""


def replace_surrogates(text: str) -> str:
    """Return a text with lone surrogates replaced, as it is stored."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _check_path(given: Any) -> str:
    """Check that a value is a path in a json, such as meta.long, and return it."""
    if not isinstance(given, str) or not all(given.split(".")):
        raise UsageError(f"{brief(given)} is not a path in a json, such as meta.long or captions.1")
    return given


def check_paths(given: Any) -> tuple[str, ...]:
    return tuple(map(_check_path, parse_names(given)))


@dataclass(frozen=True, kw_only=True)
class OneCaption(Options):
    """The options of captions if each sample has one caption."""

    captions: "str | os.PathLike[str]" = option_field(
        "Take captions from [this table](#other-captions): Parquet, CSV, TSV or JSON lines, or a "
        "folder or pattern of them, with a column key, source, url or sha256. Samples that it does "
        "not list keep their own.",
        CAPTIONS,
        default="",
        is_place=True,
        metavar="TABLE",
    )
    captions_by: str = option_field(
        "Find samples in the table by this column.",
        CAPTIONS,
        default="",
        choices=BY,
        metavar="COLUMN",
        usual="the first of those that it has",
    )
    caption_column: str = option_field(
        "Take captions from this column.", CAPTIONS, default="", usual="caption", example="NAME"
    )
    caption_field: str = option_field(
        "Take captions from this field of the json of each sample, such as meta.long or "
        "captions.1.",
        CAPTIONS,
        default="",
        read=_check_path,
        metavar="PATH",
        example="meta.long",
    )
    caption_name: str = option_field(
        "Give the captions this name, by which a loader selects them.",
        CAPTIONS,
        default="",
        usual="the field's last part",
        order=1,
        example="long",
    )
    empty: str = option_field(
        "Encode the empty caption with the images of each sample in place of its caption, with "
        "--latents none, for models whose text [depends on images](#several-images-a-sample).",
        CAPTIONS,
        default="",
        choices=(PER_SAMPLE,),
        order=2,
    )

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths in the json whose captions each make a separate dataset; here none."""
        return ()

    def check_together(self) -> None:
        super().check_together()
        sources = {
            "--captions": self.captions,
            "--caption-field": self.caption_field,
            "--caption-fields": self.paths,
            f"--empty {PER_SAMPLE}": self.empty,
        }
        if len(several := [option for option, value in sources.items() if value]) > 1:
            raise UsageError(f"{several[0]} and {several[1]} both choose captions: give one")
        if (self.captions_by or self.caption_column) and not self.captions:
            raise UsageError(
                "--captions-by and --caption-column are for a table: give --captions TABLE too"
            )
        if self.caption_name and (self.empty or self.paths):
            raise UsageError(
                "--empty and --caption-fields name their captions: leave --caption-name out"
            )
        names = self.caption_names
        for name in names:
            is_taken = (name == EMPTY and not self.empty) or names.count(name) > 1
            if is_taken or not NAME.fullmatch(name):
                raise UsageError(
                    f"captions cannot be named {name!r}: give --caption-field and a --caption-name "
                    f"of letters and digits, which is not {EMPTY!r} and which no others have"
                )

    @property
    def caption_names(self) -> tuple[str, ...]:
        """Return the names by which loaders select the captions, one for each text dataset."""
        if self.empty:
            return (EMPTY,)
        fields = self.paths or (self.caption_field,)
        return tuple(self.caption_name or field.rpartition(".")[2] or OWN for field in fields)

    @property
    def caption_settings(self) -> list[dict[str, str]]:
        """Return the settings of each text dataset that say where its captions come from.

        Settings with their default values are left out. A table has not been read yet.
        """
        fields = self.paths or (self.caption_field,)
        settings = (
            {"caption_field": field, "caption_name": name}
            for field, name in zip(fields, self.caption_names, strict=True)
        )
        return [{k: v for k, v in said.items() if v not in ("", OWN)} for said in settings]
