"""`report` and `card`: a dataset shown to people."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.command import PLACE, LibraryCommand, ModelName, option, options
from wdsprep.cli.options import DATASETS, JSON, REPLACES, output_file, some_samples
from wdsprep.cli.output import tell


@click.command(
    "report",
    cls=LibraryCommand,
    function="wdsprep.reporting:report",
    examples=(
        "wdsprep report shards/images",
        "wdsprep report shards/images shards/latents-256 -o report.html",
        "wdsprep report s3://bucket/images -o s3://bucket/report.html --samples 50",
    ),
)
@DATASETS
@options(
    "Samples",
    *some_samples("Show so many samples of each bucket."),
    option(
        "--model",
        type=ModelName(),
        show_default="the one they were made with, where it is on this machine",
        help="Decode latents with this model; the word none decodes nothing.",
    ),
    option(
        "--max-area",
        type=click.IntRange(1),
        show_default=True,
        help="Leave out images of more pixels than this.",
    ),
    option(
        "--duplicates",
        metavar="FILE",
        type=PLACE,
        help="Show groups of copies out of this table, which duplicates --table wrote.",
    ),
)
@options(
    "Output",
    output_file("Write the page to this file.", show_default=True),
    REPLACES,
    JSON,
)
def report_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Show datasets on one page: where samples went, what they are like, and some of them.

    Give images and their latents together to see what became of each. The page needs no network.
    """
    from wdsprep.cli.report import ReportShow

    show = ReportShow(as_json=as_json)
    written = wdsprep.report(*datasets, listener=show.listener, **options)
    tell(show.result(written))


@click.command(
    "card",
    cls=LibraryCommand,
    function="wdsprep.reporting.card:card",
    examples=(
        "wdsprep card shards/images",
        "wdsprep card shards/images -o shards/images/README.md --repo me/cats --license cc-by-4.0",
        "wdsprep card shards/images shards/latents-256 --repo me/cats -o README.md",
    ),
)
@DATASETS
@options(
    "Card",
    option("--repo", show_default=True, help="Write it for this dataset on the hub."),
    option("--license", show_default="a place for it", help="State this licence, such as cc0-1.0."),
    *some_samples("Show the captions of so many samples of each dataset."),
)
@options(
    "Output",
    output_file("Write the card to this file.", show_default="the screen"),
    REPLACES,
    JSON,
)
def card_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Write the card of datasets for the Hugging Face hub: its README, with what the viewer needs.

    Says what is in them, how to load them, and the format in ten lines; and how to upload them.
    """
    from wdsprep.cli.card import LISTENER, show_card

    tell(show_card(wdsprep.card(*datasets, listener=LISTENER, **options), as_json=as_json))
