"""MDS shards made by hand, where MosaicML's own writer would refuse to write what a test wants."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def mds_shard(rows: Sequence[Sequence[bytes]]) -> bytes:
    """The bytes of a shard whose columns all vary in length."""
    samples = [b"".join([*(struct.pack("<I", len(v)) for v in row), *row]) for row in rows]
    offsets = [4 + 4 * (len(rows) + 1)]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample))
    return struct.pack(f"<{2 + len(rows)}I", len(rows), *offsets) + b"".join(samples)


def mds_index(columns: dict[str, str], samples: int, nbytes: int) -> dict[str, Any]:
    """What an index says of one shard, by the encodings of its columns."""
    shard = {
        "column_encodings": list(columns.values()),
        "column_names": list(columns),
        "column_sizes": [None] * len(columns),
        "compression": None,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": "shard.00000.mds", "bytes": nbytes, "hashes": {}},
        "samples": samples,
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": None,
    }
    return {"shards": [shard], "version": 2}


def write_mds(place: Path, columns: dict[str, str], rows: Sequence[Sequence[bytes]]) -> Path:
    """A folder with one shard and its index."""
    place.mkdir(parents=True)
    data = mds_shard(rows)
    (place / "shard.00000.mds").write_bytes(data)
    index = mds_index(columns, len(rows), len(data))
    (place / "index.json").write_text(json.dumps(index))
    return place


def zip_shard(place: Path, kind: str, data: bytes, raw_nbytes: int) -> None:
    """Put compressed data in the place of the shard, and let the index say what it unpacks to."""
    index = json.loads((place / "index.json").read_bytes())
    (shard,) = index["shards"]
    name = f"shard.00000.mds.{kind}"
    shard["compression"] = kind
    shard["raw_data"]["bytes"] = raw_nbytes
    shard["zip_data"] = {"basename": name, "bytes": len(data), "hashes": {}}
    (place / "index.json").write_text(json.dumps(index))
    (place / name).write_bytes(data)
    (place / "shard.00000.mds").unlink()
