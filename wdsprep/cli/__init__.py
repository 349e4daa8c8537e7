"""The command line: parse, call the library, print. Nothing heavy is imported before it is needed.

Option names have dashes; underscores mean the same, and so do img2dataset's names where it has an
option for the same thing.

`options` are what commands ask for, `output` the progress line and what leaves for a terminal.
`pack`, `encode`, `inspect` and `plan` hold what the commands of their names print, `checks` what
`verify` and `repair` do; `demo` packs and encodes drawings of its own.

In: The words of a command line.
Out: Calls of the library, text on the terminal, an exit code.
Uses: checks, dataset, encoding, packing, runners, sources.
"""

import json
import logging
import sys
from typing import Any

import click

import wdsprep
from wdsprep.cli.options import (
    AREA,
    COLUMNS,
    CREW,
    FETCHING,
    INPUT_FORMAT,
    JSON,
    NBYTES,
    PACKERS,
    PLAN,
    RECIPE,
    RULES,
    WORKERS,
    LibraryCommand,
)
from wdsprep.cli.output import ProgressLine, complain, echo
from wdsprep.errors import UsageError, WdsprepError
from wdsprep.text import LogFormatter, human_bytes, one_line, plural
from wdsprep.version import __version__

IMG2DATASET_NAMES = {
    "number-sample-per-shard": "samples-per-shard",
    "min-image-size": "min-size",
    "encode-quality": "reencode",
    "processes-count": "workers",
    "max-image-area": "max-area",
}
DONE_WITH_DAMAGE, INTERRUPTED = 3, 130


def option_name(name: str) -> str:
    dashed = name.replace("_", "-")
    return IMG2DATASET_NAMES.get(dashed, dashed)


@click.group(
    context_settings={
        "token_normalize_func": option_name,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    }
)
@click.version_option(__version__, prog_name="wdsprep")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Turn image-caption downloads into tar shards that diffusion trainers stream."""
    del debug  # read by main, which sees the errors


@cli.command("pack", cls=LibraryCommand, function="wdsprep.packing.pack:pack")
@click.argument("source", required=False)
@click.argument("images", required=False)
@INPUT_FORMAT
@RULES
@COLUMNS
@FETCHING
@click.option("--limit", type=click.IntRange(1), help="Only the first N samples, for a trial.")
@PACKERS
@click.option("--append", is_flag=True, help="Pack what the source has gained since.")
@click.option("--overwrite", is_flag=True, help="Start over: remove the dataset IMAGES first.")
@JSON
def pack_command(source: str, images: str, as_json: bool, **options: Any) -> int:
    """Pack the images of SOURCE into shards in IMAGES, by resolution.

    SOURCE is a folder of images with .txt or .json beside them, WebDataset tars (a folder, a glob,
    a {000..099} pattern), Parquet tables with image bytes, or tables of URLs to download (.parquet,
    .csv, .tsv, .jsonl, .txt); it and IMAGES may be s3:// URLs, a table also an https:// one.
    Killed or interrupted, the same command goes on where it was.
    """
    from wdsprep.cli.pack import PackShow

    show = PackShow(source, options, as_json=as_json)
    packed = wdsprep.pack(source, images, listener=show.listener, **options)
    echo(show.result(packed, images))
    return DONE_WITH_DAMAGE if packed.is_damaged else 0


@cli.command("encode", cls=LibraryCommand, function="wdsprep.encoding.encode:encode")
@click.argument("images", required=False)
@click.argument("out", metavar="[LATENTS]", required=False)
@RECIPE
@AREA
@NBYTES
@click.option("--limit", type=click.IntRange(1), help="Only the first N images, for a trial.")
@CREW
@click.option("--overwrite", is_flag=True, help="Start over: remove the dataset LATENTS first.")
@click.option(
    "--redo-changed",
    is_flag=True,
    help="Encode image shards again that were packed anew since, and remove the latents of those "
    "that are gone.",
)
@JSON
def encode_command(images: str, out: str, as_json: bool, **options: Any) -> int:
    """Encode the shards in IMAGES into latents and text embeddings in LATENTS.

    IMAGES is what pack wrote, or any WebDataset tars; LATENTS is shards/latents-RESOLUTION unless
    given. Both may be s3:// URLs. Killed or interrupted, the same command goes on where it was.
    """
    from wdsprep.cli.encode import EncodeShow
    from wdsprep.encoding.encode import place_of

    show = EncodeShow(images, place_of(out, options["resolution"]), as_json=as_json)
    encoded = wdsprep.encode(images, out, listener=show.listener, **options)
    echo(show.result(encoded))
    return DONE_WITH_DAMAGE if encoded.is_damaged else 0


@cli.command("inspect", cls=LibraryCommand, function="wdsprep.checks.inspect:inspect")
@click.argument("dataset")
@click.argument("key", required=False)
@click.option("-o", "out", metavar="DIR", help="Write the members of the sample there.")
@click.option("--urls", "list_urls", is_flag=True, help="Print the shards as a trainer takes them.")
@JSON
def inspect_command(dataset: str, key: str, **options: Any) -> None:
    """Say what DATASET is, by its manifest; or show the sample with the key KEY."""
    from wdsprep.cli.inspect import describe

    echo(describe(dataset, key, **options))


@cli.command("plan", cls=LibraryCommand, function="wdsprep.cli.plan:plan_lines")
@click.argument("images", required=False)
@PLAN
def plan_command(**options: Any) -> None:
    """Reckon what encoding takes: GPU hours, dollars, cores, bytes, requests.

    For the dataset IMAGES, or for --counts. The speed of a GPU is given by --rate, was measured in
    a --trial, or comes from the table of --gpu.
    """
    from wdsprep.cli.plan import plan_lines

    echo(plan_lines(**options))


@cli.command("verify", cls=LibraryCommand, function="wdsprep.checks.verify:verify")
@click.argument("datasets", metavar="DATASET...", nargs=-1, required=True)
@click.option("--quick", is_flag=True, help="Receipts, sizes and presence alone: read no shard.")
@WORKERS
@JSON
def verify_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Check every byte of datasets; given images and their latents, also that they match.

    Prints one line for each thing that is wrong, with the next step, and exits with 3 if there are
    any.
    """
    from wdsprep.cli.checks import VerifyShow

    show = VerifyShow(as_json=as_json)
    verified = wdsprep.verify(*datasets, listener=show.listener, **options)
    echo(show.result(verified))
    return DONE_WITH_DAMAGE if verified.findings else 0


