"""The options of `remove`, `select` and `duplicates`.

`read_lines` reads lists that a user gives, from a file or from Python. They may have 10 million
lines.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

from wdsprep.dataset.chunks import Chunks
from wdsprep.errors import UsageError
from wdsprep.images.options import role_image
from wdsprep.options import Place, about, as_places, option_field
from wdsprep.packing.options import ShardSizes
from wdsprep.runners.options import JOIN, OUTPUT, TRACK, ListenedOptions, WorkerOptions, overwrite
from wdsprep.store import did_you_mean_place, split_url
from wdsprep.store.base import local_path
from wdsprep.text import brief, check_texts

SAMPLES, COMPARISON = "Samples", "Comparison"
DISTANCE, MOST_DISTANCE = 6, 12
"""The default and the largest number of bits, of 64, in which copies may differ."""


NameList = str | os.PathLike[str] | Iterable[str]


"""The path or URL of a list, or the list itself."""


def is_file(path: str) -> bool:
    return os.path.isfile(path)  # noqa: PTH113  one of pathlib raises where a list of keys is long


def read_lines(what: str, lines: NameList) -> Iterator[str]:
    """Yield the lines of a list, without blanks around them and without empty lines.

    Raise UsageError if a local file is missing. `what` names the items in the message.
    """
    if not isinstance(lines, str | os.PathLike):
        yield from (line.strip() for line in lines if line.strip())
        return
    place = os.fspath(lines)
    is_missing = local_path(place) is not None and not is_file(local_path(place) or ".")
    if is_missing:
        meant = did_you_mean_place(place)
        raise UsageError(
            f"{place} does not exist: give a file with one of the {what} on each line{meant}"
        )
    store, name = split_url(place)
    with closing(Chunks(store, name).as_stream()) as file:
        for line in file:
            if text := line.decode("utf-8", "surrogateescape").strip():
                yield text


def _check_list(value: Any) -> NameList:
    if isinstance(value, str | os.PathLike):
        return value
    if not isinstance(value, Iterable):
        raise UsageError(f"{brief(value)}: give a file with one item on each line, or a list")
    return check_texts(value)


def _of_list(text: str, metavar: str = "FILE") -> Mapping[str, Any]:
    """Return the metadata of an option that takes a list of samples, or the path of a file."""
    return about(text, SAMPLES, read=_check_list, metavar=metavar, is_place=True)


Parts = Mapping[str, Fraction]
"""The share of each part of a split, by its name."""
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def parse_split(value: Any) -> Parts:
    """Parse the shares of a split: "train=0.9,val=0.1", or a mapping."""
    wrong = UsageError(
        f"{brief(value)}: give names, and shares above 0 that are 1 or less together, such as "
        "train=0.9,val=0.1"
    )
    if isinstance(value, str):
        words = [part.strip().partition("=")[::2] for part in value.split(",") if part]
    elif isinstance(value, Mapping):
        words = [(str(name), str(share)) for name, share in value.items()]
    else:
        raise wrong
    try:
        shares = {name: Fraction(share) for name, share in words}
    except (ValueError, ZeroDivisionError):
        raise wrong from None
    are_names = len(shares) == len(words) and all(map(WORD.fullmatch, shares))
    if not are_names or min(shares.values(), default=1) <= 0 or sum(shares.values()) > 1:
        raise wrong
    return shares


@dataclass(frozen=True, kw_only=True)
class RemoveOptions(ListenedOptions):
    """The options of `remove` beside its datasets."""

    keys: NameList = field(
        default="",
        metadata=_of_list(
            "Remove the samples with these keys: a file with a key on each line, or keys.",
            "FILE|KEY,KEY",
        ),
    )
    urls: NameList = field(
        default="", metadata=_of_list("Remove the samples that were fetched from these URLs.")
    )
    sha256: NameList = field(
        default="",
        metadata=_of_list("Remove the images with these digests, as packed or as they came."),
    )
    sources: NameList = field(
        default="", metadata=_of_list("Remove the samples with these sources in their json.")
    )
    keep_copies: bool = option_field(
        "Let other samples with the same image or URL be packed: for duplicates.",
        SAMPLES,
        default=False,
    )
    all: bool = option_field(
        "Remove them too from the datasets beside that were made of these images.",
        SAMPLES,
        default=False,
    )
    yes: bool = option_field("Remove without asking.", SAMPLES, default=False)


@dataclass(frozen=True)
class SelectOptions(WorkerOptions, ShardSizes):
    """The options of `select`."""

    datasets: Place | Sequence[Place] = field(
        metadata=about(
            "The datasets to copy from.", is_place=True, is_many=True, metavar="DATASET..."
        )
    )
    out: Place = field(metadata=about("The folder or URL to copy to.", is_place=True))
    _: KW_ONLY
    where: str = option_field(
        'Select the samples whose json meets this condition, such as "width >= 768".',
        SAMPLES,
        default="",
    )
    join: Place | Sequence[Place] = field(default=(), metadata=JOIN)
    keys: NameList = field(
        default="",
        metadata=_of_list("Select the samples with the keys in this file, one on each line."),
    )
    count: int = option_field(
        "Select this many of them, drawn at random.", SAMPLES, default=0, least=0
    )
    seed: int = option_field("Draw and split with this seed.", SAMPLES, default=0, usual=True)
    split: str | Mapping[str, float] = option_field(
        "Divide them into parts, such as train=0.9,val=0.1; each replaces {split} in OUT.",
        SAMPLES,
        default="",
        read=parse_split,
        metavar="NAME=SHARE,...",
    )
    prefix: bool = option_field(
        "Put the number of its dataset (0, 1, ...) before each key, if several datasets have "
        "the same keys.",
        OUTPUT,
        default=False,
    )
    overwrite: bool = field(default=False, metadata=overwrite("what is in OUT"))
    track: str = field(default="", metadata=TRACK)

    def check_together(self) -> None:
        super().check_together()
        if self.join and not self.where:
            raise UsageError("--join adds columns for --where: give a condition too")

    @property
    def places(self) -> tuple[Place, ...]:
        return as_places(self.datasets)


@dataclass(frozen=True, kw_only=True)
class DuplicatesOptions(WorkerOptions):
    """The options of `duplicates` beside its datasets."""

    unit_noun: ClassVar[str] = "comparison"

    distance: int = option_field(
        "Call images copies if they differ in at most this many of 64 bits; 0 to 12.",
        COMPARISON,
        default=DISTANCE,
        least=0,
        most=MOST_DISTANCE,
    )
    where: str = option_field(
        "Compare only samples that meet this condition, such as \"language == 'en'\".",
        COMPARISON,
        default="",
    )
    join: Place | Sequence[Place] = option_field(
        "Scores, or tables by key or URL, whose columns --keep and --where may name.",
        COMPARISON,
        default=(),
        is_place=True,
        is_many=True,
        metavar="PLACE",
    )
    keep: str = option_field(
        "Keep the copy with the highest value in this column of --join, such as aesthetic. Of "
        "equal values, and without a column, the one with the most pixels is kept.",
        COMPARISON,
        default="",
        metavar="COLUMN",
    )
    role: str = option_field(
        "Compare the images that have this name in a role, such as source; all compares whole "
        "samples: each image with that of the same name.",
        COMPARISON,
        default="",
        read=role_image,
        usual="target",
        example="source",
    )
    hashes: Place = option_field(
        "Keep what the pictures look like in this folder.",
        COMPARISON,
        default="",
        usual="DATASET-hashes",
        metavar="DIR",
        is_place=True,
    )
    output: Place = option_field(
        "Write the keys of the copies to this file, one on each line; with several datasets, "
        "{number} in it stands for the number of the dataset.",
        OUTPUT,
        default="",
        spelling="-o",
        metavar="FILE",
        is_place=True,
    )
    table: Place = option_field(
        "Write a Parquet table of all samples to this file; with {number} likewise.",
        OUTPUT,
        default="",
        metavar="FILE",
        is_place=True,
    )

    def check_together(self) -> None:
        super().check_together()
        if self.keep and not self.join:
            raise UsageError(
                f"--keep {brief(self.keep)} is a column of --join: give --join scores, or a table"
            )
        if self.join and not (self.keep or self.where):
            raise UsageError("--join has columns for --keep and --where: give one of them")
