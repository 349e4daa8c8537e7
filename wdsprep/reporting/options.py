"""The options of `inspect`, and those of `report` and `card` beside their datasets."""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from wdsprep.encoding import MODELS
from wdsprep.limits import MAX_AREA
from wdsprep.options import Options, about, option_field
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


@dataclass(frozen=True, kw_only=True)
class ReportOptions(ListenedOptions):
    """The options of `report`."""

    samples: int = option_field(
        "Show this many samples of each bucket; 0 for none.", SAMPLES, default=12, least=0
    )
    seed: int = option_field(
        "Pick the samples with this seed: the same data and seed give the same page.",
        SAMPLES,
        default=0,
        usual=True,
    )
    model: str = option_field(
        "Decode latents with this model; the word none decodes nothing. By default it is the model "
        "that they were made with, if that is on this machine: nothing is ever fetched.",
        SAMPLES,
        default="",
        known=MODELS,
        example="NAME",
    )
    max_area: int = option_field(
        "Leave out images of more pixels than this.", SAMPLES, default=MAX_AREA, least=1
    )
    duplicates: "str | os.PathLike[str]" = option_field(
        "Show groups of copies side by side, from this table, which duplicates --table wrote: "
        "first those whose copies differ most.",
        SAMPLES,
        default="",
        metavar="FILE",
        is_place=True,
        example="copies.parquet",
    )
    output: "str | os.PathLike[str]" = option_field(
        "Write the page to this file, in [any place](../packing/README.md#places).",
        OUTPUT,
        default="report.html",
        spelling="-o",
        metavar="FILE",
        is_place=True,
    )
    yes: bool = option_field(
        "Replace the file without asking, whatever it is. Otherwise only an earlier report is "
        "replaced; for another file you are asked at a terminal, and it is refused elsewhere.",
        OUTPUT,
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class CardOptions(ListenedOptions):
    """The options of `card`."""

    repo: str = option_field("Write the card for this dataset on the hub.", CARD, default=REPO)
    license: str = option_field(
        "State this licence, one of the hub's names, such as cc-by-4.0.",
        CARD,
        default="",
        usual="a line to fill in",
        example="NAME",
    )
    samples: int = option_field(
        "Show the captions of this many samples of each dataset; 0 for none.",
        CARD,
        default=5,
        least=0,
    )
    seed: int = option_field("Pick the samples with this seed.", CARD, default=0, usual=True)
    output: "str | os.PathLike[str]" = option_field(
        "Write the card to this file, not to the screen.",
        OUTPUT,
        default="",
        spelling="-o",
        metavar="FILE",
        is_place=True,
        example="README.md",
    )
    yes: bool = option_field(
        "Replace the file without asking, whatever it is. Otherwise only a card is replaced that "
        "is as it was written; for one that was changed you are asked, or it is refused.",
        OUTPUT,
        default=False,
    )
