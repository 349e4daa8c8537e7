"""The commands: the help of each, and what it calls.

A command that works on datasets calls the function of its name in `wdsprep` with its declared
options and a listener, which prints progress and the result. `cli.output` has its class, named
after the command, in the file of its room. So such a command has only its help here: a docstring
that ends with examples.

The commands stand in the order in which the help lists them. A command imports what takes long to
import when it runs.
"""

import json
from collections.abc import Callable
from typing import Any

import click

import wdsprep
from wdsprep.cli.base_command import DATASETS, OUTPUT, PLACE, Command, import_function, option
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.cli.output.shared import CommandOutput, KeptLine, echo, tell
from wdsprep.terminal import ProgressLine
from wdsprep.text import plural

DAILY = 5
"""The number of commands of daily use, which come first."""
COMMANDS: list[click.Command] = []
Body = Callable[..., Any]


def command(**settings: Any) -> Callable[[Body], click.Command]:
    """Return a decorator that makes a command of its body, and lists it."""

    def decorate(body: Body) -> click.Command:
        COMMANDS.append(click.command(**{"cls": Command, **settings})(body))
        return COMMANDS[-1]

    return decorate


def declared_command(name: str, **settings: Any) -> Callable[[Body], click.Command]:
    """Return such a decorator for a command with the options of the function `name`."""
    room = wdsprep.PLACES[name].rpartition(".")[0]
    declared = f"{room}.options:{class_of(name)}Options"
    # import_, since import is a word of Python
    return command(name=name.rstrip("_"), cls=DeclaredCommand, declared=declared, **settings)


def dataset_command(
    *, takes_several: bool = False, **settings: Any
) -> Callable[[Body], click.Command]:
    """Return such a decorator for a function without a body: its name and its help are used.

    With `takes_several`, the positional arguments of the library's function are datasets.
    """

    def decorate(describe: Body) -> click.Command:
        name = describe.__name__

        def run(as_json: bool, **given: Any) -> int:
            room = wdsprep.PLACES[name].split(".")[1]
            kind = import_function(f"wdsprep.cli.output.{room}:{class_of(name)}Output")
            output: CommandOutput[Any] = kind(given, as_json=as_json)
            places = given.pop("datasets") if takes_several else ()
            result = getattr(wdsprep, name)(*places, listener=output, **given)
            tell(output.last_lines(result))
            return output.exit_code(result)

        run.__doc__ = describe.__doc__
        body = OUTPUT(run)
        arguments = DATASETS(body) if takes_several else body
        return declared_command(name, **settings)(arguments)

    return decorate


def class_of(name: str) -> str:
    """Return what the names of a command's classes begin with."""
    return name.rstrip("_").title()


@dataset_command(first=("Source",))
def pack() -> None:
    """Pack the images of SOURCE into shards in IMAGES, by resolution.

    SOURCE is a folder of images with .txt or .json beside them, WebDataset tars (a folder, a glob,
    a {000..099} pattern), Parquet tables with image bytes, or tables of URLs to download (.parquet,
    .csv, .tsv, .jsonl, .txt). SOURCE and IMAGES may be URLs (s3://, gs://, az://). SOURCE may also
    be hf://datasets/, and a table https://. After a kill or an interrupt, the same command goes on
    where it was.

    Examples:
    $ wdsprep pack photos shards/images
    $ wdsprep pack 'laion/{00000..00099}.tar' s3://bucket/images
    $ wdsprep pack urls.parquet shards/images --contact you@example.org
    """


@dataset_command()
def encode() -> None:
    """Encode the shards in IMAGES into latents and text embeddings in LATENTS.

    IMAGES is what pack wrote, or any WebDataset tars. Unless given, LATENTS lies beside them:
    shards/latents-RESOLUTION for shards/images, shards/text with --latents none. It needs
    {resolution} in it for several, or {caption} for several captions. Both may be URLs (s3://,
    gs://, az://), IMAGES also hf://datasets/. After a kill or an interrupt, the same command goes
    on where it was.

    Examples:
    $ wdsprep encode --resolution 256,512
    $ wdsprep encode shards/images shards/trial --resolution 256 --model tiny --limit 100
    $ wdsprep encode s3://bucket/images s3://bucket/latents --resolution 512 --ray-address auto
    """


@declared_command("inspect", resumes=False)
@option(
    "--urls",
    "list_urls",
    heading="Output",
    is_flag=True,
    help="Print the URLs of the shards, as a trainer takes them.",
)
@OUTPUT
def inspect_command(dataset: str, key: str, **options: Any) -> None:
    """Show what is in DATASET, the sample with the key KEY, or those that meet a condition.

    Examples:
    $ wdsprep inspect shards/images
    $ wdsprep inspect shards/images 000000000042 -o sample
    $ wdsprep inspect shards/images --where 'width >= 768'
    """
    from wdsprep.cli.output.reporting import describe

    echo(describe(dataset, key, **options))


