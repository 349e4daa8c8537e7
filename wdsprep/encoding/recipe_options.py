"""The options that decide what is made from an image and its caption, with their defaults.

They are declared here alone: `encode`, `load` and `stream` take them from here, and pass them on as
a whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

from wdsprep.changed_settings import SettingWords, follows, say_named
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.shapes import Size
from wdsprep.encoding import DECODES, DTYPES, HALF, LATENTS, MODELS, TEXTS
from wdsprep.encoding.models.presets import describe_training_sizes
from wdsprep.encoding.shape_lists import (
    SDXL_RESOLUTION,
    SHAPES_SETTING,
    ShapesGiven,
    check_max_crop,
    check_shapes_option,
    sizes_of,
)
from wdsprep.errors import UsageError
from wdsprep.images.nearest_shape import FULL
from wdsprep.images.options import AREA, NBYTES
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.options import Options, about, refuse_unknown_options
from wdsprep.runners.options import WORKERS
from wdsprep.text import brief, parse_auto, whole_number

MODEL, IMAGES = "Model", "Images"
OF_TEXT = ("pipeline", "text")
"""Settings from which others of text follow, and which weights are read."""
OTHER_TEMPLATE = "the diffusers here puts other words around a caption, or cleans it otherwise"
OTHER_WEIGHTS = "--model has other weights than those it was made with"


def _say_arguments(before: Any, now: Any) -> str:
    return f"--text-length or diffusers gives encode_prompt {now} (was {before})"


def _say_decode(before: str | None, now: str | None) -> str:
    return say_named("--decode", before or FULL, now or FULL)


def _say_pipeline(before: str | None, now: str | None) -> str:
    names = (f"a {name}" if name else "none whose code is run" for name in (now, before))
    return "--model is {} (was {})".format(*names)


def resolutions_of(given: int | Sequence[int]) -> tuple[int, ...]:
    """Return the resolutions that one run encodes, each into a separate dataset."""
    if isinstance(given, str):
        raise UsageError(
            f"--resolution {brief(given)}: give whole numbers of pixels, such as 256 or 256,512"
        )
    is_one = not isinstance(given, Sequence)
    numbers = [given] if is_one else list(given)  # type: ignore[arg-type]
    found = tuple(whole_number("--resolution", number) for number in numbers)
    if not found:
        raise UsageError("no --resolution is given: give one, such as 256")
    if twice := [number for number in found if found.count(number) > 1]:
        raise UsageError(f"--resolution {twice[0]} is given twice: give each once")
    return found


def check_resolutions(given: int | Sequence[int]) -> int | tuple[int, ...]:
    """Check a value of --resolution, and return it as a number or a tuple of numbers."""
    found = resolutions_of(given)
    return found if isinstance(given, Sequence) else found[0]


def parse_resolutions(text: str) -> tuple[int, ...]:
    """Return the resolutions in a text such as "256,512", or raise ValueError if there are none."""
    return tuple(int(part) for part in text.split(","))


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Options):
    """The options that, together with the model, decide the bytes of latents at any resolution."""

    shapes: ShapesGiven = field(
        default=(),
        metadata=about(
            "Cut each image to the shape of a list whose aspect ratio is nearest to its own. sdxl "
            f"is the list of SDXL, for --resolution {SDXL_RESOLUTION} alone. nearest:STEP,MAX is "
            "for any resolution that STEP divides: all shapes whose sides are multiples of STEP, "
            "whose ratio is at most MAX, and which have no more pixels than the square. A FILE has "
            "a shape in each line, such as 832x1216, and one of them is the square.",
            MODEL,
            read=check_shapes_option,
            metavar="FILE|sdxl|nearest:STEP,MAX",
            order=-1,
            page="cut each image to one of [several shapes](#shapes), not to the square: to the "
            "one whose aspect ratio is nearest to its own. `sdxl` is for a resolution of "
            f"{SDXL_RESOLUTION}, `nearest` for any that STEP divides",
            settings={"shapes": SHAPES_SETTING},
        ),
    )
    """The shapes to cut to, in a form that `sizes_of` reads; empty: the square alone."""
    max_crop: float = field(
        default=1.0,
        metadata=about(
            "Reject images that would lose more than this part of their area, such as 0.2.",
            MODEL,
            read=check_max_crop,
            code=Code.ASPECT_RATIO,
            remedy="--overwrite with a larger --max-crop, or more --shapes, takes more images",
            parse=float,
            order=-1,
            example="0.2",
        ),
    )
    latents: str = field(
        default=LATENTS[0],
        metadata=about(
            "Keep this part of the distribution that the VAE makes from an image; with none, "
            "encode captions alone, into a text dataset, and open no image.",
            MODEL,
            choices=LATENTS,
            usual=True,
            page="what to keep of the VAE's distribution: a sample, its mean, or moments (mean and "
            "log-variance, to sample from anew in each epoch). auto is a sample; SANA's VAE has no "
            "distribution, and its output is kept. none is [text alone](#text-alone)",
        ),
    )
    flip: bool = field(
        default=False,
        metadata=about(
            "Keep latents of mirror images too, as latent_flipped.npy.",
            MODEL,
            page="keep latents of each image's mirror image too, in `latent_flipped.npy`, for "
            "`wdsprep.load(..., flip=0.5)`. This doubles the VAE's work and the latents' bytes. To "
            "mirror the latent itself is not the same: with the tiny VAE the two differ by 16 % of "
            "the variance. Of 64 pictures, mirrored latents decode to 28.6 dB, latents of mirror "
            "images to 29.4, as the latents of the pictures themselves do",
        ),
    )
    text: str = field(
        default=TEXTS[0],
        metadata=about(
            "Keep the embeddings of captions, their tokens, or neither.",
            MODEL,
            choices=TEXTS,
            usual=True,
            page="what to keep of captions: embeddings, the ids of each tokenizer (for trainers "
            "that run the text encoders themselves), or nothing",
        ),
    )
    text_length: int = field(
        default=0,
        metadata=about(
            "Encode at most this number of tokens of a caption, if the pipeline offers a choice; "
            "0 is the pipeline's own number.",
            MODEL,
            least=0,
            usual=True,
            page="how many tokens of a caption to encode at most, if the pipeline offers a choice "
            "(`max_sequence_length`); 0 is the pipeline's own number",
            settings={
                "template": SettingWords(say=OTHER_TEMPLATE, unless=(*OF_TEXT, "text_arguments")),
                "text_arguments": SettingWords(say=_say_arguments, unless=OF_TEXT),
            },
        ),
    )
    dtype: str = field(
        default=DTYPES[0],
        metadata=about(
            "Compute in this precision; auto is fp32 on a CPU, and on a GPU the half precision "
            "that is right for each network.",
            MODEL,
            choices=DTYPES,
            inner=(HALF,),
            usual=True,
            page="compute in this precision; auto is fp32 on the CPU, and on a GPU [the half "
            "precision of each network](#precision). A value that overflows is computed again in "
            "fp32",
        ),
    )
    decode: str = field(
        default=DECODES[0],
        metadata=about(
            "Decode large JPEGs at 1/2, 1/4 or 1/8 of their size, so that each side still has "
            "about twice the pixels that are needed (fast), or always at full size (full). auto "
            "is fast, or what the dataset was begun with.",
            MODEL,
            choices=DECODES,
            usual=True,
            page="decode large JPEGs [at a reduced size](#decoding) (fast), or at full size; "
            "auto is fast, or what the dataset was begun with",
            settings={"decode": SettingWords(say=_say_decode)},
        ),
    )
    seed: int = field(
        default=0,
        metadata=about(
            "Seed the sampling noise with this number.",
            MODEL,
            usual=True,
            page="the seed of the sampling noise",
        ),
    )
    compile: bool = field(
        default=False,
        metadata=about(
            "Compile the models first, which pays in long runs.",
            WORKERS,
            order=-1,
            page="compile the models first, which pays in long runs",
        ),
    )
    max_area: int = field(default=MAX_AREA, metadata=AREA)
    max_bytes: int | str = field(default=MAX_NBYTES, metadata=NBYTES)

    @property
    def is_of_text(self) -> bool:
        """Return whether only text is encoded, so that no image is opened."""
        return self.latents == "none"


RESOLUTION = about(
    "Encode centre squares with this number of pixels a side, such as 256, from all images that "
    "are large enough, in any bucket. Several, such as 256,512, are encoded in one pass, each into "
    f"a separate dataset. {describe_training_sizes()} With --latents none this chooses the images "
    "whose captions are encoded: all of them by default.",
    MODEL,
    read=check_resolutions,
    code=Code.TOO_SMALL,
    remedy="a smaller --resolution takes smaller images",
    parse=parse_resolutions,
    metavar="N,...",
    order=-2,
    example="256",
    page="the side of the square in pixels, which also says which images are encoded: 256 takes "
    "the buckets from 256 on, 512 those from 512 on, 1024 the images of the bucket 512 that are "
    "large enough. Several, as `256,512`, are [encoded in one pass](#several-resolutions). "
    f"{describe_training_sizes()} `--latents none` does not need it: by default it takes the "
    "lowest bucket, and so all images",
)


@dataclass(frozen=True, kw_only=True)
class Recipe(RecipeOptions):
    """The recipe of a latent sample, which decides its bytes together with the model."""

    resolution: int = field(metadata=about("The pixels of a side of the square."))
    """The resolution. For text alone it chooses the images, and 0 stands for all of them."""

    def check_together(self) -> None:
        super().check_together()
        least = 0 if self.is_of_text else 1
        if self.resolution < least:
            raise UsageError(f"--resolution {self.resolution}: give {least} or more pixels")
        self._check_text_alone()
        object.__setattr__(self, "shapes", sizes_of(self.shapes, self.resolution))

    def _check_text_alone(self) -> None:
        """Raise UsageError if text alone has options of images, or nothing is left to encode."""
        of_images = {
            "--shapes": bool(self.shapes),
            "--max-crop": self.max_crop < 1,
            "--flip": self.flip,
            "--decode": self.decode != DECODES[0],
        }
        given = [option for option, is_given in of_images.items() if is_given]
        if self.is_of_text and given:
            raise UsageError(
                f"{given[0]} is for images, which --latents none leaves alone: leave it out"
            )
        if self.is_of_text and self.text == "none":
            raise UsageError(
                "--latents none and --text none leave nothing to encode: leave one out"
            )

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Return the shapes to cut images to, as widths and heights."""
        return cast("tuple[Size, ...]", self.shapes)


