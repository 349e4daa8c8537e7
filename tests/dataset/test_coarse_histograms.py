"""What a receipt counts of a sample."""

from collections import Counter
from typing import Any

from wdsprep.dataset.coarse_histograms import count_sample


def counted(dataset: str, facts: dict[str, Any], shape: str = "") -> dict[str, int]:
    counts: Counter[str] = Counter()
    count_sample(counts, dataset, facts, shape)
    return dict(counts)


def test_an_image_counts_by_its_caption_and_its_shorter_side() -> None:
    facts = {"caption": "a cat", "width": 300, "height": 200, "source": "cat.jpg"}
    assert counted("images", facts) == {"caption<6": 1, "side<256": 1}


def test_latents_count_what_was_cut_or_empty_and_their_shape() -> None:
    cut = {"caption": "a cat", "cut": True}
    assert counted("latents", cut) == {"cut": 1, "empty_caption": 0}
    assert counted("latents", {}, "64x32") == {"cut": 0, "empty_caption": 1, "64x32": 1}
