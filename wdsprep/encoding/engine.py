"""The engine that keeps one device busy: samples of several shards go in, and arrays come out.

1. A shard *feeds* its samples one block after the other; shards take turns, so that the oldest is
   finished first. Each block is decoded in a pool of threads.
2. An image is cut once or several times, with one decoding; each cut may be mirrored too. The
   *assembler* thread takes the blocks in the order they were fed and fills batches (`batching`),
   across shards.
3. `DeviceBatches` computes several batches at a time. One of its threads hands out the results.
4. `EngineLimit` limits what is inside at once: the number of samples, which is enough for the
   device never to wait, and larger if samples wait for others of their shape; and the bytes that
   they take. Room is free again when the results of a block have been taken.

`score` has an engine of its own kind (`scoring.worker`), whose samples are prepared by the image
processors of models, and whose batches never span shards.

The arrays of a sample depend on the sample and the size of a batch alone, never on its neighbours;
on a GPU, in the last bits, also on its place in the batch.
The error of a thread that fails is kept, and `check` raises it in any thread that waits.

The processor's time of a worker was measured by thread with `perf`, with an encoder that costs
nothing, JPEGs of 64 px and files in memory. With the arrays of SD2 a sample takes 0.33 ms: two
fifths are decoding and cutting, three tenths hashing and writing tars, an eighth reading, a tenth
making members and headers. Batches and handing out, which is all that is done here, take a tenth.
With the arrays of SDXL, twice as large, it takes 0.43 ms, and two fifths are hashing and writing.
With real models on a CPU, the models take all but a twentieth of the time after the imports.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial

import torch

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.shapes import Size
from wdsprep.encoding.batching import MOST_LAUNCHED, Batcher, DeviceBatches, Rows
from wdsprep.encoding.models.base import Part
from wdsprep.encoding.models.device import Arrays, DeviceBatch, Encoder, TextBatch
from wdsprep.encoding.role_images import DatasetCuts
from wdsprep.encoding.sample_chain import Block, EncodingSample, Row
from wdsprep.images import formats
from wdsprep.runners.base import BrokenWorkerError

BATCHES_INSIDE = 4
QUEUED_BATCHES = 2
WAITING_NBYTES = 4 << 30
"""The most bytes that may wait: of images to be decoded, of crops, and of arrays to be written."""
MOST_WAITING = 4_096
"""The most samples that are fed while a crop or a caption waits for others of its shape. Among 512
long captions, those of one length fill 31 to 47 % of a batch of 8; among 4,096, 87 to 99 %."""
MOST_IN_BLOCK = 16
"""The most samples that are fed together: less than a batch, so that the pool has enough to do."""
POLL_S = 0.2


class EngineLimit:
    """A limit on the samples inside the engine, and on the bytes that they take in memory.

    The bytes are those of images that wait to be decoded, of pixels that wait for a batch, and of
    arrays that wait to be written.
    """

    def __init__(self, samples: int, nbytes: int) -> None:
        self._most, self._most_nbytes = samples, nbytes
        self.samples = self.nbytes = 0
        self._changed = threading.Condition()
        self.is_full = False
        """True if a sample waits because of the bytes of those that are inside."""

    def enter(self, samples: int, nbytes: int, timeout_s: float) -> bool:
        """Admit samples if there is room, and return whether they have been admitted.

        If there is no room, wait for one change first, for `timeout_s` at most. When nothing is
        inside, anything is admitted.
        """
        with self._changed:
            if not self._has_room(samples, nbytes):
                self._changed.wait(timeout_s)
            if not self._has_room(samples, nbytes):
                return False
            self.is_full = False
            self.samples += samples
            self.nbytes += nbytes
            return True

    def _has_room(self, samples: int, nbytes: int) -> bool:
        if not self.samples:
            return True
        self.is_full = self.nbytes + nbytes > self._most_nbytes
        return self.samples + samples <= self._most and not self.is_full

    def hold(self, nbytes: int) -> None:
        """Add `nbytes`, which may be negative, to the bytes counted for the samples inside."""
        with self._changed:
            self.nbytes += nbytes
            if nbytes < 0:
                self._changed.notify_all()

    def leave(self, samples: int, nbytes: int) -> None:
        with self._changed:
            self.samples -= samples
            self.nbytes -= nbytes
            self._changed.notify_all()


class Engine:
    def __init__(
        self,
        encoder: Encoder,
        *,
        seed: int,
        batch_size: int,
        max_area: int,
        decoders: int,
        threads: int,
        cuts: Sequence[DatasetCuts],
    ) -> None:
        """Load the networks and start the threads.

        With `batch_size` 0 the engine chooses the size; `threads` is the number of batches that a
        CPU computes at once. `cuts` are the rules by which each dataset cuts images.
        """
        self._encoder, self._seed = encoder, seed
        self._cuts, self.max_area = cuts, max_area
        self._part = Part.of(encoder.fields)
        encoder.bring(Part.IMAGE)  # whose batches are sized by what is free
        self.batches = DeviceBatches(encoder, batch_size, lanes=threads)
        self._batcher = self._make_batcher()
        window = max(self._batcher.image_window, self._batcher.text_window)
        # So many are admitted that devices never wait, and batches fill up.
        lanes, text_size = self.batches.lanes, self.batches.text_size
        deep = text_size if self._part is Part.TEXT else self.batches.size
        inside = max((BATCHES_INSIDE + lanes) * deep, (2 + lanes) * text_size)
        self.limit = EngineLimit(inside + decoders + window, WAITING_NBYTES)
        self._launchable = threading.Semaphore(QUEUED_BATCHES + MOST_LAUNCHED * self.batches.lanes)
        self._finishing = threading.Lock()
        self._unfinished: deque[Block] = deque()
        self._turn = threading.Lock()
        self._feeders = 0
        self.fed: queue.SimpleQueue[Block | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._pool = ThreadPoolExecutor(decoders, "decode", torch.set_num_threads, (1,))
        self._warm_up()
        self._assembler = threading.Thread(target=self._assemble, name="assembler", daemon=True)
        self._assembler.start()

    def _make_batcher(self) -> Batcher:
        encoder = self._encoder
        is_various = any(rules.has_various_sizes for rules in self._cuts)
        return Batcher(
            encoder,
            self.batches,
            seed=self._seed,
            flips=any(field.mirrors for field in encoder.fields),
            image_window=MOST_WAITING if is_various or len(self._image_shapes) > 1 else 0,
            text_window=MOST_WAITING if encoder.groups_texts and self.batches.text_size > 1 else 0,
        )

    @property
    def _image_shapes(self) -> set[Size]:
        """Return all known shapes of images for the VAE."""
        return set[Size]().union(*(cut.vae_sizes for cut in self._cuts if Part.IMAGE in cut.part))

    @property
    def block_size(self) -> int:
        """Return the number of samples to feed together."""
        return max(1, min(MOST_IN_BLOCK, self.batches.size // 4))

    @contextlib.contextmanager
    def feeding(self) -> Iterator[None]:
        """Count a shard as feeding while the context is open, so that batches wait for its samples.

        The context is entered before the shard's tar is opened. When no shard is feeding and all
        that was fed has been collected, batches that are not full are computed too.
        """
        with self._finishing:
            self._feeders += 1
        try:
            yield
        finally:
            with self._finishing:
                self._feeders -= 1
            self.fed.put(None)  # perhaps nobody is left to fill the last batch

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other shard feeds samples, and keep others out while the context is open.

        Shards that wait here have read their first sample already. Raise BrokenWorkerError if a
        thread of the engine fails while the shard waits.
        """
        while not self._turn.acquire(timeout=POLL_S):
            self.check()
        try:
            yield
        finally:
            self._turn.release()

    def put(self, block: Block) -> None:
        """Wait for room, and feed the samples of a block to the engine.

        Raise BrokenWorkerError if a thread has failed before there is room. A caller that waits for
        the block to be done calls `check` from time to time, as that may never come. Afterwards it
        calls `leave`.
        """
        if not block.samples:
            block.set_result(None)
            return
        nbytes = block.image_nbytes
        while not self.limit.enter(len(block.samples), nbytes, POLL_S):
            self.fed.put(None)  # perhaps the oldest one waits for others that cannot come
            self.check()
        with self._finishing:
            self._unfinished.append(block)
        if block.has_images:
            block.decoded = self._pool.submit(self._decode, block, nbytes)
        self.fed.put(block)

    def leave(self, block: Block) -> None:
        """Make room for others, once the results of a block have been taken or nobody wants them.

        Until then the samples of the block count against the limits of the engine.
        """
        with self._finishing:
            block.has_left = True
        self.limit.leave(len(block.samples), block.nbytes)

    def empty(self) -> dict[str, torch.Tensor]:
        """Bring the network for text to the device, and return the arrays of the empty caption.

        The thread that launches batches computes them: on a CPU that has one core, as for batches.
        """
        self._encoder.bring(Part.TEXT)
        return self.batches.run(self._encoder.empty)

    def _warm_up(self) -> None:
        """Compute empty batches, so that the error of a broken device comes before samples are fed.

        Networks that are compiled are compiled for all shapes, which takes minutes for each.
        Nothing is computed if the networks for images and for text take turns on the device.
        """
        if self._encoder.is_split:
            return
        side = self._encoder.resolution
        shapes = {(side, side)}
        if self._encoder.is_compiled:
            shapes = self._image_shapes or shapes
        nothing: list[DeviceBatch] = []
        if Part.IMAGE in self._part:
            nothing += [
                self._batcher.image_batch([], (*shape, False), self.batches.size_of(shape))
                for shape in sorted(shapes)
            ]
        if Part.TEXT in self._part:
            blank = self._encoder.references and self._encoder.references.blank.for_text
            tokens = self._encoder.tokens([""], [blank])
            nothing.append(TextBatch.of(tokens, self.batches.text_size, self._encoder.device))
        self.batches.warm_up(nothing)

    @property
    def is_idle(self) -> bool:
        """Return whether all samples that were fed have been computed."""
        return self._oldest_block() is None

    def check(self) -> None:
        """Raise BrokenWorkerError if a thread of the engine has failed, or the engine is closed."""
        if self._failure is not None:
            why = f"{type(self._failure).__name__}: {self._failure}"
            raise BrokenWorkerError(why) from self._failure

    def close(self) -> None:
        """End the threads of the engine, and drop the samples that are not finished."""
        self._failure = self._failure or RuntimeError("the engine is closed")
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._assembler.join()
        self.batches.close()

    def _decode(self, block: Block, nbytes: int) -> None:
        """Decode the images of a block and cut them to their shapes.

        The limit then counts the pixels of the crops in place of `nbytes`, the bytes of the image
        files.
        """
        try:
            with formats.quiet:  # once for all of them
                self._prepare(block.samples)
        finally:
            with self._finishing:
                kept = block.count(block.arrays_nbytes)
            self.limit.hold(block.pixels_nbytes + kept - nbytes)

    def _prepare(self, samples: Sequence[EncodingSample]) -> None:
        """Give samples what batches are made of: the crops of their images."""
        for sample in samples:
            sample.crop_image(self._cuts, self.max_area, self._encoder.references)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001  raised again where a result is awaited
            self._failure = self._failure or error

    def _assemble(self) -> None:
        with self._guarded():
            torch.set_num_threads(1)
            while self._failure is None:
                with contextlib.suppress(queue.Empty):
                    self._collect(self.fed.get(timeout=POLL_S))
                self._submit_batches(all_of_it=self._feeders == 0 and self.fed.empty())

    def _collect(self, block: Block | None) -> None:
        if block is None:
            return
        if block.decoded is not None:
            try:
                block.decoded.result()
            except CancelledError:
                return  # the engine is being closed
        for sample in block.samples:
            self._batcher.add(sample)
        self._finish([sample for sample in block.samples if not sample.missing])

    def _submit_batches(self, *, all_of_it: bool) -> None:
        """Submit all batches that are ready, as soon as the device has room for each.

        With `all_of_it` a batch is ready even if it is not full. Return early if a thread fails.
        """
        while self._failure is None:
            while not self._launchable.acquire(timeout=POLL_S):
                if self._failure is not None:
                    return
            # A batch that is not full is ready too if memory is full and its first row the oldest.
            head = self._oldest_block() if self.limit.is_full else None
            ready = self._batcher.next_batch(now=all_of_it, head=head)
            if ready is None:
                self._launchable.release()
                return
            rows, batch = ready
            self.limit.hold(-sum([row.drop_pixels() for row in rows]))
            if batch is not None:
                self.batches.submit(batch).add_done_callback(partial(self._hand_out, rows, batch))
            else:
                self._launchable.release()
                self._store_results(rows, [Code.NO_TOKENS] * len(rows))

    def _hand_out(self, rows: Sequence[Row], batch: DeviceBatch, future: "Future[Rows]") -> None:
        """Give the samples of a batch their results, once the device has finished it.

        A row of which the device made no arrays is rejected as not finite. If the batch failed, its
        error is kept for `check` to raise.
        """
        with self._guarded():
            self._launchable.release()
            if future.cancelled():
                return
            results = future.result()
            self._batcher.keep_memory(batch)
            self._store_results(rows, [Code.NOT_FINITE if row is None else row for row in results])

    def _store_results(self, rows: Sequence[Row], results: "Sequence[Arrays | Code]") -> None:
        """Give the samples of rows their arrays, or the codes of their rejects.

        A sample is done when the last of its rows has a result.
        """
        done, nbytes = [], 0
        with self._finishing:
            for row, arrays in zip(rows, results, strict=True):
                nbytes += row.sample.block.count(row.take(arrays))
                if not row.sample.missing:
                    done.append(row.sample)
        self.limit.hold(nbytes)
        self._finish(done)

    def _finish(self, samples: Sequence[EncodingSample]) -> None:
        blocks = []
        with self._finishing:
            for sample in samples:
                sample.block.missing -= 1
                if not sample.block.missing:
                    blocks.append(sample.block)
        for block in blocks:
            block.set_result(None)
        if blocks:
            self._oldest_block()  # forgets the blocks that are done
            if self.limit.is_full:
                self.fed.put(None)  # another block is the oldest now

    def _oldest_block(self) -> Block | None:
        """Return the oldest block that is not done, or None."""
        with self._finishing:
            while self._unfinished and self._unfinished[0].done():
                self._unfinished.popleft()
            return self._unfinished[0] if self._unfinished else None
