"""The command `remove`."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.base_command import DATASETS, OUTPUT
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.exit_codes import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import tell
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
    from wdsprep.cli.output.remove import RemoveOutput

    output = RemoveOutput(as_json=as_json)
    removed = wdsprep.remove(*datasets, listener=output.listener, **options)
    tell(output.result(removed))
    if removed.is_unknown:
        return UsageError.exit_code
    return 0 if removed.is_whole and not removed.nowhere else DONE_WITH_DAMAGE
