"""The options of `encode`, and the recipes and places of the datasets that follow from them."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial

from wdsprep.changed_settings import ABOVE, SettingWords
from wdsprep.dataset.score_columns import SCORES
from wdsprep.encoding import DTYPES
from wdsprep.encoding.captions.options import CaptionOptions, OneCaption
from wdsprep.encoding.output_places import check_apart_text, places_of
from wdsprep.encoding.recipe_options import (
    IMAGES,
    RESOLUTION,
    Encode,
    EncodingOptions,
    recipes_for,
    resolutions_of,
)
from wdsprep.encoding.shape_lists import check_one_resolution
from wdsprep.options import about
from wdsprep.runners.options import (
    OUTPUT,
    TRACK,
    WORKERS,
    ListenedOptions,
    WorkerRangeOptions,
    limit,
    overwrite,
    parse_workers,
)
from wdsprep.store.base import absolute
from wdsprep.text import check_one_of

DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True, kw_only=True)
class EncodeWorkerOptions(WorkerRangeOptions):
    """The options of workers and their devices; `auto` and 0 leave the choice to wdsprep."""

    device: str = field(
        default="auto",
        metadata=about(
            "Compute on this device; auto takes GPUs if there are any.",
            WORKERS,
            choices=DEVICES,
            usual=True,
            order=-1,
            page="where to compute",
        ),
    )
    workers: int | str | tuple[int, int] = field(
        default="auto",
        metadata=about(
            "Work in this number of processes; auto is one for each GPU, or one in all without a "
            "GPU; MIN:MAX is for a cluster that grows.",
            WORKERS,
            read=parse_workers,
            usual=True,
            metavar="AUTO|N|MIN:MAX",
            example="auto|N|MIN:MAX",
            page="how many workers; `auto` is one for each core, or as many as the cluster's "
            "machines have room for; for `encode` one for each GPU, or one in all without a GPU",
        ),
    )
    gpus_per_worker: float = field(
        default=0.0,
        metadata=about(
            "Give each worker this number of GPUs, or a share of one, such as 0.5.",
            WORKERS,
            least=0,
            usual="1",
            example="N",
        ),
    )
    cpus_per_worker: float = field(
        default=0.0,
        metadata=about(
            "Give each worker this number of cores.",
            WORKERS,
            least=0,
            usual="all, shared fairly",
            example="N",
        ),
    )
    accelerator_type: str | None = field(
        default=None,
        metadata=about(
            "Work only on GPUs of this type in a Ray cluster, such as A10G.",
            WORKERS,
            example="A10G",
        ),
    )


@dataclass(frozen=True)
class EncodeCall(EncodeWorkerOptions, OneCaption, EncodingOptions, ListenedOptions):
    """The options of `encode` that calls for one dataset and for several have in common."""

    images: "str | os.PathLike[str]" = field(
        default="shards/images",
        metadata=about(
            "The images to encode.",
            is_place=True,
            settings={
                "source": SettingWords(say="it was imported, not encoded", rank=ABOVE),
                SCORES: SettingWords(say="it holds scores", rank=ABOVE),
            },
        ),
    )
    out: "str | os.PathLike[str]" = field(
        default="",
        metadata=about("The place for latents.", is_place=True, metavar="[LATENTS]"),
    )
    _: KW_ONLY
    limit: int = field(
        default=0, metadata=limit("images", IMAGES, "without it the rest is done later")
    )
    overwrite: bool = field(default=False, metadata=overwrite("the dataset LATENTS"))
    redo_changed: bool = field(
        default=False,
        metadata=about(
            "Encode image shards again that have been packed again, and remove the latents of "
            "image shards that are gone.",
            OUTPUT,
        ),
    )
    track: str = field(default="", metadata=TRACK)

    def check_together(self) -> None:
        super().check_together()
        check_one_of(DTYPES, dtype=self.dtype)


@dataclass(frozen=True)
class EncodeOne(EncodeCall):
    """The options of a call of `encode` for one dataset."""

    _: KW_ONLY
    resolution: int = field(default=0, metadata=RESOLUTION)


@dataclass(frozen=True)
class EncodeOptions(EncodeCall, CaptionOptions):
    """The options of a call of `encode` for any number of datasets."""

    _: KW_ONLY
    resolution: int | Sequence[int] = field(default=0, metadata=RESOLUTION)
    text_out: "str | os.PathLike[str]" = field(
        default="",
        metadata=about(
            "Store text once, in a separate dataset at this place, and none with the latents.",
            OUTPUT,
            is_place=True,
            metavar="PLACE",
            order=-1,
            page="store text in a separate dataset at this place, and none with the latents: "
            "[text stored once](#text-stored-once)",
        ),
    )

    def check_together(self) -> None:
        super().check_together()
        check_apart_text(self.text_out, self.latents, self.text)
        _ = self.places
        check_one_resolution(self.shapes, self.resolutions)
        _ = self.recipes

    @property
    def resolutions(self) -> tuple[int, ...]:
        return resolutions_of(self.resolution)

    @cached_property
    def of_captions(self) -> CaptionOptions:
        own = self.part(CaptionOptions)
        return replace(own, captions=absolute(own.captions)) if own.captions else own

    @cached_property
    def places(self) -> Mapping[int | str, str]:
        """Return the places of the datasets, by their resolution or the name of their captions."""
        captions = self.part(CaptionOptions)
        return places_of(self.out, self.resolutions, self.latents, captions, self.text_out)

    @cached_property
    def recipes(self) -> list[Encode]:
        """Return the recipes of the datasets of a run, in the order of their places."""
        how: Callable[..., Encode] = partial(Encode, device=self.device, **self.of_encoding)
        texts = len(self.of_captions.sources)
        return recipes_for(how, self.resolutions, texts, is_apart=bool(self.text_out))
