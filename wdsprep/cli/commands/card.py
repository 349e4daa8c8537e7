"""The command `card`."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.base_command import DATASETS, OUTPUT
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.output.shared import tell


@click.command(
    "card",
    cls=DeclaredCommand,
    resumes=False,
    function="wdsprep.reporting.card:card",
    declared="wdsprep.reporting.options:CardOptions",
    headings=("Card", "Output"),
    examples=(
        "wdsprep card shards/images",
        "wdsprep card shards/images -o shards/images/README.md --repo me/cats --license cc-by-4.0",
        "wdsprep card shards/images shards/latents-256 --repo me/cats -o README.md",
    ),
)
@DATASETS
@OUTPUT
def card_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Write the card of datasets for the Hugging Face hub: its README, with what the viewer needs.

    The card says what the datasets hold, how to load them, and the format in ten lines. The command
    also prints how to upload them.
    """
    from wdsprep.cli.output.card import LISTENER, show_card

    tell(show_card(wdsprep.card(*datasets, listener=LISTENER, **options), as_json=as_json))
