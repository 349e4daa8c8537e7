"""What settings say of scores: a dataset whose tables have columns for each sample.

Such a dataset is one of latents without latents or text, as text alone is one without latents. Its
arrays, if it has any, are embeddings of images; if it has none, its shards are tables alone.
"""

from collections.abc import Mapping
from typing import Any

SCORES = "scores"
NUMBER, WHOLE, TEXT = "number", "whole", "text"
"""The kinds of values that a column may hold: real numbers, whole ones or texts."""
SCORER = "wdsprep score"


def is_scored(settings: Mapping[str, Any]) -> bool:
    """Return whether a dataset of these settings holds scores."""
    return SCORES in settings


def counted_as(dataset: str, settings: Mapping[str, Any]) -> str:
    """Return what the samples of a dataset are counted as: images, latents or scores."""
    return SCORES if is_scored(settings) else dataset


def columns_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return which kind of value each column of scores holds, such as `number`.

    The columns stand in the order in which they were asked for.
    """
    found = settings.get(SCORES, {}).get("columns", {})
    return dict(found) if isinstance(found, Mapping) else {}
