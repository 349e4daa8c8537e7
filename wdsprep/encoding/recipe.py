"""What is made of an image and its caption: the settings of encoding, with the usual values.

They stand here alone. `encode`, `load` and `stream` take theirs from here, and pass them on whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.shapes import Size
from wdsprep.encoding import DECODES, DTYPES, HALF, LATENTS, MODELS, TEXTS
from wdsprep.encoding.models.presets import made_for
from wdsprep.encoding.shape_lists import (
    SDXL_RESOLUTION,
    ShapesGiven,
    checked_crop,
    checked_shapes,
    sizes_of,
)
from wdsprep.errors import UsageError
from wdsprep.images import AREA, NBYTES
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.options import Options, about, suggesting
from wdsprep.runners.base import WORKERS
from wdsprep.text import auto, brief, whole

MODEL, IMAGES = "Model", "Images"


def resolutions_of(given: int | Sequence[int]) -> tuple[int, ...]:
    """Return the resolutions that one run encodes; each makes a dataset."""
    if isinstance(given, str):
        raise UsageError(
            f"--resolution {brief(given)}: give pixels, such as 256, or several, as 256,512, in "
            "whole numbers"
        )
    is_one = not isinstance(given, Sequence)
    numbers = [given] if is_one else list(given)  # type: ignore[arg-type]
    found = tuple(whole("--resolution", number) for number in numbers)
    if not found:
        raise UsageError("no --resolution is given: give one, such as 256")
    if twice := [number for number in found if found.count(number) > 1]:
        raise UsageError(f"--resolution {twice[0]} is given twice: name each once")
    return found


def one_or_several(given: int | Sequence[int]) -> int | tuple[int, ...]:
    """Return the same as it was given: a number, or several."""
    found = resolutions_of(given)
    return found if isinstance(given, Sequence) else found[0]


def parse_resolutions(text: str) -> tuple[int, ...]:
    """Return the same of what a user writes, such as "256,512", or raise a ValueError."""
    return tuple(int(part) for part in text.split(","))


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Options):
    """The options that decide the bytes of latents of every resolution, beside the model."""

    shapes: ShapesGiven = field(
        default=(),
        metadata=about(
            "Cut each image to the shape of a list whose ratio is nearest to its own: to those of "
            f"SDXL, for --resolution {SDXL_RESOLUTION} alone; for any resolution that STEP "
            "divides, to all whose sides are multiples of STEP and whose ratio is up to MAX, with "
            "no more pixels than the square; or to those in a file, such as 832x1216 in a line, "
            "the square of the resolution among them.",
            MODEL,
            read=checked_shapes,
            metavar="FILE|sdxl|nearest:STEP,MAX",
            order=-1,
            page="cut each image to one of [several shapes](#shapes), not to the square: to the "
            "one whose ratio is nearest to its own. `sdxl` is for a resolution of "
            f"{SDXL_RESOLUTION}, `nearest` for any that STEP divides",
        ),
    )
    """Among which each image finds its own, as `sizes_of` reads them; none: the square alone."""
    max_crop: float = field(
        default=1.0,
        metadata=about(
            "Reject images that would lose more than this part of their area, such as 0.2.",
            MODEL,
            read=checked_crop,
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
            "Keep this of the distribution that the VAE makes of an image; with none, encode "
            "captions alone, into a text dataset, and look at no image.",
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
            "Keep embeddings of captions, their tokens, or nothing of them.",
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
            "Take so many tokens of a caption, of a pipeline that lets its user choose; 0 is what "
            "the pipeline takes by itself.",
            MODEL,
            least=0,
            usual=True,
            page="how many tokens of a caption to take, where a pipeline lets its user choose "
            "(`max_sequence_length`); 0 is the pipeline's own number",
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
            "Decode a JPEG that is large at 1/2, 1/4 or 1/8, so that about twice the pixels that "
            "are wanted a side remain to be scaled (fast), or always in full. auto is fast, or "
            "what the dataset was begun with.",
            MODEL,
            choices=DECODES,
            usual=True,
            page="decode a large JPEG [at a reduced scale](#decoding) (fast), or always in full; "
            "auto is fast, or what the dataset was begun with",
        ),
    )
    seed: int = field(
        default=0,
        metadata=about(
            "Seed the sampling noise with this.",
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
    "Encode centre squares of so many pixels a side, such as 256, of all images that are large "
    "enough, whatever their bucket; several, as 256,512, in one pass, each into a dataset of its "
    f"own. {made_for()} With --latents none it says of which images captions are encoded: of all "
    "unless given.",
    MODEL,
    read=one_or_several,
    code=Code.TOO_SMALL,
    remedy="a smaller --resolution takes smaller images",
    parse=parse_resolutions,
    metavar="N,...",
    order=-2,
    example="256",
    page="the side of the square in pixels, which also says which images are encoded: 256 takes "
    "the buckets from 256 on, 512 those from 512 on, 1024 the images of the bucket 512 that are "
    "large enough. Several, as `256,512`, are [encoded in one pass](#several-resolutions). "
    f"{made_for()} `--latents none` does not need it: by default it takes the lowest bucket, and "
    "so all images",
)


@dataclass(frozen=True, kw_only=True)
class Recipe(RecipeOptions):
    """The recipe that decides the bytes of a latent sample, beside the model."""

    resolution: int = field(metadata=about("The pixels of a side of the square."))
    """The resolution; of text alone it says of which buckets, and 0 is the lowest, with all
    images."""

    def check_together(self) -> None:
        super().check_together()
        least = 0 if self.is_of_text else 1
        if self.resolution < least:
            raise UsageError(f"--resolution {self.resolution}: give {least} or more")
        self._check_alone()
        object.__setattr__(self, "shapes", sizes_of(self.shapes, self.resolution))

    def _check_alone(self) -> None:
        """Refuse options of images where text alone is encoded, and a run without both."""
        of_images = {
            "--shapes": bool(self.shapes),
            "--max-crop": self.max_crop < 1,
            "--flip": self.flip,
            "--decode": self.decode != DECODES[0],
        }
        given = [option for option, is_given in of_images.items() if is_given]
        if self.is_of_text and given:
            raise UsageError(f"{given[0]} is for images, which --latents none leaves alone")
        if self.is_of_text and self.text == "none":
            raise UsageError("--latents none and --text none leave nothing to encode: drop one")

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The shapes, however they were named."""
        return cast("tuple[Size, ...]", self.shapes)


