"""Keeps one device busy: samples of several shards go in, in order, and arrays come out.

1. A shard *feeds* its samples one block after the other; shards take turns, so that the oldest is
   finished first. Each block is decoded in a pool of threads.
2. An image is cut once or several times, with one decoding; each cut is mirrored too, if that is
   wanted. Where text is kept apart, one of the cuts is none: no image stops that. The *assembler*
   thread takes the blocks in the order they were fed and fills batches (`batching`), across shards.
3. `device_batches` computes them, several under way. One of its threads hands the results out.
4. How much is inside at once is bounded (`admission`): samples, so that the device never waits, and
   more of them where some wait for others of their shape; and the bytes of all that they have
   become. Room is free again when the results of a block were taken.

What a sample becomes depends on the sample and the size of a batch alone, never on its neighbours.
A thread that fails leaves its error behind, and `check` raises it wherever somebody waits.

Where the time of a worker goes, with an encoder that costs nothing, JPEGs of 64 px and the arrays
of SD2: of the processor's time a third is decoding and cutting, a quarter hashing and writing tars,
an eighth copying arrays; reading and making members are a tenth each, and batches and handing out,
all that is done here, less than a tenth. With real models on a CPU those take all but a twentieth
of what follows the imports.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial

import torch

from wdsprep.dataset.arrays import FLIPPED, is_of_text
from wdsprep.dataset.reject_codes import Code
from wdsprep.encoding.admission import Admission
from wdsprep.encoding.batching import Batcher
from wdsprep.encoding.device_batches import MOST_LAUNCHED, DeviceBatches, Rows
from wdsprep.encoding.encoded_samples import (
    NO_CROP,
    PendingBlock,
    Row,
    SampleInput,
    SampleUnderWay,
)
from wdsprep.encoding.models.base import Encoder, Part
from wdsprep.encoding.models.device import Arrays, DeviceBatch, ImageBatch, Stats, TextBatch
from wdsprep.images import formats
from wdsprep.images.crop import NO_PIXELS, Crop, CropResult, crops
from wdsprep.images.shapes import Shapes

BATCHES_INSIDE = 4
QUEUED_BATCHES = 2
SPARE_BATCHES = 4  # whose memory the next ones of their shape take
WAITING_NBYTES = 4 << 30
"""The most bytes that may wait: images to be decoded, crops, and arrays to be written."""
MOST_WAITING = 4_096
"""Samples that may come while a part of one waits for others of its shape. Of 512 long captions, as
many as are of one length fill 31 to 47 % of a batch of 8; of 4,096 they fill 87 to 99 %."""
MOST_IN_BLOCK = 16
"""Samples that are fed together. They are a part of a batch, so that the pool has enough to do."""
POLL_S = 0.2


class EngineError(Exception):
    """A thread of the engine has failed, or it is closed: it can do nothing more."""


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
        gpu_share: float = 1.0,
        cuts: Sequence[Shapes] = (),
        parts: Sequence[Part] = (),
    ) -> None:
        """Load what is needed and begin the threads.

        `batch_size` 0 is chosen; `threads` is how many batches a CPU computes at once. `cuts` are
        the shapes of each cut of an image, by default the one square of the encoder's resolution;
        `parts` are what of a sample each is for, by default all that the encoder makes something
        of.
        """
        self._encoder, self._seed = encoder, seed
        self._cuts = tuple(cuts) or (Shapes.square(encoder.resolution),)
        self._parts = tuple(parts) or (Part.BOTH,) * len(self._cuts)
        self._max_area = max_area
        self._part = Part.BOTH if encoder.has_text else Part.IMAGE
        if is_of_text(encoder.fields):
            self._part = Part.TEXT
        encoder.bring(Part.IMAGE)  # whose batches are sized by what is free
        self._batches = DeviceBatches(encoder, batch_size, lanes=threads, gpu_share=gpu_share)
        self._batcher = Batcher(
            encoder,
            lambda row, code: self._take([row], [code]),
            flips=any(field.name == FLIPPED for field in encoder.fields),
            image_window=MOST_WAITING if self._has_shapes else 0,
            text_window=MOST_WAITING if encoder.groups_texts and self._batches.text_size > 1 else 0,
        )
        window = max(self._batcher.image_window, self._batcher.text_window)
        self._admission = Admission(self._usually_inside + decoders + window, WAITING_NBYTES)
        self._launchable = threading.Semaphore(QUEUED_BATCHES + MOST_LAUNCHED * self._batches.lanes)
        self._finishing = threading.Lock()
        self._unfinished: deque[PendingBlock] = deque()
        self._turn = threading.Lock()
        self._feeders = 0
        self._feeders_lock = threading.Lock()
        self._fed: queue.SimpleQueue[PendingBlock | None] = queue.SimpleQueue()
        self._spare: deque[torch.Tensor] = deque(maxlen=SPARE_BATCHES)
        self._failure: BaseException | None = None
        self._pool = ThreadPoolExecutor(decoders, "decode", torch.set_num_threads, (1,))
        self._warm_up()
        self._assembler = threading.Thread(target=self._assemble, name="assembler", daemon=True)
        self._assembler.start()

    @property
    def _has_shapes(self) -> bool:
        both = zip(self._cuts, self._parts, strict=True)
        shapes = [shapes for shapes, part in both if Part.IMAGE in part]
        return len({size for each in shapes for size in each.sizes}) > 1

    @property
    def _usually_inside(self) -> int:
        """Samples, so that the devices never wait and batches of captions fill up."""
        lanes, size, text_size = self._batches.lanes, self._batches.size, self._batches.text_size
        deep = text_size if self._part is Part.TEXT else size
        return max((BATCHES_INSIDE + lanes) * deep, (2 + lanes) * text_size)

    @property
    def block_size(self) -> int:
        """Return how many samples are best fed together."""
        return max(1, min(MOST_IN_BLOCK, self._batches.size // 4))

    @property
    def stats(self) -> Stats:
        return self._batches.stats

    @contextlib.contextmanager
    def feeding(self) -> Iterator[None]:
        """Around all that one shard feeds, from before its tar is opened."""
        with self._feeders_lock:
            self._feeders += 1
        try:
            yield
        finally:
            with self._feeders_lock:
                self._feeders -= 1
            self._fed.put(None)  # perhaps nobody is left to fill the last batch

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One shard feeds at a time; those that wait have their first samples ready."""
        self._until(partial(self._turn.acquire, timeout=POLL_S))
        try:
            yield
        finally:
            self._turn.release()

    def put(self, samples: Sequence[SampleInput], part: Part = Part.BOTH) -> PendingBlock:
        """Feed samples, or a part of each, when there is room for them.

        Whoever waits for the results calls `check` from time to time: they may never come.
        """
        block = PendingBlock(self._leave)
        block.samples = [self._begun(sample, part, block) for sample in samples]
        block.missing = len(samples)
        has_images = any(Part.IMAGE in each for one in block.samples for each in one.parts)
        nbytes = sum(len(sample.image) for sample in samples) if has_images else 0
        self._until(partial(self._enter, len(samples), nbytes))
        with self._finishing:
            self._unfinished.append(block)
        if has_images:
            block.decoded = self._pool.submit(self._decode, block, samples, nbytes)
        self._fed.put(block)
        return block

    def _begun(self, sample: SampleInput, part: Part, block: PendingBlock) -> SampleUnderWay:
        parts = [part & self._part & self._parts[number] for number in self._numbers(sample)]
        cuts: list[CropResult] = [NO_CROP] * len(parts)
        return SampleUnderWay(sample.key, sample.caption, parts, block, cuts)

    def _numbers(self, sample: SampleInput) -> Sequence[int]:
        return range(len(self._cuts)) if sample.cuts is None else sample.cuts

    def _enter(self, samples: int, nbytes: int) -> bool:
        if self._admission.enter(samples, nbytes, POLL_S):
            return True
        self._fed.put(None)  # perhaps the oldest one waits for others that cannot come
        return False

    def _leave(self, block: PendingBlock) -> None:
        with self._finishing:
            block.has_left = True
        self._admission.leave(len(block.samples), block.nbytes)

    def empty(self) -> dict[str, torch.Tensor]:
        """Return what stands for no caption, computed on one core as all else is."""
        self._encoder.bring(Part.TEXT)
        return self._batches.run(self._encoder.empty)

    def _warm_up(self) -> None:
        """Compute empty batches first, on one core too: a broken device shows here already."""
        if self._encoder.is_split:
            return
        side = self._encoder.resolution
        nothing: list[DeviceBatch] = []
        if Part.IMAGE in self._part:
            nothing.append(self._images([], (side, side), self._batches.size))
        if Part.TEXT in self._part:
            tokens = self._encoder.tokens([""])
            nothing.append(TextBatch.of(tokens, self._batches.text_size, self._encoder.device))
        self._batches.warm_up(nothing)

    @property
    def is_idle(self) -> bool:
        """Return whether all that was fed has been computed, whether it is still wanted or not."""
        return self._head() is None

    def check(self) -> None:
        if self._failure is not None:
            why = f"{type(self._failure).__name__}: {self._failure}"
            raise EngineError(why) from self._failure

    def close(self) -> None:
        """End the threads, whatever they have in hand."""
        self._failure = self._failure or EngineError("the engine is closed")
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._assembler.join()
        self._batches.close()

    def _decode(self, block: PendingBlock, samples: Sequence[SampleInput], nbytes: int) -> None:
        """Cut the images of a block. Where there are no shapes, nothing is cut."""
        try:
            with formats.quiet:  # once for all of them
                for sample, made in zip(samples, block.samples, strict=True):
                    self._cut(sample, made)
        finally:
            self._admission.hold(block.pixels_nbytes - nbytes)

    def _cut(self, sample: SampleInput, made: SampleUnderWay) -> None:
        numbers = self._numbers(sample)
        wanted = [n for n, part in enumerate(made.parts) if Part.IMAGE in part]
        shapes = [self._cuts[numbers[n]] for n in wanted]
        if shapes:
            found = crops(sample.image, shapes, max_area=self._max_area)
            for n, cut in zip(wanted, found, strict=True):
                made.cuts[n] = cut

    def _until(self, attempt: Callable[[], bool]) -> None:
        while not attempt():
            self.check()

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
                    self._collect(self._fed.get(timeout=POLL_S))
                self._submit_batches(all_of_it=self._feeders == 0 and self._fed.empty())

    def _collect(self, block: PendingBlock | None) -> None:
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
        """Begin whole batches of what waits, or all of it."""
        while self._failure is None:
            while not self._launchable.acquire(timeout=POLL_S):
                if self._failure is not None:
                    return
            found = self._next_batch(all_of_it=all_of_it)
            if found is None:
                self._launchable.release()
                return
            rows, batch = found
            self._batches.submit(batch).add_done_callback(partial(self._give_out, rows, batch))

    def _next_batch(self, *, all_of_it: bool) -> tuple[list[Row], DeviceBatch] | None:
        """Return a batch that can begin, by the sizes that the device has by now."""
        batches, now = self._batches, all_of_it
        head = self._head() if self._admission.is_full else None
        text = self._batcher.next_texts(batches.text_size, now=now, head=head)
        if text is not None:
            _, rows, size = text
            tokens = [row.sample.tokens for row in rows]
            return rows, TextBatch.of(tokens, size, self._encoder.device)
        image = self._batcher.next_images(batches.size, batches.size_of, now=now, head=head)
        if image is None:
            return None
        shape, rows, size = image
        return rows, self._images(rows, shape, size)

    def _images(self, rows: Sequence[Row], shape: tuple[int, int], size: int) -> ImageBatch:
        width, height = shape
        pixels = self._room((size, 3, height, width))
        if rows:
            torch.stack([row.pixels for row in rows], out=pixels[: len(rows)])
        pixels[len(rows) :].zero_()
        keys = [row.noise for row in rows]
        self._let_go([row for row in rows if row.is_last])
        return ImageBatch.of(pixels, keys, seed=self._seed)

    def _room(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return memory for pixels, which a GPU can fetch by itself.

        It is that of a batch which is done, where there is one like it: to get new pages from the
        system may take longer than to fill them.
        """
        for _ in range(len(self._spare)):
            pixels = self._spare.popleft()
            if pixels.shape == shape:
                return pixels
            self._spare.append(pixels)
        pin = self._encoder.device.type == "cuda"
        return torch.empty(shape, dtype=torch.uint8, pin_memory=pin)

    def _let_go(self, rows: Sequence[Row]) -> None:
        """Drop pixels that are in a batch."""
        nbytes = 0
        for row in rows:
            crop = row.crop
            nbytes += crop.pixels.nbytes
            row.sample.cuts[row.cut] = Crop(
                pixels=NO_PIXELS, width=crop.width, height=crop.height, fit=crop.fit
            )
        self._admission.hold(-nbytes)

    def _give_out(self, rows: Sequence[Row], batch: DeviceBatch, made: "Future[Rows]") -> None:
        """Hand out what a batch became: the device is done with it."""
        with self._guarded():
            self._launchable.release()
            if made.cancelled():
                return
            found = made.result()
            if isinstance(batch, ImageBatch):
                self._spare.append(batch.pixels)
            self._take(rows, [Code.NOT_FINITE if each is None else each for each in found])

    def _take(self, rows: Sequence[Row], found: "Sequence[Arrays | Code]") -> None:
        """Give samples parts of them, or why these cannot be had.

        A sample is done when the last of its parts is there.
        """
        done, nbytes = [], 0
        with self._finishing:
            for row, each in zip(rows, found, strict=True):
                sample = row.sample
                nbytes += sample.block.count(row.take(each))
                sample.missing -= 1
                if not sample.missing:
                    done.append(sample)
        self._admission.hold(nbytes)
        self._finish(done)

    def _finish(self, samples: Sequence[SampleUnderWay]) -> None:
        blocks = []
        with self._finishing:
            for sample in samples:
                sample.block.missing -= 1
                if not sample.block.missing:
                    blocks.append(sample.block)
        for block in blocks:
            block.set_result([sample.results() for sample in block.samples])
        if blocks:
            self._head()  # forgets those that are done
            if self._admission.is_full:
                self._fed.put(None)  # another block is the oldest now

    def _head(self) -> PendingBlock | None:
        """Return the oldest block that is not done."""
        with self._finishing:
            while self._unfinished and self._unfinished[0].done():
                self._unfinished.popleft()
            return self._unfinished[0] if self._unfinished else None
