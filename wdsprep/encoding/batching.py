"""Batches: which samples share one, and how a device computes them one after another.

`Batcher` puts samples of one shape together, in their order. Batches have one fixed size for each
shape. If there are many shapes, of images or of captions, an image or a caption waits for others of
its shape until a batch is full. A batch is made of fewer when `window` further samples have been
added, when there is no memory for more and the oldest sample waits for the batch, or when no more
samples come. Such a batch is padded if it is of images, or on a CPU: the bytes of a sample depend
on the size of its batch.

`DeviceBatches` has the batches of a device: one thread launches them, another finishes them. On a
GPU the next batches are queued while one is computed, up to `MOST_LAUNCHED` of them. A second
thread waits for the results of a batch and splits them into rows, so launching never waits for
that. On a CPU launching is computing: there are several lanes, each of which computes its batches
alone, on one core. A sum that is split between cores depends on their number, and splitting costs
more than it brings.

The engine of `encode` and `score`, and a trainer's own device, both work through this.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from wdsprep.dataset.shapes import Size
from wdsprep.encoding.models.base import text_size
from wdsprep.encoding.models.device import (
    Arrays,
    Device,
    DeviceBatch,
    Encoder,
    ImageBatch,
    Launched,
    TextBatch,
)
from wdsprep.encoding.progress import Stats, combine
from wdsprep.encoding.sample_chain import Block, EncodingSample, Row

Groups = dict[Hashable, list[Row]]
"""The rows that wait for batches, by what those of one batch have in common: of images width,
height, and whether they are references; of captions the shape of their tokens."""
SPARE_BATCHES = 4
"""The batches whose memory is kept for later ones of their shape."""


class Batcher:
    """The crops and captions of samples that wait for a batch.

    Captions are tokenized late, many at a time, and then grouped by shape.
    """

    inputs = 1
    """The number of inputs of a batch of images for which `host_memory` is taken."""

    def __init__(
        self,
        encoder: Encoder,
        devices: "DeviceBatches",
        *,
        seed: int = 0,
        flips: bool = False,
        image_window: int = 0,
        text_window: int = 0,
    ) -> None:
        """Begin with no samples; the `devices` say how large batches are.

        With `flips` the mirror image of each crop is encoded too. The windows are the number of
        further samples that may be added while a crop or a caption waits for others of its shape.
        """
        self.encoder, self.devices = encoder, devices
        self._seed, self._flips = seed, flips
        self.image_window, self.text_window = image_window, text_window
        self._added = 0
        self._images: Groups = {}
        self._captions: list[Row] = []
        self._texts: Groups = {}
        self._spare = deque[Tensor](maxlen=SPARE_BATCHES * self.inputs)

    def add(self, sample: EncodingSample) -> None:
        """Queue the crops of a sample, and its caption if a crop that was not rejected needs it.

        `sample.missing` becomes the number of rows that the sample then waits for.
        """
        self._added += 1
        sample.number = self._added
        rows = list(sample.image_rows(flips=self._flips))
        for row in rows:
            self._images.setdefault(self._group_of(row), []).append(row)
        if sample.needs_text:
            rows.append(Row(sample))
            self._captions.append(rows[-1])
        sample.missing = len(rows)

    def _group_of(self, row: Row) -> Hashable:
        """Return what the images of a batch have in common: their shape and their kind."""
        return *row.crop.size, row.is_reference

    def next_batch(
        self, *, now: bool, head: Block | None = None
    ) -> tuple[list[Row], DeviceBatch | None] | None:
        """Remove rows that are ready, and return them with their batch; None if none are ready.

        Batches of captions come first. A batch that is not full is ready if `now` is true, if its
        first row is of `head`, the oldest block, or if that row has waited too long. Captions
        without tokens come without a batch.
        """
        at_once, waiting = self.devices.text_size, self._captions
        is_due = now or head is not None
        is_ready = waiting and (is_due or self._added_since(waiting[0]) >= at_once - 1)
        if is_ready and (without_tokens := self._tokenize()):
            return without_tokens, None
        most = 2 * at_once - 1 + self.text_window
        size_of = partial(text_size, usual=at_once)
        if taken := self._take_rows(self._texts, size_of, most=most, now=now, head=head):
            _, rows, size = taken
            tokens = [row.sample.tokens for row in rows]
            return rows, TextBatch.of(tokens, size, self.encoder.device)
        most = 2 * self.devices.size - 1 + self.image_window
        if taken := self._take_rows(self._images, self._size_of, most=most, now=now, head=head):
            group, rows, size = taken
            return rows, self.image_batch(rows, group, size)
        return None

    def _size_of(self, group: Any) -> int:
        return self.devices.size_of(group[:2])

    def _added_since(self, row: Row) -> int:
        """Return how many samples have been added after that of a row."""
        return self._added - row.sample.number

    def _tokenize(self) -> list[Row]:
        """Tokenize the captions that wait, and return the rows of those without tokens."""
        without_tokens = []
        captions = [row.sample.sample.caption for row in self._captions]
        images = [row.sample.for_text for row in self._captions]
        made = self.encoder.tokens(captions, images)
        for row, tokens in zip(self._captions, made, strict=True):
            row.sample.tokens = tokens
            if tokens.count:
                self._texts.setdefault(tokens.shape, []).append(row)
            else:
                without_tokens.append(row)
        self._captions.clear()
        return without_tokens

    def _take_rows(
        self,
        groups: Groups,
        size_of: Callable[[Any], int],
        *,
        most: int,
        now: bool,
        head: Block | None,
    ) -> tuple[Hashable, list[Row], int] | None:
        """Remove rows of one group; return it, the rows and the batch size, or None if none is due.

        They are of the group of the oldest row, if `most` samples were added after that row, if
        the row is of the block `head`, or if the group is whole. Otherwise they are a full batch of
        any group, or, if there is none and `now` is true, of the oldest row's group.
        """
        if not groups:
            return None
        oldest = min(groups, key=lambda group: groups[group][0].sample.number)
        first = groups[oldest][0]
        is_due = (
            self._added_since(first) >= most
            or self._is_whole(oldest)
            or (head is not None and first.sample.block is head)
        )
        full = (group for group, rows in groups.items() if len(rows) >= size_of(group))
        group = oldest if is_due else next(full, oldest if now else None)
        if group is None:
            return None
        size, rows = size_of(group), groups.pop(group)
        if len(rows) > size:
            groups[group] = rows[size:]
        return group, rows[:size], size

    def _is_whole(self, _group: Hashable) -> bool:
        """Return whether no further row of a group can come."""
        return False

    def image_batch(self, rows: Sequence[Row], group: Any, size: int) -> ImageBatch:
        """Return the batch of these crops, padded to a size."""
        width, height, is_reference = group
        pixels = self.host_memory((size, 3, height, width))
        if rows:
            torch.stack([row.pixels for row in rows], out=pixels[: len(rows)])
        pixels[len(rows) :].zero_()
        if is_reference:
            return ImageBatch(len(rows), (pixels,))
        return ImageBatch.of(pixels, [row.noise for row in rows], seed=self._seed)

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return memory for an input of a batch, pinned if there is a GPU.

        The memory of a finished batch of the same shape is used again: getting new pages from the
        system may take longer than filling them.
        """
        for _ in range(len(self._spare)):
            memory = self._spare.popleft()
            if (memory.shape, memory.dtype) == (shape, dtype):
                return memory
            self._spare.append(memory)
        pin = self.encoder.device.type == "cuda"
        return torch.empty(shape, dtype=dtype, pin_memory=pin)

    def keep_memory(self, batch: DeviceBatch) -> None:
        """Keep the memory of a finished batch of images for later ones."""
        if isinstance(batch, ImageBatch):
            self._spare.extend(batch.inputs[: self.inputs])


