"""Indexes for webshart, with which SimpleTuner reads image tars: a JSON for each, of its name.

An index says where each member begins and how long it is, and the size and captions of each image.
So webshart reads nothing but images from the tars, which stay where they are. It gets the place of
the indexes as `metadata=`. Of a local tar only headers and texts are read for an index.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wdsprep.exporting.layout import (
    Exportable,
    ExportSample,
    Layout,
    Writing,
    to_json,
)
from wdsprep.exporting.output import ExportedFile, Output


def layout(*, tower: str) -> "WebshartLayout":
    del tower
    return WebshartLayout()


@dataclass(frozen=True, kw_only=True)
class WebshartLayout:
    """The layout of indexes for webshart."""

    heads: bool = True
    arrays: tuple[str, ...] = ()

    def check(self, dataset: Exportable) -> Layout:
        dataset.check("webshart", "images")
        return self

    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        files: dict[str, dict[str, Any]] = {}
        count = end = 0
        for sample in samples:
            files |= entries(sample)
            count += 1
            end = max(offset + nbytes for offset, nbytes in sample.places.values())
            yield
        body = {
            "files": files,
            "filesize": -(-end // 512) * 512 + 1024,
            "includes_image_geometry": True,
            "path": f"{unit}.tar",
        }
        out.write(f"{unit}.json", to_json(body), samples=count)

    def index(self, files: Sequence[ExportedFile]) -> Mapping[str, bytes]:
        del files  # each tar has its own
        return {}


def entries(sample: ExportSample) -> dict[str, dict[str, Any]]:
    """Return the entries of an index for the image and the json of a sample.

    Captions are in the entry of the image, where webshart itself puts them: some of its versions
    take a text file beside an image for a sample.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, (offset, nbytes) in sample.places.items():
        if name == "txt":
            continue
        entry: dict[str, Any] = {"length": nbytes, "offset": offset}
        if name != "json":
            width, height = sample.number("width"), sample.number("height")
            several = sample.facts.get("captions")
            entry |= {"aspect": width / height, "height": height, "width": width}
            entry["captions"] = several if several and len(several) > 1 else sample.caption
        found[f"{sample.key}.{name}"] = entry
    return found
