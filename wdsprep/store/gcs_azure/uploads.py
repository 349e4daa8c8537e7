"""How a file goes up: in one request, or in parts while the next ones are still being written."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from queue import Full, Queue
from typing import Any

from wdsprep.errors import ExistsError, NotFoundError, StoreError
from wdsprep.store.remote import PartSink

PART_NBYTES = 8 << 20  # GCS takes 10,000 parts: 80 GB
PARTS_IN_FLIGHT = 3
WRITER = "wdsprepwriter"  # Azure takes no dashes there, and Ceph gives no underscores back
Put = Callable[..., Any]


class ObjectSink(PartSink):
    """A file that is uploaded in parts, in a thread.

    Nobody sees what the server has of it until the last part is there, when the block of the
    file ends well.
    """

    def __init__(self, name: str, put: Put, tells_writer: Callable[[], str], part: int) -> None:
        super().__init__(name)
        self._put, self._tells_writer, self._nbytes = put, tells_writer, part
        self._facts = {
            WRITER: self.writer,
            **({"Content-Type": self.kind} if self.kind else {}),
        }
        self._upload: _Upload | None = None

    def part_nbytes(self) -> int:
        return self._nbytes

    def send_part(self) -> None:
        if self._upload is None:
            self._upload = _Upload(lambda parts: self._put(parts, self._facts, is_whole=False))
        self._upload.send(self.take_pending())

    def end(self, *, waits: bool = False) -> None:
        if self.pending and (waits or self._upload):
            self.send_part()
        if self._upload is not None:
            self._upload.drain()

    def finish(self) -> None:
        """Finish the upload, so that the file appears.

        Raise the error of an earlier write, if there was one. A repeated request may be refused
        because an earlier one, whose answer was lost, has made the file. If the object there is
        by this writer, the upload counts as a success.
        """
        self.check()
        try:
            if self._upload is None:
                self._put(self.take_pending(), self._facts, is_whole=True)
            else:
                self.end()
                self._upload.finish()
        except (ExistsError, NotFoundError):
            if not self._is_there():
                raise

    def _is_there(self) -> bool:
        try:
            return self._tells_writer() == self.writer
        except StoreError:  # the refusal is the news, not this
            return False

    def abort(self) -> None:
        if self._upload is not None:
            self._upload.abort()


class _AbortedError(Exception):
    """The error by which the library learns that an upload is given up."""


class _Upload:
    """An upload by the library, in a thread.

    The library takes parts from a generator, and ends or aborts the upload as the generator does.
    """

    def __init__(self, put: Callable[[Iterator[bytes]], object]) -> None:
        self._parts: Queue[bytes | BaseException | None] = Queue(1)
        self._put = put
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="wdsprep-upload", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._put(self._parts_to_send())
        except BaseException as error:  # noqa: BLE001 (told to who writes)
            self._failure = error
            self._drop_parts()

    def _parts_to_send(self) -> Iterator[bytes]:
        while True:
            part = self._parts.get()
            try:
                if part is None:
                    return
                if isinstance(part, BaseException):
                    raise part
                yield part
            finally:
                self._parts.task_done()

    def _drop_parts(self) -> None:
        """Throw away the parts that are queued, so that `drain` and `send` do not wait for them."""
        while not self._parts.empty():
            self._parts.get()
            self._parts.task_done()

    def send(self, part: bytes | BaseException | None) -> None:
        while True:
            if self._failure is not None:
                raise self._failure
            with contextlib.suppress(Full):
                self._parts.put(part, timeout=0.1)
                return

    def drain(self) -> None:
        while self._parts.unfinished_tasks and self._failure is None:
            self._thread.join(0.01)

    def finish(self) -> None:
        self.send(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def abort(self) -> None:
        with contextlib.suppress(BaseException):  # the first failure is the news
            self.send(_AbortedError())
        self._thread.join()
