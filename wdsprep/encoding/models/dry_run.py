"""The dry run of a pipeline, which tells the tokens of captions and the shapes of its arrays.

`encode_prompt` is run with encoders that compute nothing: each gives zeros of the shapes that its
config tells. The calls of tokenizers and the inputs of encoders are noted. So it is known, before
any weights are loaded, how many tokens a caption has before anything of it is cut, whether it was
cut, and which captions have one shape for an encoder; and also the shapes and dtypes of the arrays
(`find_outputs`).

It is run with one caption at a time. The result for several captions may depend on all of them
(padding to the longest, one call of a tokenizer for each, an encoder that only some captions need),
and the calls do not prove that it does not. With the pipelines of the tests a caption takes 0.6 ms
(Qwen-Image) to 1.5 ms (Flux) of a core, most of it for calls of tokenizers from Python (0.2 ms
each). To tokenize 64 captions a call, and to keep the results for their batch, saved 0.1 to 0.6 ms
and took 150 lines: look again if a GPU waits for captions.
"""

import contextlib
import inspect
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wdsprep.dataset.npy_arrays import BFLOAT16, MASK, OF_SIZES, Field
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.encoding import HALF
from wdsprep.encoding.models.base import DTYPES, Tokens
from wdsprep.encoding.models.encode_prompt import (
    ALONE,
    PromptCall,
    Row,
    assemble,
    pipeline_error,
    takes_references,
)
from wdsprep.encoding.models.families import dtype_of_tower, is_mask, member_name
from wdsprep.encoding.models.find_model import Component, Model
from wdsprep.encoding.models.load_networks import load_config, silence_libraries
from wdsprep.encoding.models.references import ReferencePipeline
from wdsprep.encoding.recipe_options import Encode
from wdsprep.errors import UsageError, WorkError
from wdsprep.images.crop import blank_image

_log = logging.getLogger("wdsprep")

CPU = torch.device("cpu")
LONG = "a " * 2000  # more words than any encoder takes
SHORT = "A  <b>photo</b> of M&amp;Ms"
"""A caption with something to clean: some pipelines do so if further packages are installed."""
BLANKS = ((1024, 1024), (1536, 768), (768, 1536), (2048, 512), (512, 2048))
"""The sizes of blank images by which the lengths of text that depends on images are found."""
SPARE = 64
"""How many more tokens an image of another ratio may have, if captions are padded to one length."""
MOST_REFERENCES = 3
"""The references of a sample for which text is given room, if a pipeline takes several."""
SIZE_ARGUMENTS = {"original_size", "crops_coords_top_left"}
"""A pipeline that has these asks for the size to make too, as `target_size` or otherwise."""


def find_outputs(model: Model, recipe: Encode) -> Model:
    """Return the model with the fields that its pipeline makes, and the settings that decide them.

    Without text these are only the arrays that are made from the sizes of images.
    """
    if not model.components:
        import diffusers

        kind = getattr(diffusers, model.pipeline_kind, None)
        return replace(model, outputs=_size_fields(kind) if kind else ())
    silence_libraries()
    dtype = HALF if recipe.dtype == "fp32" else recipe.dtype
    takes_several = recipe.references and takes_references(model)
    counts = (MOST_REFERENCES, 1) if takes_several else (model.references,)
    for count in counts:
        model = replace(model, references=count)
        try:
            dry_run = DryRun(model, recipe.text_length, dtype)
            template = dry_run.template()
            break
        except WorkError:  # without its VAE, a pipeline may refuse several, once text is made
            if count == counts[-1]:
                raise
    call, of_sizes = dry_run.call, _size_fields(dry_run.call.kind)
    settings = {
        "pipeline": call.name,
        "template": template,
        "text_arguments": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in call.arguments.items()
            if _is_setting(name, value)
        },
    }
    if call.takes_images:
        settings["text_roles"] = list(recipe.references)
    if recipe.text == "tokens":
        outputs = (*_token_fields(dry_run), *of_sizes)
        return replace(model, outputs=outputs, text_settings=settings)
    if layers := {name: tower.taken for name, tower in dry_run.towers.items() if tower.taken}:
        settings["layers"] = layers
    fields = _find_fields(dry_run)
    variable = [field for field in fields if field.is_variable]
    fixed = [field for field in fields if not field.is_variable]
    if variable:  # captions of one length together have nothing to mask
        fixed = [field for field in fixed if field.name != MASK]
    outputs = (*fixed, *of_sizes, *variable)
    return replace(model, outputs=outputs, text_settings=settings)


