"""The commands `report` and `card`, which show datasets to people."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.declared import DeclaredCommand
from wdsprep.cli.options import DATASETS, OUTPUT
from wdsprep.cli.output import tell


@click.command(
    "report",
    cls=DeclaredCommand,
    resumes=False,
    function="wdsprep.reporting:report",
    declared="wdsprep.reporting.options:ReportOptions",
    headings=("Samples", "Output"),
    examples=(
        "wdsprep report shards/images",
        "wdsprep report shards/images shards/latents-256 -o report.html",
        "wdsprep report s3://bucket/images -o s3://bucket/report.html --samples 50",
    ),
)
@DATASETS
@OUTPUT
def report_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Write a page about datasets: where samples went, what they are like, and some of them.

    Give images and their latents together to see what became of each. The page needs no network.
    """
    from wdsprep.cli.report import ReportShow

    show = ReportShow(as_json=as_json)
    written = wdsprep.report(*datasets, listener=show.listener, **options)
    tell(show.result(written))


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
    from wdsprep.cli.card import LISTENER, show_card

    tell(show_card(wdsprep.card(*datasets, listener=LISTENER, **options), as_json=as_json))
