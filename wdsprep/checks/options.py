"""What `verify` and `repair` are given."""

import os
from dataclasses import KW_ONLY, dataclass, field

from wdsprep.options import about
from wdsprep.runners.base import WorkerOptions
from wdsprep.runners.options import ListenedOptions

CHECKS = "Checks"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(WorkerOptions, ListenedOptions):
    """Options of `verify`, without the datasets."""

    quick: bool = field(
        default=False,
        metadata=about("Check receipts, sizes and presence alone, and read no shard.", CHECKS),
    )


@dataclass(frozen=True)
class RepairOptions(WorkerOptions, ListenedOptions):
    """Options of `repair`."""

    dataset: "str | os.PathLike[str]" = field(
        metadata=about("The dataset to repair.", is_place=True)
    )
    _: KW_ONLY
    quick: bool = field(
        default=False, metadata=about("Look at receipts, sizes and presence alone.", CHECKS)
    )
    yes: bool = field(default=False, metadata=about("Repair without asking.", CHECKS))
