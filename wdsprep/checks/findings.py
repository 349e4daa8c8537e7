"""Findings: the faults of files that checks find, of which each has a kind and a next step."""

import shlex
from dataclasses import dataclass
from enum import Enum

REPAIR = 'run "wdsprep repair {url}"'
REDO = f'{REPAIR}, then the same "{{maker}}" again'


class Kind(Enum):
    """The kind of a finding, which decides what can be done about it."""

    next_step: str

    def __new__(cls, value: str, next_step: str) -> "Kind":
        kind = object.__new__(cls)
        kind._value_ = value
        kind.next_step = next_step
        return kind

    MANIFEST = ("manifest", REPAIR)  # damaged, or unlike the receipts, from which it can be made
    INDEX = ("index", REPAIR)  # can be made from its tar
    MISSING = ("missing", REDO)
    DAMAGED = ("damaged", REDO)
    WRONG = ("wrong", REDO)  # what was written breaks the format
    # Latents of images that have gone or changed since.
    CHANGED = (
        "changed",
        'if it was made of these images, run the same "{maker}" again with --redo-changed',
    )
    # Latents of images that are not complete: what they were made of may come back.
    UNPACKED = ("unpacked", 'run the same "{maker}" again to finish the images, then verify again')
    # Latents of images that have lost samples since.
    BEHIND = ("behind", 'run "wdsprep remove {url}" to let it lose them too')
    # Latents that do not fit their images.
    UNMATCHED = ("unmatched", 'delete {url}/receipts/{unit}.json and run the same "{maker}" again')
    UNREADABLE = ("unreadable", "check the disk and the permissions, then verify again")
    UNCHECKED = ("unchecked", "verify again, with fewer --workers where memory is short")
    # A removal has not removed all of its samples.
    REMOVING = (
        "removing",
        'run the same "wdsprep remove" again, or "wdsprep remove {url}", to finish it',
    )
    # The list of removed samples is damaged, so they might come back.
    REMOVED = (
        "removed",
        "put it back from a copy, or delete it and remove again what must stay away",
    )
    FOREIGN = ("foreign", "move it out of the dataset")
    # Notes from here on.
    UNFINISHED = (
        "unfinished",
        'run the same "{maker}" again to go on (without --limit, if it had one)',
    )
    # A step that the next run does again.
    UNSETTLED = ("unsettled", f'run the same "{{maker}}" again, or {REPAIR.removeprefix("run ")}')
    LEFTOVER = ("leftover", "nothing to do")

    @property
    def is_note(self) -> bool:
        return self in NOTES


NOTES = (Kind.UNFINISHED, Kind.UNSETTLED, Kind.LEFTOVER)


REDONE = (Kind.MISSING, Kind.DAMAGED, Kind.WRONG)
"""The kinds of findings whose unit of work is done again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A fault of one file of a dataset, which the user calls `shown`.

    `maker` is the command that makes the dataset, and continues it, or for UNPACKED the one that
    makes its images. `unit` is the unit of work that has to be done again to repair it. It is empty
    if the file belongs to no unit, or can be made from other files.
    """

    shown: str
    maker: str
    name: str
    kind: Kind
    what: str
    unit: str = ""

    @property
    def next_step(self) -> str:
        url = shlex.quote(self.shown)
        return self.kind.next_step.format(url=url, maker=self.maker, unit=self.unit)

    def __str__(self) -> str:
        file = f"{self.shown}/{self.name}" if self.name else self.shown
        return f"{file}: {self.what}: {self.next_step}"
