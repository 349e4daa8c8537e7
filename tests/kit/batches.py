"""What a loader serves, compared, and files to read with damage."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


def assert_same(found: Iterable[Mapping[str, Any]], wanted: Iterable[Mapping[str, Any]]) -> None:
    """Hold batches against others: names in their order, types, and every value to the bit."""
    for batch, other in zip(found, wanted, strict=True):
        assert list(batch) == list(other)
        for name, value in other.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == batch[name].dtype, name
                assert torch.equal(value, batch[name]), name
            else:
                assert value == batch[name], name


def damage(path: Path, at: int, data: bytes = b"\xff" * 600) -> None:
    """Write other bytes into a file."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
