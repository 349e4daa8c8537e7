"""`--filter "aesthetic >= 4.5 and pwatermark < 0.8"`: a condition on a sample's facts, of which
`wdsprep.dataset.conditions` says what it may be.
"""

import ast
import math
import operator
from collections.abc import Mapping
from typing import Any

from wdsprep.dataset.conditions import (
    COMPARE,
    RECKON,
    Condition,
    compared,
    is_list,
    number_of,
    path_of,
    shown_path,
    stands_in,
)
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import at_path


class Filter(Condition):
    """Call it with a sample's facts."""

    option = "--filter "

    @property
    def columns(self) -> frozenset[str]:
        """Of a table, those that it asks for."""
        return frozenset(str(path[0]) for path in self.names)

    def __call__(self, facts: Mapping[str, Any]) -> bool:
        return bool(_value(self.tree, facts))

    def check(self, facts: Mapping[str, Any]) -> None:
        """Reject a sample of which it is not true."""
        if not self(facts):
            found = {shown_path(path): at_path(facts, path) for path in self.names}
            values = (f"{name} is {'missing' if v is None else v}" for name, v in found.items())
            raise RejectedError(Code.FILTERED, ", ".join(sorted(values)))


def _value(node: ast.expr, facts: Mapping[str, Any]) -> Any:
    """What it comes to; None for nothing."""
    if isinstance(node, ast.BoolOp):
        join = all if isinstance(node.op, ast.And) else any
        return join(_value(part, facts) for part in node.values)
    if isinstance(node, ast.UnaryOp):
        own = _value(node.operand, facts)
        if isinstance(node.op, ast.Not):
            return not own
        own = number_of(own)
        return own if own is None or isinstance(node.op, ast.UAdd) else -own
    if isinstance(node, ast.BinOp):
        left, right = (number_of(_value(part, facts)) for part in (node.left, node.right))
        return None if left is None or right is None else _reckoned(node.op, left, right)
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        return all(map(_holds, parts, node.ops, parts[1:], [facts] * len(node.ops)))
    path = path_of(node)
    return ast.literal_eval(node) if path is None else at_path(facts, path)


def _reckoned(op: ast.operator, left: float, right: float) -> float | None:
    try:
        made = float(RECKON[type(op)](left, right))
    except (ZeroDivisionError, OverflowError):
        return None
    return made if math.isfinite(made) else None


def _holds(left: ast.expr, op: ast.cmpop, right: ast.expr, facts: Mapping[str, Any]) -> bool:
    one, other = _value(left, facts), _value(right, facts)
    if not isinstance(op, ast.In | ast.NotIn):
        return compared(COMPARE[type(op)], one, other)
    if one is None or other is None:
        return False
    if is_list(right):
        is_in = any(compared(operator.eq, one, choice) for choice in other)
    else:
        is_in = stands_in(one, other)
    return is_in is isinstance(op, ast.In)
