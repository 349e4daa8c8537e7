"""Compile a condition to SQL of DuckDB that raises nothing, whatever the rows hold.

The closures of `dataset.condition_syntax` are what a condition means. SQL decides the rows for
which it means the same, and answers NULL for the others: these rows are left to the closures. AND,
OR and NOT of SQL treat NULL as not known, so the closures get no row that another part of the
condition decides. SQL decides by numbers below 2^53, which doubles hold exactly, by texts, and by
texts beside numbers that plainly are one or are none. It does not decide by

- larger numbers, infinities and NaN, and what is computed from or to them: divisions by zero too,
- lists and objects, but for whether one is missing or empty, has a text in it where it is a column,
  or has no text like a constant in it where it is JSON,
- texts that Python may read as numbers and SQL may not, such as " 7", "1_0" or "+3",
- `meta` that is no JSON, names in it with quotes or made of digits, and patterns of `like` with a
  `_` among two `%`, for which DuckDB would try all combinations of places.

A user's text stands in the SQL as a quoted constant only, since the columns have names of our own.
The SQL calls no functions but those in this file. None of them makes a value that is larger than
one of the row, and each takes time by the lengths of its values.

`meta` is JSON as `facts_bytes` writes it: of two fields with one name, which it never writes, SQL
takes the first.

A value that several expressions use is a column of a layer, one SELECT within another. So the SQL
grows with the length of a condition, not with 2 to its depth.
"""

import ast
import math
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from functools import reduce
from typing import Any, NamedTuple

import pyarrow as pa

from wdsprep.dataset.condition_syntax import (
    NUMBER,
    Condition,
    is_like,
    is_list,
    is_test_for_missing,
    number_of,
    path_of,
)
from wdsprep.dataset.sample_table import REST
from wdsprep.dataset.samples import META, PathParts, list_index

MOST_TERMS = 1000
"""DuckDB keeps vectors of 2,048 values for each term, and plans a layer in time by its terms."""
MOST_PATHS = 100
"""Paths into `meta`: of each, DuckDB has such vectors before any is used."""
EXACT = 2**53
"""From here on not all whole numbers are doubles."""
MOST_ITEMS = 2**31
SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=", ast.NotEq: "<>",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
}  # fmt: skip
PLAIN_NUMBER = "0123456789.-"
"""Of these characters alone, SQL and Python read the same number, if SQL reads one at all."""
QUOTE, TRUE, FALSE, NULL, MINUS, LIST, OBJECT = map(ord, '"tfn-[{')
"""The first characters of JSON, by which its kind is told."""


class Kind(Enum):
    """The kind of the values in a column."""

    NUMBER = "number"
    TEXT = "text"
    TEXTS = "texts"
    OTHER = "other"


class Column(NamedTuple):
    """A column of a table, by its name in the SQL."""

    sql: str
    kind: Kind
    has_nulls: bool


Columns = Mapping[str, Column]
"""The columns of a source of values, by their names in conditions."""


class Selection(NamedTuple):
    """The expressions of a condition, to be asked of a view `rows`.

    Both give the number `n` of each row. `meets` has a column after it that says whether a row
    meets the condition, with NULL for one that is left to the closures. `sees` has others after
    that: for each name of the condition, whether the row has a value, in the same way.
    """

    meets: str
    sees: str


class _TooLargeError(Exception):
    """A condition has more parts than DuckDB should be given."""


def kind_of(column: pa.DataType) -> Kind:
    kinds = pa.types
    if kinds.is_string(column) or kinds.is_large_string(column):
        return Kind.TEXT
    if kinds.is_list(column) and kinds.is_string(column.value_type):
        return Kind.TEXTS
    is_number = kinds.is_integer(column) or kinds.is_boolean(column)
    is_float = kinds.is_float32(column) or kinds.is_float64(column)
    return Kind.NUMBER if is_number or is_float else Kind.OTHER


def compile_condition(condition: Condition, sources: Sequence[Columns]) -> Selection | None:
    """Return the SQL for a condition on rows whose values come from several sources.

    A name has the value that the first source with a value for it has. Return None for a condition
    with more than `MOST_TERMS` terms or `MOST_PATHS` paths into `meta`.
    """
    compiler = _Compiler(sources)
    try:
        meets = compiler.truth(ast.parse(condition.plain, mode="eval").body)
        sees = [_is_present(compiler.path(path)) for path in condition.names]
    except _TooLargeError:
        return None
    return Selection(compiler.select([meets]), compiler.select([meets, *sees]))


