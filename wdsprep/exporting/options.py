"""What `export` is given."""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from wdsprep.exporting import LAYOUTS
from wdsprep.options import Place, about, as_places
from wdsprep.runners.base import WorkerOptions
from wdsprep.runners.options import ListenedOptions

LAYOUT = "Layout"


@dataclass(frozen=True)
class ExportOptions(WorkerOptions, ListenedOptions):
    """Options of `export`."""

    dataset: "str | os.PathLike[str]" = field(
        metadata=about("The dataset to export.", is_place=True)
    )
    out: "str | os.PathLike[str]" = field(
        default="", metadata=about("Where it goes.", is_place=True)
    )
    _: KW_ONLY
    to: str = field(
        metadata=about(
            "Write what Megatron Energon, AMD's Primus, wids (Sana), webshart (SimpleTuner), "
            "MosaicML's streaming (PRX), datasets (MLPerf), what takes folders of images "
            "(diffusers' scripts, OneTrainer, ai-toolkit) or kohya's sd-scripts reads.",
            LAYOUT,
            choices=LAYOUTS,
        )
    )
    join: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]" = field(
        default=(),
        metadata=about(
            "Put the arrays of this dataset of the same images beside those of DATASET, such as "
            "text that was encoded alone; for kohya the images themselves.",
            LAYOUT,
            metavar="DATASET",
            is_place=True,
            is_many=True,
        ),
    )
    tower: str = field(
        default="",
        metadata=about(
            "Call embeddings in the columns of mds by this text tower of PRX.",
            LAYOUT,
            usual="the model",
        ),
    )

    @property
    def joined(self) -> tuple[Place, ...]:
        return as_places(self.join)
