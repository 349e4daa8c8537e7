"""The image processors of models: they make the input of a network from images.

The processor of each model does all of this itself. A fast one scales with torch. For an image of
1024 x 768, that of a ViT takes 2.8 ms from the image of Pillow, 2.2 ms from its three planes, and
1 ms from the four channels in which Pillow keeps it, where nothing is copied first. So a processor
scales the four channels of each image by its own `resize`, and is called for the rest with the
small planes of several images: a call takes up to 0.4 ms, however small they are. This is tried on
a few images when the processor is loaded. If the outcome differs in any bit, each image is prepared
in a call of its own, from planes or from the image of Pillow.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from wdsprep.scoring.models import PROCESSORS, ScoreModel

Prepared = Mapping[str, Tensor]
"""An image as a processor gives it, without the dimension of a batch."""
BACKENDS = {"auto": None, "fast": "torchvision", "slow": "pil"}
PROBES = ((96, 64), (372, 588), (130, 60))
"""The heights and widths of the images on which models are tried: smaller and larger than the
input of most networks."""
METHOD_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError)
"""The errors of a processor that does not take pixels in one of these forms."""


class DecodedImage:
    """An image in RGB, with what several processors make of it in the same way.

    Its three planes are copied once, when they are first asked for. `scaled` has its planes as
    processors have scaled them, by the method, the size and the filter of the scaling.
    """

    def __init__(self, image: Image.Image) -> None:
        self.image = image
        self.scaled: dict[str, Tensor] = {}

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
        file = next(path / name for name in PROCESSORS if name in model.files)
        with explain_load_errors(file, "an image processor"):
            self._own = AutoImageProcessor.from_pretrained(
                str(path),
                backend=BACKENDS[model.processor],
                local_files_only=True,
                trust_remote_code=False,
            )
        self.is_fast = "TorchvisionBackend" in {base.__name__ for base in type(self._own).__mro__}
        self._scale: Callable[[DecodedImage], Any] = self._prepare_image
        self._finish: Callable[[Sequence[Any]], list[Prepared]] = list
        if model.processor != "auto" and self.is_fast != (model.processor == "fast"):
            raise UsageError(
                f"{model.name} has no {model.processor} image processor: leave --processor out"
            )
        with explain_load_errors(file, "an image processor"):
            self._choose_method(make_probes())

    @property
    def identity(self) -> str:
        """Return its name and all its settings: processors in which these are equal are equal."""
        return f"{type(self._own).__name__} {self._own.to_json_string()}"

    def __str__(self) -> str:
        """Return its name and kind, as settings have them."""
        return f"{type(self._own).__name__} ({'fast' if self.is_fast else 'slow'})"

    def scale(self, image: DecodedImage) -> Any:
        """Scale an image, or prepare it as a whole, and return what `finish` takes.

        `choose_method` decides which of the two is done. Several threads may call this at once.
        """
        return self._scale(image)

    def finish(self, scaled: Sequence[Any]) -> list[Prepared]:
        """Return the inputs of the network for what `scale` has returned of images.

        Whatever is left to do is done here, for all images at once.
        """
        return self._finish(scaled) if scaled else []

    def prepare(self, images: Iterable[DecodedImage]) -> list[Prepared]:
        """Return the inputs of the network for images."""
        return self.finish([self.scale(image) for image in images])

    def _choose_method(self, images: Sequence[DecodedImage]) -> None:
        """Choose the fastest method of preparing images that changes no bit of the outcome.

        Methods are tried on these images, and compared with a call of the model's processor for
        each image of Pillow. That call stays the method if no other has the same outcome, or if the
        processor is a slow one.
        """
        wanted = [self._prepare_image(image) for image in images]
        self.blank = wanted[0]
        """What it makes of an image: the shape of all that it makes."""
        if not self.is_fast:
            return
        methods: tuple[tuple[Callable[[DecodedImage], Any], Any], ...] = (
            (self._scale_channels, self._finish_planes),
            (self._prepare_planes, list),
        )
        for scale, finish in methods:
            try:
                found = finish([scale(image) for image in images])
            except METHOD_ERRORS:
                continue
            if all(map(_are_equal, wanted, found)):
                self._scale, self._finish = scale, finish
                return

    def _scale_channels(self, image: DecodedImage) -> Tensor:
        own = self._own
        decided = f"{type(own).resize} {own.size} {own.resample}"
        if decided not in image.scaled:
            scaled = own.resize(image.pixels, size=own.size, resample=own.resample)
            image.scaled[decided] = copy_planes(scaled)
        return image.scaled[decided]

    def _finish_planes(self, planes: Sequence[Tensor]) -> list[Prepared]:
        return self._call(list(planes), input_data_format="channels_first", do_resize=False)

    def _prepare_planes(self, image: DecodedImage) -> Prepared:
        return self._call([image.planes], input_data_format="channels_first")[0]

    def _prepare_image(self, image: DecodedImage) -> Prepared:
        return self._call([image.image])[0]

    def _call(self, images: list[Any], **more: Any) -> list[Prepared]:
        made = self._own(images=images, return_tensors="pt", **more)
        named = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        return [
            {name: value[number] for name, value in named.items()} for number in range(len(images))
        ]


def _are_equal(one: Prepared, other: Prepared) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