@dataclass(frozen=True, kw_only=True)
class EncodingOptions(RecipeOptions):
    """The options of encoding at any resolution: the recipe, the model and the batch size."""

    model: str = field(
        default="sd2",
        metadata=about(
            "Encode with a model that `wdsprep models` lists (tiny is a toy for trials), with the "
            "REPO[@REV] of a diffusers pipeline on the hub, or with the folder of one.",
            MODEL,
            known=MODELS,
            usual=True,
            order=-1,
            example="NAME|REPO[@REV]|FOLDER",
            page="a name that `wdsprep models` lists, a pipeline of the Hugging Face hub, or its "
            "folder; safetensors only, in one file or several with their index",
            settings={
                "pipeline": SettingWords(say=_say_pipeline),
                "weights": SettingWords(say=OTHER_WEIGHTS, unless=OF_TEXT),
                **{name: follows(name) for name in ("layers", "layout", "patch", "scale", "shift")},
            },
        ),
    )
    batch_size: int | str = field(
        default="auto",
        metadata=about(
            "Encode this number of images at once; auto chooses it by the memory of the GPU.",
            WORKERS,
            read=parse_auto,
            metavar="AUTO|N",
            usual=True,
            order=-2,
            example="auto|N",
            page="images at once; auto is what fits into the GPU's free memory, fewer of a shape "
            "that is larger than the square. Too large a batch is halved",
        ),
    )

    @property
    def of_encoding(self) -> Mapping[str, Any]:
        """Return the values of the options of `EncodingOptions` by name, without subclasses'."""
        return {each.name: getattr(self, each.name) for each in fields(EncodingOptions)}


