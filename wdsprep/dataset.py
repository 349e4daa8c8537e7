"""A dataset in a store: its claim, its receipts, its manifest.

A unit is done when its receipt is there, and a run asks the listing alone. The manifest repeats
what the receipts say, so that a dataset opens with one read; where it is behind them, they win.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import TypeVar

from wdsprep.buckets import buckets_of_phase
from wdsprep.errors import ExistsError, FingerprintError, FormatError, NotFoundError, UsageError
from wdsprep.manifest import MANIFEST, Manifest, Receipt, Receipts, Settings, differences
from wdsprep.progress import Counting, unheard
from wdsprep.receipts import by_unit, line_of
from wdsprep.store import Store, open_store, write_bytes

READERS = 32
NONE_KNOWN = Receipts("", {})
Found = TypeVar("Found")
Spot = TypeVar("Spot")
SHARD = re.compile(r"(\d+)/(\d{6,})(_\d+)?\.tar(\.idx)?")
BESIDE = re.compile(r"(rejects|inputs)/(\d{6,})\.jsonl")
# What a dataset of each kind may hold beside its manifest. Latent shards of tars that something
# else packed have the names of those.
OURS = {
    "images": (
        re.compile(r"receipts/\d{6,}\.json"),
        re.compile(rf"{SHARD.pattern}|{BESIDE.pattern}"),
    ),
    "latents": (
        re.compile(r"receipts/\d+/.+\.json"),
        re.compile(r"\d+/.+\.tar(\.idx)?|rejects/\d+/.+\.jsonl|empty\.[a-z]+\.npy"),
    ),
}


def parts_of(manifest: Manifest) -> Callable[[str], bool]:
    """Tells whether a file of a name can be a part of this dataset. Latents say in no setting which
    buckets they have, so it is those that they have shards in."""

    @cache
    def buckets() -> frozenset[str]:
        if "buckets" in manifest.settings:
            return frozenset(map(str, manifest.settings["buckets"]))
        return frozenset(shard.name.partition("/")[0] for shard in manifest.shards)

    def is_part(name: str) -> bool:
        if name != MANIFEST and not any(each.fullmatch(name) for each in OURS[manifest.dataset]):
            return False
        bucket = re.match(r"(?:receipts/|rejects/)?(\d+)/", name)
        return bucket is None or bucket[1] in buckets()

    return is_part


def read_each(
    read: Callable[[Spot], Found], spots: Iterable[Spot], heard: Callable[[int], None]
) -> list[Found]:
    """Read many at a time, in their order; `heard` is told how many are there."""
    found: list[Found] = []
    with ThreadPoolExecutor(READERS) as readers:
        for one in readers.map(read, spots):
            found.append(one)
            heard(len(found))
    return found


def receipt_name(unit: str) -> str:
    return f"receipts/{unit}.json"


def read_manifest(store: Store) -> Manifest | None:
    """The manifest, or None where there is none."""
    try:
        data = store.read(MANIFEST)
    except NotFoundError:
        return None
    try:
        return Manifest.from_bytes(data, f"{store.url}/{MANIFEST}")
    except FormatError as error:
        hint = f'run "wdsprep rebuild {store.url}" to make it again from the receipts'
        raise type(error)(
            f"{error}: {hint}" if type(error) is FormatError else str(error)
        ) from error


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Piece by piece: of a million units it is half a GB."""
    with store.write(MANIFEST) as sink:
        for piece in manifest.pieces():
            sink.write(piece)


def claim(store: Store, dataset: str, settings: Settings) -> Manifest:
    """Begin a dataset, or go on with it if it was made with the same settings."""
    fresh = Manifest(dataset=dataset, settings=settings)
    found = read_manifest(store)
    if found is None:
        found = rebuild(store) or fresh
        try:
            write_bytes(store, MANIFEST, found.to_bytes(), exclusive=True)
        except ExistsError:  # another machine began the same just now
            return claim(store, dataset, settings)
    check_kind(store, found.dataset, dataset)
    if lines := differences(found.settings, settings):
        raise FingerprintError(
            f"{store.url} was made with other settings: {'; '.join(lines)}: "
            "run with those settings to resume, or with --overwrite to start over"
        )
    return found


def check_kind(store: Store, found: str, wanted: str) -> None:
    if found != wanted:
        raise UsageError(f"{store.url} is a dataset of {found}: name another place for {wanted}")


def done_units(store: Store) -> Iterator[str]:
    """The units that have a receipt."""
    start, end = len("receipts/"), -len(".json")
    names = (entry.name for entry in store.list("receipts/"))
    return (name[start:end] for name in names if name.endswith(".json"))


def refreshed(
    store: Store,
    manifest: Manifest,
    known: Receipts = NONE_KNOWN,
    heard: Counting = unheard,
) -> Manifest:
    """The manifest with exactly the receipts that are there; `known` need not be read again. It is
    complete no more where one is gone, as when a user deletes it to have its unit done again.
    `heard` is told how many receipts have been read, of how many."""
    stated = manifest.ledger
    done: dict[str, bytes] = dict.fromkeys(done_units(store), b"")
    for unit, line in chain(stated.named_lines(), known.named_lines()):
        if unit in done:
            done[unit] = line
    missing = sorted(unit for unit, line in done.items() if not line)
    read = read_each(
        lambda unit: line_of(read_receipt(store, unit, manifest.settings)),
        missing,
        lambda count: heard(len(done) - len(missing) + count, len(done)),
    )
    done.update(zip(missing, read, strict=True))
    whole = manifest.complete and all(unit in done for unit in stated.units())
    return replace(manifest, receipts=stated.with_lines(by_unit(done)), complete=whole)


