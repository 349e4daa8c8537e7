"""The json of an image sample, beside the image and the caption."""

from typing import Any

from wdsprep.dataset.samples import Sample, facts_bytes
from wdsprep.images.pixel_rule import Picture


def sample_members(
    key: str, sample: Sample, picture: Picture, bucket: int, kept: tuple[str, ...] | None
) -> list[tuple[str, bytes]]:
    """Return the members of an image sample in their order: the image, the json, the caption."""
    meta = sample.facts
    if kept is not None:
        meta = {name: value for name, value in meta.items() if name in kept}
    facts: dict[str, Any] = {
        "bucket": bucket,
        "caption": sample.caption,
        "changes": picture.changes,
        "height": picture.height,
        "key": key,
        "meta": meta,
        "source": sample.source,
        "source_height": picture.source_height,
        "source_width": picture.source_width,
        "width": picture.width,
    }
    if len(sample.captions) > 1:
        facts["captions"] = sample.captions
    if sample.url:
        facts["url"] = sample.url
    facts |= sample.digests
    return [
        (picture.extension, picture.data),
        ("json", facts_bytes(facts)),
        ("txt", sample.caption.encode("utf-8", "replace")),
    ]
