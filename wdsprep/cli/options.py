"""The options that commands share, and how their values are read.

No default of a library function stands here: `LibraryCommand` has them from its signature.
"""

import importlib
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from wdsprep.encoding import DTYPES, LATENTS, TEXTS
from wdsprep.errors import UsageError
from wdsprep.packing import HASHES

Command = TypeVar("Command", bound=Callable[..., Any])


def named(function: str) -> Callable[..., Any]:
    """The function that `module:name` means."""
    module, _, name = function.partition(":")
    found: Callable[..., Any] = operator.attrgetter(name)(importlib.import_module(module))
    return found


class LibraryCommand(click.Command):
    """A command that is one call of the library's function `function`, such as
    `wdsprep.packing.pack:pack`: an option that is not given has the function's default."""

    def __init__(self, *args: Any, function: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.function = function

    def defaults(self) -> Mapping[str, Any]:
        """By parameter. Importing the function takes a while, and is left until it is needed."""
        import inspect

        signature = inspect.signature(named(self.function))
        return {name: parameter.default for name, parameter in signature.parameters.items()}

    def invoke(self, ctx: click.Context) -> Any:
        defaults = self.defaults()
        given = {name: value for name, value in ctx.params.items() if value is not None}
        ctx.params = {name: given.get(name, defaults.get(name)) for name in ctx.params}
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        defaults = self.defaults()
        for option in self.params:
            if getattr(option, "show_default", None):
                option.default = defaults[str(option.name)]
        super().format_options(ctx, formatter)


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """What a function of the library, such as `wdsprep.text:size`, makes of the text, unless it
    refuses that with a UsageError. It is imported when there is a text to read."""

    def __init__(self, name: str, function: str) -> None:
        self.name, self._function = name, function

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return named(self._function)(value)
        except UsageError as error:
            return self.fail(str(error), param, ctx)


SIZE = Parsed("size", "wdsprep.text:size")
SIZES = Parsed("size=n,...", "wdsprep.cli.plan:sizes")
WORKERS_SPAN = Parsed("auto|N|MIN:MAX", "wdsprep.runners.base:least_and_most")


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several click options as one decorator."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


AREA = click.option("--max-area", type=click.IntRange(1), show_default=True, help="Pixels.")
NBYTES = click.option("--max-bytes", type=SIZE, help="Of an image.  [250MB; a download 50MB]")
INPUT_FORMAT = click.option(
    "--input-format",
    metavar="FORMAT",
    show_default=True,
    help="What SOURCE holds, where that is not clear: images, tars, parquet, csv, tsv, jsonl, txt.",
)
RULES = options(
    click.option("--buckets", show_default=True, help="Smallest shorter sides."),
    click.option("--samples-per-shard", type=click.IntRange(1), show_default=True),
    click.option("--max-shard-size", type=SIZE, show_default=True),
    click.option(
        "--check",
        type=click.Choice(["full", "header"]),
        show_default=True,
        help="Decode each image, or trust its header.",
    ),
    click.option("--min-size", type=int, help="Least shorter side.  [smallest bucket]"),
    AREA,
    click.option("--max-aspect-ratio", type=float, help="Longer side over shorter."),
    click.option("--min-caption", type=int, help="Least length in characters."),
    click.option("--max-caption", type=int, help="Greatest length in characters."),
    click.option("--filter", help='Such as "aesthetic >= 4.5 and pwatermark < 0.8".'),
    click.option(
        "--reencode",
        type=Parsed("jpg:quality", "wdsprep.images:jpeg_quality"),
        help="Write every image as JPEG, such as jpg:95.",
    ),
    click.option("--max-side", type=int, help="Shrink larger images (with --reencode)."),
)


COLUMNS = options(
    click.option("--caption-col", help="Column or json field.  [recognised]"),
    click.option("--image-col", help="Column or tar field.  [recognised]"),
    click.option("--url-col", help="Column with the images' URLs.  [recognised]"),
    click.option(
        "--save-additional-columns",
        type=Parsed("a,b,...", "wdsprep.text:names"),
        help="Keep only these beside the caption.  [all]",
    ),
    click.option(
        "--verify-hash",
        type=Parsed("column[:hash]", "wdsprep.packing.rules:Digest.parse"),
        help="Column with digests, such as md5.",
    ),
    click.option("--compute-hash", type=click.Choice(HASHES), help="Keep each image's digest."),
)
FETCHING = options(
    click.option(
        "--timeout", type=click.FloatRange(0.1), show_default=True, help="Seconds an attempt."
    ),
    click.option("--retries", type=click.IntRange(0), show_default=True),
    click.option("--requests", type=click.IntRange(1), show_default=True, help="At a time."),
    click.option(
        "--per-host", type=click.IntRange(1), show_default=True, help="Requests at a time."
    ),
    NBYTES,
    click.option("--contact", help="URL or mail address to show to servers."),
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
    click.option("--max-attempts", type=click.IntRange(1), show_default=True),
)
LOCALLY = click.option("--runner", type=click.Choice(["local", "ray"]), show_default=True)
WORKERS = options(
    click.option("--workers", type=click.IntRange(0), help="Processes.  [all cores]"),
    LOCALLY,
    *RUNNING,
)
PACKERS = options(
    click.option(
        "--workers",
        type=WORKERS_SPAN,
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
        show_default=True,
        help="sd2, sd1, tiny, REPO[@REV] of a diffusers model, or its folder.",
    ),
    click.option(
        "--latents",
        type=click.Choice(LATENTS),
        show_default=True,
        help="What to keep of the VAE's distribution.",
    ),
    click.option("--text", type=click.Choice(TEXTS), show_default=True),
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        show_default=True,
        help="The models' own; stored is fp16.",
    ),
    click.option("--seed", type=int, show_default=True, help="Of the sampling noise."),
)
PLAN = options(
    click.option("--counts", type=SIZES, help="Images by bucket, such as 256=490M,512=300M."),
    click.option("--gpu", help="A10G, A100, H100 or H200: speeds of a table, not measured."),
    click.option("--rate", "rates", type=SIZES, help="Images/s of a GPU: 256=111,512=30."),
    click.option("--trial", "trials", multiple=True, help='What an "encode --limit" made.'),
    click.option("--gpus", type=click.IntRange(1), show_default=True),
    click.option("--price", type=float, help="Dollars for an hour of a GPU."),
    click.option("--model", type=click.Choice(["sd2", "sd1"]), show_default=True),
    click.option("--latents", type=click.Choice(LATENTS), show_default=True),
    click.option("--text", type=click.Choice(TEXTS), show_default=True),
    click.option("--samples-per-shard", type=click.IntRange(1), show_default=True),
    click.option("--published", is_flag=True, help="Reckon the published runs instead."),
    JSON,
)
CREW = options(
    click.option("--batch-size", type=Parsed("auto|N", "wdsprep.text:auto"), show_default=True),
    click.option("--compile", is_flag=True, help="Compile the models first."),
    click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), show_default=True),
    click.option(
        "--workers",
        type=WORKERS_SPAN,
        show_default=True,
        help="MIN:MAX on a cluster that grows.",
    ),
    click.option("--gpus-per-worker", type=float, help="GPUs, or a share of one.  [1]"),
    click.option("--cpus-per-worker", type=float, help="Cores.  [all, shared fairly]"),
    click.option("--accelerator-type", help="Such as A10G: only on these GPUs of a Ray cluster."),
    click.option("--runner", type=click.Choice(["ray", "local"]), show_default=True),
    *RUNNING,
)
