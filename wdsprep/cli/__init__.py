"""The command line: parse, call the library, print. Nothing heavy is imported before it is needed.

Option names have dashes; underscores mean the same. `pack` takes the options of img2dataset too, as
`img2dataset` tells.

`options` are what commands ask for and how their help looks; `output` owns the terminal.
`pack`, `encode`, `inspect`, `report` and `plan` hold what the commands of their names print,
`checks` what `verify` and `repair` do; `demo` packs and encodes drawings of its own.

In: The words of a command line.
Out: Calls of the library, text on the terminal, an exit code.
Uses: checks, dataset, encoding, packing, reporting, runners, sources.
"""

import json
import re
import sys
from typing import Any

import click

import wdsprep
from wdsprep.cli.img2dataset import PackCommand
from wdsprep.cli.options import (
    AREA,
    CAPTIONS,
    COLUMNS,
    CREW,
    FETCHING,
    INPUT_FORMAT,
    JSON,
    OUTPUT,
    PACKERS,
    PLACE,
    PLAN,
    PLANNED,
    RECIPE,
    RULES,
    SIZE,
    SIZES,
    WORKERS,
    Command,
    LibraryCommand,
    ModelName,
    max_bytes,
    option,
    options,
)
from wdsprep.cli.output import TERMINAL, Kept, ProgressLine, complain, echo, tell
from wdsprep.errors import UsageError, WdsprepError
from wdsprep.text import plural
from wdsprep.version import __version__

DONE_WITH_DAMAGE, INTERRUPTED = 3, 130
OVERWRITES = re.compile(r"--(incremental[-_]mode[ =])?overwrite\b")
"""The words of a command line, ours or img2dataset's, that start over."""


def option_name(name: str) -> str:
    return name.replace("_", "-")


class CommandGroup(Command, click.Group):
    """All commands, in the order of their use; alone it prints its help."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """An interrupt is an abort before click sees it: click would end the progress line's row,
        which then stays."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise click.Abort from error


