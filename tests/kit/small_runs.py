"""Sorting in small parts, so that few rows go the way that many do."""

import pytest

from wdsprep.sources import sorted_rows


def sort_in_runs(monkeypatch: pytest.MonkeyPatch, run_nbytes: int, block_nbytes: int) -> None:
    """Have rows sorted in runs of so many bytes, each of which is written in blocks."""
    for name, nbytes in {"RUN_NBYTES": run_nbytes, "BLOCK_NBYTES": block_nbytes}.items():
        monkeypatch.setattr(sorted_rows, name, nbytes)
