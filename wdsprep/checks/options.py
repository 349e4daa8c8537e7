"""What `inspect`, `verify` and `repair` are given."""

import os
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from wdsprep.options import Options, about
from wdsprep.runners.base import CrewOptions
from wdsprep.text import Counting, unheard

if TYPE_CHECKING:
    from wdsprep.runners.job import JobListener

CHECKS, OUTPUT = "Checks", "Output"


@dataclass(frozen=True)
class OverviewOptions(Options):
    """What a call that looks at a dataset is given."""

    dataset: "str | os.PathLike[str]" = field(
        metadata=about("The dataset to look at.", is_place=True)
    )


@dataclass(frozen=True)
class InspectOptions(OverviewOptions):
    """What a call that looks at a dataset, or at a sample of it, is given."""

    key: str = field(default="", metadata=about("The key of the sample to show."))
    _: KW_ONLY
    out: "str | os.PathLike[str]" = field(
        default="",
        metadata=about(
            "Write the members of the sample into this folder.",
            OUTPUT,
            spelling="-o",
            metavar="DIR",
            is_place=True,
        ),
    )
    heard: Counting = unheard


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(CrewOptions):
    """All that `verify` is given, but for the datasets."""

    quick: bool = field(
        default=False,
        metadata=about("Check receipts, sizes and presence alone, and read no shard.", CHECKS),
    )
    listener: "JobListener | None" = None


@dataclass(frozen=True)
class RepairOptions(CrewOptions):
    """All that `repair` is given."""

    dataset: "str | os.PathLike[str]" = field(
        metadata=about("The dataset to repair.", is_place=True)
    )
    _: KW_ONLY
    quick: bool = field(
        default=False, metadata=about("Look at receipts, sizes and presence alone.", CHECKS)
    )
    yes: bool = field(default=False, metadata=about("Repair without asking.", CHECKS))
    listener: "JobListener | None" = None