@dataset_command(resumes=False, takes_several=True)
def verify() -> None:
    """Check every byte of datasets; given images and their latents, also that they match.

    Prints a line for each finding, with the next step, and exits with 3 if there are any.

    Examples:
    $ wdsprep verify shards/images
    $ wdsprep verify shards/images shards/latents-256
    $ wdsprep verify s3://bucket/images --quick
    """


@dataset_command(resumes=False, takes_several=True)
def report() -> None:
    """Write a page about datasets: where samples went, what they are like, and some of them.

    Give images and their latents together to see what became of each. The page needs no network.

    Examples:
    $ wdsprep report shards/images
    $ wdsprep report shards/images shards/latents-256 -o report.html
    $ wdsprep report s3://bucket/images -o s3://bucket/report.html --samples 50
    """


@command(name="demo")
@click.argument("folder", metavar="[DIR]", default="demo", type=PLACE)
@option(
    "--overwrite",
    heading="Output",
    is_flag=True,
    help="Start over: draw and make everything again.",
)
def demo_command(folder: str, overwrite: bool) -> int:
    """Show everything at work in DIR, on pictures drawn for it. It needs no download and no GPU.

    Draws, packs, encodes with a toy model, verifies, loads and reports, each by the command it
    shows.

    Examples:
    $ wdsprep demo
    $ wdsprep demo trial
    """
    from wdsprep.cli.demo import demo

    every = click.get_current_context().find_root().command

    def run(arguments: list[str]) -> int:
        code = every.main(arguments, prog_name="wdsprep", standalone_mode=False)
        return code if isinstance(code, int) else 0

    def say(text: str) -> None:
        tell(text.split("\n"))

    return demo(folder, overwrite=overwrite, run=run, say=say)


@command(name="plan", cls=DeclaredCommand, resumes=False, declared="wdsprep.cli.plan:PlanOptions")
@OUTPUT
def plan_command(**options: Any) -> None:
    """Say what encoding takes: GPU hours, dollars, days, bytes.

    The plan is for the dataset IMAGES, or for --counts. The speed of a GPU is what a --trial has
    measured. Without one, only bytes are known.

    Examples:
    $ wdsprep plan shards/images --resolution 1024 --model sdxl
    $ wdsprep plan shards/images --trial shards/trial --gpus 8 --price 1.21
    $ wdsprep plan --counts 256=490M,512=300M --trial shards/trial --gpus 128
    """
    from wdsprep.cli.plan import plan_lines

    echo(plan_lines(**options))


@command(name="models", resumes=False)
@OUTPUT
def models_command(as_json: bool) -> None:
    """List the models that have a short name, and the size of a sample of each.

    Any other text-to-image pipeline of diffusers works too, by its name on the hub or its folder.

    Examples:
    $ wdsprep models
    $ wdsprep models --json
    """
    from wdsprep.cli.output.models import model_lines

    echo(model_lines(as_json=as_json))


@dataset_command()
def score() -> None:
    """Score the image shards in IMAGES, by models and captions, into the dataset SCORES.

    select --join SCORES --where, and where= of wdsprep.load, choose samples by its columns. IMAGES
    and SCORES may be URLs (s3://, gs://, az://), IMAGES also hf://datasets/. After a kill or an
    interrupt, the same command goes on where it was.

    Examples:
    $ wdsprep score shards/images shards/scores --model clip --language
    $ wdsprep score shards/images shards/scores --model clip --head aesthetic=head.safetensors
    $ wdsprep score s3://bucket/images s3://bucket/scores --model nsfw --ray-address auto
    """


@dataset_command(resumes=False)
def repair() -> None:
    """Remove what is damaged in DATASET, so that the next pack or encode makes it again.

    Verifies first, shows what it will do, and asks.

    Examples:
    $ wdsprep repair shards/images
    $ wdsprep repair shards/latents-256 --yes
    $ wdsprep repair s3://bucket/images --quick
    """


@dataset_command(takes_several=True)
def remove() -> None:
    """Delete samples from images, and from the datasets made of them, for good.

    Give images and all their latents together. The command shows what it will do, and asks. Every
    later pack leaves removed samples out. After a kill, the same command goes on where it was.

    Examples:
    $ wdsprep remove shards/images shards/latents-256 --keys 000000000012,000000000034
    $ wdsprep remove shards/images shards/latents-256 --urls opted-out.txt --yes
    $ wdsprep remove s3://bucket/images --sha256 links.txt
    """


