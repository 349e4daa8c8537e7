"""The command `select`."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.base_command import OUTPUT
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.exit_codes import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import tell


@click.command(
    "select",
    cls=DeclaredCommand,
    function="wdsprep.changes.select:select",
    declared="wdsprep.changes.options:SelectOptions",
    headings=("Samples", "Output", "Workers"),
    examples=(
        'wdsprep select shards/images shards/large --where "width >= 768"',
        "wdsprep select shards/images shards/latents-256 '{split}/{name}' "
        "--split train=0.9,val=0.1",
        "wdsprep select january/images february/images both --prefix",
    ),
)
@OUTPUT
def select_command(datasets: tuple[str, ...], out: str, as_json: bool, **options: Any) -> int:
    """Copy samples of DATASETs into OUT: a subset, a split, other shards, several in one.

    Given images and what was made of them, select takes the same samples of all; {name} in OUT
    stands for the last part of each DATASET's path. Any of them may be URLs (s3://, gs://, az://,
    hf://datasets/). After a kill or an interrupt, the same command goes on where it was.
    """
    from wdsprep.cli.output.select import SelectOutput

    output = SelectOutput(as_json=as_json)
    selected = wdsprep.select(datasets, out, listener=output.listener, **options)
    tell(output.result(selected))
    return DONE_WITH_DAMAGE if selected.is_damaged else 0
