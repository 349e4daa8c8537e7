"""Translate a command line of img2dataset that is pasted after `wdsprep pack`.

`TABLE` has the meaning of each of its options for pack. An option that does not change images gets
a note; an option whose result would differ from what it asks for is refused. An option belongs to
img2dataset if it has an underscore, or a name that pack does not have. An option with dashes and
the name of an option of pack belongs to pack.

Values are read as img2dataset reads them: `--flag`, `--flag=True`, `--flag True`, `--noflag`, and
`None` or `inf` for no value at all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import click

from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.errors import UsageError
from wdsprep.terminal import ProgressLine


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """The meaning of an option of img2dataset with some value.

    It is the argument `place` of pack or an option of pack, with a note if something differs; or it
    is a refusal that says what to do. `{value}` stands for the value.
    """

    place: str = ""
    option: str = ""
    note: str = ""
    refusal: str = ""


def own_option(option: str) -> Meaning:
    """Return the meaning of an option that pack has too, under the name `option`."""
    return Meaning(option=f"--{option}={{value}}")


def note(text: str) -> Meaning:
    """Return the meaning of an option that only gets a note."""
    return Meaning(note=text)


def refuse(text: str) -> Meaning:
    """Return the meaning of an option that pack refuses."""
    return Meaning(refusal=text)


ANY = "any other"
NO_CHANGE = Meaning()
"""The meaning of a value that asks for what pack does anyway."""

OWN_SIZE = (
    "images keep their own size: `wdsprep encode --resolution {value}` scales and cuts them, and "
    "--reencode jpg:95 --max-side {value} stores them smaller"
)
OTHER_SIZE = f"{OWN_SIZE}; add --buckets {{value}} to have all images from that size on"
SHAPE = "nothing is cut, padded or scaled before `wdsprep encode`"
PROGRESS = "--track wandb sends progress there; the progress line and `wdsprep report` show it too"
AT_A_TIME = "--requests sets how many downloads run at a time, --per-host how many of one host"
TARS_ALONE = "pack writes WebDataset tars: leave this out, or write --output_format webdataset"
NO_JSON = 'convert it to a table with pandas.read_json("a.json").to_parquet("a.parquet")'
OWN_FORMAT = "images keep their format, and --reencode jpg:95 makes JPEG of all: leave this out"
GROWN = "SOURCE must still have what is packed: give a folder with the earlier lists and the new"
AS_THEY_CAME = "upright sRGB JPEG, PNG and WebP are stored as they came, all else is converted"

TABLE: Mapping[str, Meaning | Mapping[str, Meaning]] = {
    "url_list": Meaning(place="source"),
    "image_size": {
        "256": note(OWN_SIZE),
        "512": note(OWN_SIZE),
        ANY: note(OTHER_SIZE),
    },
    "output_folder": Meaning(place="images"),
    "processes_count": own_option("workers"),
    "resize_mode": {"no": NO_CHANGE, ANY: note(SHAPE)},
    "resize_only_if_bigger": note(SHAPE),
    "upscale_interpolation": note(SHAPE),
    "downscale_interpolation": note(SHAPE),
    "encode_quality": Meaning(option="--reencode=jpg:{value}"),
    "encode_format": {"jpg": NO_CHANGE, ANY: refuse(OWN_FORMAT)},
    "skip_reencode": {"false": NO_CHANGE, ANY: note(AS_THEY_CAME)},
    "output_format": {"webdataset": NO_CHANGE, ANY: refuse(TARS_ALONE)},
    "input_format": {
        "json": refuse(NO_JSON),
        "json.gz": refuse(NO_JSON),
        ANY: own_option("input-format"),
    },
    "url_col": own_option("url-col"),
    "caption_col": own_option("caption-col"),
    "bbox_col": refuse("pack blurs nothing, so let img2dataset write tars, and pack those"),
    "thread_count": note(AT_A_TIME),
    "number_sample_per_shard": own_option("samples-per-shard"),
    "extract_exif": {
        "false": NO_CHANGE,
        ANY: note("EXIF stays in images that are stored as they came; the json has none of it"),
    },
    "save_additional_columns": own_option("save-additional-columns"),
    "timeout": own_option("timeout"),
    "enable_wandb": {"false": NO_CHANGE, ANY: note(PROGRESS)},
    "wandb_project": note(PROGRESS),
    "oom_shard_count": note("names of shards have six digits"),
    "compute_hash": own_option("compute-hash"),
    "verify_hash": own_option("verify-hash"),
    "distributor": {
        "multiprocessing": NO_CHANGE,
        "ray": Meaning(option="--runner=ray"),
        ANY: refuse(
            "leave this out to use all cores of this machine, or give --runner ray and "
            "--ray-address HOST:PORT to use a cluster"
        ),
    },
    "subjob_size": note("slices are handed out one by one"),
    "retries": own_option("retries"),
    "disable_all_reencoding": {"false": NO_CHANGE, ANY: note(AS_THEY_CAME)},
    "min_image_size": own_option("min-size"),
    "max_image_area": own_option("max-area"),
    "max_aspect_ratio": own_option("max-aspect-ratio"),
    "incremental_mode": {
        "incremental": NO_CHANGE,
        "overwrite": Meaning(option="--overwrite"),
        "extend": Meaning(option="--append", note=GROWN),
        ANY: refuse("give incremental, overwrite or extend"),
    },
    "max_shard_retry": note("--max-attempts sets how often a slice is tried in all"),
    "user_agent_token": note(
        "servers see the name wdsprep: give --contact URL-OR-MAIL to say who asks"
    ),
    "disallowed_header_directives": {
        "": Meaning(option="--ignore-opt-outs"),
        "noai,noimageai,noimageindex,noindex": NO_CHANGE,
        ANY: refuse(
            "noai, noimageai, noindex, noimageindex, noml and none are obeyed together: leave this "
            "out, or give --ignore-opt-outs"
        ),
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenOption:
    """An option of img2dataset with its value, as the user wrote it."""

    name: str
    value: str

    @property
    def meaning(self) -> Meaning:
        """Return what the option means for pack."""
        found = TABLE[self.name]
        if isinstance(found, Meaning):
            return NO_CHANGE if self.is_none else found
        return found.get(_plain(self.value), NO_CHANGE if self.is_none else found[ANY])

    @property
    def is_none(self) -> bool:
        return self.value.lower() in ("none", "inf")

    @property
    def keeps_bytes(self) -> bool:
        """Return whether this option keeps images from being encoded again.

        Then `encode_quality`, which often stands beside it, has no meaning.
        """
        keeps = self.name in ("skip_reencode", "disable_all_reencoding")
        return keeps and self.value.lower() == "true"

    def __str__(self) -> str:
        return f"--{self.name} {self.value}"


def _plain(value: str) -> str:
    """Return a word or a list as the keys of the table have it: lower case, sorted, unquoted."""
    words = value.lower().strip("[]() ").split(",")
    return ",".join(sorted(word.strip(" '\"") for word in words))


@dataclass(kw_only=True, slots=True)
class Translation:
    """A translated command line: the words for click, the arguments, and notes for the user."""

    arguments: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def add(self, said: WrittenOption) -> None:
        """Add the meaning of an option. Raise UsageError if pack refuses the option."""
        meaning = said.meaning
        value = said.value
        if meaning.refusal:
            raise UsageError(f"{said}: {meaning.refusal}")
        if meaning.place:
            self.places[meaning.place] = value
        if meaning.option:
            self.arguments.append(meaning.option.format(value=value))
        if meaning.note:
            self.notes.setdefault(meaning.note.format(value=value), []).append(f"--{said.name}")


def _read(words: Sequence[str], known: frozenset[str]) -> Iterator[str | WrittenOption]:
    """Yield the options of img2dataset among some words, and the other words as they are.

    `known` are the options of pack.
    """
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            yield from (word, *left)
            return
        name, has_value, value = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if not word.startswith("--") or f"--{name}" in known:
            yield word
        elif key in TABLE:
            is_alone = not has_value and (not left or left[0].startswith("--"))
            yield WrittenOption(
                name=key, value=value if has_value else "True" if is_alone else left.pop(0)
            )
        elif key.removeprefix("no") in TABLE:
            yield WrittenOption(name=key.removeprefix("no"), value="False")
        else:
            yield word


def translate(words: Sequence[str], known: Iterable[str]) -> Translation:
    """Translate a command line that may have options of img2dataset.

    Raise UsageError for an option that pack cannot follow. `known` are the options of pack.
    """
    found = Translation()
    read = list(_read(words, frozenset(known)))
    keeps_bytes = any(isinstance(each, WrittenOption) and each.keeps_bytes for each in read)
    for each in read:
        if isinstance(each, str):
            found.arguments.append(each)
        elif not (keeps_bytes and each.name == "encode_quality"):
            found.add(each)
    return found


class PackCommand(DeclaredCommand):
    """The command `pack`, which takes a command line of img2dataset too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = (name for option in self.params for name in option.opts)
        found = translate(args, known)
        rest = super().parse_args(ctx, found.arguments)
        for place, value in found.places.items():
            if ctx.params[place] is not None:
                raise UsageError(f"{place.upper()} is given twice: {ctx.params[place]}, {value}")
            ctx.params[place] = value
        if not ctx.resilient_parsing:
            for text, names in found.notes.items():
                ProgressLine().say(f"note: {', '.join(names)}: {text}")
        return rest
