"""Image files with captions beside them, which most programs that train LoRAs read, and caches.

Each shard becomes a folder, or a folder for each number of `repeats` in it. The caption of an
image is in a text file with the same name, for sd-scripts, OneTrainer and ai-toolkit.
"""

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.npy_arrays import EMB, FLIPPED, LATENT, POOLED, denormalise
from wdsprep.dataset.samples import is_mask
from wdsprep.dataset.shapes import shape_name, shapes_of
from wdsprep.errors import UsageError
from wdsprep.exporting.layout import Exportable, ExportSample, Layout, Output, Writing, json_line

METADATA = "metadata.jsonl"
Arrays = dict[str, NDArray[Any]]
FAMILIES = {
    "StableDiffusionPipeline": "sd",
    "StableDiffusionXLPipeline": "sdxl",
    "FluxPipeline": "flux",
}
LATENTS = {LATENT: "latents", FLIPPED: "latents_flipped"}


class ImageFolderLayout(Layout):
    """The layout of folders with images and captions.

    The number before the underscore in the name of a folder tells sd-scripts how often to show each
    image in an epoch. `metadata.jsonl` has the captions of a folder once more, for the
    `imagefolder` of Hugging Face `datasets`, which the scripts of diffusers load.
    """

    takes = ("images",)

    def __init__(self, dataset: Exportable) -> None:
        super().__init__(dataset)
        self.roles = dataset.roles

    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        lines: dict[str, list[bytes]] = {}
        for sample in samples:
            folder = folder_of(unit, sample)
            row = {**write_images(out, folder, sample), "text": caption_line(sample)}
            lines.setdefault(folder, []).append(json_line(row))
            yield
        for folder, rows in lines.items():
            out.write(f"{folder}/{METADATA}", b"".join(rows))


def folder_of(unit: str, sample: ExportSample) -> str:
    """Return the folder for a sample of a unit, which says how often an epoch has the sample."""
    repeats = sample.facts.get("repeats")
    times = int(repeats) if isinstance(repeats, int) and repeats > 0 else 1
    return f"{times}_{unit.replace('/', '-')}"


def stem_of(sample: ExportSample) -> str:
    return sample.key.replace("/", "_")


def caption_line(sample: ExportSample) -> str:
    """Return the caption on one line: some readers take further lines for other captions."""
    return " ".join(sample.caption.split("\n")).replace("\r", "").strip()


def write_images(out: Output, folder: str, sample: ExportSample) -> dict[str, str]:
    """Write the image to train on with its caption, and further images in folders of their roles.

    The caption file ends with a line break even if it is empty: sd-scripts fails on empty files.
    Return the names of the images in the folder by the columns that `datasets` reads them from.
    """
    stem, (kind, image) = stem_of(sample), sample.image
    names = {"file_name": f"{stem}.{kind}"}
    out.write(f"{folder}/{stem}.{kind}", image, samples=1)
    out.write(f"{folder}/{stem}.txt", f"{caption_line(sample)}\n".encode())
    for name, kind, data in sample.in_roles:
        names[f"{name}_file_name"] = f"{name}/{stem}.{kind}"
        out.write(f"{folder}/{name}/{stem}.{kind}", data)
    return names


