"""The command `report`."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.base_command import DATASETS, OUTPUT
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.output.shared import tell


@click.command(
    "report",
    cls=DeclaredCommand,
    resumes=False,
    function="wdsprep.reporting.report:report",
    declared="wdsprep.reporting.options:ReportOptions",
    headings=("Samples", "Output"),
    examples=(
        "wdsprep report shards/images",
        "wdsprep report shards/images shards/latents-256 -o report.html",
        "wdsprep report s3://bucket/images -o s3://bucket/report.html --samples 50",
    ),
)
@DATASETS
@OUTPUT
def report_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Write a page about datasets: where samples went, what they are like, and some of them.

    Give images and their latents together to see what became of each. The page needs no network.
    """
    from wdsprep.cli.output.report import ReportOutput

    output = ReportOutput(as_json=as_json)
    written = wdsprep.report(*datasets, listener=output.listener, **options)
    tell(output.result(written))
