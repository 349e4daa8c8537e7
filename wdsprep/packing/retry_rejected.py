"""`--retry-rejected`: fetch rows again that failed for a reason that has passed.

Such rows of older slices are packed again, in separate *retry slices*.

Some reasons pass by themselves, such as a host that is down (`TRANSIENT`). Others pass when a run
allows more than the run before: private addresses, `s3://` rows, downloads that robots.txt or an
opt-out forbids, larger downloads. A run may allow more than the dataset was begun with, and does so
for all that it fetches; it fetches again what was forbidden only with this option. It may never
allow less. So the settings of a dataset are the least that each of its slices was allowed, and a
slice that was allowed more counts that in its receipt (see `wdsprep.dataset.settings`).

1. The rows of older slices from which a retry slice is made are written down before anything is
   fetched. So the retry slice is wanted until its receipt is there, like any slice, and a retry
   that was killed resumes.
2. Its receipt moves its rows: from then on they are in its shards or among its rejects.
3. The older slices are updated after that: the rows leave their rejects, and their receipts count
   them as `retried`. The receipt is written first, with the digest of the new rejects and, as
   `UNSETTLED`, that of the old ones; then the rejects, and the receipt once more. If a run is
   killed in between, the next run does the same again.
4. If an older slice has to be done again from the start, the rows of retry slices stay out of it,
   whether the retry slices are done or not.

A retry slice may itself be tried again. The numbers of retry slices begin far above all others, so
that neither a `limit` nor an append can meet them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain

from wdsprep.dataset.damage import DELETE_STEP, UNLIKE_RECEIPT, naming_repair, repair_step
from wdsprep.dataset.file_names import (
    FIRST_RETRY,
    RETRIES,
    inputs_name,
    receipt_name,
    rejects_name,
    retry_of_inputs,
)
from wdsprep.dataset.manifest import RETRIED, Manifest, Receipt
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import (
    UNSETTLED,
    Reject,
    RejectsFile,
    is_moved,
    read_rejects,
    rejects_in,
)
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.stored_dataset import done_units, read_receipt
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import DamageError, NotFoundError
from wdsprep.fetch.options import ROBOTS, TRANSIENT, FetchRules
from wdsprep.packing.slices import packed_items
from wdsprep.sources.base import Item, Slice
from wdsprep.store.base import Store, write_bytes
from wdsprep.store.schemes import is_keyed

Moved = Mapping[str, frozenset[str]]
"""The sources of the rows that other slices have taken over, by slice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """The retry slices of a dataset, finished or not: slices of rows that are fetched again."""

    edition: Edition
    slices: tuple[Slice, ...] = ()

    def pending(self, manifest: Manifest) -> list[Slice]:
        """Return the retry slices without a receipt."""
        done = set(manifest.ledger.units())
        return [part for part in self.slices if part.name not in done]

    def apart_from(self, parts: Iterable[Slice]) -> Iterator[Slice]:
        """Yield slices that name in `elsewhere` the rows that (other) retry slices take from them.

        It does not matter whether those retry slices are finished. The items of a slice stay.
        """
        planned = self.moved()
        return (replace(part, elsewhere=planned.get(part.name, frozenset())) for part in parts)

    def taken_from(self, unit: str) -> frozenset[str]:
        """Return the sources of the rows that finished retry slices have taken from a slice."""
        return self.moved(done_units(self.edition.store)).get(unit, frozenset())

    def moved(self, done: Iterable[str] | None = None) -> Moved:
        """Return what slices of rows lose to the retry slices, or to those of them in `done`."""
        from wdsprep.sources.table_sources import sources_of

        names = {part.name for part in self.slices} if done is None else set(done)
        sources: dict[str, set[str]] = defaultdict(set)
        for item in chain.from_iterable(part.items for part in self.slices if part.name in names):
            sources[item.name].update(sources_of(item))
        return {unit: frozenset(taken) for unit, taken in sources.items()}

    def settle(self, manifest: Manifest) -> Manifest:
        """Remove the rows of finished retry slices from the receipts and rejects of older slices.

        Return the manifest with the new receipts, and without those that a repair has removed
        meanwhile.
        """
        moved = self.moved(manifest.ledger.units())
        if not moved:
            return manifest
        planned = self.moved()
        receipts: list[Receipt] = []
        for receipt in manifest.receipts:
            unit, gone = receipt.unit, moved.get(receipt.unit)
            if not gone or (
                UNSETTLED not in receipt.files  # no update of the receipt was interrupted
                and receipt.counts.get(RETRIED) == len(gone) == len(planned[unit])
            ):
                receipts.append(receipt)
                continue
            with self.edition.holding(unit), suppress(NotFoundError):  # a repair has taken it out
                stored = read_receipt(self.edition.store, unit)
                receipts.append(_settle_receipt(self.edition.store, stored, gone))
        return replace(manifest, receipts=tuple(receipts))

    def extended(
        self, manifest: Manifest, fetch: FetchRules, *, larger: bool, size: int
    ) -> "Retries":
        """Plan retry slices of up to `size` rows for the rejects that may succeed now.

        Rejects that have a retry slice already are left out. `larger` is true if images may have
        more bytes than when the dataset was begun. The new slices are written to the store. Return
        the retries with all slices, old and new.
        """
        allowed = {
            Code.PRIVATE_ADDRESS: fetch.allow_private_hosts or fetch.allow_s3,
            Code.DISALLOWED: fetch.ignore_robots or fetch.ignore_opt_outs,
            Code.TOO_MANY_BYTES: larger,
        }
        codes = TRANSIENT.union(code for code, is_allowed in allowed.items() if is_allowed)
        with self.edition.holding_manifest():
            known = read_retries(self.edition)  # another run may have planned some
            slices, planned = known.slices, known.moved()
            items = (
                item
                for receipt in manifest.receipts
                if not codes.isdisjoint(receipt.rejects)
                for item in _retryable_items(
                    self.edition.store,
                    receipt.unit,
                    lambda reject: _is_curable(reject, fetch, codes),
                    planned.get(receipt.unit, frozenset()),
                )
            )
            first = 1 + max((part.number for part in slices), default=FIRST_RETRY - 1)
            new = tuple(_cut_slices(items, size=size, first=first))
            for part in new:
                write_bytes(self.edition.store, inputs_name(part.name), part.inputs)
        return replace(self, slices=slices + new)


