"""The command `encode`."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.base_command import OUTPUT
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.exit_codes import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import tell


@click.command(
    "encode",
    cls=DeclaredCommand,
    function="wdsprep.encoding.encode:encode",
    declared="wdsprep.encoding.options:EncodeOptions",
    headings=("Model", "Images", "Captions", "Workers", "Output"),
    examples=(
        "wdsprep encode --resolution 256,512",
        "wdsprep encode shards/images shards/trial --resolution 256 --model tiny --limit 100",
        "wdsprep encode s3://bucket/images s3://bucket/latents --resolution 512 --ray-address auto",
    ),
)
@OUTPUT
def encode_command(as_json: bool, **given: Any) -> int:
    """Encode the shards in IMAGES into latents and text embeddings in LATENTS.

    IMAGES is what pack wrote, or any WebDataset tars; LATENTS is shards/latents-RESOLUTION unless
    given (shards/text with --latents none), and needs {resolution} in it for several, or {caption}
    for several captions. Both may be URLs (s3://, gs://, az://, hf://datasets/). After a kill or an
    interrupt, the same command goes on where it was.
    """
    from wdsprep.cli.output.encode import EncodeOutput
    from wdsprep.encoding.options import EncodeOptions

    options = EncodeOptions(**given)
    output = EncodeOutput(options.places, as_json=as_json)
    encoded = wdsprep.encode(listener=output.listener, **given)
    outcomes = encoded if isinstance(encoded, list) else [encoded]
    tell(output.result(outcomes))
    return DONE_WITH_DAMAGE if any(each.is_damaged for each in outcomes) else 0
