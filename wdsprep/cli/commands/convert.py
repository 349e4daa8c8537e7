"""`import` and `export`: from what other programs have written, and into what they read."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.command import DONE_WITH_DAMAGE, PLACE, LibraryCommand, option, options
from wdsprep.cli.options import JSON, OUTPUT, SHAPES, WORKERS, limit, overwrite
from wdsprep.cli.output import tell
from wdsprep.exporting import LAYOUTS

TAKEN = options(
    "Columns",
    option(
        "--resolution",
        type=click.IntRange(1),
        show_default="what the name of a column says",
        help="Say of how many pixels a side the images were.",
    ),
    option(
        "--shapes",
        metavar=SHAPES,
        help="Take latents of all these shapes, as --shapes of encode lists them; others are "
        "rejects. Without it all are squares of one size.",
    ),
    option(
        "--columns",
        metavar="ROLE=NAME,...",
        show_default="recognised",
        help="Take these: a latent, or a mean and a logvar, an emb, a pooled and a mask, such as "
        "latent=z,emb=t5. Of bare bytes say what they are: latent=z:float16:4x32x32.",
    ),
    option(
        "--caption-col",
        show_default="recognised",
        help="Take captions from this column, or field of the json.",
    ),
    option(
        "--text-length",
        type=click.IntRange(0),
        show_default="the length of the mask",
        help="Say how many tokens the longest caption may have, where text is stored as long as "
        "it is.",
    ),
    option(
        "--scale",
        type=float,
        show_default="of Flux.1 where the names are MLPerf's",
        help="Say by what latents are multiplied that are drawn from a mean and a logvar.",
    ),
    option("--shift", type=float, help="Say what is subtracted from them before."),
    option(
        "--empty",
        metavar="zeros|ROLE=FILE,...",
        help="Say what stands for a caption that a loader leaves out: zeros, or these arrays, as "
        "emb=t5_empty.npy,pooled=clip_empty.npy.",
    ),
)
EXPORT = options(
    "Layout",
    option(
        "--to",
        type=click.Choice(LAYOUTS),
        required=True,
        help="Write what Megatron Energon, AMD's Primus, wids (Sana), webshart (SimpleTuner), "
        "MosaicML's streaming (PRX) or datasets (MLPerf) reads.",
    ),
    option(
        "--join",
        metavar="DATASET",
        multiple=True,
        type=PLACE,
        help="Put the arrays of this dataset of the same images beside those of DATASET, such as "
        "text that was encoded alone.",
    ),
    option(
        "--tower",
        show_default="the model",
        help="Call embeddings in the columns of mds by this text tower of PRX.",
    ),
)


@click.command(
    "import",
    cls=LibraryCommand,
    function="wdsprep.importing.take_in:import_",
    examples=(
        "wdsprep import cache-mds shards/latents-256 --resolution 256",
        "wdsprep import flux-preprocessed shards/flux-256 --resolution 256",
        "wdsprep import 's3://bucket/cache/*.tar' s3://bucket/latents --resolution 512",
    ),
)
@click.argument("source", type=PLACE)
@click.argument("latents", type=PLACE)
@TAKEN
@WORKERS
@options(
    "Output",
    limit("samples"),
    overwrite("the dataset LATENTS"),
    JSON,
)
def import_command(source: str, latents: str, as_json: bool, **options: Any) -> int:
    """Take in latents that another program has cached, as a dataset that wdsprep.load serves.

    SOURCE is a folder of MDS shards (PRX, mosaicml/diffusion), of what datasets has saved or of
    Parquet (MLPerf's Flux), or tars with .npy or .pth (Sana, Primus). Both may be URLs (s3://,
    gs://, az://, hf://datasets/). Killed or interrupted, the same command goes on where it was.
    """
    from wdsprep.cli.importing import ImportShow

    show = ImportShow(source, latents, as_json=as_json)
    imported = wdsprep.import_(source, latents, listener=show.listener, **options)
    tell(show.result([imported]))
    return DONE_WITH_DAMAGE if imported.is_damaged else 0


@click.command(
    "export",
    cls=LibraryCommand,
    function="wdsprep.exporting.export:export",
    examples=(
        "wdsprep export shards/latents-256 --to energon",
        "wdsprep export shards/latents-256 shards/mds --to mds",
        "wdsprep export shards/latents-256 s3://bucket/primus --to primus --join shards/text",
    ),
)
@click.argument("dataset", type=PLACE)
@click.argument("out", required=False, type=PLACE)
@EXPORT
@WORKERS
@OUTPUT
def export_command(dataset: str, out: str, as_json: bool, **options: Any) -> None:
    """Write DATASET into OUT as another trainer reads it.

    energon and webshart get metadata alone, and read the shards where they are; without OUT those
    for energon stand in DATASET. All others get every sample anew. Killed or interrupted, the same
    command goes on where it was.
    """
    from wdsprep.cli.export import ExportShow

    show = ExportShow(as_json=as_json)
    exported = wdsprep.export(dataset, out, listener=show.listener, **options)
    tell(show.result(exported))
