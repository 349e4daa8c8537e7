"""Check the samples of one shard against the format, which `shards/README.md` states.

One pass over the shard notes what breaks the format, where each sample starts, and the keys.

The rules are those of images, or those of arrays: latents, text and scores.
"""

import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
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
    ROLE_IMAGE,
    TARGET,
    image_name,
    is_mask,
    parse_json,
    role_of,
    roles_of,
)
from wdsprep.dataset.settings import is_scored
from wdsprep.dataset.shapes import (
    bucket_of,
    cut_size,
    fields_by_shape,
    fields_in_shape,
    shape_name,
    shape_ranges,
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
from wdsprep.images.nearest_shape import Fit, cut_of
from wdsprep.limits import MAX_TEXT_NBYTES
from wdsprep.text import shortened

IMAGES = {"jpg": b"\xff\xd8\xff", "png": b"\x89PNG\r\n\x1a\n", "webp": b"RIFF"}
HEAD_NBYTES = 8
TEXTS = ("json", "txt")
IN_ROLE = re.compile(rf"({ROLE_IMAGE})\.(?:npy|{'|'.join(IMAGES)})")
FROM_OUTSIDE: dict[str, type] = dict.fromkeys(("key", "source", "caption"), str)
CUT: dict[str, type] = dict.fromkeys(("width", "height"), int)
SIZES = {**CUT, **dict.fromkeys(("original_width", "original_height"), int)}
IMAGE_FACTS = {**FROM_OUTSIDE, **SIZES, "bucket": int, "changes": list, "meta": dict}
TEXT_FACTS = {**FROM_OUTSIDE, "tokens": int, "cut": bool}
SCALED = dict.fromkeys(("scaled_width", "scaled_height"), int)
LATENT_FACTS = {**TEXT_FACTS, **SIZES, **SCALED, "crop": list}
View = Callable[[int, int], memoryview]
# The parts of a tar header that are the same in every member: all but name, size and checksum.
_MODEL = header("a", 0)
_MODE, _TIME, _REST = _MODEL[100:124], _MODEL[136:148], _MODEL[156:345]
SHOWN = 2


class ShardCheck:
    """The check of a shard: its content, as far as it was checked, and what is wrong with it.

    `table` gets the rows of its sound samples; their positions, if it has any, are 0, 1, 2 and so
    on. What checks a part of a sample returns what is wrong with it, or "" if nothing is.
    """

    types: Mapping[str, type]
    """The types of the facts that the json of a sample has."""
    role_types: Mapping[str, type]
    """The types of the facts about each image in a role, without its name before them."""
    texts: Collection[str] = TEXTS
    """The last members of a sample."""

    def __init__(
        self, receipt: Receipt, columns: Columns, roles: Sequence[str], needed: Collection[str] = ()
    ) -> None:
        """Take the receipt, the columns of the table, the roles of a sample, and the `needed` ones.

        A sample has an image in each needed role.
        """
        self.table = TableWriter(columns)
        self.keys: list[str] = []
        self._settings, self._has_rows = receipt.settings, ROW in columns
        self._roles, self._needed = roles, needed
        self._offsets = array("Q")
        self._problems: list[str] = []
        self._count = 0
        self._names: list[str] = []
        """The members of the present sample, and its json and caption."""
        self._texts: dict[str, bytes] = {}
        self._names_before: list[str] = []  # mostly the same, and so is what follows from them

    def begin(self, number: int) -> None:
        """Go on to the sample with this number in the shard."""

    def check_member(self, name: str, view: View, start: int, nbytes: int) -> str:
        """Check the content of a member that is neither json nor txt."""
        raise NotImplementedError

    def members_of(self, images: Mapping[str, str], first: str) -> Iterator[str]:
        """Yield the members that a sample has to have before its json and caption, in order.

        `images` has by name the images in roles, each with the member that is there, or "". The
        `first` member of the sample tells of which format its image is.
        """
        raise NotImplementedError

    def check_sizes(self, facts: Mapping[str, Any], images: Sequence[str]) -> str:
        """Check what the json says of sizes, also of those of the `images` in roles."""
        raise NotImplementedError

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
                if not end or key != self.keys[-1]:
                    self._close()
                    self._names, self._texts = [], {}
                    self.begin(len(self.keys))
                    self.keys.append(key)
                    self._offsets.append(start)
                    if tape.nbytes > reported:
                        reported = tape.nbytes
                        yield reported
                self._names.append(name)
                if problem := self._read_member(tape, name, data_start, nbytes):
                    self._note(f"{key}: {problem}")
                end = data_start + padded(nbytes)
            self._close()
            self._offsets.append(end)
        except BadSampleError as error:
            self._problems.append(str(error))

    def _read_member(self, tape: HashedTape, name: str, start: int, nbytes: int) -> str:
        if name not in TEXTS:
            return self.check_member(name, tape.view, start, nbytes)
        if nbytes > MAX_TEXT_NBYTES:
            return f"{name} has more than {MAX_TEXT_NBYTES:,} bytes"
        self._texts[name] = data = tape.at(start, nbytes)
        if len(data) < nbytes:
            raise truncated(start, name)
        return ""

    def _close(self) -> None:
        """Note what is wrong with a sample as a whole, after its last member."""
        if not self._names:
            return
        if self._names != self._names_before:
            self._names_before, self._form = self._names, self._find_form(self._names)
        expected, images, types = self._form
        problem = ""
        if self._names != expected:
            present, wanted = (shortened(", ".join(names)) for names in (self._names, expected))
            problem = f"its members are {present}, not {wanted}"
        elif len(self._texts) == len(TEXTS):
            problem = self._add_facts(images, types, **self._texts)
        if problem:
            self._note(f"{self.keys[-1]}: {problem}")

    def _find_form(self, names: Sequence[str]) -> tuple[list[str], list[str], dict[str, type]]:
        """Return the members that a sample with these has to have, its images in roles, and types.

        The images in a role are numbered without gaps. The types are those of the json's facts.
        """
        there = {match[1]: name for name in names if (match := IN_ROLE.fullmatch(name))}
        counts = Counter(role_of(image)[0] for image in there)
        images = [
            image_name(role, number)
            for role in self._roles
            for number in range(max(counts[role], role in self._needed))
        ]
        expected = self.members_of({name: there.get(name, "") for name in images}, names[0])
        facts = self.role_types.items()
        types = {f"{name}_{fact}": kind for name in images for fact, kind in facts}
        return [*expected, *self.texts], images, {**self.types, **types}

    def _add_facts(
        self, images: Sequence[str], types: Mapping[str, type], *, json: bytes, txt: bytes
    ) -> str:
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
        if self._roles:
            stated = {name for name in facts if name.endswith("_width")}
            if others := sorted(stated - {"original_width", "scaled_width"} - types.keys()):
                return f"json states {others[0]}, of an image that is not there"
        if wrong := _wrong_types(facts, types) or self.check_sizes(facts, images):
            return wrong
        if facts["key"] != self.keys[-1]:
            return f"json states the key {facts['key']}"
        if facts.get("caption", "") != caption:
            return "txt is not the caption of the json"
        row = {ROW: len(self.keys) - 1} if self._has_rows else {}
        self.table.add(self.keys[-1], {**facts, **row})
        return ""


class ImageShardCheck(ShardCheck):
    """The check of a shard of images: the target, then those in roles, json and caption."""

    types, role_types = IMAGE_FACTS, {**SIZES, "changes": list}

    def __init__(self, receipt: Receipt, columns: Columns, shard: Shard) -> None:
        settings, roles = receipt.settings, roles_of(receipt.settings)
        super().__init__(receipt, columns, roles, {*roles} - {*settings.get("optional_roles", ())})
        self._buckets, self._bucket = tuple(settings["buckets"]), shard.bucket

    def members_of(self, images: Mapping[str, str], first: str) -> Iterator[str]:
        yield first if first in IMAGES else "jpg"
        for name, member in images.items():
            is_image = not is_mask(name) and member.rpartition(".")[2] in IMAGES
            yield member if is_image else f"{name}.{'png' if is_mask(name) else 'jpg'}"

    def check_member(self, name: str, view: View, start: int, nbytes: int) -> str:
        head = view(start, min(nbytes, HEAD_NBYTES))
        is_image = bytes(head).startswith(IMAGES.get(name.rpartition(".")[2], b""))
        return "" if is_image else f"{name} is not an image of that format"

    def check_sizes(self, facts: Mapping[str, Any], images: Sequence[str]) -> str:
        size = width, height = facts["width"], facts["height"]
        fits = min(size) >= self._buckets[0]
        if not fits or bucket_of(width, height, self._buckets) != self._bucket:
            return f"{width} x {height} pixels do not belong in this bucket"
        if facts["bucket"] != self._bucket:
            return "json states another bucket"
        for name in filter(is_mask, images):
            if (facts[f"{name}_width"], facts[f"{name}_height"]) != size:
                return f"{name} has another size than the image"
        return ""


class ArrayShardCheck(ShardCheck):
    """The check of a shard of arrays: of latents, text or scores, json and caption.

    In place of the array of a role, a sample has one for each of its images in that role, whose
    size its json states. Samples of one shape stand together, in the range that the receipt counts,
    and the shape of a sample is the one that the size of its image demands.
    """

    role_types = CUT

    def __init__(self, receipt: Receipt, columns: Columns) -> None:
        settings = receipt.settings
        fields = fields_of(settings["layout"])
        super().__init__(receipt, columns, [*dict.fromkeys(f.role for f in fields if f.role)])
        self._in_shapes = {
            name: {field.name: field for field in shaped if not field.role}
            for name, shaped in fields_by_shape(settings).items()
        }
        ranges = shape_ranges(settings, receipt.counts)
        self._names_of_shapes = [*ranges]
        self._ends = [numbers.stop for numbers in ranges.values()]
        self._shape = ""
        self._fields = self._of_square = {field.name: field for field in fields if not field.role}
        self._in_roles: dict[str, Field] = {}
        """The arrays of the present sample that are not in `_fields`."""
        self.texts = () if is_scored(settings) else TEXTS
        self.types = TEXT_FACTS if is_of_text(fields) else LATENT_FACTS
        if is_imported(settings):
            self.types = {**FROM_OUTSIDE, **({"crop": list} if self._in_shapes else {})}

    def begin(self, number: int) -> None:
        self._in_roles = {}
        if self._in_shapes:
            at = bisect_right(self._ends, number)
            self._shape = self._names_of_shapes[at] if at < len(self._ends) else ""
            self._fields = self._in_shapes.get(self._shape, self._of_square)

    @cached_property
    def _fit(self) -> Callable[[int, int], Fit]:
        return lru_cache(1 << 12)(cut_of(self._settings).fit)

    def members_of(self, images: Mapping[str, str], first: str) -> Iterator[str]:
        del first
        fields = fields_in_shape(self._settings, None, dict.fromkeys(images))
        return (field.name for field in fields)

    def check_member(self, name: str, view: View, start: int, nbytes: int) -> str:
        data = view(start, nbytes)
        if (field := self._fields.get(name)) is None:
            try:
                field = self._in_roles[name] = field_of(name, data)  # which json has to confirm
            except FormatError as error:
                return str(error)
        return array_problem(field, data, nbytes)

    def check_sizes(self, facts: Mapping[str, Any], images: Sequence[str]) -> str:
        if self._roles and (wrong := self._wrong_roles(facts, images)):
            return wrong
        return self._wrong_shape(facts) if self._in_shapes else ""

    def _wrong_roles(self, facts: Mapping[str, Any], images: Sequence[str]) -> str:
        """Return what is wrong with the sizes of images in roles, or with the arrays of these.

        Those that are cut as the target is have the size of its crop.
        """
        if not images and TARGET not in self._settings["roles"]:
            return f"it has no {' and no '.join(self._roles)}"
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
            if field.role and self._in_roles.get(field.name) != wanted:
                return f"{field.name} is not the array of {field} that it should be"
        return ""

    def _wrong_shape(self, facts: Mapping[str, Any]) -> str:
        if not self._shape:
            return "it comes after all samples that the receipt counts by shape"
        if is_imported(self._settings):
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
