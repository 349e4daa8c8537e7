"""Evaluate a condition over columns of many rows at once, by Arrow, and JSON by DuckDB.

The closures of `dataset.condition_syntax` are what a condition means. Arrow decides the rows for
which it means the same, and has null as the truth of the others: these rows are left to the
closures. AND, OR and NOT treat null as not known, so the closures get no row that another part of
the condition decides. Arrow decides by numbers below 2^53, which doubles hold exactly, by texts,
and by texts beside numbers that plainly are one or are none. It does not decide by

- larger numbers, infinities and NaN, and what is computed from or to them: divisions by zero too,
- lists and objects, but for whether one is missing or empty, has a text in it where it is a column,
  or has no text like a constant in it where it is JSON,
- whether one text that is no constant is in another,
- texts that Python may read as numbers and Arrow may not, such as " 7", "1_0" or "+3",
- `meta` that is no JSON, names in it with quotes or made of digits, and texts with escapes in it,
- patterns of `like` that have a backslash, are long, or have a `_` behind a `%`: over the last kind
  RE2 takes 4 us a character.

A text of JSON, `meta` or `rest`, is parsed once for all names of a condition that are looked for in
it. DuckDB does that: Arrow has no paths, and msgspec takes longer. A name stands in the SQL as a
quoted constant only, and the SQL calls no functions but those in this file.

`meta` is JSON as `facts_bytes` writes it: of two fields with one name, which it never writes, SQL
takes the first.
"""

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from wdsprep.dataset.condition_syntax import (
    NUMBER,
    Condition,
    is_like,
    is_list,
    is_test_for_missing,
    number_of,
    path_of,
)
from wdsprep.dataset.sample_table import FLAG, REST, make_array
from wdsprep.dataset.samples import META, PathParts, list_index
from wdsprep.dataset.settings import NUMBER as NUMBERS
from wdsprep.dataset.settings import TEXT as TEXTS
from wdsprep.dataset.settings import WHOLE

MOST_PATHS = 100
"""Paths into JSON: of each, DuckDB keeps vectors of 2,048 values, and Arrow the values of all."""
LONGEST_PATTERN = 200
"""Characters of a pattern of `like`: the time for a text grows with both lengths."""
EXACT = 2**53
"""From here on not all whole numbers are doubles."""
MOST_ITEMS = 2**31
FUNCTIONS = {
    ast.Lt: pc.less, ast.LtE: pc.less_equal, ast.Gt: pc.greater, ast.GtE: pc.greater_equal,
    ast.Eq: pc.equal, ast.NotEq: pc.not_equal,
    ast.Add: pc.add, ast.Sub: pc.subtract, ast.Mult: pc.multiply, ast.Div: pc.divide,
}  # fmt: skip
PLAIN_NUMBER = r"^-?(?:[0-9]{1,30}\.?[0-9]{0,30}|\.[0-9]{1,30})$"
"""A text that Arrow and Python read as the same number."""
MAY_BE_NUMBER = r"^(?:[0-9.+-]|[^!-~])"
"""How a text begins that Python may read as a number, other than `inf` and `nan`."""
DOUBLE, TEXT = pa.float64(), pa.large_string()
UNKNOWN, NO_NUMBER, NO_TEXT = (pa.nulls(1, kind)[0] for kind in (pa.bool_(), DOUBLE, TEXT))
FALSE, TRUE = make_array(FLAG, [False, True])
ZERO, TOO_LARGE = make_array(NUMBERS, [0, EXACT])
TRUTHS, EMPTY_LISTS = (
    make_array(TEXTS, words).cast(TEXT) for words in (["false", "true"], ["[]", "{}"])
)
ZEROTH = make_array(WHOLE, [0])[0]
EMPTY, NULL = make_array(TEXTS, ["", "null"]).cast(TEXT)
Mask = NDArray[np.bool_]


