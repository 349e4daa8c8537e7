"""Metadata for Megatron Energon, which reads our tars and their indexes as they are.

`.nv-meta` says which tars there are, how many samples each has, which of them are for training, and
that a sample is a dict of its members (`CrudeWebdataset`). Energon finds a tar by its name from the
folder that `.nv-meta` is in, so that may be the dataset itself, or one from which a relative path
leads there. What `energon prepare` also makes, a table of all members of all tars, is for datasets
that Energon joins; its `--tar-index-only` makes it.
"""

import os
import re
from collections.abc import Mapping

from wdsprep.errors import UsageError
from wdsprep.exporting.layout import Exportable, to_json
from wdsprep.store.base import local_path
from wdsprep.store.places import root_and_name

FOLDER = ".nv-meta"
_BRACES = re.compile(r"([\\{},])")


def beside(dataset: Exportable, out: str) -> dict[str, bytes]:
    """Return the metadata for a dataset whose tars stay where they are."""
    way = path_between(out, dataset.url)
    return metadata({f"{way}{name}": samples for name, samples in dataset.shards}, {})


def path_between(out: str, dataset: str) -> str:
    """Return the relative path from one place to the other, with a slash at its end."""
    places = [local_path(url) for url in (out, dataset)]
    if None in places:
        (ours, to), (theirs, at) = root_and_name(out), root_and_name(dataset)
        if ours != theirs:
            raise UsageError(
                f"Energon finds tars by their paths from its metadata, and none leads from {out} "
                f"to {dataset}: give a place on the same disk, in the same bucket or in the same "
                "dataset of the hub, or none, for the dataset itself"
            )
        places = [f"/{to}", f"/{at}"]
    way = os.path.relpath(str(places[1]), str(places[0]))
    return "" if way == "." else f"{way}/"


def metadata(counts: Mapping[str, int], subflavors: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files of metadata. They are JSON, all of which is YAML."""
    named = [_BRACES.sub(r"\\\1", name) for name in counts]
    config = {"__class__": "CrudeWebdataset", "__module__": "megatron.energon"}
    parts = {"split_parts": {"test": [], "train": named, "val": []}}
    return {
        f"{FOLDER}/dataset.yaml": _file({**config, "subflavors": dict(subflavors)}),
        f"{FOLDER}/split.yaml": _file(parts),
        f"{FOLDER}/.info.json": _file({"shard_counts": dict(counts)}),
    }


def _file(body: object) -> bytes:
    return to_json(body) + b"\n"
