"""What a command line of img2dataset means, pasted after `wdsprep pack`.

`TABLE` has what each of its options means here. An option that changes nothing of the images is
passed over with a note; one that would give something else than was asked for is refused. An option
is img2dataset's where it has an underscore, or a name that pack does not have. What is written with
dashes and has the name of one of ours is ours.

Values are read as img2dataset reads them: `--flag`, `--flag=True`, `--flag True`, `--noflag`, and
`None` or `inf` for no value at all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import click

from wdsprep.cli.declared import DeclaredCommand
from wdsprep.errors import UsageError
from wdsprep.terminal import ProgressLine


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """The meaning of an option of img2dataset with some value.

    It is the argument `place` of pack, or an option of ours, with a note where something
    differs; or it is a refusal that says what to do. `{value}` stands for the value.
    """

    place: str = ""
    option: str = ""
    note: str = ""
    refusal: str = ""


def ours(option: str) -> Meaning:
    return Meaning(option=f"--{option}={{value}}")


def note(text: str) -> Meaning:
    return Meaning(note=text)


def refused(text: str) -> Meaning:
    return Meaning(refusal=text)


ANY = "any other"
UNSAID = Meaning()
"""For a value that asks for what is done anyway."""

OWN_SIZE = (
    "images keep their own size: `wdsprep encode --resolution {value}` scales and cuts them, and "
    "--reencode jpg:95 --max-side {value} stores them smaller"
)
OTHER_SIZE = f"{OWN_SIZE}; add --buckets {{value}} to have all images from that size on"
SHAPE = "nothing is cut, padded or scaled before `wdsprep encode`"
PROGRESS = "--track wandb sends how it goes; the progress line and `wdsprep report` tell it too"
AT_A_TIME = "--requests says how many are under way at a time, --per-host how many at one host"
TARS_ALONE = "pack writes WebDataset tars: leave this out, or write --output_format webdataset"
NO_JSON = 'give a table: pandas.read_json("a.json").to_parquet("a.parquet") makes one of it'
OWN_FORMAT = "images keep their format, and --reencode jpg:95 makes JPEG of all: leave this out"
GROWN = "SOURCE must still hold what is packed: give a folder of the earlier lists and the new"
AS_THEY_CAME = "upright sRGB JPEG, PNG and WebP are stored as they came, all else is converted"

TABLE: Mapping[str, Meaning | Mapping[str, Meaning]] = {
    "url_list": Meaning(place="source"),
    "image_size": {
        "256": note(OWN_SIZE),
        "512": note(OWN_SIZE),
        ANY: note(OTHER_SIZE),
    },
    "output_folder": Meaning(place="images"),
    "processes_count": ours("workers"),
    "resize_mode": {"no": UNSAID, ANY: note(SHAPE)},
    "resize_only_if_bigger": note(SHAPE),
    "upscale_interpolation": note(SHAPE),
    "downscale_interpolation": note(SHAPE),
    "encode_quality": Meaning(option="--reencode=jpg:{value}"),
    "encode_format": {"jpg": UNSAID, ANY: refused(OWN_FORMAT)},
    "skip_reencode": {"false": UNSAID, ANY: note(AS_THEY_CAME)},
    "output_format": {"webdataset": UNSAID, ANY: refused(TARS_ALONE)},
    "input_format": {
        "json": refused(NO_JSON),
        "json.gz": refused(NO_JSON),
        ANY: ours("input-format"),
    },
    "url_col": ours("url-col"),
    "caption_col": ours("caption-col"),
    "bbox_col": refused("pack blurs nothing: let img2dataset write tars, and pack those"),
    "thread_count": note(AT_A_TIME),
    "number_sample_per_shard": ours("samples-per-shard"),
    "extract_exif": {
        "false": UNSAID,
        ANY: note("EXIF stays in images that are stored as they came; none of it is in the json"),
    },
    "save_additional_columns": ours("save-additional-columns"),
    "timeout": ours("timeout"),
    "enable_wandb": {"false": UNSAID, ANY: note(PROGRESS)},
    "wandb_project": note(PROGRESS),
    "oom_shard_count": note("names of shards have six digits"),
    "compute_hash": ours("compute-hash"),
    "verify_hash": ours("verify-hash"),
    "distributor": {
        "multiprocessing": UNSAID,
        "ray": Meaning(option="--runner=ray"),
        ANY: refused(
            "leave this out to use all cores of this machine, or give --runner ray and "
            "--ray-address HOST:PORT to use a cluster"
        ),
    },
    "subjob_size": note("slices are handed out one by one"),
    "retries": ours("retries"),
    "disable_all_reencoding": {"false": UNSAID, ANY: note(AS_THEY_CAME)},
    "min_image_size": ours("min-size"),
    "max_image_area": ours("max-area"),
    "max_aspect_ratio": ours("max-aspect-ratio"),
    "incremental_mode": {
        "incremental": UNSAID,
        "overwrite": Meaning(option="--overwrite"),
        "extend": Meaning(option="--append", note=GROWN),
        ANY: refused("give incremental, overwrite or extend"),
    },
    "max_shard_retry": note("--max-attempts is how often a slice is tried in all"),
    "user_agent_token": note("servers see the name wdsprep: --contact URL-OR-MAIL says who asks"),
    "disallowed_header_directives": {
        "": Meaning(option="--ignore-opt-outs"),
        "noai,noimageai,noimageindex,noindex": UNSAID,
        ANY: refused(
            "noai, noimageai, noindex, noimageindex, noml and none are obeyed together: leave this "
            "out, or give --ignore-opt-outs"
        ),
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """An option of img2dataset, as it was written."""

    name: str
    value: str

    @property
    def meaning(self) -> Meaning:
        found = TABLE[self.name]
        if isinstance(found, Meaning):
            return UNSAID if self.is_none else found
        return found.get(_plain(self.value), UNSAID if self.is_none else found[ANY])

    @property
    def is_none(self) -> bool:
        return self.value.lower() in ("none", "inf")

    @property
    def keeps_bytes(self) -> bool:
        """It takes the sense from `encode_quality`, which often stands beside it."""
        keeps = self.name in ("skip_reencode", "disable_all_reencoding")
        return keeps and self.value.lower() == "true"

    def __str__(self) -> str:
        return f"--{self.name} {self.value}"


def _plain(value: str) -> str:
    """Return a word or a list as the table's keys have it: in lower case, sorted, unquoted."""
    words = value.lower().strip("[]() ").split(",")
    return ",".join(sorted(word.strip(" '\"") for word in words))


