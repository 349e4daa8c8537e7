"""What Ray makes of a stream on a node, before it is known which wdsprep the node has.

All of it is pickled by value, as the pipeline registers this module for that: it looks at the
version there, and unpickles only then.
"""

import sys
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from wdsprep.runners.versions import import_for_driver
from wdsprep.version import __version__

if TYPE_CHECKING:
    from wdsprep.loading.streaming.pieces import Pieces
    from wdsprep.loading.streaming.stages import PackedPiece


THEN = "begin a new stream from the state of the last batch"


def sent_to_workers(pieces: "Pieces") -> Any:
    """The pieces for workers, and where they find modules, as the driver does."""
    return ray.put((__version__, sys.path, cloudpickle.dumps(pieces)))


def opened(sent: Any) -> tuple[Any, "Pieces"]:
    """The module of the stages, and the pieces."""
    version, path, data = ray.get(sent) if isinstance(sent, ray.ObjectRef) else sent
    stages = import_for_driver("wdsprep.loading.streaming.stages", version, path, THEN)
    pieces: Pieces = cloudpickle.loads(data)
    return stages, pieces


class DecoderOf:
    """Ray Data names its stages after these."""

    def __init__(self, sent: Any) -> None:
        stages, pieces = opened(sent)
        self._stage = stages.DecodeStage(pieces)

    def __call__(self, wire: "PackedPiece") -> Any:
        return self._stage(wire)


class EncoderOf:
    def __init__(self, sent: Any) -> None:
        stages, pieces = opened(sent)
        self._stage = stages.EncodeStage(pieces)

    def __call__(self, wire: "PackedPiece") -> Any:
        return self._stage(wire)


def empty_of(sent: Any) -> Any:
    """What the empty caption becomes."""
    stages, pieces = opened(sent)
    return stages.empty(pieces)


def new_trainer(version: str) -> Any:
    """To be filled with its state, which is unpickled after this. Plain pickle has this by name."""
    module = import_for_driver("wdsprep.loading.streaming.trainer", version, (), THEN)
    return object.__new__(module.Trainer)
