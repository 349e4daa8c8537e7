"""The command `index`."""

import json

import click

from wdsprep.cli.base_command import (
    OUTPUT,
    PLACE,
    Command,
)
from wdsprep.cli.output.shared import KeptLine, echo, tell
from wdsprep.terminal import ProgressLine
from wdsprep.text import plural


@click.command(
    "index", cls=Command, examples=("wdsprep index tars", "wdsprep index s3://bucket/tars")
)
@click.argument("folder", type=PLACE)
@OUTPUT
def index_command(folder: str, as_json: bool) -> None:
    """Write the index (.tar.idx) of each tar in FOLDER that has none, or a damaged or old one.

    In a dataset of latents, write each missing .tar.rows too: a loader needs it to join the dataset
    with another.
    """
    from wdsprep.dataset.reindex import index as index_tars

    line = ProgressLine()
    untold: list[str] = []
    done = index_tars(folder, line.counting("tar"), untold.append)
    line.clear()
    text = f"each tar in {folder} has its index"
    text = text if untold else f"nothing left to do: {text}"
    if done:
        rows = sum(name.endswith(".rows") for name in done)
        parts = [plural(rows, "file") + " of rows"] if rows else []
        if len(done) > rows:
            parts = [plural(len(done) - rows, "index", "indexes"), *parts]
        text = f"{' and '.join(parts)} written, of {plural(sum(done.values()), 'sample')}"
    for warning in untold:
        echo(f"warning: {warning}", err=True)
    tell([KeptLine(json.dumps(done)) if as_json else text])
