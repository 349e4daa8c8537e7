"""A dataset in a store: its receipts, its manifest, and what a run finds before it writes.

A unit is done when its receipt is there, and a run asks the listing alone. The manifest repeats
what the receipts say, so that a dataset opens with one read; where it is behind them, they win.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import TypeVar

from wdsprep.dataset.damage import naming_next_step, naming_repair
from wdsprep.dataset.file_names import (
    BESIDE,
    HUB_FILES,
    LATENTS,
    MANIFEST,
    MANIFEST_HOLD,
    OURS,
    RECEIPTS,
    SHARD,
    bucket_of,
    captions_name,
    held_name,
    is_table,
    latent_unit,
    maker_of,
    names_beside,
    receipt_name,
    rejects_name,
    retry_of_inputs,
    tar_of,
    unit_of_file,
    unit_of_receipt,
)
from wdsprep.dataset.manifest import (
    Manifest,
    Receipt,
    Receipts,
    Shard,
    line_of,
    rebuild_hint,
    sort_by_unit,
)
from wdsprep.dataset.removed_samples import check_no_removal, forget_removal
from wdsprep.dataset.settings import (
    SCORES,
    Settings,
    changed_settings,
    check_storable,
    is_same,
    is_scored,
    say_changes,
)
from wdsprep.dataset.shapes import buckets_of_phase
from wdsprep.dataset.thread_map import read_each
from wdsprep.dataset.unit_locks import Edition, wait_for_holders
from wdsprep.errors import (
    FingerprintError,
    FormatError,
    NotFoundError,
    StoreError,
    TarError,
    UsageError,
)
from wdsprep.store import did_you_mean_place, open_store
from wdsprep.store.base import Store, is_hidden
from wdsprep.text import EXAMPLES, Counting, command, examples, ignore_count, shown

LOOKED_AT = 10_000  # names, for what else a place may be
SAME_MOMENT_S = 2.0  # S3 tells whole seconds
NONE_WRITTEN = Receipts(dataset="", settings={})
Found = TypeVar("Found")


def file_filter(manifest: Manifest) -> Callable[[str], bool]:
    """Return a function that says whether a file may be part of this dataset, by its name.

    A file in a bucket may be part only if the dataset has the bucket. A dataset of images has the
    buckets that its settings list, one of latents those in which it has shards.
    """

    @cache
    def buckets() -> set[str]:
        in_shards = (shard.name.partition("/")[0] for shard in manifest.shards)
        return {*map(str, manifest.settings.get("buckets") or in_shards)}

    def is_part(name: str) -> bool:
        is_ours = name == MANIFEST or any(p.fullmatch(name) for p in OURS[manifest.dataset])
        bucket = bucket_of(name)
        return is_ours and (not bucket or bucket in buckets())

    return is_part


def read_manifest(store: Store) -> Manifest | None:
    """Return the manifest of the dataset in a store, or None if there is none."""
    try:
        data = store.read(MANIFEST)
    except NotFoundError:
        return None
    what = f"{store.url}/{MANIFEST}"
    with naming_next_step(rebuild_hint(what)):
        return Manifest.from_bytes(data, what)


def check_of_images(shown: str, manifest: Manifest) -> None:
    """Raise UsageError if a dataset, which the user calls `shown`, is not one of images."""
    if manifest.dataset != "images":
        what = f"{shown} is a dataset of {manifest.kind}"
        raise UsageError(f"{what}: give the images that it was made of")


def dated_manifest(store: Store) -> Manifest | None:
    """Return the manifest with the time when it was written, or None if there is none.

    The time is read before the content, and so may be too early. A receipt that is younger may be
    missing in the manifest, or have changed since.
    """
    dates = (entry.written_s for entry in store.list(MANIFEST) if entry.name == MANIFEST)
    written_s = min(dates, default=math.inf)
    manifest = read_manifest(store)
    return None if manifest is None else replace(manifest, written_s=written_s)


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Write the manifest piece by piece: of a million units it is half a GB."""
    with store.write(MANIFEST) as sink:
        for piece in manifest.pieces():
            sink.write(piece)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetClaim:
    """A dataset that a run is going to write, as it lies there before any unit is written."""

    edition: Edition
    manifest: Manifest
    """The manifest with the receipts that are there, or else the one that is to be written."""
    is_there: bool = False
    """True if it goes on as it is: its manifest need not be written first."""
    starts_over: bool = False
    """True if the files that lie there are removed first."""


