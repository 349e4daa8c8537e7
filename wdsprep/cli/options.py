"""The options that commands share, and how their values are read."""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from wdsprep.limits import MAX_AREA

Command = TypeVar("Command", bound=Callable[..., Any])
HASHES = ("sha256", "md5", "sha512")


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, such as 2GB or 512MiB."""

    name = "size"
    units = ("B", "K", "M", "G", "T")

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?", str(value))
        if match is None:
            self.fail(f"{value!r} is no size: write 2GB, 500MB or a number of bytes", param, ctx)
        base = 1024 if match[3] else 1000
        return int(float(match[1]) * base ** self.units.index(match[2].upper() or "B"))


class Quality(click.ParamType):  # type: ignore[type-arg]
    """`jpg:95`, or the 95 alone."""

    name = "jpg:quality"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        match = re.fullmatch(r"(?:jpe?g:)?(\d{1,3})", str(value))
        if match is None or not 1 <= int(match[1]) <= 100:
            self.fail(f"{value!r}: write jpg:95, with a quality from 1 to 100", param, ctx)
        return int(match[1])


class Auto(click.ParamType):  # type: ignore[type-arg]
    """A number, or `auto`, which is 0 to the library."""

    name = "auto|N"

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        text = str(value)
        if text == "auto":
            return 0
        if not text.isdecimal() or int(text) < self._least:
            self.fail(f"{value!r}: give auto, or a number from {self._least} on", param, ctx)
        return int(text)


class Span(click.ParamType):  # type: ignore[type-arg]
    """A number of workers, `auto`, which is 0, or the least and the most."""

    name = "auto|N|MIN:MAX"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(?:auto|(\d+)(?::(\d+))?)", str(value))
        least, most = (int(number or 0) for number in match.groups()) if match else (0, 0)
        if match is None or (match[2] and not 1 <= least <= most):
            self.fail(f"{value!r}: give auto, a number, or MIN:MAX such as 4:32", param, ctx)
        return least, most


def _span(ctx: click.Context, _param: Any, value: tuple[int, int]) -> int:
    """The most is a value of its own to the commands."""
    ctx.params["max_workers"] = value[1]
    return value[0]


class Sizes(click.ParamType):  # type: ignore[type-arg]
    """A number for each of some sizes: `256=490M,512=300M`."""

    name = "size=n,..."
    units = (("k", 1e3), ("M", 1e6), ("B", 1e9), ("", 1.0))

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[int, float]:
        if isinstance(value, dict):
            return value
        found = {}
        for part in str(value).split(","):
            match = re.fullmatch(r"\s*(\d+)\s*=\s*(\d+(?:\.\d+)?)([kMB]?)\s*", part)
            if match is None:
                self.fail(f"{part!r}: write 256=490M,512=300M", param, ctx)
            found[int(match[1])] = float(match[2]) * dict(self.units)[match[3]]
        return found


class Names(click.ParamType):  # type: ignore[type-arg]
    """Names with commas between them, or as a JSON list, which img2dataset takes."""

    name = "a,b,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        if not str(value).startswith("["):
            return tuple(name.strip() for name in str(value).split(",") if name.strip())
        try:
            found = json.loads(str(value).replace("'", '"'))
        except ValueError:
            self.fail(f"{value!r} is no list of names", param, ctx)
        return tuple(map(str, found))


class HashColumn(click.ParamType):  # type: ignore[type-arg]
    """`md5`, `COLUMN:md5`, or img2dataset's `["COLUMN","md5"]`: the column and the hash."""

    name = "column[:hash]"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        names = Names().convert(value, param, ctx) if str(value).startswith("[") else ()
        column, _, kind = str(value).rpartition(":")
        column, kind = names if len(names) == 2 else (column or kind, kind)
        if kind not in HASHES:
            self.fail(f"{value!r}: write COLUMN:HASH, with one of {', '.join(HASHES)}", param, ctx)
        return column, kind


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several click options as one decorator."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


