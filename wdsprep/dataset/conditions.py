"""Conditions on what is known of a sample: those of `--filter` and of `where=`, in one language.

    aesthetic >= 6 and 1 <= width / height < 2 and not license in ('nc', 'nd') and "car" in caption

A text is parsed and checked against a short list of what may stand in it; it is never run as code.
A name is a path into what is known (`width`, `meta.aesthetic`, `meta["a name"]`, `captions[0]`); a
bare name that is not there is looked for in `meta`. A comparison with what a sample lacks, or with
a text where a number should be, is false; a text that reads as a number is one beside numbers,
since tables as CSV hold nothing else.

Pack computes a condition for one row (`packing.filters`), the loader for many samples at once
(`loading.evaluate`).
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar

from wdsprep.dataset.samples import PathParts
from wdsprep.errors import UsageError

LONGEST = 100_000
SHOWN = 200
"""Characters of a condition that a message has; a longer one is cut."""
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
RECKON: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Condition:
    """A parsed condition; `plain` is one text for all ways to write it."""

    option: ClassVar[str]
    """Which it was given as, up to its text."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text.strip() or len(text) > LONGEST:
            raise UsageError(f"{self.option}{text!r:.60}: give a condition, such as 'width >= 768'")
        self.text = text
        self.names: dict[PathParts, None] = {}
        """What it asks for."""
        try:
            self.tree = ast.parse(text.strip(), mode="eval").body
            self._check(self.tree)
            self.plain = ast.unparse(self.tree)
        except SyntaxError as error:
            what = f'{self.option}"{_cut(text)}"'
            raise UsageError(f"{what}: {error.msg} at character {error.offset}") from None
        except (ValueError, MemoryError, RecursionError) as error:  # a NUL, or thousands of nots
            raise UsageError(f"{self.option.strip()} cannot be read: {error}") from None

    def __reduce__(self) -> tuple[type["Condition"], tuple[str]]:
        return type(self), (self.text,)

    def _check(self, node: ast.expr) -> None:
        """Refuse all but what the docstring of this module names."""
        if isinstance(node, ast.BoolOp):
            parts = node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.UAdd):
            parts = [node.operand]
        elif isinstance(node, ast.BinOp) and type(node.op) in RECKON:
            parts = [node.left, node.right]
        elif isinstance(node, ast.Compare):
            parts = [node.left]
            for op, part in zip(node.ops, node.comparators, strict=True):
                is_in = isinstance(op, ast.In | ast.NotIn)
                if not (is_in and is_list(part)):
                    parts.append(part)
                if not is_in and type(op) not in COMPARE:
                    self._refuse(node)
        elif (path := path_of(node)) is not None:
            self.names[path] = None
            return
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, str, bool):
            return
        else:
            self._refuse(node)
        for part in parts:
            self._check(part)

    def _refuse(self, node: ast.expr) -> None:
        part = _cut(ast.get_source_segment(self.text.strip(), node) or "")
        raise UsageError(
            f'{self.option}"{_cut(self.text)}": {part!r} cannot be used: compare names with '
            "numbers and texts by < <= > >= == != in, reckon by + - * /, and join with and, or, not"
        )


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:60]}..."


def is_list(node: ast.expr) -> bool:
    """A list or tuple of constants."""
    if not isinstance(node, ast.List | ast.Tuple):
        return False
    return all(_is_constant(part) for part in node.elts)


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
        return isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float, str, bool)


def path_of(node: ast.expr) -> PathParts | None:
    """The path that a node stands for, or None."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (before := path_of(node.value)):
        return (*before, node.attr)
    if isinstance(node, ast.Subscript) and (before := path_of(node.value)):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(key, str | int) and not isinstance(key, bool):
            return (*before, key)
    return None


def shown_path(path: PathParts) -> str:
    first, *others = path
    return f"{first}" + "".join(f".{p}" if isinstance(p, str) else f"[{p}]" for p in others)


def number_of(one: Any) -> Any:
    """What can be reckoned with: of texts, those that read as numbers; None for all else."""
    if isinstance(one, str):
        try:
            value = float(one)
        except ValueError:
            return None
        return value if math.isfinite(value) else None
    return one if isinstance(one, int | float) else None


def compared(compare: Callable[[Any, Any], Any], one: Any, other: Any) -> bool:
    """Numbers with numbers, texts with texts; a text beside a number as one, if it reads as one."""
    if isinstance(one, int | float) and isinstance(other, str):
        other = number_of(other)
    elif isinstance(other, int | float) and isinstance(one, str):
        one = number_of(one)
    try:
        return one is not None and other is not None and bool(compare(one, other))
    except TypeError:
        return False


def stands_in(one: Any, other: Any) -> bool:
    """Whether a text or a list has it."""
    try:
        return one in other
    except TypeError:
        return False