class _Constant(Condition):
    """A part of a condition without names."""

    option = ""


class _Truth(NamedTuple):
    """SQL that is true, false, or NULL where it is not known."""

    sql: str
    level: int = 0


class _Number(NamedTuple):
    """SQL of a double or NULL, and of whether the number is beyond SQL."""

    sql: str
    odd: str
    level: int


class _Value(NamedTuple):
    """SQL of a value of each row.

    `number` is a double below `EXACT` or NULL, `text` a text or NULL, and `odd` is true where the
    value is beyond SQL. `json` is the value as JSON, if it comes from there, and `first` the code
    of its first character. `items` is a list of texts. `constant` is the value, if it is the same
    in all rows.
    """

    level: int = 0
    number: str = ""
    text: str = ""
    odd: str = ""
    json: str = ""
    first: str = ""
    items: str = ""
    constant: int | float | str | None = None


MISSING = _Value()
UNREADABLE = "TRUE"
UNKNOWN = _Truth("CAST(NULL AS BOOLEAN)")
NO_NUMBER = "CAST(NULL AS DOUBLE)"


class _Compiler:
    """The layers of the SQL, each of which may use what stands in those before it.

    The level of an expression is the first layer that may use it.
    """

    def __init__(self, sources: Sequence[Columns]) -> None:
        self._sources = sources
        self._layers: list[list[str]] = []
        self._terms = 0
        self._nodes: dict[ast.expr, _Value] = {}
        self._values: dict[PathParts, _Value] = {}
        self._read_texts: dict[str, _Number] = {}
        metas = (columns[META].sql for columns in sources if META in columns)
        self._paths: dict[str, list[str]] = {meta: [] for meta in metas}
        """Those that are looked for in the `meta` of all rows, so that each is parsed once."""

    def select(self, truths: Sequence[_Truth]) -> str:
        rows = "rows"
        found = [f"{_extract(m, paths)} AS found_{m}" for m, paths in self._paths.items() if paths]
        if found:
            rows = f"(SELECT *, {', '.join(found)} FROM {rows})"
        for layer in self._layers:
            rows = f"(SELECT *, {', '.join(layer)} FROM {rows})"
        return f"SELECT n, {', '.join(truth.sql for truth in truths)} FROM {rows}"

    def _bind(self, sql: str, level: int) -> str:
        """Return the name of a column for an expression."""
        self._count_term()
        while len(self._layers) <= level:
            self._layers.append([])
        name = f"v{self._terms}"
        self._layers[level].append(f"{sql} AS {name}")
        return name

    def _count_term(self) -> None:
        self._terms += 1
        if self._terms > MOST_TERMS:
            raise _TooLargeError

    # --- what is true or false
    def truth(self, node: ast.expr) -> _Truth:
        self._count_term()
        if _is_constant(node):
            return _Truth("TRUE" if _constant_of(node) else "FALSE")
        if isinstance(node, ast.BoolOp):
            word = "AND" if isinstance(node.op, ast.And) else "OR"
            return _join(word, list(map(self.truth, node.values)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return _negate(self.truth(node.operand))
        if is_test_for_missing(node):
            is_there = _is_present(self.value(node.left))
            return is_there if isinstance(node.ops[0], ast.IsNot) else _negate(is_there)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            links = map(self._link, sides, node.ops, sides[1:])
            return _join("AND", list(links))
        if is_like(node):
            return _is_like(self.value(node.args[0]), ast.literal_eval(node.args[1]))
        return _is_full(self.value(node))

    def _link(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> _Truth:
        self._count_term()
        if is_list(left) or (is_list(right) and not isinstance(op, ast.In | ast.NotIn)):
            return UNKNOWN
        link = ast.Compare(left, [op], [right])
        if _is_constant(link):
            return self.truth(link)
        value = self.value(left)
        if is_list(right):
            choices = ast.literal_eval(right)
            return self._is_one_of(value, choices, is_in=isinstance(op, ast.In))
        if isinstance(op, ast.In | ast.NotIn):
            return _contains(value, self.value(right), is_in=isinstance(op, ast.In))
        return self._compare(value, SIGNS[type(op)], self.value(right))

    def _compare(self, left: _Value, sign: str, right: _Value) -> _Truth:
        answers, odds, level = [], [left.odd, right.odd], max(left.level, right.level)
        if left.number and right.number:
            answers.append(f"{left.number} {sign} {right.number}")
        if left.text and right.text:
            answers.append(f"{left.text} {sign} {right.text}")
        for text, other in ((left, right), (right, left)):
            if text.text and other.number:
                read = self._read_text(text)
                sides = (read.sql, other.number) if text is left else (other.number, read.sql)
                answers.append(f"{sides[0]} {sign} {sides[1]}")
                odds.append(read.odd and f"({other.number} IS NOT NULL AND {read.odd})")
                level = max(level, read.level)
        return _decided(_coalesce(answers), level, odds)

    def _is_one_of(self, value: _Value, choices: Collection[Any], *, is_in: bool) -> _Truth:
        texts = [choice for choice in choices if isinstance(choice, str)]
        numbers = [choice for choice in choices if isinstance(choice, NUMBER)]
        if not all(map(_is_quotable, texts)):
            return UNKNOWN
        answers, odds, level = [], [value.odd], value.level
        if value.number:
            answers.append(_is_number_in(value.number, [*numbers, *map(number_of, texts)]))
        if value.text and texts:
            answers.append(f"{value.text} IN ({', '.join(map(_quote, texts))}) OR NULL")
        if value.text and numbers:
            read = self._read_text(value)
            answers.append(_is_number_in(read.sql, numbers))
            odds.append(read.odd)
            level = max(level, read.level)
        is_there = _coalesce(answers)
        return _decided(
            is_there if is_in else f"{_presence(value)} AND NOT {is_there}", level, odds
        )

    # --- values
    def value(self, node: ast.expr) -> _Value:
        """Return the value of a node, the same one for both links of a chain that have it."""
        if node not in self._nodes:
            self._nodes[node] = self._evaluate(node)
        return self._nodes[node]

    def _evaluate(self, node: ast.expr) -> _Value:
        if _is_constant(node):
            return _constant_value(_constant_of(node))
        if (path := path_of(node)) is not None:
            return self.path(path)
        if isinstance(node, ast.BinOp):
            left, right = (self._number(self.value(side)) for side in (node.left, node.right))
            return self._reckoned(f"{left.sql} {SIGNS[type(node.op)]} {right.sql}", left, right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            number = self._number(self.value(node.operand))
            sign = "-" if isinstance(node.op, ast.USub) else "+"
            return self._reckoned(f"{sign} {number.sql}", number)
        truth = self.truth(node)
        number_sql = self._bind(f"CAST({truth.sql} AS DOUBLE)", truth.level)
        return _Value(truth.level + 1, number_sql, odd=f"({number_sql} IS NULL)")

    def _reckoned(self, sql: str, *parts: _Number) -> _Value:
        """Return a value that is computed from numbers.

        If doubles give a result below `EXACT`, whole numbers give the same.
        """
        level = max(part.level for part in parts)
        number = self._bind(sql, level)
        odd = self._bind(_any([*(part.odd for part in parts), _is_beyond(number)]), level + 1)
        return _Value(level + 2, number, odd=odd)

    def _number(self, value: _Value) -> _Number:
        """Return a value as a number to calculate with."""
        if isinstance(value.constant, int) and abs(value.constant) >= EXACT:
            return _Number(NO_NUMBER, "TRUE", 0)
        if not value.text:
            return _Number(value.number or NO_NUMBER, value.odd, value.level)
        read = self._read_text(value)
        sql = f"coalesce({value.number}, {read.sql})" if value.number else read.sql
        return _Number(sql, _any([value.odd, read.odd]), max(value.level, read.level))

    def _read_text(self, value: _Value) -> _Number:
        """Return the text of a value as a number."""
        if value.constant is not None:
            return self._number(_constant_value(number_of(value.constant)))
        text = value.text
        if text not in self._read_texts:
            is_plain = f"ltrim({text}, '{PLAIN_NUMBER}') = ''"
            number = self._bind(
                f"CASE WHEN {is_plain} THEN TRY_CAST({text} AS DOUBLE) END", value.level
            )
            odd = self._bind(
                f"CASE WHEN {number} IS NOT NULL THEN {_is_beyond(number)} "
                f"ELSE coalesce({_may_read_as_number(text)}, FALSE) END",
                value.level + 1,
            )
            self._read_texts[text] = _Number(number, odd, value.level + 2)
        return self._read_texts[text]

    # --- values of names
    def path(self, path: PathParts) -> _Value:
        if path not in self._values:
            found = (self._find(path, columns) for columns in self._sources)
            self._values[path] = reduce(self._fill, found, MISSING)
        return self._values[path]

    def _fill(self, value: _Value, other: _Value) -> _Value:
        """Return a value that is the other one in rows that lack the first."""
        if value == MISSING or other == MISSING:
            return other if value == MISSING else value
        odd = f"coalesce({value.odd}, FALSE)" if value.odd else ""
        is_there = self._bind(_any([_presence(value), odd]), value.level)
        level = max(value.level + 1, other.level)

        def choose(first: str, second: str) -> str:
            if not first or not second:
                return first or (second and f"CASE WHEN NOT {is_there} THEN {second} END")
            return f"CASE WHEN {is_there} THEN {first} ELSE {second} END"

        parts = map(choose, value[1:-1], other[1:-1])
        return _Value(level + 1, *(part and self._bind(part, level) for part in parts))

    def _find(self, path: PathParts, columns: Columns) -> _Value:
        """Return the value at a path: from a column, else from `rest`, else from `meta`.

        Where a row has the first name of the path, it is not looked for elsewhere.
        """
        name, *inside = path
        if name == META:
            return self._find_in(columns.get(META), inside)
        column = columns.get(str(name)) if name != REST else None
        if column is None:
            return self._find_in(self._document(path, None, columns), path)
        value = self._column_value(column, inside)
        if not column.has_nulls or not {META, REST} & columns.keys():
            return value
        other = self._find_in(self._document(path, column, columns), path)
        level = max(value.level, other.level)
        number, text = (
            self._bind(f"coalesce({one}, {two})", level) if one and two else one or two
            for one, two in ((value.number, other.number), (value.text, other.text))
        )
        odd = _any([value.odd, other.odd])
        return _Value(level + 1, number, text, odd, other.json, other.first, value.items)

    def _column_value(self, column: Column, inside: Sequence[str | int]) -> _Value:
        is_there = f"({column.sql} IS NOT NULL)"
        if column.kind is Kind.OTHER:
            return _Value(odd=is_there)
        if column.kind is Kind.TEXTS and inside:
            index = list_index(inside[0])
            if not -1 < index < MOST_ITEMS or len(inside) > 1:
                return MISSING
            return _Value(1, text=self._bind(f"{column.sql}[{index + 1}]", 0))
        if inside:
            return MISSING
        if column.kind is Kind.TEXTS:
            return _Value(odd=is_there, items=column.sql)
        if column.kind is Kind.TEXT:
            return _Value(text=column.sql)
        number = self._bind(f"CAST({column.sql} AS DOUBLE)", 0)
        return _Value(1, number, odd=_is_beyond(number))

    def _document(self, path: PathParts, lacking: Column | None, columns: Columns) -> Column | None:
        """Return where the rows that lack a column have the JSON for a path: `rest` or `meta`."""
        meta, rest = columns.get(META), columns.get(REST)
        if rest is None and lacking is None:
            return meta
        if any(place and place.kind is not Kind.TEXT for place in (meta, rest)):
            return Column(UNREADABLE, Kind.OTHER, has_nulls=False)
        sql = meta.sql if meta else "NULL"
        if rest is not None:
            first = _json_path(path[:1])
            if first is None:
                return Column(UNREADABLE, Kind.OTHER, has_nulls=False)
            found = f"CAST({_extract(rest.sql, [first])}[1] AS VARCHAR)"
            sql = f"CASE WHEN {found} <> 'null' THEN {rest.sql} ELSE {sql} END"
        if lacking is not None:
            sql = f"CASE WHEN {lacking.sql} IS NULL THEN {sql} END"
        return Column(self._bind(sql, 0), Kind.TEXT, has_nulls=True)

    def _find_in(self, document: Column | None, path: Sequence[str | int]) -> _Value:
        """Return the value at a path in the JSON of a column."""
        if document is None:
            return MISSING
        is_there = f"{document.sql} IS NOT NULL"
        json_path = _json_path(path)
        if json_path is None or document.kind is not Kind.TEXT:
            return _Value(1, odd=f"({is_there})")
        if len(self._values) >= MOST_PATHS:
            raise _TooLargeError
        if (paths := self._paths.get(document.sql)) is not None:
            paths.append(json_path)
            found, place, level = f"found_{document.sql}", len(paths), 0
        else:
            found, place, level = self._bind(_extract(document.sql, [json_path]), 1), 1, 2
        json = self._bind(f"CAST({found}[{place}] AS VARCHAR)", level)
        return self._json_value(json, f"{is_there} AND {found} IS NULL", level + 1)

    def _json_value(self, json: str, is_damaged: str, level: int) -> _Value:
        first = self._bind(f"ord({json})", level)
        number = self._bind(
            f"CASE WHEN {first} = {MINUS} OR {first} BETWEEN {ord('0')} AND {ord('9')} "
            f"THEN TRY_CAST({json} AS DOUBLE) "
            f"WHEN {first} = {TRUE} THEN 1 WHEN {first} = {FALSE} THEN 0 END",
            level + 1,
        )
        text = self._bind(
            f"CASE WHEN {first} = {QUOTE} THEN json_extract_string({json}, '$') END", level + 1
        )
        odd = self._bind(
            f"CASE WHEN {first} IS NULL THEN {is_damaged} "
            f"WHEN {first} IN ({QUOTE}, {NULL}) THEN FALSE "
            f"ELSE coalesce({_is_beyond(number)}, TRUE) END",
            level + 2,
        )
        return _Value(level + 3, number, text, odd, json, first)


def _is_constant(node: ast.expr) -> bool:
    return not any(isinstance(part, ast.Name) for part in ast.walk(node))


def _constant_of(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    return _Constant(ast.unparse(node)).evaluate(())


def _constant_value(value: int | float | str | None) -> _Value:
    if value is None:
        return MISSING
    if isinstance(value, str):
        if not _is_quotable(value):
            return _Value(odd="TRUE")
        return _Value(text=_quote(value), constant=value)
    return _Value(number=_double(value), constant=value)


# --- truths about values
def _is_present(value: _Value) -> _Truth:
    return _decided(_presence(value), value.level, [_odd_scalar(value)])


def _presence(value: _Value) -> str:
    is_there = [f"{part} IS NOT NULL" for part in (value.number, value.text) if part]
    if nested := _is_nested(value):
        is_there.append(f"coalesce({nested}, FALSE)")
    return _any(is_there) or "FALSE"


def _is_full(value: _Value) -> _Truth:
    answers = [f"{value.number} <> 0"] if value.number else []
    if value.text:
        answers.append(f"{value.text} <> ''")
    if value.items:
        answers.append(f"len({value.items}) > 0")
    if value.first:
        answers.append(f"CASE WHEN {_is_nested(value)} THEN {value.json} NOT IN ('[]', '{{}}') END")
    return _decided(_coalesce(answers), value.level, [_odd_scalar(value)])


def _contains(part: _Value, whole: _Value, *, is_in: bool) -> _Truth:
    """Return whether a text is in another or in a list, or is not in it.

    A list or an object of JSON is left to the closures where the JSON has the text in it.
    """
    odd = whole.odd
    if whole.first and isinstance(part.constant, str) and _is_plain(part.constant):
        needle = _quote(f'"{part.constant}"')
        may_contain = f"contains({whole.json}, {needle})"
        odd = f"CASE WHEN {_is_json_nested(whole)} THEN {may_contain} ELSE {odd} END"
    if whole.items:
        odd = f"({whole.items} IS NULL AND {odd})"
    found = [f"contains({whole.text}, {part.text})"] if part.text and whole.text else []
    if part.text and whole.items:
        found.append(f"list_contains({whole.items}, {part.text})")
    answer = _coalesce(found)
    if not is_in:
        answer = f"{_presence(part)} AND {_presence(whole)} AND NOT {answer}"
    return _decided(answer, max(part.level, whole.level), [part.odd, odd])


def _is_like(value: _Value, pattern: str) -> _Truth:
    if not value.text:
        return _decided("FALSE", value.level, [value.odd])
    if not _is_quotable(pattern) or ("_" in pattern and pattern.count("%") > 1):
        return _decided("FALSE", value.level, [value.odd, f"{value.text} IS NOT NULL"])
    answer = f"coalesce({value.text} LIKE {_quote(pattern)}, FALSE)"
    return _decided(answer, value.level, [value.odd])


def _odd_scalar(value: _Value) -> str:
    """Return whether a value is beyond SQL and neither a list nor an object."""
    nested = _is_nested(value)
    return f"({value.odd} AND NOT coalesce({nested}, FALSE))" if nested else value.odd


# --- parts of SQL
def _is_nested(value: _Value) -> str:
    """Return whether a value is a list or an object."""
    is_list = f"{value.items} IS NOT NULL" if value.items else ""
    return _any([is_list, _is_json_nested(value) if value.first else ""])


def _is_json_nested(value: _Value) -> str:
    return f"{value.first} IN ({LIST}, {OBJECT})"


def _is_beyond(number: str) -> str:
    """Return whether a number is from `EXACT` on, infinite or NaN; NULL if it is NULL."""
    return f"(NOT abs({number}) < {EXACT})"


def _may_read_as_number(text: str) -> str:
    """Return whether a text begins as a number of Python may begin, other than `inf` and `nan`."""
    begins = ", ".join(str(ord(sign)) for sign in f"{PLAIN_NUMBER}+")
    is_ascii = f"ord({text}) BETWEEN {ord('!')} AND {ord('~')}"
    return f"({text} <> '' AND (NOT {is_ascii} OR ord({text}) IN ({begins})))"


def _is_number_in(number: str, choices: Collection[Any]) -> str:
    """Return whether a number below `EXACT` is one of these; NULL if it is NULL or is none."""
    exact = sorted(
        {float(choice) for choice in choices if choice is not None and abs(choice) < EXACT}
    )
    return f"{number} IN ({', '.join(map(_double, exact))}) OR NULL" if exact else "NULL"


def _decided(sql: str, level: int, odds: Sequence[str]) -> _Truth:
    """Return a truth that is not known where one of `odds` is true."""
    odd = _any(odds)
    return _Truth(f"CASE WHEN {odd} THEN NULL ELSE {sql} END" if odd else f"({sql})", level)


def _any(parts: Sequence[str]) -> str:
    known = list(dict.fromkeys(part for part in parts if part))
    return f"({' OR '.join(known)})" if known else ""


def _coalesce(answers: Sequence[str]) -> str:
    return f"coalesce({', '.join([*answers, 'FALSE'])})" if answers else "FALSE"


def _join(word: str, parts: Sequence[_Truth]) -> _Truth:
    sql = f" {word} ".join(part.sql for part in parts)
    return _Truth(f"({sql})", max(part.level for part in parts))


def _negate(part: _Truth) -> _Truth:
    return _Truth(f"(NOT {part.sql})", part.level)


def _double(value: float) -> str:
    """Return a number as a double; one that is too large is infinite."""
    try:
        value = float(value)
    except OverflowError:
        value = math.inf if value > 0 else -math.inf
    return f"CAST('{value!r}' AS DOUBLE)"


def _is_quotable(text: str) -> bool:
    """Return whether a text can be one of SQL: UTF-8 without NUL."""
    return "\0" not in text and text == text.encode("utf-8", "replace").decode()


def _is_plain(text: str) -> bool:
    """Return whether a text stands in JSON and in its paths as it is."""
    return bool(text) and text.isprintable() and not set(text) & set('"\\/*')


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _extract(meta: str, paths: Sequence[str]) -> str:
    """Return a list of the JSON at paths, which is NULL if `meta` is no JSON."""
    return f"TRY(json_extract({meta}, [{', '.join(map(_quote, paths))}]))"


def _json_path(path: Sequence[str | int]) -> str | None:
    """Return a path of JSON in SQL, or None if SQL has none that means the same."""
    for part in path:
        if isinstance(part, int) and part >= MOST_ITEMS:
            return None
        if isinstance(part, str) and (part.isdecimal() or not _is_plain(part)):
            return None
    return "$" + "".join(f"[{p}]" if isinstance(p, int) else f'."{p}"' for p in path)