class Values(NamedTuple):
    """The values of a part of a condition in all rows, each an array of Arrow, or a scalar.

    `numbers` are doubles below `EXACT`, `texts` are texts, `items` lists of texts, and `nested` the
    JSON of lists and objects. A value that is none of these is null there; None stands for nulls
    alone. `odd` is true where a value is beyond `numbers` and `texts`. `constant` is the value, if
    it is the same in all rows.
    """

    numbers: Any = None
    texts: Any = None
    items: Any = None
    nested: Any = None
    odd: Any = None
    constant: int | float | str | None = None


MISSING = Values()


class RowsOfSource:
    """The values that one source, such as a table of samples, has for all rows."""

    def __init__(
        self,
        columns: Mapping[str, pa.ChunkedArray],
        names: Sequence[PathParts],
        engine: duckdb.DuckDBPyConnection,
    ) -> None:
        """Take columns that have values, by their names, and all names of a condition."""
        self._columns = {name: column.combine_chunks() for name, column in columns.items()}
        self._names, self._engine = names, engine

    def value(self, path: PathParts) -> Values:
        """Return the values at a path: from the column of its first name, else `rest`, else `meta`.

        A row that has the first name in one of them is not looked up in the next. A path that
        begins with `meta` is looked up there alone.
        """
        name, *inside = path
        if name == META:
            return self._value_in(META, inside)
        column = self._column(name)
        if column is None:
            return self._value_in_json(path)
        values = _column_values(column, inside)
        if not column.null_count or not {META, REST} & self._columns.keys():
            return values
        return _fill(column.is_valid(), values, self._value_in_json(path))

    def _column(self, name: str | int) -> pa.Array | None:
        return None if name == REST else self._columns.get(str(name))

    def _value_in_json(self, path: PathParts) -> Values:
        value = self._value_in(META, path)
        if REST not in self._columns:
            return value
        first = self._value_in(REST, path[:1])
        return _fill(_has_value(first), self._value_in(REST, path), value)

    def _value_in(self, name: str, path: Sequence[str | int]) -> Values:
        """Return the values at a path in the JSON of a column."""
        if (document := self._columns.get(name)) is None:
            return MISSING
        value = self._parsed[name].get(_json_path(path) or "")
        return Values(odd=document.is_valid()) if value is None else value

    @cached_property
    def _parsed(self) -> Mapping[str, Mapping[str, Values]]:
        """The values at the paths of all names, by path, in each column of JSON.

        Rows with a value in the columns of all names are not parsed. There are no values if there
        are more than `MOST_PATHS`. Numbers, as a table of others may have them there, hold nothing.
        """
        paths = [path for path in self._names if path[0] != META]
        in_meta = [path[1:] for path in self._names if path[0] == META]
        columns = [column for path in paths if (column := self._column(path[0])) is not None]
        is_needed = None
        if not in_meta and len(columns) == len(paths):
            is_needed = _any(*(column.is_null() for column in columns if column.null_count))
        wanted = {META: [*paths, *in_meta], REST: [*paths, *(path[:1] for path in paths)]}
        parsed: dict[str, dict[str, Values]] = {name: {} for name in wanted}
        for name in wanted.keys() & self._columns.keys():
            document = self._columns[name]
            known = sorted({path for path in map(_json_path, wanted[name]) if path})
            if not 0 < len(known) <= MOST_PATHS:
                continue
            if is_needed is not None:
                document = pc.if_else(is_needed, document, pa.nulls(1, document.type)[0])
            quoted = ", ".join("'" + path.replace("'", "''") + "'" for path in known)
            rows = self._engine.from_arrow(pa.table({"document": document}))
            asked = f"CAST(TRY(json_extract(document, [{quoted}])) AS VARCHAR[])"
            answer = rows.project(asked).to_arrow_table()
            json = answer.column(0).combine_chunks().cast(pa.large_list(TEXT))
            is_damaged = pc.and_(document.is_valid(), json.is_null())
            for place, path in zip(make_array(WHOLE, range(len(known))), known, strict=True):
                element = pc.list_element(json, place)
                parsed[name][path] = _json_values(element, is_damaged)
        return parsed


