"""The command `pack`."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.base_command import OUTPUT
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.exit_codes import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import tell


@click.command(
    "pack",
    cls=DeclaredCommand,
    function="wdsprep.packing.pack:pack",
    declared="wdsprep.packing.options:PackOptions",
    headings=("Source", "Images", "Captions and columns", "Downloading", "Workers", "Output"),
    examples=(
        "wdsprep pack photos shards/images",
        "wdsprep pack 'laion/{00000..00099}.tar' s3://bucket/images",
        "wdsprep pack urls.parquet shards/images --contact you@example.org",
    ),
)
@OUTPUT
def pack_command(source: str, images: str, as_json: bool, **options: Any) -> int:
    """Pack the images of SOURCE into shards in IMAGES, by resolution.

    SOURCE is a folder of images with .txt or .json beside them, WebDataset tars (a folder, a glob,
    a {000..099} pattern), Parquet tables with image bytes, or tables of URLs to download (.parquet,
    .csv, .tsv, .jsonl, .txt); it and IMAGES may be URLs (s3://, gs://, az://, hf://datasets/), a
    table also an https:// one. After a kill or an interrupt, the same command goes on where it was.
    """
    from wdsprep.cli.output.pack import PackOutput

    output = PackOutput(source, images, options, as_json=as_json)
    packed = wdsprep.pack(source, images, listener=output.listener, **options)
    tell(output.result(packed))
    return DONE_WITH_DAMAGE if packed.is_damaged else 0
