"""The dry run of a pipeline, which tells the tokens of captions and the shapes of its arrays.

`encode_prompt` is run with encoders that compute nothing: each gives zeros of the shapes that its
config tells. So it is known, before any weights are loaded, how many tokens a caption has, whether
it was cut, and which captions have one shape for an encoder; and also the shapes and dtypes of the
arrays (`find_outputs`).

It is run with one caption at a time. The result for several captions may depend on all of them
(padding to the longest, one call of a tokenizer for each, an encoder that only some captions need),
and the calls do not prove that it does not. Only tokenizers get many captions in one call, as
they are known to treat each by itself (`caption_tokens`). With the pipelines of the tests a
caption then takes 0.3 to 1.3 ms, and 0.3 to 1.7 if tokenizers are called for it alone (SDXL 0.6
and 0.9). Encoders on a GPU take longer than that, except perhaps those of SDXL if text alone is
encoded.
"""

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from wdsprep.dataset.npy_arrays import BFLOAT16, MASK, OF_SIZES, Field
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.encoding import HALF
from wdsprep.encoding.models.base import DTYPES, TokenizerResult, TokenizerResultKey, Tokens
from wdsprep.encoding.models.caption_tokens import (
    EncoderInput,
    TokenizerCall,
    call_unwrapped,
    combine_tokens,
    encoder_input,
    is_result,
    join_results,
    split_result,
    to_list,
    wrap_calls,
)
from wdsprep.encoding.models.encode_prompt import (
    ALONE,
    PromptCall,
    Row,
    assemble,
    dtype_of_tower,
    explain_pipeline_errors,
    find_class,
    pipeline_class,
    pipeline_error,
)
from wdsprep.encoding.models.families import is_mask, member_name
from wdsprep.encoding.models.find_model import Model
from wdsprep.encoding.models.load_networks import load_config, load_tokenizer, silence_libraries
from wdsprep.encoding.models.pipeline_parts import Component
from wdsprep.encoding.recipe_options import Recipe
from wdsprep.errors import UsageError, WorkError

_log = logging.getLogger("wdsprep")

CPU = torch.device("cpu")
LONG = "a " * 2000  # more words than any encoder takes
SHORT = "A  <b>photo</b> of M&amp;Ms"
"""A caption with something to clean: some pipelines do so if further packages are installed."""
TOGETHER, SHORT_LETTERS = 64, 4_000
"""How many captions a tokenizer gets in one call, and the length of those that are given so."""
SIZE_ARGUMENTS = {"original_size", "crops_coords_top_left"}
"""A pipeline that has these asks for the size to make too, as `target_size` or otherwise."""


def find_outputs(model: Model, recipe: Recipe) -> Model:
    """Return the model with the fields that its pipeline makes, and the settings that decide them.

    Without text these are only the arrays that are made from the sizes of images.
    """
    if model.pipeline is None:
        return replace(model, outputs=_size_fields_by_name(model.pipeline_kind))
    silence_libraries()
    kind = pipeline_class(model)
    call = PromptCall(kind, recipe.text_length)
    dry_run = DryRun(model, call, HALF if recipe.dtype == "fp32" else recipe.dtype)
    settings = {
        "pipeline": call.name,
        "template": dry_run.template(),
        "text_arguments": {k: v for k, v in call.arguments.items() if _is_setting(k, v)},
    }
    if recipe.text == "tokens":
        outputs = (*_token_fields(dry_run, call), *_size_fields(kind))
        return replace(model, outputs=outputs, text_settings=settings)
    if layers := dry_run.layers():
        settings["layers"] = layers
    fields = _find_fields(dry_run, call)
    variable = [field for field in fields if field.is_variable]
    fixed = [field for field in fields if not field.is_variable]
    if variable:  # captions of one length together have nothing to mask
        fixed = [field for field in fixed if field.name != MASK]
    outputs = (*fixed, *_size_fields(kind), *variable)
    return replace(model, outputs=outputs, text_settings=settings)


def token_source(model: Model, recipe: Recipe) -> Callable[[Sequence[str]], list[Tokens]]:
    call = PromptCall(pipeline_class(model), recipe.text_length)
    return DryRun(model, call, recipe.dtype, width=1).try_tokens


