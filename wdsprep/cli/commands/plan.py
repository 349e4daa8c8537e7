"""The command `plan`."""

from typing import Any

import click

from wdsprep.cli.base_command import OUTPUT
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.output.shared import echo


@click.command(
    "plan",
    cls=DeclaredCommand,
    resumes=False,
    function="wdsprep.cli.output.plan:plan_lines",
    declared="wdsprep.cli.commands.plan_options:PlanOptions",
    headings=("Images", "Speed", "Model", "Output"),
    examples=(
        "wdsprep plan shards/images --resolution 1024 --model sdxl",
        "wdsprep plan shards/images --trial shards/trial --gpus 8 --price 1.21",
        "wdsprep plan --counts 256=490M,512=300M --trial shards/trial --gpus 128",
    ),
)
@OUTPUT
def plan_command(**options: Any) -> None:
    """Say what encoding takes: GPU hours, dollars, days, bytes.

    The plan is for the dataset IMAGES, or for --counts. The speed of a GPU is what a --trial has
    measured. Without one, only bytes are known.
    """
    from wdsprep.cli.output.plan import plan_lines

    echo(plan_lines(**options))
