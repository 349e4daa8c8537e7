"""A condition computed for many samples at once, over columns of what each has where it looks."""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.conditions import (
    COMPARE,
    RECKON,
    Condition,
    compared,
    is_list,
    number_of,
    path_of,
    stands_in,
)
from wdsprep.dataset.samples import PathParts

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Values:
    """Of some samples, or of one for all, which has no length: numbers or truths in an array of
    such, all else in one of objects; and which of them are there. Each whole number is a float, so
    that none depends on its neighbours."""

    array: NDArray[Any]
    there: Mask

    @classmethod
    def of(cls, found: Sequence[Any]) -> "Values":
        found = [_float(one) if type(one) in (int, float) else one for one in found]
        kinds = {*map(type, found)}
        there = np.array([one is not None for one in found], np.bool_)
        if kinds <= {float, bool, type(None)} and kinds - {type(None)}:
            return cls(np.array([one or 0 for one in found], np.float64), there)
        array = np.empty(len(found), object)
        array[:] = found
        return cls(array, there)

    @classmethod
    def constant(cls, value: Any) -> "Values":
        return cls(cls.of([value]).array.reshape(()), np.ones((), np.bool_))

    @property
    def is_plain(self) -> bool:
        return self.array.dtype != object

    def numbers(self) -> "Values":
        """What can be reckoned with: of texts, those that read as numbers."""
        if self.is_plain:
            return self
        return Values.of([number_of(one) for one in self.array.ravel()])


def holds(condition: Condition, found: Mapping[PathParts, Values], count: int) -> Mask:
    """Of which samples it is true."""
    with np.errstate(all="ignore"):
        return np.broadcast_to(_truth(_value(condition.tree, found, count)), count)


def _truth(values: Values) -> Mask:
    if values.is_plain:
        is_true: Mask = values.there & (values.array != 0)
        return is_true
    return values.there & np.array([bool(one) for one in values.array.ravel()], np.bool_)


def _value(node: ast.expr, found: Mapping[PathParts, Values], count: int) -> Values:
    everywhere = np.ones(count, np.bool_)
    if isinstance(node, ast.BoolOp):
        join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        truths = [
            np.broadcast_to(_truth(_value(part, found, count)), count) for part in node.values
        ]
        return Values(join.reduce(truths), everywhere)
    if isinstance(node, ast.UnaryOp):
        own = _value(node.operand, found, count)
        if isinstance(node.op, ast.Not):
            return Values(~_truth(own), everywhere)
        own = own.numbers()
        return Values(_signed(node.op, own.array), own.there) if own.is_plain else own
    if isinstance(node, ast.BinOp):
        left, right = (_value(part, found, count).numbers() for part in (node.left, node.right))
        if not (left.is_plain and right.is_plain):
            return Values(np.zeros(count), np.zeros(count, np.bool_))
        made = np.asarray(RECKON[type(node.op)](_wide(left.array), _wide(right.array)))
        return Values(made, left.there & right.there & np.isfinite(made))
    if isinstance(node, ast.Compare):
        return Values(_compared(node, found, count), everywhere)
    if isinstance(node, ast.Constant):
        return Values.constant(node.value)
    name = path_of(node)
    return Values(np.zeros(count), ~everywhere) if name is None else found[name]


def _wide(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float64)


def _signed(op: ast.unaryop, array: NDArray[Any]) -> NDArray[Any]:
    own = array if array.dtype.kind == "f" else _wide(array)
    return -own if isinstance(op, ast.USub) else own


def _compared(node: ast.Compare, found: Mapping[PathParts, Values], count: int) -> Mask:
    all_true = np.ones(count, np.bool_)
    left = _value(node.left, found, count)
    for op, part in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, ast.In | ast.NotIn):
            all_true &= _is_in(op, left, part, found, count)
            if is_list(part):
                continue
        else:
            all_true &= _pairs(COMPARE[type(op)], left, _value(part, found, count), count)
        left = _value(part, found, count)
    return all_true


def _is_in(
    op: ast.cmpop, left: Values, part: ast.expr, found: Mapping[PathParts, Values], count: int
) -> Mask:
    """Whether it is one of those listed; or stands in a text or a list that a sample has."""
    if is_list(part):
        among = np.zeros(count, np.bool_)
        for choice in ast.literal_eval(part):
            among |= _pairs(operator.eq, left, Values.constant(choice), count)
        there = np.broadcast_to(left.there, count)
    else:
        right = _value(part, found, count)
        among = _each(_stands_in, left, right, count)
        there = left.there & right.there
    return there & ~among if isinstance(op, ast.NotIn) else among


def _pairs(compare: Callable[[Any, Any], Any], left: Values, right: Values, count: int) -> Mask:
    if left.is_plain and right.is_plain:
        there = left.there & right.there
        mask: Mask = np.broadcast_to(compare(_scalar(left), _scalar(right)), count) & there
        return mask
    return _each(lambda one, other: compared(compare, one, other), left, right, count)


def _scalar(values: Values) -> Any:
    """A constant as a plain number, so that it takes the other side's precision."""
    return values.array if values.array.ndim else values.array.item()


def _each(test: Callable[[Any, Any], Any], left: Values, right: Values, count: int) -> Mask:
    """Of objects, one by one."""
    there = np.broadcast_to(left.there & right.there, count)
    sides = (np.broadcast_to(side.array, count).tolist() for side in (left, right))
    pairs = zip(there.tolist(), *sides, strict=True)
    return np.array([bool(has and test(one, other)) for has, one, other in pairs], np.bool_)


def _stands_in(one: Any, other: Any) -> bool:
    """Whole numbers are floats here."""
    if type(other) is list:
        other = [_float(x) if type(x) is int else x for x in other]
    return stands_in(one, other)


def _float(one: float) -> float | None:
    """None where it is beyond what a float can be."""
    try:
        found = float(one)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
