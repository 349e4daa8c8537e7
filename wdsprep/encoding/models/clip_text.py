"""The text encoder of Stable Diffusion 1 and 2: the last hidden states of one CLIPTextModel.

The result is, to the bit, that of the pipeline's `encode_prompt`, without the pipeline: all shapes
are known from the configs, so a driver need not import torch, and a batch is one call.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from wdsprep.dataset.npy_arrays import EMB, TOKENS
from wdsprep.encoding.models.base import DTYPES, InTwoPrecisions, Rows, Tokens
from wdsprep.encoding.models.compiled import CompiledNetwork
from wdsprep.encoding.models.encode_prompt import dtype_of_tower
from wdsprep.encoding.models.find_model import Model
from wdsprep.encoding.models.load_networks import load_tokenizer, load_tower
from wdsprep.encoding.recipe_options import Recipe


class ClipTokens:
    """A CLIPTokenizer that threads may share.

    A call of the library's tokenizer sets the length on a shared object, which threads must not do
    at once. So cutting and padding are done here, with the same result.
    """

    def __init__(self, model: Model) -> None:
        from transformers import CLIPTokenizer

        tower = model.towers[0]
        tokenizer = load_tokenizer(model, CLIPTokenizer, tower.tokenizer)
        self.pad, self.end = tokenizer.pad_token_id, tokenizer.eos_token_id
        self._length = tower.length
        self._fast = tokenizer.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()

    def tokens(self, captions: Sequence[str]) -> list[Tokens]:
        found = self._fast.encode_batch(list(captions))
        return [self._fit(text, one.ids) for text, one in zip(captions, found, strict=True)]

    def _fit(self, caption: str, ids: list[int]) -> Tokens:
        count, length = len(ids), self._length
        fit = [*ids[: length - 1], ids[-1]] if count > length else ids
        padded = fit + [self.pad] * (length - len(fit))
        return Tokens(caption=caption, ids={TOKENS: padded}, count=count, cut=count > length)


class ClipText:
    """A text encoder that returns the last hidden states of a CLIPTextModel."""

    batch_size, has_shapes = 0, False

    def __init__(self, model: Model, recipe: Recipe, device: torch.device) -> None:
        tokens = ClipTokens(model)
        self.tokens, self._device = tokens.tokens, device

        def load(dtype: str) -> Any:
            tower = load_tower(CLIPTextModel, model, model.towers[0].folder, DTYPES[dtype])
            return _LastStates(tower, tokens.pad, tokens.end).to(device)

        from transformers import CLIPTextModel

        prepare = CompiledNetwork if recipe.compile else None
        dtype = dtype_of_tower(recipe.dtype, "", CLIPTextModel.__name__)
        self.network: InTwoPrecisions[Any] = InTwoPrecisions(load, dtype, prepare)

    def rows(self, texts: Sequence[Tokens], *, exact: bool) -> Rows:
        pin = self._device.type == "cuda"  # else a copy waits for the batch before
        ids = torch.tensor([text.ids[TOKENS] for text in texts], pin_memory=pin)
        ids = ids.to(self._device, non_blocking=True)
        return Rows({EMB: self.network.get(exact=exact)(ids)})

    def empty(self, *, exact: bool) -> Rows:
        return self.rows(self.tokens([""]), exact=exact)


class _LastStates(nn.Module):
    """The network from token ids to last hidden states, as in diffusers' Stable Diffusion."""

    def __init__(self, model: Any, pad: int, end: int) -> None:
        super().__init__()
        self.model, self.pad, self.end = model, pad, end
        self.is_masked = bool(getattr(model.config, "use_attention_mask", False))

    def forward(self, ids: Tensor) -> Tensor:
        mask = self._mask(ids) if self.is_masked else None
        return cast(Tensor, self.model(ids, attention_mask=mask)[0].float())

    def _mask(self, ids: Tensor) -> Tensor:
        """Return the mask that the tokenizer would give: all tokens up to the end token.

        The end token may also be the padding.
        """
        places = torch.arange(ids.shape[1], device=ids.device)
        last = ((ids != self.pad) * places).amax(1, keepdim=True) + int(self.pad == self.end)
        return (places <= last).long()
