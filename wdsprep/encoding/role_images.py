"""The images in roles of a sample, as a dataset gets them: references, control images and masks.

Images in one role are cut by one rule, which the settings of the dataset name (`role_sizes`):

- `aligned`: where the target was cut, so they have its ratio;
- `shapes`: to the nearest of a list of shapes;
- `pipeline`: as the pipeline of the model prepares its reference images (`models.references`);
- `pixels`: as `aligned`, but kept as pixels; of the others the VAE makes latents.

A mask is cut where its target was, and kept as mean levels: of each cell of the latent (`latent`),
or of each pixel of the crop (`full`). `images.crop.crop_mask` takes the mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from wdsprep.dataset.npy_arrays import fields_of
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import TARGET, RoleImage, is_mask, role_of, roles_of
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.shapes import Size
from wdsprep.encoding.models.base import Part
from wdsprep.encoding.recipe_options import ALIGNED, PIPELINE, PIXELS
from wdsprep.errors import WorkError
from wdsprep.images.crop import Crop, crop, crop_mask, decode_image
from wdsprep.images.nearest_shape import Fit, SameCut, Shapes, cut_of
from wdsprep.sources.base import naming_role

if TYPE_CHECKING:
    from wdsprep.encoding.models.references import ReferencePipeline, References


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetCuts:
    """The rules by which a dataset cuts the images of its samples."""

    target: Shapes
    """The shapes to which the images of the samples themselves are cut."""
    has_target: bool = True
    """False if no latents of the target are kept, and only the place of its crop is needed."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """The rule for each role, in the order in which a pipeline takes references."""
    shapes: Mapping[str, Shapes] = field(default_factory=dict)
    cells: Mapping[str, int] = field(default_factory=dict)
    """The pixels of a side that become one number of the array of each role."""
    text_roles: Sequence[str] = ()
    """The roles of images on which the text depends."""
    part: Part = Part.BOTH
    """The part of a sample that the dataset gets."""

    @classmethod
    def of(cls, settings: Settings) -> "DatasetCuts":
        target, roles = cut_of(settings), roles_of(settings)
        arrays = fields_of(settings["layout"])
        return cls(
            target=target,
            has_target=not roles or TARGET in settings["roles"],
            sizes={role: settings["role_sizes"][role] for role in roles},
            shapes={
                role: replace(target, sizes=tuple((w, h) for w, h in sizes), max_crop=1.0)
                for role, sizes in settings.get("role_shapes", {}).items()
            },
            cells={
                line.role: settings["resolution"] // line.shape[-1]
                for line in arrays
                if line.is_of_role
            },
            text_roles=tuple(settings.get("text_roles", ())),
            part=Part.of(arrays),
        )

    @property
    def has_various_sizes(self) -> bool:
        """Return whether images may have other shapes than the target's."""
        return bool(self.shapes) or PIPELINE in self.sizes.values()

    @property
    def vae_sizes(self) -> set[Size]:
        """Return the known sizes of images for the VAE.

        What a pipeline makes of its references is not among them.
        """
        is_aligned = any(rule == ALIGNED and not is_mask(role) for role, rule in self.sizes.items())
        cut = {*self.target.sizes} if self.has_target or is_aligned else set[Size]()
        return cut.union(*(shapes.sizes for shapes in self.shapes.values()))

    @property
    def references(self) -> frozenset[str]:
        """Return the roles of images that the pipeline of the model has to prepare."""
        prepared = (role for role, rule in self.sizes.items() if rule == PIPELINE)
        return frozenset((*self.text_roles, *prepared))

    def cut(
        self,
        images: Sequence[RoleImage],
        target: Crop,
        prepared: Mapping[str, Tensor],
        *,
        max_area: int,
    ) -> Iterator[tuple[str, Crop]]:
        """Yield the crop of each image that the dataset has, by name, for the crop of the target.

        Those of arrays that no network makes hold these arrays. `prepared` has the pixels that the
        pipeline made ready. Raise RejectedError, which names the image, if one cannot be cut.
        """
        names = [image.name for image in images if role_of(image.name)[0] in self.sizes]
        if not (names or self.has_target):
            raise RejectedError(Code.NO_ROLE, " and ".join(self.sizes))
        same = SameCut(
            target.width, target.height, target.fit, self.target.upscale, self.target.oversampling
        )
        for name, data, _url in images:
            role = role_of(name)[0]
            if role not in self.sizes:
                continue
            with naming_role(name):
                if name in prepared and self.sizes[role] == PIPELINE:
                    _, height, width = prepared[name].shape
                    fit = Fit(width, height, width, height)
                    yield name, Crop(pixels=prepared[name], width=width, height=height, fit=fit)
                elif is_mask(name):
                    levels = crop_mask(data, target, self.cells[role], max_area=max_area)
                    yield name, replace(target, pixels=levels)
                else:
                    yield name, crop(data, self.shapes.get(role, same), max_area=max_area)

    def makes_latents(self, name: str) -> bool:
        """Return whether the VAE makes latents of an image in a role, by its name."""
        return not is_mask(name) and self.sizes[role_of(name)[0]] != PIXELS


def prepare_references(
    images: Sequence[RoleImage],
    roles: frozenset[str],
    pipeline: "ReferencePipeline",
    *,
    max_area: int,
) -> "tuple[dict[str, Tensor], References]":
    """Return the references of a sample as a pipeline takes them: the pixels of each, and all.

    They are the images in these roles. Raise RejectedError if there are none, or if the pipeline
    refuses them.
    """
    pictures = {}
    for image in images:
        if role_of(image.name)[0] in roles:
            with naming_role(image.name):
                pictures[image.name] = decode_image(image.data, max_area=max_area)
    if not pictures:
        raise RejectedError(Code.NO_ROLE, " and ".join(sorted(roles)))
    try:
        made = pipeline.prepare([*pictures.values()])
    except WorkError as error:
        raise RejectedError(Code.UNSUPPORTED, f"{', '.join(pictures)}: {error}"[:200]) from error
    return dict(zip(pictures, made.pixels, strict=False)), made