def find_claim(store: Store, dataset: str, settings: Settings, *, overwrite: bool) -> DatasetClaim:
    """Return the dataset at the place that a run is going to write to, and write nothing yet.

    Raise an error if that dataset has other settings.
    """
    check_storable(dataset, settings)
    if overwrite and _is_to_clear(store, dataset):
        manifest = Manifest(dataset=dataset, settings=settings)
        return DatasetClaim(edition=Edition(store=store), manifest=manifest, starts_over=True)
    return _check_claim(store, dataset, settings)


def take_claim(claim: DatasetClaim) -> DatasetClaim:
    """Return a claimed dataset once it is there: if it is new, its manifest is written.

    If the claim starts over, the files that lie there are removed first, and no others. If another
    run has begun the dataset meanwhile, that one is used; raise an error if its settings are
    others.
    """
    if claim.is_there:
        return claim
    store, manifest = claim.edition.store, claim.manifest
    with store.hold(MANIFEST_HOLD):
        if claim.starts_over:
            return _start_over(store, manifest)
        if _has_manifest(store):
            return _check_claim(store, manifest.dataset, manifest.settings)
        write_manifest(store, manifest)
    return replace(claim, is_there=True)


def _start_over(store: Store, manifest: Manifest) -> DatasetClaim:
    """Begin another edition of a dataset, and delete what was written of it.

    A run that begins while files are deleted has the new mark, and has perhaps read some of them.
    So there is one more mark after that, which ends such a run, and what it wrote is deleted too.

    Receipts go first: then the rest never happened. Names go from the last to the first, so that no
    retry of a retry outlives the one that it takes rows from.
    """
    for _ in range(2):
        edition = Edition.begun(store)
        wait_for_holders(store)
        names = [entry.name for entry in store.list()]
        for pattern in OURS[manifest.dataset]:
            for name in filter(pattern.fullmatch, reversed(names)):
                store.delete(name)
        forget_removal(store)
        write_manifest(store, manifest)
    return DatasetClaim(edition=edition, manifest=manifest, is_there=True)


def _has_manifest(store: Store) -> bool:
    return any(entry.name == MANIFEST for entry in store.list(MANIFEST))


def _check_claim(store: Store, dataset: str, settings: Settings) -> DatasetClaim:
    """Return the dataset to begin or to continue with.

    Raise an error if the dataset is of another kind or has other settings.
    """
    edition, stored = Edition.from_store(store), dated_manifest(store)
    manifest = stored or rebuild(store)
    if manifest is None:
        names = (entry.name for entry in store.list())
        # A run that is to write its manifest, or was killed before, has the lock of that:
        free = (MANIFEST_HOLD, *HUB_FILES)
        others = (n for n in names if not is_hidden(n) and (held_name(n) or n) not in free)
        first = [shown(name) for name in islice(others, EXAMPLES + 1)]
        # A dataset that was started over may have old files, and another run may just begin one.
        if first and not edition.mark and not _has_manifest(store):
            raise UsageError(
                f"{store.url} holds other things ({examples(first)}): give an empty or new folder "
                "for the dataset"
            )
        manifest = Manifest(dataset=dataset, settings=settings)
    check_kind(store, manifest.dataset, dataset)
    check_no_removal(store)
    if changes := changed_settings(manifest.settings, settings):
        again, new = maker_of(dataset, settings), SCORES if is_scored(settings) else dataset
        # of several that one command fills, this one alone
        if "resolution" in settings and not is_scored(settings):
            again += f" --resolution {settings['resolution']}"
            no = [f" --{name} none" for name in ("latents", "text") if settings.get(name) == "none"]
            again += "".join(no)
        raise FingerprintError(
            f"{store.url} was made with other settings: {say_changes(changes)}: run with those "
            f"that it was made with, give another place for {new}, or let "
            f'"{again} ... --overwrite" start over'
        )
    if stored is not None:
        manifest = refresh_manifest(store, manifest)
    return DatasetClaim(edition=edition, manifest=manifest, is_there=stored is not None)


