"""Findings: the faults of files that checks find, of which each has a kind and a next step."""

import shlex
from dataclasses import dataclass
from enum import Enum

from wdsprep.dataset.damage import repair_step


class Kind(Enum):
    """The kind of a finding, which decides what can be done about it."""

    MANIFEST = "manifest"  # damaged, or unlike the receipts, from which it can be made
    INDEX = "index"  # can be made from its tar
    MISSING = "missing"
    DAMAGED = "damaged"
    WRONG = "wrong"  # what was written breaks the format
    CHANGED = "changed"  # latents of images that have gone or changed since
    BEHIND = "behind"  # latents of images that have lost samples since
    UNMATCHED = "unmatched"  # latents that do not fit their images
    UNREADABLE = "unreadable"
    UNCHECKED = "unchecked"
    REMOVING = "removing"  # a removal has not removed all of its samples
    REMOVED = "removed"  # the list of removed samples is damaged, so they might come back
    FOREIGN = "foreign"
    UNFINISHED = "unfinished"  # notes from here on
    UNSETTLED = "unsettled"  # a step that the next run does again
    LEFTOVER = "leftover"

    @property
    def is_note(self) -> bool:
        return self in NOTES


NOTES = (Kind.UNFINISHED, Kind.UNSETTLED, Kind.LEFTOVER)


REDONE = (Kind.MISSING, Kind.DAMAGED, Kind.WRONG)
"""The kinds of findings whose unit of work is done again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A fault of one file of a dataset, which the user calls `shown`.

    `maker` is the command that makes the dataset, and continues it. `unit` is the unit of work that
    has to be done again to repair it. It is empty if the file belongs to no unit, or can be made
    from other files.
    """

    shown: str
    maker: str
    name: str
    kind: Kind
    what: str
    unit: str = ""

    @property
    def next_step(self) -> str:
        if self.kind in REDONE:
            return repair_step(self.shown, f'the same "{self.maker}"')
        url = shlex.quote(self.shown)
        return _NEXT[self.kind].format(url=url, maker=self.maker, unit=self.unit)

    def __str__(self) -> str:
        file = f"{self.shown}/{self.name}" if self.name else self.shown
        return f"{file}: {self.what}: {self.next_step}"


_NEXT = {
    Kind.MANIFEST: 'run "wdsprep repair {url}"',
    Kind.INDEX: 'run "wdsprep repair {url}"',
    Kind.CHANGED: 'run the same "{maker}" again with --redo-changed',
    Kind.BEHIND: 'run "wdsprep remove {url}" to let it lose them too',
    Kind.UNMATCHED: 'delete {url}/receipts/{unit}.json and run the same "{maker}" again',
    Kind.UNREADABLE: "check the disk and the permissions, then verify again",
    Kind.UNCHECKED: "verify again, with fewer --workers where memory is short",
    Kind.REMOVING: 'run the same "wdsprep remove" again, or "wdsprep remove {url}", to finish it',
    Kind.REMOVED: "put it back from a copy, or delete it and remove again what must stay away",
    Kind.FOREIGN: "move it out of the dataset",
    Kind.UNFINISHED: 'run the same "{maker}" again to go on',
    Kind.UNSETTLED: 'run the same "{maker}" again, or "wdsprep repair {url}"',
    Kind.LEFTOVER: "nothing to do",
}