def _json_values(json: pa.Array, is_damaged: pa.Array) -> Values:
    """Return values, given their JSON, and where what they are in is damaged.

    A text with escapes, such as one that has quotes, is odd.
    """
    is_text, is_list, is_object = (pc.starts_with(json, sign) for sign in '"[{')
    is_nested = pc.or_(is_list, is_object)
    truths = pc.index_in(json, value_set=TRUTHS).cast(DOUBLE)
    is_other = _any(is_text, is_nested, pc.is_valid(truths), pc.equal(json, NULL))
    is_number = pc.invert(is_other)
    numbers = pc.coalesce(pc.if_else(is_number, json, NO_TEXT).cast(DOUBLE), truths)
    is_exact = pc.fill_null(pc.less(pc.abs(numbers), TOO_LARGE), FALSE)
    is_escaped = pc.and_(is_text, pc.match_substring(json, "\\"))
    is_odd = _any(is_nested, is_escaped, pc.and_not(is_number, is_exact))
    texts = pc.if_else(pc.and_not(is_text, is_escaped), json, NO_TEXT)
    return Values(
        numbers,
        pc.utf8_slice_codeunits(texts, 1, -1),
        nested=pc.if_else(is_nested, json, NO_TEXT),
        odd=pc.coalesce(is_odd, is_damaged),
    )


def _json_path(path: Sequence[str | int]) -> str | None:
    """Return a path of JSON in SQL, or None if SQL has none that means the same."""
    for part in path:
        if isinstance(part, int) and part >= MOST_ITEMS:
            return None
        if isinstance(part, str) and (part.isdecimal() or not _is_plain(part)):
            return None
    return "$" + "".join(f"[{p}]" if isinstance(p, int) else f'."{p}"' for p in path)


def _is_plain(text: str) -> bool:
    """Return whether nothing in a text has to be escaped in JSON, or in a path into it."""
    return bool(text) and text.isprintable() and not set(text) & set('"\\/*')


