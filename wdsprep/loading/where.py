"""`where="aesthetic >= 6 and width >= 768"`: the samples of a dataset that meet a condition.

The text is parsed, checked against a short list of what may stand in it, and computed for many
samples at once; it is never run as code. A name is a path into the json of a sample (`width`,
`meta.aesthetic`, `meta["a name"]`, `captions[0]`), a bare name that the json lacks one into its
`meta`, or a column of a joined table. A comparison with what a sample lacks, or with a text where a
number should be, is false; a text that reads as a number is one beside numbers, since tables as CSV
hold nothing else.

All json of the dataset is read once for a condition (`facts`). What meets it is kept (`kept`) by
the contents of the dataset and the condition, so a run that begins again finds it there.
"""

import ast
import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.samples import PathParts, at_path
from wdsprep.errors import UsageError
from wdsprep.loading.catalog import Dataset
from wdsprep.loading.facts import SomeFacts, look_at_all
from wdsprep.loading.kept import KeptWriter, kept
from wdsprep.loading.order.chance import Ints, key_of
from wdsprep.loading.parts import Numbers, Positions, RunningDigest, chosen
from wdsprep.loading.shelves.cache import CacheDir
from wdsprep.loading.tables import LACKING, KeyedTable, is_table, keyed_table
from wdsprep.text import examples, human_bytes, plural

Mask = NDArray[np.bool_]
LONGEST = 100_000
SHOWN = 200
"""Characters of a condition that a state has; of a longer one it has a digest."""
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_REACH: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_log = logging.getLogger("wdsprep")


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
        if kinds <= {int, float, bool, type(None)} and kinds - {type(None)}:
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
        return Values.of([_number(one) for one in self.array.ravel()])


class Condition:
    """A parsed condition."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text.strip() or len(text) > LONGEST:
            raise UsageError(f"where={text!r:.60}: give a condition, such as 'width >= 768'")
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise UsageError(
                f'where="{in_short(text)}": {error.msg} at character {error.offset}'
            ) from None
        except (ValueError, MemoryError, RecursionError) as error:
            raise UsageError(f"where= cannot be read: {error}") from None
        self.names: dict[PathParts, None] = {}
        """What it asks for."""
        try:
            self._check(self._tree)
            self.plain = ast.unparse(self._tree)
        except RecursionError:
            raise UsageError("where= cannot be read: it is nested too deep") from None

    def _check(self, node: ast.expr) -> None:
        """Refuse all but what the docstring of this module names."""
        if isinstance(node, ast.BoolOp):
            parts = node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.UAdd):
            parts = [node.operand]
        elif isinstance(node, ast.BinOp) and type(node.op) in _REACH:
            parts = [node.left, node.right]
        elif isinstance(node, ast.Compare):
            parts = [node.left]
            for op, part in zip(node.ops, node.comparators, strict=True):
                is_in = isinstance(op, ast.In | ast.NotIn)
                if not (is_in and _is_list(part)):
                    parts.append(part)
                if not is_in and type(op) not in _COMPARE:
                    self._refuse(node)
        elif (name := _name(node)) is not None:
            self.names[name] = None
            return
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, str, bool):
            return
        else:
            self._refuse(node)
        for part in parts:
            self._check(part)

    def _refuse(self, node: ast.expr) -> None:
        part = in_short(ast.get_source_segment(self.text.strip(), node) or "")
        raise UsageError(
            f'where="{in_short(self.text)}": {part!r} cannot be used: compare names with numbers '
            "and texts by < <= > >= == != in, reckon by + - * /, and join with and, or, not"
        )

    def holds(self, found: Mapping[PathParts, Values], count: int) -> Mask:
        """Of which samples it is true."""
        with np.errstate(all="ignore"):
            return np.broadcast_to(_truth(_value(self._tree, found, count)), count)


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
        made = np.asarray(_REACH[type(node.op)](_wide(left.array), _wide(right.array)))
        return Values(made, left.there & right.there & np.isfinite(made))
    if isinstance(node, ast.Compare):
        return Values(_compared(node, found, count), everywhere)
    if isinstance(node, ast.Constant):
        return Values.constant(node.value)
    name = _name(node)
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
            if _is_list(part):
                continue
        else:
            all_true &= _pairs(_COMPARE[type(op)], left, _value(part, found, count), count)
        left = _value(part, found, count)
    return all_true


def _is_in(
    op: ast.cmpop, left: Values, part: ast.expr, found: Mapping[PathParts, Values], count: int
) -> Mask:
    """Whether it is one of those listed; or stands in a text or a list that a sample has."""
    if _is_list(part):
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
    return _each(lambda one, other: _like(compare, one, other), left, right, count)


def _scalar(values: Values) -> Any:
    """A constant as a plain number, so that it takes the other side's precision."""
    return values.array if values.array.ndim else values.array.item()


