"""The work of `encode`: one image shard becomes a latent shard, rejects, and last a receipt.

The feeder reads and the engine computes; here what they give back is written, in the order in
which it lies in the image shard. A worker has several shards under way at once.
"""

import os
import socket
import time
from collections.abc import Generator, Iterator
from concurrent.futures import wait
from queue import Empty

from wdsprep.dataset import find_receipt
from wdsprep.device import device_name
from wdsprep.draft import Draft
from wdsprep.edition import Edition
from wdsprep.encoder import turn_off_tf32
from wdsprep.engine import Engine, EngineError
from wdsprep.feeder import Fed, Feeder
from wdsprep.image_shards import ImageShard
from wdsprep.latent_shard import LatentShard, write_empty
from wdsprep.latents import Working, Workshop
from wdsprep.manifest import Receipt
from wdsprep.run import share_of
from wdsprep.runners import BrokenWorkerError
from wdsprep.samples import Reject, RejectedError
from wdsprep.sources import Columns
from wdsprep.sources.tars import TarsSource
from wdsprep.store import open_store

PROGRESS_S = 0.25


class LatentsWorker:
    """One process with its models. It is called for each shard, for several at once."""

    def __init__(self, recipe: Workshop) -> None:
        self._recipe = recipe
        self._edition = Edition(store=open_store(recipe.latents), mark=recipe.edition)
        self._source = TarsSource(
            url=recipe.images, pattern="*", columns=Columns(), max_nbytes=recipe.max_nbytes
        )
        turn_off_tf32()
        self._encoder = recipe.make_encoder()
        self._engine = Engine(
            self._encoder,
            seed=recipe.settings["seed"],
            batch_size=recipe.batch_size,
            max_area=recipe.max_area,
            decoders=recipe.decoders,
            threads=recipe.threads,
        )
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._empty = write_empty(self._edition, self._encoder.fields, self._engine.empty)

    def close(self) -> None:
        self._engine.close()

    def __call__(self, shard: ImageShard) -> Generator[Working, None, Receipt]:
        """Write all of a shard, its receipt last."""
        settings = self._recipe.settings
        if done := find_receipt(self._edition.store, shard.name, shard.input, settings):
            return done
        try:
            with Draft(self._edition, shard.name) as draft:
                output = LatentShard(draft, shard, self._encoder.fields)
                with Feeder(self._engine, self._source, shard) as feeder:
                    for _ in self._drain(feeder, output):
                        yield self._working(shard, output)
                    output.counts.update(feeder.left_out.counts())
                yield self._working(shard, output)
                return output.finish(settings, self._empty)
        except EngineError as error:
            raise BrokenWorkerError(str(error)) from error

    def _drain(self, feeder: Feeder, output: LatentShard) -> Iterator[None]:
        """Write what comes back; yields from time to time, and whenever nothing does."""
        told = time.monotonic()
        while True:
            try:
                entry = feeder.entries.get(timeout=PROGRESS_S)
            except Empty:
                self._engine.check()
                yield
                continue
            if entry is None:
                return
            if isinstance(entry, Exception):
                raise entry
            if isinstance(entry, Reject):
                output.rejects.add(entry)
            else:
                yield from self._write(entry, output)
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                yield

    def _write(self, fed: Fed, output: LatentShard) -> Iterator[None]:
        try:
            while not wait([fed.result], PROGRESS_S).done:
                self._engine.check()
                yield
            output.add(fed.key, fed.sample, fed.result.result())
        except RejectedError as refused:
            output.rejects.add(
                Reject(
                    key=fed.key, source=fed.sample.source, code=refused.code, detail=refused.detail
                )
            )
        finally:
            self._engine.free_place()

    def _working(self, shard: ImageShard, output: LatentShard) -> Working:
        stats = self._engine.stats
        inputs = output.samples + output.rejects.counts.total()
        item = shard.item
        return Working(
            samples=output.samples,
            nbytes=output.nbytes,
            share=share_of(inputs, item.take or item.samples),
            rejects=dict(output.rejects.counts),
            worker=self._name,
            device=device_name(self._encoder.device),
            done=stats.samples,
            busy_s=stats.busy_s,
            wall_s=stats.wall_s,
            batch_size=stats.batch_size,
            exact=stats.exact,
        )
