"""What a dataset says about itself in one file, as readers open it.

A receipt carries the settings it was made with: the manifest, which lists all receipts, can always
be made again from them.
"""

import contextlib
import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Annotated, Any

from wdsprep.dataset.coarse_histograms import sum_counts
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.dataset.npy_arrays import fields_of, is_of_text
from wdsprep.dataset.receipts import (
    HEAD_FIELDS,
    Receipt,
    Receipts,
    Shard,
    fingerprint,
    image_shard_digest,
    kind_of_bodies,
    line_of,
    split_receipts,
)
from wdsprep.dataset.sealed_json import (
    Count,
    Fields,
    Nbytes,
    Text,
    ValueRule,
    between,
    check_record,
    check_seal,
    seal,
    unseal,
)
from wdsprep.dataset.settings import (
    SCORES,
    Settings,
    Stated,
    are_rising,
    checked_settings,
    is_scored,
)
from wdsprep.text import command, human_bytes, human_counts

UNITS = b',"units":['  # the last that it says
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
        "generations": Annotated[list[Nbytes], ValueRule("rising numbers of units", are_rising)],
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
    receipts: Sequence[Receipt] = ()
    generations: tuple[int, ...] = (0,)
    complete: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    written_s: float = field(default=math.inf, compare=False)

    @cached_property
    def ledger(self) -> Receipts:
        """Return the receipts as the lines of JSON that stand for them in a file."""
        return Receipts.from_list(self.dataset, self.settings, self.receipts)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        with _pause_garbage_collector():
            by_name = sorted(self.ledger.shards())
            return tuple(sorted(by_name, key=lambda shard: shard.bucket))

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
        return seal("manifest", body, lambda: chain([UNITS], ledger.to_json(), [b"]"]))

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "Manifest":
        check_seal(data, what)
        head, lines = split_receipts(data, UNITS)
        body = unseal("manifest", HEAD, head, what)
        dataset = body["dataset"]
        settings = checked_settings(dataset, body["settings"], what)
        units = body.get("units", [])
        check_record(list[kind_of_bodies(dataset)], units, what)  # type: ignore[misc]
        for unit in units:
            lines.append(line_of(Receipt.from_body(unit, dataset, settings)))
        return cls(
            dataset=dataset,
            settings=settings,
            receipts=Receipts(dataset, settings, lines, what, rebuild_hint(what)),
            generations=tuple(body["generations"]),
            complete=body["complete"],
            extra=Stated(body["extra"], what),
        )


def table_rows(manifest: Manifest) -> Iterator[tuple[str, object]]:
    """Yield what a notebook shows of a dataset, as names and values."""
    yield "kind", manifest.kind
    yield "complete", manifest.complete
    yield "samples", manifest.samples
    yield "shards", len(manifest.shards)
    yield "size", human_bytes(manifest.nbytes)
    yield "rejects", human_counts(manifest.rejects)


def rebuild_hint(what: str) -> str:
    """Return the next step for a damaged manifest, which is the command that makes it again.

    `what` is the path of the manifest. For any other file the step is empty.
    """
    url = what.removesuffix(f"/{MANIFEST}")
    return (
        "" if url == what else f"run {command('rebuild', url)} to make it again from the receipts"
    )


@contextlib.contextmanager
def _pause_garbage_collector() -> Iterator[None]:
    """Pause the garbage collector while the block makes a great many objects.

    There is no garbage among them, and looking for it took a third of the time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def sorted_receipts(receipts: Iterable[Receipt]) -> tuple[Receipt, ...]:
    """Sort receipts by unit, whatever order they were finished in."""
    return tuple(sorted(receipts, key=lambda receipt: (len(receipt.unit), receipt.unit)))
