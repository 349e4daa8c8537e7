"""The options that several commands share."""

from collections.abc import Callable

import click

from wdsprep.cli.command import PLACE, Function, Parsed, option, options
from wdsprep.runners.base import RUNNERS
from wdsprep.runners.track import TRACKERS

SIZE = Parsed("size", "wdsprep.text:size")
WORKERS_SPAN = Parsed("auto|N|MIN:MAX", "wdsprep.runners.base:least_and_most")
SHAPES = "FILE|sdxl|nearest:STEP,MAX"
DATASETS = click.argument("datasets", metavar="DATASET...", nargs=-1, required=True, type=PLACE)
AREA = options(
    "Images",
    option(
        "--max-area",
        type=click.IntRange(1),
        show_default=True,
        help="Reject images of more pixels than this.",
    ),
)


def max_bytes(usual: str) -> Callable[[Function], Function]:
    return option(
        "--max-bytes",
        type=SIZE,
        show_default=usual,
        help="Reject images of more bytes than this.",
    )


RUNNING = (
    option(
        "--runner",
        type=click.Choice(RUNNERS),
        show_default=True,
        help="Work in processes of this machine, or on Ray; auto takes Ray where --ray-address or "
        "RAY_ADDRESS names one, and to encode on several GPUs.",
    ),
    option(
        "--ray-address",
        show_default="RAY_ADDRESS",
        help="Use the Ray cluster whose head is at this HOST:PORT; auto is that of this machine.",
    ),
    option(
        "--max-attempts",
        type=click.IntRange(1),
        show_default=True,
        help="Leave out a unit of work that has failed so many times.",
    ),
)
WORKERS = options(
    "Workers",
    option(
        "--workers",
        type=click.IntRange(0),
        show_default="one a core",
        help="Work in so many processes.",
    ),
    *RUNNING,
)
PACKERS = options(
    "Workers",
    option(
        "--workers",
        type=WORKERS_SPAN,
        show_default="one a core",
        help="Work in so many processes; MIN:MAX on a cluster that grows.",
    ),
    *RUNNING,
)
TRACK = option(
    "--track",
    type=click.Choice(TRACKERS),
    show_default="no",
    help="Tell Weights & Biases or TensorBoard how far the run is, every ten seconds.",
)
JSON = option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
OUTPUT = options("Output", JSON)
SHARDS = (
    option(
        "--samples-per-shard",
        type=click.IntRange(1),
        show_default=True,
        help="Begin another shard after so many samples.",
    ),
    option(
        "--max-shard-size",
        type=SIZE,
        show_default=True,
        help="Begin another shard before one has more bytes.",
    ),
)
REPLACES = option("--yes", is_flag=True, help="Replace the file without asking, whatever it is.")


def output_file(
    told: str, *, show_default: bool | str | None = None
) -> Callable[[Function], Function]:
    return option("-o", "output", metavar="FILE", type=PLACE, show_default=show_default, help=told)


def some_samples(told: str) -> tuple[Callable[[Function], Function], ...]:
    """How many samples are shown, and which."""
    return (
        option("--samples", type=click.IntRange(0), show_default=True, help=told),
        option("--seed", type=int, show_default=True, help="Pick the samples with this seed."),
    )


def limit(samples: str) -> Callable[[Function], Function]:
    return option(
        "--limit", type=click.IntRange(1), help=f"Take the first N {samples} only, for a trial."
    )


def overwrite(what: str) -> Callable[[Function], Function]:
    return option("--overwrite", is_flag=True, help=f"Remove {what} first, and start over.")
