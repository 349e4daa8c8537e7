"""What Ray makes of a stream on a node, before it is known which wdsprep the node has.

All of it is pickled by value, as the pipeline registers this module for that: it looks at the
version there, and unpickles only then.
"""

import sys
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from wdsprep.runners.versions import __version__, of_driver

if TYPE_CHECKING:
    from wdsprep.loading.streaming.pieces import Pieces
    from wdsprep.loading.streaming.stages import PackedPiece

THEN = "begin a new stream from the state of the last batch"


def luggage_of(line: "Pieces") -> Any:
    """A line for workers, and where they find modules, as the driver does."""
    return ray.put((__version__, sys.path, cloudpickle.dumps(line)))


def opened(luggage: Any) -> tuple[Any, "Pieces"]:
    """The module of the stages, and the line."""
    version, path, data = ray.get(luggage) if isinstance(luggage, ray.ObjectRef) else luggage
    stages = of_driver("wdsprep.loading.streaming.stages", version, path, THEN)
    line: Pieces = cloudpickle.loads(data)
    return stages, line


class DecoderOf:
    """Ray Data names its stages after these."""

    def __init__(self, luggage: Any) -> None:
        stages, line = opened(luggage)
        self._stage = stages.DecodeStage(line)

    def __call__(self, wire: "PackedPiece") -> Any:
        return self._stage(wire)


class EncoderOf:
    def __init__(self, luggage: Any) -> None:
        stages, line = opened(luggage)
        self._stage = stages.EncodeStage(line)

    def __call__(self, wire: "PackedPiece") -> Any:
        return self._stage(wire)


def empty_of(luggage: Any) -> Any:
    """What the empty caption becomes."""
    stages, line = opened(luggage)
    return stages.empty(line)


def new_trainer(version: str) -> Any:
    """To be filled with its state, which is unpickled after this. Plain pickle has this by name."""
    module = of_driver("wdsprep.loading.streaming.trainer", version, (), THEN)
    return object.__new__(module.Trainer)
