"""Receipts of finished units, one by one and a million at a time.

Where there are many, each stays the line of JSON that the manifest has of it, half a kB, until it
is asked for: as objects they would take three times the memory, and who opens a dataset mostly
wants to know of its shards alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, islice, pairwise
from operator import eq, itemgetter
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints, overload

from wdsprep.dataset.file_names import is_table, latent_unit, table_name
from wdsprep.dataset.sealed_json import (
    Count,
    Fields,
    Hex,
    Name,
    Nbytes,
    Text,
    ValueRule,
    WrongValueError,
    canonical_json,
    check_record,
    check_seal,
    check_values,
    decode_json,
    hex_digest,
    matching,
    seal,
    unseal,
)
from wdsprep.dataset.settings import Settings, checked_settings
from wdsprep.dataset.tar import BLOCK
from wdsprep.errors import DamageError
from wdsprep.text import brief, one_line, plural, shortened, shown

Part = TypeVar("Part")
LINES_AT_ONCE = 400
SHARD_FIELDS = ("name", "samples", "nbytes", "blake3")
FIELDS = ("counts", "files", "generation", "input", "inputs", "rejects", "shards", "unit")
RETRIED = "retried"
"""Counts the rows of a unit that later ones have taken over."""
CONTENT = "what was read"
"""The name by which the files of a receipt have the BLAKE3 of what its source gave out, if
anything."""
HEAD_FIELDS: Mapping[str, Any] = {
    "dataset": Literal["images", "latents"],
    "settings": dict[str, Any],
}
"""The types of what a receipt and the manifest say of the whole dataset."""
# What stands around a receipt in a list of them. A quotation mark that belongs to a text has a
# backslash before it, so these are found nowhere else, and the name of no field is.
START, BETWEEN, END = b'{"counts":', b'},{"counts":', b"}"


def _have_edges(names: Any) -> bool:
    """Return whether each name of a count that has a `<`, as `side<512`, ends in a number."""
    edges = (name.partition("<") for name in names)
    return all(not sign or (edge.isdecimal() and len(edge) < 20) for _, sign, edge in edges)


CountName = Annotated[Text, ValueRule("the name of a count", _have_edges)]


class Shard(NamedTuple):
    """One tar or table, with its name in the dataset, such as 256/000000.tar.

    Without a receipt of it, `nbytes` are 0 and the digest is empty.

    It is a tuple, since a manifest may hold hundreds of thousands: they are made and sorted in
    a third of a dataclass's time.
    """

    name: Name
    samples: Count
    nbytes: Nbytes = 0
    digest: Hex = ""

    @property
    def bucket(self) -> int:
        return int(self.name.partition("/")[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """The receipt of a finished unit of work on a dataset (`images` or `latents`).

    `input` is the digest of what it was made from, and `inputs` how many samples that held: as
    many as its shards and its rejects hold together. `generation` is the unit with which the
    append began that made it, or 0. `counts` is what else was counted, such as captions that
    were cut. `files` has the digests of the files beside the shards that are kept nowhere else,
    and `CONTENT`.
    """

    dataset: str
    unit: Name
    generation: Nbytes
    settings: Settings
    input: Annotated[str, matching(r"[^\0:]*(?::[0-9]{1,9})?", "a digest, and a number of samples")]
    inputs: Count
    shards: tuple[Shard, ...]
    rejects: Mapping[Text, Count]
    counts: Mapping[CountName, Count] = field(default_factory=dict)
    files: Mapping[Text, Text] = field(default_factory=dict)

    @property
    def content(self) -> str:
        return self.files.get(CONTENT, "")

    def table_digest(self, shard: Shard) -> str:
        """Return the digest of the table of a shard, or "" if it has none."""
        return shard.digest if is_table(shard.name) else self.files.get(table_name(shard.name), "")

    def to_bytes(self) -> bytes:
        settings = dict(self.settings)
        body = {"dataset": self.dataset, "fingerprint": fingerprint(settings), "settings": settings}
        return b"".join(seal("receipt", body | self.body()))

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "Receipt":
        check_seal(data, what)
        body = unseal("receipt", Fields(HEAD_FIELDS), data, what)
        dataset = body["dataset"]
        settings = checked_settings(dataset, body["settings"], what)
        check_record(kind_of_bodies(dataset), body, what)
        return cls.from_body(body, dataset, settings)

    def body(self) -> dict[str, Any]:
        """Return the fields of a receipt without dataset and settings, which all receipts share."""
        return {name: getattr(self, name) for name in FIELDS} | {
            "counts": dict(self.counts),
            "files": dict(self.files),
            "rejects": dict(self.rejects),
            "shards": [dict(zip(SHARD_FIELDS, shard, strict=True)) for shard in self.shards],
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any], dataset: str, settings: Settings) -> "Receipt":
        values = {name: body[name] for name in FIELDS}
        values["shards"] = tuple(_parse_shards(body["shards"]))
        return cls(dataset=dataset, settings=settings, **values)


def _parse_shards(bodies: Iterable[Mapping[str, Any]]) -> Iterator[Shard]:
    return map(Shard._make, map(itemgetter(*SHARD_FIELDS), bodies))


_SLICE, _STEM = "[0-9]{6,18}", r"[0-9]{1,9}/[^\0]+"
UNITS: Mapping[str, Any] = {
    "images": Annotated[str, matching(_SLICE, "the number of a slice")],
    "latents": Annotated[Name, matching(_STEM, "the name of an image shard")],
}
SHARDS: Mapping[str, Any] = {
    "images": Annotated[
        str, matching(rf"[0-9]{{1,9}}/{_SLICE}(?:_[0-9]{{1,9}})?\.tar", "the name of a shard")
    ],
    "latents": Annotated[Name, matching(rf"{_STEM}\.(?:tar|parquet)", "the name of a shard")],
}


@cache
def kind_of_bodies(dataset: str) -> Fields:
    """Return the type of a receipt's JSON without dataset and settings."""
    shard = get_type_hints(Shard, include_extras=True) | {"name": SHARDS[dataset]}
    shard["blake3"] = shard.pop("digest")
    holds_samples = ValueRule("a shard that is large enough for its samples", _are_large_enough)
    kinds = get_type_hints(Receipt, include_extras=True)
    shards: Any = list[Fields(shard, rules=(holds_samples,))]  # type: ignore[misc]
    kinds |= {"unit": UNITS[dataset], "shards": shards}
    rules = (ValueRule("a unit whose shards have its name", partial(_have_names, dataset)),)
    return Fields({name: kinds[name] for name in FIELDS}, rules=rules)


