"""Receipts of finished units, one by one and a million at a time.

Where there are many, each stays the line of JSON that the manifest has of it, half a kB, until it
is asked for: as objects they would take three times the memory, and who opens a dataset mostly
wants to know of its shards alone.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import eq, itemgetter
from typing import Any, NamedTuple, TypeVar, overload

from wdsprep.dataset.digests import DigestKind
from wdsprep.dataset.sealed import canonical, check_seal, seal, unseal

Settings = Mapping[str, Any]
Part = TypeVar("Part")
AT_ONCE = 100
FIELDS = ("counts", "files", "generation", "input", "inputs", "rejects", "shards", "unit")
RETRIED = "retried"
"""Counts the rows of a unit that later ones have taken over."""
CONTENT = "what was read"
"""By this name the files of a receipt have the BLAKE3 of what its source gave out, if anything."""
# What stands around a receipt in a list of them. A quotation mark that belongs to a text has a
# backslash before it, so these are found nowhere else, and the name of no field is.
START, BETWEEN, END = b'{"counts":', b'},{"counts":', b"}"


class Shard(NamedTuple):
    """One tar, by its name in the dataset, such as 256/000000.tar. A tuple, since a manifest may
    hold hundreds of thousands: they are made and sorted in a third of a dataclass's time."""

    name: str
    samples: int
    nbytes: int
    digest: str

    @property
    def bucket(self) -> int:
        return int(self.name.partition("/")[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """A finished unit of work on a dataset (`images` or `latents`). `input` is the digest of what
    it was made from, `inputs` how many samples that held: as many as its shards and its rejects
    hold together. `generation` is the unit with which the append that made it began, or 0,
    `counts` is what else was counted, such as captions that were cut, and `files` has the digests
    of the files beside the shards that stand nowhere else, and `CONTENT`."""

    dataset: str
    unit: str
    generation: int
    settings: Settings
    input: str
    inputs: int
    shards: tuple[Shard, ...]
    rejects: Mapping[str, int]
    counts: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> str:
        return self.files.get(CONTENT, "")

    def to_bytes(self) -> bytes:
        settings = dict(self.settings)
        body = {"dataset": self.dataset, "fingerprint": fingerprint(settings), "settings": settings}
        return b"".join(seal("receipt", body | self.body()))

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "Receipt":
        check_seal(data, what)
        body = unseal("receipt", data, what)
        return cls.from_body(body, body["dataset"], body["settings"])

    def body(self) -> dict[str, Any]:
        """Without the dataset and the settings, which all receipts of a dataset share."""
        kind = DigestKind.of(self.settings).value
        return {
            "counts": dict(self.counts),
            "files": dict(self.files),
            "generation": self.generation,
            "input": self.input,
            "inputs": self.inputs,
            "rejects": dict(self.rejects),
            "shards": [
                {"name": s.name, "nbytes": s.nbytes, "samples": s.samples, kind: s.digest}
                for s in self.shards
            ],
            "unit": self.unit,
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any], dataset: str, settings: Settings) -> "Receipt":
        return cls(
            dataset=dataset,
            unit=body["unit"],
            generation=body["generation"],
            settings=settings,
            input=body["input"],
            inputs=body["inputs"],
            shards=tuple(_shards(body["shards"], settings)),
            rejects=body["rejects"],
            counts=body["counts"],
            files=body["files"],
        )


def _shards(said: Iterable[Mapping[str, Any]], settings: Settings) -> Iterator[Shard]:
    fields = itemgetter("name", "samples", "nbytes", DigestKind.of(settings).value)
    return map(Shard._make, map(fields, said))


class Receipts(Sequence[Receipt]):
    """Receipts of one dataset, in the order they were given in; read each time they are asked
    for."""

    __slots__ = ("_dataset", "_lines", "_settings")

    def __init__(self, dataset: str, settings: Settings, lines: Sequence[bytes] = ()) -> None:
        """Lines are what stands between `START` and `END`."""
        self._dataset, self._settings, self._lines = dataset, settings, lines

    @classmethod
    def of(cls, dataset: str, settings: Settings, receipts: Iterable[Receipt]) -> "Receipts":
        if isinstance(receipts, cls):
            return cls(dataset, settings, receipts._lines)
        return cls(dataset, settings, [line_of(receipt) for receipt in receipts])

    def to_json(self) -> Iterator[bytes]:
        """A list of them, without its brackets, piece by piece."""
        for number, some in enumerate(_batches(self._lines)):
            yield (BETWEEN if number else START) + BETWEEN.join(some)
        if self._lines:
            yield END

    def with_lines(self, lines: Sequence[bytes]) -> "Receipts":
        """Others of the same dataset."""
        return Receipts(self._dataset, self._settings, lines)

    def named_lines(self) -> Iterator[tuple[str, bytes]]:
        return zip(self.units(), self._lines, strict=True)

    def column(self, name: str) -> Iterator[Any]:
        """One field of each, in a fraction of the time that reading all of it takes."""
        begin, end = (b',"%s":' % each.encode() for each in _with_next(name))

        def part(line: bytes) -> bytes:
            start = line.index(begin) + len(begin) if name != FIELDS[0] else 0
            return line[start : line.index(end, start) if name != FIELDS[-1] else None]

        return _decoded(self._lines, part)

    def units(self) -> Iterator[str]:
        return self.column("unit")

    def shards(self) -> Iterator[Shard]:
        return _shards(chain.from_iterable(self.column("shards")), self._settings)

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Receipt]:
        for body in _decoded(self._lines, lambda line: START + line + END):
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


def fingerprint(settings: Settings) -> str:
    """The digest of everything that decides the bytes of a dataset."""
    return DigestKind.of(settings).hex(canonical(dict(settings)))


def line_of(receipt: Receipt) -> bytes:
    """The line that stands for it among others."""
    return canonical(receipt.body())[len(START) : -len(END)]


def cut(data: bytes, mark: bytes) -> tuple[bytes, list[bytes]]:
    """What stands before a list of receipts that ends the JSON of an object, and their lines.
    `mark` is how the list begins. All of it and none, where receipts are not written as here."""
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
        return tuple(json.loads(START + line + END)) == FIELDS
    except ValueError:
        return False


def by_unit(lines: Mapping[str, bytes]) -> list[bytes]:
    """Lines by their units, in the order of these, whatever order they were finished in."""
    return [lines[unit] for unit in sorted(sorted(lines), key=len)]


def _with_next(name: str) -> tuple[str, str]:
    """A field, and the one that stands after it; nothing after the last."""
    return name, (*FIELDS, "")[FIELDS.index(name) + 1]


def _decoded(lines: Sequence[bytes], part: Callable[[bytes], bytes]) -> Iterator[Any]:
    """A part of each line, many of them read as one list: that takes half the time."""
    lists = (b"[" + b",".join(map(part, some)) + b"]" for some in _batches(lines))
    return chain.from_iterable(map(json.loads, lists))


def _batches(every: Sequence[Part]) -> Iterator[list[Part]]:
    left = iter(every)
    while some := list(islice(left, AT_ONCE)):
        yield some
