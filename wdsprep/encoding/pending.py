"""The image shards that are left to do: those that are wanted, minus those that have a receipt.

What was made of images that have changed or gone since is refused, or goes. What remains are the
units of a run, the largest first, so that no worker begins a large one when the others have ended.
"""

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import groupby, repeat

from wdsprep.dataset.edition import Edition
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.scores import SCORER
from wdsprep.dataset.state import retract
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.errors import FingerprintError
from wdsprep.runners.run import JointUnit, mark_incomplete
from wdsprep.sources.fingerprints import changed
from wdsprep.sources.tars import TarsSource
from wdsprep.store.base import Store
from wdsprep.text import examples, plural


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingShards:
    """The image shards that a dataset lacks, and what has to be removed from it before."""

    manifest: Manifest
    """Without that."""
    shards: list[ImageShard]
    stale: Mapping[str, str]
    """The units that go, with the input that each was made of."""
    cut: int
    """The number of these that an earlier --limit has cut, of images that are as they were."""

    @property
    def lines(self) -> Iterator[str]:
        """Say which units are removed first, and why."""
        if self.cut:
            what = plural(
                self.cut, "shard that --limit had cut is", "shards that --limit had cut are"
            )
            done = "scored" if self.manifest.is_scored else "encoded"
            yield f"the trial goes on: {what} {done} anew"
        if gone := len(self.stale) - self.cut:
            of = "scores" if self.manifest.is_scored else "latents"
            yield f"{plural(gone, 'shard')} of {of} removed: their images changed or went"


class PackedShards:
    """Image shards that wait to be done, in a third of the memory.

    Where a million of them lie scattered over half a GB, no part of that is free before the last
    goes; packed, each goes when it is handed out."""

    def __init__(self, shards: Iterable[ImageShard] = ()) -> None:
        self._packed = [shard.packed() for shard in shards]
        self._packed.reverse()

    @classmethod
    def emptied(cls, shards: list[ImageShard]) -> "PackedShards":
        """Pack the shards of a list, which is empty then."""
        made = cls(shards)
        shards.clear()
        gc.collect()  # tuples that Python keeps for reuse hold on to all the memory around them
        return made

    def __len__(self) -> int:
        return len(self._packed)

    def __iter__(self) -> Iterator[ImageShard]:
        return map(ImageShard.unpacked, reversed(self._packed))

    def hand_out(self) -> Iterator[ImageShard]:
        """Yield each shard, in order, and keep it no longer."""
        while self._packed:
            yield ImageShard.unpacked(self._packed.pop())


def pending_shards(
    store: Store,
    manifest: Manifest,
    known: Sequence[ImageShard],
    wanted: Sequence[ImageShard],
    *,
    redo_changed: bool = False,
    is_whole: bool = True,
    tars: TarsSource | None = None,
    compared: Callable[[int, int], object] = lambda _done, _of: None,
) -> PendingShards:
    """Find the image shards that are wanted and have no receipt, and write nothing.

    A shard that an earlier --limit has cut is done anew, and so are those that were packed anew, if
    `redo_changed` asks for that: what was made of them is removed by `remove_stale_units`. What has
    no image any more is removed too if packing `is_whole`; else it may be packed again. `tars`
    reads foreign tars, to tell those that have changed from those that have another date."""
    ledger = manifest.ledger
    done = dict(zip(ledger.units(), ledger.column("input"), strict=True))
    made_of = {shard.name: shard.whole_input for shard in known}
    stale = {name for name, of in done.items() if made_of.get(name) != of.partition(":")[0]}
    is_foreign = any(shard.is_foreign for shard in known)
    same = {}
    if stale and is_foreign and tars:
        same = _only_dated(manifest, known, stale, tars, compared)
    stale -= same.keys()
    now = done | same
    if stale and not redo_changed:
        is_dated = is_foreign and not manifest.keeps_content
        raise _changed(store, manifest, sorted(stale), is_dated=is_dated)
    if not is_whole:
        stale &= made_of.keys()
    pending = [shard for shard in wanted if not shard.is_done_by(now.get(shard.name, ""))]
    cut = {shard.name for shard in pending if shard.name in done} - stale
    stale |= cut
    kept = [line for unit, line in ledger.named_lines() if unit not in stale]
    return PendingShards(
        manifest=replace(manifest, receipts=ledger.with_lines(kept)),
        shards=largest_first(pending),
        stale={name: done[name] for name in sorted(stale)},
        cut=len(cut),
    )


