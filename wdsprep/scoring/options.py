"""All that `score` is given."""

import os
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from wdsprep.changed_settings import SettingWords
from wdsprep.dataset.scores import SCORES
from wdsprep.encoding.worker_plan import EncodeWorkerOptions
from wdsprep.errors import UsageError
from wdsprep.images import AREA, NBYTES
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.options import about
from wdsprep.runners.base import WORKERS
from wdsprep.runners.options import OUTPUT, TRACK, ListenedOptions, limit, overwrite
from wdsprep.text import brief, parse_auto

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
"""A name of a column, or what stands before it."""


class NamedModel(NamedTuple):
    """A model as a user gives it, and the name that is put before its columns."""

    name: str
    place: str


class WantedLabel(NamedTuple):
    """A label of a classifier that is wanted, and the column that it becomes."""

    label: str
    column: str


class WantedHead(NamedTuple):
    """A head in a file: the column that it gives, and which model it stands on."""

    column: str
    model: str
    place: str


def named_model(given: Any) -> NamedModel:
    """Read NAME=MODEL, or MODEL alone."""
    if isinstance(given, tuple):
        return NamedModel(*given)
    name, equals, place = os.fspath(given).partition("=")
    if not equals:
        return NamedModel("", name)
    _check_name(given, name, "NAME=MODEL, as clip=openai/clip-vit-large-patch14")
    return NamedModel(name, place)


def wanted_label(given: Any) -> WantedLabel:
    """Read LABEL=COLUMN, or LABEL alone."""
    if isinstance(given, tuple):
        return WantedLabel(*given)
    label, equals, column = str(given).rpartition("=")
    if not equals:
        label, column = column, column
    _check_name(given, column, "LABEL=COLUMN, as 'tabby cat=cat'")
    return WantedLabel(label, column)


def wanted_head(given: Any) -> WantedHead:
    """Read COLUMN=FILE, or MODEL.COLUMN=FILE."""
    if isinstance(given, tuple):
        return WantedHead(*given)
    name, _, place = str(given).partition("=")
    model, dot, column = name.rpartition(".")
    example = "COLUMN=FILE, as aesthetic=head.safetensors, or MODEL.COLUMN=FILE"
    _check_name(given, column, example)
    if dot:
        _check_name(given, model, example)
    if not place.endswith(".safetensors"):
        raise UsageError(f"{brief(given)}: give a file of safetensors, as {example}")
    return WantedHead(column, model, place)


def _check_name(given: Any, name: str, example: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{brief(given)}: {brief(name)} is no name of a column: give {example}, with letters, "
            "digits and _"
        )


def _say_scores(before: Any, now: Any) -> str:
    """Say what of scores is another: the columns, or what made them."""
    if not before:
        return "it holds no scores"
    if {*before["columns"]} != {*now["columns"]}:
        shown = (", ".join(each["columns"]) or "embeddings alone" for each in (now, before))
        return "the columns are {} (were {})".format(*shown)
    if before.get("language") != now.get("language"):
        told = (each.get("language") or "nothing" for each in (now, before))
        return "languages are told by {} (were by {})".format(*told)
    for old, new in zip(before["models"], now["models"], strict=False):
        if names := [n for n in sorted({*old, *new}) if old.get(n) != new.get(n)]:
            what = {"weights": "other weights", "processor": f"the processor {new['processor']}"}
            return f"--model has {what.get(names[0], f'another {names[0]}')}"
    return "other models"