def _is_setting(name: str, value: Any) -> bool:
    """Return whether an argument of `encode_prompt` is stored in the settings.

    Numbers and truth values are, and lists of them, unless the name begins with num_. Texts are
    not: the digest of the tokenizers' input covers them.
    """
    if name.startswith("num_"):
        return False
    parts = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(part, bool | int | float) for part in parts)


def _token_fields(dry_run: "DryRun") -> tuple[Field, ...]:
    name = dry_run.call.name
    short, long = (dry_run.tokens(caption, dry_run.blanks[0]).ids for caption in (SHORT, LONG))
    if len(short) != 2 * len(dry_run.towers):  # ids and mask of each
        raise UsageError(
            f"{name} changes the tokens, or gives an encoder only a part of each caption, so "
            "tokens cannot be stored: leave --text tokens out"
        )
    if [*map(len, short.values())] != [*map(len, long.values())]:
        raise UsageError(
            f"{name} does not pad tokens to one length, so they cannot be stored: leave "
            "--text tokens out"
        )
    return tuple(
        Field(name=name, dtype="|u1" if is_mask(name) else "<i4", shape=(len(ids),))
        for name, ids in short.items()
    )


def _find_fields(dry_run: "DryRun") -> list[Field]:
    """Return the fields of the outputs for captions, as long as the longest that are known.

    Text that depends on images is as long as they are, too: those of several ratios are tried.
    """
    call, short = dry_run.call, dry_run.outputs(SHORT, dry_run.blanks[0])
    (caption, long), *others = map(dry_run.longest, dry_run.blanks)
    fields = []
    for name in short:
        rows = [outputs[name] for outputs in (short, long, *(outputs for _, outputs in others))]
        value, lengths = max(rows, key=lambda row: row[0].shape)
        shape: tuple[int, ...] = tuple(value.shape[1:])
        by_caption = lengths is not None or long[name][0].shape != short[name][0].shape
        is_longer = by_caption or value.shape != short[name][0].shape
        if call.takes_images and name == call.first and not by_caption:
            is_longer, shape = True, (shape[0] + SPARE, *shape[1:])
        if is_longer and name != call.first:
            raise UsageError(
                f"{call.name} gives {name} with the length of the caption, which cannot be stored: "
                f"{ALONE}"
            )
        is_any_length = by_caption and caption == LONG and not call.is_trimmed
        if is_any_length and not dry_run.tokens(LONG, dry_run.blanks[0]).cut:
            raise UsageError(
                f"{call.name} has no limit for the length of captions: give one with --text-length"
            )
        half = "<f2" if value.dtype == torch.float16 else BFLOAT16  # in which it is stored
        fields.append(
            Field(
                name=member_name(name, call.first),
                dtype="|u1" if is_mask(name) else half,
                shape=shape,
                is_variable=is_longer,
            )
        )
    return fields


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

    def __init__(self, model: Model, length: int, dtype: str, width: int = 0) -> None:
        """Build the pipeline without weights.

        `length` is that of text, 0 for the pipeline's own. `width` is a width for all arrays, if
        their shapes do not matter; 0 keeps the real ones.
        """
        self.call, self._lock = PromptCall(model, length), threading.Lock()
        self._calls: list[TokenizerCall] = []
        self._taken = 0
        """how many calls of tokenizers had been made when an encoder was last run"""
        self._inputs: dict[str, list[tuple[int, Tokens]]] = {}
        """by encoder, what it was given of each caption, with the most tokens that it takes"""
        self.towers: dict[str, EmptyEncoder] = {}

        def empty_encoder(part: Component, kind: Any) -> EmptyEncoder:
            config = load_config(model, kind, part.name)
            part_dtype = DTYPES[dtype_of_tower(dtype, self.call.name, part.kind)]
            tower = EmptyEncoder(part, config, part_dtype, self._note_input, width)
            self.towers[part.name] = tower
            return tower

        self._pipeline = assemble(self.call.kind, model, empty_encoder)
        for part in model.components:
            if not part.has_weights:
                self._watch_tokenizer(part.name, getattr(self._pipeline, part.name))
        self.call.check_length(self._pipeline)
        variable = [field.shape[0] for field in model.outputs if field.is_variable]
        self._longest = max(variable, default=0)
        self.blanks: list[Any] = [None]
        """reference images of several ratios, in which there is nothing; None if not wanted"""
        if self.call.takes_images:
            references = ReferencePipeline(model)
            blanks = ([blank_image(size)] * model.references for size in BLANKS)
            self.blanks = [references.prepare(images).for_text for images in blanks]

    def outputs(self, caption: str, images: Any) -> dict[str, Row]:
        """Return the outputs for a caption and its images, as zeros of their shapes."""
        with self._lock:
            return self.call.rows(self._run(caption, images))

    def longest(self, images: Any) -> tuple[str, dict[str, Row]]:
        """Return the longest caption that the pipeline takes beside images, with its outputs.

        The code of some pipelines fails on captions that it should cut.
        """
        words = LONG.split()

        def is_refused(count: int) -> bool:
            try:
                self.outputs(" ".join(words[:count]), images)
            except WorkError:
                return True
            return False

        with contextlib.suppress(WorkError):
            return LONG, self.outputs(LONG, images)
        most = bisect_left(range(1, len(words)), True, key=is_refused)
        caption = " ".join(words[:most])
        return caption, self.outputs(caption, images)

    def try_tokens(self, captions: Sequence[str], images: Sequence[Any] = ()) -> list[Tokens]:
        """Return the tokens of captions; those on which the pipeline's code fails have no tokens.

        The sample of such a caption becomes a reject, as the code has worked with others before.
        If text depends on images, `images` has those of each caption.
        """
        tokens = []
        for caption, references in zip(captions, images or [None] * len(captions), strict=True):
            try:
                tokens.append(self.tokens(caption, references))
            except WorkError as error:
                _log.debug("no tokens are made of a caption: %s", error)
                tokens.append(Tokens(caption))
        return tokens

    def tokens(self, caption: str, images: Any) -> Tokens:
        """Return the tokens of a caption and its images, or raise WorkError.

        The encoder that takes the most tokens tells how many there are, and whether any were cut.
        """
        with self._lock:
            outputs = self._run(caption, images)
            inputs = [rows[0] for rows in self._inputs.values() if len(rows) == 1]
            if not inputs:
                raise pipeline_error(self.call.name, WorkError("no encoder gets the caption once"))
            _, largest = max(inputs, key=lambda pair: pair[0])
            tokens = Tokens(
                caption=caption,
                count=largest.count,
                cut=largest.cut,
                ids={name: ids for _, own in inputs for name, ids in own.ids.items()},
                shape=tuple(length for _, own in inputs for length in own.shape),
                images=images,
            )
            if not self.call.is_masked and not self.call.takes_images:
                return tokens
            value, lengths = self.call.rows(outputs)[self.call.first]
            if self._longest and value.shape[1] > self._longest:
                raise WorkError(f"the caption and its images have over {self._longest} tokens")
            if lengths is None or not self.call.is_masked:
                return tokens
            # The pipeline may cut the caption after its encoder.
            is_cut = tokens.count - self._template_length > int(lengths[0])
            return replace(tokens, cut=tokens.cut or is_cut)

    @cached_property
    def _template_length(self) -> int:
        """Return the number of tokens that the encoder gets and the pipeline's output lacks."""
        outputs = self._run(SHORT, self.blanks[0])
        ((_, tokens),) = (rows[0] for rows in self._inputs.values())
        _, lengths = self.call.rows(outputs)[self.call.first]
        return max(0, tokens.count - (0 if lengths is None else int(lengths[0])))

    def template(self) -> str:
        """Return a digest of the tokenizers' input for one caption.

        It changes with the words around a caption, and with the way in which captions are cleaned.
        """
        with self._lock:
            self._run(SHORT, self.blanks[0])
            asked = [(call.name, call.texts, call.ids) for call in self._calls]
        return hex_digest(repr(asked).encode("utf-8", "replace"))[:32]

    def _run(self, caption: str, images: Any) -> dict[str, Any]:
        self._calls.clear()
        self._taken = 0
        self._inputs.clear()
        return self.call.outputs(self._pipeline, CPU, [caption], images=images)

    def _watch_tokenizer(self, name: str, tokenizer: Any) -> None:
        """Let each call of a tokenizer be noted. It is changed in place.

        Its new class derives from the old one, since pipelines check it.
        """
        kind, calls = type(tokenizer), self._calls

        def called(self: Any, *words: Any, **options: Any) -> Any:
            result = kind.__call__(self, *words, **options)
            texts = options["text"] if "text" in options else words[0]
            listed = [texts] if isinstance(texts, str) else list(texts)
            ids = result["input_ids"]
            ids = ids.tolist() if isinstance(ids, Tensor) else ids
            again = partial(kind.__call__, self)
            calls.append(TokenizerCall(name, listed, options, ids, result, again))
            return result

        tokenizer.__class__ = type(kind.__name__, (kind,), {"__call__": called})

    def _note_input(self, tower: str, ids: Tensor, mask: Tensor | None) -> None:
        """Note the tokens of each caption that an encoder is given.

        The tokenizer is called again without a limit, if it may have cut a caption. Ids and masks
        are padded to one length for all captions.
        """
        rows, listed = self._inputs.setdefault(tower, []), ids.tolist()
        since = [*self._calls[self._taken :], *self._calls]  # the next one, or else any
        call = next((call for call in since if listed in (call.ids, [call.ids])), None)
        self._taken = len(self._calls)
        if mask is None and call is not None:
            mask = torch.as_tensor(call.result.get("attention_mask", ids != -1)).view(ids.shape)
        masks = (torch.ones_like(ids) if mask is None else mask).long().tolist()
        for row, (row_ids, row_mask) in enumerate(zip(listed, masks, strict=True)):
            length = count = sum(row_mask)
            if call is None:
                rows.append((0, Tokens("", count=count, shape=(length,))))
                continue
            most = call.options.get("max_length") or len(row_ids)
            if call.options.get("truncation") and count >= most:
                images = {name: value for name, value in call.options.items() if name == "images"}
                (whole,) = call.again(text=[call.texts[row]], **images)["input_ids"]
                count = max(count, len(whole))
            is_fixed = call.options.get("padding") == "max_length"
            padding = [0] * (most - len(row_ids))
            name = call.name.replace("tokenizer", "tokens")
            ids_of = {f"{name}.npy": row_ids + padding, f"{name}_mask.npy": row_mask + padding}
            shape = () if is_fixed else (length,)
            tokens = Tokens("", count=count, cut=count > most, ids=ids_of, shape=shape)
            rows.append((most, tokens))


