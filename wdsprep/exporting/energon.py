"""Metadata for Megatron Energon, which reads our tars and their indexes as they are.

`.nv-meta` lists the tars, the number of samples of each, and which of them are for training. It
says that a sample is a dict of its members (`CrudeWebdataset`). Energon finds a tar by its path
from the folder that has `.nv-meta`. So that folder may be the dataset itself, or one from which a
relative path leads there. `energon prepare` also makes a table of all members of all tars, for
datasets that Energon joins; its `--tar-index-only` makes it.
"""

import os
import re
from collections.abc import Mapping

from wdsprep.dataset.file_names import is_table
from wdsprep.errors import UsageError
from wdsprep.exporting.layout import Exportable, to_json
from wdsprep.store.base import local_path
from wdsprep.store.schemes import root_and_name

FOLDER = ".nv-meta"
_BRACES = re.compile(r"([\\{},])")


def metadata_beside(dataset: Exportable, out: str) -> dict[str, bytes]:
    """Return the files by which Energon reads the tars of a dataset where they are, by name.

    Raise UsageError if it has none.
    """
    if any(is_table(name) for name, _ in dataset.shards):
        raise UsageError(
            f"{dataset.url} has scores without embeddings, so no tars for Energon: give --to mds "
            "or --to parquet"
        )
    way = path_between(out, dataset.url)
    return metadata_files({f"{way}{name}": samples for name, samples in dataset.shards}, {})


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
        f"{FOLDER}/dataset.yaml": _file({**config, "subflavors": dict(subflavors)}),
        f"{FOLDER}/split.yaml": _file(parts),
        f"{FOLDER}/.info.json": _file({"shard_counts": dict(counts)}),
    }


def _file(body: object) -> bytes:
    return to_json(body) + b"\n"
