"""The options that decide what is made from an image and its caption, with their defaults.

They are declared here alone: `encode`, `load` and `stream` take them from here, and pass them on as
a whole.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.samples import ROLE, TARGET, is_mask
from wdsprep.dataset.shapes import Size
from wdsprep.encoding import CHOSEN_DTYPES, DTYPES, LATENTS, MODELS, TEXTS
from wdsprep.encoding.shape_lists import SDXL_RESOLUTION, ShapesGiven, check_shapes_option, sizes_of
from wdsprep.errors import UsageError
from wdsprep.images.nearest_shape import DECODES
from wdsprep.images.options import AREA, NBYTES
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.options import Options, about, option_field, options_of, refuse_unknown_options
from wdsprep.runners.options import WORKERS, batch_size
from wdsprep.text import shortened

MODEL, IMAGES = "Model", "Images"
UPSCALE, MOST_UPSCALE = 1.5, 16
MOST_COMPILED = 4
"""The most shapes for which --compile compiles a VAE, one after the other, while its GPU waits. For
one shape of SD2's that took 19 s on an H100, and 9 s for the next."""


ALIGNED, PIPELINE, PIXELS, SHAPES = "aligned", "pipeline", "pixels", "shapes"
"""Rules for the size of images in a role, of which SHAPES stands for a list."""
FULL = "full"
RULES, MASK_RULES = (ALIGNED, PIPELINE, PIXELS), ("latent", FULL)
"""The rules that have a name: for images, and for masks."""
OF_IMAGES = ("shapes", "max_crop", "upscale", "flip", "decode")
"""The options that text alone does not have."""


def check_roles_option(given: Any) -> tuple[str, ...]:
    """Return the roles of a value of --roles; the target alone is the same as none."""
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(
        isinstance(name, str) and re.fullmatch(ROLE, name) and names.count(name) == 1
        for name in names
    ):
        raise UsageError(
            f"--roles {shortened(str(given))}: give each role once, by its name, as target,source"
        )
    return () if [*names] == [TARGET] else tuple(names)