def remove_stale_units(edition: Edition, stale: Mapping[str, str]) -> None:
    """Remove units, and what was made of them, from a dataset."""
    if stale:
        mark_incomplete(edition)
    for name, input_digest in stale.items():
        retract(edition, name, input_digest)


def _only_dated(
    manifest: Manifest,
    known: Sequence[ImageShard],
    stale: Collection[str],
    tars: TarsSource,
    compared: Callable[[int, int], object],
) -> dict[str, str]:
    """Return the foreign tars among the stale that hold what they held, each with its input."""
    shards = {shard.name: shard for shard in known if shard.name in stale and shard.is_foreign}
    receipts = {r.unit: r for r in manifest.receipts if r.unit in shards and r.content}
    takes = {unit: int(r.input.partition(":")[2] or 0) for unit, r in receipts.items()}
    shards = {
        unit: replace(shards[unit], item=replace(shards[unit].item, take=take))
        for unit, take in takes.items()
    }
    other = changed(
        tars,
        {unit: receipt.content for unit, receipt in receipts.items()},
        lambda unit: [shards[unit].item],
        heard=lambda done: compared(done, len(receipts)),
    )
    return {unit: shard.input for unit, shard in shards.items() if unit not in other}


def _changed(
    store: Store, manifest: Manifest, names: Sequence[str], *, is_dated: bool
) -> FingerprintError:
    """Return the error where images have changed.

    `is_dated` says that their dates may be all that is other, and that nothing can tell."""
    what = "changed or went away"
    if is_dated:
        what += ", or has another date, and no digest tells more in a dataset of an older wdsprep"
    does, did = ("scores", "scored") if manifest.is_scored else ("encodes", "encoded")
    new = "scores" if manifest.is_scored else "latents"
    command = SCORER if manifest.is_scored else "wdsprep encode"
    return FingerprintError(
        f"{store.url} was {did} from other images: {plural(len(names), 'image shard')} of then "
        f"{what} ({examples(names)}): name another place for the new {new}; or, "
        f"if these are the same images packed anew, {command} --redo-changed {does} what "
        "changed again, and removes what has no image any more"
    )


def largest_first(shards: Iterable[ImageShard]) -> list[ImageShard]:
    """Sort shards so that no worker begins a large one when the others have ended."""
    return sorted(shards, key=_by_size)


def _by_size(shard: ImageShard) -> tuple[int, str]:
    return -(shard.item.take or shard.item.samples), shard.item.name


def joint_units(pending: Sequence[PackedShards]) -> Iterator[JointUnit]:
    """Hand out what each dataset lacks as units.

    It is one for each image shard of which as much is wanted for all."""
    for same in _joined(shards.hand_out() for shards in pending):
        yield JointUnit(parts=dict(same))


def count_units(pending: Sequence[PackedShards]) -> int:
    """Return how many units that will be."""
    if len(pending) == 1:
        return len(pending[0])
    return sum(1 for _ in _joined(pending))


def _joined(pending: Iterable[Iterable[ImageShard]]) -> Iterator[Iterator[tuple[int, ImageShard]]]:
    """Yield the same image shard of all datasets together, each with the dataset's number."""
    numbered = (zip(repeat(number), shards) for number, shards in enumerate(pending))
    in_order = merge(*numbered, key=lambda found: _by_size(found[1]))
    for _, same in groupby(in_order, key=lambda found: (found[1].item, found[1].digest)):
        yield same
