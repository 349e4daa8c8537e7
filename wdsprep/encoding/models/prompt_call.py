"""How a pipeline's own `encode_prompt` is called, and what is kept of what it gives.

Arguments are those that the pipeline's `__call__` would pass where its user names a prompt and
nothing else: `encode_prompt` has other defaults in places. What is kept of its outputs is what
`__call__` takes in place of a prompt. An output may have a row for each caption, or be a list of
tensors; a *length* then says how much of a row is the caption's own.
"""

import ast
import inspect
import linecache
import re
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wdsprep.encoding import HALF
from wdsprep.encoding.models.batch_size import is_of_device
from wdsprep.encoding.models.classes import class_of
from wdsprep.encoding.models.families import (
    BATCH_AXIS,
    BY_MASK,
    BY_ZEROS,
    EDITS,
    GENERATES,
    IN_ONE_PRECISION,
    NOT_OF_TEXT_ALONE,
    half_of,
    is_embedding,
    is_mask,
)
from wdsprep.encoding.models.find import Model
from wdsprep.encoding.models.loading import is_panic
from wdsprep.encoding.models.parts import Component, TextPipeline
from wdsprep.errors import UsageError, WdsprepError, WorkError

ALONE = "add --text none to encode the images alone"
GUIDED, LENGTH = "do_classifier_free_guidance", "max_sequence_length"
SIDE = 1024
"""The side of an image, for pipelines that ask for it: all families can make this one."""
OURS = ("self", "prompt", "device", "batch_size", GUIDED)
"""Arguments of `encode_prompt` that are ours to choose."""

Row = tuple[Tensor, Tensor | None]
"""Values of all captions, and how much of each is its own where they are of different lengths."""


