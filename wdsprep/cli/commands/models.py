"""The command `models`."""

import click

from wdsprep.cli.base_command import OUTPUT, Command
from wdsprep.cli.output.shared import echo


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
    from wdsprep.cli.output.models import model_lines

    echo(model_lines(as_json=as_json))