class ColumnCondition:
    """The truths and values of the parts of a condition, for rows of several sources.

    A name has the value that the first source with a value for it has.
    """

    def __init__(self, sources: Sequence[RowsOfSource]) -> None:
        self._sources = sources
        self._values: dict[PathParts, Values] = {}
        self._read: dict[int, tuple[Any, Any]] = {}

    # --- what is true, false or not known (null)
    def truth(self, node: ast.expr) -> Any:
        """Return whether a part of a condition is true in each row, as an array or a scalar."""
        if _is_constant(node):
            return TRUE if _constant_of(node) else FALSE
        if isinstance(node, ast.BoolOp):
            join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
            return reduce(join, map(self.truth, node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return pc.invert(self.truth(node.operand))
        if is_test_for_missing(node):
            is_there = is_present(self.value(node.left))
            return is_there if isinstance(node.ops[0], ast.IsNot) else pc.invert(is_there)
        if isinstance(node, ast.Compare):
            sides = pairwise([node.left, *node.comparators])
            links = (self._link(*pair, op) for pair, op in zip(sides, node.ops, strict=True))
            return reduce(pc.and_kleene, links)
        if is_like(node):
            return _is_like(self.value(node.args[0]), ast.literal_eval(node.args[1]))
        return _is_full(self.value(node))

    def _link(self, left: ast.expr, right: ast.expr, op: ast.cmpop) -> Any:
        is_in = isinstance(op, ast.In)
        is_of_choices = is_in or isinstance(op, ast.NotIn)
        if is_list(left) or (is_list(right) and not is_of_choices):
            return UNKNOWN
        link = ast.Compare(left, [op], [right])
        if _is_constant(link):
            return self.truth(link)
        if is_list(right):
            return self._is_one_of(self.value(left), ast.literal_eval(right), is_in=is_in)
        if is_of_choices:
            return _contains(self.value(left), self.value(right), is_in=is_in)
        return self._compare(self.value(left), FUNCTIONS[type(op)], self.value(right))

    def _compare(self, left: Values, compare: Callable[[Any, Any], Any], right: Values) -> Any:
        answers, odds = [], [left.odd, right.odd]
        if left.numbers is not None and right.numbers is not None:
            answers.append(compare(left.numbers, right.numbers))
        if left.texts is not None and right.texts is not None:
            answers.append(compare(left.texts, right.texts))
        for value, other in ((left, right), (right, left)):
            if value.texts is not None and other.numbers is not None:
                numbers, odd = self._read_texts(value)
                sides = (numbers, other.numbers) if value is left else (other.numbers, numbers)
                answers.append(compare(*sides))
                odds.append(odd if odd is None else pc.and_(odd, pc.is_valid(other.numbers)))
        return _decided(_coalesce(answers), *odds)

    def _is_one_of(self, value: Values, choices: Collection[Any], *, is_in: bool) -> Any:
        texts = [choice for choice in choices if isinstance(choice, str)]
        numbers = [choice for choice in choices if isinstance(choice, NUMBER)]
        if not all(map(_is_unicode, texts)):
            return UNKNOWN
        answers, odds = [], [value.odd]
        if value.numbers is not None:
            as_numbers = [*numbers, *map(number_of, texts)]
            answers.append(_is_number_in(value.numbers, as_numbers))
        if value.texts is not None and texts:
            own = make_array(TEXTS, texts).cast(TEXT)
            answers.append(pc.is_in(value.texts, value_set=own))
        if value.texts is not None and numbers:
            read, odd = self._read_texts(value)
            answers.append(_is_number_in(read, numbers))
            odds.append(odd)
        is_there = _any(FALSE, *answers)
        if not is_in:
            is_there = pc.and_not(_presence(value), is_there)
        return _decided(is_there, *odds)

    # --- values
    def value(self, node: ast.expr) -> Values:
        """Return the values of a part of a condition."""
        if _is_constant(node):
            return _constant_values(_constant_of(node))
        if (path := path_of(node)) is not None:
            return self.path(path)
        if isinstance(node, ast.BinOp):
            sides = [self._numbers(self.value(side)) for side in (node.left, node.right)]
            (left, left_odd), (right, right_odd) = sides
            return _reckoned(FUNCTIONS[type(node.op)](left, right), left_odd, right_odd)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            numbers, odd = self._numbers(self.value(node.operand))
            is_minus = isinstance(node.op, ast.USub)
            return _reckoned(pc.negate(numbers) if is_minus else numbers, odd)
        truth = self.truth(node)
        return Values(pc.cast(truth, DOUBLE), odd=pc.is_null(truth))

    def path(self, path: PathParts) -> Values:
        """Return the values of a name."""
        if path not in self._values:
            values = (source.value(path) for source in self._sources)
            value = next(values, MISSING)
            for other in values:
                value = _fill(_has_value(value), value, other)
            self._values[path] = value
        return self._values[path]

    def _numbers(self, value: Values) -> tuple[Any, Any]:
        """Return values as numbers to calculate with, and which of them are odd."""
        if isinstance(value.constant, int) and abs(value.constant) >= EXACT:
            return NO_NUMBER, TRUE
        if value.texts is None:
            return NO_NUMBER if value.numbers is None else value.numbers, value.odd
        read, odd = self._read_texts(value)
        numbers = read if value.numbers is None else pc.coalesce(value.numbers, read)
        return numbers, _any(value.odd, odd)

    def _read_texts(self, value: Values) -> tuple[Any, Any]:
        """Return texts as numbers, and which of them may read as numbers that these are not."""
        if value.constant is not None:
            return self._numbers(_constant_values(number_of(value.constant)))
        if id(value.texts) not in self._read:
            is_plain = pc.match_substring_regex(value.texts, PLAIN_NUMBER)
            numbers = pc.if_else(is_plain, value.texts, NO_TEXT).cast(DOUBLE)
            may_be = pc.match_substring_regex(value.texts, MAY_BE_NUMBER)
            other = pc.fill_null(pc.and_not(may_be, is_plain), FALSE)
            self._read[id(value.texts)] = numbers, _any(other, _is_beyond(numbers))
        return self._read[id(value.texts)]


def _is_constant(node: ast.expr) -> bool:
    return not any(isinstance(part, ast.Name) for part in ast.walk(node))


def _constant_of(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    return Condition(ast.unparse(node)).evaluate(())


def _constant_values(value: int | float | str | None) -> Values:
    if value is None:
        return MISSING
    if isinstance(value, str):
        if not _is_unicode(value):
            return Values(odd=TRUE)
        return Values(texts=make_array(TEXTS, [value]).cast(TEXT)[0], constant=value)
    # Numbers of columns are below `EXACT`, and compare with it as with a larger one.
    number = value if isinstance(value, float) else max(-EXACT, min(value, EXACT))
    return Values(make_array(NUMBERS, [number])[0], constant=value)


def _column_values(column: pa.Array, inside: Sequence[str | int]) -> Values:
    """Return the values of a column, or those in them at a path.

    A column has texts, numbers, truths, or lists of texts or of numbers.
    """
    kind, types = column.type, pa.types
    if types.is_list(kind) and not types.is_string(kind.value_type):
        return Values(odd=column.is_valid())
    if types.is_list(kind):
        if not inside:
            return Values(items=column, odd=column.is_valid())
        index = list_index(inside[0])
        if not -1 < index < MOST_ITEMS or len(inside) > 1:
            return MISSING
        items = pc.list_slice(column, index, index + 1, return_fixed_size_list=True)
        return Values(texts=pc.list_element(items, ZEROTH).cast(TEXT))
    if inside:
        return MISSING
    if types.is_string(kind) or types.is_large_string(kind):
        return Values(texts=column.cast(TEXT))
    numbers = column.cast(DOUBLE, safe=False)
    return Values(numbers, odd=_is_beyond(numbers))


def _fill(is_first: Any, value: Values, other: Values) -> Values:
    """Return the first values where that is so, and the other ones elsewhere."""

    def choose(first: Any, second: Any, nothing: Any = None) -> Any:
        if first is second:  # none of them has such values
            return None
        if nothing is None:
            nothing = pa.nulls(1, (second if first is None else first).type)[0]
        pair = (nothing if values is None else values for values in (first, second))
        return pc.if_else(is_first, *pair)

    numbers, texts, items, nested = map(choose, value[:4], other[:4])
    return Values(numbers, texts, items, nested, choose(value.odd, other.odd, FALSE))


def _reckoned(numbers: Any, *odds: Any) -> Values:
    """Return values that are computed from numbers.

    If doubles give a result below `EXACT`, whole numbers give the same.
    """
    return Values(numbers, odd=_any(*odds, _is_beyond(numbers)))


# --- truths about values
def is_present(value: Values) -> Any:
    """Return whether there is a value in each row; null where that is not known."""
    return _decided(_presence(value), _odd_scalar(value))


def _presence(value: Values) -> Any:
    return _any(FALSE, *(pc.is_valid(part) for part in value[:4] if part is not None))


def _has_value(value: Values) -> Any:
    return _any(_presence(value), value.odd)


def _is_full(value: Values) -> Any:
    answers = [] if value.numbers is None else [pc.not_equal(value.numbers, ZERO)]
    if value.texts is not None:
        answers.append(pc.not_equal(value.texts, EMPTY))
    if value.items is not None:
        answers.append(pc.greater(pc.list_value_length(value.items), ZERO))
    if value.nested is not None:
        is_empty = pc.is_in(value.nested, value_set=EMPTY_LISTS)
        answers.append(pc.if_else(pc.is_valid(value.nested), pc.invert(is_empty), UNKNOWN))
    return _decided(_coalesce(answers), _odd_scalar(value))


def _contains(part: Values, whole: Values, *, is_in: bool) -> Any:
    """Return whether a text is in another text or in a list, or is not in it.

    A row is left undecided, for the condition that looks at single samples, if its list or object
    is JSON that may contain the text.
    """
    answers, odds, odd = [], [part.odd], whole.odd
    text = part.constant if isinstance(part.constant, str) else None
    if text is not None and whole.nested is not None and _is_plain(text):
        may_contain = pc.match_substring(whole.nested, f'"{text}"')
        odd = pc.coalesce(may_contain, odd)
    for texts in (whole.texts, whole.items):
        if texts is None or part.texts is None:
            continue
        if text is None:
            odds.append(pc.and_(pc.is_valid(part.texts), pc.is_valid(texts)))
        elif texts is whole.texts:
            answers.append(pc.match_substring(texts, text))
        else:
            is_it = pc.equal(texts.flatten(), make_array(TEXTS, [text])[0])
            numbers = pc.list_parent_indices(texts).filter(is_it)
            have = pc.is_in(whole_numbers(np.arange(len(texts))), value_set=numbers)
            answers.append(pc.if_else(texts.is_valid(), have, UNKNOWN))
    if whole.items is not None:
        odd = pc.and_(pc.is_null(whole.items), odd)
    answer = _coalesce(answers)
    if not is_in:
        answer = pc.and_not(pc.and_(_presence(part), _presence(whole)), answer)
    return _decided(answer, *odds, odd)


def _is_like(value: Values, pattern: str) -> Any:
    if value.texts is None:
        return _decided(FALSE, value.odd)
    is_slow = len(pattern) > LONGEST_PATTERN or "_" in pattern.partition("%")[2]
    if is_slow or not _is_unicode(pattern) or "\\" in pattern:
        return _decided(FALSE, value.odd, pc.is_valid(value.texts))
    return _decided(_coalesce([pc.match_like(value.texts, pattern)]), value.odd)


def _odd_scalar(value: Values) -> Any:
    """Return whether a value is odd, and neither a list nor an object."""
    nested = _any(*(pc.is_valid(part) for part in value[2:4] if part is not None))
    return value.odd if nested is None else pc.and_not(value.odd, nested)


# --- parts of the above
def _is_beyond(numbers: Any) -> Any:
    """Return which numbers are from `EXACT` on, infinite or NaN; None if none is."""
    is_beyond = pc.fill_null(pc.invert(pc.less(pc.abs(numbers), TOO_LARGE)), FALSE)
    return is_beyond if pc.any(is_beyond).as_py() else None


def _is_number_in(numbers: Any, choices: Collection[Any]) -> Any:
    """Return which numbers below `EXACT` are one of these."""
    known = [choice for choice in choices if choice is not None and abs(choice) < EXACT]
    exact = {float(choice) + 0.0 for choice in known}  # Arrow tells -0.0 from 0.0
    return pc.is_in(pc.add(numbers, ZERO), value_set=make_array(NUMBERS, sorted(exact)))


def _decided(answer: Any, *odds: Any) -> Any:
    """Return an answer that is not known where one of `odds` is true."""
    odd = _any(*odds)
    return answer if odd is None else pc.if_else(odd, UNKNOWN, answer)


def _any(*masks: Any) -> Any:
    known = [mask for mask in masks if mask is not None]
    return reduce(pc.or_, known) if known else None


def _coalesce(answers: Sequence[Any]) -> Any:
    return pc.coalesce(*answers, FALSE)


def _is_unicode(text: str) -> bool:
    return text == text.encode("utf-8", "replace").decode()


# `pa.array` and `to_numpy` would import pandas, which takes 0.3 s and 40 MB.
def mask_of(truths: pa.Array | pa.ChunkedArray) -> Mask:
    """Return an Arrow array of truths, none of them null, as one of NumPy that may be changed."""
    if isinstance(truths, pa.ChunkedArray):
        truths = truths.combine_chunks()
    mask: Mask = numbers_of(truths).copy()
    return mask


def numbers_of(column: pa.Array) -> NDArray[Any]:
    """Return the numbers or truths in an array of Arrow without nulls."""
    if pa.types.is_boolean(column.type):
        return np.from_dlpack(column.cast(pa.uint8())).view(np.bool_)
    return np.from_dlpack(column)


def whole_numbers(values: NDArray[np.int64], is_null: Mask | None = None) -> pa.Array:
    """Return numbers as an array of Arrow, with nulls where a mask is true."""
    valid = None if is_null is None else pa.py_buffer(np.packbits(~is_null, bitorder="little"))
    return pa.Array.from_buffers(pa.int64(), len(values), [valid, pa.py_buffer(values)])