def _is_setting(name: str, value: Any) -> bool:
    """Return whether an argument of `encode_prompt` is stored in the settings.

    Numbers and truth values are, and lists of them, unless the name begins with num_. Texts are
    not: the digest of the tokenizers' input covers them.
    """
    if name.startswith("num_"):
        return False
    parts = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(part, bool | int | float) for part in parts)


def _token_fields(dry_run: "DryRun", call: PromptCall) -> tuple[Field, ...]:
    found, long = dry_run.tokens([SHORT, LONG])
    if len(found.ids) != 2 * dry_run.towers:  # ids and mask of each
        raise UsageError(
            f"{call.name} changes the tokens, or gives an encoder only a part of each caption, so "
            "tokens cannot be stored: leave --text tokens out"
        )
    if [*map(len, found.ids.values())] != [*map(len, long.ids.values())]:
        raise UsageError(
            f"{call.name} does not pad tokens to one length, so they cannot be stored: leave "
            "--text tokens out"
        )
    return tuple(
        Field(name=name, dtype="|u1" if is_mask(name) else "<i4", shape=(len(ids),))
        for name, ids in found.ids.items()
    )


def _find_fields(dry_run: "DryRun", call: PromptCall) -> list[Field]:
    short, long = dry_run.outputs(SHORT), dry_run.outputs(LONG)
    fields = []
    for name, (value, lengths) in long.items():
        is_longer = lengths is not None or value.shape != short[name][0].shape
        if is_longer and name != call.first:
            raise UsageError(
                f"{call.name} gives {name} with the length of the caption, which cannot be stored: "
                f"{ALONE}"
            )
        if is_longer and not call.is_trimmed and not dry_run.tokens([LONG])[0].cut:
            raise UsageError(
                f"{call.name} has no limit for the length of captions: give one with --text-length"
            )
        fields.append(
            Field(
                name=member_name(name, call.first),
                dtype="|u1" if is_mask(name) else _storage_dtype(value.dtype),
                shape=tuple(value.shape[1:]),
                is_variable=is_longer,
            )
        )
    return fields


def _storage_dtype(dtype: torch.dtype) -> str:
    """Return the dtype in which values are stored: fp16 for fp16, and bf16 for all others."""
    return "<f2" if dtype == torch.float16 else BFLOAT16


def _size_fields_by_name(name: str) -> tuple[Field, ...]:
    """Return the fields made from sizes of images, for the name of a pipeline's class.

    There are none if the diffusers here does not know the class.
    """
    kind = find_class(name)
    return () if kind is None else _size_fields(kind)


def _size_fields(kind: Any) -> tuple[Field, ...]:
    """Return the fields made from sizes of images that a pipeline's denoiser needs.

    The arguments of `__call__` tell them.
    """
    if not inspect.signature(kind.__call__).parameters.keys() >= SIZE_ARGUMENTS:
        return ()
    together, *each = OF_SIZES
    if "unet" in inspect.signature(kind.__init__).parameters:  # takes them as one
        return (Field(name=together, dtype="<i4", shape=(6,)),)
    return tuple(Field(name=name, dtype="<i4", shape=(2,)) for name in each)


