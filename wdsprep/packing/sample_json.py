"""The json of an image sample, beside the image and the caption."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from wdsprep.dataset.samples import META, Sample, facts_bytes
from wdsprep.images.pixel_rule import Picture

_META = b',"meta":'
_AFTER_META = {name: f',"{name}":'.encode() for name in ("repeats", "sha256", "sha512", "source")}
"""The fields that may follow `meta`, as they are sorted, in the json. The last is always there."""


class PackedSample(NamedTuple):
    """A sample as it is packed: its members, the object in its json, and the text of its `meta`."""

    members: list[tuple[str, bytes]]
    facts: dict[str, Any]
    meta: bytes


def packed_sample(
    key: str,
    sample: Sample,
    picture: Picture,
    bucket: int,
    kept: tuple[str, ...] | None,
    of_folder: Mapping[str, int],
) -> PackedSample:
    """Return an image sample with its members in their order: the image, the json, the caption.

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
        META: meta,
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
    data = facts_bytes(facts)
    members = [
        (picture.extension, picture.data),
        ("json", data),
        ("txt", sample.caption.encode("utf-8", "replace")),
    ]
    return PackedSample(members, facts, _cut_meta(data, facts))


def _cut_meta(data: bytes, facts: Mapping[str, Any]) -> bytes:
    """Return the text of `meta` in a json. No other field is or has an object.

    So the first text of its name is its name, and the last of the next field's is that.
    """
    start = data.index(_META) + len(_META)
    after = next(text for name, text in _AFTER_META.items() if name in facts)
    return data[start : data.rindex(after, start)]


def repeats_of(source: str) -> int:
    """Return how often an image is to come in an epoch, by the folders of its path.

    The innermost folder with a name such as `10_name` says it, as kohya's trainers read it; without
    one it is 1.
    """
    folders = reversed(source.split("/")[:-1])
    numbers = (re.match(r"([0-9]{1,6})_", folder) for folder in folders)
    return next((int(number[1]) for number in numbers if number), 1)
