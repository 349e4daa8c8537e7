"""The call of a pipeline's own `encode_prompt`, and the outputs that are kept.

The arguments are those that the pipeline's `__call__` would pass for a user who gives nothing but a
prompt: some defaults of `encode_prompt` are others. The outputs that are kept are those that
`__call__` takes in place of a prompt. An output may have a row for each caption, or be a list of
tensors; a *length* then says how much of a row belongs to the caption.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wdsprep.encoding.models.base import is_device_error
from wdsprep.encoding.models.families import (
    BATCH_AXIS,
    BY_MASK,
    BY_ZEROS,
    EDITS,
    NOT_OF_TEXT_ALONE,
    is_embedding,
    is_mask,
)
from wdsprep.encoding.models.find_model import Component, Model, class_of
from wdsprep.encoding.models.load_networks import explain_errors, load_tokenizer
from wdsprep.errors import UsageError, WorkError

ALONE = "add --text none to encode the images alone"
GUIDED, LENGTH, IMAGE = "do_classifier_free_guidance", "max_sequence_length", "image"
CONVERT = "maybe_convert_prompt"
"""Pipelines call this for textual inversion. Without such tokens it returns the prompt as it was,
but tokenizes it first, which took a quarter of the dry run of SDXL."""
SIDE = 1024
"""The side of an image, for pipelines that ask for it: all families can make this size."""
OURS = ("self", "prompt", "device", "batch_size", GUIDED)
"""Arguments of `encode_prompt` that wdsprep chooses."""

Row = tuple[Tensor, Tensor | None]
"""The values for all captions, and the length of each caption if the lengths differ."""


class PromptCall:
    """The arguments for the `encode_prompt` of a pipeline's class, and the outputs to keep."""

    def __init__(self, model: Model, length: int) -> None:
        """Check that the class of a model's pipeline can encode captions, and choose the arguments.

        The `length` 0 stands for the pipeline's own.
        """
        self.kind, has_references = pipeline_class(model), model.references > 0
        self.name = self.kind.__name__
        if not hasattr(self.kind, "encode_prompt"):
            raise self._unusable(
                "it has no code that makes embeddings of captions and nothing else (encode_prompt)"
            )
        self._call = inspect.signature(self.kind.__call__).parameters
        image = self._call.get(IMAGE)
        more = [name for name in self._call if name in NOT_OF_TEXT_ALONE]
        is_edit = image and (image.default is image.empty or EDITS.search(self.name))
        more += [IMAGE] if is_edit and not has_references else []
        if more or "prompt" not in self._call:
            what = f"wants {more[0]} too" if more else "takes no prompt"
            what += ", as by --roles target,source" if more == [IMAGE] else ""
            raise UsageError(f"{self.name} makes no images of text alone (it {what}): {ALONE}")
        self._parameters = inspect.signature(self.kind.encode_prompt).parameters
        self.takes_images = has_references and IMAGE in self._parameters
        # Images differ in size; where lengths are added up, captions are cut by the longest of all.
        self.is_alone = self.takes_images or "prompt_cu_seqlens" in self._call
        names = returned_names(self.kind.encode_prompt)
        self._is_single = not names
        wanted = [name for name in self._call if is_embedding(name)]
        self._outputs = names or wanted[:1]
        taken = [name for name in self._outputs if name in wanted]
        lacking = [name for name in wanted if name not in taken]
        embeddings = [name for name in taken if not is_mask(name)]
        if lacking or not embeddings:
            what = f"no {' and no '.join(lacking)}" if lacking else "nothing"
            raise self._unusable(
                f"its encode_prompt gives {what} that its denoiser would take in place of a prompt"
            )
        self.first = next((n for n in embeddings if not n.startswith("pooled")), embeddings[0])
        masks = [name for name in taken if is_mask(name)]
        is_left_out = self.name in BY_MASK or self.name in BY_ZEROS
        self._mask = masks[0] if masks and is_left_out else ""
        self.kept = tuple(name for name in taken if name != self._mask)
        self.is_masked = bool(self._mask) and self.name in BY_MASK
        self.is_trimmed = self.is_masked or self.name in BY_ZEROS
        """whether embeddings are kept without their padding"""
        self.arguments = self._bind_arguments(length)

    def _unusable(self, why: str) -> UsageError:
        return UsageError(f"{self.name} cannot be used for text, as {why}: {ALONE}")

    def _bind_arguments(self, length: int) -> dict[str, Any]:
        bound = {}
        for name, parameter in self._parameters.items():
            is_ours = name in OURS or (name == IMAGE and self.takes_images)
            if is_ours or parameter.kind is parameter.VAR_KEYWORD:
                continue
            bound[name] = self._call.get(name, parameter).default
            if bound[name] is parameter.empty:
                raise self._unusable(
                    f"its encode_prompt wants {name}, which its __call__ does not take"
                )
        if length and LENGTH not in bound:
            raise UsageError(
                f"--text-length cannot be chosen for {self.name}, whose text has one length: leave "
                "it out"
            )
        return {**bound, LENGTH: length} if length else bound

    def check_length(self, pipeline: Any) -> None:
        """Raise UsageError if the pipeline's `check_inputs` refuses the length of text.

        Its `encode_prompt` would often accept it.
        """
        if not (length := self.arguments.get(LENGTH)) or not hasattr(pipeline, "check_inputs"):
            return
        ours = {"prompt": "a", "height": SIDE, "width": SIDE, LENGTH: length}
        arguments = {
            name: ours.get(name, self._call[name].default if name in self._call else None)
            for name, parameter in inspect.signature(pipeline.check_inputs).parameters.items()
            if parameter.default is parameter.empty or name in ours
        }
        try:
            pipeline.check_inputs(**arguments)
        except Exception as error:
            if LENGTH in str(error):  # all else is of no concern here
                line = str(error).strip().partition("\n")[0]
                raise UsageError(f"--text-length is refused by {self.name}: {line}") from error

    def outputs(
        self,
        pipeline: Any,
        device: torch.device,
        captions: Sequence[str],
        *,
        images: Any = None,
        guided: bool = False,
    ) -> dict[str, Any]:
        """Call `encode_prompt` on captions, and return its outputs by name.

        `images` are the references of the only caption, if the text depends on them. With `guided`,
        there may be outputs for the negative prompt too. Each call gets a new list of captions:
        some pipelines write to it. The device is given, since a pipeline takes 0.1 ms to find its
        own. Functions that are scripted (in the encoder of Kolors) run as they are
        written: on a GPU torch would fuse them once they have run, and each shape once more, so
        that the bits of a caption would depend on what came before.
        """
        ours = {
            "prompt": list(captions),
            "device": device,
            "batch_size": len(captions),
            GUIDED: guided,
        }
        ours = {name: value for name, value in ours.items() if name in self._parameters}
        if self.takes_images:
            if images is None:
                raise ValueError(f"the text of {self.name} depends on images, and there are none")
            ours[IMAGE] = images
        unfused = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]
        with explain_pipeline_errors(self.name), unfused:
            outputs = pipeline.encode_prompt(**self.arguments, **ours)
            outputs = (outputs,) if self._is_single else outputs
            return dict(zip(self._outputs, outputs, strict=True))

    def rows(self, outputs: Mapping[str, Any]) -> dict[str, Row]:
        """Return the outputs to keep, by name, with the batch as their first axis."""
        with explain_pipeline_errors(self.name):
            return {name: self._row(name, outputs) for name in self.kept}

    def _row(self, name: str, outputs: Mapping[str, Any]) -> Row:
        if name != self.first and outputs[name] is None and is_mask(name):
            first, _ = _stack(outputs, self.first)
            return first.new_ones(first.shape[:2]), None
        value, lengths = _stack(outputs, name)
        if name != self.first:
            return value, lengths
        if self.name in BY_ZEROS:
            places = torch.arange(1, value.shape[1] + 1, device=value.device)
            return value, ((value != 0).flatten(2).any(2) * places).amax(1)
        if not self.is_masked:
            return value, lengths
        if (mask := outputs[self._mask]) is None:
            return value, full_lengths(value)
        # A template may continue after the padding, so the kept tokens are moved to the start.
        order = (mask <= 0).long().argsort(dim=1, stable=True)
        places = order.view(*order.shape, *[1] * (value.ndim - 2)).expand_as(value)
        return value.gather(1, places), (mask > 0).sum(1)

    def negative(self, pipeline: Any, device: torch.device) -> dict[str, Row]:
        """Return the arrays that a trainer uses for a caption that is left out.

        They are those of the pipeline's negative prompt, if it has any, or of the empty caption.
        """
        outputs = self.outputs(pipeline, device, [""], guided=True)
        names = [*self.kept, self._mask] if self._mask else self.kept
        negative = {name: outputs.get(f"negative_{name}") for name in names}
        return self.rows(outputs if negative[self.first] is None else negative)


