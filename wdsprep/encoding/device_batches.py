"""Batches under way on a device: one thread launches them, another finishes them.

On a GPU the next batches are queued while one is computed, up to `MOST_LAUNCHED` of them. A second
thread waits for the results of a batch and splits them into rows, so launching never waits for
that. On a CPU launching is computing: there are several lanes, each of which computes its batches
alone, on one core. A sum that is split between cores depends on their number, and splitting costs
more than it brings.

The engine of `encode` and `score`, and a trainer's own device, both work through this.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import torch

from wdsprep.dataset.shapes import Size
from wdsprep.encoding.models.base import Encoder
from wdsprep.encoding.models.device import (
    Arrays,
    Device,
    DeviceBatch,
    Launched,
    Stats,
    combine,
)

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
