"""The inputs and outputs of encoders, and the protocols that encoders follow.

`encoder` puts the parts together: a VAE (`vae`), and a text encoder (`text_encoders`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from wdsprep.dataset.npy_arrays import BFLOAT16, Field, is_of_text, text_fields
from wdsprep.encoding import TF32
from wdsprep.encoding.models.batch_size import is_out_of_memory
from wdsprep.errors import WorkError

T = TypeVar("T")
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    TF32: torch.float32,  # in memory: only what convolutions multiply is rounded
    "fp32": torch.float32,
}
TENSORS = {
    "<f2": torch.float16,
    "<f4": torch.float32,
    "<i4": torch.int32,
    "|u1": torch.uint8,
    BFLOAT16: torch.bfloat16,
}
"""Types of arrays, by what the layout calls them."""
TokenizerResultKey = tuple[str, str, str]
"""A call of a pipeline's tokenizer: its name, a text and the options."""
TokenizerResult = Mapping[str, NDArray[Any]]
"""What a tokenizer made of a single text: the ids, and where it does, the mask."""


class Part(Flag):
    """The part of a sample: its image, its text, or both."""

    IMAGE = auto()
    TEXT = auto()
    BOTH = IMAGE | TEXT

    @classmethod
    def of(cls, fields: Sequence[Field]) -> "Part":
        """Return the part of a sample from which these arrays are made."""
        if is_of_text(fields):
            return cls.TEXT
        return cls.BOTH if text_fields(fields) else cls.IMAGE


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a caption: their ids, their number, and whether the caption was cut."""

    caption: str
    count: int = 0
    """with start, end and template, before anything was cut"""
    cut: bool = False
    ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """by the member that would hold them, padded to what an encoder takes"""
    shape: tuple[int, ...] = ()
    """Captions of one shape may share a batch: what becomes of one does not depend on others'."""
    results: Mapping[TokenizerResultKey, TokenizerResult] = field(
        default_factory=dict, compare=False, repr=False
    )
    """what tokenizers made of it alone, so that its batch need not be tokenized again"""


@dataclass(frozen=True, slots=True)
class Rows:
    """The output of a network for a batch: an array (B, *shape) for each field.

    If captions have different lengths, values after the length of a row have no meaning.
    """

    arrays: dict[str, Tensor]
    lengths: Tensor | None = None


class TextEncoder(Protocol):
    @property
    def batch_size(self) -> int:
        """Return how many captions make a batch; 0 means as many as images."""

    @property
    def has_shapes(self) -> bool:
        """Return whether the tokens of captions have several shapes, which share no batch."""

    @property
    def network(self) -> "InTwoPrecisions[Any] | None":
        """Return the network that takes memory on the device, or None if there is none."""

    def tokens(self, captions: Sequence[str]) -> list[Tokens]:
        """Return the tokens of captions; several threads may call this at once."""

    def rows(self, texts: Sequence[Tokens], *, exact: bool) -> Rows:
        """Encode captions of one shape, in fp32 if `exact`.

        A result may be in fp32 without it too.
        """

    def empty(self, *, exact: bool) -> Rows:
        """Return one row, for a caption that is left out in training."""


@dataclass(frozen=True, slots=True)
class Encoded:
    arrays: dict[str, Tensor]
    """by field, (B, *shape) in the storage dtype, on the device"""
    ok: Tensor
    """bool (B,): whether all values of the row were finite and within the storage dtype's range"""
    lengths: Tensor | None = None
    """the length of each row of the variable field"""


class Encoder(Protocol):
    """A model that is loaded onto one device and encodes images and captions."""

    fields: tuple[Field, ...]
    resolution: int
    device: torch.device
    itemsize: int
    """bytes of a number while the VAE works"""
    is_compiled: bool
    """whether the first batch of a size takes much longer"""
    has_text: bool
    """whether anything is made of captions"""
    text_batch_size: int
    """the captions of a batch; 0: as many as images"""
    groups_texts: bool
    """whether captions are of several shapes"""
    is_split: bool
    """whether the device holds what encodes images or captions, but never both"""

    def bring(self, part: "Part") -> None:
        """Make the device ready to encode a part of samples.

        If the device cannot hold all networks, those for the other part are removed from it.
        """

    def tokens(self, captions: Sequence[str]) -> list[Tokens]:
        """Return the tokens of captions.

        Several threads may call this and the other methods at once.
        """

    def encode_images(self, pixels: Tensor, noise: Tensor, *, exact: bool = False) -> Encoded:
        """Encode pixels, uint8 (B, 3, H, W), with int64 (B,) keys of noise, all on the device."""

    def encode_texts(self, texts: Sequence[Tokens], *, exact: bool = False) -> Encoded:
        """Encode captions whose tokens have one shape."""

    def empty(self) -> dict[str, Tensor]:
        """Return the arrays of the empty caption, on the host, by field."""


class NoRoomError(RuntimeError):
    """The lack of memory for a network in fp32, which a smaller batch would not mend."""


class InTwoPrecisions(Generic[T]):
    """A network in its usual precision and in fp32, each loaded when it is first used.

    If fp32 did not fit into memory once, it is not tried again: a network may have 19 GB.
    """

    def __init__(
        self, load: Callable[[str], T], dtype: str, prepare: Callable[[T], T] | None = None
    ) -> None:
        """Keep the functions that load the network and prepare it for many batches.

        Only the network in its usual precision is prepared: in fp32 it computes few batches.
        """
        self._load, self._lock, self._dtype = load, Lock(), dtype
        self._prepare = prepare or (lambda loaded: loaded)
        self._loaded: dict[str, T] = {}
        self._has_room = True

    def get(self, *, exact: bool = False) -> T:
        dtype = "fp32" if exact else self._dtype
        with self._lock:
            if dtype not in self._loaded:
                self._loaded[dtype] = (
                    self._prepare(self._load(dtype))
                    if dtype == self._dtype
                    else self._load_exact(dtype)
                )
            return self._loaded[dtype]

    def _load_exact(self, dtype: str) -> T:
        if self._has_room:
            try:
                return self._load(dtype)
            except (RuntimeError, MemoryError, WorkError) as error:
                cause = error.__cause__ if isinstance(error, WorkError) else None
                if not is_out_of_memory(cause or error, free=0, wanted=0):
                    raise
            self._has_room = False
        raise NoRoomError(f"there is no memory for a network in {dtype}")  # nor for what was loaded

    def release(self) -> None:
        """Free the memory of the network, which is loaded again when it is needed."""
        self._loaded.clear()


class TokenIds:
    """A text encoder that returns the ids of tokens alone, and needs no network."""

    batch_size, has_shapes, network = 0, False, None

    def __init__(
        self, tokens: Callable[[Sequence[str]], list[Tokens]], device: torch.device
    ) -> None:
        self._tokens, self._device = tokens, device

    def tokens(self, captions: Sequence[str]) -> list[Tokens]:
        """Return the tokens of captions without their shapes, so that all may share a batch."""
        return [replace(found, shape=(), results={}) for found in self._tokens(captions)]

    def rows(self, texts: Sequence[Tokens], *, exact: bool) -> Rows:  # noqa: ARG002  they are
        names = texts[0].ids
        found = {name: torch.tensor([list(text.ids[name]) for text in texts]) for name in names}
        return Rows({name: ids.to(self._device) for name, ids in found.items()})

    def empty(self, *, exact: bool) -> Rows:
        return self.rows(self.tokens([""]), exact=exact)
