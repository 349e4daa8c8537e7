"""Tars as other programs read them, and metadata for programs that read ours where they are."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from wdsprep.dataset.file_names import index_name, is_table
from wdsprep.dataset.npy_arrays import EMB, LATENT, POOLED
from wdsprep.dataset.samples import facts_bytes
from wdsprep.dataset.sealed_json import canonical_json
from wdsprep.dataset.shapes import cut_size
from wdsprep.dataset.tar.write import Buffer, TarWriter
from wdsprep.errors import UsageError
from wdsprep.exporting.layout import (
    Exportable,
    ExportedFile,
    ExportSample,
    Layout,
    Output,
    Writing,
    json_line,
    save_by_torch,
    to_tensor,
)
from wdsprep.importing import column_names
from wdsprep.store.base import local_path
from wdsprep.store.schemes import root_and_name

NV_META = ".nv-meta"
_BRACES = re.compile(r"([\\{},])")
META = "wids-meta.json"
DECODED = ("jpg", "png")


Members = list[tuple[str, Buffer]]


def write_tar(
    out: Output, unit: str, samples: Iterable[tuple[str, Members]], *, is_indexed: bool = False
) -> Writing:
    """Write samples into a tar, with its index beside it if asked for. Yield after each sample."""
    name = f"{unit}.tar"
    with out.open(name) as file, TarWriter(file, hashed=False) as tar:
        for key, members in samples:
            tar.add(key, members)
            yield
        tar.finish()
        file.samples = tar.samples
    if is_indexed:
        out.write(index_name(name), tar.index)


# --- Energon
def metadata_beside(dataset: Exportable, out: str) -> dict[str, bytes]:
    """Return the files by which Energon reads the tars of a dataset where they are, by name.

    `.nv-meta` lists the tars, the number of samples of each, and which of them are for training. It
    says that a sample is a dict of its members (`CrudeWebdataset`). Energon finds a tar by its path
    from the folder that has `.nv-meta`. So that folder may be the dataset itself, or one from which
    a relative path leads there. `energon prepare` also makes a table of all members of all tars,
    for datasets that Energon joins; its `--tar-index-only` makes it.

    Raise UsageError if the dataset has no tars.
    """
    if any(map(is_table, dataset.shards)):
        raise UsageError(
            f"{dataset.url} has scores without embeddings, so no tars for Energon: give --to mds "
            "or --to parquet"
        )
    way = path_between(out, dataset.url)
    return metadata_files({f"{way}{name}": n for name, n in dataset.shards.items()}, {})


def path_between(out: str, dataset: str) -> str:
    """Return the relative path from a place to a dataset, with a slash at its end.

    It is "" if both are the same place. Raise UsageError if no path leads there.
    """
    places = [local_path(url) for url in (out, dataset)]
    if None in places:
        (ours, to), (theirs, at) = root_and_name(out), root_and_name(dataset)
        if ours != theirs:
            raise UsageError(
                f"Energon finds tars by their paths from its metadata, and none leads from {out} "
                f"to {dataset}: give a place on the same disk or in the same bucket, or none, for "
                "the dataset itself"
            )
        places = [f"/{to}", f"/{at}"]
    way = os.path.relpath(str(places[1]), str(places[0]))
    return "" if way == "." else f"{way}/"


def metadata_files(counts: Mapping[str, int], subflavors: Mapping[str, str]) -> dict[str, bytes]:
    """Return the bytes of the metadata files by name. They are JSON, which is also YAML.

    `counts` has the number of samples of each tar, by its path.
    """
    named = [_BRACES.sub(r"\\\1", name) for name in counts]
    config = {"__class__": "CrudeWebdataset", "__module__": "megatron.energon"}
    parts = {"split_parts": {"test": [], "train": named, "val": []}}
    return {
        f"{NV_META}/dataset.yaml": json_line({**config, "subflavors": dict(subflavors)}),
        f"{NV_META}/split.yaml": json_line(parts),
        f"{NV_META}/.info.json": json_line({"shard_counts": dict(counts)}),
    }


class PrimusLayout(Layout):
    """The layout of tars for AMD's Primus: Energon tars of tensors that `torch.save` wrote.

    Primus needs latents, a prompt embedding and a pooled embedding, as Flux has them, in bfloat16.
    If the moments of latents were kept, it gets `mean` and `logvar` instead, and samples the
    latents itself. It stacks arrays into batches, so an embedding of variable length is padded with
    zeros.
    """

    takes, needs = ("latents",), (LATENT, EMB, POOLED)

    def __init__(self, dataset: Exportable) -> None:
        super().__init__(dataset)
        if dataset.has_shapes:
            raise UsageError(
                f"{dataset.url} has latents of several shapes, and Primus stacks samples into "
                "batches whatever their shape: encode without --shapes"
            )
        self.has_moments, self.length = dataset.has_moments, dataset.fields[EMB].shape[0]

    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        members = ((sample.key, self.members(sample)) for sample in samples)
        return write_tar(out, unit, members, is_indexed=True)

    def members(self, sample: ExportSample) -> Members:
        latents, emb = sample.bits(LATENT), sample.bits(EMB)
        arrays = {column_names.LATENT: latents}
        if self.has_moments:
            mean, logvar = latents.reshape(2, -1, *latents.shape[1:])
            arrays = {column_names.MEAN: mean, column_names.LOGVAR: logvar}
        padding = np.zeros((self.length - len(emb), *emb.shape[1:]), emb.dtype)
        arrays[column_names.EMB] = np.concatenate([emb, padding])
        arrays[column_names.POOLED] = sample.bits(POOLED)
        saved = [(column_names.PRIMUS[r], save_by_torch(to_tensor(a))) for r, a in arrays.items()]
        return [*saved, ("caption.txt", sample.caption.encode())]

    def index(self, files: Sequence[ExportedFile]) -> Mapping[str, bytes]:
        tars = {file.name: file.samples for file in files if file.samples}
        return metadata_files(tars, {"encoding": "preencoded"})


# --- wids and webshart
class WidsLayout(Layout):
    """The layout of tars with an index for `wids`, webdataset's reader with random access.

    It has what Sana needs: Sana takes the caption of a sample from `prompt` of its json, and its
    size from `height` and `width`: for latents this is the size in pixels of the crop that was
    encoded. Latents stay `.npy` files, and images stay as they are, but `wids` does not decode
    WebP.
    """

    takes, takes_moments = ("images", "latents"), False

    def __init__(self, dataset: Exportable) -> None:
        super().__init__(dataset)
        self.arrays = (LATENT,) if dataset.what == "latents" else ()

    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        return write_tar(out, unit, ((sample.key, self.members(sample)) for sample in samples))

    def members(self, sample: ExportSample) -> Members:
        facts = {**sample.facts, "prompt": sample.caption}
        if self.arrays:
            data = ("npy", sample.members[LATENT])
            facts["width"], facts["height"] = cut_size(sample.facts)
        else:
            data = sample.image
            if data[0] not in DECODED:
                raise UsageError(
                    f"{sample.key} is a {data[0]}, which wids does not decode: pack with "
                    "--reencode jpg:95"
                )
        return [("json", facts_bytes(facts)), data]

    def index(self, files: Sequence[ExportedFile]) -> Mapping[str, bytes]:
        shards = [{"filesize": f.nbytes, "nsamples": f.samples, "url": f.name} for f in files]
        return {META: json_line({"shardlist": shards, "wids_version": 1})}


class WebshartLayout(Layout):
    """The layout of indexes for webshart, with which SimpleTuner reads image tars.

    An index is a JSON with the name of its tar. It says where each member begins and how long it
    is, and the size and captions of each image. So webshart reads nothing but images from the tars,
    which stay where they are. It gets the place of the indexes as `metadata=`. Of a local tar only
    headers and texts are read for an index.
    """

    heads = True
    takes = ("images",)

    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        files: dict[str, dict[str, Any]] = {}
        count = end = 0
        for sample in samples:
            count += 1
            for name, (offset, nbytes) in sample.places.items():
                end = max(end, offset + nbytes)
                if name == "txt" or "." in name:  # an image in a role is no sample
                    continue
                entry = files[f"{sample.key}.{name}"] = {"length": nbytes, "offset": offset}
                if name != "json":
                    width, height = sample.number("width"), sample.number("height")
                    entry |= {"aspect": width / height, "height": height, "width": width}
                    several = sample.facts.get("captions")
                    # Where webshart itself puts captions: some of its versions take a text file
                    # beside an image for a sample.
                    has_several = several and len(several) > 1
                    entry["captions"] = several if has_several else sample.caption
            yield
        body = {
            "files": files,
            "filesize": -(-end // 512) * 512 + 1024,
            "includes_image_geometry": True,
            "path": f"{unit}.tar",
        }
        out.write(f"{unit}.json", canonical_json(body), samples=count)
