"""The encoder: a batch of pixels or of captions becomes a batch of arrays to store.

The arrays of an image are those that a diffusers pipeline would compute from it. The VAE's moments
are converted to fp32 before anything is done with them, and the noise of a sample depends on its
key. So the device and the size of a batch decide no more than the last bits, and the worker nothing
on CPUs of one kind. A row that does not fit into the storage dtype is marked in `ok`, and `exact`
computes it again in fp32.

torch is imported with this module, diffusers and transformers when models are loaded. `is_split`
says whether a GPU has room for the networks of images and text together, or for one after the
other.

`precision_of` says what fp32 means in a process: whole, or TF32 in convolutions, whatever its
trainer has allowed. TF32 has the range of fp32 and a mantissa of 10 bits. Whether it is used is a
setting of the whole process, so it is changed around our own work alone, and put back. Meanwhile it
holds for the trainer's fp32 too, and what it has compiled may be compiled once more. TF32 in
convolutions alone is what torch does by default, so most trainers notice nothing of it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from wdsprep.dataset.npy_arrays import LATENT, is_of_text, normalise, text_fields
from wdsprep.encoding import HALF, TF32
from wdsprep.encoding.models.base import (
    DTYPES,
    TENSORS,
    TEXT_NBYTES,
    Encoded,
    InTwoPrecisions,
    Part,
    Rows,
    Tokens,
    free_nbytes,
    peak_nbytes,
)
from wdsprep.encoding.models.device import Encoder
from wdsprep.encoding.models.families import dtype_of_tower
from wdsprep.encoding.models.find_model import CLIP, Model
from wdsprep.encoding.models.load_networks import (
    check_compiler,
    compile_network,
    load_vae,
    silence_libraries,
)
from wdsprep.encoding.models.model_files import tensors_in
from wdsprep.encoding.models.noise import normal
from wdsprep.encoding.models.references import ReferencePipeline
from wdsprep.encoding.models.text_encoders import load_text_encoder
from wdsprep.encoding.models.vae import Moments, leave_out_divisions
from wdsprep.encoding.recipe_options import PIPELINE, Encode
from wdsprep.encoding.sample_arrays import fields, latent_fields
from wdsprep.errors import WorkError
from wdsprep.text import human_bytes


def load_encoder(model: Model, recipe: Encode, device: str) -> "LatentEncoder":
    """Load the networks of a model that a recipe needs onto a device."""
    silence_libraries()
    if recipe.compile:
        check_compiler(torch.device(device))
    return LatentEncoder(model, recipe, torch.device(device))


class LatentEncoder(Encoder):
    """The VAE and the text encoders of a model on a device, or only those that are needed."""

    def __init__(self, model: Model, recipe: Encode, device: torch.device) -> None:
        self.fields = fields(model, recipe)
        self.resolution = recipe.resolution
        self.device = device
        self.is_compiled = recipe.compile
        self._by_name = {
            field.name: field for field in (*latent_fields(model, recipe), *self.fields)
        }
        self._text_precision = precision_of(recipe.dtype)
        self._kept, self._is_sampled = recipe.latents, model.is_sampled
        self._rule = model.latent_settings
        dtype = recipe.dtype.rpartition("+")[2]  # that of the VAE, if there is one
        dtype = "fp16" if dtype == HALF else dtype
        self._image_precision = precision_of(dtype)
        self.itemsize = DTYPES[dtype].itemsize
        self._moments = InTwoPrecisions(
            lambda dtype: _load_moments(model, DTYPES[dtype], device, is_compiled=recipe.compile),
            "fp32" if dtype == TF32 else dtype,
            compile_network if recipe.compile else None,
        )
        self.is_split = is_split(model, recipe, device, self.itemsize)
        self._text = load_text_encoder(model, recipe, device)
        self.has_text, self.text_batch_size = recipe.text != "none", self._text.batch_size
        self.groups_texts, self.takes_images = self._text.has_shapes, self._text.takes_images
        if self.takes_images or PIPELINE in recipe.rules.values():
            self.references = ReferencePipeline(model)
        of_images = None if is_of_text(self.fields) else self._moments
        for network in (of_images, self._text.network):
            if network is not None and not self.is_split:
                network.get()

    def bring(self, part: Part) -> None:
        if not self.is_split or self._text.network is None:
            return
        (self._moments if part is Part.TEXT else self._text.network).release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def tokens(self, captions: Sequence[str], images: Sequence[Any] = ()) -> list[Tokens]:
        return self._text.tokens(captions, images)

    def encode_images(
        self, pixels: Tensor, noise: Tensor | None = None, /, *, exact: bool = False
    ) -> Encoded:
        return self._convert(self.image_rows(pixels, noise, exact=exact))

    def encode_texts(self, texts: Sequence[Tokens], *, exact: bool = False) -> Encoded:
        return self._convert(self.text_rows(texts, exact=exact))

    def image_rows(
        self, pixels: Tensor, noise: Tensor | None = None, *, exact: bool = False
    ) -> Rows:
        """Return the latents of images in fp32, before they are converted for storage.

        They are shifted and scaled, or the moments themselves. `noise` has a key of noise for each
        sample, and is None for references.
        """
        with whole_fp32() if exact else self._image_precision(), torch.inference_mode():
            latents = moments = self._moments.get(exact=exact)(pixels)
            if self._kept == "moments" and noise is not None:
                return Rows({LATENT: moments})
            if self._is_sampled:
                latents, logvar = moments.chunk(2, dim=1)
                if self._kept == "sample" and noise is not None:
                    deviation = (0.5 * logvar.clamp(-30, 20)).exp()
                    latents = latents + deviation * normal(noise, tuple(latents.shape[1:]))
            # Numbers by channel are copied to the device once, as a copy waits for its work.
            lists = {name: value for name, value in self._rule.items() if isinstance(value, list)}
            self._rule |= {name: latents.new_tensor(numbers) for name, numbers in lists.items()}
            return Rows({LATENT: cast(Tensor, normalise(latents, self._rule))})

    def text_rows(self, texts: Sequence[Tokens], *, exact: bool = False) -> Rows:
        with whole_fp32() if exact else self._text_precision(), torch.inference_mode():
            return self._text.rows(texts, exact=exact)

    def empty(self) -> dict[str, Tensor]:
        if not self.has_text:
            return {}
        with whole_fp32(), torch.inference_mode():
            encoded = self._convert(self._text.empty(exact=False))
            if not encoded.ok.all():
                encoded = self._convert(self._text.empty(exact=True))
            arrays = {}
            for field in text_fields(self.fields):
                length = None
                if field.is_variable and encoded.lengths is not None:
                    length = int(encoded.lengths[0])
                arrays[field.name] = encoded.arrays[field.name][0][:length].cpu()
            return arrays

    @torch.inference_mode()
    def _convert(self, rows: Rows) -> Encoded:
        """Convert rows to the dtypes in which they are stored, with zeros after shorter captions.

        What the zeros replace need not be finite.
        """
        count = len(next(iter(rows.arrays.values())))
        ok = [torch.ones(count, dtype=torch.bool, device=self.device)]
        arrays = {}
        for name, value in rows.arrays.items():
            field = self._by_name[name]
            if field.is_variable and rows.lengths is not None:
                places = torch.arange(value.shape[1], device=value.device)
                behind = places >= rows.lengths[:, None]
                value = value.masked_fill(behind.view(*behind.shape, *[1] * (value.ndim - 2)), 0)
            dtype = TENSORS[field.dtype]
            if value.is_floating_point() and dtype.is_floating_point:
                ok.append(fits(value, dtype))
            arrays[name] = value.to(dtype).contiguous()
        return Encoded(arrays, torch.stack(ok).all(0), rows.lengths)


def fits(value: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """Return for each row whether all its values are finite and fit into a dtype."""
    return value.abs().flatten(1).amax(1) <= torch.finfo(dtype).max


def _load_moments(
    model: Model, dtype: torch.dtype, device: torch.device, *, is_compiled: bool
) -> Moments:
    """Load the encoder of a VAE onto a device.

    Divisions by one are left out, except of a network that is going to be compiled: torch.compile
    makes such changes by itself. Raise WorkError if the output does not have the shape that the
    config says.
    """
    # All is contiguous. channels_last was slower with torch 2.11, which turns it to and fro around
    # each group norm: SD2's VAE made 0.74 (256 and 512 pixels, H100 and H200) and 0.59 (1024) of
    # the images a second in fp16, 0.8 and 0.67 in TF32, and equally many when it was compiled.
    moments = Moments(load_vae(model, dtype)).eval().requires_grad_(False)
    side = 2 * model.factor
    with torch.inference_mode():
        shape = tuple(moments(torch.zeros((1, 3, side, side), dtype=torch.uint8)).shape[1:])
    places = 2 * model.patch
    channels = model.channels // model.patch**2 * (2 if model.is_sampled else 1)
    if shape != (channels, places, places):  # of which the shapes of all latents were derived
        raise WorkError(
            f"the VAE of {model.name} makes {shape} of an image of {side} x {side}, where its "
            f"config.json says {(channels, places, places)}: choose another --model"
        )
    if not is_compiled:
        leave_out_divisions(moments)
    return moments.to(device)


def is_split(model: Model, recipe: Encode, device: torch.device, itemsize: int) -> bool:
    """Return whether a GPU has room for the networks of images and text only in turn.

    Raise WorkError if one of them alone does not fit.
    """
    if device.type != "cuda":
        return False
    images = 0
    if not recipe.is_of_text:
        images = weights_nbytes(model, model.vae, itemsize)
        images += peak_nbytes(1, recipe.resolution, itemsize)
    text = 0
    if recipe.text == "emb":
        text = TEXT_NBYTES
        for part in model.components or CLIP:  # of which a tokenizer has no weights
            dtype = dtype_of_tower(recipe.dtype, model.pipeline_kind, part.kind)
            text += weights_nbytes(model, part.name, DTYPES[dtype].itemsize)
    free = free_nbytes(device)
    if images + text <= free:
        return False
    if max(images, text) > free:
        raise WorkError(
            f"{model.name} needs {human_bytes(max(images, text))} of a GPU "
            f"({human_bytes(images)} for images, {human_bytes(text)} for text), which has "
            f"{human_bytes(free)} free here: use a larger GPU, or give --text none or tokens"
        )
    return True


def weights_nbytes(model: Model, folder: str, itemsize: int) -> int:
    """Return how many bytes the weights in a folder of a model take in memory.

    The headers of their files tell the numbers of values.
    """
    files = model.weights_in(folder)
    return itemsize * sum(entry.numel for path in files for entry in tensors_in(path))


class _Fp32:
    """A context in which fp32 is computed in a chosen way.

    Any number of threads may be in it together. One that wants the other way waits for them, or the
    bits of a result would depend on who came first. The last one restores the settings.
    """

    def __init__(self) -> None:
        self._left = threading.Condition()
        self._inside = 0
        self._has_tf32 = False
        self._before: list[str | bool] = []

    @contextlib.contextmanager
    def __call__(self, *, tf32: bool) -> Iterator[None]:
        """Let convolutions use TF32 in this context, or nothing at all."""
        with self._left:
            self._left.wait_for(lambda: not self._inside or self._has_tf32 is tf32)
            if not self._inside:
                self._has_tf32 = tf32
                name, operators = _settings(tf32=tf32)
                self._before = [getattr(operator, name) for operator, _ in operators]
                for operator, value in operators:
                    setattr(operator, name, value)
            self._inside += 1
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                if not self._inside:
                    name, operators = _settings(tf32=tf32)
                    for (operator, _), value in zip(operators, self._before, strict=True):
                        if name == "fp32_precision":
                            operator.fp32_precision = "none"  # it follows the common setting
                        if getattr(operator, name) != value:
                            setattr(operator, name, value)
                    self._left.notify_all()


def _settings(*, tf32: bool) -> tuple[str, list[tuple[Any, str | bool]]]:
    """Return the name of the setting, and the operators to set, each with its value.

    Settings of single operators override common ones. Both operators of cuDNN are set, since torch
    refuses to tell `allow_tf32` if they differ. Until torch 2.9 there was only `allow_tf32`.
    """
    backends: Any = torch.backends
    if not hasattr(backends.cudnn, "conv"):
        return "allow_tf32", [(backends.cuda.matmul, False), (backends.cudnn, tf32)]
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    of_cudnn = "tf32" if tf32 else "ieee"
    return "fp32_precision", [
        (backends.cuda.matmul, "ieee"),
        (mkldnn.matmul, "ieee"),
        (mkldnn.conv, "ieee"),
        (cudnn.conv, of_cudnn),
        (cudnn.rnn, of_cudnn),
    ]


_fp32 = _Fp32()
Precision = Callable[[], "contextlib.AbstractContextManager[None]"]
whole_fp32: Precision = partial(_fp32, tf32=False)


def precision_of(dtype: str) -> Precision:
    """Return the context in which a network of a dtype computes; half precision needs none."""
    if dtype in (TF32, "fp32"):
        return partial(_fp32, tf32=dtype == TF32)
    return contextlib.nullcontext
