"""Datasets that other libraries write, by these libraries: `python -m tests.kit.foreign_sets OUT`.

A program of its own, so that their imports and warnings stay out of the tests. What lies where:

    images/mds-KIND       MDS with images in a column of that kind, each compressed in another way
    images/datasets       a DatasetDict of two splits, one of them in two files
    latents/mosaicml      MDS of bytes, as mosaicml/diffusion caches
    latents/prx           MDS of arrays, moments as mean and standard deviation, text as it is long
    latents/mlperf        `datasets` with moments and text, bfloat16 as uint16
    latents/mlperf.parquet
    latents/primus        tars with torch.save
    latents/sana          tars of wids with .npy and json
"""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Array3D, Dataset, DatasetDict, Features, Image, Sequence, Value
from PIL import Image as Pictures
from streaming import MDSWriter

from tests.kit.latent_sets import npy
from tests.kit.packs import jpeg, tar_bytes

COUNT = 12
MDS_KINDS = {
    "jpeg": ("zstd:7", ["sha1", "xxh64"]),
    "pil": (None, ["sha256"]),
    "bytes": ("br", None),
    "png": ("gz", ["md5"]),
}
"""By the kind of the column of images: how shards are compressed, and which digests they have."""


def values(number: int, shape: tuple[int, ...], name: str = "") -> "np.ndarray[Any, Any]":
    """What a cached array of a sample holds: halves of whole numbers, which all dtypes can hold."""
    rng = np.random.default_rng([number, len(shape), *name.encode()])
    return (rng.integers(-8, 8, shape) / 2).astype(np.float32)


