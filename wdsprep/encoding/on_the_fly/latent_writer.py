"""The storing of latents on their way to a trainer, in the shards that `encode` would write.

Samples come in the order of training, which goes through many shards at once. So the samples of a
shard wait in an open file on a local disk (in TMPDIR), and take some hundred bytes of memory each.
When the last one has come, the shard is written as a worker of `encode` writes it: byte for byte on
a CPU, its receipt last. The order has about as many shards under way as a step has blocks: 64, or
more if the batch does not divide by it. A shard that is cut by a rank's share, the end of an epoch
or a resume waits for its missing samples, which may come in a later epoch. At most `GATHERED` of
them wait: beyond that, the one that has had no sample for the longest time is given up.

A shard is written only if one process has had all its samples, and if its images are sound.
`wdsprep encode` sees which receipts are missing, and makes the other shards.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from operator import itemgetter
from typing import Any

from wdsprep.dataset.damage import naming_next_step, verify_step
from wdsprep.dataset.draft import Draft
from wdsprep.dataset.npy_arrays import fields_of
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.shapes import fields_by_shape, shape_name
from wdsprep.dataset.shard_reader import HashedTape, ShardReader
from wdsprep.dataset.stored_dataset import find_receipt, refresh_manifest, write_manifest
from wdsprep.encoding.image_shards import ImageShard, find_image_shards
from wdsprep.encoding.latent_shard import (
    LatentShard,
    facts_of,
    members_of,
    npy_of,
    spool_sample,
    unspool_sample,
    write_empty,
)
from wdsprep.encoding.on_the_fly.encode_steps import Encoding, prepare_image, reject_of
from wdsprep.encoding.run_plan import pending_shards
from wdsprep.encoding.sample_chain import EncodedSample
from wdsprep.errors import DamageError
from wdsprep.images.nearest_shape import cut_of
from wdsprep.runners.run import open_dataset_to_write, remove_units
from wdsprep.store import open_store
from wdsprep.store.base import absolute, check_apart
from wdsprep.store.spool import Place, Spool

GATHERED = 256  # shards at most, each an open file, of which many systems allow 1,024
WRITING = 4  # whole shards that wait to be written, at most: beyond that, `add` waits
_log = logging.getLogger("wdsprep")


Entries = dict[int, tuple[Place, str] | Reject]
"""The samples of a shard that have come so far, by their number in it: the place of each in a spool
and its shape, or its reject."""


class LatentWriter:
    """A writer of latents on their way to a trainer: one thread adds, another writes shards."""

    def __init__(
        self,
        url: str,
        images: str,
        names: Sequence[str],
        sizes: Sequence[int],
        encoding: Encoding,
        empty: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Open the latent dataset at `url`, or begin it, and remove shards that --limit has cut.

        `names` are the image shards by number, `sizes` how many samples of each will come, and
        `empty` makes the arrays of the empty caption. Raise FingerprintError if images have changed
        or are gone since they were encoded.
        """
        recipe = encoding.recipe
        source = find_image_shards(
            images,
            recipe.resolution,
            shapes=recipe.sizes,
            upscale=recipe.upscale,
            max_nbytes=int(recipe.max_bytes),
        )
        url = absolute(url)
        check_apart(source.tars.url, url)
        self._source, self._encoding = source, encoding
        self._edition, manifest = open_dataset_to_write(
            url, "latents", encoding.settings, overwrite=False
        )
        found = pending_shards(
            self._edition.store, manifest, source.shards, source.shards, tars=source.tars
        )
        remove_units(self._edition, found.stale)
        self._manifest = found.manifest
        left = {shard.item.name: shard for shard in found.shards}
        self._sizes = sizes
        self._left = {n: left[name] for n, name in enumerate(names) if name in left}
        self._fields = fields_of(encoding.settings["layout"])
        self._shapes = fields_by_shape(encoding.settings)
        self._empty = write_empty(
            self._edition, self._fields, lambda field: b"".join(npy_of(field, empty()[field.name]))
        )
        self._gathered: dict[int, tuple[Spool, Entries]] = {}
        self._writer = ThreadPoolExecutor(1, "wdsprep-tee")
        self._writing: deque[Future[None]] = deque()
        self._is_listed = True

    def add(self, shard: int, index: int, encoded: EncodedSample) -> None:
        """Store an encoded sample, if its shard is still to be written and the sample is new.

        `index` is the sample's number in the image shard. A shard that is now whole is written by a
        thread. Wait first if too many shards are being written, and raise the error of a failed
        one.
        """
        self._await_writes(WRITING)
        if shard not in self._left:
            return
        spool, entries = self._gather(shard)
        if index in entries:
            return
        shape = shape_name(encoded.crop.size) if self._shapes else ""
        arrays = self._shapes.get(shape, self._fields)
        facts = facts_of(encoded, is_packed=True)
        members = members_of(arrays, facts, encoded)
        entries[index] = spool_sample(spool, encoded.key, members, facts), shape
        self._write_if_whole(shard)

    def refuse(self, refused: Mapping[tuple[int, int], Reject | None]) -> None:
        """Store rejects, by the numbers of their shards and of the samples in them.

        None in place of a reject gives up the shard, which is damaged: `encode` reports the damage.
        """
        for (shard, index), reject in refused.items():
            if shard not in self._left:
                continue
            _, entries = self._gather(shard)
            if reject is None:
                self._drop(shard)
            else:
                entries[index] = reject
                self._write_if_whole(shard)

    def _gather(self, shard: int) -> tuple[Spool, Entries]:
        gathered = self._gathered.pop(shard, None) or (Spool(), {})
        self._gathered[shard] = gathered  # the last one: the first is the one to give up
        if len(self._gathered) > GATHERED:
            self._drop(next(iter(self._gathered)))
        return gathered

    def _drop(self, shard: int) -> None:
        del self._left[shard]
        spool, _ = self._gathered.pop(shard)
        spool.close()

    def _write_if_whole(self, shard: int) -> None:
        spool, entries = self._gathered[shard]
        if len(entries) == self._sizes[shard]:
            del self._gathered[shard]
            writing = self._writer.submit(self._write, self._left.pop(shard), spool, entries)
            self._writing.append(writing)

    def _await_writes(self, left: int) -> None:
        """Wait until at most `left` shards are being written; raise the error of a failed one."""
        while self._writing and (len(self._writing) > left or self._writing[0].done()):
            self._is_listed = False
            self._writing.popleft().result()

    def _write(self, shard: ImageShard, spool: Spool, entries: Entries) -> None:
        """Write a latent shard, or log a warning if the image shard's bytes have changed."""
        settings = self._encoding.settings
        with closing(spool):
            if find_receipt(self._edition.store, shard.name, shard.input, settings) is not None:
                return
            with HashedTape(open_store(self._source.tars.url), shard.item) as tape:
                if tape.digest() != shard.digest:
                    what = "%s is not what was packed: its latents are not kept"
                    _log.warning(what, shard.item.name)
                    return
            with naming_next_step(verify_step(self._source.tars.url)):
                entries = {**entries, **self._find_size_rejects(shard, entries)}
            with (
                Draft(self._edition, shard.name) as draft,
                closing(LatentShard(draft, shard, settings)) as output,
            ):
                for _, entry in sorted(entries.items(), key=itemgetter(0)):
                    if isinstance(entry, Reject):
                        output.rejects.add(entry)
                        continue
                    place, shape = entry
                    key, members, facts = unspool_sample(spool, place)
                    try:
                        output.add_members(key, members, facts, shape=shape)
                    except RejectedError as error:
                        output.rejects.add(Reject(key=key, source="", code=error.code))
                output.finish(self._empty)

    def _find_size_rejects(self, shard: ImageShard, there: Collection[int]) -> dict[int, Reject]:
        """Return, by number, rejects for the samples of a shard that are not `there`.

        No shape takes their images, so the loader has left them out. Raise DamageError if `encode`
        would take such a sample.
        """
        rejects: dict[int, Reject] = {}
        missing = [index for index in range(shard.item.samples) if index not in there]
        name, recipe = shard.item.name, self._encoding.recipe
        reader = ShardReader(open_store(self._source.tars.url), shard.item)
        for index, sample in zip(missing, reader.samples(missing), strict=True):
            try:
                prepare_image(
                    sample,
                    name,
                    shapes=cut_of(self._encoding.settings),
                    max_area=recipe.max_area,
                    max_nbytes=int(recipe.max_bytes),
                )
            except RejectedError as refused:
                rejects[index] = reject_of(sample, name, refused)
            else:
                what = "its json lacks the size of its image"
                raise DamageError(reader.place, what, sample.key)
        return rejects

    def close(self) -> None:
        """Finish the writes, and drop the shards that lack samples, which are left to `encode`."""
        self._writer.shutdown(wait=True)
        for spool, _ in self._gathered.values():
            spool.close()

    def publish(self) -> None:
        """Wait for the shards that are being written, and list them in the manifest."""
        self._await_writes(0)
        if self._is_listed:
            return
        with self._edition.holding_manifest():
            manifest = refresh_manifest(self._edition.store, self._manifest)
            done, names = {*manifest.ledger.units()}, {shard.name for shard in self._source.shards}
            self._manifest = replace(
                manifest,
                complete=self._source.is_whole and done >= names,
                extra={"model": self._encoding.model.name},
            )
            write_manifest(self._edition.store, self._manifest)
        self._is_listed = True
