"""`verify` and `repair`: check that a dataset is what it says it is, every file and every byte.

1. `survey` reads the manifest, all receipts and one listing: what should be there, what is.
2. `unit_check` takes one unit of work after another, on any number of processes. Each file of it is
   read once (`dataset.reading`): a thread hashes while `shard_check` goes over the samples and
   compares them with the format (`member_rules`).
3. `verify` puts both together; with images and their latents it also pairs them (`pairs`), and it
   compares the captions of a table with what they were (`lookups`).
4. `repair` takes out what they find damaged, so that `pack` or `encode` makes that again.

`options` are what the last two are given. What is wrong becomes a *finding*, which names one file
and the next step. A *note* is a finding that does no harm.

In: Datasets.
Out: Findings, each with its next step; a repaired dataset.
"""

import shlex
from dataclasses import dataclass, field
from enum import Enum

from wdsprep.dataset.damage import repair_step
from wdsprep.dataset.reindex import AGAIN


class Kind(Enum):
    """The kind of a finding, which decides what can be done about it."""

    MANIFEST = "manifest"  # damaged, or not what the receipts say: it can be made from them
    INDEX = "index"  # it can be made from its tar
    MISSING = "missing"
    DAMAGED = "damaged"
    WRONG = "wrong"  # what was written breaks the format
    CHANGED = "changed"  # latents of images that are gone, or others by now
    UNMATCHED = "unmatched"  # latents that are not what these images give
    UNREADABLE = "unreadable"
    UNCHECKED = "unchecked"
    REMOVING = "removing"  # samples that are to go are there still
    REMOVED = "removed"  # nobody knows any more what is to stay away
    FOREIGN = "foreign"
    UNFINISHED = "unfinished"  # notes from here on
    ROWLESS = "rowless"  # latents from before there were rows: a join with others needs them
    UNTOLD = "untold"  # the same of tars that pack did not make: only a run tells rows again
    UNSETTLED = "unsettled"  # a step that the next run does again
    LEFTOVER = "leftover"

    @property
    def is_note(self) -> bool:
        return self in NOTES


NOTES = (Kind.UNFINISHED, Kind.ROWLESS, Kind.UNTOLD, Kind.UNSETTLED, Kind.LEFTOVER)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedDataset:
    """A dataset: where it is, as the user wrote it, what it is of, and what makes it."""

    url: str
    shown: str
    dataset: str
    maker: str
    """The command that goes on with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A fault of one file.

    `unit` is the unit of work that has to be done again for it. It is empty where the file
    belongs to no unit, or can be made again from others.
    """

    place: CheckedDataset
    name: str
    kind: Kind
    what: str
    unit: str = ""

    @property
    def next_step(self) -> str:
        shown, maker = self.place.shown, self.place.maker
        if self.kind in _REDONE:
            return repair_step(shown, f'the same "{maker}"')
        return _NEXT[self.kind].format(url=shlex.quote(shown), maker=maker, unit=self.unit)

    def __str__(self) -> str:
        file = f"{self.place.shown}/{self.name}" if self.name else self.place.shown
        return f"{file}: {self.what}: {self.next_step}"


_REDONE = (Kind.MISSING, Kind.DAMAGED, Kind.WRONG)
_NEXT = {
    Kind.MANIFEST: 'run "wdsprep repair {url}"',
    Kind.INDEX: 'run "wdsprep repair {url}"',
    Kind.CHANGED: 'run the same "{maker}" again with --redo-changed',
    Kind.UNMATCHED: 'delete {url}/receipts/{unit}.json and run the same "{maker}" again',
    Kind.UNREADABLE: "check the disk and the permissions, then verify again",
    Kind.UNCHECKED: "verify again, with fewer --workers where memory is short",
    Kind.REMOVING: 'run the same "wdsprep remove" again, or "wdsprep remove {url}", to end it',
    Kind.REMOVED: "put it back from a copy, or delete it and remove again what must stay away",
    Kind.FOREIGN: "move it out of the dataset",
    Kind.UNFINISHED: 'run the same "{maker}" again to go on',
    Kind.ROWLESS: 'run "wdsprep index {url}" before it is joined with another',
    Kind.UNTOLD: AGAIN,
    Kind.UNSETTLED: 'run the same "{maker}" again, or "wdsprep repair {url}"',
    Kind.LEFTOVER: "nothing to do",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitFindings:
    """The result of checking one unit.

    `keys` has a digest of each shard's keys, by the name that a latent shard made of it states
    as its input (see `pairs`).
    """

    findings: tuple[Finding, ...] = ()
    keys: dict[str, str] = field(default_factory=dict)
