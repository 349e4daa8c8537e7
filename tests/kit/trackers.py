"""What trackers have written down, read back: TensorBoard's by its own reader.

wandb has none for what it keeps where there is no network. A run is a log of protocol buffers, in
blocks of 32 kB: records of a checksum, a length, and whether more of the same follows.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

BLOCK, HEAD = 1 << 15, 7
LAST = (1, 4)  # a whole record, or the end of one


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbRun:
    project: str
    group: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]


def runs_in(folder: Path) -> list[WandbRun]:
    """In the order in which they began."""
    return [_run(path.read_bytes()) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def _run(data: bytes) -> WandbRun:
    assert data.startswith(b":W&B")
    records = [*_records(data)]
    (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    rows = [
        {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    config = {each.key: json.loads(each.value_json) for each in run.config.update}
    return WandbRun(project=run.project, group=run.run_group, config=config, rows=rows)


def _records(data: bytes) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2  # takes seconds

    at, held = HEAD, b""
    while at + HEAD < len(data):
        if (room := BLOCK - at % BLOCK) < HEAD:
            at += room
            continue
        _checksum, nbytes, kind = struct.unpack_from("<IHB", data, at)
        held += data[at + HEAD : at + HEAD + nbytes]
        at += HEAD + nbytes
        if kind in LAST:
            yield wandb_internal_pb2.Record.FromString(held)
            held = b""


def curves_of(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], str]:
    """The points of each curve, and the settings."""
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()
    (settings,) = events.Tensors("settings")
    points = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]
    }
    return points, settings.tensor_proto.string_val[0].decode()
