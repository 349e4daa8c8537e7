"""What a run of `encode` in this process has computed, counted."""

from collections import Counter
from typing import Any

import pytest

from wdsprep.encoding import encode
from wdsprep.images import formats


def count_work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how often an image is decoded, and the rows that the encoder is given, from now on.

    With a batch of one no row is padding.
    """
    counted: Counter[str] = Counter()
    load, make = formats.load, encode.make_encoder

    def load_counted(*arguments: Any) -> Any:
        counted["decoded"] += 1
        return load(*arguments)

    def make_counted(*arguments: Any) -> Any:
        encoder = make(*arguments)
        images, texts = encoder.encode_images, encoder.encode_texts

        def encode_images(pixels: Any, *rest: Any, **how: Any) -> Any:
            counted[f"at {pixels.shape[-1]}"] += len(pixels)
            return images(pixels, *rest, **how)

        def encode_texts(captions: Any, **how: Any) -> Any:
            counted["texts"] += len(captions)
            return texts(captions, **how)

        encoder.encode_images, encoder.encode_texts = encode_images, encode_texts  # type: ignore[method-assign]
        return encoder

    monkeypatch.setattr(formats, "load", load_counted)
    monkeypatch.setattr(encode, "make_encoder", make_counted)
    return counted
