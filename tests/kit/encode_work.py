"""Encoders for encoding/test_faults.py, imported from here by workers, and a command with them.

They need torch alone, so a worker is ready in half the time that it takes to load the tiny model.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import avg_pool2d

from wdsprep.dataset.chunks import Chunks
from wdsprep.encoding import encode as encoding
from wdsprep.encoding.models.base import Encoded, Tokens
from wdsprep.encoding.models.device import Encoder
from wdsprep.encoding.models.find_model import Model
from wdsprep.encoding.recipe_options import Encode
from wdsprep.encoding.sample_arrays import fields


@dataclass(frozen=True, kw_only=True)
class Making:
    """Takes the place of `encode.make_encoder`."""

    harms: bool = False
    """Whether a white image kills the worker, and a black one fails."""
    pause_s: float = 0.0
    """For each batch, so that there is time for a fault."""
    chunk_nbytes: int = 0
    """How much of a tar is read at a time."""

    def __call__(self, model: Model, recipe: Encode, device: str) -> "Plain":
        if self.chunk_nbytes:
            assert Chunks.__init__.__kwdefaults__
            Chunks.__init__.__kwdefaults__["chunk_nbytes"] = self.chunk_nbytes
        return Plain(self, model, recipe, torch.device(device.replace("cuda", "cpu")))


class Plain(Encoder):
    """Latents are shrunken pixels and noise, embeddings are the letters of the caption."""

    def __init__(self, making: Making, model: Model, recipe: Encode, device: torch.device) -> None:
        self.fields = fields(model, recipe)
        self.resolution, self.device = recipe.resolution, device
        self.has_text = recipe.text != "none"
        self._making, self._factor = making, model.factor

    def tokens(self, captions: Sequence[str], _images: object = ()) -> list[Tokens]:
        length = self.fields[-1].shape[0]
        sizes = [len(caption.encode()) for caption in captions]
        return [
            Tokens(text, count=1 + min(length, size), cut=size > length)
            for text, size in zip(captions, sizes, strict=True)
        ]

    def encode_images(
        self, pixels: torch.Tensor, noise: torch.Tensor | None = None, *, exact: bool = False
    ) -> Encoded:
        assert not exact
        time.sleep(self._making.pause_s)
        if self._making.harms and bool((pixels.amin((1, 2, 3)) == 255).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._making.harms and bool((pixels.amax((1, 2, 3)) == 0).any()):
            raise RuntimeError("an illegal memory access was encountered")
        small = avg_pool2d(pixels.float() / 255, self._factor)
        channels = [n % 3 for n in range(self.fields[0].shape[0])]
        clear = small[:, channels]
        keys = torch.zeros(1, dtype=torch.int64) if noise is None else noise & 1023
        noisy = clear + keys.reshape(-1, 1, 1, 1) / 1024  # of its key
        arrays = {"latent.npy": noisy.half()}
        return Encoded(arrays=arrays, ok=torch.ones(len(pixels), dtype=torch.bool))

    def encode_texts(self, texts: Sequence[Tokens], *, exact: bool = False) -> Encoded:
        assert not exact
        length, width = self.fields[-1].shape
        rows = [list(text.caption.encode()[:length]) for text in texts]
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        made = (ids / 256).half().unsqueeze(2).expand(-1, -1, width).contiguous()
        return Encoded(arrays={"emb.npy": made}, ok=torch.ones(len(texts), dtype=torch.bool))

    def empty(self) -> dict[str, torch.Tensor]:
        if not self.has_text:
            return {}
        return {"emb.npy": torch.zeros(self.fields[-1].shape, dtype=torch.float16)}


def command(*arguments: str) -> None:
    """`wdsprep` as a process of its own, with encoders that do harm."""
    from wdsprep.__main__ import main

    encoding.make_encoder = Making(harms=True)  # type: ignore[assignment]
    sys.argv[1:] = arguments
    sys.exit(main())
