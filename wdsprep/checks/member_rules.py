"""Rules for the members of a sample, as `shards/README.md` states them."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol

from wdsprep.dataset.buckets import bucket_of
from wdsprep.dataset.npy_arrays import Field, fields_of, is_finite, is_imported, is_of_text
from wdsprep.dataset.receipts import Receipt, Settings, Shard
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import parse_json
from wdsprep.dataset.score_columns import is_scored
from wdsprep.dataset.shapes import (
    cut_size,
    fields_by_shape,
    shape_name,
    shape_ranges,
    shapes_of,
)
from wdsprep.images.nearest_shape import cut_of

IMAGES = {"jpg": b"\xff\xd8\xff", "png": b"\x89PNG\r\n\x1a\n", "webp": b"RIFF"}
HEAD_NBYTES = 8
IMAGE_FACTS: dict[str, type] = {
    **dict.fromkeys(("key", "source", "caption"), str),
    **dict.fromkeys(("width", "height", "source_width", "source_height", "bucket"), int),
    "changes": list,
    "meta": dict,
}
IMPORTED_FACTS: dict[str, type] = dict.fromkeys(("key", "source", "caption"), str)
TEXT_FACTS: dict[str, type] = {
    **IMPORTED_FACTS,
    "tokens": int,
    "cut": bool,
}
LATENT_FACTS: dict[str, type] = {
    **TEXT_FACTS,
    **dict.fromkeys(("source_width", "source_height", "width", "height"), int),
    **dict.fromkeys(("scaled_width", "scaled_height"), int),
    "crop": list,
}


View = Callable[[int, int], memoryview]


class CheckRules(Protocol):
    """The rules for the samples of a shard.

    Each check returns what is wrong, or "" if nothing is.
    """

    def begin(self, number: int) -> None:
        """Go on to the sample with this number in its shard."""

    def check_place(self, number: int, field: str) -> str:
        """Check that a field may be the member with this number of its sample."""

    def check_member(self, field: str, view: View, start: int, nbytes: int) -> str:
        """Check the content of a member that is neither json nor txt."""

    def check_facts(self, facts: Mapping[str, Any]) -> str:
        """Check the facts in the json of a sample."""

    @property
    def members(self) -> int:
        """Return the number of members that each sample has."""


def rules_of(receipt: Receipt, shard: Shard) -> CheckRules:
    if receipt.dataset == "images":
        return ImageRules(tuple(receipt.settings["buckets"]), shard.bucket)
    if shapes_of(receipt.settings):
        return ShapedRules(receipt.settings, receipt.counts)
    fields = fields_of(receipt.settings["layout"])
    if is_scored(receipt.settings):
        return LatentRules(fields, None)
    if is_imported(receipt.settings):
        return LatentRules(fields, IMPORTED_FACTS)
    return LatentRules(fields, TEXT_FACTS if is_of_text(fields) else LATENT_FACTS)


class ImageRules:
    members = 3

    def __init__(self, buckets: tuple[int, ...], bucket: int) -> None:
        self._buckets, self._bucket = buckets, bucket

    def begin(self, number: int) -> None:
        """Do nothing, since all samples have the same rules."""

    def check_place(self, number: int, field: str) -> str:
        if field in IMAGES if number == 0 else field == ("", "json", "txt")[number]:
            return ""
        return f"{field} is in the place of {('an image', 'json', 'txt')[number]}"

    def check_member(self, field: str, view: View, start: int, nbytes: int) -> str:
        head = view(start, min(nbytes, HEAD_NBYTES))
        return (
            ""
            if bytes(head).startswith(IMAGES[field])
            else f"{field} is not an image of that format"
        )

    def check_facts(self, facts: Mapping[str, Any]) -> str:
        if wrong := _wrong_types(facts, IMAGE_FACTS):
            return wrong
        width, height = facts["width"], facts["height"]
        fits = min(width, height) >= self._buckets[0]
        if not fits or bucket_of(width, height, self._buckets) != self._bucket:
            return f"{width} x {height} pixels do not belong in this bucket"
        return "" if facts["bucket"] == self._bucket else "json states another bucket"


class LatentRules:
    def __init__(self, fields: tuple[Field, ...], facts: Mapping[str, type] | None) -> None:
        """Take the arrays of a sample, and the types of its facts, or None if it has no json."""
        self._fields = {field.name: field for field in fields}
        self._facts = facts or {}
        self._order = (*self._fields, *(() if facts is None else ("json", "txt")))
        self.members = len(self._order)

    def begin(self, number: int) -> None:
        """Do nothing, since all samples have the same rules."""

    def check_place(self, number: int, field: str) -> str:
        wanted = self._order[number]
        return "" if field == wanted else f"{field} is in the place of {wanted}"

    def check_member(self, field: str, view: View, start: int, nbytes: int) -> str:
        return array_problem(self._fields[field], view(start, nbytes), nbytes)

    def check_facts(self, facts: Mapping[str, Any]) -> str:
        return _wrong_types(facts, self._facts)


class ShapedRules(LatentRules):
    """The rules for samples of several shapes.

    Samples of one shape stand together, in the range that the receipt counts. The shape of a sample
    is the one that the size of its image demands.
    """

    def __init__(self, settings: Settings, counts: Mapping[str, int]) -> None:
        self._is_imported = is_imported(settings)
        facts = {**IMPORTED_FACTS, "crop": list} if self._is_imported else LATENT_FACTS
        super().__init__(fields_of(settings["layout"]), facts)
        ranges = shape_ranges(settings, counts)
        self._names, self._ends = [*ranges], [each.stop for each in ranges.values()]
        self._in_shape = {
            name: {field.name: field for field in fields}
            for name, fields in fields_by_shape(settings).items()
        }
        self._fit = lru_cache(1 << 12)(cut_of(settings).fit)
        self._shape = ""

    def begin(self, number: int) -> None:
        at = bisect_right(self._ends, number)
        self._shape = self._names[at] if at < len(self._names) else ""
        self._fields = self._in_shape.get(self._shape, self._fields)

    def check_facts(self, facts: Mapping[str, Any]) -> str:
        return super().check_facts(facts) or self._cut_problem(facts)

    def _cut_problem(self, facts: Mapping[str, Any]) -> str:
        if not self._shape:
            return "it comes after all samples that the receipt counts by shape"
        if self._is_imported:
            name = shape_name(cut_size(facts))
            return "" if name == self._shape else f"json states the shape {name}, not {self._shape}"
        size = f"{facts['width']} x {facts['height']} pixels"
        try:
            fit = self._fit(facts["width"], facts["height"])
        except (RejectedError, ArithmeticError):
            return f"{size} fit into no shape"
        if shape_name((fit.width, fit.height)) != self._shape:
            return f"{size} do not belong in shape {self._shape}"
        box = [fit.left, fit.top, fit.left + fit.width, fit.top + fit.height]
        scaled = fit.scaled_width, fit.scaled_height
        if facts["crop"] != box or (facts["scaled_width"], facts["scaled_height"]) != scaled:
            return f"json states another crop than that of {size} in shape {self._shape}"
        return ""


def array_problem(field: Field, data: memoryview, nbytes: int) -> str:
    """Return what is wrong with a member that must be the array of a field, or "" if nothing is."""
    header = field.header_of(nbytes)
    if not header or bytes(data[: len(header)]) != header:
        return f"{field.name} is not the array of {field} that it should be"
    if not is_finite(field.dtype, data[len(header) :]):
        return f"{field.name} has values that are not finite"
    return ""


def read_facts(json_data: bytes) -> dict[str, Any] | str:
    """Return the object in the json of a sample, or what is wrong with the json."""
    try:
        facts = parse_json(json_data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        return f"json cannot be read ({error})"
    return facts if isinstance(facts, dict) else "json is not an object"


def text_problem(
    key: str, facts: Mapping[str, Any], json_data: bytes, txt: bytes, rules: CheckRules
) -> str:
    """Return what is wrong with the json and the caption of a sample, or "" if nothing is.

    `facts` are the object in the json.
    """
    try:
        caption = txt.decode()
    except ValueError as error:
        return f"txt cannot be read ({error})"
    if b"null" in json_data and _has_null(facts):
        return "json has a null value"
    if wrong := rules.check_facts(facts):
        return wrong
    if facts["key"] != key:
        return f"json states the key {facts['key']}"
    return "" if facts.get("caption", "") == caption else "txt is not the caption of the json"


def _wrong_types(facts: Mapping[str, Any], types: Mapping[str, type]) -> str:
    if [*map(type, map(facts.get, types))] == [*types.values()]:
        return ""
    for name, kind in types.items():
        if type(facts.get(name)) is not kind:
            return f"json lacks {name}, or its type is not {kind.__name__}"
    return ""


def _has_null(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_null, value.values()))
    return any(map(_has_null, value)) if isinstance(value, list) else value is None
