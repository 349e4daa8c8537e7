"""`remove`, `select` and `duplicates`: fewer samples, or others together."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.command import DONE_WITH_DAMAGE, PLACE, LibraryCommand, option, options
from wdsprep.cli.options import (
    DATASETS,
    JSON,
    OUTPUT,
    PACKERS,
    SHARDS,
    WORKERS,
    output_file,
    overwrite,
)
from wdsprep.cli.output import tell


@click.command(
    "remove",
    cls=LibraryCommand,
    function="wdsprep.changes.remove:remove",
    examples=(
        "wdsprep remove shards/images shards/latents-256 --keys 000000000012,000000000034",
        "wdsprep remove shards/images shards/latents-256 --urls opted-out.txt --yes",
        "wdsprep remove s3://bucket/images --sha256 links.txt",
    ),
)
@DATASETS
@options(
    "Samples",
    option(
        "--keys",
        metavar="FILE|KEY,KEY",
        type=PLACE,
        help="Remove these: a file with a key on each line, or keys.",
    ),
    option("--urls", metavar="FILE", type=PLACE, help="Remove what was fetched from these URLs."),
    option(
        "--sha256",
        metavar="FILE",
        type=PLACE,
        help="Remove images of these digests, as packed or as they came.",
    ),
    option(
        "--sources", metavar="FILE", type=PLACE, help="Remove what has these sources in its json."
    ),
    option(
        "--keep-copies",
        is_flag=True,
        help="Let other samples with the same image or URL be packed: for duplicates.",
    ),
    option("--yes", is_flag=True, help="Remove without asking."),
)
@OUTPUT
def remove_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Take samples out of images and of what was made of them, for good.

    Name images and all their latents together. Shows what it will do, and asks. What was removed
    stays away in each later pack. Killed, the same command goes on where it was.
    """
    from wdsprep.cli.changes import RemoveShow

    show = RemoveShow(as_json=as_json)
    removed = wdsprep.remove(*datasets, listener=show.listener, **options)
    tell(show.result(removed))
    return 0 if removed.is_whole else DONE_WITH_DAMAGE


@click.command(
    "select",
    cls=LibraryCommand,
    function="wdsprep.changes.select:select",
    examples=(
        'wdsprep select shards/images shards/large --where "width >= 768"',
        "wdsprep select shards/images shards/latents-256 '{split}/{name}' "
        "--split train=0.9,val=0.1",
        "wdsprep select january/images february/images both --prefix",
    ),
)
@DATASETS
@click.argument("out", type=PLACE)
@options(
    "Samples",
    option("--where", help='Take what this is true of in the json, such as "width >= 768".'),
    option("--keys", metavar="FILE", type=PLACE, help="Take the keys in this file, one a line."),
    option("--count", type=click.IntRange(1), help="Take so many of these, drawn at random."),
    option("--seed", type=int, show_default=True, help="Draw and split with this seed."),
    option(
        "--split",
        metavar="NAME=SHARE,...",
        help="Make parts of these, such as train=0.9,val=0.1, each where OUT with {split} says.",
    ),
)
@options(
    "Output",
    *SHARDS,
    option(
        "--prefix",
        is_flag=True,
        help="Put the number of its dataset (0, 1, ...) before each key, where several have the "
        "same keys.",
    ),
    overwrite("what is in OUT"),
    JSON,
)
@PACKERS
def select_command(datasets: tuple[str, ...], out: str, as_json: bool, **options: Any) -> int:
    """Copy samples of DATASETs into OUT: a subset, a split, other shards, several in one.

    Given images and what was made of them, selects the same samples of all; {name} in OUT is the
    last part of each DATASET's place. Any of them may be URLs (s3://, gs://, az://,
    hf://datasets/). Killed or interrupted, the same command goes on where it was.
    """
    from wdsprep.cli.select import SelectShow

    show = SelectShow(as_json=as_json)
    selected = wdsprep.select(datasets, out, listener=show.listener, **options)
    tell(show.report(selected))
    return DONE_WITH_DAMAGE if selected.is_damaged else 0


@click.command(
    "duplicates",
    cls=LibraryCommand,
    function="wdsprep.changes.duplicates:duplicates",
    examples=(
        "wdsprep duplicates shards/images",
        "wdsprep duplicates shards/images -o copies.txt --table copies.parquet",
        "wdsprep duplicates shards/photos shards/crawl -o 'copies-{number}.txt'",
    ),
)
@DATASETS
@options(
    "Comparison",
    option(
        "--distance",
        type=int,
        show_default=True,
        help="Take for copies what differs in so many bits of 64; 0 to 12.",
    ),
    option(
        "--hashes",
        metavar="DIR",
        type=PLACE,
        show_default="DATASET-hashes",
        help="Keep what the pictures look like in this folder.",
    ),
)
@WORKERS
@options(
    "Output",
    output_file(
        "Write the keys of the copies to this file, one a line; with several datasets, {number} in "
        "it says of which."
    ),
    option(
        "--table",
        metavar="FILE",
        type=PLACE,
        help="Write a Parquet table of all samples to this file; with {number} likewise.",
    ),
    JSON,
)
def duplicates_command(datasets: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Find images of datasets that are equal, or nearly.

    Of each group the image with the most pixels is to stay. Nothing is removed.
    """
    from wdsprep.cli.duplicates import DuplicatesShow

    show = DuplicatesShow(as_json=as_json)
    found = wdsprep.duplicates(*datasets, listener=show.listener, **options)
    tell(show.result(found))
