"""The command `repair`."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.base_command import OUTPUT
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.exit_codes import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import tell


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
    from wdsprep.cli.output.repair import RepairOutput

    output = RepairOutput(as_json=as_json)
    repaired = wdsprep.repair(dataset, listener=output.listener, **options)
    tell(output.result(repaired))
    return 0 if repaired.is_whole else DONE_WITH_DAMAGE
