"""Declare the options of `load` and `stream`.

`ServingOptions` has those of both, with the same meaning, so that a run may stop in one and go on
in the other. This module does not import torch.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from wdsprep.errors import UsageError
from wdsprep.limits import MAX_AREA
from wdsprep.loading.order.global_order import RUN
from wdsprep.options import Options, about, option_field, refuse_unknown_options
from wdsprep.text import brief, check_texts, real_number, whole_number

if TYPE_CHECKING:
    import torch

    from wdsprep.encoding.recipe_options import Encode

FULL, LONGEST = PADS = ("full", "longest")
"""The lengths that arrays are padded to: the full one, or the longest of their batch."""
Pool = tuple[int, int]
"""The least and the most workers of a stage."""

Place = str | os.PathLike[str]
Places = Place | Sequence[Place] | None


@refuse_unknown_options
@dataclass(frozen=True)
class Stream(Options):
    """One of the datasets that a loader mixes.

        large = wdsprep.Stream("s3://bucket/latents-256", weight=3)
        small = wdsprep.Stream("shards/latents-256", weight=1)
        loader = wdsprep.load([large, small], global_batch=1024)

    At most one of `weight` (its proportion to the other streams), `repeat` (how often each
    sample comes in an epoch) and `count` (its samples in an epoch) says how much of it an
    epoch has. By default each sample comes once. `buckets` lists the folders to take, by
    default all. `where` is a condition: samples that do not meet it are left out. `join` names
    datasets of the same images; batches then have their arrays too.
    """

    is_command: ClassVar[bool] = False

    url: "str | os.PathLike[str]" = field(metadata=about("The dataset.", is_place=True))
    weight: float | None = option_field("Its proportion to the other streams.", default=None)
    repeat: float | None = option_field("How often each sample comes in an epoch.", default=None)
    count: int | None = option_field("The samples of an epoch.", default=None)
    buckets: Sequence[str | int] | str | int | None = option_field(
        "The folders to take.", default=None
    )
    where: str | None = option_field("The condition on samples.", default=None)
    join: "Places" = option_field("Datasets of the same images, beside this one.", default=())


Streams = str | os.PathLike[str] | Stream | Iterable[str | os.PathLike[str] | Stream]


def _read_fields(value: Any) -> Iterable[str]:
    if not isinstance(value, Iterable):
        raise UsageError(f"{brief(value)}: give names, such as ('latent', 'txt')")
    return (value,) if isinstance(value, str) else check_texts(value)


def _read_rate(value: Any) -> float:
    if not 0 <= real_number("", value) <= 1:
        raise UsageError(f"{brief(value)}: give a rate from 0 to 1")
    return float(value)


def _read_encode(value: Any) -> "Encode":
    from wdsprep.encoding.recipe_options import Encode

    if not isinstance(value, Encode):
        raise UsageError(f"{brief(value)}: give wdsprep.Encode(resolution=...)")
    return value


def _read_device(value: Any) -> "torch.device":
    import torch

    try:
        return torch.device(value)
    except (RuntimeError, TypeError, ValueError):
        raise UsageError(
            f"{brief(value)}: give a device of torch, such as cuda, cuda:1 or cpu"
        ) from None


def _read_pool(value: Any) -> Pool:
    try:
        least, most = (whole_number("", number) for number in value)
    except (TypeError, ValueError, UsageError):
        least, most = 1, 0
    if not 1 <= least <= most:
        raise UsageError(f"{brief(value)}: give the least and the most workers, such as (1, 8)")
    return least, most


ENCODE = about(
    "Encode image shards on the fly: [Encode while training](#encode-while-training).",
    read=_read_encode,
)


@dataclass(frozen=True, kw_only=True)
class ServingOptions(Options):
    """The options that say what is served and in which order."""

    is_command: ClassVar[bool] = False

    global_batch: int = field(
        metadata=about(
            "The samples of a step over all ranks.",
            least=1,
            most=(1 << 20) - 1,
            also=("batch_size", "batch", "batchsize"),
        )
    )
    join: "Places" = option_field(
        "Add to the samples other arrays that were [made of the same "
        "images](#text-and-latents-apart), and [columns of a table](#columns-of-a-table).",
        default=(),
        example='["shards/text", "scores.parquet"]',
    )
    where: str | None = option_field(
        "Serve only [samples whose json meets a condition](#samples-that-meet-a-condition).",
        default=None,
        also=("filter",),
        example='"aesthetic >= 6"',
    )
    seed: int = option_field("The seed of the order.", default=0, least=0, most=(1 << 63) - 1)
    epochs: int | None = option_field(
        "The length of an iteration, in epochs; None for an endless one.",
        default=1,
        least=1,
        also=("num_epochs",),
    )
    step: int = option_field("The step to begin at.", default=0)
    fields: Iterable[str] | None = option_field(
        "What a batch holds. By default, of latents: the arrays, `key`, `emb_mask` if there is "
        "one, and `shape` if there are several. By default, of image shards: `image` (bytes), "
        "`txt` and `key`.",
        default=None,
        read=_read_fields,
        also=("columns", "keys"),
        example='("latent", "emb", "txt", "json", "key")',
    )
    captions: Mapping[str, float] | None = option_field(
        "Give each sample one of [several captions](#several-captions), by these weights.",
        default=None,
        example='{"long": 0.8, "alt": 0.2}',
    )
    drop_text: float = option_field(
        "The share of captions, up to 1, that become the empty one; the same ones after a resume.",
        default=0.0,
        read=_read_rate,
        also=("caption_dropout", "drop_caption", "cfg_dropout"),
        example="0.1",
    )
    flip: float = option_field(
        "The share of images, up to 1, whose latents are those of the mirror image; the "
        "same ones after a resume. It needs a dataset encoded with `--flip`, or "
        "`Encode(flip=True)`.",
        default=0.0,
        read=_read_rate,
        example="0.5",
    )
    homogeneous: bool = option_field(
        "Take each batch from one stream. Arrays of different shapes need it, as latents of "
        "256 and of 512. A dataset of [many shapes](#images-of-many-shapes) always has it.",
        default=False,
        example="True",
    )
    shape_batch: int | None = option_field(
        "How many neighbours in a step have one stream and shape; by default the whole step "
        "has: [images of many shapes](#images-of-many-shapes).",
        default=None,
        least=1,
        most=(1 << 20) - 1,
    )
    window: int = option_field(
        "How far the order shuffles inside a shard.",
        default=256,
        least=1,
        most=(1 << 31) - 1,
        also=("shuffle_buffer", "buffer_size", "shuffle"),
    )
    run: int = option_field(
        "How many neighbours stay together inside a shard, as one request to S3.",
        default=RUN,
        least=1,
        most=(1 << 31) - 1,
    )
    epoch_steps: int | None = option_field(
        "The steps of an epoch, if it is not as long as the data.",
        default=None,
        least=1,
        most=(1 << 40) - 1,
        also=("steps_per_epoch",),
    )
    skip_missing: bool = option_field(
        "Serve other samples in place of those of a missing shard; by default that is an error.",
        default=False,
        example="True",
    )
    pad: str = option_field(
        "Pad [captions of true length](#captions-of-true-length) with zeros up to the "
        "longest of the batch, not of the dataset.",
        default=FULL,
        choices=PADS,
        example='"longest"',
    )
    pad_roles: bool = option_field(
        "Let samples with different numbers of [images in a role](#images-in-roles) come in "
        "one batch, with zeros in place of those that a sample lacks.",
        default=False,
        example="True",
    )
    tee: "str | os.PathLike[str]" = option_field(
        "Where to keep the latents that `encode=` makes, as `wdsprep encode` would.", default=""
    )


@dataclass(frozen=True)
class LoadOptions(ServingOptions):
    """The options of `load`."""

    streams: "Streams" = field(metadata=about("A dataset, or several that are mixed."))
    _: KW_ONLY
    encode: "Encode | None" = field(default=None, metadata=ENCODE)
    rank: int | None = option_field(
        "The number of this process; needed if neither torch.distributed nor `RANK` in the "
        "environment says it.",
        default=None,
        least=0,
    )
    world_size: int | None = option_field(
        "How many processes train; needed if neither torch.distributed nor `WORLD_SIZE` in "
        "the environment says it.",
        default=None,
        least=1,
    )
    raw: bool = option_field(
        "Give samples one by one as webdataset gives them. Tars of another program "
        "(`wdsprep index` first) need this or `pixels=`.",
        default=False,
        example="True",
    )
    pixels: int = option_field(
        "Serve image shards as crops with sides of so many pixels: `pixels` in place of `image`, "
        "uint8 (batch, 3, 256, 256), of the images that are large enough.",
        default=0,
        least=0,
        also=("resolution", "image_size"),
        example="256",
    )
    max_area: int = option_field(
        "The most pixels of an image to crop; a larger one counts as damaged.",
        default=MAX_AREA,
        least=1,
        example="100_000_000",
    )
    threads: int | None = option_field(
        "How many threads read; by default 3, or 2 on a machine with two cores. With `encode=`, "
        "by default one for each core, at least 3.",
        default=None,
        least=0,
        also=("num_workers", "workers"),
        example="3",
    )
    ahead: int | None = option_field(
        "How many steps are read ahead; by default one more than threads.",
        default=None,
        least=0,
        also=("prefetch", "prefetch_factor"),
        example="4",
    )
    cache: "str | os.PathLike[str] | None" = option_field(
        "A local folder to keep what is read over a network; all processes of a machine may "
        "share it.",
        default=None,
        also=("cache_dir",),
    )
    cache_nbytes: int | None = option_field(
        "The most bytes that the cache may hold.", default=None, least=1, also=("cache_size",)
    )
    pin: bool = option_field(
        "Put batches into pinned memory, and leave the copying to the trainer.",
        default=False,
        also=("pin_memory",),
        example="True",
    )
    device: "str | torch.device | None" = option_field(
        "Copy batches to the GPU one step ahead.", default=None, read=_read_device, example='"cuda"'
    )


@dataclass(frozen=True)
class StreamOptions(ServingOptions):
    """The options of `stream`."""

    images: "str | Stream | Iterable[str | Stream]" = field(
        metadata=about("One or several datasets of image shards.")
    )
    _: KW_ONLY
    encode: "Encode" = field(metadata=ENCODE)
    trainers: int = option_field(
        "How many processes train.", default=1, least=1, also=("world_size",)
    )
    state: Mapping[str, Any] | None = option_field(
        "The state to resume from, which any `state_dict` has returned.", default=None
    )
    decoders: Pool | None = option_field(
        "The least and the most workers that decode; by default 1 and as many as fit.",
        default=None,
        read=_read_pool,
    )
    encoders: Pool | None = option_field(
        "The least and the most workers that encode; by default 1 and as many as fit.",
        default=None,
        read=_read_pool,
    )
    gpus_per_encoder: float = option_field(
        "The GPUs of each encoder; below 1, several encoders share one.", default=1.0, least=0
    )
    ray_address: str | None = option_field(
        "The Ray cluster, if it is not that of this process.", default=None, example='"auto"'
    )
