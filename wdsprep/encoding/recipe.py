"""What is made of an image and its caption: the settings of encoding, with the usual values.

They stand here alone. `encode`, `load` and `stream` take theirs from here, and pass them on whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from wdsprep.dataset.shapes import Size
from wdsprep.encoding import DTYPES, HALF, LATENTS, TEXTS
from wdsprep.encoding.shape_lists import Given, checked_crop, sizes_of
from wdsprep.errors import UsageError
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.text import at_least, auto, one_of, size, whole


def resolutions_of(given: int | Sequence[int]) -> tuple[int, ...]:
    """Those that one run encodes: one, or several of which each makes a dataset."""
    is_one = isinstance(given, str) or not isinstance(given, Sequence)
    numbers = [given] if is_one else list(given)  # type: ignore[arg-type]
    found = tuple(whole("--resolution", number) for number in numbers)
    if not found:
        raise UsageError("no resolution is given: give one, such as 256")
    if twice := [number for number in found if found.count(number) > 1]:
        raise UsageError(f"resolution {twice[0]} is given twice: name each once")
    return found


def parse_resolutions(text: str) -> tuple[int, ...]:
    """The same as a user writes them, such as "256,512"."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r}: give pixels, such as 256, or several, as 256,512") from None
    return resolutions_of(numbers)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides the bytes of a latent sample, beside the model."""

    resolution: int
    """Of text alone it says of which buckets; 0 is the lowest, which is that of all images."""
    latents: str = LATENTS[0]
    flip: bool = False
    """Whether the mirrored image has latents too."""
    text: str = TEXTS[0]
    text_length: int = 0
    """Tokens, of a pipeline that takes captions of several lengths; 0 is the usual one."""
    dtype: str = DTYPES[0]
    seed: int = 0
    compile: bool = False
    max_area: int = MAX_AREA
    max_bytes: int | str = MAX_NBYTES
    """Or as "250MB"."""
    shapes: Given = ()
    """Among which each image finds its own, as `sizes_of` reads them; none: the square alone."""
    max_crop: float = 1.0
    """Images that would lose more of their area are rejected."""

    def __post_init__(self) -> None:
        """Other words would be taken for one of these further on."""
        one_of(LATENTS, latents=self.latents)
        one_of(TEXTS, text=self.text)
        one_of((*DTYPES, HALF), dtype=self.dtype)
        resolution = whole("--resolution", self.resolution)
        at_least(0 if self.is_of_text else 1, resolution=resolution)
        at_least(1, max_area=self.max_area)
        whole("--seed", self.seed)
        at_least(0, text_length=whole("--text-length", self.text_length))
        object.__setattr__(self, "max_bytes", size(self.max_bytes) or MAX_NBYTES)
        object.__setattr__(self, "max_crop", checked_crop(self.max_crop))
        self._check_alone()
        object.__setattr__(self, "shapes", sizes_of(self.shapes, self.resolution))

    def _check_alone(self) -> None:
        """Without latents there is nothing that says how an image is cut."""
        of_images = {
            "--shapes": bool(self.shapes),
            "--max-crop": self.max_crop < 1,
            "--flip": self.flip,
        }
        given = [option for option, is_given in of_images.items() if is_given]
        if self.is_of_text and given:
            raise UsageError(f"{given[0]} is for images, which --latents none leaves alone")
        if self.is_of_text and self.text == "none":
            raise UsageError("--latents none and --text none leave nothing to encode: drop one")

    @property
    def is_of_text(self) -> bool:
        """Whether no image is opened."""
        return self.latents == "none"

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The shapes, however they were named."""
        return cast("tuple[Size, ...]", self.shapes)


@dataclass(frozen=True, kw_only=True)
class Encode(Recipe):
    """How images become latents while a trainer waits for them.

        how = wdsprep.Encode(resolution=256, model="sd2")
        loader = wdsprep.load("shards/images", encode=how, global_batch=1024)

    The settings are those of `wdsprep encode` that decide what latents are, `batch_size` on the
    device, and `device`, by default the trainer's.
    """

    model: str = "sd2"
    batch_size: int | str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "batch_size", auto(self.batch_size))


def check_on_the_way(encode: Encode) -> None:
    if encode.is_of_text:
        raise UsageError(
            'encode= makes latents of images: leave latents="none" out, or make text first, with '
            'wdsprep.encode(latents="none")'
        )
