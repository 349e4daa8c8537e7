"""The command `demo`, which runs other commands on drawn pictures."""

import click

from wdsprep.cli.base_command import PLACE, Command, option, options
from wdsprep.cli.output.shared import tell


@click.command("demo", cls=Command, examples=("wdsprep demo", "wdsprep demo trial"))
@click.argument("folder", metavar="[DIR]", default="demo", type=PLACE)
@options(
    "Output",
    option("--overwrite", is_flag=True, help="Start over: draw and make everything again."),
)
def demo_command(folder: str, overwrite: bool) -> int:
    """Show everything at work in DIR, on pictures drawn for it. It needs no download and no GPU.

    Draws, packs, encodes with a toy model, verifies, loads and reports, each by the command it
    shows.
    """
    from wdsprep.cli.demo.steps import demo

    every = click.get_current_context().find_root().command

    def run(arguments: list[str]) -> int:
        found = every.main(arguments, prog_name="wdsprep", standalone_mode=False)
        return found if isinstance(found, int) else 0

    def say(text: str) -> None:
        tell(text.split("\n"))

    return demo(folder, overwrite=overwrite, run=run, say=say)
