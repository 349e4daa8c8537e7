"""The models at work: a batch of pixels and tokens becomes a batch of arrays to store.

What is stored of an image is what a diffusers pipeline would have computed from it. The VAE's
moments leave the working precision before anything is done with them, and the noise of a sample is
that of its key, so no worker shows in the result, and a batch of another size in the last bits
alone. A row that does not fit into the storage dtype is named in `ok`, and `exact` computes it
again in fp32.

torch is imported with this module, diffusers and transformers when models are loaded.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from wdsprep.dataset.arrays import EMB, LATENT, TOKENS, Field
from wdsprep.encoding.fields import fields
from wdsprep.encoding.models.find import Model
from wdsprep.encoding.models.noise import normal
from wdsprep.encoding.models.precision import whole_fp32
from wdsprep.encoding.recipe import Recipe
from wdsprep.errors import WorkError
from wdsprep.text import plural

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
STORED_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of one caption, as many as the text encoder takes; none where no text is wanted."""

    ids: list[int]
    count: int
    """with start and end, before anything was cut"""
    cut: bool


@dataclass(frozen=True, slots=True)
class Encoded:
    arrays: dict[str, Tensor]
    """by field, (B, *shape) in the storage dtype, on the device"""
    ok: Tensor
    """bool (B,): whether all values of the row were finite and within the storage dtype's range"""


class Encoder(Protocol):
    """A model family, loaded onto one device."""

    fields: tuple[Field, ...]
    resolution: int
    device: torch.device
    itemsize: int
    """bytes of a number while the models work"""
    is_compiled: bool
    """whether the first batch of a size takes much longer"""

    def tokens(self, captions: Sequence[str]) -> list[Tokens]:
        """May be called by several threads at once."""

    def encode(
        self, pixels: Tensor, ids: Tensor | None, noise: Tensor, *, exact: bool = False
    ) -> Encoded:
        """uint8 (B, 3, R, R), int64 (B, length) and int64 (B,) keys of noise, on the device."""

    def empty(self) -> dict[str, Tensor]:
        """What the empty caption becomes, on the host: a tensor for each field made of text."""


def load_encoder(model: Model, recipe: Recipe, device: str) -> Encoder:
    """Load what a recipe needs of a model."""
    silence()
    return LatentEncoder(model, recipe, torch.device(device))