class TokenizerCall(NamedTuple):
    """A call of a tokenizer: its arguments and its result."""

    name: str
    texts: list[str]
    options: dict[str, Any]
    ids: Any
    """a list for each text, or for one text perhaps a plain list"""
    result: Any
    again: Callable[..., Any]
    """the call of the same tokenizer without notice"""


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
        self.model = nn.ModuleDict({"norm": nn.Identity()})  # to which QwenImage21Pipeline hooks on
        self._part, self._note_input = part, note
        of_text = config.get_text_config()
        if width:  # pipelines make zeros of the width that the config tells, beside what comes out
            of_text.hidden_size = width
        self._width = of_text.hidden_size
        self._layers = getattr(of_text, "num_hidden_layers", None) or of_text.num_layers
        self._projected = width or getattr(of_text, "projection_dim", self._width)
        self.taken: list[Any] = []

    def forward(self, *words: Tensor, **options: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling
        from transformers.models.clip.modeling_clip import CLIPTextModelOutput

        ids = words[0] if words else options["input_ids"]
        self._note_input(self._part.name, ids, options.get("attention_mask"))
        rows, length = ids.shape
        shape = (length, rows) if self._part.kind.startswith("ChatGLM") else (rows, length)
        states = torch.zeros((1, 1, 1), dtype=self.dtype).expand(*shape, self._width)
        layers = Layers((states,) * (self._layers + 1))
        self.taken = layers.taken
        if "Projection" in self._part.kind:
            projected = states.new_zeros(rows, self._projected)
            return CLIPTextModelOutput(projected, states, layers)
        return BaseModelOutputWithPooling(states, states.new_zeros(rows, self._width), layers)


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