def _is_curable(reject: Reject, fetch: FetchRules, codes: frozenset[str]) -> bool:
    if reject.code is Code.PRIVATE_ADDRESS:
        return fetch.allow_s3 if is_keyed(reject.url) else fetch.allow_private_hosts
    if reject.code is Code.DISALLOWED:
        return fetch.ignore_robots if ROBOTS in reject.detail else fetch.ignore_opt_outs
    return reject.code in codes


def retryable(manifest: Manifest) -> int:
    """Return the number of rejects that another attempt may cure without further permission."""
    return sum(n for code, n in manifest.rejects.items() if code in TRANSIENT)


def read_retries(edition: Edition) -> Retries:
    store, slices = edition.store, list[Slice]()
    units = filter(None, (retry_of_inputs(entry.name) for entry in store.list(RETRIES)))
    for number in sorted(map(int, units)):
        from wdsprep.sources.table_sources import sources_of  # only retries need what reads tables

        bare = Slice(number=number, items=())
        items = packed_items(store, [bare.name])
        try:
            counted = [item._replace(samples=sum(1 for _ in sources_of(item))) for item in items]
        except (ValueError, IndexError):  # no retry has written this
            what = f"{store.url}/{inputs_name(bare.name)}"
            raise DamageError(what, "it lists no rows").with_next_step(DELETE_STEP) from None
        slices.append(replace(bare, items=tuple(counted)))
    return Retries(edition=edition, slices=tuple(slices))


def _settle_receipt(store: Store, receipt: Receipt, gone: frozenset[str]) -> Receipt:
    """Remove the rows in `gone` from a slice's rejects, and return its new receipt.

    Rejects and receipt are written to the store if they change, in steps that the next run may
    repeat. Raise DamageError if the rejects do not have the digest in the receipt.
    """
    name = rejects_name(receipt.unit)
    what = f"{store.url}/{name}"
    before, after = store.read(name), BytesIO()
    digest = hex_digest(before)
    if digest not in (receipt.files[name], receipt.files.get(UNSETTLED)):
        raise DamageError(what, UNLIKE_RECEIPT).with_next_step(repair_step(store.url))
    rejects = RejectsFile(after)
    for reject in read_rejects(before, what):
        if not is_moved(reject, gone):
            rejects.add(reject)
    inputs = sum(shard.samples for shard in receipt.shards) + rejects.counts.total()
    retried = receipt.counts.get(RETRIED, 0) + receipt.inputs - inputs
    files = {**receipt.files, name: rejects.digest}
    files.pop(UNSETTLED, None)
    settled = replace(
        receipt,
        inputs=inputs,
        rejects=dict(rejects.counts),
        counts={**receipt.counts, RETRIED: retried},
        files=files,
    )
    if digest != rejects.digest:
        begun = replace(settled, files={**files, UNSETTLED: digest})
        write_bytes(store, receipt_name(receipt.unit), begun.to_bytes())
        write_bytes(store, name, after.getvalue())
    if settled != receipt:
        write_bytes(store, receipt_name(receipt.unit), settled.to_bytes())
    return settled


def _retryable_items(
    store: Store, unit: str, is_curable: Callable[[Reject], bool], planned: frozenset[str]
) -> Iterator[Item]:
    """Yield items of a slice, cut down to the rejected rows that may succeed now.

    Rows in `planned` have a retry slice already, and are left out.
    """
    from wdsprep.sources.table_sources import some_rows, source_name, sources_of

    with naming_repair(store):
        rejects = rejects_in(store, unit)
    wanted = {r.source for r in rejects if r.source not in planned and is_curable(r)}
    for item in packed_items(store, [unit]):
        table = item.parts[0][0] if item.parts else ""
        of_retry = frozenset(sources_of(item)) if table else frozenset()
        mine = (source for source in wanted if not of_retry or source in of_retry)
        start = len(source_name(table, 0)) - 1
        if rows := sorted(int(source[start:]) for source in mine if source[start:].isdecimal()):
            yield some_rows(item, rows, name=unit)


def _cut_slices(items: Iterable[Item], *, size: int, first: int) -> Iterator[Slice]:
    held: list[Item] = []
    for item in items:
        if held and sum(one.samples for one in held) + item.samples > size:
            yield Slice(number=first, items=tuple(held))
            first, held = first + 1, []
        held.append(item)
    if held:
        yield Slice(number=first, items=tuple(held))
