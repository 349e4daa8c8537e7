"""The commands `import` and `export`, which convert datasets from and to other formats."""

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

    SOURCE is a folder of MDS shards (PRX, mosaicml/diffusion), of files that datasets has saved, of
    Parquet (MLPerf's Flux), or of tars with .npy or .pth (Sana, Primus). Both may be URLs (s3://,
    gs://, az://, hf://datasets/). After a kill or an interrupt, the same command goes on where it
    was.
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

    energon and webshart get metadata alone, and read the shards where they are; without OUT the
    metadata for energon goes into DATASET. All others get a copy of every sample. After a kill or
    an interrupt, the same command goes on where it was.
    """
    from wdsprep.cli.export import ExportShow

    show = ExportShow(as_json=as_json)
    exported = wdsprep.export(dataset, out, listener=show.listener, **options)
    tell(show.result(exported))
