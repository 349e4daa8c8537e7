"""The options of `verify` and `repair`."""

from dataclasses import KW_ONLY, dataclass, field

from wdsprep.options import Place, about, option_field
from wdsprep.runners.options import WorkerOptions

CHECKS = "Checks"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(WorkerOptions):
    """The options of `verify` beside its datasets."""

    quick: bool = option_field(
        "Check receipts, sizes and presence alone, and read no shard.", CHECKS, default=False
    )


@dataclass(frozen=True)
class RepairOptions(VerifyOptions):
    """The options of `repair`."""

    dataset: Place = field(metadata=about("The dataset to repair.", is_place=True))
    _: KW_ONLY
    yes: bool = option_field("Repair without asking.", CHECKS, default=False)