MOST_LAUNCHED = 3
"""The most batches of a device that are launched and not yet finished."""
Rows = list[Arrays | None]
"""The arrays made of each row of a batch; None where the numbers are not finite."""


class DeviceBatches:
    """A device that computes batches in threads, several of them at a time."""

    def __init__(
        self,
        encoder: Encoder,
        batch_size: int,
        *,
        lanes: int = 1,
        enter: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare the threads that launch and finish batches.

        With a `batch_size` of 0 the size is chosen: that of a GPU fits into its free memory.
        `lanes` is the number of batches that a CPU computes at once. `enter` is called in each
        thread before it uses the device.
        """
        self.lanes = lanes if encoder.device.type == "cpu" else 1
        self._enter = enter
        self._devices = [Device(encoder, batch_size) for _ in range(self.lanes)]
        self._free: SimpleQueue[Device] = SimpleQueue()
        for device in self._devices:
            self._free.put(device)
        self._is_closed = False
        self._launched = threading.Semaphore(self.lanes * MOST_LAUNCHED)
        torch.get_num_threads()  # fixes how many this thread has, before others take one each
        self._launcher = ThreadPoolExecutor(self.lanes, "launch", self._begin_thread)
        self._finisher = ThreadPoolExecutor(1, "finish", self._begin_thread)

    @property
    def stats(self) -> Stats:
        return combine([device.stats for device in self._devices])

    @property
    def size(self) -> int:
        """Return the size of a batch of images, which may be halved at any time."""
        return min(device.size for device in self._devices)

    def size_of(self, shape: Size) -> int:
        return min(device.size_of(shape) for device in self._devices)

    @property
    def text_size(self) -> int:
        return min(device.text_size for device in self._devices)

    def warm_up(self, batches: Sequence[DeviceBatch]) -> None:
        """Compute batches and drop the results, so that later ones of their kind are fast.

        If the device is broken, its error is raised here, before any sample is computed.
        """
        for device in self._devices:
            for batch in batches:
                self._launcher.submit(device.warm_up, batch).result()

    def submit(self, batch: DeviceBatch) -> "Future[Rows]":
        """Queue a batch, and return a future of the arrays that are made of its rows.

        The future is cancelled if `close` is called before the batch is launched.
        """
        made: Future[Rows] = Future()
        self._launcher.submit(self._launch, batch, made)
        return made

    def run(self, call: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Call a function in a thread that may use the device, and return its result."""
        return self._launcher.submit(call).result()

    def close(self) -> None:
        """Finish the batches that have been launched, cancel the others, and end the threads."""
        self._is_closed = True
        self._launcher.shutdown(wait=True)
        self._finisher.shutdown(wait=True)

    def _begin_thread(self) -> None:
        torch.set_num_threads(1)
        self._enter()

    def _launch(self, batch: DeviceBatch, made: "Future[Rows]") -> None:
        self._launched.acquire()
        if self._is_closed:
            self._launched.release()
            made.cancel()
            return
        device = self._free.get()
        try:
            launched = device.launch(batch)
        except BaseException as error:  # noqa: BLE001  raised where the rows are awaited
            self._launched.release()
            made.set_exception(error)
        else:
            self._finisher.submit(self._finish, device, launched, made)
        finally:
            self._free.put(device)

    def _finish(self, device: Device, launched: list[Launched], made: "Future[Rows]") -> None:
        try:
            rows = device.finish(launched)
        except BaseException as error:  # noqa: BLE001  the same
            made.set_exception(error)
        else:
            made.set_result(rows)
        finally:
            self._launched.release()
