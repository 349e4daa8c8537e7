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

    Write the table of its samples (.parquet) too, where that is missing or old. In a dataset of
    latents, write each missing .tar.rows instead: a loader needs it to join the dataset with
    another.
    """
    from wdsprep.dataset.file_names import is_rows, is_table, tar_of
    from wdsprep.dataset.reindex import index as index_tars

    line = ProgressLine()
    untold: list[str] = []
    done = index_tars(folder, line.counting("tar"), untold.append)
    line.clear()
    text = f"each tar in {folder} has its index"
    text = text if untold else f"nothing left to do: {text}"
    if done:
        rows, tables = (sum(map(done_as, done)) for done_as in (is_rows, is_table))
        counts = {"index": len(done) - rows - tables, "table": tables, "file of rows": rows}
        several = {"index": "indexes", "table": "tables", "file of rows": "files of rows"}
        parts = [plural(count, what, several[what]) for what, count in counts.items() if count]
        samples = sum({tar_of(name): samples for name, samples in done.items()}.values())
        text = f"{' and '.join(parts)} written, of {plural(samples, 'sample')}"
    for warning in untold:
        echo(f"warning: {warning}", err=True)
    tell([KeptLine(json.dumps(done)) if as_json else text])
