"""A sample from a source, the images that it has by role, and the json of its facts.

A sample has one image to train on, its target, and may have further images, each in a role such as
`source` or `mask`. The first image of a role has the role's name, the next are `source_1`,
`source_2` and so on. These names begin its member in the tar (`KEY.source_1.jpg`) and its fields in
the json (`source_1_width`).
"""

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wdsprep.text import nearest_name


def _parse_finite(text: str) -> float | None:
    """Parse a float.

    Return None if it has too many digits, or too large an exponent, to be finite.
    """
    value = float(text)
    return value if math.isfinite(value) else None


FROM_OUTSIDE = json.JSONDecoder(parse_float=_parse_finite, parse_constant=lambda _name: None)
_FACTS = json.JSONEncoder(
    sort_keys=True,
    ensure_ascii=False,
    separators=(",", ":"),
    allow_nan=False,
    check_circular=False,  # what came as JSON has no circles
)
STORED_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
"""The extensions of the images in our shards, and Pillow's names for their formats."""
_UTF8_STARTS = (b'{"', b"{\n")
"""The first bytes of nearly all JSON objects in UTF-8; other encodings have zeros between them."""


def parse_json(data: bytes | str) -> Any:
    """Parse JSON that another program wrote.

    NaN and infinities, which Python accepts, become None: no JSON can hold them. Raise
    ValueError or RecursionError for what is no JSON.
    """
    if isinstance(data, bytes):
        encoding = "utf-8" if data.startswith(_UTF8_STARTS) else json.detect_encoding(data)
        data = data.decode(encoding, "surrogatepass")
    return FROM_OUTSIDE.decode(data)


def parse_object(data: bytes | str) -> dict[str, Any] | None:
    """Parse JSON that another program wrote. Return it if it is an object, otherwise None."""
    try:
        value = parse_json(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


META = "meta"
ROLE = r"[a-z][a-z0-9]{0,29}"
"""What the name of a role matches."""
ROLE_IMAGE = rf"{ROLE}(_[1-9][0-9]?)?"
"""What the name of an image in a role matches."""
TARGET = "target"
"""The name of the image to train on, where a user or a setting names images of each sample."""
MIRRORED = "_flipped"
"""What ends the name of the latents of a mirror image."""
_ARRAY = re.compile(rf"({ROLE_IMAGE})\.npy")
MAPPING = (dict, Mapping)  # the first is told sooner, and is what nearly all are
_NUMBERED = re.compile(r"\[(\d+)\]")


def facts_bytes(facts: Mapping[str, Any] | None) -> bytes:
    """Return the json member of a sample."""
    return _FACTS.encode(facts).encode("utf-8", "replace")


PathParts = tuple[str | int, ...]


def value_at_path(facts: Any, path: str | PathParts) -> Any:
    """Return the value at a path in a json, such as `meta.long`, `captions.1` or `captions[1]`.

    Return None if there is none. A path whose first name the json lacks is looked up in its
    `meta`, where pack keeps what an image came with.
    """
    parts = split_path(path) if isinstance(path, str) else path
    value = facts
    if isinstance(facts, MAPPING) and facts.get(parts[0]) is None:
        value = facts.get(META)
    for part in parts:
        if isinstance(value, MAPPING):
            value = value.get(part)
        elif isinstance(value, list | tuple) and -1 < (number := list_index(part)) < len(value):
            value = value[number]
        else:
            return None
    return value


def names_in(value: Any) -> set[str]:
    """Return the names in a JSON value and in what it holds; of a list, in its first item."""
    names, values = set[str](), [value]
    while values:
        inner = values.pop()
        if isinstance(inner, dict):
            names.update(inner)
            values += inner.values()
        elif isinstance(inner, list):
            values += inner[:1]
    return names


def nearest_field(path: PathParts, names: Collection[str]) -> str:
    """Return the name that was meant by the first of a path that nothing has, or ""."""
    unknown = (part for part in path if isinstance(part, str) and part not in names)
    wrong = next(unknown, "")
    return nearest_name(wrong, names) if wrong else ""


def split_path(path: str) -> PathParts:
    return tuple(_NUMBERED.sub(r".\1", path).split("."))


def list_index(part: str | int) -> int:
    """Return the index into a list that a part of a path stands for, or -1 if it is none."""
    if isinstance(part, str):
        return int(part) if part.isdecimal() else -1
    return part


def key_order(key: str) -> tuple[int, str]:
    """Return the sort key by which the keys of a packed shard rise.

    From the millionth input of a slice on, keys have one digit more, so sorted as text they
    would fall.
    """
    return len(key), key


class RoleImage(NamedTuple):
    """An image of a sample, under its name; `url` says from where it is to be fetched.

    The name of the target is empty.
    """

    name: str
    data: bytes
    url: str = ""


def image_name(role: str, number: int) -> str:
    """Return the name of the image with this number, from 0 on, that a sample has in a role."""
    return f"{role}_{number}" if number else role


def role_of(name: str) -> tuple[str, int]:
    """Return the role of an image of a sample by its name, and its number in that role."""
    role, _, number = name.partition("_")
    return role, int(number or 0)


def names_in_roles(arrays: Iterable[str], roles: Sequence[str]) -> list[str]:
    """Return the names of the images in these roles of which a sample has arrays, in order.

    `arrays` are its members, such as `source_1.npy`.
    """
    places = {}
    for match in filter(None, map(_ARRAY.fullmatch, arrays)):
        role, number = role_of(match[1])
        if role in roles:
            places[match[1]] = roles.index(role), number
    return sorted(places, key=places.__getitem__)


def is_mask(name: str) -> bool:
    """Return whether a role, or an image by its name, is of masks: `mask`, or `facemask`."""
    return name.partition("_")[0].endswith("mask")


def roles_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the roles in which samples of a dataset have further images."""
    return tuple(role for role in settings.get("roles", ()) if role != TARGET)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """An image as a source gives it, with its captions, its metadata and its further images.

    The first caption is the one to train on. If the image is to be fetched, `url` says from
    where, and `image` is empty until then. `images` are the further ones, in the order of their
    roles. `digests` are of the bytes that came, by their fields in the json.
    """

    source: str
    image: bytes
    captions: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    url: str = ""
    images: tuple[RoleImage, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_images(self) -> tuple[RoleImage, ...]:
        """Return the images in their order: the target, whose name is empty, and those in roles."""
        return (RoleImage("", self.image, self.url), *self.images)

    @property
    def caption(self) -> str:
        return self.captions[0] if self.captions else ""

    @property
    def images_nbytes(self) -> int:
        """Return how many bytes the image and those in roles take."""
        return len(self.image) + sum([len(image.data) for image in self.images])
