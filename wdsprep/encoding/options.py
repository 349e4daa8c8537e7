"""The options of `encode`, and the recipes and places of the datasets that follow from them.

A run makes a dataset for each resolution, or for each caption.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from itertools import product

from wdsprep.dataset.reject_codes import Code
from wdsprep.encoding import DTYPES
from wdsprep.encoding.captions.options import CAPTION, CAPTIONS, OWN, OneCaption, check_paths
from wdsprep.encoding.models.presets import TRAINING_SIZES
from wdsprep.encoding.recipe_options import (
    IMAGES,
    MODEL,
    OF_IMAGES,
    Encode,
    RecipeOptions,
    check_compiled_shapes,
)
from wdsprep.errors import UsageError
from wdsprep.options import about, option_field
from wdsprep.runners.options import (
    OUTPUT,
    TRACK,
    WORKERS,
    WorkerOptions,
    limit,
    overwrite,
    parse_workers,
)
from wdsprep.sources.patterns import is_glob, is_tar
from wdsprep.store.base import lies_in
from wdsprep.store.schemes import is_keyed, place_scheme, root_and_name
from wdsprep.text import brief, check_one_of, parse_names, whole_number

DEVICES = ("auto", "cuda", "cpu")
RESOLUTION = "{resolution}"
"""The part of a place that is replaced by the resolution of the dataset."""

SHARDS_PER_WORKER = 3  # one comes back from the device, one goes in, one has its tar open
SHARDS_IN_TURN = 8
"""The shards of a worker whose device holds the networks for images and for text in turn: each is
loaded once for this number of shards."""


def resolutions_of(given: int | Sequence[int]) -> tuple[int, ...]:
    """Return the resolutions that one run encodes, each into a separate dataset."""
    return (given,) if isinstance(given, int) else tuple(given)


def check_resolutions(given: int | Sequence[int]) -> int | tuple[int, ...]:
    """Check a value of --resolution, and return it as a number or a tuple of numbers."""
    if not isinstance(given, Sequence):
        return whole_number("--resolution", given)
    if isinstance(given, str) or not given or any(given.count(number) > 1 for number in given):
        raise UsageError(
            f"--resolution {brief(given)}: give each number of pixels once, such as 256 or 256,512"
        )
    return tuple(whole_number("--resolution", number) for number in given)


def parse_resolutions(text: str) -> tuple[int, ...]:
    """Return the resolutions in a text such as "256,512"; raise ValueError for other texts."""
    return tuple(int(part) for part in text.split(","))


RESOLUTION_OPTION = about(
    "Encode centre squares with this number of pixels a side, such as 256, from all images that "
    "are large enough, in any bucket. Several, such as 256,512, are "
    "[encoded in one pass](#several-resolutions), each into a separate dataset. "
    f"{TRAINING_SIZES} With --latents none this chooses the images whose captions are "
    "encoded: all of them by default.",
    MODEL,
    read=check_resolutions,
    code=Code.TOO_SMALL,
    remedy="--overwrite with --upscale (or a larger one) takes smaller images, as does a lower "
    "--resolution",
    parse=parse_resolutions,
    metavar="N,...",
    order=-2,
    example="256",
)


@dataclass(frozen=True, kw_only=True)
class EncodeWorkerOptions(WorkerOptions):
    """The options of workers and their devices; `auto` and 0 leave the choice to wdsprep."""

    device: str = option_field(
        "Compute on this device; auto takes GPUs if there are any.",
        WORKERS,
        default="auto",
        choices=DEVICES,
        order=-1,
    )
    workers: int | str | tuple[int, int] = option_field(
        "Work in this number of processes; auto is one for each GPU, or one in all without a "
        "GPU; MIN:MAX is for a cluster that grows.",
        WORKERS,
        default="auto",
        read=parse_workers,
        metavar="AUTO|N|MIN:MAX",
        example="auto|N|MIN:MAX",
        page="how many workers; `auto` is one for each core, or as many as the cluster's "
        "machines have room for; for `encode` one for each GPU, or one in all without a GPU",
    )
    gpus_per_worker: float = option_field(
        "Give each worker this number of GPUs, or a share of one, such as 0.5.",
        WORKERS,
        default=0.0,
        least=0,
        usual="1",
        example="N",
    )
    cpus_per_worker: float = option_field(
        "Give each worker this number of cores.",
        WORKERS,
        default=0.0,
        least=0,
        usual="all, shared fairly",
        example="N",
    )
    accelerator_type: str | None = option_field(
        "Work only on GPUs of this type in a Ray cluster, such as A10G.",
        WORKERS,
        default=None,
        example="A10G",
    )


@dataclass(frozen=True)
class EncodeOne(EncodeWorkerOptions, OneCaption, RecipeOptions):
    """The options of a call of `encode` for one dataset."""

    images: "str | os.PathLike[str]" = option_field(
        "The images to encode.", default="shards/images", is_place=True
    )
    out: "str | os.PathLike[str]" = option_field(
        "The place for latents.", default="", is_place=True, metavar="[LATENTS]"
    )
    _: KW_ONLY
    resolution: int = field(default=0, metadata=RESOLUTION_OPTION)
    limit: int = field(
        default=0, metadata=limit("images", IMAGES, "without it the rest is done later")
    )
    overwrite: bool = field(default=False, metadata=overwrite("the dataset LATENTS"))
    redo_changed: bool = option_field(
        "Encode image shards again that have been packed again, and remove the latents of "
        "image shards that are gone.",
        OUTPUT,
        default=False,
    )
    track: str = field(default="", metadata=TRACK)

    def check_together(self) -> None:
        super().check_together()
        check_one_of("--dtype", self.dtype, DTYPES)


@dataclass(frozen=True)
class EncodeOptions(EncodeOne):
    """The options of a call of `encode` for any number of datasets."""

    _: KW_ONLY
    resolution: int | Sequence[int] = field(  # type: ignore[assignment]  # several are more
        default=0, metadata=RESOLUTION_OPTION
    )
    caption_fields: str | Sequence[str] = option_field(
        "Encode the captions of several fields in one pass, with --latents none, each into a "
        "separate dataset.",
        CAPTIONS,
        default=(),
        read=check_paths,
        metavar="A,B,...",
        example="alt,long",
    )
    text_out: "str | os.PathLike[str]" = option_field(
        "Store text [once](#text-stored-once), in a separate dataset at this place, and none with "
        "the latents.",
        OUTPUT,
        default="",
        is_place=True,
        metavar="PLACE",
        order=-1,
    )

    def check_together(self) -> None:
        super().check_together()
        alone = "--empty" if self.empty else "--caption-fields" if self.paths else ""
        if alone and self.latents != "none" and (self.empty or not self.text_out):
            raise UsageError(f"{alone} makes text datasets: give --latents none too")
        if self.text_out and "none" in (self.latents, self.text):
            raise UsageError(
                "--text-out is for text beside latents, and --latents none or --text none leaves "
                "out one of them: leave --text-out out"
            )
        _ = self.places
        check_compiled_shapes(self.recipes)

    @property
    def paths(self) -> tuple[str, ...]:
        return parse_names(self.caption_fields)

    @property
    def resolutions(self) -> tuple[int, ...]:
        return resolutions_of(self.resolution)

    @cached_property
    def places(self) -> Mapping[int | str, str]:
        """Return the places of the datasets: of latents by resolution, of text by its captions.

        Raise UsageError if these places, names or resolutions do not go together.
        """
        is_of_text, names = self.latents == "none", self.caption_names
        beside = f"latents-{RESOLUTION}"
        if is_of_text:
            beside = "text" if names == (OWN,) else f"text-{CAPTION}"
        out = os.fspath(self.out or place_beside(os.fspath(self.images), beside))
        if out.isdecimal():  # --resolution 256 512
            meant = ",".join(map(str, (*self.resolutions, out)))
            raise UsageError(
                f"{out} would be the folder for latents (did you mean --resolution {meant}?): "
                f"write ./{out} for such a folder"
            )
        is_named = self.caption_field or self.paths or self.caption_name or self.empty
        named = names if is_named else ()
        if is_of_text:
            texts = _places_at(out, self.resolutions, named, is_of_text=True)
            return dict(zip(names, texts, strict=True))
        text_out = os.fspath(self.text_out)
        latents = _places_at(out, self.resolutions, () if text_out else named, is_of_text=False)
        texts = _places_at(text_out, [0], named, is_of_text=True) if text_out else []
        for one, other in product(latents, texts):
            if lies_in(one, other) or lies_in(other, one):
                raise UsageError(
                    f"latents go to {one} and text to {other}, which is in the same folder: give "
                    "text another place"
                )
        keys: list[int | str] = [*self.resolutions, *(names if text_out else ())]
        return dict(zip(keys, (*latents, *texts), strict=True))

    @cached_property
    def recipes(self) -> list[Encode]:
        """Return the recipes of the datasets of a run, in the order of their places.

        There is one for each resolution and caption. If text is stored apart, there is one for the
        latents of each resolution, without text, and then one for the text of each caption.
        """
        how = partial(Encode, device=self.device, **vars(self.part(RecipeOptions)))
        text = [how(resolution=min(self.resolutions))] if self.latents == "none" else []
        latents: list[Encode] = []
        if self.text_out:
            usual = {name: getattr(RecipeOptions, name) for name in OF_IMAGES}
            text = [how(resolution=min(self.resolutions), **{**usual, "latents": "none"})]
            how = partial(how, text="none", text_length=0)
        if self.latents != "none":
            latents = [how(resolution=number) for number in self.resolutions]
        return latents + text * len(self.caption_names)


def place_beside(images: str, name: str) -> str:
    """Return the place of a dataset that is made of images: `a/latents-256` beside `a/images`.

    For tars, a pattern of them, a whole bucket and the hub, which is only read, it is in `shards`.
    """
    folder, slash, last = images.rstrip("/").rpartition("/")
    is_whole = is_keyed(images) and not root_and_name(images)[1]
    if is_whole or place_scheme(images) == "hf" or is_glob(images) or is_tar(last):
        return f"shards/{name}"
    beside = last.replace("images", name) if "images" in last else f"{last}-{name}"
    return f"{folder}{slash}{beside}"


def _places_at(
    place: str, resolutions: Sequence[int], names: Sequence[str], *, is_of_text: bool
) -> list[str]:
    """Return the places of datasets of these resolutions, or of text with captions of these names.

    Latents need a resolution, and text alone has at most one. Raise UsageError if the place needs a
    name that is not given, such as for {caption}, or if several datasets would have it.
    """
    if not is_of_text and 0 in resolutions:
        raise UsageError("--resolution is missing: give pixels, such as --resolution 256")
    if is_of_text and len(resolutions) > 1:
        raise UsageError(
            "--latents none makes one dataset, of the images for one resolution: give only the "
            "lowest --resolution, or leave it out for all images"
        )
    marks = (
        (CAPTION, "caption", names, "--caption-field, --caption-fields or --caption-name"),
        (
            RESOLUTION,
            "resolution",
            list(filter(None, resolutions)),
            "--resolution with --latents none",
        ),
    )
    for mark, noun, values, way in marks:
        if mark in place and not values:
            raise UsageError(
                f"{place} lacks a {noun} for {mark}: give a place without it, or {way}"
            )
        if mark not in place and len(values) > 1:
            raise UsageError(
                f"{place} is one place, and each {noun} makes a dataset: write {mark} where their "
                f"names differ, as in {place.rstrip('/')}-{mark}"
            )
    return [
        place.replace(RESOLUTION, str(number)).replace(CAPTION, name)
        for number, name in product(resolutions, names or [""])
    ]