class DryRun:
    """A pipeline whose text encoders compute nothing, so that it only tells tokens and shapes."""

    def __init__(self, model: Model, call: PromptCall, dtype: str, width: int = 0) -> None:
        """Build the pipeline without weights.

        `width` is a width for all arrays, if their shapes do not matter; 0 keeps the real ones.
        """
        self._call, self._lock = call, threading.Lock()
        self._calls: list[TokenizerCall] = []
        self._caption = ""
        """the caption of the last run"""
        self._known: dict[TokenizerResultKey, TokenizerResult] = {}
        """what tokenizers have made of the captions that are being run"""
        self._taken = 0
        """how many calls of tokenizers had been made when an encoder was last run"""
        self._given: dict[str, list[EncoderInput]] = {}
        self._towers: dict[str, EmptyEncoder] = {}

        def load(part: Component, kind: Any) -> Any:
            if not part.has_weights:
                return self._watch_tokenizer(part.name, load_tokenizer(model, kind, part.name))
            own = dtype_of_tower(dtype, call.name, part.kind)
            config = load_config(model, kind, part.name)
            made = self._towers[part.name] = EmptyEncoder(
                part, config, DTYPES[own], self._note_input, width
            )
            return made

        self._pipeline = assemble(model, load)
        call.check_length(self._pipeline)

    @property
    def towers(self) -> int:
        return len(self._towers)

    def outputs(self, caption: str) -> dict[str, Row]:
        """Return the outputs for a caption, as zeros of their shapes."""
        with self._lock:
            return self._call.rows(self._run(caption))

    def tokens(self, captions: Sequence[str]) -> list[Tokens]:
        with self._lock:
            return [self._tokens(caption) for caption in captions]

    def try_tokens(self, captions: Sequence[str]) -> list[Tokens]:
        """Return the tokens of captions; those on which the pipeline's code fails have no tokens.

        The sample of such a caption becomes a reject, as the code has worked with others before.
        """
        with self._lock:
            self._tokenize_together(captions)
            return [self._tokens_or_none(caption) for caption in captions]

    def _tokenize_together(self, captions: Sequence[str]) -> None:
        """Call each tokenizer for many captions at once, and keep the result for each caption.

        The calls are those of the last run, with these captions in place of that run's caption.
        Long captions are left out, as all others would be padded to their length. Errors are
        ignored: a text whose result is not known is tokenized when the pipeline asks for it.
        """
        known = self._results()
        calls = [one for one in self._calls if not known.keys().isdisjoint(one.keys[:1])]
        self._known.clear()
        if not self._caption or len(captions) < 2:
            return
        short = [caption for caption in captions if len(caption) <= SHORT_LETTERS]
        for first in range(0, len(short), TOGETHER):
            some = short[first : first + TOGETHER]
            for call in calls:
                head, last, tail = call.texts[0].partition(self._caption)
                if last:
                    self._call_for_texts(call, [f"{head}{caption}{tail}" for caption in some])

    def _call_for_texts(self, call: TokenizerCall, texts: list[str]) -> None:
        """Call a tokenizer as in `call`, but for other texts, and keep the results."""
        with contextlib.suppress(WorkError), explain_pipeline_errors(self._call.name):
            made = call_unwrapped(call.tokenizer, texts, **call.options)
            self._note_results(replace(call, texts=texts, made=made))

    def _note_results(self, call: TokenizerCall) -> None:
        rows = split_result(call.made, call.tokenizer, call.options)
        self._known.update(zip(call.keys, rows, strict=False))

    def _results(self) -> dict[TokenizerResultKey, TokenizerResult]:
        """Return the known results of the last run's tokenizer calls that had one text each."""
        keys = [key for one in self._calls if len(one.texts) == 1 for key in one.keys]
        return {key: self._known[key] for key in keys if key in self._known}

    def _tokens_or_none(self, caption: str) -> Tokens:
        try:
            return self._tokens(caption)
        except WorkError as error:
            _log.debug("no tokens are made of a caption: %s", error)
            return Tokens(caption)

    def _tokens(self, caption: str) -> Tokens:
        made = self._run(caption)
        given = [rows[0] for rows in self._given.values() if len(rows) == 1]
        if not given:
            raise pipeline_error(self._call.name, WorkError("no encoder is given the caption once"))
        found = replace(combine_tokens(caption, given), results=self._results())
        if not self._call.is_masked:
            return found
        _, lengths = self._call.rows(made)[self._call.first]
        if lengths is None:
            return found
        # The pipeline may cut the caption after its encoder.
        is_cut = found.count - self._template_length > int(lengths[0])
        return replace(found, cut=found.cut or is_cut)

    @cached_property
    def _template_length(self) -> int:
        """Return the number of tokens that the encoder gets and the pipeline's output lacks."""
        made = self._run(SHORT)
        (given,) = (rows[0] for rows in self._given.values())
        _, lengths = self._call.rows(made)[self._call.first]
        return max(0, given.count - (0 if lengths is None else int(lengths[0])))

    def template(self) -> str:
        """Return a digest of the tokenizers' input for one caption.

        It changes with the words around a caption, and with the way in which captions are cleaned.
        """
        with self._lock:
            self._run(SHORT)
            asked = [(one.name, one.texts, to_list(one.made["input_ids"])) for one in self._calls]
        return hex_digest(repr(asked).encode("utf-8", "replace"))[:32]

    def layers(self) -> dict[str, list[Any]]:
        """Return the indices of the hidden states that the pipeline uses, by the encoder's name.

        Encoders of which it uses none are left out.
        """
        return {name: tower.taken for name, tower in self._towers.items() if tower.taken}

    def _run(self, caption: str) -> dict[str, Any]:
        self._calls.clear()
        self._caption = caption
        self._taken = 0
        self._given.clear()
        return self._call.outputs(self._pipeline, CPU, [caption])

    def _watch_tokenizer(self, name: str, tokenizer: Any) -> Any:
        def around(
            own: Any, call: Callable[[], Any], texts: list[str], options: dict[str, Any]
        ) -> Any:
            known = join_results(self._known, name, own, texts, options)
            done = TokenizerCall(name, texts, options, known or call(), own)
            if known is None:
                self._note_results(done)
            self._calls.append(done)
            return done.made

        return wrap_calls(tokenizer, around)

    def _note_input(self, tower: str, ids: Tensor, mask: Tensor | None) -> None:
        since = [*self._calls[self._taken :], *self._calls]  # the next one, or else any
        call = next((one for one in since if is_result(one, ids)), None)
        self._taken = len(self._calls)
        if mask is None and call is not None:
            mask = torch.as_tensor(call.made.get("attention_mask", ids != -1)).view(ids.shape)
        masks = (torch.ones_like(ids) if mask is None else mask).long().tolist()
        rows = self._given.setdefault(tower, [])
        for row, (own, seen) in enumerate(zip(ids.tolist(), masks, strict=True)):
            rows.append(encoder_input(call, row, own, seen))