@dataclass(frozen=True, kw_only=True)
class EncodingOptions(RecipeOptions):
    """The options of encoding at any resolution: the recipe, the model, the batch."""

    model: str = field(
        default="sd2",
        metadata=about(
            "Encode with one of those that wdsprep models lists (tiny is a toy for trials), with "
            "REPO[@REV] of a pipeline of diffusers, or with its folder.",
            MODEL,
            known=MODELS,
            usual=True,
            order=-1,
            example="NAME|REPO[@REV]|FOLDER",
            page="a name that `wdsprep models` lists, a pipeline of the Hugging Face hub, or its "
            "folder; safetensors only, in one file or several with their index",
        ),
    )
    batch_size: int | str = field(
        default="auto",
        metadata=about(
            "Encode so many images at once; auto goes by the memory of the GPU.",
            WORKERS,
            read=auto,
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
        """Return the options that `EncodingOptions` has, by name, without those of subclasses."""
        return {each.name: getattr(self, each.name) for each in fields(EncodingOptions)}


@suggesting
@dataclass(frozen=True, kw_only=True)
class Encode(EncodingOptions, Recipe):
    """The way in which images become latents while a trainer waits for them.

        how = wdsprep.Encode(resolution=256, model="sd2")
        loader = wdsprep.load("shards/images", encode=how, global_batch=1024)

    The settings are those of `wdsprep encode` that decide what latents are, `batch_size` on the
    device, and `device`, by default the trainer's.
    """

    device: str = field(
        default="auto", metadata=about("The device to compute on; auto is the trainer's.")
    )


def recipes_for(
    how: Callable[..., Encode], resolutions: Sequence[int], texts: int, *, is_apart: bool
) -> list[Encode]:
    """Return the recipe of each dataset, in the order of the places of a run."""
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
    """Check that images are encoded, and not text alone."""
    if encode.is_of_text:
        raise UsageError(
            'encode= makes latents of images: leave latents="none" out, or make text first, with '
            'wdsprep.encode(latents="none")'
        )