@dataset_command()
def select() -> None:
    """Copy samples of DATASETs into OUT: a subset, a split, other shards, several in one.

    Given images and what was made of them, select takes the same samples of all; {name} in OUT
    stands for the last part of each DATASET's path. Any of them may be URLs (s3://, gs://, az://),
    DATASETs also hf://datasets/. After a kill or an interrupt, the same command goes on where it
    was.

    Examples:
    $ wdsprep select shards/images shards/large --where "width >= 768"
    $ wdsprep select shards/images shards/latents-256 '{split}/{name}' --split train=0.9,val=0.1
    $ wdsprep select january/images february/images both --prefix
    """


@dataset_command(takes_several=True)
def duplicates() -> None:
    """Find images that are equal, or nearly equal.

    In each group the image with the most pixels is to stay. Nothing is removed.

    Examples:
    $ wdsprep duplicates shards/images
    $ wdsprep duplicates shards/images -o copies.txt --table copies.parquet
    $ wdsprep duplicates shards/photos shards/crawl -o 'copies-{number}.txt'
    """


@dataset_command()
def import_() -> None:
    """Turn latents that another program has cached into a dataset for wdsprep.load.

    SOURCE is where a trainer keeps latents and embeddings that it has computed: a folder of MDS
    shards, of Parquet or Arrow files, of tars with .npy or .pth, or the cache of musubi-tuner or
    Automodel. wdsprep finds out which, and says what it takes from where. Both may be URLs (s3://,
    gs://, az://), SOURCE also hf://datasets/. After a kill or an interrupt, the same command goes
    on where it was.

    Examples:
    $ wdsprep import cache-mds shards/latents-256 --resolution 256
    $ wdsprep import flux-preprocessed shards/flux-256 --resolution 256
    $ wdsprep import 's3://bucket/cache/*.tar' s3://bucket/latents --resolution 512
    """


@dataset_command()
def export() -> None:
    """Write DATASET into OUT as another trainer reads it.

    energon and webshart get metadata alone, and read the shards where they are; without OUT the
    metadata for energon goes into DATASET. All others get a copy of every sample. After a kill or
    an interrupt, the same command goes on where it was.

    Examples:
    $ wdsprep export shards/latents-256 --to energon
    $ wdsprep export shards/latents-256 shards/mds --to mds
    $ wdsprep export shards/latents-1024 kohya --to kohya --join shards/images
    """


@dataset_command(resumes=False, takes_several=True)
def card() -> None:
    """Write the card of datasets for the Hugging Face hub: its README, with what the viewer needs.

    The card says what the datasets hold, how to load them, and the format in ten lines. The command
    also prints how to upload them.

    Examples:
    $ wdsprep card shards/images
    $ wdsprep card shards/images -o shards/images/README.md --repo me/cats --license cc-by-4.0
    $ wdsprep card shards/images shards/latents-256 --repo me/cats -o README.md
    """


@command(name="index")
@click.argument("folder", type=PLACE)
@OUTPUT
def index_command(folder: str, as_json: bool) -> None:
    """Write the index (.tar.idx) of each tar in FOLDER that has none, or a damaged or old one.

    Write the table of its samples (.parquet) too, where that is missing or old.

    Examples:
    $ wdsprep index tars
    $ wdsprep index s3://bucket/tars
    """
    from wdsprep.dataset.file_names import tar_of
    from wdsprep.dataset.reindex import index as index_tars

    line = ProgressLine()
    untold: list[str] = []
    done = index_tars(folder, line.counting("tar"), untold.append)
    line.clear()
    text = f"{'' if untold else 'nothing left to do: '}each tar in {folder} has its index"
    if done:
        samples = sum({tar_of(name): samples for name, samples in done.items()}.values())
        files = plural(len(done), "index or table", "indexes and tables")
        text = f"{files} written, of {plural(samples, 'sample')}"
    for warning in untold:
        echo(f"warning: {warning}", err=True)
    tell([KeptLine(json.dumps(done)) if as_json else text])


@command(name="rebuild", resumes=False)
@click.argument("dataset", type=PLACE)
def rebuild_command(dataset: str) -> None:
    """Make the manifest of DATASET again from its receipts.

    Examples:
    $ wdsprep rebuild shards/images
    """
    from wdsprep.dataset.stored_dataset import write_rebuilt

    line = ProgressLine()
    manifest = write_rebuilt(dataset, line.counting("receipt"))
    line.clear()
    tell([f"{dataset}: manifest of {plural(len(manifest.receipts), 'unit')} written"])
