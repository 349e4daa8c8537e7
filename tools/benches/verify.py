"""`verify` beside `sha256sum` and `cat` over the same tars, with as many processes.

Images of 60 KB with caption and json, and latents with embeddings of 168 KB. verify is measured as
a command with its start; it reads each byte once, and checks more than the hash.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from tools.benches import CORES, Group, Rival, Role, ours
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.dataset.manifest import Manifest, Receipt, Shard
from wdsprep.dataset.npy_arrays import Field, layout
from wdsprep.dataset.tar.write import TarWriter
from wdsprep.store import open_store
from wdsprep.store.base import Store, write_bytes
from wdsprep.text import plural

SHARDS, NBYTES = 4, 1_000_000_000
CAPTION = "a photograph of something that has about this many words to it"
FIELDS = (
    Field(name="latent.npy", dtype="<f2", shape=(4, 32, 32)),
    Field(name="emb.npy", dtype="<f2", shape=(77, 1024)),
)
Members = list[tuple[str, bytes]]


def groups(home: Path, scale: float) -> Iterator[Group]:
    for dataset, sample in (("images", image), ("latents", latent)):
        folder = home / dataset
        nbytes = make(folder, dataset, sample, round(NBYTES * scale))
        for processes in (1, CORES):
            yield Group(
                name=f"verify-{dataset}-{processes}",
                title=f"verify {dataset}, {plural(processes, 'process', 'processes')}",
                unit="MB",
                count=nbytes / 1e6,
                rivals=[
                    Rival(
                        name="wdsprep verify",
                        command=ours("verify", folder, "--workers", str(processes)),
                        role=Role.OURS,
                    ),
                    _program("sha256sum", folder, processes),
                    _program("cat", folder, processes, Role.LIMIT),
                ],
                targets={"sha256sum": 3.0} if processes == 1 else {"cat": 1.0},
            )


def _program(name: str, folder: Path, processes: int, role: Role = Role.RIVAL) -> Rival:
    tars = f"find {folder} -name '*.tar' -print0 | xargs -0 -n1 -P{processes} {name} > /dev/null"
    return Rival(name=name, command=["sh", "-c", tars], role=role)


def image(key: str) -> Members:
    facts = {
        "bucket": 256,
        "caption": CAPTION,
        "changes": [],
        "height": 300,
        "key": key,
        "meta": {"aesthetic": 5.1, "similarity": 0.31},
        "source": f"part-00000.parquet#{key}",
        "original_height": 300,
        "original_width": 400,
        "width": 400,
    }
    picture = b"\xff\xd8\xff" + os.urandom(60_000)
    return [("jpg", picture), ("json", json.dumps(facts).encode()), ("txt", CAPTION.encode())]


def latent(key: str) -> Members:
    facts = {
        "caption": CAPTION,
        "crop": [0, 0, 256, 256],
        "cut": False,
        "key": key,
        "source": key,
        **dict.fromkeys(("original_width", "original_height", "width", "height"), 300),
        **dict.fromkeys(("scaled_width", "scaled_height", "tokens"), 256),
    }
    finite = bytes(range(60)) * 4  # no pair of these is an infinity or a not-a-number
    arrays = [
        (field.name, field.header + (finite * field.array_nbytes)[: field.array_nbytes])
        for field in FIELDS
    ]
    return [*arrays, ("json", json.dumps(facts).encode()), ("txt", CAPTION.encode())]


def make(folder: Path, dataset: str, sample: Callable[[str], Members], nbytes: int) -> int:
    """A dataset of SHARDS shards as pack or encode would have left it; the bytes of its tars."""
    store = open_store(str(folder))
    settings: dict[str, object] = {"buckets": [256], "source": "folder"}
    if dataset == "latents":
        settings = {"layout": layout(FIELDS), "resolution": 256}
    receipts = []
    for number in range(SHARDS):
        slice_name = f"{number:06d}"
        unit = slice_name if dataset == "images" else f"256/{slice_name}"
        shard = write_shard(store, slice_name, sample, nbytes // SHARDS)
        write_bytes(store, f"rejects/{unit}.jsonl", b"")
        if dataset == "images":
            write_bytes(store, f"inputs/{unit}.jsonl", b"")
        nothing = blake3(b"").hexdigest()
        receipt = Receipt(
            dataset=dataset,
            unit=unit,
            generation=0,
            settings=settings,
            input=nothing,
            inputs=shard.samples,
            shards=(shard,),
            rejects={},
            files={f"rejects/{unit}.jsonl": nothing} | empty(store, dataset),
        )
        write_bytes(store, f"receipts/{unit}.json", receipt.to_bytes())
        receipts.append(receipt)
    manifest = Manifest(dataset=dataset, settings=settings, receipts=tuple(receipts), complete=True)
    write_bytes(store, MANIFEST, manifest.to_bytes())
    return sum(shard.nbytes for receipt in receipts for shard in receipt.shards)


def write_shard(
    store: Store, slice_name: str, sample: Callable[[str], Members], nbytes: int
) -> Shard:
    name = f"256/{slice_name}.tar"
    with store.write(name) as sink, TarWriter(sink) as tar:
        while tar.nbytes < nbytes:
            key = f"{slice_name}{tar.samples:06d}"
            tar.add(key, sample(key))
        tar.finish()
    write_bytes(store, f"{name}.idx", tar.index)
    return Shard(name=name, samples=tar.samples, nbytes=tar.nbytes, digest=tar.digest)


def empty(store: Store, dataset: str) -> dict[str, str]:
    if dataset == "images":
        return {}
    data = FIELDS[1].header + bytes(FIELDS[1].array_nbytes)
    write_bytes(store, "empty.emb.npy", data)
    return {"empty.emb.npy": blake3(data).hexdigest()}
