"""Folders of images with captions beside them, which most programs that train LoRAs read.

Each shard becomes a folder, or a folder for each number of `repeats` in it. The caption of an
image is in a text file with the same name, for sd-scripts, OneTrainer and ai-toolkit. It is also
in a line of the folder's `metadata.jsonl`, for the `imagefolder` of Hugging Face `datasets`, which
the scripts of diffusers load. The number before the underscore in the name of a folder tells sd-
scripts how often to show each image in an epoch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from wdsprep.dataset.tar.write import Buffer
from wdsprep.exporting.layout import (
    Exportable,
    ExportSample,
    Layout,
    Writing,
    to_json,
)
from wdsprep.exporting.output import ExportedFile, Output

METADATA = "metadata.jsonl"


def layout(*, tower: str) -> "ImageFolderLayout":
    del tower
    return ImageFolderLayout()


@dataclass(frozen=True, kw_only=True)
class ImageFolderLayout:
    """The layout of folders with images and captions."""

    heads: bool = False
    arrays: tuple[str, ...] = ()

    def check(self, dataset: Exportable) -> Layout:
        dataset.check("imagefolder", "images")
        return self

    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        lines: dict[str, list[bytes]] = {}
        for sample in samples:
            folder = folder_of(unit, sample)
            ((kind, data),) = sample.members.items()
            write_captioned(out, folder, sample, kind, data)
            row = {"file_name": f"{stem_of(sample)}.{kind}", "text": caption_line(sample)}
            lines.setdefault(folder, []).append(to_json(row) + b"\n")
            yield
        for folder, rows in lines.items():
            out.write(f"{folder}/{METADATA}", b"".join(rows))

    def index(self, files: Sequence[ExportedFile]) -> Mapping[str, bytes]:
        del files  # each folder has its own
        return {}


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


def write_captioned(
    out: Output, folder: str, sample: ExportSample, kind: str, image: Buffer
) -> None:
    """Write an image and its caption.

    The caption file ends with a line break even if it is empty: sd-scripts fails on empty files.
    """
    name = f"{folder}/{stem_of(sample)}"
    text = f"{caption_line(sample)}\n".encode()
    out.write(f"{name}.{kind}", image, samples=1)
    out.write(f"{name}.txt", text)
