"""What `remove`, `select` and `duplicates` are given."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from wdsprep.changed_settings import SettingWords
from wdsprep.changes.key_lists import NameList
from wdsprep.errors import UsageError
from wdsprep.options import Place, about, as_places
from wdsprep.packing.options import SOURCE_KIND, ShardSizes
from wdsprep.runners.base import WorkerOptions, WorkerRangeOptions
from wdsprep.runners.options import OUTPUT, TRACK, ListenedOptions, overwrite
from wdsprep.text import brief, texts, whole

SAMPLES, COMPARISON = "Samples", "Comparison"
DISTANCE, MOST_DISTANCE = 6, 12
"""Bits of 64 that copies may differ in, and the most: what differs in more is another picture."""

OTHER_DATASETS = "the datasets that samples are selected from are others, or have changed"
OTHER_COLUMNS = "--join has other columns, or --where asks for other ones"


def _asked(given: Any) -> NameList:
    if isinstance(given, str | os.PathLike):
        return given
    if not isinstance(given, Iterable):
        raise UsageError(f"{brief(given)}: give a file with one on each line, or a list")
    return texts(given)


def _split(given: Any) -> str | Mapping[str, float]:
    if not isinstance(given, str | Mapping):
        raise UsageError(f"{brief(given)}: give shares by name, such as train=0.9,val=0.1")
    return given


def _distance(given: Any) -> int:
    if not 0 <= whole("", given) <= MOST_DISTANCE:
        raise UsageError(
            f"{brief(given)}: give 0 to {MOST_DISTANCE}: what differs in more of 64 bits is "
            "another picture"
        )
    return whole("", given)


@dataclass(frozen=True, kw_only=True)
class RemoveOptions(ListenedOptions):
    """Options of `remove`, without the datasets."""

    keys: NameList = field(
        default="",
        metadata=about(
            "Remove these: a file with a key on each line, or keys.",
            SAMPLES,
            read=_asked,
            metavar="FILE|KEY,KEY",
            is_place=True,
        ),
    )
    urls: NameList = field(
        default="",
        metadata=about(
            "Remove what was fetched from these URLs.",
            SAMPLES,
            read=_asked,
            metavar="FILE",
            is_place=True,
        ),
    )
    sha256: NameList = field(
        default="",
        metadata=about(
            "Remove images of these digests, as packed or as they came.",
            SAMPLES,
            read=_asked,
            metavar="FILE",
            is_place=True,
        ),
    )
    sources: NameList = field(
        default="",
        metadata=about(
            "Remove what has these sources in its json.",
            SAMPLES,
            read=_asked,
            metavar="FILE",
            is_place=True,
        ),
    )
    keep_copies: bool = field(
        default=False,
        metadata=about(
            "Let other samples with the same image or URL be packed: for duplicates.", SAMPLES
        ),
    )
    yes: bool = field(default=False, metadata=about("Remove without asking.", SAMPLES))


@dataclass(frozen=True)
class SelectOptions(WorkerRangeOptions, ShardSizes, ListenedOptions):
    """Options of `select`."""

    datasets: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]" = field(
        metadata=about(
            "The datasets to copy of.",
            is_place=True,
            is_many=True,
            metavar="DATASET...",
            settings={"of": SettingWords(say=OTHER_DATASETS), "source": SOURCE_KIND},
        )
    )
    out: "str | os.PathLike[str]" = field(metadata=about("Where the samples go.", is_place=True))
    _: KW_ONLY
    where: str = field(
        default="",
        metadata=about('Take what this is true of in the json, such as "width >= 768".', SAMPLES),
    )
    join: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]" = field(
        default=(),
        metadata=about(
            "Let --where ask for the columns of these too: scores, or tables with a column key.",
            SAMPLES,
            is_place=True,
            is_many=True,
            metavar="PLACE",
            settings={"join": SettingWords(say=OTHER_COLUMNS)},
        ),
    )
    keys: NameList = field(
        default="",
        metadata=about(
            "Take the keys in this file, one a line.",
            SAMPLES,
            read=_asked,
            metavar="FILE",
            is_place=True,
            settings={"keys": SettingWords(say="--keys has other keys")},
        ),
    )
    count: int = field(
        default=0, metadata=about("Take so many of these, drawn at random.", SAMPLES, least=0)
    )
    seed: int = field(
        default=0,
        metadata=about("Draw and split with this seed.", SAMPLES, usual=True),
    )
    split: str | Mapping[str, float] = field(
        default="",
        metadata=about(
            "Make parts of these, such as train=0.9,val=0.1, each where OUT with {split} says.",
            SAMPLES,
            read=_split,
            metavar="NAME=SHARE,...",
            settings={
                "part": SettingWords(say="another part of --split"),
                "split": SettingWords(say="--split has other parts"),
            },
        ),
    )
    prefix: bool = field(
        default=False,
        metadata=about(
            "Put the number of its dataset (0, 1, ...) before each key, where several have the "
            "same keys.",
            OUTPUT,
        ),
    )
    overwrite: bool = field(default=False, metadata=overwrite("what is in OUT"))
    track: str = field(default="", metadata=TRACK)

    def check_together(self) -> None:
        super().check_together()
        if self.join and not self.where:
            raise UsageError("--join is for what --where asks for: give a condition")

    @property
    def places(self) -> tuple[Place, ...]:
        return as_places(self.datasets)


@dataclass(frozen=True, kw_only=True)
class DuplicatesOptions(WorkerOptions, ListenedOptions):
    """Options of `duplicates`, without the datasets."""

    unit_noun: ClassVar[str] = "comparison"

    distance: int = field(
        default=DISTANCE,
        metadata=about(
            "Take for copies what differs in so many bits of 64; 0 to 12.",
            COMPARISON,
            read=_distance,
            parse=int,
            usual=True,
        ),
    )
    hashes: "str | os.PathLike[str]" = field(
        default="",
        metadata=about(
            "Keep what the pictures look like in this folder.",
            COMPARISON,
            usual="DATASET-hashes",
            metavar="DIR",
            is_place=True,
        ),
    )
    output: "str | os.PathLike[str]" = field(
        default="",
        metadata=about(
            "Write the keys of the copies to this file, one a line; with several datasets, "
            "{number} in it says of which.",
            OUTPUT,
            spelling="-o",
            metavar="FILE",
            is_place=True,
        ),
    )
    table: "str | os.PathLike[str]" = field(
        default="",
        metadata=about(
            "Write a Parquet table of all samples to this file; with {number} likewise.",
            OUTPUT,
            metavar="FILE",
            is_place=True,
        ),
    )