class LatentEncoder:
    """An AutoencoderKL, and a CLIPTextModel where embeddings are wanted."""

    def __init__(self, model: Model, recipe: Recipe, device: torch.device) -> None:
        dtype = DTYPES[recipe.dtype]
        self.fields = fields(model, recipe)
        self.resolution = recipe.resolution
        self.device = device
        self.itemsize = dtype.itemsize
        self._model, self._recipe = model, recipe
        self._clip = _Clip(model) if recipe.text != "none" else None
        self.networks = _load_networks(model, recipe.text, dtype, device)
        self._exact = self.networks if dtype == torch.float32 else None
        self._exact_lock = threading.Lock()
        self.is_compiled = recipe.compile
        if recipe.compile:
            self.networks = self.networks.compiled()

    def tokens(self, captions: Sequence[str]) -> list[Tokens]:
        if self._clip is None:
            return [Tokens(ids=[], count=0, cut=False) for _ in captions]
        return self._clip.tokens(captions)

    def encode(
        self, pixels: Tensor, ids: Tensor | None, noise: Tensor, *, exact: bool = False
    ) -> Encoded:
        networks = self._in_fp32() if exact else self.networks
        with self._whole(exact=exact), torch.inference_mode():
            found = self.values(networks, pixels, ids, noise)
            rows = [fits(value) for value in found.values() if value.is_floating_point()]
            ok = torch.stack(rows).all(0)
            return Encoded(arrays={name: stored(value) for name, value in found.items()}, ok=ok)

    def empty(self) -> dict[str, Tensor]:
        ids = torch.tensor([each.ids for each in self.tokens([""])], device=self.device)
        with self._whole(exact=True), torch.inference_mode():
            found = self.text_values(self.networks, ids)
            if not all(fits(value).all() for value in found.values()):
                found = self.text_values(self._in_fp32(), ids)
            return {name: stored(value)[0].cpu() for name, value in found.items()}

    def values(
        self, networks: "Networks", pixels: Tensor, ids: Tensor | None, noise: Tensor
    ) -> dict[str, Tensor]:
        """By field, what is to be stored, still in fp32."""
        moments = networks.moments(pixels)
        latents = moments if self._recipe.latents == "moments" else self._latents(moments, noise)
        return {LATENT: latents} | self.text_values(networks, ids)

    def text_values(self, networks: "Networks", ids: Tensor | None) -> dict[str, Tensor]:
        if self._recipe.text == "none" or ids is None:
            return {}
        if networks.text is None:
            return {TOKENS: ids.int()}
        return {EMB: networks.text(ids)}

    def _latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        latents, logvar = moments.chunk(2, dim=1)
        if self._recipe.latents == "sample":
            deviation = (0.5 * logvar.clamp(-30, 20)).exp()
            latents = latents + deviation * normal(noise, tuple(latents.shape[1:]))
        return (latents - self._model.shift) * self._model.scale

    def _whole(self, *, exact: bool) -> "contextlib.AbstractContextManager[None]":
        is_fp32 = exact or self._recipe.dtype == "fp32"
        return whole_fp32() if is_fp32 else contextlib.nullcontext()

    def _in_fp32(self) -> "Networks":
        with self._exact_lock:
            if self._exact is None:
                text, device = self._recipe.text, self.device
                self._exact = _load_networks(self._model, text, torch.float32, device)
            return self._exact


def fits(value: Tensor) -> Tensor:
    """For each row, whether all of it is finite and can be stored; NaN is less than nothing."""
    return value.abs().flatten(1).amax(1) <= STORED_MAX


def stored(value: Tensor) -> Tensor:
    return (value.half() if value.is_floating_point() else value).contiguous()


@dataclass(frozen=True, slots=True)
class Networks:
    """The two networks in one precision, on one device. Both give fp32."""

    moments: Callable[[Tensor], Tensor]
    text: Callable[[Tensor], Tensor] | None

    def compiled(self) -> "Networks":
        """Shapes are fixed, so that each is compiled once; a halved batch is compiled again."""
        moments = torch.compile(self.moments, dynamic=False)
        return Networks(moments, self.text and torch.compile(self.text, dynamic=False))


class _Moments(nn.Module):
    """uint8 pixels to the means and log-variances of their latents. No decoder is kept."""

    def __init__(self, vae: Any, layout: torch.memory_format) -> None:
        super().__init__()
        self.layout = layout
        self.encoder = vae.encoder
        self.quant = nn.Identity() if vae.quant_conv is None else vae.quant_conv
        self.dtype = vae.dtype

    def forward(self, pixels: Tensor) -> Tensor:
        image = 2 * (pixels.float() / 255) - 1  # to the bit what diffusers makes of it
        image = image.to(self.dtype, memory_format=self.layout)
        return cast(Tensor, self.quant(self.encoder(image)).float())


class _Text(nn.Module):
    """Token ids to the last hidden states, as diffusers' StableDiffusionPipeline takes them."""

    def __init__(self, model: Any, pad: int, end: int) -> None:
        super().__init__()
        self.model, self.pad, self.end = model, pad, end
        self.is_masked = bool(getattr(model.config, "use_attention_mask", False))

    def forward(self, ids: Tensor) -> Tensor:
        mask = self._mask(ids) if self.is_masked else None
        return cast(Tensor, self.model(ids, attention_mask=mask)[0].float())

    def _mask(self, ids: Tensor) -> Tensor:
        """What the tokenizer would have said: all up to the end token, which may be the padding."""
        places = torch.arange(ids.shape[1], device=ids.device)
        last = ((ids != self.pad) * places).amax(1, keepdim=True) + int(self.pad == self.end)
        return (places <= last).long()


