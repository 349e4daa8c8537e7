"""The command `rebuild`."""

import click

from wdsprep.cli.base_command import PLACE, Command
from wdsprep.cli.output.shared import tell
from wdsprep.terminal import ProgressLine
from wdsprep.text import plural


@click.command("rebuild", cls=Command, resumes=False, examples=("wdsprep rebuild shards/images",))
@click.argument("dataset", type=PLACE)
def rebuild_command(dataset: str) -> None:
    """Make the manifest of DATASET again from its receipts."""
    from wdsprep.dataset.stored_dataset import write_rebuilt

    line = ProgressLine()
    manifest = write_rebuilt(dataset, line.counting("receipt"))
    line.clear()
    tell([f"{dataset}: manifest of {plural(len(manifest.receipts), 'unit')} written"])
