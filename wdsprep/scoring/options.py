"""The options of `score`."""

import os
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from wdsprep.encoding.options import EncodeWorkerOptions
from wdsprep.errors import UsageError
from wdsprep.images.options import AREA, NBYTES, role_image
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.options import option_field
from wdsprep.runners.options import OUTPUT, TRACK, batch_size, limit, overwrite
from wdsprep.text import brief

MODEL, CAPTIONS, IMAGES = "Model", "Captions", "Images"
PRESETS = {
    "clip": "openai/clip-vit-large-patch14",
    "siglip": "google/siglip-so400m-patch14-384",
    "dinov2": "facebook/dinov2-base",
    "nsfw": "Falconsai/nsfw_image_detection",
}
"""Models that have a name of their own here, with their repositories."""
EMBEDDINGS = ("auto", "none", "fp16", "fp32")
PROCESSORS = ("auto", "fast", "slow")
DTYPES = ("auto", "fp16", "bf16", "fp32")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""Matches the name of a column, or a prefix of such names."""


WantedLabel = tuple[str, str]
"""A label of a classifier to keep, and the name of its column."""
WantedHead = tuple[str, str, str]
"""The column that a head gives, the prefix of the model on whose embeddings it works, its file."""


def named_model(given: Any) -> tuple[str, str]:
    """Return the prefix and the model in NAME=MODEL, or an empty prefix for MODEL alone."""
    if isinstance(given, tuple):
        return given
    name, equals, place = os.fspath(given).partition("=")
    if not equals:
        return "", name
    _check_name(given, name, "NAME=MODEL, as clip=openai/clip-vit-large-patch14")
    return name, place


def wanted_label(given: Any) -> WantedLabel:
    """Return a label of a model and its column, given LABEL=COLUMN, or LABEL for both."""
    if isinstance(given, tuple):
        return given
    label, equals, column = str(given).rpartition("=")
    if not equals:
        label, column = column, column
    _check_name(given, column, "LABEL=COLUMN, as 'tabby cat=cat'")
    return label, column


def wanted_head(given: Any) -> WantedHead:
    """Return the column, the model and the file in COLUMN=FILE, or in MODEL.COLUMN=FILE."""
    if isinstance(given, tuple):
        return given
    name, equals, place = str(given).partition("=")
    model, dot, column = name.rpartition(".")
    example = "COLUMN=FILE, as aesthetic=head.safetensors, or MODEL.COLUMN=FILE"
    if not equals:
        raise UsageError(f"{brief(given)} names no column: give {example}")
    _check_name(given, column, example)
    if dot:
        _check_name(given, model, example)
    if not place.endswith(".safetensors"):
        raise UsageError(f"{brief(given)} is not a .safetensors file: give {example}")
    return column, model, place


def _check_name(given: Any, name: str, example: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{brief(name)} in {brief(given)} cannot be a name: give {example}, with letters, "
            "digits and _, no digit first"
        )


@dataclass(frozen=True)
class ScoreOptions(EncodeWorkerOptions):
    """The options of `score`."""

    images: "str | os.PathLike[str]" = option_field(
        "The images to score.", default="shards/images", is_place=True
    )
    out: "str | os.PathLike[str]" = option_field(
        "The place for scores.", default="shards/scores", is_place=True, metavar="[SCORES]"
    )
    _: KW_ONLY
    model: Sequence[Any] = option_field(
        "Score with [this model](#models) of transformers; several models in one pass decode each "
        "image once. With NAME=, the names of its columns begin with NAME.",
        MODEL,
        default=(),
        read=named_model,
        is_many=True,
        known=tuple(PRESETS),
        metavar="[NAME=]REPO[@REV]|FOLDER|PRESET",
    )
    label: Sequence[Any] = option_field(
        "Keep [this label](#models) of a classifier, as a column of that name; by default all "
        "labels.",
        MODEL,
        default=(),
        read=wanted_label,
        is_many=True,
        metavar="LABEL[=COLUMN]",
    )
    head: Sequence[Any] = option_field(
        "Compute a column from the image's embedding by this head: linear layers in "
        "safetensors, such as [an aesthetic predictor](#heads).",
        MODEL,
        default=(),
        read=wanted_head,
        is_many=True,
        metavar="[MODEL.]COLUMN=FILE",
    )
    embedding: str = option_field(
        "Keep images' embeddings, in this precision; auto keeps those of models that give "
        "nothing else.",
        MODEL,
        default=EMBEDDINGS[0],
        choices=EMBEDDINGS,
    )
    processor: str = option_field(
        "Prepare images by the model's processor [of this kind](#fast-and-slow-processors); auto "
        "takes the fast one if there is one.",
        MODEL,
        default=PROCESSORS[0],
        choices=PROCESSORS,
    )
    dtype: str = option_field(
        "Compute in this precision; auto is fp32 on a CPU, and fp16 on a GPU.",
        MODEL,
        default=DTYPES[0],
        choices=DTYPES,
    )
    language: bool = option_field(
        "Add columns for [the language](#captions) of each caption, its length and how often it "
        "occurs; needs the extra `language`.",
        CAPTIONS,
        default=False,
    )
    role: str = option_field(
        "Score the image of each sample that has this name [in a role](#images-in-roles), such as "
        "source or source_1, in place of the target.",
        IMAGES,
        default="",
        read=role_image,
        usual="target",
        example="source",
    )
    resolution: int = option_field(
        "Score only the images for this resolution; by default all.",
        IMAGES,
        default=0,
        least=0,
        usual="all images",
        example="512",
    )
    max_area: int = field(default=MAX_AREA, metadata=AREA)
    max_bytes: int | str = field(default=MAX_NBYTES, metadata=NBYTES)
    limit: int = field(
        default=0, metadata=limit("images", IMAGES, "without it the rest is done later")
    )
    batch_size: int | str = field(
        default="auto",
        metadata=batch_size(
            "Score this number of images at once; auto is 16 on a CPU and 64 on a GPU."
        ),
    )
    overwrite: bool = field(default=False, metadata=overwrite("the dataset SCORES"))
    redo_changed: bool = option_field(
        "Score image shards again that have been packed again, and remove the scores of image "
        "shards that are gone.",
        OUTPUT,
        default=False,
    )
    track: str = field(default="", metadata=TRACK)

    def check_together(self) -> None:
        super().check_together()
        if not self.model and not self.language:
            raise UsageError("there is nothing to score by: give a --model, or --language")
        if (self.head or self.label) and not self.model:
            raise UsageError("--head and --label need a model: give one with --model")