def check_role_size(given: Any) -> tuple[str, ShapesGiven]:
    """Return the role and the rule of a value of --role-size."""
    role, rule = given.split("=", 1) if isinstance(given, str) and "=" in given else (given, "")
    if isinstance(given, tuple) and len(given) == 2:
        role, rule = given
    if not (isinstance(role, str) and re.fullmatch(ROLE, role)) or not rule:
        raise UsageError(
            f"--role-size {shortened(str(given))}: write ROLE=RULE, as source={ALIGNED}, "
            f"source={PIPELINE} or source=nearest:64,2"
        )
    return role, check_shapes_option(rule)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Options):
    """The options of latents that hold at any resolution.

    They say what decides the bytes, such as the model, which images are taken, and how the
    networks run.
    """

    shapes: ShapesGiven = option_field(
        "Cut each image to [the shape of a list](#shapes) whose aspect ratio is nearest to its "
        f"own. sdxl is the list of SDXL, for --resolution {SDXL_RESOLUTION} alone. "
        "nearest:STEP,MAX is for any resolution that STEP divides: all shapes whose sides are "
        "multiples of STEP, whose ratio is at most MAX, and which have no more pixels than the "
        "square. A FILE has a shape in each line, such as 832x1216, and one of them is the square.",
        MODEL,
        default=(),
        read=check_shapes_option,
        metavar="FILE|sdxl|nearest:STEP,MAX",
        order=-1,
    )
    """The shapes to cut to, in a form that `sizes_of` reads; empty: the square alone."""
    max_crop: float = option_field(
        "Reject images that would lose more than this part of their area, such as 0.2.",
        MODEL,
        default=1.0,
        usual=False,
        least=0,
        most=1,
        code=Code.ASPECT_RATIO,
        remedy="--overwrite with a larger --max-crop, with more --shapes, or with another "
        "--role-size where images in roles have not the target's ratio, takes more images",
        order=-1,
        example="0.2",
    )
    upscale: float = option_field(
        "Scale up [images that are too small](#small-images), by at most this factor, "
        f"{UPSCALE:g} if none is given. Without the option they are rejected.",
        MODEL,
        default=1.0,
        usual=False,
        least=1,
        most=MOST_UPSCALE,
        bare=UPSCALE,
        metavar="[MOST]",
        order=-1,
    )
    latents: str = option_field(
        "Keep [this part of the distribution](#latents-and-their-mirror-images) that the VAE makes "
        "from an image; with none, encode [captions alone](#text-alone), into a text dataset, and "
        "open no image.",
        MODEL,
        default=LATENTS[0],
        choices=LATENTS,
    )
    flip: bool = option_field(
        "Keep latents of [mirror images](#latents-and-their-mirror-images) too, as "
        "latent_flipped.npy or source_flipped.npy.",
        MODEL,
        default=False,
    )
    roles: str | Sequence[str] = option_field(
        "Encode the images that samples have [in these roles](#several-images-a-sample), as in "
        "target,source; target is the image of the sample itself, and the default.",
        MODEL,
        default=(),
        read=check_roles_option,
        code=Code.NO_ROLE,
        remedy="check --roles",
        metavar="ROLE,...",
        usual="target",
        example="target,source",
    )
    role_size: str | Sequence[str | tuple[str, ShapesGiven]] = option_field(
        "Cut images in ROLE by [this rule](#several-images-a-sample): aligned as the target is "
        "cut; pipeline as the pipeline of the model takes reference images; pixels aligned and "
        "without the VAE; or to a list of shapes, as --shapes has them. A mask has a number for "
        "each cell of the latent, or with full for each pixel.",
        MODEL,
        default=(),
        read=check_role_size,
        is_many=True,
        metavar="ROLE=RULE",
        example="source=aligned",
    )
    text: str = option_field(
        "Keep the [embeddings](#text) of captions, their tokens, or neither.",
        MODEL,
        default=TEXTS[0],
        choices=TEXTS,
    )
    text_length: int = option_field(
        "Encode at most this number of tokens of a caption, if the pipeline offers a choice; "
        "0 is the pipeline's own number.",
        MODEL,
        default=0,
        least=0,
        usual=True,
    )
    dtype: str = option_field(
        "Compute in this precision; auto is fp32 on a CPU, and on a GPU the precision that is "
        "[right for each network](#precision).",
        MODEL,
        default=DTYPES[0],
        choices=DTYPES,
        inner=CHOSEN_DTYPES,
    )
    decode: str = option_field(
        "Decode large JPEGs at [1/2, 1/4 or 1/8 of their size](#decoding), so that each side still "
        "has about twice the pixels that are needed (fast), or always at full size (full).",
        MODEL,
        default=DECODES[0],
        choices=DECODES,
    )
    seed: int = option_field(
        "Seed the sampling noise with this number.", MODEL, default=0, usual=True
    )
    compile: bool = option_field(
        "Compile the models first, which pays in long runs.", WORKERS, default=False, order=-1
    )
    max_area: int = field(default=MAX_AREA, metadata=AREA)
    max_bytes: int | str = field(default=MAX_NBYTES, metadata=NBYTES)
    model: str = option_field(
        "Encode with a model that `wdsprep models` lists (tiny is a toy for trials), with the "
        "REPO[@REV] of a diffusers pipeline on the hub, or with the folder of one.",
        MODEL,
        default="sd2",
        known=MODELS,
        order=-1,
        example="NAME|REPO[@REV]|FOLDER",
    )
    batch_size: int | str = field(
        default="auto",
        metadata=batch_size(
            "Encode this number of images at once; auto chooses it by [the memory of the GPU]"
            "(#precision)."
        ),
    )

    @property
    def is_of_text(self) -> bool:
        """Return whether only text is encoded, so that no image is opened."""
        return self.latents == "none"


