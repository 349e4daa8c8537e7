"""The options that commands share, and how their values are read.

No default of a library function stands here: `LibraryCommand` has them from its signature.
"""

import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from wdsprep.cli.output import TERMINAL
from wdsprep.encoding import DTYPES, LATENTS, MODELS, TEXTS
from wdsprep.errors import UsageError
from wdsprep.packing import HASHES
from wdsprep.runners.base import RUNNERS

Function = TypeVar("Function", bound=Callable[..., Any])


def named(function: str) -> Callable[..., Any]:
    """The function that `module:name` means."""
    module, _, name = function.partition(":")
    found: Callable[..., Any] = operator.attrgetter(name)(importlib.import_module(module))
    return found


class Option(click.Option):
    """An option that stands under a heading in the help of its command."""

    heading = "General"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.metavar is None and self.type.name.startswith(("integer", "float")):
            self.metavar = "N"

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Without the range, which an error tells to who leaves it."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


option = partial(click.option, cls=Option)


class Place(click.ParamType):  # type: ignore[type-arg]
    """A file, a folder, a pattern or a URL: shells complete what is a file."""

    name = "text"

    def shell_complete(self, _ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class ModelName(click.ParamType):  # type: ignore[type-arg]
    """A preset, a folder or a repository: shells complete the first two."""

    name = "text"

    def shell_complete(self, _ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
        known = [CompletionItem(name) for name in MODELS if name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="dir"), *known]


PLACE = Place()


def _be_quiet(ctx: click.Context, _param: Any, wanted: bool) -> None:
    TERMINAL.is_quiet |= wanted
    _check_volume(ctx)


def _be_verbose(ctx: click.Context, _param: Any, wanted: bool) -> None:
    if wanted:
        TERMINAL.be_verbose()
    _check_volume(ctx)


def _debug(_ctx: click.Context, _param: Any, wanted: bool) -> None:
    TERMINAL.is_debugging |= wanted


def _check_volume(ctx: click.Context) -> None:
    if TERMINAL.is_quiet and TERMINAL.is_verbose:
        raise click.UsageError("--quiet and --verbose: give one of them", ctx)


def volume() -> list[click.Parameter]:
    """How much is said: options that stand before the command as well as after it."""
    said = partial(Option, is_flag=True, expose_value=False)
    return [
        said(
            ["-q", "--quiet"],
            callback=_be_quiet,
            help="Print errors, warnings, findings and what was asked for, and nothing else.",
        ),
        said(
            ["-v", "--verbose"],
            callback=_be_verbose,
            help="Print a line for each unit that is done or tried again and each worker that is "
            "lost, and the traceback of an error.",
        ),
        said(["--debug"], callback=_debug, help="Print the traceback of an error."),
    ]


class Command(click.Command):
    """A command whose help has its options under headings, and ends with examples."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.examples = examples

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *own, helping = super().get_params(ctx)
        return [*own, *volume(), helping]

    def get_short_help_str(self, _limit: int = 0) -> str:
        """Its first sentence, whole."""
        return " ".join((self.help or "").partition("\n\n")[0].split())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                heading = getattr(param, "heading", Option.heading)
                groups.setdefault(heading, []).append(record)
        for heading in sorted(
            groups, key=lambda heading: heading == Option.heading
        ):  # that comes last
            with formatter.section(heading):
                formatter.write_dl(groups[heading])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"  $ {example}\n")
        super().format_epilog(ctx, formatter)


class LibraryCommand(Command):
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
        ctx.default_map = dict(self.defaults())
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


def options(
    heading: str, *decorators: Callable[[Function], Function]
) -> Callable[[Function], Function]:
    """Several options as one decorator, which stand under a heading."""

    def decorate(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
            cast("Any", function).__click_params__[-1].heading = heading
        return function

    return decorate


AREA = options(
    "Images",
    option(
        "--max-area",
        type=click.IntRange(1),
        show_default=True,
        help="Reject images of more pixels than this.",
    ),
)


def max_bytes(usual: str) -> Callable[[Function], Function]:
    return option(
        "--max-bytes",
        type=SIZE,
        show_default=usual,
        help="Reject images of more bytes than this.",
    )


INPUT_FORMAT = option(
    "--input-format",
    metavar="FORMAT",
    show_default=True,
    help="Say what SOURCE holds, where that is not clear: images, tars, parquet, csv, tsv, jsonl "
    "or txt.",
)
RULES = options(
    "Images",
    option(
        "--buckets",
        show_default=True,
        help="The smallest shorter side of each bucket, in pixels. A training phase of a "
        "resolution uses the buckets from there on.",
    ),
    option(
        "--check",
        type=click.Choice(["full", "header"]),
        show_default=True,
        help="Decode each image whole, or trust what its header says.",
    ),
    option(
        "--min-size",
        type=int,
        show_default="the smallest bucket",
        help="Reject images whose shorter side has fewer pixels.",
    ),
    AREA,
    option(
        "--max-aspect-ratio",
        type=float,
        help="Reject images whose longer side is more than so many times the shorter.",
    ),
    max_bytes("250MB; of a download 50MB"),
    option(
        "--reencode",
        type=Parsed("jpg:quality", "wdsprep.images:jpeg_quality"),
        help="Write every image as JPEG of this quality, such as jpg:95.",
    ),
    option(
        "--max-side",
        type=int,
        help="Shrink images whose longer side has more pixels; needs --reencode.",
    ),
)
COLUMNS = options(
    "Captions and columns",
    option(
        "--caption-col",
        show_default="recognised",
        help="Take captions from this column of a table, or field of the json.",
    ),
    option(
        "--image-col",
        show_default="recognised",
        help="Take images from this column of a table, or member of a tar.",
    ),
    option(
        "--url-col",
        show_default="recognised",
        help="Take the URLs of images from this column.",
    ),
    option(
        "--save-additional-columns",
        type=Parsed("a,b,...", "wdsprep.text:names"),
        show_default="all",
        help="Keep only these columns or fields beside the caption.",
    ),
    option("--min-caption", type=int, help="Reject captions of fewer characters."),
    option("--max-caption", type=int, help="Reject captions of more characters."),
    option(
        "--filter",
        help='Keep only what this is true of, such as "aesthetic >= 4.5 and pwatermark < 0.8".',
    ),
    option(
        "--verify-hash",
        type=Parsed("column[:hash]", "wdsprep.packing.rules:Digest.parse"),
        help="Reject images whose bytes do not have the digest of this column, such as md5.",
    ),
    option(
        "--compute-hash",
        type=click.Choice(HASHES),
        help="Keep the digest of each image in its json.",
    ),
)
FETCHING = options(
    "Downloading",
    option(
        "--timeout",
        type=click.FloatRange(0.1),
        show_default=True,
        help="Give up an attempt at a URL after so many seconds.",
    ),
    option(
        "--retries",
        type=click.IntRange(0),
        show_default=True,
        help="Try a URL so many times more.",
    ),
    option(
        "--requests",
        type=click.IntRange(1),
        show_default=True,
        help="Have so many requests under way at a time from one machine.",
    ),
    option(
        "--per-host",
        type=click.IntRange(1),
        show_default=True,
        help="Have so many of them under way at one host.",
    ),
    option("--contact", help="Show this URL or mail address to servers."),
    option("--ignore-robots", is_flag=True, help="Fetch what robots.txt disallows."),
    option("--ignore-opt-outs", is_flag=True, help="Fetch what is marked noai or noimageai."),
    option(
        "--allow-private-hosts", is_flag=True, help="Fetch from loopback and local networks too."
    ),
    option(
        "--ignore-outage",
        is_flag=True,
        help="Take hosts for gone, not the network for down, where none of many answers.",
    ),
    option("--allow-s3", is_flag=True, help="Read the s3:// rows of a table, with your keys."),
    option(
        "--retry-rejected", is_flag=True, help="Fetch again what failed in a way that may pass."
    ),
)
RUNNING = (
    option(
        "--runner",
        type=click.Choice(RUNNERS),
        show_default=True,
        help="Work in processes of this machine, or on Ray; auto takes Ray where --ray-address or "
        "RAY_ADDRESS names one, and to encode on several GPUs.",
    ),
    option(
        "--ray-address",
        show_default="RAY_ADDRESS",
        help="Use the Ray cluster whose head is at this HOST:PORT; auto is that of this machine.",
    ),
    option(
        "--max-attempts",
        type=click.IntRange(1),
        show_default=True,
        help="Leave out a unit of work that has failed so many times.",
    ),
)
WORKERS = options(
    "Workers",
    option(
        "--workers",
        type=click.IntRange(0),
        show_default="one a core",
        help="Work in so many processes.",
    ),
    *RUNNING,
)
PACKERS = options(
    "Workers",
    option(
        "--workers",
        type=WORKERS_SPAN,
        show_default="one a core",
        help="Work in so many processes; MIN:MAX on a cluster that grows.",
    ),
    *RUNNING,
)
JSON = option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
OUTPUT = options("Output", JSON)
CAPTIONS = options(
    "Captions",
    option(
        "--captions",
        metavar="TABLE",
        type=PLACE,
        help="Give what this table names the captions that it has for them: Parquet, CSV, TSV or "
        "JSON lines, or a folder or pattern of them, with a column key, source, url or sha256.",
    ),
    option(
        "--captions-by",
        metavar="COLUMN",
        show_default="the first of those that it has",
        help="Find captions in the table by this column.",
    ),
    option("--caption-column", show_default="caption", help="Take captions from this column."),
    option(
        "--caption-field",
        metavar="PATH",
        help="Take captions from this field of the json of each sample, such as meta.long or "
        "captions.1.",
    ),
    option(
        "--caption-fields",
        type=Parsed("a,b,...", "wdsprep.text:names"),
        help="Encode the captions of several fields in one pass, with --latents none, each into a "
        "dataset of its own.",
    ),
    option(
        "--caption-name",
        show_default="the field's last part",
        help="Call the captions by this name, by which a loader knows them.",
    ),
)
SHAPES = "FILE|sdxl|nearest:STEP,MAX"
RECIPE = options(
    "Model",
    option(
        "--resolution",
        type=Parsed("n,...", "wdsprep.encoding.recipe:parse_resolutions"),
        help="Encode centre squares of so many pixels a side, such as 256; several, as 256,512, "
        "in one pass, each into a dataset of its own. With --latents none it says of which images "
        "captions are encoded: of all unless given.",
    ),
    option(
        "--shapes",
        metavar=SHAPES,
        help="Cut each image to the shape of a list whose ratio is nearest to its own: to those of "
        "SDXL, to all whose sides are multiples of STEP and whose ratio is up to MAX, with no more "
        "pixels than the square, or to those in a file, such as 832x1216 in a line.",
    ),
    option(
        "--max-crop",
        type=float,
        help="Reject images that would lose more than this part of their area, such as 0.2.",
    ),
    option(
        "--model",
        type=ModelName(),
        show_default=True,
        help="Encode with one of those that wdsprep models lists (tiny is a toy for trials), with "
        "REPO[@REV] of a pipeline of diffusers, or with its folder.",
    ),
    option(
        "--latents",
        type=click.Choice(LATENTS),
        show_default=True,
        help="Keep this of the distribution that the VAE makes of an image; with none, encode "
        "captions alone, into a text dataset, and look at no image.",
    ),
    option(
        "--flip",
        is_flag=True,
        help="Keep latents of mirror images too, as latent_flipped.npy.",
    ),
    option(
        "--text",
        type=click.Choice(TEXTS),
        show_default=True,
        help="Keep embeddings of captions, their tokens, or nothing of them.",
    ),
    option(
        "--text-length",
        type=click.IntRange(0),
        show_default=True,
        help="Take so many tokens of a caption, of a pipeline that lets its user choose; 0 is what "
        "the pipeline takes by itself.",
    ),
    option(
        "--dtype",
        type=click.Choice(DTYPES),
        show_default=True,
        help="Compute in this precision; auto is fp32 on a CPU, and on a GPU the half precision "
        "that is right for each network.",
    ),
    option("--seed", type=int, show_default=True, help="Seed the sampling noise with this."),
)
PLAN = options(
    "Speed",
    option(
        "--gpu",
        help="Take the speed of an A10G, A100, H100 or H200 from a table; it is not measured.",
    ),
    option("--gpus", type=click.IntRange(1), show_default=True, help="Reckon with so many GPUs."),
    option("--price", type=float, help="Reckon with so many dollars for an hour of a GPU."),
    option(
        "--rate",
        "rates",
        type=SIZES,
        help="Take these speeds of a GPU, in images a second: 256=111,512=30.",
    ),
    option(
        "--trial",
        "trials",
        multiple=True,
        type=PLACE,
        help='Take the speed of an "encode --limit" from what it made.',
    ),
)
PLANNED = options(
    "Model",
    option(
        "--model",
        type=click.Choice([name for name in MODELS if name != "tiny"]),
        metavar="NAME",
        show_default=True,
        help="Reckon for this model of those that wdsprep models lists.",
    ),
    option(
        "--latents",
        type=click.Choice(LATENTS),
        show_default=True,
        help="Reckon with this kept of each image.",
    ),
    option(
        "--text",
        type=click.Choice(TEXTS),
        show_default=True,
        help="Reckon with this kept of each caption.",
    ),
    option(
        "--shapes",
        metavar=SHAPES,
        help="Say of the phases that this list is for what its shapes take beside.",
    ),
    option(
        "--tokens",
        type=click.IntRange(1),
        show_default=True,
        help="Reckon with captions of so many tokens, where a model stores no more than they have.",
    ),
)
CREW = options(
    "Workers",
    option(
        "--batch-size",
        type=Parsed("auto|N", "wdsprep.text:auto"),
        show_default=True,
        help="Encode so many images at once; auto goes by the memory of the GPU.",
    ),
    option("--compile", is_flag=True, help="Compile the models first, which pays in long runs."),
    option(
        "--device",
        type=click.Choice(["auto", "cuda", "cpu"]),
        show_default=True,
        help="Compute on this; auto takes GPUs where there are any.",
    ),
    option(
        "--workers",
        type=WORKERS_SPAN,
        show_default=True,
        help="Work in so many processes; auto is one a GPU, or one in all without any; MIN:MAX on "
        "a cluster that grows.",
    ),
    option(
        "--gpus-per-worker",
        type=float,
        show_default="1",
        help="Give each worker so many GPUs, or a share of one.",
    ),
    option(
        "--cpus-per-worker",
        type=float,
        show_default="all, shared fairly",
        help="Give each worker so many cores.",
    ),
    option(
        "--accelerator-type",
        help="Work only on GPUs of this type in a Ray cluster, such as A10G.",
    ),
    *RUNNING,
)
