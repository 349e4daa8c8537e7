"""The commands `plan` and `models`, for what to know before encoding."""

from typing import Any

import click

from wdsprep.cli.command import Command
from wdsprep.cli.declared import DeclaredCommand
from wdsprep.cli.options import OUTPUT
from wdsprep.cli.output import echo


@click.command(
    "plan",
    cls=DeclaredCommand,
    resumes=False,
    function="wdsprep.cli.plan:plan_lines",
    declared="wdsprep.cli.plan_options:PlanOptions",
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
    from wdsprep.cli.plan import plan_lines

    echo(plan_lines(**options))


@click.command(
    "models",
    cls=Command,
    resumes=False,
    examples=("wdsprep models", "wdsprep models --json"),
)
@OUTPUT
def models_command(as_json: bool) -> None:
    """List the models that have a short name, and the size of a sample of each.

    Any other text-to-image pipeline of diffusers works too, by its name on the hub or its folder.
    """
    from wdsprep.cli.models import model_lines

    echo(model_lines(as_json=as_json))
