"""Scores for tests: made in this process, and read back."""

import gc
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from tests.kit.encodes import Here, samples_in
from wdsprep.runners.run import Outcome
from wdsprep.scoring.models import ScoreModel
from wdsprep.scoring.networks import ScoreEncoder
from wdsprep.scoring.score import score

_ENCODERS: dict[str, ScoreEncoder] = {}


def _loaded(models: Sequence[ScoreModel], device: str, dtype: str) -> ScoreEncoder:
    """Load models that score. They are kept: the same files are loaded once for all tests."""
    known = repr((models, device, dtype))
    if known not in _ENCODERS:
        _ENCODERS[known] = ScoreEncoder(models, device, dtype)
        gc.freeze()
    return _ENCODERS[known]


def score_here(images: Path | str, out: Path | str, **options: Any) -> Outcome:
    """Score without worker processes."""
    with (
        patch("wdsprep.encoding.run_plan.make_runner", lambda *_args, **_options: Here()),
        patch("wdsprep.scoring.networks.ScoreEncoder", _loaded),
    ):
        return score(str(images), str(out), **{"device": "cpu", "runner": "local", **options})


def columns_in(scores: Path) -> dict[str, dict[str, Any]]:
    """The row of each sample of scores, by its key."""
    tables = map(pq.read_table, sorted(scores.glob("*/*.parquet")))
    rows = (row for table in tables for row in table.to_pylist())
    return {row["key"]: {n: value for n, value in row.items() if n != "row"} for row in rows}


def arrays_in(scores: Path, name: str) -> dict[str, Any]:
    return {key: np.load(io.BytesIO(own[f"{name}.npy"])) for key, own in samples_in(scores).items()}


def pictures_in(images: Path) -> dict[str, tuple[Image.Image, str]]:
    """The image and caption of each sample."""
    found = {}
    for key, own in samples_in(images).items():
        data = next(own[name] for name in ("jpg", "png", "webp") if name in own)
        found[key] = Image.open(io.BytesIO(data)).convert("RGB"), own["txt"].decode()
    return found
