"""Run the stages of a stream on a node whose version of wdsprep is not known yet.

The pipeline registers this module so that all of it is pickled by value. It checks the version
there, and only then unpickles the rest.
"""

import sys
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from wdsprep.runners.worker_versions import import_for_driver
from wdsprep.version import __version__

if TYPE_CHECKING:
    from wdsprep.loading.streaming.pieces import Pieces
    from wdsprep.loading.streaming.stages import PackedPiece


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


class DecodeWorker:
    """A worker of the decode stage; Ray Data shows this name."""

    def __init__(self, sent: Any) -> None:
        stages, pieces = unpack_pieces(sent)
        self._stage = stages.DecodeStage(pieces)

    def __call__(self, wire: "PackedPiece") -> Any:
        return self._stage(wire)


class EncodeWorker:
    def __init__(self, sent: Any) -> None:
        stages, pieces = unpack_pieces(sent)
        self._stage = stages.EncodeStage(pieces)

    def __call__(self, wire: "PackedPiece") -> Any:
        return self._stage(wire)


def encode_empty_caption(sent: Any) -> Any:
    """Return the arrays of the empty caption, encoded on this node."""
    stages, pieces = unpack_pieces(sent)
    return stages.encode_empty_caption(pieces)


def new_trainer(version: str) -> Any:
    """Return a trainer without its state, which is unpickled after this.

    Raise an error if this process has another version of wdsprep. Plain pickle finds this function
    by its name.
    """
    module = import_for_driver("wdsprep.loading.streaming.trainer", version, (), THEN)
    return object.__new__(module.Trainer)
