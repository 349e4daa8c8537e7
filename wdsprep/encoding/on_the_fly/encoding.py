"""`Encode` with its model found, and images made ready for it as a worker of `encode` makes them.

`find_encoding` opens the model that the settings of an `Encode` name, and `prepare_image` makes a
sample of an image shard ready for it. What will not do is told by `reject_of`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.digests import FORM, DigestKind
from wdsprep.dataset.rejects import Refusal, Reject, RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.tar.read import TarSample
from wdsprep.encoding import encode as encoding
from wdsprep.encoding.models.find import (
    Model,
    check_resolution,
    check_shapes,
    find_model,
    hashed_with,
)
from wdsprep.encoding.recipe import Encode, Recipe, check_makes_latents
from wdsprep.encoding.recipe_defaults import format_at, new_format, settings_of, settle_recipe
from wdsprep.images.crop import NO_PIXELS, Crop, crop
from wdsprep.images.shapes import Shapes
from wdsprep.sources import Columns
from wdsprep.sources.folder import check_nbytes
from wdsprep.sources.tars import TarsSource
from wdsprep.text import shown

if TYPE_CHECKING:
    from wdsprep.encoding.models.base import Encoder


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """An `Encode` with its model found, picklable for workers that load it themselves."""

    model: Model
    recipe: Recipe
    device: str
    batch_size: int = 0
    form: Mapping[str, Any] = field(default_factory=lambda: FORM)
    make: "Callable[[Model, Recipe, str], Encoder]"

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the dataset that `encode` would write."""
        return settings_of(self.model, self.recipe, self.form)

    def in_format(self, form: Mapping[str, Any]) -> "Encoding":
        """Return the same for a dataset or a state that was begun in another format."""
        model = hashed_with(self.model, DigestKind.of(form))
        return self if form == self.form else replace(self, model=model, form=form)

    def as_at(self, place: str) -> "Encoding":
        """Return the encoding in the format of the dataset at `place`, or of a new one."""
        return self.in_format(format_at(place, self.recipe))

    def load(self) -> "Encoder":
        return self.make(self.model, self.recipe, self.device)


def find_encoding(encode: Encode, device: str) -> Encoding:
    """Find the model, or say why it cannot be had, before anything is loaded.

    `device` is the one that the trainer or the cluster has."""
    check_makes_latents(encode)
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
        form=new_format(recipe),
        make=encoding.make_encoder,
    )


_SOURCE = TarsSource(url="", pattern="*", columns=Columns())  # knows what members make a sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A sample without the bytes of its image, and what was cut out of it."""

    sample: Sample
    crop: Crop

    def without_pixels(self) -> "Prepared":
        """Return the same without pixels, for whoever has them elsewhere."""
        return replace(self, crop=replace(self.crop, pixels=NO_PIXELS))


def prepare_image(
    found: TarSample, tar: str, *, shapes: Shapes, max_area: int, max_nbytes: int
) -> Prepared:
    """Decode and crop the image of a sample, or raise a RejectedError as `encode` would."""
    row = next(_SOURCE.rows(found, tar))
    if isinstance(row, Refusal):
        raise RejectedError(row.code, row.detail)
    check_nbytes("the image", len(row.image), max_nbytes)
    made = crop(row.image, shapes, max_area=max_area)
    return Prepared(sample=replace(row, image=b""), crop=made)


def reject_of(found: TarSample, tar: str, refused: RejectedError) -> Reject:
    """Return the reject that `encode` would write of a sample."""
    source = shown(f"{tar}/{found.key}")
    return Reject(key=found.key, source=source, code=refused.code, detail=refused.detail)
