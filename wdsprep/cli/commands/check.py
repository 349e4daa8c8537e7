"""The commands `inspect`, `verify`, `repair`, `index` and `rebuild`.

They show what a dataset is, check it, and mend it.
"""

import json
from typing import Any

import click

import wdsprep
from wdsprep.cli.command import DONE_WITH_DAMAGE, PLACE, Command, option, options
from wdsprep.cli.declared import DeclaredCommand
from wdsprep.cli.options import DATASETS, OUTPUT
from wdsprep.cli.output import KeptLine, echo, tell
from wdsprep.terminal import ProgressLine
from wdsprep.text import plural


@click.command(
    "inspect",
    cls=DeclaredCommand,
    resumes=False,
    function="wdsprep.reporting.inspect:inspect",
    declared="wdsprep.reporting.options:InspectOptions",
    headings=("Output",),
    examples=(
        "wdsprep inspect shards/images",
        "wdsprep inspect shards/images 000000000042 -o sample",
        "wdsprep inspect shards/latents-256 --urls",
    ),
)
@options(
    "Output",
    option(
        "--urls",
        "list_urls",
        is_flag=True,
        help="Print the URLs of the shards, as a trainer takes them.",
    ),
)
@OUTPUT
def inspect_command(dataset: str, key: str, **options: Any) -> None:
    """Show what is in DATASET, or the sample with the key KEY."""
    from wdsprep.cli.inspect import describe

    echo(describe(dataset, key, **options))


@click.command(
    "verify",
    cls=DeclaredCommand,
    resumes=False,
    function="wdsprep.checks.verify:verify",
    declared="wdsprep.checks.options:VerifyOptions",
    headings=("Checks", "Workers", "Output"),
    examples=(
        "wdsprep verify shards/images",
        "wdsprep verify shards/images shards/latents-256",
        "wdsprep verify s3://bucket/images --quick",
    ),
)
@DATASETS
@OUTPUT
def verify_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Check every byte of datasets; given images and their latents, also that they match.

    Prints a line for each finding, with the next step, and exits with 3 if there are any.
    """
    from wdsprep.cli.checks import VerifyShow

    show = VerifyShow(as_json=as_json)
    verified = wdsprep.verify(*datasets, listener=show.listener, **options)
    tell(show.result(verified))
    return DONE_WITH_DAMAGE if verified.findings else 0


@click.command(
    "repair",
    cls=DeclaredCommand,
    resumes=False,
    function="wdsprep.checks.repair:repair",
    declared="wdsprep.checks.options:RepairOptions",
    headings=("Checks", "Workers", "Output"),
    examples=(
        "wdsprep repair shards/images",
        "wdsprep repair shards/latents-256 --yes",
        "wdsprep repair s3://bucket/images --quick",
    ),
)
@OUTPUT
def repair_command(dataset: str, as_json: bool, **options: Any) -> int:
    """Remove what is damaged in DATASET, so that the next pack or encode makes it again.

    Verifies first, shows what it will do, and asks.
    """
    from wdsprep.cli.repair import RepairShow

    show = RepairShow(as_json=as_json)
    repaired = wdsprep.repair(dataset, listener=show.listener, **options)
    tell(show.result(repaired))
    return 0 if repaired.is_whole else DONE_WITH_DAMAGE


@click.command(
    "index", cls=Command, examples=("wdsprep index tars", "wdsprep index s3://bucket/tars")
)
@click.argument("folder", type=PLACE)
@OUTPUT
def index_command(folder: str, as_json: bool) -> None:
    """Write the index (.tar.idx) of each tar in FOLDER that has none, or a damaged or old one.

    In a dataset of latents, write each missing .tar.rows too: a loader needs it to join the dataset
    with another.
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
    tell([KeptLine(json.dumps(done)) if as_json else text])


@click.command("rebuild", cls=Command, resumes=False, examples=("wdsprep rebuild shards/images",))
@click.argument("dataset", type=PLACE)
def rebuild_command(dataset: str) -> None:
    """Make the manifest of DATASET again from its receipts."""
    from wdsprep.dataset.state import write_rebuilt

    line = ProgressLine()
    manifest = write_rebuilt(dataset, line.counting("receipt"))
    line.clear()
    tell([f"{dataset}: manifest of {plural(len(manifest.receipts), 'unit')} written"])
