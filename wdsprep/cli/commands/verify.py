"""The command `verify`."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.base_command import DATASETS, OUTPUT
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.exit_codes import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import tell


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
    from wdsprep.cli.output.verify import VerifyOutput

    output = VerifyOutput(as_json=as_json)
    verified = wdsprep.verify(*datasets, listener=output.listener, **options)
    tell(output.result(verified))
    return DONE_WITH_DAMAGE if verified.findings else 0