def check_kind(store: Store, dataset: str, wanted: str) -> None:
    if dataset != wanted:
        raise UsageError(f"{store.url} is a dataset of {dataset}: give another place for {wanted}")


def done_units(store: Store) -> Iterator[str]:
    """Yield the units that have a receipt."""
    return filter(None, (unit_of_receipt(entry.name) for entry in store.list(RECEIPTS)))


def refresh_manifest(
    store: Store,
    manifest: Manifest,
    written: Receipts = NONE_WRITTEN,
    stored: Manifest | None = None,
    on_count: Counting = ignore_count,
    locks: set[str] | None = None,
) -> Manifest:
    """Return the manifest with exactly the receipts that are in the store.

    Receipts that the caller has `written` are not read again, unless the manifest that is `stored`
    now has another one. If a receipt is gone, the dataset is no longer complete: a user may have
    deleted it to have its unit done again. `on_count` gets the number of receipts read, and of all;
    `locks` gets the names of locks.
    """
    lines: dict[str, bytes] = {}  # of receipts by unit, empty for those to be read
    younger = set()  # than the manifest: made again since, perhaps
    for entry in store.list(RECEIPTS):
        if unit := unit_of_receipt(entry.name):
            lines[unit] = b""
            if entry.written_s > manifest.written_s - SAME_MOMENT_S:
                younger.add(unit)
        elif locks is not None and (name := held_name(entry.name)):
            locks.add(name)
    for unit, line in manifest.ledger.named_lines():
        if unit in lines and unit not in younger:
            lines[unit] = line
    for unit, line in written.named_lines():
        if unit in lines:
            lines[unit] = line
    for unit, line in stored.ledger.named_lines() if stored else ():
        if lines.get(unit) not in (None, b"", line):
            lines[unit] = b""
    unread = sorted(unit for unit, line in lines.items() if not line)

    def read_line(unit: str) -> bytes:
        try:
            return line_of(read_receipt(store, unit, manifest.settings))
        except NotFoundError:  # another run has just taken it out
            return b""

    before, of = len(lines) - len(unread), len(lines)
    read = read_each(read_line, unread, store.readers, lambda count: on_count(before + count, of))
    lines.update(zip(unread, read, strict=True))
    lines = {unit: line for unit, line in lines.items() if line}
    is_whole = manifest.complete and all(unit in lines for unit in manifest.ledger.units())
    receipts = manifest.ledger.with_lines(sort_by_unit(lines))
    return replace(manifest, receipts=receipts, complete=is_whole)


def read_receipt(store: Store, unit: str, settings: Settings | None = None) -> Receipt:
    """Read the receipt of a unit. Raise an error if it was made with other settings than these."""
    name = receipt_name(unit)
    data = store.read(name)
    with naming_repair(store):
        receipt = Receipt.from_bytes(data, f"{store.url}/{name}")
    if settings is not None and not is_same(dict(receipt.settings), dict(settings)):
        changes = say_changes(changed_settings(receipt.settings, settings))
        raise FingerprintError(
            f"{store.url}/{name} was made with other settings, by another run "
            f"({changes or 'looser ones'}): let that run end, then run "
            f"{command('repair', store.url)}"
        )
    return receipt


def check_not_rewritten(store: Store, name: str, digest: str) -> None:
    """Raise FingerprintError if the receipt of a shard has another digest than this one by now.

    A shard that is not what it was is not damaged then: another run has written it anew.
    """
    for unit in {unit_of_file(name, "images"), latent_unit(name)}:
        with contextlib.suppress(NotFoundError, FormatError):
            if (name, digest) not in {(s.name, s.digest) for s in read_receipt(store, unit).shards}:
                raise rewritten_error(store, name)


def rewritten_error(store: Store, name: str) -> FingerprintError:
    return FingerprintError(
        f"{store.url}/{name} was written anew while it was read: let the run that changes it "
        "finish, then run the same command again"
    )