def _each(test: Callable[[Any, Any], Any], left: Values, right: Values, count: int) -> Mask:
    """Of objects, one by one."""
    there = np.broadcast_to(left.there & right.there, count)
    sides = (np.broadcast_to(side.array, count).tolist() for side in (left, right))
    pairs = zip(there.tolist(), *sides, strict=True)
    return np.array([bool(has and test(one, other)) for has, one, other in pairs], np.bool_)


def _like(compare: Callable[[Any, Any], Any], one: Any, other: Any) -> bool:
    """Numbers with numbers, texts with texts; a text beside a number as one, if it reads as one."""
    if isinstance(one, int | float) and isinstance(other, str):
        other = _number(other)
    elif isinstance(other, int | float) and isinstance(one, str):
        one = _number(one)
    try:
        return one is not None and other is not None and bool(compare(one, other))
    except TypeError:
        return False


def _stands_in(one: Any, other: Any) -> bool:
    among = [_float(x) if type(x) is int else x for x in other] if type(other) is list else other
    try:
        return one in among
    except TypeError:
        return False


def _float(one: float) -> float | None:
    """None where it is beyond what a float can be."""
    try:
        found = float(one)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _number(one: Any) -> Any:
    if isinstance(one, str):
        try:
            value = float(one)
        except ValueError:
            return None
        return value if np.isfinite(value) else None
    return one if isinstance(one, int | float) else None


def _is_list(node: ast.expr) -> bool:
    """A list or tuple of constants; or a text, in which texts may be looked for."""
    if not isinstance(node, ast.List | ast.Tuple):
        return False
    return all(_is_constant(part) for part in node.elts)


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
        return isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float, str, bool)


