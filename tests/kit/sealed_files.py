"""Files of datasets that somebody has changed and sealed again, so that their digests fit."""

import json
from pathlib import Path
from random import Random
from typing import Any

from blake3 import blake3

from tests.kit.fuzz.mutations import mutate, mutate_json, mutate_json_line
from wdsprep.dataset.file_names import MANIFEST, REMOVED
from wdsprep.dataset.manifest import Receipt
from wdsprep.dataset.sealed_json import hex_digest


def receipt_of_images(**changed: Any) -> Receipt:
    """Return a receipt of a slice that has nothing, but for what is changed."""
    said = {"dataset": "images", "unit": "000000", "generation": 0, "settings": {"buckets": [64]}}
    return Receipt(**(said | {"input": "", "inputs": 0, "shards": (), "rejects": {}} | changed))


_LENGTH = len(b'{"digest":"","') - 2 + 64 + 1


def unsealed(data: bytes) -> bytes:
    """The JSON of a sealed file, without its digest."""
    return b"{" + data[_LENGTH:]


def sealed(body: bytes) -> bytes:
    """A file that says it is whole, whatever its JSON says."""
    rest = body.rstrip(b"\n")[1:] + b"\n"
    return b'{"digest":"' + hex_digest(rest).encode() + b'",' + rest


def resealed(data: bytes, change: Any) -> bytes:
    """A manifest or receipt of which `change` has changed the JSON, keys in their order."""
    body = json.loads(unsealed(data))
    body = change(body) or body
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return sealed(text.encode())


def mutate_sealed(data: bytes, rng: Random) -> bytes:
    """Change values of a manifest or receipt, or its bytes, and seal it again."""
    body = unsealed(data)
    if rng.random() < 0.15:
        return sealed(mutate(body, rng))
    changed = mutate_json(body, rng)
    if rng.random() < 0.5 and b"[[[[" not in changed:  # as wdsprep writes it
        text = json.dumps(json.loads(changed), sort_keys=True, separators=(",", ":"))
        changed = text.encode()
    return sealed(changed)


def mutate_settings(root: Path, rng: Random) -> None:
    """Change a value of a dataset's settings alike in its manifest and all receipts."""
    before = json.loads(unsealed((root / MANIFEST).read_bytes()))["settings"]
    changed = mutate_json(json.dumps(before).encode(), rng, times=1)
    settings = before if b"[[[[" in changed else json.loads(changed)  # no parser reads that deep
    for path in (root / MANIFEST, *root.glob("receipts/**/*.json")):
        path.write_bytes(resealed(path.read_bytes(), lambda body: {**body, "settings": settings}))


def mutate_removed(data: bytes, rng: Random) -> bytes:
    head, _, marks = data.partition(b"\n")[2].partition(b"\n")
    if rng.random() < 0.2:
        marks = mutate(marks, rng)
    body = mutate_json(head, rng).replace(b"\n", b" ") + b"\n" + marks
    return blake3(body).hexdigest().encode() + b"\n" + body


def mutate_file(path: Path, name: str, rng: Random) -> None:
    """Change a file of a dataset so that what vouches for it fits it."""
    data = path.read_bytes()
    if name == MANIFEST or name.startswith("receipts/"):
        path.write_bytes(mutate_sealed(data, rng))
    elif name == REMOVED:
        path.write_bytes(mutate_removed(data, rng))
    elif name.endswith((".jsonl", ".json")) and data:
        path.write_bytes((mutate_json_line if name.endswith("l") else mutate_json)(data, rng))
        _vouch(path, name)
    else:
        path.write_bytes(mutate(data, rng))
        _vouch(path, name)


def _vouch(path: Path, name: str) -> None:
    """Let receipts and the manifest have the digest that a file has now."""
    root = path.parents[name.count("/")]
    unit = name.rpartition(".")[0].partition("/")[2]
    for each in (
        MANIFEST,
        *(p.relative_to(root).as_posix() for p in root.glob("receipts/**/*.json")),
    ):
        place = root / each

        def change(body: dict[str, Any]) -> None:
            for said in body.get("units", [body]):
                if name in said["files"]:
                    said["files"][name] = hex_digest(path.read_bytes())
                if name.startswith("inputs/") and said["unit"] == unit:
                    said["input"] = hex_digest(path.read_bytes())

        place.write_bytes(resealed(place.read_bytes(), change))
