"""The command `inspect`."""

from typing import Any

import click

from wdsprep.cli.base_command import OUTPUT, option, options
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.output.shared import echo


@click.command(
    "inspect",
    cls=DeclaredCommand,
    resumes=False,
    function="wdsprep.reporting.inspect:inspect",
    declared="wdsprep.reporting.options:InspectOptions",
    headings=("Samples", "Output"),
    examples=(
        "wdsprep inspect shards/images",
        "wdsprep inspect shards/images 000000000042 -o sample",
        "wdsprep inspect shards/images --where 'width >= 768'",
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
    """Show what is in DATASET, the sample with the key KEY, or those that meet a condition."""
    from wdsprep.cli.output.inspect import describe

    echo(describe(dataset, key, **options))