@contextlib.contextmanager
def reading_shard(store: Store, shard: Shard) -> Iterator[None]:
    """Name the commands that mend the dataset in errors of the block, which reads a shard.

    Raise FingerprintError in place of an error if the shard was written anew meanwhile.
    """
    try:
        with naming_repair(store):
            yield
    except (FormatError, StoreError, TarError):
        check_not_rewritten(store, shard.name, shard.digest)
        raise


def read_shard(store: Store, shard: Shard, samples: Iterator[Found]) -> Iterator[Found]:
    """Yield what an iterator reads of a shard, as `reading_shard` has its errors."""
    with reading_shard(store, shard):
        yield from samples


def find_receipt(store: Store, unit: str, input_digest: str, settings: Settings) -> Receipt | None:
    """Return the receipt of a unit if another run has finished it meanwhile, otherwise None.

    Raise an error if it was made from other input, or with other settings.
    """
    try:
        receipt = read_receipt(store, unit, settings)
    except NotFoundError:
        return None
    if receipt.input != input_digest:
        raise _two_runs_error(store, unit)
    return receipt


def check_same(store: Store, receipt: Receipt) -> None:
    """Check that the stored receipt of a unit, which another run wrote, equals this receipt.

    Two runs can finish a unit at once in a store without locks. If the receipts differ, the shards
    may be of either run: delete the stored one, so that the unit counts as not done, and raise an
    error.
    """
    name = receipt_name(receipt.unit)
    if store.read(name) != receipt.to_bytes():
        store.delete(name)
        raise _two_runs_error(store, receipt.unit)


def retract(edition: Edition, unit: str, input_digest: str) -> None:
    """Delete a unit and its files, unless it was made from another input by now."""
    store = edition.store
    with edition.holding(unit), contextlib.suppress(NotFoundError):
        receipt = read_receipt(store, unit)
        if receipt.input == input_digest:
            store.delete(receipt_name(unit))
            for shard in receipt.shards:
                for name in (shard.name, *names_beside(shard.name)):
                    store.delete(name)
            store.delete(rejects_name(unit))
            store.delete(captions_name(unit))


def _two_runs_error(store: Store, unit: str) -> FingerprintError:
    return FingerprintError(
        f"another run is writing something else into {store.url} ({unit}): let one of them "
        "end, then run the one that you want again"
    )


def rebuild(store: Store, on_count: Counting = ignore_count) -> Manifest | None:
    """Return a manifest made again from the receipts, or None if there are none."""
    first = min(done_units(store), default=None)
    if first is None:
        return None
    receipt = read_receipt(store, first)
    bare = Manifest(dataset=receipt.dataset, settings=receipt.settings, receipts=(receipt,))
    manifest = refresh_manifest(store, bare, on_count=on_count)
    return replace(manifest, generations=tuple(sorted({0, *manifest.ledger.column("generation")})))


def write_rebuilt(url: str, on_count: Counting = ignore_count) -> Manifest:
    """Replace the manifest of the dataset at `url` by what its receipts say."""
    store = open_store(url)
    if any(done_units(store)):
        with Edition.from_store(store).holding_manifest():
            if manifest := rewrite_manifest(store, on_count):
                return manifest
    raise no_dataset_error(url, "has no receipts, so it holds no dataset")


def no_dataset_error(url: str, what: str) -> NotFoundError:
    """Return the error that there is no dataset at a place, as `what` says of it."""
    return NotFoundError(
        f"{url} {what}: give the folder or URL that pack or encode wrote (tars of others are for "
        f"pack, encode and wdsprep.load){did_you_mean_place(url)}"
    )


def rewrite_manifest(store: Store, on_count: Counting = ignore_count) -> Manifest | None:
    """Write the manifest again from the receipts, and return it, or None if there are none.

    The caller holds its lock. What receipts do not tell is kept from the old manifest, if that can
    be read and has the same settings.
    """
    manifest = rebuild(store, on_count)
    if manifest is None:
        return None
    with contextlib.suppress(FormatError):
        old = read_manifest(store)
        if old is not None and is_same(dict(old.settings), dict(manifest.settings)):
            is_whole = old.complete and old.receipts == manifest.receipts
            manifest = replace(
                manifest, generations=old.generations, complete=is_whole, extra=old.extra
            )
    write_manifest(store, manifest)
    return manifest