class PromptCall:
    """The way to call the `encode_prompt` of a class, and the part of its output that is kept."""

    def __init__(self, kind: Any, length: int) -> None:
        """`length` 0 is the usual one."""
        self.name = kind.__name__
        if not hasattr(kind, "encode_prompt"):
            raise UsageError(
                f"{self.name} cannot be used for text: it has no code that makes embeddings of "
                f"captions and nothing else (encode_prompt): {ALONE}"
            )
        if self.name in GENERATES:
            raise UsageError(
                f"{self.name} cannot be used for text: its denoiser wants tokens that a language "
                f"model makes up of the prompt: {ALONE}"
            )
        self._call = inspect.signature(kind.__call__).parameters
        self._check_kind()
        self._own = inspect.signature(kind.encode_prompt).parameters
        self._outputs = self._named(kind.encode_prompt)
        given = [name for name in self._outputs if name in self._call and is_embedding(name)]
        self._check(given)
        embeddings = [name for name in given if not is_mask(name)]
        self.first = next((n for n in embeddings if not n.startswith("pooled")), embeddings[0])
        masks = [name for name in given if is_mask(name)]
        is_left_out = self.name in BY_MASK or self.name in BY_ZEROS
        self._mask = masks[0] if masks and is_left_out else ""
        self.kept = tuple(name for name in given if name != self._mask)
        self.arguments = self._bound(length)

    def _check_kind(self) -> None:
        image = self._call.get("image")
        more = [name for name in self._call if name in NOT_OF_TEXT_ALONE]
        is_wanted = image and (image.default is image.empty or EDITS.search(self.name))
        more += ["image"] if is_wanted else []
        if more or "prompt" not in self._call:
            what = f"wants {more[0]} too" if more else "takes no prompt"
            raise UsageError(f"{self.name} makes no images of text alone (it {what}): {ALONE}")

    def _named(self, method: Any) -> list[str]:
        """Return the names of the outputs, as the last `return` has them.

        A single output has the name that `__call__` gives it.
        """
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        returns = [node for node in ast.walk(tree) if isinstance(node, ast.Return)]
        last = max(returns, key=lambda node: node.lineno).value
        if not isinstance(last, ast.Tuple):
            return [name for name in self._call if is_embedding(name)][:1]
        return [ast.unparse(_moved(part)) for part in last.elts]

    def _check(self, given: Sequence[str]) -> None:
        if beside := [name for name in self._call if self._is_of_batch(name)]:
            raise UsageError(
                f"{self.name} cannot be used for text: its denoiser wants {beside[0]} beside "
                f"embeddings, which is made of a whole batch of captions: {ALONE}"
            )
        wanted = [name for name in self._call if is_embedding(name)]
        lacking = [name for name in wanted if name not in given]
        if lacking or all(map(is_mask, given)):
            what = f"no {' and no '.join(lacking)}" if lacking else "nothing"
            raise UsageError(
                f"{self.name} cannot be used for text: its code for captions (encode_prompt) gives "
                f"{what} that its denoiser would take in place of a prompt: {ALONE}"
            )

    def _is_of_batch(self, name: str) -> bool:
        """Return whether an argument is given for each prompt, as its negative twin tells."""
        is_for_prompt = name.startswith("prompt_") and f"negative_{name}" in self._call
        return (
            is_for_prompt and not is_embedding(name) and re.fullmatch(r"prompt_\d+", name) is None
        )

    def _bound(self, length: int) -> dict[str, Any]:
        bound = {}
        for name, own in self._own.items():
            if name in OURS or own.kind is own.VAR_KEYWORD:
                continue
            bound[name] = self._call[name].default if name in self._call else own.default
            if bound[name] is inspect.Parameter.empty:
                raise UsageError(
                    f"{self.name} cannot be used for text: its code for captions (encode_prompt) "
                    f"wants {name}, which its __call__ does not take: {ALONE}"
                )
        if length and LENGTH not in bound:
            raise UsageError(
                f"--text-length cannot be chosen for {self.name}, whose text has one length: leave "
                "it out"
            )
        return {**bound, LENGTH: length} if length else bound

    def check_length(self, pipeline: Any) -> None:
        """Many pipelines refuse in `check_inputs` a length that `encode_prompt` would take."""
        if not (length := self.arguments.get(LENGTH)) or not hasattr(pipeline, "check_inputs"):
            return
        ours = {"prompt": "a", "height": SIDE, "width": SIDE, LENGTH: length}
        given = {
            name: ours.get(name, self._call[name].default if name in self._call else None)
            for name, own in inspect.signature(pipeline.check_inputs).parameters.items()
            if own.default is own.empty or name in ours
        }
        try:
            pipeline.check_inputs(**given)
        except Exception as error:
            if LENGTH in str(error):  # all else is of no concern here
                line = str(error).strip().partition("\n")[0]
                raise UsageError(f"--text-length: {self.name}: {line}") from error

    def outputs(
        self, pipeline: Any, captions: Sequence[str], *, guided: bool = False
    ) -> dict[str, Any]:
        """Return the outputs by name.

        Each call gets a list of its own: some pipelines write to it.
        """
        ours = {
            "prompt": list(captions),
            "device": pipeline.device,
            "batch_size": len(captions),
            GUIDED: guided,
        }
        ours = {name: value for name, value in ours.items() if name in self._own}
        with pipeline_at_work(self.name):
            made = pipeline.encode_prompt(**self.arguments, **ours)
            made = made if len(self._outputs) > 1 else (made,)
            return dict(zip(self._outputs, made, strict=True))

    def rows(self, made: Mapping[str, Any]) -> dict[str, Row]:
        """Return the outputs that are kept, with the batch as their first axis."""
        with pipeline_at_work(self.name):
            return self._rows(made)

    def _rows(self, made: Mapping[str, Any]) -> dict[str, Row]:
        value, lengths = _batched(made[self.first], BATCH_AXIS.get(self.first, 0))
        if self.is_masked:
            value, lengths = _compact(value, made[self._mask])
        elif self.name in BY_ZEROS:
            places = torch.arange(1, value.shape[1] + 1, device=value.device)
            lengths = ((value != 0).flatten(2).any(2) * places).amax(1)
        found: dict[str, Row] = {self.first: (value, lengths)}
        for name in self.kept:
            if name != self.first:
                other = made[name]
                if other is None and is_mask(name):
                    other = value.new_ones(value.shape[:2])
                found[name] = _batched(other, BATCH_AXIS.get(name, 0))
        return {name: found[name] for name in self.kept}

    @property
    def is_trimmed(self) -> bool:
        """Return whether an embedding is kept only as long as its caption."""
        return self.is_masked or self.name in BY_ZEROS

    @property
    def is_masked(self) -> bool:
        return bool(self._mask) and self.name in BY_MASK

    def negative(self, pipeline: Any) -> dict[str, Row]:
        """Return the arrays for no caption.

        They are the pipeline's own if it has any, or the empty caption's.
        """
        made = self.outputs(pipeline, [""], guided=True)
        names = [*self.kept, self._mask] if self._mask else self.kept
        own = {name: made.get(f"negative_{name}") for name in names}
        return self.rows(made if own[self.first] is None else own)


