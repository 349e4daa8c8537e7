"""The commands `remove`, `select` and `duplicates`, which change or search datasets."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.command import DONE_WITH_DAMAGE
from wdsprep.cli.declared import DeclaredCommand
from wdsprep.cli.options import DATASETS, OUTPUT
from wdsprep.cli.output import tell
from wdsprep.errors import UsageError


@click.command(
    "remove",
    cls=DeclaredCommand,
    function="wdsprep.changes.remove:remove",
    declared="wdsprep.changes.options:RemoveOptions",
    headings=("Samples", "Output"),
    examples=(
        "wdsprep remove shards/images shards/latents-256 --keys 000000000012,000000000034",
        "wdsprep remove shards/images shards/latents-256 --urls opted-out.txt --yes",
        "wdsprep remove s3://bucket/images --sha256 links.txt",
    ),
)
@DATASETS
@OUTPUT
def remove_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Delete samples from images, and from the datasets made of them, for good.

    Give images and all their latents together. The command shows what it will do, and asks. Every
    later pack leaves removed samples out. After a kill, the same command goes on where it was.
    """
    from wdsprep.cli.changes import RemoveShow

    show = RemoveShow(as_json=as_json)
    removed = wdsprep.remove(*datasets, listener=show.listener, **options)
    tell(show.result(removed))
    if removed.is_unknown:
        return UsageError.exit_code
    return 0 if removed.is_whole and not removed.nowhere else DONE_WITH_DAMAGE


@click.command(
    "select",
    cls=DeclaredCommand,
    function="wdsprep.changes.select:select",
    declared="wdsprep.changes.options:SelectOptions",
    headings=("Samples", "Output", "Workers"),
    examples=(
        'wdsprep select shards/images shards/large --where "width >= 768"',
        "wdsprep select shards/images shards/latents-256 '{split}/{name}' "
        "--split train=0.9,val=0.1",
        "wdsprep select january/images february/images both --prefix",
    ),
)
@OUTPUT
def select_command(datasets: tuple[str, ...], out: str, as_json: bool, **options: Any) -> int:
    """Copy samples of DATASETs into OUT: a subset, a split, other shards, several in one.

    Given images and what was made of them, select takes the same samples of all; {name} in OUT
    stands for the last part of each DATASET's path. Any of them may be URLs (s3://, gs://, az://,
    hf://datasets/). After a kill or an interrupt, the same command goes on where it was.
    """
    from wdsprep.cli.select import SelectShow

    show = SelectShow(as_json=as_json)
    selected = wdsprep.select(datasets, out, listener=show.listener, **options)
    tell(show.result(selected))
    return DONE_WITH_DAMAGE if selected.is_damaged else 0


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
    from wdsprep.cli.duplicates import DuplicatesShow

    show = DuplicatesShow(as_json=as_json)
    found = wdsprep.duplicates(*datasets, listener=show.listener, **options)
    tell(show.result(found))
