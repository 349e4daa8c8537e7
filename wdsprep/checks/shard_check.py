"""Check the samples of one shard against the format, which `shards/README.md` states.

One pass over the shard notes what breaks the format, where each sample starts, and the keys.

The rules for the members of a sample are those of images, of latents, or of latents in shapes.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from wdsprep.dataset.manifest import Receipt, Shard
from wdsprep.dataset.npy_arrays import (
    GIVEN,
    Field,
    field_of,
    fields_of,
    is_finite,
    is_imported,
    is_of_text,
)
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.sample_table import ROW, Columns, TableWriter
from wdsprep.dataset.samples import (
    MIRRORED,
    TARGET,
    image_name,
    is_mask,
    parse_json,
    role_of,
    roles_of,
)
from wdsprep.dataset.settings import Settings, is_scored
from wdsprep.dataset.shapes import (
    bucket_of,
    cut_size,
    fields_by_shape,
    fields_in_shape,
    shape_name,
    shape_ranges,
    shapes_of,
)
from wdsprep.dataset.shard_reader import HashedTape
from wdsprep.dataset.tar import BLOCK, padded
from wdsprep.dataset.tar.members import (
    BadSampleError,
    encode_index,
    members,
    split_member,
    truncated,
)
from wdsprep.dataset.tar.write import header
from wdsprep.encoding.recipe_options import PIPELINE, SHAPES
from wdsprep.errors import FormatError
from wdsprep.images.nearest_shape import cut_of
from wdsprep.limits import MAX_TEXT_NBYTES

IMAGES = {"jpg": b"\xff\xd8\xff", "png": b"\x89PNG\r\n\x1a\n", "webp": b"RIFF"}
HEAD_NBYTES = 8
IMAGE_FACTS: dict[str, type] = {
    **dict.fromkeys(("key", "source", "caption"), str),
    **dict.fromkeys(("width", "height", "original_width", "original_height", "bucket"), int),
    "changes": list,
    "meta": dict,
}
ROLE_FACTS: dict[str, type] = {
    **dict.fromkeys(("width", "height", "original_width", "original_height"), int),
    "changes": list,
}
IMPORTED_FACTS: dict[str, type] = dict.fromkeys(("key", "source", "caption"), str)
TEXT_FACTS: dict[str, type] = {**IMPORTED_FACTS, "tokens": int, "cut": bool}
LATENT_FACTS: dict[str, type] = {
    **TEXT_FACTS,
    **dict.fromkeys(("original_width", "original_height", "width", "height"), int),
    **dict.fromkeys(("scaled_width", "scaled_height"), int),
    "crop": list,
}


View = Callable[[int, int], memoryview]


def rules_of(receipt: Receipt, shard: Shard) -> "SampleRules":
    if receipt.dataset == "images":
        return ImageRules(receipt.settings, shard.bucket)
    if shapes_of(receipt.settings):
        return ShapedRules(receipt.settings, receipt.counts)
    if is_scored(receipt.settings):
        return SampleRules(receipt.settings, None)
    if is_imported(receipt.settings):
        return SampleRules(receipt.settings, IMPORTED_FACTS)
    is_text = is_of_text(fields_of(receipt.settings["layout"]))
    return SampleRules(receipt.settings, TEXT_FACTS if is_text else LATENT_FACTS)


class SampleRules:
    """The rules for the samples of a shard: arrays of latents, text or scores, json and caption.

    In place of the array of a role, a sample has one for each of its images in that role, whose
    size its json states. Each check returns what is wrong, or "" if nothing is.
    """

    def __init__(self, settings: Settings, facts: Mapping[str, type] | None) -> None:
        """Take the settings of a dataset, and the types of a sample's facts, or None without json.

        Roles are those of its arrays.
        """
        self._settings, self._facts = settings, facts or {}
        fields = fields_of(settings.get("layout", ()))
        self._fields = {field.name: field for field in fields}
        self._roles = tuple(dict.fromkeys(field.role for field in fields if field.role))
        self._mirrored = {field.role for field in fields if field.role and field.mirrors}
        in_roles = [number for number, field in enumerate(fields) if field.role]
        self._first_in_roles = in_roles[0] if in_roles else -1
        others = [field.name for field in fields if not field.role]
        self._order = (*others, *(() if facts is None else ("json", "txt")))
        self._in_roles: dict[str, Field | None] = {}
        """What the present sample has of images in roles so far, by the names of members: images,
        or arrays of them and of their mirror images."""

    @property
    def members(self) -> int:
        """Return the number of members that the present sample has."""
        return len(self._order) + len(self._in_roles)

    def begin(self, number: int) -> None:
        """Go on to the sample with this number in its shard."""
        del number  # all samples have the same rules
        self._in_roles = {}

    def check_place(self, number: int, field: str) -> str:
        """Check that a field may be the member with this number of its sample."""
        place, name = number - len(self._in_roles), field.removesuffix(".npy")
        last = next(reversed(self._in_roles), "")
        has_mirror = last.endswith(MIRRORED) or role_of(last)[0] not in self._mirrored
        if place == self._first_in_roles and has_mirror and name != field:
            is_in_role = self._is_next_in_roles(name)
        else:
            is_in_role = not has_mirror and field == f"{last}{MIRRORED}.npy"
        if is_in_role:
            self._in_roles[name] = None
            return ""
        wanted = self._order[place] if has_mirror else f"{last}{MIRRORED}.npy"
        return "" if field == wanted else f"{field} is in the place of {wanted}"

    def _is_next_in_roles(self, name: str) -> bool:
        """Return whether this may be the next image in a role: those of one have no gaps."""
        images = self._images_in_roles
        last, count = role_of(images[-1]) if images else ("", 0)
        later = self._roles[self._roles.index(last) + 1 :] if last else self._roles
        return name in (*later, *([image_name(last, count + 1)] if last else []))

    @property
    def _images_in_roles(self) -> list[str]:
        """Return the names of the images in roles that the present sample has so far."""
        return [name for name in self._in_roles if not name.endswith(MIRRORED)]

    def check_member(self, field: str, view: View, start: int, nbytes: int) -> str:
        """Check the content of a member that is neither json nor txt."""
        data = view(start, nbytes)
        if (name := field.removesuffix(".npy")) not in self._in_roles:
            return array_problem(self._fields[field], data, nbytes)
        try:
            array = self._in_roles[name] = field_of(field, data)  # which json has to confirm
        except FormatError as error:
            return str(error)
        return array_problem(array, data, nbytes)

    def check_facts(self, facts: Mapping[str, Any]) -> str:
        """Check the facts in the json of a sample."""
        return _wrong_types(facts, self._facts) or (self._roles and self._role_problem(facts)) or ""

    def _role_problem(self, facts: Mapping[str, Any]) -> str:
        """Return what is wrong with images in roles, or with what json says of them.

        Those that are cut as the target is have the size of its crop.
        """
        if not (self._in_roles or TARGET in self._settings["roles"]):
            return f"it has no {' and no '.join(self._roles)}"
        if wrong := self._wrong_role_facts(facts, {"width": int, "height": int}):
            return wrong
        images = self._images_in_roles
        sizes = {name: (facts[f"{name}_width"], facts[f"{name}_height"]) for name in images}
        for name, size in sizes.items():
            is_free = self._settings["role_sizes"][role_of(name)[0]] in (GIVEN, PIPELINE, SHAPES)
            if not is_free and size != cut_size(facts):
                return f"{name} has another size than the target"
        try:
            fields = fields_in_shape(self._settings, None, sizes)
        except FormatError as error:
            return str(error)
        for field in fields:
            wanted = replace(field, is_of_role=False)
            if field.role and self._in_roles.get(field.name.removesuffix(".npy")) != wanted:
                return f"{field.name} is not the array of {field} that it should be"
        return ""

    def _wrong_role_facts(self, facts: Mapping[str, Any], types: Mapping[str, type]) -> str:
        """Return what is wrong with the facts of images in roles, of which these are the types."""
        images = self._images_in_roles
        wanted = {f"{name}_{fact}": kind for name in images for fact, kind in types.items()}
        stated = {name for name in facts if name.endswith("_width")}
        if other := sorted(stated - {"original_width", "scaled_width"} - wanted.keys()):
            return f"json states {other[0]}, of an image that is not there"
        return _wrong_types(facts, wanted)


class ImageRules(SampleRules):
    """The rules for images: the target, then those in roles, json and caption.

    Images in roles come in the order of the roles. Those of one role are numbered without gaps.
    """

    def __init__(self, settings: Settings, bucket: int) -> None:
        super().__init__(settings, IMAGE_FACTS)
        self._buckets, self._bucket = tuple(settings["buckets"]), bucket
        self._roles = roles_of(settings)
        self._needed = {*self._roles} - {*settings.get("optional_roles", ())}
        self._order = ("image", "json", "txt")

    def check_place(self, number: int, field: str) -> str:
        place = number - len(self._in_roles)
        name, _, kind = field.partition(".")
        kinds = ("png",) if is_mask(name) else IMAGES
        if place == 1 and kind in kinds and self._is_next_in_roles(name):
            self._in_roles[name] = None
            return ""
        if field in IMAGES if number == 0 else field == ("", "json", "txt")[place]:
            return ""
        return f"{field} is in the place of {('an image', 'json', 'txt')[place]}"

    def check_member(self, field: str, view: View, start: int, nbytes: int) -> str:
        head = view(start, min(nbytes, HEAD_NBYTES))
        is_image = bytes(head).startswith(IMAGES[field.rpartition(".")[2]])
        return "" if is_image else f"{field} is not an image of that format"

    def check_facts(self, facts: Mapping[str, Any]) -> str:
        if wrong := super().check_facts(facts):
            return wrong
        width, height = facts["width"], facts["height"]
        fits = min(width, height) >= self._buckets[0]
        if not fits or bucket_of(width, height, self._buckets) != self._bucket:
            return f"{width} x {height} pixels do not belong in this bucket"
        return "" if facts["bucket"] == self._bucket else "json states another bucket"

    def _role_problem(self, facts: Mapping[str, Any]) -> str:
        if lacking := sorted(self._needed - {*self._in_roles}):
            return f"it has no {lacking[0]}"
        if wrong := self._wrong_role_facts(facts, ROLE_FACTS):
            return wrong
        size = facts["width"], facts["height"]
        for name in self._in_roles:
            if is_mask(name) and (facts[f"{name}_width"], facts[f"{name}_height"]) != size:
                return f"{name} has another size than the image"
        return ""


class ShapedRules(SampleRules):
    """The rules for samples of several shapes.

    Samples of one shape stand together, in the range that the receipt counts. The shape of a sample
    is the one that the size of its image demands.
    """

    def __init__(self, settings: Settings, counts: Mapping[str, int]) -> None:
        self._is_imported = is_imported(settings)
        facts = {**IMPORTED_FACTS, "crop": list} if self._is_imported else LATENT_FACTS
        super().__init__(settings, facts)
        ranges = shape_ranges(settings, counts)
        self._names, self._ends = [*ranges], [numbers.stop for numbers in ranges.values()]
        self._in_shape = {
            name: {field.name: field for field in fields}
            for name, fields in fields_by_shape(settings).items()
        }
        self._fit = lru_cache(1 << 12)(cut_of(settings).fit)
        self._shape = ""

    def begin(self, number: int) -> None:
        super().begin(number)
        at = bisect_right(self._ends, number)
        self._shape = self._names[at] if at < len(self._names) else ""
        self._fields = {**self._in_shape.get(self._shape, self._fields)}

    def check_facts(self, facts: Mapping[str, Any]) -> str:
        if wrong := super().check_facts(facts):
            return wrong
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


# The parts of a tar header that are the same in every member: all but name, size and checksum.
_MODEL = header("a", 0)
_MODE, _TIME, _REST = _MODEL[100:124], _MODEL[136:148], _MODEL[156:345]
SHOWN = 2


class ShardCheck:
    """The check of a shard: its content, as far as it was checked, and what is wrong with it.

    `table` gets the rows of its sound samples; their positions, if it has any, are 0, 1, 2 and so
    on.
    """

    def __init__(self, columns: Columns, rules: SampleRules) -> None:
        self.table = TableWriter(columns)
        self.keys: list[str] = []
        self._rules, self._has_rows = rules, ROW in columns
        self._offsets = array("Q")
        self._problems: list[str] = []
        self._count = 0
        self._key, self._number = "", rules.members
        self._texts: dict[str, bytes] = {}

    @property
    def index(self) -> bytes:
        return encode_index(self._offsets)

    @property
    def problem(self) -> str:
        """Return the first problems of the samples, and why the check ended if it ended early."""
        more = self._count - SHOWN
        return "; ".join([*self._problems, *([f"and {more:,} more"] if more > 0 else [])])

    def _note(self, problem: str) -> None:
        self._count += 1
        if self._count <= SHOWN:
            self._problems.append(problem)

    def read(self, tape: HashedTape) -> Iterator[int]:
        """Check the members of all samples of a tar, one after another.

        Yield now and then how many bytes have been read so far. Raise nothing for a tar that is
        damaged or ends early.
        """
        end = reported = 0
        try:
            for path, start, data_start, nbytes, _target in members(tape.at):
                if not path:
                    break
                head = tape.at(start, BLOCK)
                is_plain = head.startswith(_MODE, 100) and head.startswith(_TIME, 136)
                if data_start - start != BLOCK or not (is_plain and head.startswith(_REST, 156)):
                    self._note(f"the header of {path} is not as wdsprep writes it")
                key, name = split_member(path) or (path, "")
                if key != self._key or not end:
                    self._close()
                    self._key, self._number = key, 0
                    self._texts.clear()
                    self._rules.begin(len(self.keys))
                    self.keys.append(key)
                    self._offsets.append(start)
                    if tape.nbytes > reported:
                        reported = tape.nbytes
                        yield reported
                if problem := self._member(tape, name, data_start, nbytes):
                    self._note(f"{key}: {problem}")
                self._number += 1
                end = data_start + padded(nbytes)
            self._close()
            self._offsets.append(end)
        except BadSampleError as error:
            self._problems.append(str(error))

    def _close(self) -> None:
        """Note what is wrong with a sample as a whole, after its last member."""
        key = self._key
        if self._number < self._rules.members:
            self._note(f"{key}: it has {self._number} of {self._rules.members} members")
        elif len(self._texts) == 2 and (problem := self._add_facts(**self._texts)):
            self._note(f"{key}: {problem}")

    def _add_facts(self, *, json: bytes, txt: bytes) -> str:
        """Add the json of a sample to the table, or return what is wrong with it or the caption."""
        try:
            facts = parse_json(json.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError) as error:
            return f"json cannot be read ({error})"
        if not isinstance(facts, dict):
            return "json is not an object"
        try:
            caption = txt.decode()
        except ValueError as error:
            return f"txt cannot be read ({error})"
        if b"null" in json and _has_null(facts):
            return "json has a null value"
        if wrong := self._rules.check_facts(facts):
            return wrong
        if facts["key"] != self._key:
            return f"json states the key {facts['key']}"
        if facts.get("caption", "") != caption:
            return "txt is not the caption of the json"
        row = {ROW: len(self.keys) - 1} if self._has_rows else {}
        self.table.add(self._key, {**facts, **row})
        return ""

    def _member(self, tape: HashedTape, name: str, start: int, nbytes: int) -> str:
        if self._number >= self._rules.members:
            return f"{name} is one member too many"
        if problem := self._rules.check_place(self._number, name):
            return problem
        if name not in ("json", "txt"):
            return self._rules.check_member(name, tape.view, start, nbytes)
        if nbytes > MAX_TEXT_NBYTES:
            return f"{name} has more than {MAX_TEXT_NBYTES:,} bytes"
        self._texts[name] = data = tape.at(start, nbytes)
        if len(data) < nbytes:
            raise truncated(start, name)
        return ""