@refuse_unknown_options
@dataclass(frozen=True, kw_only=True)
class Encode(RecipeOptions):
    """The settings with which images are encoded into latents while a trainer waits for them.

        how = wdsprep.Encode(resolution=256, model="sd2")
        loader = wdsprep.load("shards/images", encode=how, global_batch=1024)

    They are the options of `wdsprep encode` that decide the bytes of latents, the `batch_size`, and
    the `device`, which is the trainer's by default.
    """

    resolution: int = field(metadata=about("The pixels of a side of the square."))
    """The resolution. For text alone it chooses the images, and 0 stands for all of them."""
    device: str = option_field("The device to compute on; auto is the trainer's.", default="auto")

    def check_together(self) -> None:
        super().check_together()
        least = 0 if self.is_of_text else 1
        if self.resolution < least:
            raise UsageError(f"--resolution {self.resolution}: give {least} or more pixels")
        for option in options_of(RecipeOptions) if self.is_of_text else ():
            value = getattr(self, option.name)
            if option.name in OF_IMAGES and value and value != option.default:
                raise UsageError(
                    f"{option.dashed} is for images, which --latents none leaves alone: leave it "
                    "out"
                )
        if self.is_of_text and self.text == "none":
            raise UsageError(
                "--latents none and --text none leave nothing to encode: leave one out"
            )
        object.__setattr__(self, "shapes", sizes_of(self.shapes, self.resolution))
        object.__setattr__(self, "role_size", tuple(self._role_sizes()))
        check_compiled_shapes([self])

    def _role_sizes(self) -> Iterator[tuple[str, ShapesGiven]]:
        """Yield each role that has a rule with that, a list of shapes as widths and heights."""
        given: Sequence[tuple[str, Any]] = self.role_size  # type: ignore[assignment]
        if self.flip and not (self.has_target or self.references):
            raise UsageError(
                f"--flip is for latents, and --roles {','.join(self.roles)} makes none: leave it "
                "out, as masks and pixels are mirrored when they are loaded"
            )
        names = [role for role, _ in given]
        for role, rule in given:
            if role == TARGET or role not in self.roles or names.count(role) > 1:
                raise UsageError(
                    f"--role-size {role}: give one rule for each of the images in --roles, which "
                    f"are {','.join(self.roles) or TARGET}"
                )
            what = f"--role-size {role}={shortened(str(rule))}"
            if is_mask(role) and rule not in MASK_RULES:
                raise UsageError(
                    f"{what}: a mask is cut where its target is, so give {' or '.join(MASK_RULES)}"
                )
            is_named = is_mask(role) or rule in RULES
            yield role, rule if is_named else sizes_of(rule, self.resolution, what=what)

    @property
    def has_target(self) -> bool:
        return not self.roles or TARGET in self.roles

    @property
    def images_in_roles(self) -> tuple[str, ...]:
        """Return the roles beside the target that are encoded."""
        return tuple(role for role in self.roles if role != TARGET)

    @property
    def references(self) -> tuple[str, ...]:
        """Return the roles of images that a pipeline may take as references."""
        roles = (role for role in self.images_in_roles if not is_mask(role))
        return tuple(role for role in roles if self.rules.get(role) != PIXELS)

    @property
    def rules(self) -> dict[str, str | tuple[Size, ...]]:
        """Return the rule for each role that has one, a list of shapes as widths and heights."""
        return dict(cast("Sequence[tuple[str, Any]]", self.role_size))

    @property
    def shape_lists(self) -> dict[str, tuple[Size, ...]]:
        """Return the list of shapes of each role whose images are cut to one."""
        return {role: rule for role, rule in self.rules.items() if not isinstance(rule, str)}

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Return the shapes to cut images to, as widths and heights."""
        return cast("tuple[Size, ...]", self.shapes)


def check_compiled_shapes(recipes: Sequence[Encode]) -> None:
    """Raise UsageError if a VAE would be compiled for many shapes to encode with all recipes."""
    shapes = set[Size]()
    for recipe in recipes:
        if recipe.compile and not recipe.is_of_text:
            square = (recipe.resolution, recipe.resolution)
            shapes.update(recipe.sizes or (square,), *recipe.shape_lists.values())
    if len(shapes) > MOST_COMPILED:
        raise UsageError(
            f"--compile takes minutes for each shape, and there are {len(shapes)}: leave it out, "
            f"or encode {MOST_COMPILED} shapes at most"
        )
