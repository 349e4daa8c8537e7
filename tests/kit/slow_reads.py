"""Readers of local shards that get their bytes in other ways than usual."""

import os
from typing import Any

import numpy as np
import pytest

from wdsprep.dataset import aio
from wdsprep.loading import shard_access

WAYS = ("at once", "one by one", "slowly", "in pieces")


def read_in_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loaders read in one of these ways, the last two as on a network file system."""
    monkeypatch.setattr(aio, "spare_queues", [])
    if way == "one by one":
        monkeypatch.setattr(aio, "SYSCALLS", {})
    if way in ("slowly", "in pieces"):
        monkeypatch.setattr(shard_access, "read_all", lambda fds, *_: np.zeros(len(fds), np.int64))

    def read(fd: int, buffers: Any, start: int) -> int:
        assert way in ("slowly", "in pieces"), "a sample is read again"
        return preadv(fd, buffers if way == "slowly" else [buffers[0][:1000]], start)

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", read)
