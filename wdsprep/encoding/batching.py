"""Batches: which samples share one, and how a device computes them one after another.

`Batcher` chooses samples of one shape, in their order. Batches have one fixed size for each shape.
If there are many shapes, of images or of captions, an image or a caption waits for others of its
shape until a batch is full. A batch is made of fewer when `window` further samples have been added,
when there is no memory for more and the oldest sample waits for the batch, or when no more samples
come. Such a batch is padded if it is of images, or on a CPU: the bytes of a sample depend on the
size of its batch.

`DeviceBatches` has the batches of a device: one thread launches them, another finishes them. On a
GPU the next batches are queued while one is computed, up to `MOST_LAUNCHED` of them. A second
thread waits for the results of a batch and splits them into rows, so launching never waits for
that. On a CPU launching is computing: there are several lanes, each of which computes its batches
alone, on one core. A sum that is split between cores depends on their number, and splitting costs
more than it brings.

The engine of `encode` and `score`, and a trainer's own device, both work through this.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar

import torch

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.shapes import Size
from wdsprep.encoding.encoded_samples import PendingBlock, Row, SampleUnderWay
from wdsprep.encoding.models.base import Encoder, Part, text_size
from wdsprep.encoding.models.device import Arrays, Device, DeviceBatch, Launched, Stats, combine
from wdsprep.images.crop import Crop

ShapeT = TypeVar("ShapeT", bound=tuple[int, ...])


@dataclass
class Batcher:
    """The crops and captions of samples that wait for a batch.

    Captions are tokenized later, many at a time, and then sorted by shape. `refuse` is called for
    captions that have no tokens.
    """

    encoder: Encoder
    refuse: Callable[[Row, Code], object]
    flips: bool
    """True if the mirror image of each crop is encoded too."""
    image_window: int
    text_window: int
    """The number of further samples that may be added while a crop or a caption waits for others of
    its shape."""
    _come: int = 0
    _images: dict[Size, list[Row]] = field(default_factory=dict)
    _captions: list[SampleUnderWay] = field(default_factory=list)
    _texts: dict[tuple[int, ...], list[Row]] = field(default_factory=dict)

    def add(self, sample: SampleUnderWay) -> None:
        """Queue the crops of a sample, and its caption if a crop that was not rejected needs it.

        `sample.missing` is increased by the number of results that the sample then waits for.
        """
        self._come += 1
        sample.number = self._come
        sample.images = [{} for _ in sample.cuts]
        has_text = False
        for number, (cut, part) in enumerate(zip(sample.cuts, sample.parts, strict=True)):
            if not isinstance(cut, Crop):
                continue
            has_text = has_text or Part.TEXT in part
            if Part.IMAGE in part:
                self._add_cut(sample, number, cut)
        if has_text:
            sample.missing += 1
            self._captions.append(sample)

    def _add_cut(self, sample: SampleUnderWay, number: int, cut: Crop) -> None:
        rows = self._images.setdefault((cut.fit.width, cut.fit.height), [])
        rows.append(Row(sample, number, is_last=not self.flips))
        if self.flips:
            rows.append(Row(sample, number, is_mirrored=True))
        sample.missing += 1 + self.flips

    def next_images(
        self, size: int, size_of: Callable[[Size], int], *, now: bool, head: PendingBlock | None
    ) -> tuple[Size, list[Row], int] | None:
        """Remove a batch of crops; return its shape, rows and size, or None if none is ready.

        `size` is the batch size for squares, and `size_of` returns the batch size for a shape. A
        batch that is not full is ready if `now` is true, if its first crop is of `head`, the oldest
        block, or if that crop has waited too long.
        """
        most = 2 * size - 1 + self.image_window
        return self._take_batch(self._images, size_of, most=most, now=now, head=head)

    def next_texts(
        self, size: int, *, now: bool, head: PendingBlock | None
    ) -> tuple[tuple[int, ...], list[Row], int] | None:
        """Remove a batch of captions; return its shape, rows and size, or None if none is ready.

        A batch that is not full is ready if `now` is true, if its first caption is of `head`, the
        oldest block, or if that caption has waited too long. Captions are tokenized here, many
        together, and those without tokens are refused.
        """
        waiting = self._captions
        if waiting and (now or head is not None or self.count_after(waiting[0]) >= size - 1):
            self._tokenize()
        return self._take_batch(
            self._texts,
            lambda shape: text_size(shape, size),
            most=2 * size - 1 + self.text_window,
            now=now,
            head=head,
        )

    def count_after(self, sample: SampleUnderWay) -> int:
        """Return how many samples have been added after this one."""
        return self._come - sample.number

    def _tokenize(self) -> None:
        found = self.encoder.tokens([sample.caption for sample in self._captions])
        for sample, tokens in zip(self._captions, found, strict=True):
            sample.tokens = tokens
            row = Row(sample)
            if tokens.count:
                self._texts.setdefault(tokens.shape, []).append(row)
            else:
                self.refuse(row, Code.NO_TOKENS)
        self._captions.clear()

    def _take_batch(
        self,
        rows: dict[ShapeT, list[Row]],
        size_of: Callable[[ShapeT], int],
        *,
        most: int,
        now: bool,
        head: PendingBlock | None,
    ) -> tuple[ShapeT, list[Row], int] | None:
        """Remove a batch from `rows`; return its shape, rows and size, or None if none is ready.

        The batch has the shape of the oldest row, if `most` samples were added after that row or if
        the row is of the block `head`. Otherwise it is a full batch of any shape, or, if there is
        none and `now` is true, a batch of the oldest row's shape.
        """
        if not rows:
            return None
        oldest = min(rows, key=lambda shape: rows[shape][0].sample.number)
        first = rows[oldest][0].sample
        has_waited = self.count_after(first) >= most or first.block is head
        whole = (shape for shape, own in rows.items() if len(own) >= size_of(shape))
        shape = oldest if has_waited else next(whole, oldest if now else None)
        if shape is None:
            return None
        size, own = size_of(shape), rows.pop(shape)
        if len(own) > size:
            rows[shape] = own[size:]
        return shape, own[:size], size


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
