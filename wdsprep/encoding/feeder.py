"""The reading of an image shard, whose samples are fed to the engine in order and in blocks."""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Refusal, Reject
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.tar.members import leads_out
from wdsprep.encoding.captions.options import Captions, replace_surrogates
from wdsprep.encoding.encoded_samples import PendingBlock, SampleInput
from wdsprep.encoding.engine import Engine
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.encoding.models.base import Part
from wdsprep.encoding.shard_rows import ShardRows
from wdsprep.sources.base import Content
from wdsprep.sources.tars import TarsSource

JOIN_S = 0.05
BLOCK_NBYTES = 1 << 20
"""The most bytes of the images of a block, so that the pool decodes several blocks at once."""


@dataclass(frozen=True, slots=True)
class FedSample:
    """A sample that the engine is working on, without its image."""

    key: str
    sample: Sample
    is_named: bool
    """True if its caption is from a table or a field."""
    outputs: Sequence[int]
    """The numbers of the datasets that get the results."""


@dataclass(slots=True)
class Block:
    """Consecutive samples of a shard, fed or rejected, with the results of those that were fed."""

    entries: list[FedSample | Reject] = field(default_factory=list)
    inputs: list[SampleInput] = field(default_factory=list)
    nbytes: int = 0
    results: PendingBlock | None = None

    def add(self, entry: FedSample, image: bytes) -> None:
        self.entries.append(entry)
        self.inputs.append(SampleInput(entry.key, image, entry.sample.caption, entry.outputs))
        self.nbytes += len(image)

    def has_room(self, most: int) -> bool:
        return len(self.entries) < most and self.nbytes < BLOCK_NBYTES


class Feeder:
    """A thread that reads an image shard and feeds its samples to the engine.

    `blocks` gets the samples in order, and after them None, or the error that ended the reading.
    """

    def __init__(
        self,
        engine: Engine,
        source: TarsSource,
        shard: ImageShard,
        content: Content,
        part: Part,
        captioned: Sequence[tuple[Captions, Sequence[int]]],
    ) -> None:
        """Prepare to read a shard; entering the context starts the thread.

        `captioned` are the sources of captions, each with the numbers of the engine's cuts of an
        image that get their captions from it. If `part` has no images, their bytes are skipped.
        """
        self.blocks: queue.SimpleQueue[Block | Exception | None] = queue.SimpleQueue()
        self._engine = engine
        self._rows = ShardRows(
            source=source, shard=shard, content=content, has_images=Part.IMAGE in part
        )
        self.left_out = self._rows.left_out
        self._part, self._captioned = part, captioned
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"feed {shard.name}", daemon=True)

    def __enter__(self) -> "Feeder":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reading, wait for the thread, and release the blocks that nobody has taken."""
        self._stopped = True
        while self._thread.is_alive() or not self.blocks.empty():
            self._thread.join(JOIN_S)
            while not self.blocks.empty():
                block = self.blocks.get()
                if isinstance(block, Block) and block.results is not None:
                    with block.results:
                        pass

    def _run(self) -> None:
        try:
            with self._engine.feeding():
                rows = self._rows.read()
                first = list(islice(rows, 1))  # the tar is open, its first bytes are here
                with self._engine.turn():
                    for block in self._blocks(chain(first, rows)):
                        if block.inputs:
                            block.results = self._engine.put(block.inputs, self._part)
                            block.inputs = []
                        self.blocks.put(block)
        except Exception as error:  # noqa: BLE001  raised again where the blocks are taken
            self.blocks.put(error)
        else:
            self.blocks.put(None)

    def _blocks(self, rows: Iterable[tuple[str, Sample | Refusal]]) -> Iterator[Block]:
        block, most = Block(), self._engine.block_size
        for key, row in rows:
            if self._stopped:
                return
            self._feed(key, row, block)
            if not block.has_room(most):
                yield block
                block = Block()
        if block.entries:
            yield block

    def _feed(self, key: str, row: Sample | Refusal, block: Block) -> None:
        if isinstance(row, Refusal):
            block.entries.append(row.to_reject(key))
            return
        if leads_out(key):
            block.entries.append(Reject(key=key, source=row.source, code=Code.BAD_KEY))
            return
        for captions, cuts in self._captioned:
            found = captions.find(key, row)
            caption = replace_surrogates(row.caption if found is None else found)
            sample = Sample(source=row.source, image=b"", captions=(caption,), facts=row.facts)
            block.add(FedSample(key, sample, found is not None, cuts), row.image)
