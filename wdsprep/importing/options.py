"""The options of `import_`."""

import os
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from wdsprep.encoding.shape_lists import ShapesGiven, check_shapes_option
from wdsprep.errors import UsageError
from wdsprep.options import about, option_field
from wdsprep.runners.options import OUTPUT, TRACK, ListenedOptions, WorkerOptions, limit, overwrite

COLUMNS = "Columns"


@dataclass(frozen=True)
class ImportOptions(WorkerOptions, ListenedOptions):
    """The options of `import_`."""

    unit_noun: ClassVar[str] = "file"

    source: "str | os.PathLike[str]" = field(metadata=about("The cache to import.", is_place=True))
    latents: "str | os.PathLike[str]" = field(
        metadata=about("The folder or URL of the new dataset.", is_place=True)
    )
    _: KW_ONLY
    resolution: int = option_field(
        "Set how many pixels the sides of the images had, if no name of a column says it.",
        COLUMNS,
        default=0,
        least=0,
        usual="from the name of a column",
        example="256",
    )
    shapes: ShapesGiven = option_field(
        "Import latents of all these shapes, which are listed as for encode; others are "
        "rejects. Without this option all latents are squares of one size.",
        COLUMNS,
        default="",
        read=check_shapes_option,
        metavar="FILE|sdxl|nearest:STEP,MAX",
    )
    columns: str = option_field(
        "Import these columns, such as latent=z,emb=t5; roles are latent, mean, logvar, "
        "mean_std, source, emb, pooled and emb_mask. For bare bytes: latent=z:float16:4x32x32.",
        COLUMNS,
        default="",
        metavar="ROLE=NAME,...",
        usual="recognised",
    )
    caption_col: str = option_field(
        "Take captions from this column, or field of the json.",
        COLUMNS,
        default="",
        usual="recognised",
    )
    text_length: int = option_field(
        "Set how many tokens the longest caption may have, if the length of text varies.",
        COLUMNS,
        default=0,
        least=0,
        usual="the length of the mask",
        example="256",
    )
    scale: float | None = option_field(
        "Multiply latents that are drawn from a mean and a logvar by this number.",
        COLUMNS,
        default=None,
        usual="that of Flux.1 if the columns are named as in MLPerf",
        example="N",
    )
    shift: float | None = option_field(
        "Subtract this number from them before that.", COLUMNS, default=None, example="N"
    )
    empty: str = option_field(
        "Use these arrays for a caption that a loader leaves out, which no cache has: zeros, or "
        "files such as emb=t5_empty.npy,pooled=clip_empty.npy.",
        COLUMNS,
        default="",
        metavar="zeros|ROLE=FILE,...",
    )
    limit: int = field(
        default=0, metadata=limit("samples", OUTPUT, "without it the rest is done later")
    )
    overwrite: bool = field(default=False, metadata=overwrite("the dataset LATENTS"))
    track: str = field(default="", metadata=TRACK)

    def check_together(self) -> None:
        super().check_together()
        if self.shapes and not self.resolution:
            raise UsageError("--shapes is a list for one resolution: give --resolution too")
