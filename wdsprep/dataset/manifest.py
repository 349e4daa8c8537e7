"""Receipts of finished units, and the manifest, which lists them: what a dataset says about itself.

A receipt carries the settings it was made with: the manifest, one file as readers open it, can
always be made again from the receipts.

Where there are many receipts, each stays the line of JSON that the manifest has of it, half a kB,
until it is asked for: as objects they would take three times the memory, and who opens a dataset
mostly wants to know of its shards alone.
"""

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain, pairwise
from operator import eq, itemgetter
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from wdsprep.dataset.coarse_histograms import sum_counts
from wdsprep.dataset.file_names import MANIFEST, is_table, latent_unit, table_name
from wdsprep.dataset.npy_arrays import fields_of, is_of_text
from wdsprep.dataset.sealed_json import (
    Count,
    Fields,
    Hex,
    Name,
    Nbytes,
    Text,
    between,
    canonical_json,
    check_record,
    check_values,
    decode_json,
    hex_digest,
    matching,
    seal,
    unseal,
    value_rule,
)
from wdsprep.dataset.settings import (
    SCORES,
    Settings,
    Stated,
    are_rising,
    checked_settings,
    is_scored,
)
from wdsprep.dataset.tar import BLOCK
from wdsprep.errors import DamageError
from wdsprep.text import brief, command, one_line, plural, shortened, shown

LINES_AT_ONCE = 400
NOT_AS_WRITTEN = "its units are not as wdsprep writes them"
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


CountName = Annotated[Text, value_rule("the name of a count", _have_edges)]


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
        body = unseal("receipt", Fields(HEAD_FIELDS), data, what)
        dataset = body["dataset"]
        settings = checked_settings(dataset, body["settings"], what)
        check_record(kind_of_bodies(dataset), body, what)
        return cls.from_body(body, dataset, settings)

    def body(self) -> dict[str, Any]:
        """Return the fields of a receipt without dataset and settings, which all receipts share."""
        shards = [dict(zip(SHARD_FIELDS, shard, strict=True)) for shard in self.shards]
        return {name: getattr(self, name) for name in FIELDS} | {"shards": shards}

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
    holds_samples = value_rule("a shard that is large enough for its samples", _are_large_enough)
    kinds = get_type_hints(Receipt, include_extras=True)
    shards: Any = list[Fields(shard, rules=(holds_samples,))]  # type: ignore[misc]
    kinds |= {"unit": UNITS[dataset], "shards": shards}
    rules = (value_rule("a unit whose shards have its name", partial(_have_names, dataset)),)
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


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Receipts(Iterable[Receipt]):
    """The receipts of one dataset, in the order given.

    They are parsed and checked at each access. A line is what stands between `START` and `END` in
    the file `what`. `next_step` is what to do about a damaged one.
    """

    dataset: str
    settings: Settings
    lines: Sequence[bytes] = ()
    what: str = "a receipt"
    next_step: str = ""

    def to_json(self) -> Iterator[bytes]:
        """Yield the JSON list of receipts piece by piece, without its brackets."""
        for number, lines in enumerate(self._batches()):
            yield (BETWEEN if number else START) + BETWEEN.join(lines)
        if self.lines:
            yield END

    def _batches(self) -> Iterator[Sequence[bytes]]:
        starts = range(0, len(self.lines), LINES_AT_ONCE)
        return (self.lines[start : start + LINES_AT_ONCE] for start in starts)

    def with_lines(self, lines: Sequence[bytes]) -> "Receipts":
        """Return receipts of the same dataset that have these lines."""
        return replace(self, lines=lines)

    def check(self) -> None:
        """Parse and check all receipts now, and not only when one is asked for."""
        for _ in self._read():
            pass

    def named_lines(self) -> Iterator[tuple[str, bytes]]:
        return zip(self.units(), self.lines, strict=True)

    def column(self, name: str) -> Iterator[Any]:
        """Yield one field of each receipt, in a fraction of the time of reading all of it."""
        return chain.from_iterable(self._read(name))

    def units(self) -> Iterator[str]:
        return self.column("unit")

    def shards(self) -> Iterator[Shard]:
        return _parse_shards(chain.from_iterable(self.column("shards")))

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[Receipt]:
        for body in chain.from_iterable(self._read()):
            yield Receipt.from_body(body, self.dataset, self.settings)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence | Receipts):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def _read(self, name: str = "") -> Iterator[list[Any]]:
        """Yield the field `name` of each receipt, or without `name` all fields, in lists.

        Many receipts are parsed as one list: that takes half the time. Raise a DamageError about
        the first receipt that is damaged.
        """
        if not self.lines:
            return
        bodies = kind_of_bodies(self.dataset)
        kind = bodies.needed[name] if name else bodies
        for lines in self._batches():
            try:
                values = _read_lines(lines, name, kind)
            except ValueError:
                raise self._damage_in(lines, name, kind) from None
            yield values

    def _damage_in(self, lines: Sequence[bytes], name: str, kind: Any) -> DamageError:
        """Return the error about the first of the lines that is damaged."""
        why = NOT_AS_WRITTEN
        for line in lines:
            try:
                _read_lines([line], name, kind)
            except ValueError as error:
                unit = line.rpartition(b'"unit":')[2].strip(b'"').decode("utf-8", "replace")
                why = f"{name or 'a field'} of unit {brief(unit)}: {error}"
                break
        return DamageError(self.what, why).with_next_step(self.next_step)


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
    body = receipt.body()
    return canonical_json(body)[len(START) : -len(END)]


