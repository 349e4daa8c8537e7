"""The command line: parse, call the library, print. Nothing heavy is imported before it is needed.

Option names have dashes; underscores mean the same, and so do img2dataset's names where it has an
option for the same thing.
"""

import json
import re
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import click

from wdsprep import __version__
from wdsprep.errors import UsageError, WdsprepError

IMG2DATASET_NAMES = {
    "number-sample-per-shard": "samples-per-shard",
    "min-image-size": "min-size",
    "encode-quality": "reencode",
    "processes-count": "workers",
}
DONE_WITH_DAMAGE, INTERRUPTED = 3, 130
Command = TypeVar("Command", bound=Callable[..., Any])


def option_name(name: str) -> str:
    dashed = name.replace("_", "-")
    return IMG2DATASET_NAMES.get(dashed, dashed)


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, such as 2GB or 512MiB."""

    name = "size"
    units = ("B", "K", "M", "G", "T")

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?", str(value))
        if match is None:
            self.fail(f"{value!r} is no size: write 2GB, 500MB or a number of bytes", param, ctx)
        base = 1024 if match[3] else 1000
        return int(float(match[1]) * base ** self.units.index(match[2].upper() or "B"))


class Quality(click.ParamType):  # type: ignore[type-arg]
    """`jpg:95`, or the 95 alone."""

    name = "jpg:quality"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        match = re.fullmatch(r"(?:jpe?g:)?(\d{1,3})", str(value))
        if match is None or not 1 <= int(match[1]) <= 100:
            self.fail(f"{value!r}: write jpg:95, with a quality from 1 to 100", param, ctx)
        return int(match[1])


class Auto(click.ParamType):  # type: ignore[type-arg]
    """A number, or `auto`, which is 0 to the library."""

    name = "auto|N"

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        text = str(value)
        if text == "auto":
            return 0
        if not text.isdecimal() or int(text) < self._least:
            self.fail(f"{value!r}: give auto, or a number from {self._least} on", param, ctx)
        return int(text)


@click.group(
    context_settings={
        "token_normalize_func": option_name,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    }
)
@click.version_option(__version__, prog_name="wdsprep")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Turn image-caption downloads into tar shards that diffusion trainers stream."""
    del debug  # read by main, which sees the errors


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several click options as one decorator."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


RULES = options(
    click.option("--buckets", default="256,512", show_default=True, help="Smallest shorter sides."),
    click.option("--samples-per-shard", type=click.IntRange(1), default=10_000, show_default=True),
    click.option("--max-shard-size", type=Size(), default="2GB", show_default=True),
    click.option(
        "--check",
        type=click.Choice(["full", "header"]),
        default="full",
        show_default=True,
        help="Decode each image, or trust its header.",
    ),
    click.option("--min-size", type=int, default=0, help="Least shorter side.  [smallest bucket]"),
    click.option("--max-area", type=int, default=100_000_000, show_default=True, help="Pixels."),
    click.option("--max-aspect-ratio", type=float, default=0.0, help="Longer side over shorter."),
    click.option("--min-caption", type=int, default=0, help="Least length in characters."),
    click.option("--max-caption", type=int, default=0, help="Greatest length in characters."),
    click.option("--filter", "condition", help='Such as "aesthetic >= 4.5 and pwatermark < 0.8".'),
    click.option("--reencode", type=Quality(), help="Write every image as JPEG, such as jpg:95."),
    click.option("--max-side", type=int, default=0, help="Shrink larger images (with --reencode)."),
)
COLUMNS = options(
    click.option("--caption-col", default="", help="Column or json field.  [recognised]"),
    click.option("--image-col", default="", help="Column or tar field.  [recognised]"),
)
RUNNING = (
    click.option("--ray-address", help="A Ray cluster.  [RAY_ADDRESS, else a local one]"),
    click.option("--max-attempts", type=click.IntRange(1), default=3, show_default=True),
)
WORKERS = options(
    click.option("--workers", type=click.IntRange(0), default=0, help="Processes.  [all cores]"),
    click.option(
        "--runner", type=click.Choice(["local", "ray"]), default="local", show_default=True
    ),
    *RUNNING,
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@cli.command()
@click.argument("source", default="downloads")
@click.argument("images", default="shards/images")
@RULES
@COLUMNS
@click.option("--limit", type=click.IntRange(1), help="Only the first N samples, for a trial.")
@WORKERS
@click.option("--append", is_flag=True, help="Pack what the source has gained since.")
@click.option("--overwrite", is_flag=True, help="Start over: remove the dataset IMAGES first.")
@JSON
def pack(source: str, images: str, **options: Any) -> int:
    """Pack the images of SOURCE into shards in IMAGES, by resolution.

    SOURCE is a folder of images with .txt or .json beside them, WebDataset tars (a folder, a glob,
    a {000..099} pattern) or Parquet tables with image bytes; it and IMAGES may be s3:// URLs.
    Killed or interrupted, the same command goes on where it was.
    """
    from wdsprep.show import PackShow, pack_request

    show = PackShow(source, as_json=options.pop("as_json"))
    packed = pack_request(source, images, show.listener, **options)
    click.echo(show.result(packed, images))
    return DONE_WITH_DAMAGE if packed.quarantined else 0


RECIPE = options(
    click.option("--resolution", type=click.IntRange(8), required=True, help="Such as 256 or 512."),
    click.option(
        "--model",
        default="sd2",
        show_default=True,
        help="sd2, sd1, tiny, REPO[@REV] of a diffusers model, or its folder.",
    ),
    click.option(
        "--latents",
        type=click.Choice(["sample", "mean", "moments"]),
        default="sample",
        show_default=True,
        help="What to keep of the VAE's distribution.",
    ),
    click.option(
        "--text", type=click.Choice(["emb", "tokens", "none"]), default="emb", show_default=True
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "fp16", "bf16", "fp32"]),
        default="auto",
        show_default=True,
        help="The models' own; stored is fp16.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the sampling noise."),
)
CREW = options(
    click.option("--batch-size", type=Auto(1), default="auto", show_default=True),
    click.option("--compile", is_flag=True, help="Compile the models first."),
    click.option(
        "--device",
        type=click.Choice(["auto", "cuda", "cpu"]),
        default="auto",
        show_default=True,
    ),
    click.option("--workers", type=Auto(1), default="auto", show_default=True),
    click.option(
        "--gpus-per-worker", type=float, default=0.0, help="GPUs, or a share of one.  [1]"
    ),
    click.option("--cpus-per-worker", type=float, default=0.0, help="Cores.  [all, shared fairly]"),
    click.option("--accelerator-type", help="Such as A10G: only on these GPUs of a Ray cluster."),
    click.option("--runner", type=click.Choice(["ray", "local"]), default="ray", show_default=True),
    *RUNNING,
)


