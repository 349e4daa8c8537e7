"""The options of `export`."""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from wdsprep.exporting import LAYOUTS
from wdsprep.options import Place, about, as_places, option_field
from wdsprep.runners.options import WorkerOptions

LAYOUT = "Layout"


@dataclass(frozen=True)
class ExportOptions(WorkerOptions):
    """The options of `export`."""

    dataset: "str | os.PathLike[str]" = field(
        metadata=about("The dataset to export.", is_place=True)
    )
    out: "str | os.PathLike[str]" = option_field(
        "The folder or URL to write to.", default="", is_place=True
    )
    _: KW_ONLY
    to: str = field(
        metadata=about(
            "Write for this reader: Megatron Energon, AMD's Primus, wids (Sana), webshart "
            "(SimpleTuner), MosaicML's streaming (PRX), datasets (MLPerf), programs for folders of "
            "images (diffusers' scripts, OneTrainer, ai-toolkit), kohya's sd-scripts, "
            "musubi-tuner, or NeMo Automodel.",
            LAYOUT,
            choices=tuple(LAYOUTS),
        )
    )
    join: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]" = option_field(
        "Add the arrays of this dataset of the same images to those of DATASET, such as text "
        "or references that were encoded alone; for kohya add the images themselves.",
        LAYOUT,
        default=(),
        metavar="DATASET",
        is_place=True,
        is_many=True,
    )
    tower: str = option_field(
        "Name the columns of embeddings in mds after this text tower of PRX.",
        LAYOUT,
        default="",
        usual="the model",
    )

    @property
    def joined(self) -> tuple[Place, ...]:
        return as_places(self.join)