@dataclass(frozen=True)
class ScoreOptions(EncodeWorkerOptions, ListenedOptions):
    """The options of `score`."""

    images: "str | os.PathLike[str]" = field(
        default="shards/images", metadata=about("The images to score.", is_place=True)
    )
    out: "str | os.PathLike[str]" = field(
        default="shards/scores",
        metadata=about("Where scores go.", is_place=True, metavar="[SCORES]"),
    )
    _: KW_ONLY
    model: Sequence[Any] = field(
        default=(),
        metadata=about(
            "Score with this model of transformers; several in one pass decode each image once. "
            "NAME= before it is put before the names of its columns.",
            MODEL,
            read=named_model,
            is_many=True,
            known=tuple(PRESETS),
            metavar="[NAME=]REPO[@REV]|FOLDER|PRESET",
            page="an image classifier, a dual encoder such as CLIP, or an encoder such as DINOv2: "
            "a repository of the hub, a folder, or "
            f"{', '.join(PRESETS)}; may be given several times; `NAME=` is put before "
            "the names of its columns",
            settings={SCORES: SettingWords(say=_say_scores)},
        ),
    )
    label: Sequence[Any] = field(
        default=(),
        metadata=about(
            "Keep this label of a classifier, as the column of that name; by default all.",
            MODEL,
            read=wanted_label,
            is_many=True,
            metavar="LABEL[=COLUMN]",
            page="the labels of a classifier to keep, each with the name of its column; may be "
            "given several times, and is needed where a model has over 64 labels, or labels that "
            "are no names of columns",
        ),
    )
    head: Sequence[Any] = field(
        default=(),
        metadata=about(
            "Put this head on the image's embedding: linear layers in safetensors, as an "
            "aesthetic predictor is.",
            MODEL,
            read=wanted_head,
            is_many=True,
            metavar="[MODEL.]COLUMN=FILE",
            page="put linear layers in safetensors on the image's embedding, [as an aesthetic "
            "predictor](#heads) is; with several models `MODEL.` says on which",
        ),
    )
    embedding: str = field(
        default=EMBEDDINGS[0],
        metadata=about(
            "Keep images' embeddings, in this precision; auto keeps those of models that give "
            "nothing else.",
            MODEL,
            choices=EMBEDDINGS,
            usual=True,
            page="keep images' embeddings as `image_emb.npy`, in this precision; auto keeps those "
            "of a model that gives nothing else",
        ),
    )
    processor: str = field(
        default=PROCESSORS[0],
        metadata=about(
            "Prepare images by the model's processor of this kind; auto takes the fast one where "
            "there is one.",
            MODEL,
            choices=PROCESSORS,
            usual=True,
            page="[which kind](#fast-and-slow-processors) of the model's own image processor; auto "
            "is the one that transformers takes",
        ),
    )
    dtype: str = field(
        default=DTYPES[0],
        metadata=about(
            "Compute in this precision; auto is fp32 on a CPU, and fp16 on a GPU.",
            MODEL,
            choices=DTYPES,
            usual=True,
        ),
    )
    language: bool = field(
        default=False,
        metadata=about(
            "Tell the language of each caption, how long it is and how often it comes; needs "
            "wdsprep[language].",
            CAPTIONS,
            page="add columns of the caption: its [language](#captions), its length, its share of "
            "letters, and how often it comes",
        ),
    )
    resolution: int = field(
        default=0,
        metadata=about(
            "Score the images of this phase alone; by default all.",
            IMAGES,
            least=0,
            usual="all images",
            example="512",
            page="score the images of this phase alone. Tars of another program need it: it names "
            "the folder of their scores",
        ),
    )
    max_area: int = field(default=MAX_AREA, metadata=AREA)
    max_bytes: int | str = field(default=MAX_NBYTES, metadata=NBYTES)
    limit: int = field(
        default=0, metadata=limit("images", IMAGES, "without it the rest is done later")
    )
    batch_size: int | str = field(
        default="auto",
        metadata=about(
            "Score so many images at once; auto is 16 on a CPU and 64 on a GPU.",
            WORKERS,
            read=parse_auto,
            metavar="AUTO|N",
            usual=True,
            order=-2,
            example="auto|N",
            page="images at once; auto is 16 on a CPU and 64 on a GPU. Too large a batch is halved",
        ),
    )
    overwrite: bool = field(default=False, metadata=overwrite("the dataset SCORES"))
    redo_changed: bool = field(
        default=False,
        metadata=about(
            "Score image shards again that were packed anew since, and remove the scores of those "
            "that are gone.",
            OUTPUT,
        ),
    )
    track: str = field(default="", metadata=TRACK)

    def check_together(self) -> None:
        super().check_together()
        if not self.model and not self.language:
            raise UsageError("there is nothing to score by: give a --model, or --language")
        if (self.head or self.label) and not self.model:
            raise UsageError("--head and --label are of a --model: give one")
