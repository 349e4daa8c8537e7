"""The image processors of models: they make the input of a network from an image.

The processor of each model does all of this itself. A fast one scales with torch. For an image of
1024 x 768 this takes 0.9 ms for three planes, and 0.4 ms for the four channels in which Pillow
keeps it, where nothing is copied first. So a processor scales four channels by its own `resize`,
and does the rest with the small planes. This is tried on a few images when the processor is loaded.
If the outcome differs in any bit, the processor is given planes, or the image of Pillow (2.2 ms).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from wdsprep.encoding.models.load_networks import explain_load_errors
from wdsprep.errors import UsageError
from wdsprep.images.crop import copy_planes, view_pixels
from wdsprep.scoring.models import ScoreModel

Prepared = Mapping[str, Tensor]
"""An image as a processor gives it, without the dimension of a batch."""
BACKENDS = {"auto": None, "fast": "torchvision", "slow": "pil"}
PROBES = ((96, 64), (372, 588), (130, 60))
"""The heights and widths of the images on which models are tried: smaller and larger than the
input of most networks."""
METHOD_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError)
"""The errors of a processor that does not take pixels in one of these forms."""


class DecodedImage:
    """An image in RGB, whose three planes are copied once, when they are first asked for."""

    def __init__(self, image: Image.Image) -> None:
        self.image = image

    @cached_property
    def pixels(self) -> Tensor:
        return view_pixels(self.image)

    @cached_property
    def planes(self) -> Tensor:
        return copy_planes(self.pixels)


def make_probes() -> list[DecodedImage]:
    """Return images of noise of different sizes, on which models are tried."""
    random = np.random.default_rng(0)
    noises = (random.integers(0, 256, (*size, 3), np.uint8) for size in PROBES)
    return [DecodedImage(Image.fromarray(noise)) for noise in noises]


class ImageProcessor:
    """The image processor of a model. Two models whose processors are equal share one."""

    def __init__(self, model: ScoreModel) -> None:
        from transformers import AutoImageProcessor

        path = Path(model.folder)
        with explain_load_errors(path, AutoImageProcessor):
            self._own = AutoImageProcessor.from_pretrained(
                str(path),
                backend=BACKENDS[model.processor],
                local_files_only=True,
                trust_remote_code=False,
            )
        self.is_fast = "TorchvisionBackend" in {base.__name__ for base in type(self._own).__mro__}
        self._prepare = self._prepare_image
        if model.processor != "auto" and self.is_fast != (model.processor == "fast"):
            raise UsageError(
                f"{model.name} has no {model.processor} image processor: leave --processor out"
            )

    @property
    def identity(self) -> str:
        """Return its name and all its settings: processors in which these are equal are equal."""
        return f"{type(self._own).__name__} {self._own.to_json_string()}"

    def __str__(self) -> str:
        """Return its name and kind, as settings have them."""
        return f"{type(self._own).__name__} ({'fast' if self.is_fast else 'slow'})"

    def prepare(self, image: DecodedImage) -> Prepared:
        """Return the input of the network for an image. May be called by several threads."""
        return self._prepare(image)

    def choose_method(self, images: Sequence[DecodedImage]) -> None:
        """Choose the fastest method whose outcome for all of these images is equal in each bit."""
        if not self.is_fast:
            return
        wanted = [self._prepare_image(image) for image in images]
        for method in (self._prepare_channels, self._prepare_planes):
            try:
                found = [method(image) for image in images]
            except METHOD_ERRORS:
                continue
            if all(map(_are_equal, wanted, found)):
                self._prepare = method
                return

    def _prepare_channels(self, image: DecodedImage) -> Prepared:
        own = self._own
        scaled = own.resize(image.pixels, size=own.size, resample=own.resample)
        planes = copy_planes(scaled)
        return self._call(planes, input_data_format="channels_first", do_resize=False)

    def _prepare_planes(self, image: DecodedImage) -> Prepared:
        return self._call(image.planes, input_data_format="channels_first")

    def _prepare_image(self, image: DecodedImage) -> Prepared:
        return self._call(image.image)

    def _call(self, image: Any, **more: Any) -> Prepared:
        made = self._own(images=[image], return_tensors="pt", **more)
        return {name: value[0] for name, value in made.items() if isinstance(value, Tensor)}


def _are_equal(one: Prepared, other: Prepared) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
