"""The json of an image sample, beside the image and the caption."""

import re
from collections.abc import Mapping
from typing import Any

from wdsprep.dataset.samples import Sample, facts_bytes
from wdsprep.images.pixel_rule import Picture


def sample_members(
    key: str,
    sample: Sample,
    picture: Picture,
    bucket: int,
    kept: tuple[str, ...] | None,
    of_folder: Mapping[str, int],
) -> list[tuple[str, bytes]]:
    """Return the members of an image sample in their order: the image, the json, the caption.

    `kept` names the facts of the source to keep, or is None for all; `of_folder` are facts that the
    names of its folders tell.
    """
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
    facts |= of_folder
    return [
        (picture.extension, picture.data),
        ("json", facts_bytes(facts)),
        ("txt", sample.caption.encode("utf-8", "replace")),
    ]


def repeats_of(source: str) -> int:
    """Return how often an image is to come in an epoch, by the folders of its path.

    The innermost folder with a name such as `10_name` says it, as kohya's trainers read it; without
    one it is 1.
    """
    folders = reversed(source.split("/")[:-1])
    numbers = (re.match(r"([0-9]{1,6})_", folder) for folder in folders)
    return next((int(number[1]) for number in numbers if number), 1)