def _moved(part: ast.expr) -> ast.expr:
    """Return what `x if condition else y`, or `x.to(device)`, is of."""
    if isinstance(part, ast.IfExp):
        return _moved(part.body)
    if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
        return part.func.value if part.func.attr == "to" else part
    return part


def _batched(value: Any, axis: int) -> Row:
    if isinstance(value, Tensor):
        return value.movedim(axis, 0), None
    lengths = torch.tensor([len(one) for one in value], device=value[0].device)
    return pad_sequence(list(value), batch_first=True), lengths


def _compact(value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Move what the mask keeps to the start of each row.

    A template may continue behind the padding.
    """
    if mask is None:
        return value, all_of(value)
    order = (mask <= 0).long().argsort(dim=1, stable=True)
    places = order.view(*order.shape, *[1] * (value.ndim - 2)).expand_as(value)
    return value.gather(1, places), (mask > 0).sum(1)


def all_of(value: Tensor) -> Tensor:
    return torch.full((len(value),), value.shape[1], device=value.device)


def pipeline_of(model: Model) -> TextPipeline:
    if model.pipeline is None:
        raise UsageError(f"{model.name} has no pipeline for text: {ALONE}")
    return model.pipeline


def known_class(kind: str) -> Any:
    """Return the pipeline's class; None where this diffusers does not have it."""
    import diffusers

    return getattr(diffusers, kind, None)


def pipeline_class(model: Model) -> Any:
    import diffusers

    name = pipeline_of(model).kind
    found = known_class(name)
    if found is None:
        raise WorkError(
            f"{model.name} is a {name}, which diffusers {version('diffusers')} does not have: "
            "upgrade it, or choose another --model"
        )
    with pipeline_at_work(name):  # what stands in for a class that lacks a package says so
        _ = getattr(found, "from_pretrained", None)
    if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)):
        raise UsageError(f"{model.name} is a {name}, which is no pipeline: {ALONE}")
    return found


def assembled(model: Model, load: Callable[[Component, Any], Any]) -> Any:
    """Return the pipeline with the parts for text alone.

    `load` is given each part and its class. All classes are checked before the first is loaded.
    """
    kind, pipeline = pipeline_class(model), pipeline_of(model)
    classes = {part: class_of(part) for part in pipeline.components}
    parts = {part.name: load(part, found) for part, found in classes.items()}
    taken = inspect.signature(kind).parameters
    arguments = {name: value for name, value in pipeline.arguments.items() if name in taken}
    without = {name: None for name, one in taken.items() if one.default is one.empty}
    with pipeline_at_work(kind.__name__):
        return kind(**{**without, **arguments, **parts})


@contextmanager
def pipeline_at_work(name: str) -> Iterator[None]:
    """Turn what a pipeline's own code raises into one line.

    A stranger has chosen the class, its arguments and its parts. A device that fails or lacks
    memory is raised as it is.
    """
    try:
        yield
    except WdsprepError:
        raise
    except Exception as error:
        if is_of_device(error):
            raise
        raise misbehaves(name, error) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise misbehaves(name, error) from error


def misbehaves(name: str, error: BaseException) -> WorkError:
    """Return what an error inside of a pipeline means to its user, with its cause."""
    if isinstance(error, ImportError):
        why = "it needs a package that is not installed here"
    elif part := absent_part(error):
        why = f"its code needs the {part} of the whole pipeline, which is not loaded for captions"
    else:
        why = "its code cannot encode a caption with the parts that are there for text"
    kind, cause = type(error).__name__, str(error).strip().partition("\n")[0]
    return WorkError(f"{name} cannot be used for text, {why}: {ALONE} ({kind}: {cause})")


def absent_part(error: BaseException) -> str:
    """Return the part of a pipeline that was taken for something and is None, or nothing."""
    if not isinstance(error, AttributeError) or error.obj is not None:
        return ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner, line = (
            frame.f_locals.get("self"),
            linecache.getline(frame.f_code.co_filename, number),
        )
        for name in re.findall(r"self\.(\w+)\.", line):
            if getattr(owner, name, owner) is None:
                return str(name)
    return ""


def dtype_of_tower(dtype: str, pipeline: str, tower: str) -> str:
    """`half` is each network's own half precision."""
    if dtype != HALF:
        return dtype
    return "bf16" if pipeline in IN_ONE_PRECISION else half_of(tower)