def _name(node: ast.expr) -> PathParts | None:
    """The path that a node stands for, or None."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (before := _name(node.value)):
        return (*before, node.attr)
    if isinstance(node, ast.Subscript) and (before := _name(node.value)):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(key, str | int) and not isinstance(key, bool):
            return (*before, key)
    return None


def shown_name(path: PathParts) -> str:
    first, *others = path
    return f"{first}" + "".join(f".{p}" if isinstance(p, str) else f"[{p}]" for p in others)


@dataclass(frozen=True, slots=True)
class _Left:
    """What is left of a piece of a shard, and how many of its samples have each name; of all, how
    many are damaged, and how many others lack a row in a table."""

    numbers: Numbers
    seen: Ints
    damaged: int
    lacking: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Subset:
    """What decides which samples of a dataset are served: a condition, tables that have to have
    them, or both."""

    whole: Dataset
    condition: Condition | None
    tables: tuple[KeyedTable, ...]

    @property
    def shown(self) -> str:
        return in_short(self.condition.plain) if self.condition else ""

    @property
    def what(self) -> tuple[str, ...]:
        """All that it depends on."""
        files, plain = self.whole.files, self.condition.plain if self.condition else ""
        digests = (table.digest for table in self.tables)
        return "where", *files.names, *files.contents, plain, *digests

    @cached_property
    def names(self) -> tuple[PathParts, ...]:
        return tuple(self.condition.names) if self.condition else ()

    def left_of(self, some: SomeFacts) -> _Left:
        count = len(some.keys)
        places = [table.places(some.keys) for table in self.tables]
        has_rows = np.ones(count, np.bool_)
        for own in places:
            has_rows &= own != LACKING
        keep, is_sound = has_rows, np.ones(count, np.bool_)
        is_sound[some.damaged] = False
        seen = np.zeros(len(self.names), np.int64)
        if self.condition is not None:
            found = {name: self._values(name, some, places) for name in self.names}
            keep = self.condition.holds(found, count) & is_sound & has_rows
            seen = np.array([found[name].there.sum() for name in self.names], np.int64)
        numbers = (np.flatnonzero(keep) + some.first).astype(np.uint32)
        return _Left(numbers, seen, int((~is_sound).sum()), int((is_sound & ~has_rows).sum()))

    def _values(self, name: PathParts, some: SomeFacts, places: Sequence[Ints]) -> Values:
        """A column of a table, or what the json has in a place."""
        for table, own in zip(self.tables, places, strict=True):
            if len(name) == 1 and name[0] in table.columns:
                column = table.column(str(name[0]))[own]
                plain = column.astype(np.float64) if column.dtype.kind == "i" else column
                return Values(plain, own != LACKING)
            if len(name) == 1 and name[0] in table.texts:
                return Values.of(table.text(str(name[0]), own))
        return Values.of([at_path(one, name) for one in some.facts])

    def positions(self, cache: CacheDir | None) -> Positions:
        """What is served, looked for once."""
        found = kept(cache, self.what, self._look)
        url = self.whole.store.url
        if damaged := found.facts["damaged"]:
            what = plural(damaged, "sample")
            _log.warning("%s: the json of %s is damaged or lacking: left out", url, what)
        if lacking := found.facts["lacking"]:
            what = plural(lacking, "sample has no row", "samples have no row")
            places = examples([table.url for table in self.tables])
            _log.warning("%s: %s in %s: left out", url, what, places)
        return Positions(
            numbers=found.arrays["numbers"],
            starts=found.arrays["starts"],
            digest=found.facts["digest"],
        )

    def _look(self, writer: KeptWriter, path: Path) -> None:
        files = self.whole.files
        what = "json" if self.condition else "keys"
        _log.info(
            "%s: reading the %s of %s (%s of shards) for where=%r and %s; what is left is kept in "
            "%s",
            files.store.url,
            what,
            plural(files.samples, "sample"),
            human_bytes(files.nbytes),
            self.shown,
            plural(len(self.tables), "table"),
            path,
        )
        counts = np.zeros(len(files.names) + 1, np.int64)
        seen, others = np.zeros(len(self.names), np.int64), np.zeros(2, np.int64)
        digest = RunningDigest()

        def numbers() -> Iterator[Numbers]:
            parses = self.condition is not None
            for shard, pieces in look_at_all(self.whole, self.left_of, parses=parses):
                for piece in pieces:
                    counts[shard + 1] += len(piece.numbers)
                    seen[:] += piece.seen
                    others[:] += piece.damaged, piece.lacking
                    digest.update(piece.numbers)
                    yield piece.numbers

        writer.add("numbers", "<u4", numbers())
        unknown = [name for name, count in zip(self.names, seen, strict=True) if not count]
        if unknown:
            ways = (
                "latents keep nothing of what their images came with: join a table that has it, "
                "or load the images with encode="
                if self.whole.files.kind == "latents"
                else "wdsprep inspect DATASET KEY shows what one has"
            )
            raise UsageError(
                f"{files.store.url}: no sample has {shown_name(unknown[0])}, which "
                f"where={self.shown!r} asks for: {ways}"
            )
        starts = np.cumsum(counts)
        writer.add("starts", "<i8", [starts])
        writer.facts["damaged"], writer.facts["lacking"] = others.tolist()
        writer.facts["digest"] = digest.of(starts)


def those_where(
    datasets: Sequence[Dataset], where: str | None, cache: CacheDir | None
) -> tuple[Dataset, ...]:
    """What is left of datasets where a condition holds, beside the one that a stream may have, and
    where all tables that are joined have a row; with these tables."""
    subsets: dict[Dataset, Subset | None] = {}
    known: dict[Subset, Positions] = {}
    found = []
    for dataset in datasets:
        if dataset.whole not in subsets:
            subsets[dataset.whole] = _subset(dataset, where, cache)
        subset = subsets[dataset.whole]
        if subset is None:
            found.append(dataset)
            continue
        if subset not in known:
            known[subset] = subset.positions(cache)
        if (left := chosen(dataset, known[subset])) is not None:
            found.append(replace(left, where=subset.shown, tables=subset.tables))
    for whole, subset in subsets.items():
        if subset is not None and all(dataset.whole is not whole for dataset in found):
            raise UsageError(
                f"{whole.store.url}: no sample meets where={subset.shown!r}: ask for less"
                if subset.condition
                else f"{whole.store.url}: no sample has a row in each of the tables that are "
                f"joined ({examples([table.url for table in subset.tables])}): see their keys"
            )
    return tuple(found)


def _subset(dataset: Dataset, where: str | None, cache: CacheDir | None) -> Subset | None:
    """Which samples of a dataset are asked for, if not all."""
    given = [Condition(text) for text in (dataset.where, where) if text is not None and text != ""]
    condition = joint(given) if given else None
    bare = [str(name[0]) for name in condition.names if len(name) == 1] if condition else []
    places = dict.fromkeys(place for place in dataset.join if is_table(place))
    tables = tuple(keyed_table(place, cache, bare) for place in places)
    names = [name for table in tables for name in table.columns]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"two of the tables that are joined have {twice[0]}: leave one out")
    if condition is None and not tables:
        return None
    return Subset(whole=dataset.whole, condition=condition, tables=tables)


def joint(conditions: Sequence[Condition]) -> Condition:
    """All of them as one."""
    if len(conditions) == 1:
        return conditions[0]
    return Condition(" and ".join(f"({condition.plain})" for condition in conditions))


def in_short(plain: str) -> str:
    """As a state has it, which is small."""
    return plain if len(plain) <= SHOWN else f"{plain[:60]}... {key_of(plain):016x}"
