"""The command `score`."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.base_command import OUTPUT
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.exit_codes import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import tell


@click.command(
    "score",
    cls=DeclaredCommand,
    function="wdsprep.scoring.score:score",
    declared="wdsprep.scoring.options:ScoreOptions",
    headings=("Model", "Captions", "Images", "Workers", "Output"),
    examples=(
        "wdsprep score shards/images shards/scores --model clip --language",
        "wdsprep score shards/images shards/scores --model clip --head aesthetic=head.safetensors",
        "wdsprep score s3://bucket/images s3://bucket/scores --model nsfw --ray-address auto",
    ),
)
@OUTPUT
def score_command(images: str, out: str, as_json: bool, **options: Any) -> int:
    """Score the image shards in IMAGES, by models and captions, into the dataset SCORES.

    select --join SCORES --where, and where= of wdsprep.load, choose samples by its columns. IMAGES
    and SCORES may be URLs (s3://, gs://, az://, hf://datasets/). After a kill or an interrupt, the
    same command goes on where it was.
    """
    from wdsprep.cli.output.score import ScoreOutput

    output = ScoreOutput(images, out, as_json=as_json)
    scored = wdsprep.score(images, out, listener=output.listener, **options)
    tell(output.result(scored))
    return DONE_WITH_DAMAGE if scored.is_damaged else 0
