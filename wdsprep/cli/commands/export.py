"""The command `export`."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.base_command import OUTPUT
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.output.shared import tell


@click.command(
    "export",
    cls=DeclaredCommand,
    function="wdsprep.exporting.export:export",
    declared="wdsprep.exporting.options:ExportOptions",
    headings=("Layout", "Workers", "Output"),
    examples=(
        "wdsprep export shards/latents-256 --to energon",
        "wdsprep export shards/latents-256 shards/mds --to mds",
        "wdsprep export shards/latents-1024 kohya --to kohya --join shards/images",
    ),
)
@OUTPUT
def export_command(dataset: str, out: str, as_json: bool, **options: Any) -> None:
    """Write DATASET into OUT as another trainer reads it.

    energon and webshart get metadata alone, and read the shards where they are; without OUT the
    metadata for energon goes into DATASET. All others get a copy of every sample. After a kill or
    an interrupt, the same command goes on where it was.
    """
    from wdsprep.cli.output.export import ExportOutput

    output = ExportOutput(as_json=as_json)
    exported = wdsprep.export(dataset, out, listener=output.listener, **options)
    tell(output.result(exported))