def split_receipts(data: bytes) -> tuple[bytes, list[bytes]]:
    """Return the JSON of a manifest without its list of receipts, and the lines of the list.

    Of a manifest without receipts, and of what is no manifest, return all and no lines.
    """
    start, end = data.find(UNITS_BEGIN + START), END + b"]}\n"
    if start < 0 or not data.endswith(end):
        return data, []
    lines = data.split(BETWEEN)  # all of it: a slice would be as much memory again
    del lines[: data.count(BETWEEN, 0, start)]
    lines[0] = lines[0].partition(UNITS_BEGIN + START)[2]
    lines[-1] = lines[-1].removesuffix(end)
    return data[:start] + b"}", lines


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


UNITS_BEGIN = b',"units":['  # the last that it says
TRIAL = Fields({}, {"busy": float, "device": Text, "each": float, "launching": float})
EXTRA = Fields(
    {},
    {
        "left_out": dict[Text, Count],
        "limit": Annotated[int, between(0, 1 << 63, "a count")],
        "model": str,  # which may be a folder whose name is not UTF-8
        "selection": Text,
        "trial": TRIAL,
    },
)
"""Facts about a run beside the settings."""
HEAD = Fields(
    {
        **HEAD_FIELDS,
        "complete": bool,
        "extra": EXTRA,
        "generations": Annotated[list[Nbytes], value_rule("rising numbers of units", are_rising)],
    }
)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A dataset: its settings, and the receipts of its units.

    `generations` are the units at which an append began; the first is 0. `complete` says that
    every unit of the source is done. `written_s` is when the manifest was written, in seconds
    since 1970 by the store's clock, where that was asked for: receipts may be younger.
    """

    dataset: str
    settings: Settings
    receipts: Sequence[Receipt] | Receipts = ()
    generations: tuple[int, ...] = (0,)
    complete: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    written_s: float = field(default=math.inf, compare=False)

    @cached_property
    def ledger(self) -> Receipts:
        """Return the receipts as the lines of JSON that stand for them in a file."""
        if isinstance(self.receipts, Receipts):
            return replace(self.receipts, dataset=self.dataset, settings=self.settings)
        lines = [*map(line_of, self.receipts)]
        return Receipts(dataset=self.dataset, settings=self.settings, lines=lines)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        collects = gc.isenabled()
        gc.disable()  # among a great many objects it finds no garbage, in a third of the time
        try:
            by_name = sorted(self.ledger.shards())
            return tuple(sorted(by_name, key=lambda shard: shard.bucket))
        finally:
            if collects:
                gc.enable()

    @cached_property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @cached_property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @cached_property
    def is_of_text(self) -> bool:
        """Return whether the dataset is made of captions alone."""
        is_of_latents = self.dataset == "latents" and not self.is_scored
        return is_of_latents and is_of_text(fields_of(self.settings["layout"]))

    @property
    def is_scored(self) -> bool:
        """Return whether the dataset holds scores."""
        return is_scored(self.settings)

    @property
    def kind(self) -> str:
        """Return the kind of the dataset in a word: images, latents, text or scores."""
        if self.is_scored:
            return SCORES
        return "text" if self.is_of_text else self.dataset

    def image_digests(self) -> set[str]:
        """Return the digests of the image shards that the dataset has, or was made of."""
        if self.dataset == "images":
            return {shard.digest for shard in self.shards}
        return set(map(image_shard_digest, self.ledger.column("input")))

    @cached_property
    def inputs(self) -> int:
        return sum(self.ledger.column("inputs"))

    @cached_property
    def rejects(self) -> dict[str, int]:
        return sum_counts(self.ledger.column("rejects"))

    @cached_property
    def counts(self) -> dict[str, int]:
        return sum_counts(self.ledger.column("counts"))

    def to_bytes(self) -> bytes:
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the manifest piece by piece."""
        settings = dict(self.settings)
        body = {
            "complete": self.complete,
            "dataset": self.dataset,
            "extra": dict(self.extra),
            "fingerprint": fingerprint(settings),
            "generations": list(self.generations),
            "settings": settings,
        }
        ledger = self.ledger
        return seal("manifest", body, lambda: chain([UNITS_BEGIN], ledger.to_json(), [b"]"]))

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "Manifest":
        head, lines = split_receipts(data)
        body = unseal("manifest", HEAD, data, what, part=head)
        dataset = body["dataset"]
        settings = checked_settings(dataset, body["settings"], what)
        if body.get("units"):
            raise DamageError(what, NOT_AS_WRITTEN)
        step = rebuild_hint(what)
        return cls(
            dataset=dataset,
            settings=settings,
            receipts=Receipts(
                dataset=dataset, settings=settings, lines=lines, what=what, next_step=step
            ),
            generations=tuple(body["generations"]),
            complete=body["complete"],
            extra=Stated(body["extra"], what),
        )


def rebuild_hint(what: str) -> str:
    """Return the next step for a damaged manifest, which is the command that makes it again.

    `what` is the path of the manifest. For any other file the step is empty.
    """
    url = what.removesuffix(f"/{MANIFEST}")
    step = f"run {command('rebuild', url)} to make it again from the receipts"
    return "" if url == what else step