@cli.command()
@click.argument("images", default="shards/images")
@click.argument("out", metavar="[LATENTS]", default="")
@RECIPE
@click.option("--limit", type=click.IntRange(1), help="Only the first N images, for a trial.")
@CREW
@click.option("--overwrite", is_flag=True, help="Start over: remove the dataset LATENTS first.")
@JSON
def encode(images: str, out: str, **options: Any) -> int:
    """Encode the shards in IMAGES into latents and text embeddings in LATENTS.

    IMAGES is what pack wrote, or any WebDataset tars; LATENTS is shards/latents-RESOLUTION unless
    given. Both may be s3:// URLs. Killed or interrupted, the same command goes on where it was.
    """
    from wdsprep.encode_show import EncodeShow
    from wdsprep.encoding import encode as encode_shards

    out = out or f"shards/latents-{options['resolution']}"
    show = EncodeShow(images, out, as_json=options.pop("as_json"))
    outcome = encode_shards(images, out, listener=show.listener, **options)
    click.echo(show.result(outcome))
    return DONE_WITH_DAMAGE if outcome.quarantined else 0


@cli.command()
@click.argument("folder")
@JSON
def index(folder: str, as_json: bool) -> None:
    """Write a .tar.idx beside each tar in FOLDER that has none."""
    from wdsprep.index import index as index_tars
    from wdsprep.progress import plural

    done = dict(index_tars(folder))
    count = plural(len(done), "index", "indexes")
    text = f"{count} written, of {plural(sum(done.values()), 'sample')}"
    click.echo(json.dumps(done) if as_json else text)


@cli.command()
@click.argument("dataset")
def rebuild(dataset: str) -> None:
    """Make the manifest of DATASET again from its receipts."""
    from wdsprep.dataset import write_rebuilt
    from wdsprep.progress import plural

    manifest = write_rebuilt(dataset)
    click.echo(f"{dataset}: manifest of {plural(len(manifest.receipts), 'unit')} written")


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    """Run a command; every failure is one line and an exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        found = cli.main(
            [a for a in arguments if a != "--debug"], prog_name="wdsprep", standalone_mode=False
        )
        return found if isinstance(found, int) else 0
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f": see {context.command_path} --help" if context else ""
        click.echo(f"wdsprep: {error.format_message().rstrip('.')}{hint}", err=True)
        return UsageError.exit_code
    except (KeyboardInterrupt, click.Abort):
        again = "the same without --overwrite" if "--overwrite" in arguments else "the same command"
        click.echo(f"\rwdsprep: interrupted: run {again} to go on from here", err=True)
        return INTERRUPTED
    except WdsprepError as error:
        if debug:
            traceback.print_exc()
        click.echo(f"wdsprep: {error}", err=True)
        return error.exit_code
    except BrokenPipeError:  # whoever read our output has left
        sys.stderr.close()
        return 1
    except Exception as error:  # noqa: BLE001 (a bug: reported as one line, whole with --debug)
        if debug:
            traceback.print_exc()
        name = type(error).__name__
        click.echo(f"wdsprep: a bug: {name}: {error}: --debug shows where", err=True)
        return 1