def read_receipt(store: Store, unit: str, settings: Settings | None = None) -> Receipt:
    """The receipt of a unit; an error if it was made with other settings than these."""
    name = receipt_name(unit)
    try:
        found = Receipt.from_bytes(store.read(name), f"{store.url}/{name}")
    except FormatError as error:
        if type(error) is not FormatError:
            raise
        again = f"delete it, and run the same command again to redo {unit}"
        raise FormatError(f"{error}: {again}") from error
    if settings not in (None, found.settings):
        lines = differences(settings or {}, found.settings)
        raise FingerprintError(
            f"{store.url}/{name} was made with other settings, by another run: {'; '.join(lines)}: "
            "let that run end, then start over with --overwrite"
        )
    return found


def find_receipt(store: Store, unit: str, input_digest: str, settings: Settings) -> Receipt | None:
    """The receipt of a unit that another run did meanwhile; an error if from other input."""
    try:
        found = read_receipt(store, unit, settings)
    except NotFoundError:
        return None
    if found.input != input_digest:
        raise _two_runs(store, unit)
    return found


def write_receipt(store: Store, receipt: Receipt) -> None:
    """Finish a unit. Where two runs made the same of it, all is well. Otherwise the shards may be
    of either, or gone, so the unit counts as not done."""
    name, data = receipt_name(receipt.unit), receipt.to_bytes()
    try:
        for shard in receipt.shards:
            store.read(shard.name, nbytes=1)
    except NotFoundError:
        raise _two_runs(store, receipt.unit) from None
    try:
        write_bytes(store, name, data, exclusive=True)
    except ExistsError:
        if store.read(name) != data:
            store.delete(name)
            raise _two_runs(store, receipt.unit) from None


def _two_runs(store: Store, unit: str) -> FingerprintError:
    return FingerprintError(
        f"another run is writing something else into {store.url} ({unit}): let one of them "
        "end, then run the one that you want again"
    )


def rebuild(store: Store, heard: Counting = unheard) -> Manifest | None:
    """The manifest as the receipts have it, or None without any."""
    first = min(done_units(store), default=None)
    if first is None:
        return None
    receipt = read_receipt(store, first)
    bare = Manifest(dataset=receipt.dataset, settings=receipt.settings, receipts=(receipt,))
    found = refreshed(store, bare, heard=heard)
    return replace(found, generations=tuple(sorted({0, *found.ledger.column("generation")})))


def write_rebuilt(url: str, heard: Counting = unheard) -> Manifest:
    """Replace the manifest of the dataset at `url` by what its receipts say."""
    store = open_store(url)
    manifest = rebuild(store, heard)
    if manifest is None:
        raise NotFoundError(f"{url} has no receipts: it holds no dataset")
    with contextlib.suppress(FormatError):
        manifest = _with_what_receipts_lack(manifest, read_manifest(store))
    write_manifest(store, manifest)
    return manifest


def _with_what_receipts_lack(rebuilt: Manifest, old: Manifest | None) -> Manifest:
    if old is None or old.settings != rebuilt.settings:
        return rebuilt
    same = old.complete and old.receipts == rebuilt.receipts
    return replace(rebuilt, generations=old.generations, complete=same, extra=old.extra)


def phases(manifest: Manifest) -> dict[int, tuple[int, int]]:
    """For each training resolution, how many samples and shards its buckets hold."""
    buckets = sorted(manifest.settings["buckets"])
    found = {}
    for resolution in buckets:
        of_phase = set(buckets_of_phase(resolution, buckets))
        shards = [shard for shard in manifest.shards if shard.bucket in of_phase]
        found[resolution] = (sum(shard.samples for shard in shards), len(shards))
    return found


def tidy(store: Store, manifest: Manifest) -> None:
    """Remove what no receipt speaks of from a complete dataset: a killed run made it of files that
    have changed since. What another run finishes meanwhile has a receipt, and stays."""
    ours = set(manifest.ledger.units())
    shards = {shard.name for shard in manifest.shards}
    buckets = {str(bucket) for bucket in manifest.settings["buckets"]}
    names = [entry.name for entry in store.list()]
    theirs = {unit for unit in done_units(store) if unit not in ours}
    finished = ours | theirs
    for name in names:
        shard, beside = SHARD.fullmatch(name), BESIDE.fullmatch(name)
        ours_or_nobodys = shard and shard[1] in buckets and shard[2] not in theirs
        stray_shard = ours_or_nobodys and name.removesuffix(".idx") not in shards
        if stray_shard or (beside and beside[2] not in finished):
            store.delete(name)


def clear(store: Store, dataset: str) -> None:
    """Remove a dataset, and nothing else that lies there: receipts first, since without them the
    rest never happened, and the manifest last, which tells what there is to clear."""
    receipt, rest = OURS[dataset]
    names = [entry.name for entry in store.list()]
    receipts = [name for name in names if receipt.fullmatch(name)]
    if not receipts and MANIFEST not in names:
        return  # no dataset, whatever else it is
    _check_clearable(store, dataset, receipts)
    for name in (*receipts, *(name for name in names if rest.fullmatch(name)), MANIFEST):
        store.delete(name)


def _check_clearable(store: Store, dataset: str, receipts: list[str]) -> None:
    """Refuse to clear a dataset of another kind. A damaged one can say nothing against it."""
    with contextlib.suppress(FormatError):
        if found := read_manifest(store):
            check_kind(store, found.dataset, dataset)
        elif receipts:
            unit = receipts[0].removeprefix("receipts/").removesuffix(".json")
            check_kind(store, read_receipt(store, unit).dataset, dataset)