def as_bits(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """bfloat16, as those keep it whose files have no such type."""
    return (array.view(np.uint32) >> 16).astype(np.uint16)


def caption(number: int) -> str:
    return f"picture {number}"


def picture(number: int) -> Pictures.Image:
    return Pictures.open(io.BytesIO(jpeg(number)))


def write_mds(
    out: Path,
    columns: dict[str, str],
    rows: Iterator[dict[str, Any]],
    size_limit: int = 30_000,
    **more: Any,
) -> None:
    with MDSWriter(out=str(out), columns=columns, size_limit=size_limit, **more) as writer:
        for row in rows:
            writer.write(row)


def mds_images(out: Path) -> None:
    for kind, (compression, hashes) in MDS_KINDS.items():
        rows = (
            {
                "image": jpeg(n) if kind == "bytes" else picture(n),
                "caption": caption(n),
                "width": n,
                "score": n / 2,
                "more": {"tags": [n]},
                "clip": values(n, (4,)),
            }
            for n in range(COUNT)
        )
        columns = {"image": kind, "caption": "str", "width": "int", "score": "float32"}
        columns |= {"more": "json", "clip": "ndarray:float32:4"}
        write_mds(out / f"mds-{kind}", columns, rows, compression=compression, hashes=hashes)


def datasets_images(out: Path) -> None:
    def split(first: int, last: int) -> Dataset:
        numbers = range(first, last)
        rows = {
            "image": [{"bytes": jpeg(n), "path": f"{n}.jpg"} for n in numbers],
            "text": [caption(n) for n in numbers],
            "n": [*numbers],
        }
        features = {"image": Image(), "text": Value("string"), "n": Value("int64")}
        return Dataset.from_dict(rows, features=Features(features))

    both = DatasetDict({"train": split(0, 8), "test": split(8, COUNT)})
    both.save_to_disk(str(out / "datasets"), num_shards={"train": 2, "test": 1})


def mosaicml(out: Path) -> None:
    half = np.float16
    rows = (
        {
            "caption": caption(n),
            "caption_latents": values(n, (77, 8), "emb").astype(half).tobytes(),
            "latents_256": values(n, (4, 32, 32), "256").astype(half).tobytes(),
            "latents_512": values(n, (4, 64, 64), "512").astype(half).tobytes(),
        }
        for n in range(COUNT)
    )
    columns = {"caption": "str"} | dict.fromkeys(("caption_latents", "latents_256"), "bytes")
    write_mds(out / "mosaicml", columns | {"latents_512": "bytes"}, rows, 200_000, hashes=["sha1"])


def prx(out: Path) -> None:
    """The second half of the moments is a standard deviation. Text is as long as it is."""
    rows = (
        {
            "caption": caption(n),
            "img_latent": np.concatenate(
                [values(n, (4, 8, 8), "mean"), 0.5 + np.abs(values(n, (4, 8, 8), "std"))]
            ),
            "latent_caption_t5": as_bits(values(n, (3 + n, 6), "emb")),
            "attention_mask_caption_t5": (np.arange(16) < 3 + n).astype(np.uint8),
            "original_height": 100 + n,
        }
        for n in range(COUNT)
    )
    columns = {"caption": "str", "img_latent": "ndarray", "original_height": "int32"}
    columns |= dict.fromkeys(("latent_caption_t5", "attention_mask_caption_t5"), "ndarray")
    write_mds(out / "prx", columns, rows)


def mlperf(out: Path) -> None:
    numbers = range(COUNT)
    rows = {
        "t5_encodings": [as_bits(values(n, (5, 8), "t5")) for n in numbers],
        "clip_encodings": [as_bits(values(n, (6,), "clip")) for n in numbers],
        "mean": [as_bits(values(n, (4, 8, 8), "mean")) for n in numbers],
        "logvar": [as_bits(values(n, (4, 8, 8), "logvar")) for n in numbers],
        "timestep": [n % 8 for n in numbers],
    }
    features = Features(
        {
            "t5_encodings": Sequence(Sequence(Value("uint16"))),
            "clip_encodings": Sequence(Value("uint16")),
            "mean": Array3D((4, 8, 8), "uint16"),
            "logvar": Array3D((4, 8, 8), "uint16"),
            "timestep": Value("int32"),
        }
    )
    made = Dataset.from_dict(rows, features=features)
    made.save_to_disk(str(out / "mlperf"), num_shards=2)
    made.to_parquet(str(out / "mlperf.parquet"))


def saved(array: "np.ndarray[Any, Any]") -> bytes:
    data = io.BytesIO()
    torch.save(torch.from_numpy(array).to(torch.bfloat16), data)
    return data.getvalue()


def write_tars(out: Path, members: dict[str, dict[str, bytes]]) -> None:
    out.mkdir(parents=True)
    keys, half = [*members], len(members) // 2
    for number, some in enumerate((keys[:half], keys[half:])):
        named = ((f"{key}.{name}", data) for key in some for name, data in members[key].items())
        (out / f"shard_{number}.tar").write_bytes(tar_bytes(named))


def primus(out: Path) -> None:
    def sample(n: int) -> dict[str, bytes]:
        return {
            "latents.pth": saved(values(n, (4, 8, 8), "latent")),
            "prompt_embeds.pth": saved(values(n, (5, 8), "t5")),
            "pooled_prompt_embeds.pth": saved(values(n, (6,), "clip")),
            "caption.txt": caption(n).encode(),
        }

    write_tars(out / "primus", {f"{n:010d}": sample(n) for n in range(COUNT)})


def sana(out: Path) -> None:
    def sample(n: int) -> dict[str, bytes]:
        said = {"prompt": caption(n), "height": 256, "width": 256 + n}
        return {
            "json": json.dumps(said).encode(),
            "npy": npy(values(n, (32, 8, 8), "latent").astype(np.float16)),
        }

    write_tars(out / "sana", {f"s{n:04d}": sample(n) for n in range(COUNT)})
    meta = {"name": "sana-dev", "wids_version": 1, "shardlist": []}
    (out / "sana/wids-meta.json").write_text(json.dumps(meta))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    for write in (mds_images, datasets_images):
        write(place / "images")
    for write in (mosaicml, prx, mlperf, primus, sana):
        write(place / "latents")