def _are_large_enough(shards: Sequence[Mapping[str, Any]]) -> bool:
    least = ((0.25 if is_table(shard["name"]) else BLOCK, shard) for shard in shards)
    return all(shard["samples"] * nbytes <= shard["nbytes"] for nbytes, shard in least)


def _have_names(dataset: str, bodies: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether shards are named like their unit. A unit of latents has one shard at most."""
    for body in bodies:
        unit, names = body["unit"], [shard["name"] for shard in body["shards"]]
        if dataset == "latents":
            if names and [*map(latent_unit, names)] != [unit]:
                return False
        elif not all(f"/{unit}." in name or f"/{unit}_" in name for name in names):
            return False
    return True


class Receipts(Sequence[Receipt]):
    """The receipts of one dataset, in the order given.

    They are parsed and checked at each access.
    """

    __slots__ = ("_dataset", "_lines", "_next_step", "_settings", "_what")

    def __init__(
        self,
        dataset: str,
        settings: Settings,
        lines: Sequence[bytes] = (),
        what: str = "",
        next_step: str = "",
    ) -> None:
        """Keep the lines of receipts.

        A line is what stands between `START` and `END` in the file `what`. `next_step` is what to
        do about a damaged one.
        """
        self._dataset, self._settings, self._lines = dataset, settings, lines
        self._what, self._next_step = what, next_step

    @classmethod
    def from_list(cls, dataset: str, settings: Settings, receipts: Iterable[Receipt]) -> "Receipts":
        if isinstance(receipts, cls):
            return cls(dataset, settings, receipts._lines, receipts._what, receipts._next_step)
        return cls(dataset, settings, [line_of(receipt) for receipt in receipts])

    def to_json(self) -> Iterator[bytes]:
        """Yield the JSON list of receipts piece by piece, without its brackets."""
        for number, lines in enumerate(_batches(self._lines)):
            yield (BETWEEN if number else START) + BETWEEN.join(lines)
        if self._lines:
            yield END

    def with_lines(self, lines: Sequence[bytes]) -> "Receipts":
        """Return receipts of the same dataset that have these lines."""
        return Receipts(self._dataset, self._settings, lines, self._what, self._next_step)

    def check(self) -> None:
        """Parse and check all receipts now, and not only when one is asked for."""
        for _ in self._read():
            pass

    def named_lines(self) -> Iterator[tuple[str, bytes]]:
        return zip(self.units(), self._lines, strict=True)

    def column(self, name: str) -> Iterator[Any]:
        """Yield one field of each receipt, in a fraction of the time of reading all of it."""
        return chain.from_iterable(self._read(name))

    def units(self) -> Iterator[str]:
        return self.column("unit")

    def shards(self) -> Iterator[Shard]:
        return _parse_shards(chain.from_iterable(self.column("shards")))

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Receipt]:
        for body in chain.from_iterable(self._read()):
            yield Receipt.from_body(body, self._dataset, self._settings)

    @overload
    def __getitem__(self, index: int) -> Receipt: ...

    @overload
    def __getitem__(self, index: slice) -> "Receipts": ...

    def __getitem__(self, index: int | slice) -> "Receipt | Receipts":
        if isinstance(index, slice):
            return self.with_lines(self._lines[index])
        return next(iter(self.with_lines([self._lines[index]])))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def _read(self, name: str = "") -> Iterator[list[Any]]:
        """Yield the field `name` of each receipt, or without `name` all fields, in lists.

        Many receipts are parsed as one list: that takes half the time. Raise a DamageError about
        the first receipt that is damaged.
        """
        if not self._lines:
            return
        bodies = kind_of_bodies(self._dataset)
        kind = bodies.needed[name] if name else bodies
        for lines in _batches(self._lines):
            try:
                values = _read_lines(lines, name, kind)
            except (ValueError, WrongValueError):
                raise self._damage_in(lines, name, kind) from None
            yield values

    def _damage_in(self, lines: Sequence[bytes], name: str, kind: Any) -> DamageError:
        """Return the error about the first of the lines that is damaged."""
        why = "its units are not as they are written"
        for line in lines:
            try:
                _read_lines([line], name, kind)
            except (ValueError, WrongValueError) as error:
                unit = line.rpartition(b'"unit":')[2].strip(b'"').decode("utf-8", "replace")
                why = f"{name or 'a field'} of unit {brief(unit)}: {error}"
                break
        return DamageError(self._what or "a receipt", why).with_next_step(self._next_step)


def image_shard_digest(made_of: str) -> str:
    """Return the digest of the image shard from the `input` of a receipt of latents.

    After `encode --limit`, the `input` is the digest, a colon and a number of samples.
    """
    return made_of.partition(":")[0]


def fingerprint(settings: Settings) -> str:
    """Return the digest of the settings, which decide the bytes of a dataset."""
    return hex_digest(canonical_json(dict(settings)))


def line_of(receipt: Receipt) -> bytes:
    """Return the line that stands for a receipt in a manifest."""
    return canonical_json(receipt.body())[len(START) : -len(END)]


def split_receipts(data: bytes, mark: bytes) -> tuple[bytes, list[bytes]]:
    """Split the JSON of an object that ends in a list of receipts.

    Return the object before the list, and the lines of the list. `mark` is how the list begins.
    If the receipts are not written as here, return all and no lines.
    """
    start, end = data.find(mark + START), END + b"]}\n"
    if start >= 0 and data.endswith(end):
        lines = data.split(BETWEEN)  # all of it: a slice would be as much memory again
        del lines[: data.count(BETWEEN, 0, start)]
        lines[0] = lines[0].partition(mark + START)[2]
        lines[-1] = lines[-1].removesuffix(end)
        if _is_whole(lines[0]) and _is_whole(lines[-1]):
            return data[:start] + b"}", lines
    return data, []


def _is_whole(line: bytes) -> bool:
    try:
        return tuple(decode_json(START + line + END)) == FIELDS
    except (ValueError, TypeError):
        return False


def sort_by_unit(lines: Mapping[str, bytes]) -> list[bytes]:
    """Return the lines of receipts in the order of their units, not in that of their making."""
    return [lines[unit] for unit in sorted(sorted(lines), key=len)]


def _read_lines(lines: Sequence[bytes], name: str, kind: Any) -> list[Any]:
    """Parse one field of each line, or all fields. Raise an error if a line is no receipt."""
    following = dict(pairwise(FIELDS)).get(name, "")
    begin, end = (b',"%s":' % field.encode() for field in (name, following))

    def part(line: bytes) -> bytes:
        if not name:
            return START + line + END
        start = line.index(begin) + len(begin) if name != FIELDS[0] else 0
        return line[start : line.index(end, start) if following else None]

    values: list[Any] = decode_json(b"[" + b",".join(map(part, lines)) + b"]")
    if len(values) != len(lines):
        raise ValueError("it is not a receipt")
    check_values(kind, values)
    return values


def _batches(parts: Sequence[Part]) -> Iterator[list[Part]]:
    rest = iter(parts)
    while batch := list(islice(rest, LINES_AT_ONCE)):
        yield batch


GPU = "gpu:"
"""The start of the name of a count that says on which GPU shards were made."""


def gpu_count(device: str, *, images: int, captions: int) -> str:
    """Return the name of the count for shards made on a GPU, in batches of these sizes.

    A size is 0 if nothing of the kind was encoded.
    """
    sizes = [plural(images, "image")] if images else []
    sizes += [plural(captions, "caption")] if captions else []
    name = shortened(shown(one_line(device))).replace("<", "")  # which marks the edge of a bin
    return f"{GPU}{name}, batches of {' and '.join(sizes)}"
