"""What kohya's sd-scripts reads below its `--train_data_dir`, where latents are cached on disk.

It is in no package index, so this is written from its code of February 2026 (commit 48d368fa):
`DreamBoothDataset`, `BucketManager` and `make_bucket_resolutions` for which images there are, and
`load_latents_from_disk` and `load_outputs_npz` of its strategies for what is beside them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

IMAGES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
OUTPUTS = {
    "sdxl": ("_te_outputs.npz", ("hidden_state1", "hidden_state2", "pool2")),
    "flux": (
        "_flux_te.npz",
        ("l_pooled", "t5_out", "txt_ids", "t5_attn_mask", "apply_t5_attn_mask"),
    ),
}
Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class CachedImage:
    key: str
    repeats: int
    caption: str
    bucket: Size
    latents: Any
    flipped: Any
    original_size: list[int]
    crop_ltrb: list[int]
    outputs: Mapping[str, Any]


def cached_images(root: Path, family: str, *, resolution: int, step: int) -> Iterator[CachedImage]:
    """Yield the images with their caches.

    One without a latent of its bucket's size is an error: sd-scripts would encode it again, or fail
    on the batch."""
    buckets = buckets_of(resolution, step)
    for folder in sorted(root.iterdir()):
        repeats = re.match(r"(\d+)_", folder.name)
        if not folder.is_dir() or not repeats:
            continue
        for image in sorted(path for path in folder.iterdir() if path.suffix in IMAGES):
            (cache,) = folder.glob(f"{image.stem}_*_{family}.npz")
            width, height = map(int, cache.stem.split("_")[-2].split("x"))
            assert cache.name == f"{image.stem}_{width:04d}x{height:04d}_{family}.npz"
            bucket = bucket_of((width, height), buckets)
            places = (bucket[1] // 8, bucket[0] // 8)
            ending = f"_{places[0]}x{places[1]}" if family == "flux" else ""
            file = dict(np.load(cache))
            latents = file[f"latents{ending}"]
            assert latents.shape[1:] == places
            flipped = f"latents_flipped{ending}"
            yield CachedImage(
                key=image.stem,
                repeats=int(repeats[1]),
                caption=caption_of(image.with_suffix(".txt")),
                bucket=bucket,
                latents=latents,
                flipped=file.get(flipped),
                original_size=file[f"original_size{ending}"].tolist(),
                crop_ltrb=file[f"crop_ltrb{ending}"].tolist(),
                outputs=outputs_of(image, family),
            )


def conditioning_images(folder: Path, data_dir: Path) -> dict[str, Path]:
    """Return the image in `conditioning_data_dir` for each image of a folder, by its name.

    As in `ControlNetDataset`, one that is missing, or has no image to go with, is an error."""
    keys = {path.stem for path in folder.iterdir() if path.suffix in IMAGES}
    beside = {path.stem: path for path in data_dir.iterdir() if path.suffix in IMAGES}
    assert keys == beside.keys(), "missing or extra conditioning data"
    return beside


def caption_of(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert lines, "caption file is empty"
    return lines[0].strip()


def outputs_of(image: Path, family: str) -> dict[str, Any]:
    if family not in OUTPUTS:
        return {}
    ending, names = OUTPUTS[family]
    path = image.with_name(f"{image.stem}{ending}")
    return {name: np.load(path)[name] for name in names} if path.exists() else {}


def buckets_of(resolution: int, step: int) -> list[Size]:
    """Return those of a square resolution, with `--bucket_reso_steps` and no limit of a side."""
    found = {(resolution, resolution)}
    for width in range(step, resolution**2 // step + 1, step):
        height = resolution**2 // width // step * step
        found |= {(width, height), (height, width)}
    return sorted(found)


def bucket_of(size: Size, buckets: list[Size]) -> Size:
    if size in buckets:
        return size
    errors = [abs(width / height - size[0] / size[1]) for width, height in buckets]
    return buckets[errors.index(min(errors))]