def phases(manifest: Manifest) -> dict[int, tuple[int, int]]:
    """Return for each training resolution how many samples and shards its buckets hold."""
    buckets = sorted(manifest.settings["buckets"])
    amounts = {}
    for resolution in buckets:
        of_phase = set(buckets_of_phase(resolution, buckets))
        shards = [shard for shard in manifest.shards if shard.bucket in of_phase]
        amounts[resolution] = (sum(shard.samples for shard in shards), len(shards))
    return amounts


def tidy(edition: Edition, manifest: Manifest) -> None:
    """Remove files that belong to no receipt from a dataset that is complete.

    A killed run made them from input that has changed since. A unit that another run finishes
    meanwhile has a receipt, and stays.
    """
    ours, store = set(manifest.ledger.units()), edition.store
    shards = {latent_unit(shard.name) for shard in manifest.ledger.shards()}
    strays: dict[str, list[str]] = {}
    for entry in store.list():
        unit, name = _maker_unit(manifest, entry.name), tar_of(entry.name)
        if unit and latent_unit(name) not in shards and (name.endswith(".tar") or unit not in ours):
            strays.setdefault(unit, []).append(entry.name)
    for unit, names in sorted(strays.items()):
        with edition.holding(unit):
            with contextlib.suppress(NotFoundError):  # else tars that its receipt does not list
                listed = {latent_unit(shard.name) for shard in read_receipt(store, unit).shards}
                of_tars = (n for n in names if ".tar" in n or is_table(n))
                names = [n for n in of_tars if latent_unit(tar_of(n)) not in listed]
            for name in names:
                store.delete(name)


def _maker_unit(manifest: Manifest, name: str) -> str:
    """Return the unit that made a file, by its name, or "" if another program may have made it.

    It is empty for the inputs of a retry too, which are written before the retry begins.
    """
    if manifest.dataset == "latents":
        match = LATENTS.fullmatch(name)
        return match[1] if match else ""
    if shard := SHARD.fullmatch(name):
        return shard[2] if int(shard[1]) in manifest.settings["buckets"] else ""
    beside = BESIDE.fullmatch(name)
    return beside[2] if beside and not retry_of_inputs(name) else ""


def _is_to_clear(store: Store, dataset: str) -> bool:
    """Return whether there is a dataset to clear. Raise an error if it is of another kind."""
    with contextlib.suppress(FormatError):  # a damaged one can say nothing against it
        if manifest := read_manifest(store):
            check_kind(store, manifest.dataset, dataset)
        else:  # no receipt of images has a name that one of latents may have
            receipt, _ = OURS[dataset]
            return any(receipt.fullmatch(entry.name) for entry in store.list(RECEIPTS))
    return True


def open_dataset(url: str) -> tuple[Store, Manifest]:
    store = open_store(url)
    manifest = read_manifest(store)
    if manifest is None:
        names = (entry.name for prefix in (RECEIPTS, "") for entry in store.list(prefix))
        check_place(url, list(islice(names, LOOKED_AT)))
        raise no_dataset_error(url, f"holds no dataset, as it has no {MANIFEST}")
    return store, manifest


def open_current_dataset(url: str, shown: str) -> tuple[Store, Manifest]:
    """Open a dataset, and return its manifest with the receipts that there are now.

    Errors name it as `shown`.
    """
    store = open_store(url)
    manifest = dated_manifest(store) or open_dataset(shown)[1]  # which says what is there instead
    return store, refresh_manifest(store, manifest)


def check_place(url: str, names: Collection[str]) -> None:
    """Raise an error if a place has receipts but no manifest, or datasets in its folders."""
    if any(name.startswith(RECEIPTS) for name in names):
        raise UsageError(f"{url} has lost its {MANIFEST}: run {command('rebuild', url)}")
    if inside := sorted(name for name in names if name.endswith(f"/{MANIFEST}")):
        place = url.rstrip("/")
        datasets = examples([f"{place}/{name.removesuffix(f'/{MANIFEST}')}" for name in inside])
        raise UsageError(f"{url} is not a dataset, but holds some: give one of them ({datasets})")