@dataclass(kw_only=True, slots=True)
class Translation:
    """A translated command line: what click is to parse, and what is to be said beside that."""

    arguments: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def add(self, said: Said) -> None:
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


def _read(words: Sequence[str], known: frozenset[str]) -> Iterator[str | Said]:
    """Yield the options of img2dataset among these words, and the other words as they are.

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
            yield Said(name=key, value=value if has_value else "True" if is_alone else left.pop(0))
        elif key.removeprefix("no") in TABLE:
            yield Said(name=key.removeprefix("no"), value="False")
        else:
            yield word


def translated(words: Sequence[str], known: Iterable[str]) -> Translation:
    """Translate a command line whose options may be img2dataset's.

    Raise an error for an option that has no counterpart.
    """
    found = Translation()
    read = list(_read(words, frozenset(known)))
    keeps_bytes = any(isinstance(each, Said) and each.keeps_bytes for each in read)
    for each in read:
        if isinstance(each, str):
            found.arguments.append(each)
        elif not (keeps_bytes and each.name == "encode_quality"):
            found.add(each)
    return found


class PackCommand(DeclaredCommand):
    """Takes the command line of img2dataset too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = (name for option in self.params for name in option.opts)
        found = translated(args, known)
        rest = super().parse_args(ctx, found.arguments)
        for place, value in found.places.items():
            if ctx.params[place] is not None:
                raise UsageError(f"{place.upper()} is given twice: {ctx.params[place]}, {value}")
            ctx.params[place] = value
        if not ctx.resilient_parsing:
            for text, names in found.notes.items():
                ProgressLine().say(f"note: {', '.join(names)}: {text}")
        return rest