@click.group(
    cls=CommandGroup,
    invoke_without_command=True,
    context_settings={
        "token_normalize_func": option_name,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    examples=(
        "wdsprep demo",
        "wdsprep pack photos shards/images",
        "wdsprep encode shards/images shards/latents-256 --resolution 256",
    ),
)
@click.version_option(__version__, prog_name="wdsprep")
@click.pass_context
def cli(context: click.Context) -> None:
    """Turn image-caption downloads into tar shards that diffusion trainers stream."""
    if context.invoked_subcommand is None:
        echo(context.get_help())


@cli.command("demo", cls=Command, examples=("wdsprep demo", "wdsprep demo trial"))
@click.argument("folder", metavar="[DIR]", default="demo", type=PLACE)
@options(
    "Output",
    option("--overwrite", is_flag=True, help="Start over: draw and make all of it again."),
)
def demo_command(folder: str, overwrite: bool) -> int:
    """Show everything at work in DIR, on pictures drawn for it: no download, no GPU.

    Draws, packs, encodes with a toy model, verifies, loads and reports, each by the command it
    shows.
    """
    from wdsprep.cli.demo import demo as show_all

    def run(arguments: list[str]) -> int:
        found = cli.main(arguments, prog_name="wdsprep", standalone_mode=False)
        return found if isinstance(found, int) else 0

    def say(text: str) -> None:
        tell(text.split("\n"))

    return show_all(folder, overwrite=overwrite, run=run, say=say)


@cli.command(
    "pack",
    cls=PackCommand,
    function="wdsprep.packing.pack:pack",
    examples=(
        "wdsprep pack photos shards/images",
        "wdsprep pack 'laion/{00000..00099}.tar' s3://bucket/images",
        "wdsprep pack urls.parquet shards/images --contact you@example.org",
    ),
)
@click.argument("source", required=False, type=PLACE)
@click.argument("images", required=False, type=PLACE)
@options(
    "Source",
    option("--limit", type=click.IntRange(1), help="Take the first N samples only, for a trial."),
    option("--append", is_flag=True, help="Pack what the source has gained since."),
    INPUT_FORMAT,
)
@RULES
@COLUMNS
@FETCHING
@PACKERS
@options(
    "Output",
    option(
        "--samples-per-shard",
        type=click.IntRange(1),
        show_default=True,
        help="Begin another shard after so many samples.",
    ),
    option(
        "--max-shard-size",
        type=SIZE,
        show_default=True,
        help="Begin another shard before one has more bytes.",
    ),
    option("--overwrite", is_flag=True, help="Remove the dataset IMAGES first, and start over."),
    JSON,
)
def pack_command(source: str, images: str, as_json: bool, **options: Any) -> int:
    """Pack the images of SOURCE into shards in IMAGES, by resolution.

    SOURCE is a folder of images with .txt or .json beside them, WebDataset tars (a folder, a glob,
    a {000..099} pattern), Parquet tables with image bytes, or tables of URLs to download (.parquet,
    .csv, .tsv, .jsonl, .txt); it and IMAGES may be s3:// URLs, a table also an https:// one.
    Killed or interrupted, the same command goes on where it was.
    """
    from wdsprep.cli.pack import PackShow

    show = PackShow(source, images, options, as_json=as_json)
    packed = wdsprep.pack(source, images, listener=show.listener, **options)
    tell(show.result([packed]))
    return DONE_WITH_DAMAGE if packed.is_damaged else 0


@cli.command(
    "encode",
    cls=LibraryCommand,
    function="wdsprep.encoding.encode:encode",
    examples=(
        "wdsprep encode --resolution 256,512",
        "wdsprep encode shards/images shards/trial --resolution 256 --model tiny --limit 100",
        "wdsprep encode s3://bucket/images s3://bucket/latents --resolution 512 --ray-address auto",
    ),
)
@click.argument("images", required=False, type=PLACE)
@click.argument("out", metavar="[LATENTS]", required=False, type=PLACE)
@RECIPE
@options(
    "Images",
    AREA,
    max_bytes("250MB"),
    option("--limit", type=click.IntRange(1), help="Take the first N images only, for a trial."),
)
@CAPTIONS
@CREW
@options(
    "Output",
    option("--overwrite", is_flag=True, help="Remove the dataset LATENTS first, and start over."),
    option(
        "--redo-changed",
        is_flag=True,
        help="Encode image shards again that were packed anew since, and remove the latents of "
        "those that are gone.",
    ),
    JSON,
)
def encode_command(images: str, out: str, as_json: bool, **options: Any) -> int:
    """Encode the shards in IMAGES into latents and text embeddings in LATENTS.

    IMAGES is what pack wrote, or any WebDataset tars; LATENTS is shards/latents-RESOLUTION unless
    given (shards/text with --latents none), and needs {resolution} in it for several, or {caption}
    for several captions. Both may be s3:// URLs. Killed or interrupted, the same command goes on
    where it was.
    """
    from wdsprep.cli.encode import EncodeShow
    from wdsprep.encoding.captions import CaptionOptions
    from wdsprep.encoding.encode import places_of
    from wdsprep.encoding.recipe import resolutions_of

    options["resolution"] = resolutions_of(options["resolution"])
    named = ("field", "fields", "name")
    captions = CaptionOptions(**{name: options[f"caption_{name}"] for name in named})
    places = places_of(out, options["resolution"], options["latents"], captions)
    show = EncodeShow(images, places, as_json=as_json)
    encoded = wdsprep.encode(images, out, listener=show.listener, **options)
    tell(show.result(encoded))
    return DONE_WITH_DAMAGE if any(each.is_damaged for each in encoded) else 0


@cli.command(
    "inspect",
    cls=LibraryCommand,
    function="wdsprep.checks.inspect:inspect",
    examples=(
        "wdsprep inspect shards/images",
        "wdsprep inspect shards/images 000000000042 -o sample",
        "wdsprep inspect shards/latents-256 --urls",
    ),
)
@click.argument("dataset", type=PLACE)
@click.argument("key", required=False)
@options(
    "Output",
    option(
        "-o",
        "out",
        metavar="DIR",
        type=PLACE,
        help="Write the members of the sample into this folder.",
    ),
    option(
        "--urls", "list_urls", is_flag=True, help="Print the shards as a trainer is given them."
    ),
    JSON,
)
def inspect_command(dataset: str, key: str, **options: Any) -> None:
    """Say what DATASET is, by its manifest; or show the sample with the key KEY."""
    from wdsprep.cli.inspect import describe

    echo(describe(dataset, key, **options))


@cli.command(
    "plan",
    cls=LibraryCommand,
    function="wdsprep.cli.plan:plan_lines",
    examples=(
        "wdsprep plan shards/images --gpu A10G --gpus 8",
        "wdsprep plan shards/images --trial shards/trial",
        "wdsprep plan --counts 256=490M,512=300M --gpu A100 --gpus 128",
    ),
)
@click.argument("images", required=False, type=PLACE)
@options(
    "Images",
    option("--counts", type=SIZES, help="Reckon for so many images by bucket: 256=490M,512=300M."),
    option(
        "--samples-per-shard",
        type=click.IntRange(1),
        show_default=True,
        help="Reckon with so many samples in a shard.",
    ),
    option("--published", is_flag=True, help="Reckon the published runs instead."),
)
@PLAN
@PLANNED
@OUTPUT
def plan_command(**options: Any) -> None:
    """Reckon what encoding takes: GPU hours, dollars, cores, bytes, requests.

    For the dataset IMAGES, or for --counts. The speed of a GPU is given by --rate, was measured in
    a --trial, or comes from the table of --gpu.
    """
    from wdsprep.cli.plan import plan_lines

    echo(plan_lines(**options))


@cli.command(
    "models",
    cls=Command,
    examples=("wdsprep models", "wdsprep models --json"),
)
@OUTPUT
def models_command(as_json: bool) -> None:
    """List the models that have a name, and what a sample of each takes.

    Any other text-to-image pipeline of diffusers will do too, by its name on the hub or its folder.
    """
    from wdsprep.cli.models import model_lines

    echo(model_lines(as_json=as_json))


@cli.command(
    "verify",
    cls=LibraryCommand,
    function="wdsprep.checks.verify:verify",
    examples=(
        "wdsprep verify shards/images",
        "wdsprep verify shards/images shards/latents-256",
        "wdsprep verify s3://bucket/images --quick",
    ),
)
@click.argument("datasets", metavar="DATASET...", nargs=-1, required=True, type=PLACE)
@options(
    "Checks",
    option(
        "--quick", is_flag=True, help="Check receipts, sizes and presence alone, and read no shard."
    ),
)
@WORKERS
@OUTPUT
def verify_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Check every byte of datasets; given images and their latents, also that they match.

    Prints one line for each thing that is wrong, with the next step, and exits with 3 if there are
    any.
    """
    from wdsprep.cli.checks import VerifyShow

    show = VerifyShow(as_json=as_json)
    verified = wdsprep.verify(*datasets, listener=show.listener, **options)
    tell(show.result(verified))
    return DONE_WITH_DAMAGE if verified.findings else 0


@cli.command(
    "repair",
    cls=LibraryCommand,
    function="wdsprep.checks.repair:repair",
    examples=(
        "wdsprep repair shards/images",
        "wdsprep repair shards/latents-256 --yes",
        "wdsprep repair s3://bucket/images --quick",
    ),
)
@click.argument("dataset", type=PLACE)
@options(
    "Checks",
    option("--quick", is_flag=True, help="Look at receipts, sizes and presence alone."),
    option("--yes", is_flag=True, help="Repair without asking."),
)
@WORKERS
@OUTPUT
def repair_command(dataset: str, as_json: bool, **options: Any) -> int:
    """Remove what is damaged in DATASET, so that the next pack or encode makes it again.

    Verifies first, shows what it will do, and asks.
    """
    from wdsprep.cli.checks import RepairShow

    show = RepairShow(as_json=as_json)
    repaired = wdsprep.repair(dataset, listener=show.listener, **options)
    tell(show.result(repaired))
    return 0 if repaired.is_whole else DONE_WITH_DAMAGE


@cli.command(
    "report",
    cls=LibraryCommand,
    function="wdsprep.reporting:report",
    examples=(
        "wdsprep report shards/images",
        "wdsprep report shards/images shards/latents-256 -o report.html",
        "wdsprep report s3://bucket/images -o s3://bucket/report.html --samples 50",
    ),
)
@click.argument("datasets", metavar="DATASET...", nargs=-1, required=True, type=PLACE)
@options(
    "Samples",
    option(
        "--samples",
        type=click.IntRange(0),
        show_default=True,
        help="Show so many samples of each bucket.",
    ),
    option("--seed", type=int, show_default=True, help="Pick the samples with this seed."),
    option(
        "--model",
        type=ModelName(),
        show_default="the one they were made with, where it is on this machine",
        help="Decode latents with this model; the word none decodes nothing.",
    ),
    option(
        "--max-area",
        type=click.IntRange(1),
        show_default=True,
        help="Leave out images of more pixels than this.",
    ),
)
@options(
    "Output",
    option(
        "-o",
        "output",
        metavar="FILE",
        type=PLACE,
        show_default=True,
        help="Write the page to this file.",
    ),
    option("--yes", is_flag=True, help="Replace the file without asking, whatever it is."),
    JSON,
)
def report_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Show datasets on one page: where samples went, what they are like, and some of them.

    Give images and their latents together to see what became of each. The page needs no network.
    """
    from wdsprep.cli.report import ReportShow

    show = ReportShow(as_json=as_json)
    written = wdsprep.report(*datasets, listener=show.listener, **options)
    tell(show.result(written))


@cli.command(
    "index", cls=Command, examples=("wdsprep index tars", "wdsprep index s3://bucket/tars")
)
@click.argument("folder", type=PLACE)
@OUTPUT
def index_command(folder: str, as_json: bool) -> None:
    """Write a .tar.idx beside each tar in FOLDER that has none, or a cut or an older one.

    In a dataset of latents also a .tar.rows where one is missing, which loading it joined with
    another asks for.
    """
    from wdsprep.dataset.reindex import index as index_tars

    line = ProgressLine()
    untold: list[str] = []
    done = index_tars(folder, line.counting("tar"), untold.append)
    line.clear()
    text = f"each tar in {folder} has its index"
    text = text if untold else f"nothing left to do: {text}"
    if done:
        rows = sum(name.endswith(".rows") for name in done)
        parts = [plural(rows, "file") + " of rows"] if rows else []
        if len(done) > rows:
            parts = [plural(len(done) - rows, "index", "indexes"), *parts]
        text = f"{' and '.join(parts)} written, of {plural(sum(done.values()), 'sample')}"
    for warning in untold:
        echo(f"warning: {warning}", err=True)
    tell([Kept(json.dumps(done)) if as_json else text])


@cli.command("rebuild", cls=Command, examples=("wdsprep rebuild shards/images",))
@click.argument("dataset", type=PLACE)
def rebuild_command(dataset: str) -> None:
    """Make the manifest of DATASET again from its receipts."""
    from wdsprep.dataset.state import write_rebuilt

    line = ProgressLine()
    manifest = write_rebuilt(dataset, line.counting("receipt"))
    line.clear()
    tell([f"{dataset}: manifest of {plural(len(manifest.receipts), 'unit')} written"])


def main(arguments: list[str] | None = None) -> int:
    """Run a command; every failure is one line and an exit code."""
    with TERMINAL.listening():
        return _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: list[str]) -> int:
    try:
        found = cli.main(arguments, prog_name="wdsprep", standalone_mode=False)
        return found if isinstance(found, int) else 0
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f": see {context.command_path} --help" if context else ""
        complain(f"{error.format_message().rstrip('.')}{hint}", traced=False)
        return UsageError.exit_code
    except (KeyboardInterrupt, click.Abort):
        over = OVERWRITES.search(" ".join(arguments))
        again = f"the same without {over[0]}" if over else "the same command"
        complain(f"interrupted: run {again} to go on from here", traced=False)
        return INTERRUPTED
    except WdsprepError as error:
        complain(str(error))
        return error.exit_code
    except BrokenPipeError:  # whoever read our output has left
        sys.stderr.close()
        return 1
    except Exception as error:  # noqa: BLE001 (a bug: reported as one line, whole with --debug)
        complain(f"a bug: {type(error).__name__}: {error}: --debug shows where")
        return 1