def returned_names(method: Any) -> list[str]:
    """Return the names of the outputs of a method, as its last `return` statement has them.

    There are none if it returns no tuple.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    returns = [node for node in ast.walk(tree) if isinstance(node, ast.Return)]
    last = max(returns, key=lambda node: node.lineno).value
    parts = last.elts if isinstance(last, ast.Tuple) else []
    return [ast.unparse(_strip_expression(part)) for part in parts]


def _strip_expression(part: ast.expr) -> ast.expr:
    """Return the expression x of `x if condition else y`, or of `x.to(device)`."""
    if isinstance(part, ast.IfExp):
        return _strip_expression(part.body)
    if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
        return part.func.value if part.func.attr == "to" else part
    return part


def _stack(outputs: Mapping[str, Any], name: str) -> Row:
    value = outputs[name]
    if isinstance(value, Tensor):
        return value.movedim(BATCH_AXIS.get(name, 0), 0), None
    lengths = torch.tensor([len(row) for row in value], device=value[0].device)
    return pad_sequence(list(value), batch_first=True), lengths


def full_lengths(value: Tensor) -> Tensor:
    return torch.full((len(value),), value.shape[1], device=value.device)


def pipeline_class(model: Model) -> Any:
    import diffusers

    name = model.pipeline_kind
    kind = getattr(diffusers, name, None)
    if kind is None:
        raise WorkError(
            f"{model.name} is a {name}, which diffusers {version('diffusers')} does not have: "
            "upgrade it, or choose another --model"
        )
    with explain_pipeline_errors(name):  # what stands in for a class that lacks a package says so
        _ = getattr(kind, "from_pretrained", None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline)):
        raise UsageError(f"{model.name} is a {name}, which is not a pipeline: {ALONE}")
    return kind


def takes_references(model: Model) -> bool:
    """Return whether the pipeline of a model takes reference images."""
    kind = pipeline_class(model) if model.pipeline_kind else None
    return kind is not None and IMAGE in inspect.signature(kind.__call__).parameters


def assemble(
    kind: Any,
    model: Model,
    encoder_of: Callable[[Component, Any], Any],
    *,
    others: Mapping[str, Any] | None = None,
) -> Any:
    """Build a pipeline of a class with a model's parts for text, and None in place of the others.

    `encoder_of` makes a text encoder, given its class. All classes are checked before the first
    part is loaded. `others` are parts that are not of text, and may be more than the pipeline has.
    """
    classes = {part: class_of(part) for part in model.components}
    parts = {
        part.name: encoder_of(part, part_kind)
        if part.has_weights
        else load_tokenizer(model, part_kind, part.name)
        for part, part_kind in classes.items()
    }
    parameters = inspect.signature(kind).parameters
    arguments = {**model.arguments, **(others or {})}
    arguments = {name: value for name, value in arguments.items() if name in parameters}
    without = {name: None for name, p in parameters.items() if p.default is p.empty}
    with explain_pipeline_errors(kind.__name__):
        pipeline = kind(**{**without, **arguments, **parts})
        added = (getattr(part, "added_tokens_encoder", ()) for part in parts.values())
        # A token of textual inversion stands for several vectors if another ends in "_1".
        has_inversion = any(token.endswith("_1") for tokens in added for token in tokens)
        if hasattr(pipeline, CONVERT) and not has_inversion:
            setattr(pipeline, CONVERT, lambda prompt, _tokenizer: prompt)
        return pipeline


def explain_pipeline_errors(name: str) -> AbstractContextManager[None]:
    """Turn an error in a pipeline's own code into a WorkError of one line that names the pipeline.

    Its class, arguments and parts may come from anyone. The errors of a device that fails or lacks
    memory are left as they are.
    """
    return explain_errors(partial(pipeline_error, name), is_device_error)


def pipeline_error(name: str, error: BaseException) -> WorkError:
    """Return a WorkError that says what an error inside of a pipeline means to its user."""
    if isinstance(error, ImportError):
        why = "it needs a package that is not installed here"
    else:
        why = "its code cannot encode a caption with the parts that are there for text"
    kind, cause = type(error).__name__, str(error).strip().partition("\n")[0]
    return WorkError(f"{name} cannot be used for text, {why}: {ALONE} ({kind}: {cause})")
