"""The encoding of captions: by a pipeline's own `encode_prompt`, or by one CLIPTextModel.

Of a pipeline only the parts for text are loaded. Stable Diffusion 1 and 2 need none: their text is
the last hidden states of one CLIPTextModel. The result is, to the bit, that of the pipeline's
`encode_prompt`, without the pipeline: all shapes are known from the configs, so a driver need not
import torch, and a batch is one call.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from wdsprep.dataset.npy_arrays import EMB, TOKENS
from wdsprep.encoding.models.base import DTYPES, InTwoPrecisions, Rows, Tokens, caption_batch_size
from wdsprep.encoding.models.dry_run import DryRun
from wdsprep.encoding.models.encode_prompt import ALONE, Row, assemble, full_lengths
from wdsprep.encoding.models.families import dtype_of_tower, member_name
from wdsprep.encoding.models.find_model import Component, Model
from wdsprep.encoding.models.load_networks import compile_network, load_tokenizer, load_tower
from wdsprep.encoding.recipe_options import Encode
from wdsprep.errors import WorkError

FRIENDS = ("a photo of a cat", "a photo of a dog")
"""Two captions that a tokenizer most likely makes equally many tokens of."""


Tokenize = Callable[[Sequence[str], Sequence[Any]], list[Tokens]]
"""A function from captions, and the reference images of each if text takes them, to tokens; several
threads may call it."""


def load_text_encoder(model: Model, recipe: Encode, device: torch.device) -> "TokenIds":
    if recipe.text == "none":
        return TokenIds(lambda _captions, _images: [], device)
    if recipe.text == "emb":
        return (PipelineText if model.components else ClipText)(model, recipe, device)
    if not model.components:
        return TokenIds(partial(clip_tokens, load_clip_tokenizer(model)), device)
    dry_run = DryRun(model, recipe.text_length, recipe.dtype, width=1)

    def tokenize(captions: Sequence[str], _images: Sequence[Any]) -> list[Tokens]:
        """Return the tokens of captions without their shapes, so that all may share a batch."""
        return [replace(tokens, shape=()) for tokens in dry_run.try_tokens(captions)]

    return TokenIds(tokenize, device)


class TokenIds:
    """A text encoder that returns the ids of tokens alone, and the base of those with a network."""

    batch_size = 0
    """how many captions make a batch; 0: as many as images"""
    has_shapes = False
    """whether the tokens of captions have several shapes, which share no batch"""
    takes_images = False
    network: InTwoPrecisions | None = None
    """what takes memory on the device"""

    def __init__(self, tokens: Tokenize, device: torch.device) -> None:
        self.tokens, self._device = tokens, device

    def rows(self, texts: Sequence[Tokens], *, exact: bool) -> Rows:  # noqa: ARG002  they are
        """Encode captions of one shape, in fp32 if `exact`, and perhaps without it."""
        names = texts[0].ids
        ids = {name: torch.tensor([list(text.ids[name]) for text in texts]) for name in names}
        return Rows({name: rows.to(self._device) for name, rows in ids.items()})

    def empty(self, *, exact: bool) -> Rows:
        """Encode a caption that is left out in training."""
        return self.rows(self.tokens([""], ()), exact=exact)


def copy_by_thread(whole: Any, tokenizers: Sequence[str]) -> Callable[[], Any]:
    """Return a function that returns a copy of a pipeline, one for each thread.

    They share the text encoders, but not the tokenizers: fast tokenizers store length and padding
    in themselves, and pipelines call them in several ways.
    """
    here, copying = threading.local(), threading.Lock()

    def pipeline_of_thread() -> Any:
        if not hasattr(here, "pipeline"):
            with copying:
                pipeline = copy.copy(whole)
                for name in tokenizers:
                    tokenizer = copy.deepcopy(getattr(pipeline, name))
                    object.__setattr__(pipeline, name, tokenizer)
            here.pipeline = pipeline
        return here.pipeline

    return pipeline_of_thread


class PipelineText(TokenIds):
    """A text encoder that runs the `encode_prompt` of a pipeline on one device."""

    def __init__(self, model: Model, recipe: Encode, device: torch.device) -> None:
        nbytes = sum(field.array_nbytes for field in model.outputs)
        towers = [part.kind for part in model.components if part.has_weights]
        self.batch_size = caption_batch_size(towers, nbytes, device)
        dry_run = DryRun(model, recipe.text_length, recipe.dtype, width=1)
        super().__init__(dry_run.try_tokens, device)
        self._call = dry_run.call
        if self._call.is_alone:
            self.batch_size = 1
        self._fields = {field.name: field for field in model.outputs}

        def load(dtype: str) -> Callable[[], Any]:
            def encoder_of(part: Component, kind: Any) -> Any:
                part_dtype = DTYPES[dtype_of_tower(dtype, self._call.name, part.kind)]
                tower = load_tower(kind, model, part.name, part_dtype)
                return tower.eval().requires_grad_(False).to(device)

            tokenizers = [part.name for part in model.components if not part.has_weights]
            return copy_by_thread(assemble(self._call.kind, model, encoder_of), tokenizers)

        self._pipelines = self.network = InTwoPrecisions(load, recipe.dtype)
        self.takes_images = self._call.takes_images
        one, other = (dry_run.tokens(caption, dry_run.blanks[0]) for caption in FRIENDS)
        self.has_shapes = bool(one.shape or other.shape)
        # A caption's arrays must not depend on its companions in the batch. Values that are not
        # finite are compared as zero: such a row is computed again, or becomes a reject.
        friend = other if one.shape == other.shape else one
        with torch.inference_mode():
            first, second = (self.rows([one, each], exact=False) for each in (friend, one))
        for name, array in first.arrays.items():
            if not torch.equal(array[0].nan_to_num(), second.arrays[name][0].nan_to_num()):
                raise WorkError(
                    f"{self._call.name} cannot be used for text, as its encode_prompt makes "
                    f"another {name} of the same caption each time: {ALONE}"
                )

    def rows(self, texts: Sequence[Tokens], *, exact: bool) -> Rows:
        pipeline, made = self._pipelines.get(exact=exact)(), []
        for batch in [[text] for text in texts] if self._call.is_alone else [texts]:
            captions = [text.caption for text in batch]
            images = copy.deepcopy(batch[0].images)  # which pipelines may change
            outputs = self._call.outputs(pipeline, self._device, captions, images=images)
            made.append(self._rows(self._call.rows(outputs)))
        if len(made) == 1:
            return made[0]
        arrays = {
            name: pad_sequence([rows.arrays[name][0] for rows in made], batch_first=True)
            for name in made[0].arrays
        }
        lengths = [rows.lengths for rows in made if rows.lengths is not None]
        return Rows(arrays, torch.cat(lengths) if lengths else None)

    def empty(self, *, exact: bool) -> Rows:
        if self._call.takes_images:
            raise ValueError("text that depends on images has an empty caption for each sample")
        return self._rows(self._call.negative(self._pipelines.get(exact=exact)(), self._device))

    def _rows(self, outputs: Mapping[str, Row]) -> Rows:
        """Return the outputs of the pipeline by field; raise WorkError if their shapes are others.

        The dry run has told the shapes.
        """
        named = {member_name(name, self._call.first): row[0] for name, row in outputs.items()}
        arrays = {name: array for name, array in named.items() if name in self._fields}
        value, lengths = outputs[self._call.first]
        if self._fields[EMB].is_variable and lengths is None:
            lengths = full_lengths(value)
        for name, array in arrays.items():
            field, shape = self._fields[name], tuple(array.shape[1:])
            fits = shape == field.shape
            if field.is_variable:
                fits = shape[0] <= field.shape[0] and shape[1:] == field.shape[1:]
            if not fits:
                raise WorkError(
                    f"{self._call.name} gives {name} of {shape}, where {field.shape} was expected "
                    f"before its networks were loaded: {ALONE}"
                )
        return Rows(arrays, lengths)


def load_clip_tokenizer(model: Model) -> Any:
    """Return a model's CLIPTokenizer, for threads to share by `clip_tokens`.

    Its `model_max_length` becomes what the text encoder takes. A call of the library's tokenizer
    sets the length on a shared object, which threads must not do at once. So cutting and padding
    are done here, with the same result.
    """
    from transformers import CLIPTokenizer

    tokenizer = load_tokenizer(model, CLIPTokenizer, "tokenizer")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.model_max_length, *_ = model.outputs[0].shape
    return tokenizer


def clip_tokens(
    tokenizer: Any, captions: Sequence[str], _images: Sequence[Any] = ()
) -> list[Tokens]:
    tokens, length = [], tokenizer.model_max_length
    encoded = tokenizer.backend_tokenizer.encode_batch(list(captions))
    for caption, ids in zip(captions, (row.ids for row in encoded), strict=True):
        is_cut = len(ids) > length
        fitting = [*ids[: length - 1], ids[-1]] if is_cut else ids
        padded = fitting + [tokenizer.pad_token_id] * (length - len(fitting))
        tokens.append(Tokens(caption=caption, ids={TOKENS: padded}, count=len(ids), cut=is_cut))
    return tokens


class ClipText(TokenIds):
    """A text encoder that returns the last hidden states of a CLIPTextModel."""

    def __init__(self, model: Model, recipe: Encode, device: torch.device) -> None:
        tokenizer = load_clip_tokenizer(model)
        super().__init__(partial(clip_tokens, tokenizer), device)

        def load(dtype: str) -> Any:
            tower = load_tower(CLIPTextModel, model, "text_encoder", DTYPES[dtype])
            return _LastStates(tower, tokenizer.pad_token_id, tokenizer.eos_token_id).to(device)

        from transformers import CLIPTextModel

        prepare = compile_network if recipe.compile else None
        dtype = dtype_of_tower(recipe.dtype, "", CLIPTextModel.__name__)
        self._towers = self.network = InTwoPrecisions(load, dtype, prepare)

    def rows(self, texts: Sequence[Tokens], *, exact: bool) -> Rows:
        pin = self._device.type == "cuda"  # else a copy waits for the batch before
        ids = torch.tensor([text.ids[TOKENS] for text in texts], pin_memory=pin)
        ids = ids.to(self._device, non_blocking=True)
        return Rows({EMB: self._towers.get(exact=exact)(ids)})


class _LastStates(nn.Module):
    """The network from token ids to last hidden states, as in diffusers' Stable Diffusion."""

    def __init__(self, model: Any, pad: int, end: int) -> None:
        super().__init__()
        self.model, self.pad, self.end = model, pad, end
        self.is_masked = bool(getattr(model.config, "use_attention_mask", False))

    def forward(self, ids: Tensor) -> Tensor:
        mask = None
        if self.is_masked:  # as the tokenizer would give it: to the end token, perhaps the padding
            places = torch.arange(ids.shape[1], device=ids.device)
            last = ((ids != self.pad) * places).amax(1, keepdim=True) + int(self.pad == self.end)
            mask = (places <= last).long()
        return cast(Tensor, self.model(ids, attention_mask=mask)[0].float())
