"""`import` and `export`: from what other programs have written, and into what they read."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.command import DONE_WITH_DAMAGE
from wdsprep.cli.declared import DeclaredCommand
from wdsprep.cli.options import OUTPUT
from wdsprep.cli.output import tell


@click.command(
    "import",
    cls=DeclaredCommand,
    function="wdsprep.importing.import_latents:import_",
    declared="wdsprep.importing.options:ImportOptions",
    headings=("Columns", "Workers", "Output"),
    examples=(
        "wdsprep import cache-mds shards/latents-256 --resolution 256",
        "wdsprep import flux-preprocessed shards/flux-256 --resolution 256",
        "wdsprep import 's3://bucket/cache/*.tar' s3://bucket/latents --resolution 512",
    ),
)
@OUTPUT
def import_command(source: str, latents: str, as_json: bool, **options: Any) -> int:
    """Turn latents that another program has cached into a dataset for wdsprep.load.

    SOURCE is a folder of MDS shards (PRX, mosaicml/diffusion), of what datasets has saved or of
    Parquet (MLPerf's Flux), or tars with .npy or .pth (Sana, Primus). Both may be URLs (s3://,
    gs://, az://, hf://datasets/). Killed or interrupted, the same command goes on where it was.
    """
    from wdsprep.cli.importing import ImportShow

    show = ImportShow(source, latents, as_json=as_json)
    imported = wdsprep.import_(source, latents, listener=show.listener, **options)
    tell(show.result(imported))
    return DONE_WITH_DAMAGE if imported.is_damaged else 0


@click.command(
    "export",
    cls=DeclaredCommand,
    function="wdsprep.exporting.export:export",
    declared="wdsprep.exporting.options:ExportOptions",
    headings=("Layout", "Workers", "Output"),
    examples=(
        "wdsprep export shards/latents-256 --to energon",
        "wdsprep export shards/latents-256 shards/mds --to mds",
        "wdsprep export shards/latents-1024 kohya --to kohya --join shards/images",
    ),
)
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
