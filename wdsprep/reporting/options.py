"""The options of `inspect`, and those of `report` and `card` beside their datasets."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from wdsprep.encoding import MODELS
from wdsprep.errors import UsageError
from wdsprep.limits import MAX_AREA
from wdsprep.options import Options, Place, about, option_field
from wdsprep.runners.options import JOIN, ListenedOptions
from wdsprep.text import Counting, brief, did_you_mean, ignore_count

SAMPLES, CARD, OUTPUT = "Samples", "Card", "Output"
REPO = "OWNER/NAME"
LICENSES = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m
bigscience-bloom-rail-1.0 bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear
bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0
cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0
cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0
creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 h-research intel-research isc
lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit
mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openrail openrail++ osl-3.0 other pddl postgresql unknown
unlicense wtfpl zlib
"""
"""The names that the hub has for licences; a licence without one is `other`."""


def check_license(license: object) -> str:
    """Return the name of a licence. Raise UsageError if the hub has no such name."""
    names = LICENSES.split()
    if license not in names:
        near = did_you_mean(license, names)
        raise UsageError(
            f"{brief(license)}{near}: give a name of the hub, such as cc-by-4.0, or other"
        )
    return str(license)


@dataclass(frozen=True)
class OverviewOptions(Options):
    """The options of `inspect` for a whole dataset."""

    dataset: Place = field(metadata=about("The dataset to look at.", is_place=True))


@dataclass(frozen=True)
class InspectOptions(OverviewOptions):
    """The options of `inspect` for a dataset or one of its samples."""

    key: str = option_field("The key of the sample to show.", default="")
    _: KW_ONLY
    where: str = option_field(
        "Show the samples that meet this condition, such as 'width >= 768'.", SAMPLES, default=""
    )
    join: Place | Sequence[Place] = field(default=(), metadata=JOIN)
    limit: int = option_field("Show this many samples of --where.", SAMPLES, default=20, least=0)
    out: Place = option_field(
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
    duplicates: Place = option_field(
        "Show groups of copies side by side, from this table, which duplicates --table wrote: "
        "first those whose copies differ most.",
        SAMPLES,
        default="",
        metavar="FILE",
        is_place=True,
        example="copies.parquet",
    )
    output: Place = option_field(
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
        read=check_license,
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
    output: Place = option_field(
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
