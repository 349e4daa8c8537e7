"""Conditions on what is known of a sample: `--filter`, `where=` and `select --where`.

    aesthetic >= 6 and 1 <= width / height < 2 and not license in ('nc', 'nd') and "car" in caption

A text is parsed and checked against a short list of what may stand in it; it is never run as code.
It is compiled to closures, which take the values of its names, one sample at a time: linear in the
length of the condition, with whole numbers of any size. Of many samples, `tables.column_conditions`
decides most from columns, and leaves the others to the closures. What it means:

- A name is a path into what is known (`width`, `meta.aesthetic`, `meta["a name"]`, `captions[0]`);
  a name that is not there is looked for in `meta`.
- Values are compared as Python compares them: whole numbers exactly, however large, and a chain
  link by link. `and`, `or` and `not` give true or false.
- A text that reads as a number is one beside numbers, since tables as CSV hold nothing else.
- A comparison with what a sample lacks is false, `not in` too, and so is `<` of two things that
  have no order. What cannot be computed is lacking: a sum with a text, a division by zero, a result
  beyond the numbers. `license is None` is true for what is lacking, `license is not None` for all
  else.
- `like(source, "%.png")` compares a whole text with a pattern, as LIKE of SQL does: `%` is any
  text, an empty one too, and `_` any one character. It has no escapes, since `in` looks for a part
  of a text as it stands, and is false for what is no text.

Two evaluators agree on all of that, or the version below is another: it is part of the name of
whatever keeps what a condition has found.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeGuard

from wdsprep.dataset.samples import PathParts
from wdsprep.errors import UsageError
from wdsprep.text import brief, one_line

EVALUATOR = 1
LONGEST = 100_000
DEEPEST = 100
"""Levels: what Python's own parser and printer take from any depth of the caller's stack."""
SHOWN = 200
"""Characters of a condition that a message has; a longer one is cut."""
LANGUAGE = (
    "compare names with numbers and texts by < <= > >= == != in, with like(name, 'text%') or with "
    "is None, calculate with + - * /, and join with and, or, not"
)
LIKE = "like"
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
NUMBER = (int, float)
Evaluate = Callable[[Sequence[Any]], Any]
"""Computes a part of a condition from the values of all names; None where there is no value."""
Compare = Callable[[Any, Any], bool]


class Condition:
    """A compiled condition on samples.

    `plain` is its text in a form that spaces, quotes and spare brackets do not change. `names` are
    the paths in the text. `option` is the option or argument that gave it, as messages have it.
    """

    def __init__(self, text: str, option: str = "where=") -> None:
        self.option = option
        if not isinstance(text, str) or not text.strip():
            raise UsageError(
                f"{self.option}{brief(text)}: give a condition, such as 'width >= 768'"
            )
        self.text = text
        if len(text) > LONGEST:
            raise self._error(
                f"it has {len(text):,} characters, more than the {LONGEST:,} allowed: put the "
                "answer into a column of a table, and use that"
            )
        self._places: dict[PathParts, int] = {}
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            self._check_depth(tree)
            self.evaluate = self._compile(tree)
            """Returns the value of the text for the values of its `names`, or None without one."""
            self.plain = ast.unparse(tree)
        except SyntaxError as error:
            what = error.msg.partition(":")[0]
            place = f"at character {error.offset}" if error.offset else "at its end"
            raise self._error(f"{what} {place}: {LANGUAGE}") from None
        except (MemoryError, RecursionError):  # thousands of nots: Python's parser gives up
            raise self._too_deep() from None
        except ValueError:
            why = "it has a character that no text may have, such as a NUL: leave it out"
            raise self._error(why) from None
        self.names = tuple(self._places)

    def __reduce__(self) -> tuple[type["Condition"], tuple[str, str]]:
        return type(self), (self.text, self.option)

    @property
    def columns(self) -> frozenset[str]:
        """Return the columns of a table that the condition uses."""
        return frozenset(str(path[0]) for path in self.names)

    def holds(self, values: Sequence[Any]) -> bool:
        """Return whether the condition is true for the values of its `names`.

        A value of None stands for a missing one: no comparison with it is true.
        """
        return bool(self.evaluate(values))

    def _compile(self, node: ast.expr) -> Evaluate:
        """Return a function that computes a node of the syntax tree from the values of all names.

        A path that is new gets the next place among the names. Raise UsageError for syntax that
        `LANGUAGE` does not describe.
        """
        if isinstance(node, ast.BoolOp):
            parts, decides = [*map(self._compile, node.values)], isinstance(node.op, ast.Or)

            def joined(values: Sequence[Any]) -> bool:
                for part in parts:  # a generator takes twice as long
                    if bool(part(values)) is decides:
                        return decides
                return not decides

            return joined
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            negated = self._compile(node.operand)
            return lambda values: not negated(values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            signed, sign = self._compile(node.operand), -1 if isinstance(node.op, ast.USub) else 1
            return lambda values: None if (n := number_of(signed(values))) is None else sign * n
        if isinstance(node, ast.BinOp) and (reckon := RECKON.get(type(node.op))):
            return _arithmetic_function(reckon, self._compile(node.left), self._compile(node.right))
        if is_test_for_missing(node):
            tested, is_missing = self._compile(node.left), isinstance(node.ops[0], ast.Is)
            return lambda values: (tested(values) is None) is is_missing
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if is_like(node):
            return _like_function(self._compile(node.args[0]), ast.literal_eval(node.args[1]))
        if (path := path_of(node)) is not None:
            return operator.itemgetter(self._places.setdefault(path, len(self._places)))
        if _is_constant(node):
            return _constant_function(ast.literal_eval(node))
        raise self._refusal(node)

    def _comparison(self, node: ast.Compare) -> Evaluate:
        if not all(type(op) in (*COMPARE, ast.In, ast.NotIn) for op in node.ops):
            raise self._refusal(node)
        first = self._compile(node.left)
        links: list[tuple[Compare, Evaluate]] = []
        for op, part in zip(node.ops, node.comparators, strict=True):
            if type(op) in COMPARE:
                links.append((_order_comparison(COMPARE[type(op)]), self._compile(part)))
            elif is_list(part):
                choices = ast.literal_eval(part)
                comparison = _choice_comparison(choices, isinstance(op, ast.In))
                links.append((comparison, _constant_function(choices)))
            else:
                links.append((_in_comparison(isinstance(op, ast.In)), self._compile(part)))
        if len(links) == 1:
            holds, second = links[0]
            return lambda values: holds(first(values), second(values))

        def chain(values: Sequence[Any]) -> bool:
            value = first(values)
            for holds, part in links:
                following = part(values)
                if not holds(value, following):
                    return False
                value = following
            return True

        return chain

    def _check_depth(self, tree: ast.expr) -> None:
        level, nodes = 0, [tree]
        while nodes:
            level += 1
            if level > DEEPEST:
                raise self._too_deep()
            children = (child for node in nodes for child in ast.iter_child_nodes(node))
            nodes = [child for child in children if isinstance(child, ast.expr)]

    def _too_deep(self) -> UsageError:
        return self._error(
            f"it has more than {DEEPEST} levels of sums, nots, comparisons and paths within each "
            "other: write it with fewer"
        )

    def _refusal(self, node: ast.expr) -> UsageError:
        part = _shorten(ast.get_source_segment(self.text.strip(), node) or "")
        return self._error(f"{part!r} cannot be used: {LANGUAGE}")

    def _error(self, why: str) -> UsageError:
        return UsageError(f'{self.option}"{_shorten(self.text)}": {why}')


def _shorten(text: str) -> str:
    return one_line(text if len(text) <= SHOWN else f"{text[:60]}...")


# --- what may stand there
def is_list(node: ast.expr) -> bool:
    """Return whether a node of the syntax tree is a list or a tuple of constants."""
    return isinstance(node, ast.List | ast.Tuple) and all(
        _is_constant(item.operand, NUMBER)
        if isinstance(item, ast.UnaryOp) and isinstance(item.op, ast.USub)
        else _is_constant(item)
        for item in node.elts
    )


def _is_constant(node: ast.expr, types: Collection[type] = (*NUMBER, str, bool)) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in types


def is_test_for_missing(node: ast.expr) -> TypeGuard[ast.Compare]:
    """Return whether a node of the syntax tree is such as `a is None` or `a is not None`."""
    match node:
        case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
    return False


def is_like(node: ast.expr) -> TypeGuard[ast.Call]:
    """Return whether a node of the syntax tree is such as `like(a, "text%")`."""
    match node:
        case ast.Call(ast.Name(name), [_, ast.Constant(str())], []):
            return name == LIKE
    return False


def path_of(node: ast.expr) -> PathParts | None:
    """Return the path, such as `meta.score`, that a node of the syntax tree stands for, or None."""
    parts: list[str | int] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            part: Any = node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            part = node.slice.value
        else:
            return None
        if type(part) not in (str, int):
            return None
        parts.append(part)
        node = node.value
    return (node.id, *reversed(parts))


def format_path(path: PathParts) -> str:
    first, *others = path
    return f"{first}" + "".join(f".{p}" if isinstance(p, str) else f"[{p}]" for p in others)


# --- what it comes to
def _constant_function(value: Any) -> Evaluate:
    return lambda _values: value


def _arithmetic_function(
    reckon: Callable[[Any, Any], Any], left: Evaluate, right: Evaluate
) -> Evaluate:
    def reckoned(values: Sequence[Any]) -> Any:
        first, second = number_of(left(values)), number_of(right(values))
        if first is None or second is None:
            return None
        try:
            result = reckon(first, second)
        except (ZeroDivisionError, OverflowError):
            return None
        return result if type(result) is int or math.isfinite(result) else None

    return reckoned


def _like_function(part: Evaluate, pattern: str) -> Evaluate:
    """Return a function that compares a text with a pattern of LIKE.

    Between two `%` the first place that fits is as good as any later one. So each piece is searched
    for once, where a regular expression of the whole pattern would try all combinations of places.
    """
    *pieces, last = (
        re.compile(re.escape(piece).replace("_", "."), re.DOTALL) for piece in pattern.split("%")
    )
    nlast = len(pattern.rpartition("%")[2])

    def is_like(values: Sequence[Any]) -> bool:
        text = part(values)
        if not isinstance(text, str):
            return False
        place = 0
        for number, piece in enumerate(pieces):
            match = piece.search(text, place) if number else piece.match(text)
            if match is None:
                return False
            place = match.end()
        end = len(text) - nlast if pieces else 0
        return place <= end and last.fullmatch(text, end) is not None

    return is_like


def _order_comparison(compare: Callable[[Any, Any], Any]) -> Compare:
    """Return a function that compares two values with an operator such as `<` or `==`.

    A text beside a number is compared as a number. The result is False if a value is missing, if
    such a text does not read as a number, or if an operator such as `<` finds no order.
    """

    def holds(one: Any, other: Any) -> bool:
        if isinstance(one, str):
            if isinstance(other, NUMBER):
                one = number_of(one)
        elif isinstance(other, str) and isinstance(one, NUMBER):
            other = number_of(other)
        if one is None or other is None:
            return False
        try:
            return bool(compare(one, other))
        except (TypeError, RecursionError):  # no order between them, or lists 1,000 deep
            return False

    return holds


def _in_comparison(is_in: bool) -> Compare:
    """Return the comparison `in`, or `not in`, of two values; both are false if one is missing."""

    def holds(one: Any, other: Any) -> bool:
        if one is None or other is None:
            return False
        try:
            return (one in other) is is_in
        except (TypeError, RecursionError):
            return not is_in

    return holds


def _choice_comparison(choices: Collection[Any], is_in: bool) -> Compare:
    """Return the comparison `in`, or `not in`, of a value with choices, which `==` compares.

    It looks in sets, since there may be thousands of choices.
    """
    texts = frozenset(choice for choice in choices if isinstance(choice, str))
    numbers = frozenset(choice for choice in choices if isinstance(choice, NUMBER))
    as_numbers = numbers.union(map(number_of, texts)) - {None}

    def holds(one: Any, _other: Any) -> bool:
        if isinstance(one, str):
            return (one in texts or (bool(numbers) and number_of(one) in numbers)) is is_in
        return one is not None and (isinstance(one, NUMBER) and one in as_numbers) is is_in

    return holds


def number_of(one: Any) -> Any:
    """Return a value as a number, if it is one or a text that reads as one; otherwise None."""
    if not isinstance(one, str):
        return one if isinstance(one, NUMBER) else None
    try:
        return int(one)
    except ValueError:
        pass
    try:
        value = float(one)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
