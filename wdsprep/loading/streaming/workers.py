"""What runs on a node whose version of wdsprep is not known yet: stages, and numbers of pieces.

`stream` registers this module, so Ray gets all of it by value and runs it whatever wdsprep a node
has. Workers of a stage check the version there, and only then unpickle the rest.

Numbers of pieces are given out as far ahead of the trainers as memory allows. A small actor, the
*pace*, knows how far each trainer is, and numbers are given out at a fixed distance before the
slowest. That bounds what lies between here and the trainers: Ray's object store never has more
pieces than that. Nobody else knows what the pace knows, so it is not restarted, and the stream ends
with it. It runs on the driver's machine, as the pipeline does; if that is lost, the stream is lost
anyway.
"""

import asyncio
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
from ray import cloudpickle
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from wdsprep.runners.worker_versions import import_for_driver
from wdsprep.version import __version__

if TYPE_CHECKING:
    from wdsprep.loading.streaming.stages import PackedPiece, Pieces


THEN = "begin a new stream from the state of the last batch"


def send_to_workers(pieces: "Pieces") -> Any:
    """Put the pieces, with the driver's version and module path, into Ray's memory.

    Return the reference that `unpack_pieces` takes.
    """
    return ray.put((__version__, sys.path, cloudpickle.dumps(pieces)))


def unpack_pieces(sent: Any) -> tuple[Any, "Pieces"]:
    """Return the module of the stages, and the pieces.

    Raise an error if this node has another version of wdsprep than the driver.
    """
    version, path, data = ray.get(sent) if isinstance(sent, ray.ObjectRef) else sent
    stages = import_for_driver("wdsprep.loading.streaming.stages", version, path, THEN)
    pieces: Pieces = cloudpickle.loads(data)
    return stages, pieces


class StageWorker:
    """A worker of a stage, whose function another function of the stages' module makes."""

    def __init__(self, sent: Any, make_stage: str) -> None:
        stages, pieces = unpack_pieces(sent)
        self._stage = getattr(stages, make_stage)(pieces)

    def __call__(self, packed: "PackedPiece") -> Any:
        return self._stage(packed)


def encode_empty_caption(sent: Any) -> Any:
    """Return the arrays of the empty caption, encoded on this node."""
    stages, pieces = unpack_pieces(sent)
    encoder = stages.BatchEncoder(pieces.encoding, most=1)
    try:
        return encoder.empty()
    finally:
        encoder.close()


def new_trainer(version: str) -> Any:
    """Return a trainer without its state, which is unpickled after this.

    Raise an error if this process has another version of wdsprep. Plain pickle finds this function
    by its name.
    """
    module = import_for_driver("wdsprep.loading.streaming.stream", version, (), THEN)
    return object.__new__(module.Trainer)


class StreamPace:
    """An actor that knows how many pieces each trainer has had."""

    def __init__(self, first: int, trainers: int, ahead: int) -> None:
        self._had = [first] * trainers
        self._ahead = ahead
        self._moved = asyncio.Condition()

    async def note_done(self, rank: int, number: int) -> None:
        """Note that a trainer has had all its pieces below this number."""
        async with self._moved:
            self._had[rank] = max(self._had[rank], number)
            self._moved.notify_all()

    async def wait_for(self, number: int) -> int:
        """Wait until a number may be given out; return the first number that may not yet."""
        async with self._moved:
            await self._moved.wait_for(lambda: number < self._end)
            return self._end

    @property
    def _end(self) -> int:
        return min(self._had) + self._ahead


class Numbers(Datasource):  # type: ignore[misc]
    """A source of the numbers of pieces for Ray Data, with one row in each block.

    One task gives out the numbers; it takes no core.
    """

    def __init__(self, first: int, end: int, pace: Any) -> None:
        self._span, self._pace = (first, end), pace

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        del parallelism
        (first, end), pace = self._span, self._pace

        def read() -> Iterable[pa.Table]:
            allowed = first
            for number in range(first, end):
                if number >= allowed:
                    allowed = ray.get(pace.wait_for.remote(number))
                yield pa.table({"number": [number]})

        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(read, unknown)]
