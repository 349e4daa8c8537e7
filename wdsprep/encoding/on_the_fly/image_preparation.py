"""The model of an `Encode`, and the preparation of images for it, as a worker of `encode` does it.

`find_encoding` finds the model that an `Encode` names, and `prepare_image` decodes and crops the
image of a sample for it. `reject_of` makes the reject of a sample that cannot be encoded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.rejects import Refusal, Reject, RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.tar.read import TarSample
from wdsprep.encoding import encode as encoding
from wdsprep.encoding.models.find_model import (
    Model,
    check_resolution,
    check_shapes,
    find_model,
)
from wdsprep.encoding.options import Encode
from wdsprep.encoding.recipe_defaults import settings_of, settle_recipe
from wdsprep.encoding.recipe_options import Recipe
from wdsprep.errors import UsageError
from wdsprep.images.crop import Crop, crop
from wdsprep.images.nearest_shape import Shapes
from wdsprep.sources.base import Columns
from wdsprep.sources.folder import check_nbytes
from wdsprep.sources.tars import TarsSource
from wdsprep.text import shown

if TYPE_CHECKING:
    from wdsprep.encoding.models.base import Encoder


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The model and the recipe of an `Encode`, picklable, so that workers can load the model."""

    model: Model
    recipe: Recipe
    device: str
    batch_size: int = 0
    make: "Callable[[Model, Recipe, str], Encoder]"

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the dataset that `encode` would write."""
        return settings_of(self.model, self.recipe)

    def load(self) -> "Encoder":
        return self.make(self.model, self.recipe, self.device)


def find_encoding(encode: Encode, device: str) -> Encoding:
    """Return the model and the recipe of an `Encode`, or raise an error if they cannot be used.

    Files of the model are downloaded if they are missing; no weights are loaded. `device` is the
    device of the trainer or of the cluster, and is used unless the `Encode` names one.
    """
    if encode.is_of_text:
        raise UsageError(
            'encode= makes latents of images: leave latents="none" out, or make text first, with '
            'wdsprep.encode(latents="none")'
        )
    device = device if encode.device == "auto" else encode.device
    model = find_model(encode.model, text=encode.text)
    check_resolution(model, encode.resolution)
    check_shapes(model, encode.sizes)
    recipe, model = settle_recipe(encode, model, device.partition(":")[0])
    return Encoding(
        model=model,
        recipe=recipe,
        device=device,
        batch_size=int(encode.batch_size),
        make=encoding.make_encoder,
    )


_SOURCE = TarsSource(url="", pattern="*", columns=Columns())  # knows what members make a sample


def prepare_image(
    found: TarSample, tar: str, *, shapes: Shapes, max_area: int, max_nbytes: int
) -> tuple[Sample, Crop]:
    """Return a sample without its image, and the crop of that.

    Raise RejectedError if `encode` would reject the image.
    """
    row = next(_SOURCE.rows(found, tar))
    if isinstance(row, Refusal):
        raise RejectedError(row.code, row.detail)
    check_nbytes("the image", len(row.image), max_nbytes)
    return replace(row, image=b""), crop(row.image, shapes, max_area=max_area)


def reject_of(found: TarSample, tar: str, refused: RejectedError) -> Reject:
    """Return the reject that `encode` would write for a sample."""
    return refused.to_reject(found.key, shown(f"{tar}/{found.key}"))
