"""`encode`: its options, and the call."""

from typing import Any

import click

import wdsprep
from wdsprep.cli.command import (
    DONE_WITH_DAMAGE,
    PLACE,
    LibraryCommand,
    ModelName,
    Parsed,
    option,
    options,
)
from wdsprep.cli.options import (
    AREA,
    JSON,
    RUNNING,
    SHAPES,
    TRACK,
    WORKERS_SPAN,
    limit,
    max_bytes,
    overwrite,
)
from wdsprep.cli.output import tell
from wdsprep.encoding import DTYPES, LATENTS, TEXTS

RECIPE = options(
    "Model",
    option(
        "--resolution",
        type=Parsed("n,...", "wdsprep.encoding.recipe:parse_resolutions"),
        help="Encode centre squares of so many pixels a side, such as 256; several, as 256,512, "
        "in one pass, each into a dataset of its own. With --latents none it says of which images "
        "captions are encoded: of all unless given.",
    ),
    option(
        "--shapes",
        metavar=SHAPES,
        help="Cut each image to the shape of a list whose ratio is nearest to its own: to those of "
        "SDXL, to all whose sides are multiples of STEP and whose ratio is up to MAX, with no more "
        "pixels than the square, or to those in a file, such as 832x1216 in a line.",
    ),
    option(
        "--max-crop",
        type=float,
        help="Reject images that would lose more than this part of their area, such as 0.2.",
    ),
    option(
        "--model",
        type=ModelName(),
        show_default=True,
        help="Encode with one of those that wdsprep models lists (tiny is a toy for trials), with "
        "REPO[@REV] of a pipeline of diffusers, or with its folder.",
    ),
    option(
        "--latents",
        type=click.Choice(LATENTS),
        show_default=True,
        help="Keep this of the distribution that the VAE makes of an image; with none, encode "
        "captions alone, into a text dataset, and look at no image.",
    ),
    option(
        "--flip",
        is_flag=True,
        help="Keep latents of mirror images too, as latent_flipped.npy.",
    ),
    option(
        "--text",
        type=click.Choice(TEXTS),
        show_default=True,
        help="Keep embeddings of captions, their tokens, or nothing of them.",
    ),
    option(
        "--text-length",
        type=click.IntRange(0),
        show_default=True,
        help="Take so many tokens of a caption, of a pipeline that lets its user choose; 0 is what "
        "the pipeline takes by itself.",
    ),
    option(
        "--dtype",
        type=click.Choice(DTYPES),
        show_default=True,
        help="Compute in this precision; auto is fp32 on a CPU, and on a GPU the half precision "
        "that is right for each network.",
    ),
    option("--seed", type=int, show_default=True, help="Seed the sampling noise with this."),
)
CAPTIONS = options(
    "Captions",
    option(
        "--captions",
        metavar="TABLE",
        type=PLACE,
        help="Give what this table names the captions that it has for them: Parquet, CSV, TSV or "
        "JSON lines, or a folder or pattern of them, with a column key, source, url or sha256.",
    ),
    option(
        "--captions-by",
        metavar="COLUMN",
        show_default="the first of those that it has",
        help="Find captions in the table by this column.",
    ),
    option("--caption-column", show_default="caption", help="Take captions from this column."),
    option(
        "--caption-field",
        metavar="PATH",
        help="Take captions from this field of the json of each sample, such as meta.long or "
        "captions.1.",
    ),
    option(
        "--caption-fields",
        type=Parsed("a,b,...", "wdsprep.text:names"),
        help="Encode the captions of several fields in one pass, with --latents none, each into a "
        "dataset of its own.",
    ),
    option(
        "--caption-name",
        show_default="the field's last part",
        help="Call the captions by this name, by which a loader knows them.",
    ),
)
CREW = options(
    "Workers",
    option(
        "--batch-size",
        type=Parsed("auto|N", "wdsprep.text:auto"),
        show_default=True,
        help="Encode so many images at once; auto goes by the memory of the GPU.",
    ),
    option("--compile", is_flag=True, help="Compile the models first, which pays in long runs."),
    option(
        "--device",
        type=click.Choice(["auto", "cuda", "cpu"]),
        show_default=True,
        help="Compute on this; auto takes GPUs where there are any.",
    ),
    option(
        "--workers",
        type=WORKERS_SPAN,
        show_default=True,
        help="Work in so many processes; auto is one a GPU, or one in all without any; MIN:MAX on "
        "a cluster that grows.",
    ),
    option(
        "--gpus-per-worker",
        type=float,
        show_default="1",
        help="Give each worker so many GPUs, or a share of one.",
    ),
    option(
        "--cpus-per-worker",
        type=float,
        show_default="all, shared fairly",
        help="Give each worker so many cores.",
    ),
    option(
        "--accelerator-type",
        help="Work only on GPUs of this type in a Ray cluster, such as A10G.",
    ),
    *RUNNING,
)


@click.command(
    "encode",
    cls=LibraryCommand,
    function="wdsprep.encoding.encode:encode",
    examples=(
        "wdsprep encode --resolution 256,512",
        "wdsprep encode shards/images shards/trial --resolution 256 --model tiny --limit 100",
        "wdsprep encode s3://bucket/images s3://bucket/latents --resolution 512 --ray-address auto",
    ),
)
@click.argument("images", required=False, type=PLACE)
@click.argument("out", metavar="[LATENTS]", required=False, type=PLACE)
@RECIPE
@options(
    "Images",
    AREA,
    max_bytes("250MB"),
    limit("images"),
)
@CAPTIONS
@CREW
@options(
    "Output",
    option(
        "--text-out",
        metavar="PLACE",
        type=PLACE,
        help="Store text once, in a dataset of its own here, and none beside the latents.",
    ),
    overwrite("the dataset LATENTS"),
    option(
        "--redo-changed",
        is_flag=True,
        help="Encode image shards again that were packed anew since, and remove the latents of "
        "those that are gone.",
    ),
    TRACK,
    JSON,
)
def encode_command(images: str, out: str, as_json: bool, **options: Any) -> int:
    """Encode the shards in IMAGES into latents and text embeddings in LATENTS.

    IMAGES is what pack wrote, or any WebDataset tars; LATENTS is shards/latents-RESOLUTION unless
    given (shards/text with --latents none), and needs {resolution} in it for several, or {caption}
    for several captions. Both may be URLs (s3://, gs://, az://, hf://datasets/). Killed or
    interrupted, the same command goes on where it was.
    """
    from wdsprep.cli.encode import EncodeShow
    from wdsprep.encoding.captions import CaptionOptions
    from wdsprep.encoding.places import check_apart_text, places_of
    from wdsprep.encoding.recipe import resolutions_of

    options["resolution"] = resolutions_of(options["resolution"])
    named = ("field", "fields", "name")
    captions = CaptionOptions(**{name: options[f"caption_{name}"] for name in named})
    text_out = options["text_out"]
    check_apart_text(text_out, options["latents"], options["text"])
    places = places_of(out, options["resolution"], options["latents"], captions, text_out)
    show = EncodeShow(images, places, as_json=as_json)
    encoded = wdsprep.encode(images, out, listener=show.listener, **options)
    tell(show.result(encoded))
    return DONE_WITH_DAMAGE if any(each.is_damaged for each in encoded) else 0