# --- with caches
class KohyaLayout(Layout):
    """The layout of images with the caches of sd-scripts: of latents, and of text.

    sd-scripts looks beside an image for `NAME_0832x1216_sdxl.npz`. It takes the size in that name
    for the image's, and so sorts the image into the bucket of the latent without opening it.
    Latents of SD and SDXL are as the VAE gives them, those of Flux as the transformer takes them.
    In the box of `crop_ltrb` and in `original_size` widths come first. An encoded mask is the
    `alpha_mask`, from 0 to 1, which sd-scripts scales to the grid of latents by area. The text
    embeddings that sd-scripts would make of a caption are in `NAME_te_outputs.npz` (SDXL) and
    `NAME_flux_te.npz`; it keeps no such file for SD.

    Written after what its `library/strategy_base.py`, `strategy_sd.py`, `strategy_sdxl.py` and
    `strategy_flux.py` read in February 2026 (commit 48d368fa).
    """

    takes_images = True
    takes = ("latents",)

    def __init__(self, dataset: Exportable) -> None:
        super().__init__(dataset)
        if not dataset.has_images:
            raise UsageError(
                f"{dataset.url} has no images, and sd-scripts looks for caches beside them: --join "
                "the images that it was made of"
            )
        self.family, self.settings = dataset.check_latents("sd-scripts", FAMILIES), dataset.settings
        # For a shape without a bucket, sd-scripts would take latents for those of another size.
        sizes, area = shapes_of(dataset.settings), int(dataset.settings["resolution"]) ** 2
        step = math.gcd(*(side for size in sizes for side in size))
        for width, height in sizes:
            is_bucket = height == area // width // step * step
            if not is_bucket and width != area // height // step * step:
                raise UsageError(
                    f"{dataset.url} has the shape {shape_name((width, height))}, for which "
                    "sd-scripts has no bucket: encode with --shapes nearest:64,2"
                )
        has_texts = self.family != "sd" and {EMB, POOLED} <= dataset.fields.keys()
        texts = {EMB, POOLED} if has_texts else set[str]()
        self.arrays = tuple(sorted(dataset.fields.keys() & {*LATENTS, *texts}))
        self.roles = dataset.roles

    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        for sample in samples:
            folder = folder_of(unit, sample)
            write_images(out, folder, sample)
            for ending, arrays in self.caches(sample).items():
                packed = io.BytesIO()
                np.savez(packed, **arrays)  # type: ignore[arg-type]
                out.write(f"{folder}/{stem_of(sample)}{ending}", packed.getvalue())
            yield

    def caches(self, sample: ExportSample) -> dict[str, Arrays]:
        """Return the arrays of each cache of a sample, by the end of its file name."""
        values = {name: sample.values(name) for name in self.arrays}
        width, height = sample.cut_size
        is_raw = self.family != "flux"
        latents = {LATENTS[n]: v.astype("<f4") for n, v in values.items() if n in LATENTS}
        if is_raw:
            latents = {n: denormalise(v, self.settings) for n, v in latents.items()}
        rows, cells = latents["latents"].shape[-2:]
        for mask in [role for role in self.roles if is_mask(role)][:1]:
            level = np.full((rows, cells), 255)  # without a mask, all of the image counts
            for name in sample.arrays_in([mask]):
                level = sample.values(name)
            latents["alpha_mask"] = level.astype("<f4") / 255
        original = [sample.number("original_width"), sample.number("original_height")]
        latents |= {"original_size": np.array(original)}
        latents |= {"crop_ltrb": np.array(sample.facts["crop"])}
        if not is_raw:  # Flux's file may hold an image at several resolutions
            latents = {f"{name}_{rows}x{cells}": array for name, array in latents.items()}
        caches = {f"_{width:04d}x{height:04d}_{self.family}.npz": latents}
        if EMB in values and self.family == "sdxl":
            second = len(values[POOLED])  # its encoder is as wide as the pooled vector
            caches["_te_outputs.npz"] = {
                "hidden_state1": values[EMB][:, :-second],
                "hidden_state2": values[EMB][:, -second:],
                "pool2": values[POOLED],
            }
        if EMB in values and self.family == "flux":
            # The mask hides nothing: T5 reads all of its length here. sd-scripts uses the mask only
            # with `--apply_t5_attn_mask`, for which it makes the file again.
            caches["_flux_te.npz"] = {
                "l_pooled": values[POOLED],
                "t5_out": values[EMB],
                "txt_ids": np.zeros((len(values[EMB]), 3), "<f4"),
                "t5_attn_mask": np.ones(len(values[EMB]), "<i8"),
                "apply_t5_attn_mask": np.array(False),
            }
        return caches
