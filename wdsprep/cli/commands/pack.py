"""`pack`: its options, and the call."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.command import DONE_WITH_DAMAGE, PLACE, Parsed, option, options
from wdsprep.cli.img2dataset import PackCommand
from wdsprep.cli.options import AREA, JSON, PACKERS, SHARDS, TRACK, limit, max_bytes, overwrite
from wdsprep.cli.output import tell
from wdsprep.packing import HASHES

INPUT_FORMAT = option(
    "--input-format",
    metavar="FORMAT",
    show_default=True,
    help="Say what SOURCE holds, where that is not clear: images, tars, parquet, csv, tsv, jsonl, "
    "txt, arrow or mds.",
)
RULES = options(
    "Images",
    option(
        "--buckets",
        show_default=True,
        help="The smallest shorter side of each bucket, in pixels. A training phase of a "
        "resolution uses the buckets from there on.",
    ),
    option(
        "--check",
        type=click.Choice(["full", "header"]),
        show_default=True,
        help="Decode each image whole, or trust what its header says.",
    ),
    option(
        "--min-size",
        type=int,
        show_default="the smallest bucket",
        help="Reject images whose shorter side has fewer pixels.",
    ),
    AREA,
    option(
        "--max-aspect-ratio",
        type=float,
        help="Reject images whose longer side is more than so many times the shorter.",
    ),
    max_bytes("250MB; of a download 50MB"),
    option(
        "--reencode",
        type=Parsed("jpg:quality", "wdsprep.images:jpeg_quality"),
        help="Write every image as JPEG of this quality, such as jpg:95.",
    ),
    option(
        "--max-side",
        type=int,
        help="Shrink images whose longer side has more pixels; needs --reencode.",
    ),
)
COLUMNS = options(
    "Captions and columns",
    option(
        "--caption-col",
        show_default="recognised",
        help="Take captions from this column of a table, or field of the json.",
    ),
    option(
        "--image-col",
        show_default="recognised",
        help="Take images from this column of a table, or member of a tar.",
    ),
    option(
        "--url-col",
        show_default="recognised",
        help="Take the URLs of images from this column.",
    ),
    option(
        "--save-additional-columns",
        type=Parsed("a,b,...", "wdsprep.text:names"),
        show_default="all",
        help="Keep only these columns or fields beside the caption.",
    ),
    option("--min-caption", type=int, help="Reject captions of fewer characters."),
    option("--max-caption", type=int, help="Reject captions of more characters."),
    option(
        "--filter",
        help='Keep only what this is true of, such as "aesthetic >= 4.5 and pwatermark < 0.8".',
    ),
    option(
        "--verify-hash",
        type=Parsed("column[:hash]", "wdsprep.packing.rules:Digest.parse"),
        help="Reject images whose bytes do not have the digest of this column, such as md5.",
    ),
    option(
        "--compute-hash",
        type=click.Choice(HASHES),
        help="Keep the digest of each image in its json.",
    ),
)
FETCHING = options(
    "Downloading",
    option(
        "--timeout",
        type=click.FloatRange(0.1),
        show_default=True,
        help="Give up an attempt at a URL after so many seconds.",
    ),
    option(
        "--retries",
        type=click.IntRange(0),
        show_default=True,
        help="Try a URL so many times more.",
    ),
    option(
        "--requests",
        type=click.IntRange(1),
        show_default=True,
        help="Have so many requests under way at a time from one machine.",
    ),
    option(
        "--per-host",
        type=click.IntRange(1),
        show_default=True,
        help="Have so many of them under way at one host.",
    ),
    option("--contact", help="Show this URL or mail address to servers."),
    option("--ignore-robots", is_flag=True, help="Fetch what robots.txt disallows."),
    option("--ignore-opt-outs", is_flag=True, help="Fetch what is marked noai or noimageai."),
    option(
        "--allow-private-hosts", is_flag=True, help="Fetch from loopback and local networks too."
    ),
    option(
        "--ignore-outage",
        is_flag=True,
        help="Take hosts for gone, not the network for down, where none of many answers.",
    ),
    option(
        "--allow-s3",
        is_flag=True,
        help="Read the rows of a table that are s3://, gs://, az:// or hf://, with your keys.",
    ),
    option(
        "--retry-rejected", is_flag=True, help="Fetch again what failed in a way that may pass."
    ),
)


@click.command(
    "pack",
    cls=PackCommand,
    function="wdsprep.packing.pack:pack",
    examples=(
        "wdsprep pack photos shards/images",
        "wdsprep pack 'laion/{00000..00099}.tar' s3://bucket/images",
        "wdsprep pack urls.parquet shards/images --contact you@example.org",
    ),
)
@click.argument("source", required=False, type=PLACE)
@click.argument("images", required=False, type=PLACE)
@options(
    "Source",
    limit("samples"),
    option("--append", is_flag=True, help="Pack what the source has gained since."),
    INPUT_FORMAT,
)
@RULES
@COLUMNS
@FETCHING
@PACKERS
@options(
    "Output",
    *SHARDS,
    overwrite("the dataset IMAGES"),
    TRACK,
    JSON,
)
def pack_command(source: str, images: str, as_json: bool, **options: Any) -> int:
    """Pack the images of SOURCE into shards in IMAGES, by resolution.

    SOURCE is a folder of images with .txt or .json beside them, WebDataset tars (a folder, a glob,
    a {000..099} pattern), Parquet tables with image bytes, or tables of URLs to download (.parquet,
    .csv, .tsv, .jsonl, .txt); it and IMAGES may be URLs (s3://, gs://, az://, hf://datasets/), a
    table also an https:// one. Killed or interrupted, the same command goes on where it was.
    """
    from wdsprep.cli.pack import PackShow

    show = PackShow(source, images, options, as_json=as_json)
    packed = wdsprep.pack(source, images, listener=show.listener, **options)
    tell(show.result([packed]))
    return DONE_WITH_DAMAGE if packed.is_damaged else 0