@refuse_unknown_options
@dataclass(frozen=True, kw_only=True)
class Encode(EncodingOptions, Recipe):
    """The settings with which images are encoded into latents while a trainer waits for them.

        how = wdsprep.Encode(resolution=256, model="sd2")
        loader = wdsprep.load("shards/images", encode=how, global_batch=1024)

    They are the options of `wdsprep encode` that decide the bytes of latents, the `batch_size`, and
    the `device`, which is the trainer's by default.
    """

    device: str = field(
        default="auto", metadata=about("The device to compute on; auto is the trainer's.")
    )


def recipes_for(
    how: Callable[..., Encode], resolutions: Sequence[int], texts: int, *, is_apart: bool
) -> list[Encode]:
    """Return the recipe of each dataset of a run, first of the latents, then of the text.

    `how` makes a recipe. `texts` is the number of captions of a sample, each with its dataset.
    `is_apart` is true if text is stored apart from latents.
    """
    if not is_apart:
        return [how(resolution=number) for number in resolutions] * texts
    latents = [how(resolution=number, text="none", text_length=0) for number in resolutions]
    alone: dict[str, Any] = {
        "latents": "none",
        "shapes": (),
        "max_crop": 1.0,
        "flip": False,
        "decode": DECODES[0],
    }
    return latents + [how(resolution=min(resolutions), **alone)] * texts


def check_makes_latents(encode: Encode) -> None:
    """Raise UsageError if a recipe makes no latents, but text alone."""
    if encode.is_of_text:
        raise UsageError(
            'encode= makes latents of images: leave latents="none" out, or make text first, with '
            'wdsprep.encode(latents="none")'
        )