AREA = click.option(
    "--max-area", type=click.IntRange(1), default=MAX_AREA, show_default=True, help="Pixels."
)
NBYTES = click.option("--max-bytes", type=Size(), help="Of an image.  [250MB; a download 50MB]")
RULES = options(
    click.option("--buckets", default="256,512", show_default=True, help="Smallest shorter sides."),
    click.option("--samples-per-shard", type=click.IntRange(1), default=10_000, show_default=True),
    click.option("--max-shard-size", type=Size(), default="2GB", show_default=True),
    click.option(
        "--check",
        type=click.Choice(["full", "header"]),
        default="full",
        show_default=True,
        help="Decode each image, or trust its header.",
    ),
    click.option("--min-size", type=int, default=0, help="Least shorter side.  [smallest bucket]"),
    AREA,
    click.option("--max-aspect-ratio", type=float, default=0.0, help="Longer side over shorter."),
    click.option("--min-caption", type=int, default=0, help="Least length in characters."),
    click.option("--max-caption", type=int, default=0, help="Greatest length in characters."),
    click.option("--filter", "condition", help='Such as "aesthetic >= 4.5 and pwatermark < 0.8".'),
    click.option("--reencode", type=Quality(), help="Write every image as JPEG, such as jpg:95."),
    click.option("--max-side", type=int, default=0, help="Shrink larger images (with --reencode)."),
)
COLUMNS = options(
    click.option("--caption-col", default="", help="Column or json field.  [recognised]"),
    click.option("--image-col", default="", help="Column or tar field.  [recognised]"),
    click.option("--url-col", default="", help="Column with the images' URLs.  [recognised]"),
    click.option(
        "--save-additional-columns", type=Names(), help="Keep only these beside the caption.  [all]"
    ),
    click.option("--verify-hash", type=HashColumn(), help="Column with digests, such as md5."),
    click.option("--compute-hash", type=click.Choice(HASHES), help="Keep each image's digest."),
)
FETCHING = options(
    click.option(
        "--timeout",
        type=click.FloatRange(0.1),
        default=10.0,
        show_default=True,
        help="Seconds an attempt.",
    ),
    click.option("--retries", type=click.IntRange(0), default=2, show_default=True),
    click.option(
        "--requests", type=click.IntRange(1), default=256, show_default=True, help="At a time."
    ),
    click.option(
        "--per-host",
        type=click.IntRange(1),
        default=8,
        show_default=True,
        help="Requests at a time.",
    ),
    NBYTES,
    click.option("--contact", default="", help="URL or mail address to show to servers."),
    click.option("--ignore-robots", is_flag=True, help="Fetch what robots.txt disallows."),
    click.option("--ignore-opt-outs", is_flag=True, help="Fetch what is marked noai or noimageai."),
    click.option(
        "--allow-private-hosts", is_flag=True, help="Fetch from loopback and local networks too."
    ),
    click.option(
        "--ignore-outage", is_flag=True, help="Take hosts for gone where none of many answers."
    ),
    click.option("--allow-s3", is_flag=True, help="Read s3:// rows, with your credentials."),
    click.option(
        "--retry-rejected", is_flag=True, help="Fetch again what a passing failure left out."
    ),
)
RUNNING = (
    click.option("--ray-address", help="A Ray cluster.  [RAY_ADDRESS, else a local one]"),
    click.option("--max-attempts", type=click.IntRange(1), default=3, show_default=True),
)
LOCALLY = click.option(
    "--runner", type=click.Choice(["local", "ray"]), default="local", show_default=True
)
WORKERS = options(
    click.option("--workers", type=click.IntRange(0), default=0, help="Processes.  [all cores]"),
    LOCALLY,
    *RUNNING,
)
PACKERS = options(
    click.option(
        "--workers",
        type=Span(),
        default="auto",
        callback=_span,
        help="Processes; on a cluster also MIN:MAX.  [all cores]",
    ),
    LOCALLY,
    *RUNNING,
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
RECIPE = options(
    click.option("--resolution", type=click.IntRange(8), required=True, help="Such as 256 or 512."),
    click.option(
        "--model",
        default="sd2",
        show_default=True,
        help="sd2, sd1, tiny, REPO[@REV] of a diffusers model, or its folder.",
    ),
    click.option(
        "--latents",
        type=click.Choice(["sample", "mean", "moments"]),
        default="sample",
        show_default=True,
        help="What to keep of the VAE's distribution.",
    ),
    click.option(
        "--text", type=click.Choice(["emb", "tokens", "none"]), default="emb", show_default=True
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "fp16", "bf16", "fp32"]),
        default="auto",
        show_default=True,
        help="The models' own; stored is fp16.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the sampling noise."),
)
PLAN = options(
    click.option("--counts", type=Sizes(), help="Images by bucket, such as 256=490M,512=300M."),
    click.option("--gpu", help="A10G, A100, H100 or H200: speeds of a table, not measured."),
    click.option("--rate", "rates", type=Sizes(), help="Images/s of a GPU: 256=111,512=30."),
    click.option("--trial", "trials", multiple=True, help='What an "encode --limit" made.'),
    click.option("--gpus", type=click.IntRange(1), default=1, show_default=True),
    click.option("--price", type=float, default=0.0, help="Dollars for an hour of a GPU."),
    click.option("--model", type=click.Choice(["sd2", "sd1"]), default="sd2", show_default=True),
    click.option(
        "--latents",
        type=click.Choice(["sample", "mean", "moments"]),
        default="sample",
        show_default=True,
    ),
    click.option(
        "--text", type=click.Choice(["emb", "tokens", "none"]), default="emb", show_default=True
    ),
    click.option("--samples-per-shard", type=click.IntRange(1), default=10_000, show_default=True),
    click.option("--published", is_flag=True, help="Reckon the published runs instead."),
    JSON,
)
CREW = options(
    click.option("--batch-size", type=Auto(1), default="auto", show_default=True),
    click.option("--compile", is_flag=True, help="Compile the models first."),
    click.option(
        "--device",
        type=click.Choice(["auto", "cuda", "cpu"]),
        default="auto",
        show_default=True,
    ),
    click.option(
        "--workers",
        type=Span(),
        default="auto",
        callback=_span,
        show_default=True,
        help="MIN:MAX on a cluster that grows.",
    ),
    click.option(
        "--gpus-per-worker", type=float, default=0.0, help="GPUs, or a share of one.  [1]"
    ),
    click.option("--cpus-per-worker", type=float, default=0.0, help="Cores.  [all, shared fairly]"),
    click.option("--accelerator-type", help="Such as A10G: only on these GPUs of a Ray cluster."),
    click.option("--runner", type=click.Choice(["ray", "local"]), default="ray", show_default=True),
    *RUNNING,
)
