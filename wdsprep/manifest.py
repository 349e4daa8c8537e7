"""What a dataset says about itself: shards, receipts and the manifest, and their JSON.

Each file is one line of canonical JSON that begins with the SHA-256 of all that follows it, so one
flipped bit anywhere is found. A receipt carries the settings it was made with: the manifest, which
lists all receipts, can always be made again from them.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from wdsprep.errors import FormatError, NewerFormatError

FORMAT = 1
MANIFEST = "wdsprep.json"
Settings = Mapping[str, Any]
_HEAD, _MIDDLE = b'{"digest":"', b'",'
_DIGEST_END = len(_HEAD) + 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One tar, by its name in the dataset, such as 256/000000.tar."""

    name: str
    samples: int
    nbytes: int
    sha256: str

    @property
    def bucket(self) -> int:
        return int(self.name.partition("/")[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """A finished unit of work on a dataset (`images` or `latents`). `input` is the digest of what
    it was made from, `inputs` how many samples that held: as many as its shards and its rejects
    hold together. `generation` is the unit with which the append that made it began, or 0,
    `counts` is what else was counted, such as captions that were cut, and `files` has the SHA-256
    of the files beside the shards whose digest stands nowhere else."""

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

    def to_bytes(self) -> bytes:
        settings = dict(self.settings)
        body = {"dataset": self.dataset, "fingerprint": fingerprint(settings), "settings": settings}
        return _seal("receipt", body | _receipt_body(self))

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "Receipt":
        body = _open("receipt", data, what)
        return _receipt_from(body, body["dataset"], body["settings"])


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A dataset. `generations` are the units at which an append began, the first of them 0;
    `complete` says that every unit of the source is done."""

    dataset: str
    settings: Settings
    receipts: tuple[Receipt, ...] = ()
    generations: tuple[int, ...] = (0,)
    complete: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        found = (shard for receipt in self.receipts for shard in receipt.shards)
        return tuple(sorted(found, key=lambda shard: (shard.bucket, shard.name)))

    @cached_property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @cached_property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @cached_property
    def inputs(self) -> int:
        return sum(receipt.inputs for receipt in self.receipts)

    @cached_property
    def rejects(self) -> dict[str, int]:
        return count_up(receipt.rejects for receipt in self.receipts)

    @cached_property
    def counts(self) -> dict[str, int]:
        return count_up(receipt.counts for receipt in self.receipts)

    def to_bytes(self) -> bytes:
        settings = dict(self.settings)
        body = {
            "complete": self.complete,
            "dataset": self.dataset,
            "extra": dict(self.extra),
            "fingerprint": fingerprint(settings),
            "generations": list(self.generations),
            "settings": settings,
            "units": [_receipt_body(receipt) for receipt in self.receipts],
        }
        return _seal("manifest", body)

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "Manifest":
        body = _open("manifest", data, what)
        settings = body["settings"]
        return cls(
            dataset=body["dataset"],
            settings=settings,
            receipts=tuple(
                _receipt_from(unit, body["dataset"], settings) for unit in body["units"]
            ),
            generations=tuple(body["generations"]),
            complete=body["complete"],
            extra=body["extra"],
        )


def sorted_receipts(receipts: Iterable[Receipt]) -> tuple[Receipt, ...]:
    """In the order of their units, whatever order they were finished in."""
    return tuple(sorted(receipts, key=lambda receipt: (len(receipt.unit), receipt.unit)))


def count_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of many counts by name, in the order of the names."""
    total: dict[str, int] = {}
    for count in counts:
        for name, number in count.items():
            total[name] = total.get(name, 0) + number
    return dict(sorted(total.items()))


def fingerprint(settings: Settings) -> str:
    """The digest of everything that decides the bytes of a dataset."""
    return hashlib.sha256(_canonical(dict(settings))).hexdigest()


def differences(old: Settings, new: Settings) -> list[str]:
    """What differs between two settings, one line each: `buckets: 256,512 -> 512`."""
    lines = []
    for name in sorted({*old, *new}):
        before, after = (
            _shown(settings[name]) if name in settings else "(none)" for settings in (old, new)
        )
        if before != after:
            lines.append(f"{name.replace('_', '-')}: {before} -> {after}")
    return lines


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, str) and value else json.dumps(value)


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _seal(kind: str, body: Mapping[str, Any]) -> bytes:
    rest = _canonical({**body, "format": FORMAT, "kind": kind})[1:] + b"\n"
    return _HEAD + hashlib.sha256(rest).hexdigest().encode() + _MIDDLE + rest


def _open(kind: str, data: bytes, what: str) -> dict[str, Any]:
    rest = data[_DIGEST_END + len(_MIDDLE) :]
    sealed = _HEAD + hashlib.sha256(rest).hexdigest().encode() + _MIDDLE
    if data[: len(sealed)] != sealed:
        raise FormatError(f"{what} is damaged: its digest does not match what it holds")
    body: dict[str, Any] = json.loads(b"{" + rest)
    if body["format"] > FORMAT:
        raise NewerFormatError(
            f"{what} is of format {body['format']}, newer than this wdsprep reads ({FORMAT}): "
            "upgrade wdsprep"
        )
    if body["kind"] != kind:
        raise FormatError(f"{what} holds a {body['kind']} where a {kind} should be")
    return body


def _receipt_body(receipt: Receipt) -> dict[str, Any]:
    return {
        "counts": dict(receipt.counts),
        "files": dict(receipt.files),
        "generation": receipt.generation,
        "input": receipt.input,
        "inputs": receipt.inputs,
        "rejects": dict(receipt.rejects),
        "shards": [
            {"name": s.name, "nbytes": s.nbytes, "samples": s.samples, "sha256": s.sha256}
            for s in receipt.shards
        ],
        "unit": receipt.unit,
    }


def _receipt_from(body: Mapping[str, Any], dataset: str, settings: Settings) -> Receipt:
    return Receipt(
        dataset=dataset,
        unit=body["unit"],
        generation=body["generation"],
        settings=settings,
        input=body["input"],
        inputs=body["inputs"],
        shards=tuple(Shard(**shard) for shard in body["shards"]),
        rejects=body["rejects"],
        counts=body["counts"],
        files=body["files"],
    )
