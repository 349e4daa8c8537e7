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
        "wdsprep plan shards/images --gpu A10G --gpus 8",
        "wdsprep plan shards/images --trial shards/trial",
        "wdsprep plan --counts 256=490M,512=300M --gpu A100 --gpus 128",
    ),
)
@OUTPUT
def plan_command(**options: Any) -> None:
    """Estimate what encoding takes: GPU hours, dollars, cores, bytes, requests.

    The plan is for the dataset IMAGES, or for --counts. The speed of a GPU is given by --rate, was
    measured in a --trial, or comes from the table of --gpu.
    """
    from wdsprep.cli.output.plan import plan_lines

    echo(plan_lines(**options))
