"""`plan` and `models`: what to know before encoding."""

from typing import Any

import click

from wdsprep.cli.command import PLACE, Command, LibraryCommand, Parsed, option, options
from wdsprep.cli.options import OUTPUT, SHAPES
from wdsprep.cli.output import echo
from wdsprep.encoding import LATENTS, MODELS, TEXTS

SIZES = Parsed("size=n,...", "wdsprep.cli.plan:sizes")
PLAN = options(
    "Speed",
    option(
        "--gpu",
        help="Take the speed of an A10G, A100, H100 or H200 from a table; it is not measured.",
    ),
    option("--gpus", type=click.IntRange(1), show_default=True, help="Reckon with so many GPUs."),
    option("--price", type=float, help="Reckon with so many dollars for an hour of a GPU."),
    option(
        "--rate",
        "rates",
        type=SIZES,
        help="Take these speeds of a GPU, in images a second: 256=111,512=30.",
    ),
    option(
        "--trial",
        "trials",
        multiple=True,
        type=PLACE,
        help='Take the speed of an "encode --limit" from what it made.',
    ),
)
PLANNED = options(
    "Model",
    option(
        "--model",
        type=click.Choice([name for name in MODELS if name != "tiny"]),
        metavar="NAME",
        show_default=True,
        help="Reckon for this model of those that wdsprep models lists.",
    ),
    option(
        "--latents",
        type=click.Choice(LATENTS),
        show_default=True,
        help="Reckon with this kept of each image.",
    ),
    option("--flip", is_flag=True, help="Reckon with latents of mirror images too."),
    option(
        "--text",
        type=click.Choice(TEXTS),
        show_default=True,
        help="Reckon with this kept of each caption.",
    ),
    option(
        "--shapes",
        metavar=SHAPES,
        help="Say of the phases that this list is for what its shapes take beside.",
    ),
    option(
        "--tokens",
        type=click.IntRange(1),
        show_default=True,
        help="Reckon with captions of so many tokens, where a model stores no more than they have.",
    ),
)


@click.command(
    "plan",
    cls=LibraryCommand,
    function="wdsprep.cli.plan:plan_lines",
    examples=(
        "wdsprep plan shards/images --gpu A10G --gpus 8",
        "wdsprep plan shards/images --trial shards/trial",
        "wdsprep plan --counts 256=490M,512=300M --gpu A100 --gpus 128",
    ),
)
@click.argument("images", required=False, type=PLACE)
@options(
    "Images",
    option("--counts", type=SIZES, help="Reckon for so many images by bucket: 256=490M,512=300M."),
    option(
        "--samples-per-shard",
        type=click.IntRange(1),
        show_default=True,
        help="Reckon with so many samples in a shard.",
    ),
    option("--published", is_flag=True, help="Reckon the published runs instead."),
)
@PLAN
@PLANNED
@OUTPUT
def plan_command(**options: Any) -> None:
    """Reckon what encoding takes: GPU hours, dollars, cores, bytes, requests.

    For the dataset IMAGES, or for --counts. The speed of a GPU is given by --rate, was measured in
    a --trial, or comes from the table of --gpu.
    """
    from wdsprep.cli.plan import plan_lines

    echo(plan_lines(**options))


@click.command(
    "models",
    cls=Command,
    examples=("wdsprep models", "wdsprep models --json"),
)
@OUTPUT
def models_command(as_json: bool) -> None:
    """List the models that have a name, and what a sample of each takes.

    Any other text-to-image pipeline of diffusers will do too, by its name on the hub or its folder.
    """
    from wdsprep.cli.models import model_lines

    echo(model_lines(as_json=as_json))
