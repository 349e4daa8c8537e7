"""Options and arguments of commands beside those of their functions."""

import click

from wdsprep.cli.command import PLACE, option, options

DATASETS = click.argument("datasets", metavar="DATASET...", nargs=-1, required=True, type=PLACE)
OUTPUT = options(
    "Output", option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
)