class _Clip:
    """A CLIPTokenizer. Its library's own call sets the length on a shared object each time, which
    threads must not do at once, so cutting and padding are done here, with the same result."""

    def __init__(self, model: Model) -> None:
        tower = model.towers[0]
        tokenizer = _load_tokenizer(model)
        self._length, self._pad = tower.length, tokenizer.pad_token_id
        self._fast = tokenizer.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()

    def tokens(self, captions: Sequence[str]) -> list[Tokens]:
        return [self._fit(found.ids) for found in self._fast.encode_batch(list(captions))]

    def _fit(self, ids: list[int]) -> Tokens:
        count, length = len(ids), self._length
        if count > length:
            return Tokens(ids=[*ids[: length - 1], ids[-1]], count=count, cut=True)
        return Tokens(ids=ids + [self._pad] * (length - count), count=count, cut=False)


def _load_networks(model: Model, text: str, dtype: torch.dtype, device: torch.device) -> Networks:
    # On a CPU channels_last is a little faster, but over 1e-5 away from what diffusers computes. On
    # CUDA torch 2.15 keeps it in group norms too. Counted from shapes, an image at 256 moves 1.5 GB
    # through SD2's VAE in half precision. Older group norms turn 0.48 GB more to and fro, and cuDNN
    # up to 0.64 GB where all is contiguous. No GPU has measured this: on one,
    # `tools/bench encode --only encode-layouts` does.
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    moments = _Moments(load_vae(model, dtype), layout).eval().requires_grad_(False)
    moments = moments.to(memory_format=layout).to(device)
    if text != "emb":
        return Networks(moments, None)
    tokenizer = _load_tokenizer(model)
    tower = _load_text(model, dtype)
    states = _Text(tower, tokenizer.pad_token_id, tokenizer.eos_token_id)
    return Networks(moments, states.eval().requires_grad_(False).to(device))


def load_vae(
    model: Model, dtype: torch.dtype, needed: tuple[str, ...] = ("encoder.", "quant_conv.")
) -> Any:
    from diffusers import AutoencoderKL

    # Without low_cpu_mem_usage, which needs accelerate, diffusers loads just as well.
    options = {"torch_dtype": dtype, "low_cpu_mem_usage": False}
    return _load_weights(AutoencoderKL, model, model.vae, options, needed)


def _load_text(model: Model, dtype: torch.dtype) -> Any:
    from transformers import CLIPTextModel

    return _load_weights(CLIPTextModel, model, model.towers[0].folder, {"dtype": dtype}, ("",))


def _load_weights(
    kind: Any, model: Model, folder: str, options: dict[str, Any], needed: tuple[str, ...]
) -> Any:
    """Libraries make up what a file lacks, and merely log it: here it is an error."""
    from safetensors import SafetensorError

    files = [name for name in model.files if name.rpartition("/")[0] == folder]
    variant = "fp16" if any(".fp16." in name for name in files) else None
    path = Path(model.folder, folder)
    try:
        made, info = kind.from_pretrained(
            str(path),
            variant=variant,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        line = str(error).strip().partition("\n")[0]
        raise WorkError(f"{path} cannot be loaded as {kind.__name__}: {line}") from error
    lost = sorted(name for name in info["missing_keys"] if name.startswith(needed))
    if lost:
        raise WorkError(
            f"{path} lacks {plural(len(lost), 'tensor')} of {kind.__name__}, such as {lost[0]}"
        )
    return made


def _load_tokenizer(model: Model) -> Any:
    from transformers import CLIPTokenizer

    path = Path(model.folder, model.towers[0].tokenizer)
    try:
        return CLIPTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        line = str(error).strip().partition("\n")[0]
        raise WorkError(f"{path} cannot be loaded as CLIPTokenizer: {line}") from error


def silence() -> None:
    """Workers' stderr is the user's: what these libraries say there is of no use to one."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