class EmptyEncoder(nn.Module):
    """A stand-in for a text encoder, which gives zeros of the shapes that its config tells."""

    def __init__(
        self,
        part: Component,
        config: Any,
        dtype: torch.dtype,
        note: Callable[[str, Tensor, Tensor | None], None],
        width: int,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, CPU
        self._part, self._note_input = part, note
        own = config.get_text_config()
        if width:  # pipelines make zeros of the width that the config tells, beside what comes out
            own.hidden_size = width
        self._width = own.hidden_size
        self._layers = getattr(own, "num_hidden_layers", None) or own.num_layers
        self._pooled = width or getattr(own, "projection_dim", self._width)
        self.taken: list[Any] = []

    def forward(self, *words: Tensor, **options: Any) -> "States":
        ids = words[0] if words else options["input_ids"]
        self._note_input(self._part.name, ids, options.get("attention_mask"))
        rows, length = ids.shape
        shape = (length, rows) if self._part.kind.startswith("ChatGLM") else (rows, length)
        states = torch.zeros((1, 1, 1), dtype=self.dtype).expand(*shape, self._width)
        pooled = states.new_zeros(rows, self._width)
        projected = states.new_zeros(rows, self._pooled)
        first = projected if "Projection" in self._part.kind else states
        layers = Layers((states,) * (self._layers + 1))
        self.taken = layers.taken
        return States(first, states, layers, pooled, projected)


class Layers(tuple[Tensor, ...]):
    """The hidden states of all layers, which note by which indexes a caller takes some of them.

    `taken` has these indexes.
    """

    def __init__(self, _states: Sequence[Tensor]) -> None:
        self.taken: list[Any] = []

    def __getitem__(self, index: Any) -> Any:
        shown = index if isinstance(index, int) else [index.start, index.stop, index.step]
        self.taken.append(shown)
        return super().__getitem__(index)


@dataclass(frozen=True, slots=True)
class States:
    """The output of an encoder, under the names that transformers uses."""

    first: Tensor
    last_hidden_state: Tensor
    hidden_states: Layers
    pooler_output: Tensor
    text_embeds: Tensor

    def __getitem__(self, index: int) -> Any:
        return (self.first, self.last_hidden_state)[index]
