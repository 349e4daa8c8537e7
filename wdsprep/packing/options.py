"""The options of `pack`: which samples are kept, and how their shards are cut.

`settings_of` returns the settings of a dataset that follow from them.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

from wdsprep.dataset.condition_syntax import Condition
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.samples import ROLE
from wdsprep.dataset.shapes import parse_buckets
from wdsprep.errors import UsageError
from wdsprep.fetch.options import DOWNLOADING, FetchOptions, FetchRules
from wdsprep.images import headers
from wdsprep.images.options import HEADING, ImageOptions, Limits, jpeg_quality
from wdsprep.limits import MAX_DOWNLOAD_NBYTES, MAX_NBYTES
from wdsprep.options import Options, option_field, options_in_settings
from wdsprep.packing import HASHES
from wdsprep.runners.options import OUTPUT, TRACK, WorkerOptions, limit, overwrite
from wdsprep.sources.captions import CAPTIONS
from wdsprep.text import brief, parse_names, parse_size

if TYPE_CHECKING:
    from wdsprep.sources.base import Columns, Role, Source

IMAGES, COLUMNS, SOURCE = HEADING, "Captions and columns", "Source"
FORMATS = ("auto", "images", "tars", "parquet", "csv", "tsv", "jsonl", "txt", "arrow", "mds")
"""The kinds of a source."""


def parse_digest(value: Any) -> tuple[str, str]:
    """Return a column of digests of images, and the name of the hash that made them.

    The value is `COLUMN:md5`, or `md5`, which means a column of that name.
    """
    column, _, kind = str(value).rpartition(":")
    if kind not in HASHES:
        raise UsageError(f"{brief(value)}: write COLUMN:HASH, with one of {', '.join(HASHES)}")
    return column or kind, kind


def _filter(text: str) -> Condition:
    return Condition(text, "--filter ")


def _role(given: Any) -> str:
    """Check that a text names a role and where its images are, and return it."""
    from wdsprep.sources.base import Role

    if not isinstance(given, str):
        raise UsageError(f"{brief(given)}: write NAME=WHERE, as source=edits/")
    Role.parse(given)
    return given


def _role_name(given: Any) -> str:
    if not (isinstance(given, str) and re.fullmatch(ROLE, given)):
        raise UsageError(f"{brief(given)}: give the name of a role, short and of a-z, 0-9")
    return given


def _caption_extensions(given: Any) -> tuple[str, ...]:
    found = tuple(f".{name.lower().removeprefix('.')}" for name in parse_names(given))
    kinds = {"json", *headers.IMAGES, *headers.OTHER_IMAGES}
    if not found or any(not re.fullmatch(r"\.[\w-]+", e) or e[1:] in kinds for e in found):
        raise UsageError(f"{brief(given)}: give extensions of caption files, as .caption,.txt")
    return found


@dataclass(frozen=True, kw_only=True)
class ShardSizes(Options):
    """Options that say when a shard is full."""

    samples_per_shard: int = option_field(
        "Begin another shard after this number of samples.", OUTPUT, default=10_000, least=1
    )
    max_shard_size: int | str = option_field(
        "Begin another shard before the last one has more bytes than this.",
        OUTPUT,
        default="2GB",
        read=parse_size,
        least=1,
        metavar="SIZE",
    )

    @cached_property
    def max_shard_nbytes(self) -> int:
        return parse_size(self.max_shard_size)


@dataclass(frozen=True, kw_only=True)
class PackRules(ShardSizes, ImageOptions):
    """Options that decide which samples are kept, and what their shards look like."""

    buckets: str | Iterable[int] = option_field(
        "The smallest shorter side of each bucket, in pixels. Training at a resolution uses "
        "the buckets of that side and above.",
        IMAGES,
        default="256,512",
        read=parse_buckets,
        order=-2,
    )
    check: str = option_field(
        "Decode each image whole, or trust what its header says.",
        IMAGES,
        default="full",
        choices=("full", "header"),
        order=-2,
    )
    max_bytes: int | str = option_field(
        "Reject images of more bytes than this; of a download, more than 50 MB unless given.",
        IMAGES,
        default=0,
        read=parse_size,
        metavar="SIZE",
        usual="250MB",
        code=Code.TOO_MANY_BYTES,
        remedy="--overwrite with larger --max-bytes takes larger files",
        example="250MB",
    )
    reencode: int | str = option_field(
        "Write every image as JPEG of this quality, such as jpg:95.",
        IMAGES,
        default="",
        read=jpeg_quality,
        metavar="JPG:QUALITY",
        example="jpg:95",
    )
    max_side: int = option_field(
        "Shrink images whose longer side has more pixels, but never their shorter side below the "
        "smallest bucket; needs --reencode.",
        IMAGES,
        default=0,
        least=0,
        example="1024",
    )
    caption_col: str = option_field(
        "Take captions from this column of a table, or field of the json.",
        COLUMNS,
        default="",
        usual="recognised",
    )
    caption_ext: str | Iterable[str] = option_field(
        "Take captions from files of this extension beside the images of a folder or in tars, "
        "such as .caption. Of several, as .caption,.txt, the first that an image has counts, even "
        "if it is empty.",
        COLUMNS,
        default=CAPTIONS,
        read=_caption_extensions,
        metavar="EXT,...",
        usual=CAPTIONS[0],
        decides=True,
        example=".caption,.txt",
    )
    repeats_from_folders: bool = option_field(
        "Keep the number of folders such as 10_name as "
        "[repeats](../loading/fine-tuning.md#repeats) in the json, as kohya's trainers read it.",
        COLUMNS,
        default=False,
        decides=True,
    )
    role: str | Sequence[str] = option_field(
        "Take a further image of each sample, [in the role NAME](#several-images-a-sample), from "
        "WHERE: a folder of files with the same names, a column, or an ending of files or members, "
        "as .source.jpg.",
        COLUMNS,
        default=(),
        read=_role,
        is_many=True,
        metavar="NAME=WHERE",
        code=Code.NO_ROLE,
        remedy="check --role, or give --optional-role to keep samples without that image",
        example="source=WHERE",
    )
    optional_role: str | Sequence[str] = option_field(
        "Keep samples that have no image in this role.",
        COLUMNS,
        default=(),
        is_many=True,
        read=_role_name,
        metavar="NAME",
        example="source",
    )
    image_col: str = option_field(
        "Take images from this column of a table, member of a tar, or field of a folder's "
        "metadata, which names files.",
        COLUMNS,
        default="",
        usual="recognised",
    )
    url_col: str = option_field(
        "Take the URLs of images from this column.", COLUMNS, default="", usual="recognised"
    )
    save_additional_columns: str | Iterable[str] | None = option_field(
        "Keep only these columns or fields in the json, beside caption and URL.",
        COLUMNS,
        default=None,
        read=parse_names,
        metavar="A,B,...",
        usual="all",
        example="a,b",
    )
    min_caption: int = option_field(
        "Reject captions of fewer characters.",
        COLUMNS,
        default=0,
        least=0,
        code=Code.CAPTION_TOO_SHORT,
        remedy="--overwrite with a smaller --min-caption takes shorter captions",
        example="N",
    )
    max_caption: int = option_field(
        "Reject captions of more characters.",
        COLUMNS,
        default=0,
        least=0,
        code=Code.CAPTION_TOO_LONG,
        remedy="--overwrite with a larger --max-caption takes longer captions",
        example="N",
    )
    filter: str = option_field(
        "Keep only samples that meet "
        "[this condition](../loading/README.md#samples-that-meet-a-condition), such as "
        '"aesthetic >= 4.5 and pwatermark < 0.8".',
        COLUMNS,
        default="",
        read=lambda text: _filter(text).text,
        code=Code.FILTERED,
        remedy="--overwrite with another --filter takes others",
        example='"aesthetic >= 4.5 and pwatermark < 0.8"',
    )
    verify_hash: str = option_field(
        "Reject images whose sha256, md5 or sha512 differs from the one in this column.",
        COLUMNS,
        default="",
        read=lambda text: ":".join(parse_digest(text)),
        decides=True,
        code=Code.HASH_MISMATCH,
        remedy="check whether --verify-hash gives the right column and hash",
        metavar="COLUMN[:HASH]",
        example="COLUMN:HASH",
    )
    compute_hash: str = option_field(
        "Keep the digest of each image in its json.",
        COLUMNS,
        default="",
        choices=HASHES,
        decides=True,
    )

    def check_together(self) -> None:
        super().check_together()
        if 0 < self.max_caption < self.min_caption:
            raise UsageError(
                "--max-caption is below --min-caption, and no caption fits both: change one"
            )
        names = [role.name for role in self.roles]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise UsageError(
                f"--role {twice} is given twice: give each role once, and several images of one "
                "role as numbered files or a list"
            )
        places = {self.image_col.lstrip("."): "--image-col", self.url_col: "--url-col"}
        for role in self.roles:
            where = role.where.lstrip(".") if role.is_ending else role.where.rstrip("/")
            if where and (other := places.get(where)):
                raise UsageError(
                    f"--role {role.name} and {other} both take {role.where}: give each a place of "
                    "its own"
                )
            places[where] = f"--role {role.name}"
        limited = {role: next(iter(limits)) for role, limits in self.role_limits().items()}
        named = {**limited, **dict.fromkeys(self.optional_role, "optional_role")}
        if other := next((name for name in named if name not in names), ""):
            option = named[other].replace("_", "-")
            raise UsageError(f"--{option} names {other}, and there is no --role {other}=WHERE")
        if self.max_side and not self.reencode:
            raise UsageError(
                "--max-side needs --reencode, such as jpg:95: a smaller image is a new image"
            )

    @cached_property
    def roles(self) -> "tuple[Role, ...]":
        """Return the roles in which samples have further images, in their order."""
        from wdsprep.sources.base import Role

        roles = map(Role.parse, self.role)
        return tuple(replace(r, is_optional=r.name in self.optional_role) for r in roles)

    @cached_property
    def sides(self) -> tuple[int, ...]:
        """Return the smallest shorter side of each bucket."""
        return parse_buckets(self.buckets)

    @cached_property
    def max_nbytes(self) -> int:
        return parse_size(self.max_bytes) or MAX_NBYTES

    @cached_property
    def limits(self) -> dict[str, Limits]:
        """Return the limits of images by their roles; that of the target is ""."""
        quality = jpeg_quality(self.reencode) if self.reencode else 0
        smallest = {"": self.sides[0], **{role.name: 1 for role in self.roles}}
        return {
            role: replace(self.limits_from(side, role), quality=quality, max_side=self.max_side)
            for role, side in smallest.items()
        }

    @cached_property
    def condition(self) -> Condition | None:
        return _filter(self.filter) if self.filter else None

    @cached_property
    def verify(self) -> tuple[str, str] | None:
        """Return the column of digests of images, and the name of the hash that made them."""
        return parse_digest(self.verify_hash) if self.verify_hash else None

    @cached_property
    def kept(self) -> tuple[str, ...] | None:
        """Return the names of the facts that are stored in a shard; None stands for all."""
        given = self.save_additional_columns
        return None if given is None else parse_names(given)

    @property
    def columns(self) -> "Columns":
        """Return the columns that a source must have."""
        from wdsprep.sources.base import Columns

        condition = self.condition
        return Columns(
            image=self.image_col,
            caption=self.caption_col,
            url=self.url_col,
            digest=self.verify[0] if self.verify else "",
            filtered=tuple(sorted(condition.columns - {"caption"})) if condition else (),
            kept=self.kept or (),
            caption_ext=cast("tuple[str, ...]", self.caption_ext),
            roles=self.roles,
        )


@dataclass(frozen=True)
class PackOptions(WorkerOptions, FetchOptions, PackRules):
    """The options of `pack`."""

    unit_noun: ClassVar[str] = "slice"

    source: "str | os.PathLike[str]" = option_field(
        "The source to pack.", default="downloads", is_place=True
    )
    images: "str | os.PathLike[str]" = option_field(
        "The place for the shards.", default="shards/images", is_place=True
    )
    _: KW_ONLY
    limit: int = field(
        default=0, metadata=limit("samples", SOURCE, "the rest is then packed with `--append`")
    )
    append: bool = option_field(
        "Pack what the source has gained since, into further shards.", SOURCE, default=False
    )
    input_format: str = option_field(
        "Read SOURCE as this kind, if it is not clear which is meant.",
        SOURCE,
        default="auto",
        choices=FORMATS,
    )
    retry_rejected: bool = option_field(
        "Fetch rows again that failed for a reason that may pass, or that are allowed now.",
        DOWNLOADING,
        default=False,
    )
    overwrite: bool = field(default=False, metadata=overwrite("the dataset IMAGES"))
    track: str = field(default="", metadata=TRACK)

    def check_together(self) -> None:
        super().check_together()
        if self.append and self.overwrite:
            raise UsageError(
                "--append keeps what is packed, --overwrite removes it: give one of them"
            )
        if self.retry_rejected and self.overwrite:
            raise UsageError(
                "--overwrite removes the rejects that --retry-rejected is for: give one of them"
            )

    @property
    def fetching(self) -> FetchRules:
        nbytes = parse_size(self.max_bytes) or MAX_DOWNLOAD_NBYTES
        return FetchRules(**vars(self.part(FetchOptions)), max_nbytes=nbytes)


AS_GIVEN = (
    *("caption_col", "check", "filter", "image_col", "max_caption", "max_side", "min_caption"),
    "samples_per_shard",
)
"""The options that settings state as they are, even if they have their defaults."""


def settings_of(options: PackOptions, place: "Source") -> dict[str, Any]:
    """Return the settings that, with the content of the source, decide an image dataset's bytes.

    The settings of downloads are those of this run, which may allow more than the settings of the
    dataset do: see `wdsprep.dataset.settings`. A folder with images in a role is no setting: what
    was packed of it is listed by name.
    """
    source, limits = place.kind, options.limits_from(0)
    found = {
        **{name: getattr(options, name) for name in AS_GIVEN},
        "buckets": list(options.sides),
        "max_area": limits.max_area,
        "max_aspect_ratio": limits.max_aspect_ratio,
        "max_shard_size": options.max_shard_nbytes,
        "min_size": limits.min_side,
        "reencode": f"jpg:{jpeg_quality(options.reencode)}" if options.reencode else "",
        "source": source,
        **options_in_settings(options),
    }
    if limits.max_alpha != 1:
        found["max_alpha"] = limits.max_alpha
    of_roles = {
        "roles": [role.name for role in options.roles],
        "optional_roles": [role.name for role in options.roles if role.is_optional],
        "role_columns": {role.name: role.where for role in place.columns.roles if not role.url},
        "role_limits": options.role_limits(),
    }
    found |= {name: value for name, value in of_roles.items() if value}
    if options.kept is not None:
        found["save_additional_columns"] = list(options.kept)
    if source != "urls" and options.max_nbytes != MAX_NBYTES:
        found["max_bytes"] = options.max_nbytes
    if source == "urls":
        found |= {
            "max_bytes": options.fetching.max_nbytes,
            "opt_outs": not options.ignore_opt_outs,
            "robots": not options.ignore_robots,
            "url_col": options.url_col,
        } | ({"allow_s3": True} if options.allow_s3 else {})
    return found
