"""The command `duplicates`."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.base_command import DATASETS, OUTPUT
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.output.shared import tell


@click.command(
    "duplicates",
    cls=DeclaredCommand,
    function="wdsprep.changes.duplicates:duplicates",
    declared="wdsprep.changes.options:DuplicatesOptions",
    headings=("Comparison", "Workers", "Output"),
    examples=(
        "wdsprep duplicates shards/images",
        "wdsprep duplicates shards/images -o copies.txt --table copies.parquet",
        "wdsprep duplicates shards/photos shards/crawl -o 'copies-{number}.txt'",
    ),
)
@DATASETS
@OUTPUT
def duplicates_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Find images that are equal, or nearly equal.

    In each group the image with the most pixels is to stay. Nothing is removed.
    """
    from wdsprep.cli.output.duplicates import DuplicatesOutput

    output = DuplicatesOutput(as_json=as_json)
    found = wdsprep.duplicates(*datasets, listener=output.listener, **options)
    tell(output.result(found))
