"""`--filter "aesthetic >= 4.5 and pwatermark < 0.8"`: a condition on a sample's facts.

The text is parsed, checked against a short list of what may stand in it, and walked; it is never
run as code. A comparison with a fact that is missing, or of another type, is false.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from wdsprep.errors import UsageError

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda value, choices: value in choices,
    ast.NotIn: lambda value, choices: value not in choices,
}
_MISSING = object()


class Filter:
    """A parsed condition; call it with a sample's facts."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise UsageError(
                f'--filter "{text}": {error.msg} at character {error.offset}'
            ) from None
        except (ValueError, MemoryError, RecursionError) as error:  # a NUL, or thousands of nots
            raise UsageError(f"--filter cannot be read: {error}") from None
        self.names = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)}
        self._check(self._tree)

    def __reduce__(self) -> tuple[type["Filter"], tuple[str]]:
        return Filter, (self.text,)

    def __call__(self, facts: Mapping[str, Any]) -> bool:
        return _holds(self._tree, facts)

    def _check(self, node: ast.expr) -> None:
        """Refuse all but and, or, not, and comparisons of names and constants."""
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                self._check(part)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._check(node.operand)
        elif isinstance(node, ast.Compare) and all(type(op) in _COMPARE for op in node.ops):
            for part in (node.left, *node.comparators):
                if not isinstance(part, ast.Name) and not _is_constant(part):
                    self._refuse(part)
        elif not isinstance(node, ast.Name):
            self._refuse(node)

    def _refuse(self, node: ast.expr) -> None:
        part = ast.get_source_segment(self.text.strip(), node)
        raise UsageError(
            f'--filter "{self.text}": {part!r} cannot be used: compare columns with constants by '
            "< <= > >= == != in, and join with and, or, not"
        )


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.List | ast.Tuple):
        return all(_is_constant(part) for part in node.elts)
    if isinstance(node, ast.UnaryOp):
        number = isinstance(node.operand, ast.Constant) and type(node.operand.value) in (int, float)
        return isinstance(node.op, ast.USub) and number
    return isinstance(node, ast.Constant)


def _holds(node: ast.expr, facts: Mapping[str, Any]) -> bool:
    if isinstance(node, ast.BoolOp):
        join = all if isinstance(node.op, ast.And) else any
        return join(_holds(part, facts) for part in node.values)
    if isinstance(node, ast.UnaryOp):
        return not _holds(node.operand, facts)
    if isinstance(node, ast.Compare):
        values = [_value(part, facts) for part in (node.left, *node.comparators)]
        return all(map(_compare, node.ops, values, values[1:]))
    return bool(facts.get(node.id)) if isinstance(node, ast.Name) else False


def _compare(op: ast.cmpop, left: object, right: object) -> bool:
    if left is _MISSING or right is _MISSING:
        return False
    if isinstance(left, int | float) and isinstance(right, str):
        right = _number(right)
    elif isinstance(right, int | float) and isinstance(left, str):
        left = _number(left)
    try:
        return _COMPARE[type(op)](left, right)
    except TypeError:  # a number beside a text
        return False


def _number(text: str) -> float | str:
    """A cell of a CSV table, where every column is text."""
    try:
        return float(text)
    except ValueError:
        return text


def _value(node: ast.expr, facts: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        found = facts.get(node.id)
        return _MISSING if found is None else found
    return ast.literal_eval(node)
