"""The options of `inspect`, and those of `report` and `card` beside their datasets."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from wdsprep.encoding import MODELS
from wdsprep.limits import MAX_AREA
from wdsprep.options import About, Options, about, option_field
from wdsprep.runners.options import JOIN, ListenedOptions
from wdsprep.text import Counting, ignore_count

SAMPLES, CARD, OUTPUT = "Samples", "Card", "Output"
REPO = "OWNER/NAME"


@dataclass(frozen=True)
class OverviewOptions(Options):
    """The options of `inspect` for a whole dataset."""

    dataset: "str | os.PathLike[str]" = field(
        metadata=about("The dataset to look at.", is_place=True)
    )


@dataclass(frozen=True)
class InspectOptions(OverviewOptions):
    """The options of `inspect` for a dataset or one of its samples."""

    key: str = option_field("The key of the sample to show.", default="")
    _: KW_ONLY
    where: str = option_field(
        "Show the samples that meet this condition, such as 'width >= 768'.", SAMPLES, default=""
    )
    join: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]" = field(
        default=(), metadata=JOIN
    )
    limit: int = option_field("Show this many samples of --where.", SAMPLES, default=20, least=0)
    out: "str | os.PathLike[str]" = option_field(
        "Write the members of the sample into this folder.",
        OUTPUT,
        default="",
        spelling="-o",
        metavar="DIR",
        is_place=True,
    )
    heard: Counting = ignore_count


def _samples(of: str, heading: str, page: str) -> Mapping[str, About]:
    return about(f"Show {of}.", heading, least=0, page=page)


def _seed(heading: str, page: str) -> Mapping[str, About]:
    return about("Pick the samples with this seed.", heading, usual=True, page=page)


def _replaces(page: str) -> Mapping[str, About]:
    return about("Replace the file without asking, whatever it is.", OUTPUT, page=page)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(ListenedOptions):
    """The options of `report`."""

    samples: int = field(
        default=12,
        metadata=_samples(
            "this many samples of each bucket", SAMPLES, "show this many of each bucket; 0 for none"
        ),
    )
    seed: int = field(
        default=0,
        metadata=_seed(
            SAMPLES, "pick the samples with it: the same data and seed give the same page"
        ),
    )
    model: str = option_field(
        "Decode latents with this model; the word none decodes nothing.",
        SAMPLES,
        default="",
        known=MODELS,
        usual="the one that made them, if it is on this machine",
        example="NAME",
        page="decode latents with it; by default with the model that they were made "
        "with, if that is on this machine; `none` decodes nothing. Nothing is "
        "ever fetched",
    )
    max_area: int = option_field(
        "Leave out images of more pixels than this.",
        SAMPLES,
        default=MAX_AREA,
        least=1,
        page="do not show images of more pixels",
    )
    duplicates: "str | os.PathLike[str]" = option_field(
        "Show groups of copies from this table, which duplicates --table wrote.",
        SAMPLES,
        default="",
        metavar="FILE",
        is_place=True,
        example="copies.parquet",
        page="show some groups of copies side by side, from the table that `wdsprep "
        "duplicates --table` wrote; groups whose copies differ most come first",
    )
    output: "str | os.PathLike[str]" = option_field(
        "Write the page to this file.",
        OUTPUT,
        default="report.html",
        spelling="-o",
        metavar="FILE",
        is_place=True,
        page="where to write it: a path or a URL of [any place](../packing/README.md#places)",
    )
    yes: bool = field(
        default=False,
        metadata=_replaces(
            "replace the file without asking, whatever it is. An earlier report is "
            "replaced in any case; another file is asked about at a terminal, and "
            "refused elsewhere"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class CardOptions(ListenedOptions):
    """The options of `card`."""

    repo: str = option_field(
        "Write the card for this dataset on the hub.",
        CARD,
        default=REPO,
        page="the dataset on the hub that the card describes",
    )
    license: str = option_field(
        "State this licence, such as cc0-1.0.",
        CARD,
        default="",
        usual="a line to fill in",
        example="NAME",
        page="one of the hub's names, such as `cc-by-4.0`",
    )
    samples: int = field(
        default=5,
        metadata=_samples(
            "the captions of this many samples of each dataset",
            CARD,
            "show this many captions of each dataset; 0 for none",
        ),
    )
    seed: int = field(default=0, metadata=_seed(CARD, "pick the samples with it"))
    output: "str | os.PathLike[str]" = option_field(
        "Write the card to this file.",
        OUTPUT,
        default="",
        spelling="-o",
        metavar="FILE",
        is_place=True,
        usual="the screen",
        example="README.md",
        page="where to write the card; the screen by default",
    )
    yes: bool = field(
        default=False,
        metadata=_replaces(
            "replace the file without asking, whatever it is. A card that is as it "
            "was written is replaced in any case; what you have changed is asked "
            "about, or refused"
        ),
    )