@cli.command("repair", cls=LibraryCommand, function="wdsprep.checks.repair:repair")
@click.argument("dataset")
@click.option("--quick", is_flag=True, help="Look at receipts, sizes and presence alone.")
@click.option("--yes", is_flag=True, help="Do it without asking.")
@WORKERS
@JSON
def repair_command(dataset: str, as_json: bool, **options: Any) -> int:
    """Remove what is damaged in DATASET, so that the next pack or encode makes it again.

    Verifies first, shows what it will do, and asks.
    """
    from wdsprep.cli.checks import RepairShow

    show = RepairShow(as_json=as_json)
    repaired = wdsprep.repair(dataset, listener=show.listener, **options)
    echo(show.result(repaired))
    return 0 if repaired.is_whole else DONE_WITH_DAMAGE


@cli.command("report", cls=LibraryCommand, function="wdsprep.reporting:report")
@click.argument("datasets", metavar="DATASET...", nargs=-1, required=True)
@click.option("-o", "output", metavar="FILE", show_default=True, help="Where to write the page.")
@click.option(
    "--samples", type=click.IntRange(0), show_default=True, help="To show of each bucket."
)
@click.option("--seed", type=int, show_default=True, help="Of the samples' choice.")
@click.option("--model", help="Decode latents with it; none: not at all.  [as encoded, if here]")
@AREA
@JSON
def report_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Show datasets on one page: where samples went, what they are like, and some of them.

    Give images and their latents together to see what became of each. The page needs no network.
    """
    line = ProgressLine()
    written = wdsprep.report(*datasets, heard=line.show, **options)
    line.clear()
    facts = {"nbytes": written.nbytes, "report": written.output, "samples": written.samples}
    shown = f"{human_bytes(written.nbytes)}, {plural(written.samples, 'sample')} shown"
    text = f"{written.output}: {shown}: open it in a browser"
    echo(json.dumps(facts, sort_keys=True) if as_json else one_line(text))


@cli.command("index")
@click.argument("folder")
@JSON
def index_command(folder: str, as_json: bool) -> None:
    """Write a .tar.idx beside each tar in FOLDER that has none, or a cut or an older one."""
    from wdsprep.dataset.reindex import index as index_tars

    line = ProgressLine()
    done = index_tars(folder, line.counting("tar"))
    line.clear()
    count = plural(len(done), "index", "indexes")
    text = f"{count} written, of {plural(sum(done.values()), 'sample')}"
    text = text if done else f"nothing left to do: each tar in {folder} has its index"
    echo(json.dumps(done) if as_json else one_line(text))


@cli.command("rebuild")
@click.argument("dataset")
def rebuild_command(dataset: str) -> None:
    """Make the manifest of DATASET again from its receipts."""
    from wdsprep.dataset.state import write_rebuilt

    line = ProgressLine()
    manifest = write_rebuilt(dataset, line.counting("receipt"))
    line.clear()
    echo(one_line(f"{dataset}: manifest of {plural(len(manifest.receipts), 'unit')} written"))


@cli.command("demo")
@click.argument("folder", metavar="[DIR]", default="demo")
@click.option("--overwrite", is_flag=True, help="Start over: draw and make all of it again.")
def demo_command(folder: str, overwrite: bool) -> int:
    """Show everything at work in DIR, on pictures drawn for it: no download, no GPU.

    Draws, packs, encodes with a toy model, verifies, loads and reports, each by the command it
    shows.
    """
    from wdsprep.cli.demo import demo as show_all

    def run(arguments: list[str]) -> int:
        found = cli.main(arguments, prog_name="wdsprep", standalone_mode=False)
        return found if isinstance(found, int) else 0

    return show_all(folder, overwrite=overwrite, run=run, say=echo)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; every failure is one line and an exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogFormatter())
    try:
        found = cli.main(
            [a for a in arguments if a != "--debug"], prog_name="wdsprep", standalone_mode=False
        )
        return found if isinstance(found, int) else 0
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f": see {context.command_path} --help" if context else ""
        complain(f"{error.format_message().rstrip('.')}{hint}")
        return UsageError.exit_code
    except (KeyboardInterrupt, click.Abort):
        again = "the same without --overwrite" if "--overwrite" in arguments else "the same command"
        click.echo(f"\rwdsprep: interrupted: run {again} to go on from here", err=True)
        return INTERRUPTED
    except WdsprepError as error:
        complain(str(error), debug=debug)
        return error.exit_code
    except BrokenPipeError:  # whoever read our output has left
        sys.stderr.close()
        return 1
    except Exception as error:  # noqa: BLE001 (a bug: reported as one line, whole with --debug)
        complain(f"a bug: {type(error).__name__}: {error}: --debug shows where", debug=debug)
        return 1
