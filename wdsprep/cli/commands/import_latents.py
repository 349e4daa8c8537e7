"""The command `import`."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.base_command import OUTPUT
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.exit_codes import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import tell


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
    from wdsprep.cli.output.import_latents import ImportOutput

    output = ImportOutput(source, latents, as_json=as_json)
    imported = wdsprep.import_(source, latents, listener=output.listener, **options)
    tell(output.result(imported))
    return DONE_WITH_DAMAGE if imported.is_damaged else 0
