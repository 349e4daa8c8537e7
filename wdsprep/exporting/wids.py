"""Shards as `wids` reads them, with what Sana needs: `wids-meta.json`, and tars beside it.

Sana takes the caption of a sample from `prompt` of its json, and its size from `height` and
`width`: for latents this is the size in pixels of the crop that was encoded. Latents stay `.npy`
files, and images stay as they are, but `wids` does not decode WebP.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from wdsprep.dataset.npy_arrays import LATENT
from wdsprep.dataset.shapes import cut_size
from wdsprep.errors import UsageError
from wdsprep.exporting.layout import (
    Exportable,
    ExportSample,
    Layout,
    Members,
    Writing,
    to_json,
    write_tar,
)
from wdsprep.exporting.output import ExportedFile, Output

META = "wids-meta.json"
DECODED = ("jpg", "png")


def layout(*, tower: str) -> "WidsLayout":
    del tower
    return WidsLayout()


@dataclass(frozen=True, kw_only=True)
class WidsLayout:
    """The layout of tars with an index for `wids`, webdataset's reader with random access."""

    is_of_latents: bool = False
    heads: bool = False
    arrays: tuple[str, ...] = (LATENT,)

    def check(self, dataset: Exportable) -> Layout:
        dataset.check("wids", "images", "latents")
        if dataset.has_moments:
            raise UsageError(
                f"{dataset.url} has moments, and wids takes one latent of each sample: encode with "
                "--latents sample or mean"
            )
        return replace(self, is_of_latents=dataset.what == "latents")

    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        return write_tar(out, unit, samples, self.members)

    def members(self, sample: ExportSample) -> Members:
        facts = {**sample.facts, "prompt": sample.caption}
        if self.is_of_latents:
            data = ("npy", sample.members[LATENT])
            facts["width"], facts["height"] = cut_size(sample.facts)
        else:
            data = next(iter(sample.members.items()))
            if data[0] not in DECODED:
                raise UsageError(
                    f"{sample.key} is a {data[0]}, which wids does not decode: pack with "
                    "--reencode jpg:95"
                )
        return [("json", to_json(facts)), data]

    def index(self, files: Sequence[ExportedFile]) -> Mapping[str, bytes]:
        shards = [{"filesize": f.nbytes, "nsamples": f.samples, "url": f.name} for f in files]
        return {META: to_json({"shardlist": shards, "wids_version": 1}) + b"\n"}
