"""Locks on the units of a dataset, so that runs that meet take turns at each unit.

1. The files of a unit have no names until all of them are whole (`draft`). Then their maker *holds*
   the unit, and looks whether somebody else has finished it meanwhile: if so, that stays, and what
   was made here is dropped. Otherwise the files get their names, the receipt last.
2. Whoever rewrites or deletes what is finished (tidy, repair, a retry, an encode that does shards
   again) holds the unit too, looks again at what is there, and lets it be if it is not what was to
   be changed. The receipt goes before its files.
3. `--overwrite` begins a new *edition* of the dataset: a mark in it that changes before anything is
   deleted. In each hold a run looks whether the edition is still the one that it began with, and
   ends if it is not. What is held when the mark changes is waited for, and deleted like the rest.
4. The manifest is written under a hold of its own.

So at the moment of a change nobody else changes the same, and a run that slept, or has an old plan,
finds that out before it does harm. What a hold is in each place, `Store.hold` knows.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from wdsprep.dataset.file_names import EDITION, MANIFEST_HOLD, RECEIPTS, held_name, hold_name
from wdsprep.errors import FingerprintError, NotFoundError
from wdsprep.store.base import FileSink, Store, write_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Edition:
    """A dataset in the time from its beginning, or an --overwrite, up to the next --overwrite."""

    store: Store
    mark: str = ""

    @classmethod
    def from_store(cls, store: Store) -> "Edition":
        """Return the current edition of the dataset in a store. The first one has no mark."""
        try:
            return cls(store=store, mark=store.read(EDITION).decode("utf-8", "replace").strip())
        except NotFoundError:
            return cls(store=store)

    @classmethod
    def begun(cls, store: Store) -> "Edition":
        mark = secrets.token_hex(8)
        write_bytes(store, EDITION, f"{mark}\n".encode())
        return cls(store=store, mark=mark)

    def holding(self, unit: str, giving: Sequence[FileSink] = ()) -> AbstractContextManager[None]:
        """Lock a unit while the block lasts, as `Store.hold` does.

        `giving` are the files that get their names in the block. Raise FingerprintError if an
        --overwrite has begun another edition.
        """
        return self._holding(hold_name(unit), giving)

    def holding_manifest(self) -> AbstractContextManager[None]:
        return self._holding(MANIFEST_HOLD)

    @contextmanager
    def _holding(self, name: str, giving: Sequence[FileSink] = ()) -> Iterator[None]:
        with self.store.hold(name, giving=giving):
            if Edition.from_store(self.store).mark != self.mark:
                raise FingerprintError(
                    f"{self.store.url} was started over by another run, with --overwrite: this run "
                    "ends, and what it had finished is deleted"
                )
            yield


def wait_for_holders(store: Store) -> None:
    """Wait until the store lists no lock on a unit of the dataset."""
    while held := list(filter(None, (held_name(e.name) for e in store.list(RECEIPTS)))):
        for name in held:
            with store.hold(name):
                pass
