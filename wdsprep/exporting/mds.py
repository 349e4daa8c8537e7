"""Shards as MosaicML's `streaming` reads them (MDS), with the columns that PRX asks for.

An MDS file has the number of its samples, the offset of each, the columns, then the samples. A
sample is the lengths of its columns of varying length, then the values of all columns. So all
samples have to be known before the first byte, and a file is made in memory: a tar becomes files of
at most 64 MB, as `streaming` makes them itself. `index.json` lists them with their digests.

PRX scales latents itself, and draws them from a mean and a standard deviation: `img_latent` has
both, as the VAE gives them. If one latent of each sample was kept, it is unscaled and its deviation
is 0. MDS has no bfloat16, so those arrays are float32, which holds the same values. An embedding of
variable length has a mask of the full length beside it.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.npy_arrays import (
    BFLOAT16,
    EMB,
    FLIPPED,
    GIVEN,
    LATENT,
    MASK,
    denormalise,
    is_imported,
)
from wdsprep.dataset.sealed_json import canonical_json
from wdsprep.dataset.tar.write import Buffer, Data, join_small, nbytes_of, pieces_of
from wdsprep.errors import UsageError
from wdsprep.exporting.layout import (
    Exportable,
    ExportedFile,
    ExportSample,
    Layout,
    Output,
    Writing,
    json_line,
)

INDEX = "index.json"
FILE_NBYTES = 1 << 26
HASH = "sha256"
NAMED = {"<f2": "float16", "<f4": "float32", "<i4": "int32", "|u1": "uint8", BFLOAT16: "float32"}
IMAGES = {LATENT: "img_latent", FLIPPED: "img_latent_flipped"}
INT, TEXT, BYTES = "int", "str", "bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of an MDS file.

    `member` is the array that it is made of, if any. `shape` is empty if samples have different
    shapes.
    """

    name: str
    kind: str
    member: str = ""
    shape: tuple[int, ...] = ()

    @property
    def encoding(self) -> str:
        if not self.member or self.kind == BYTES:
            return self.kind
        shape = f":{','.join(map(str, self.shape))}" if self.shape else ""
        return f"ndarray:{self.kind}{shape}"

    @property
    def size(self) -> int | None:
        """Return how many bytes a value takes, or None if samples differ in that."""
        if self.kind == INT:
            return 8
        return int(np.prod(self.shape)) * np.dtype(self.kind).itemsize if self.shape else None

    def encode(self, array: NDArray[Any]) -> Data:
        """Return the bytes of an array.

        If shapes vary, they begin with the number of dimensions, and in two bits the width of the
        sizes, which follow.
        """
        data = array.astype(self.kind, order="C", copy=False).data.cast("B")
        if self.shape:
            return data
        wide = max(array.shape) > 255
        sizes = struct.pack(f"<{array.ndim}{'I' if wide else 'B'}", *array.shape)
        return bytes([array.ndim << 2 | (2 if wide else 0)]) + sizes, data


class MdsLayout(Layout):
    """The layout of MDS shards."""

    def __init__(self, dataset: Exportable) -> None:
        super().__init__(dataset)
        if not dataset.tower.isprintable():
            raise UsageError(f"--tower {dataset.tower!r}: give a name, such as t5")
        if dataset.settings.get("latents") == GIVEN:
            raise UsageError(
                f"{dataset.url} has imported latents of unknown scale, and --to mds needs latents "
                "as the VAE gives them: encode the images, or give another --to"
            )
        tower, settings = dataset.tower or dataset.model, dataset.settings
        mask = f"attention_mask_caption_{tower}"
        names = {**IMAGES, EMB: f"latent_caption_{tower}", MASK: mask}
        columns = [Column(name=name, kind=TEXT) for name in ("caption", "key")]
        sides = ("height", "width")
        if dataset.kind == "images":
            columns.append(Column(name="image", kind=BYTES, member="image"))
            columns += [Column(name=side, kind=INT) for side in sides]
        if dataset.kind == "images" or (dataset.what == "latents" and not is_imported(settings)):
            columns += [Column(name=f"original_{side}", kind=INT) for side in sides]
        self.length = 0
        """The length of a mask beside embeddings of variable length."""
        for field in dataset.fields.values():
            kind, shape = NAMED[field.dtype], () if field.is_variable else field.shape
            if field.name in IMAGES:  # a mean and a deviation, as the VAE gives them
                kind, patch = "float16", settings.get("patch", 1)
                if not dataset.has_moments:
                    channels, height, width = shape
                    shape = 2 * channels // patch**2, height * patch, width * patch
                shape = () if dataset.has_shapes else shape
            name = names.get(field.name, field.name.removesuffix(".npy"))
            columns.append(Column(name=name, kind=kind, member=field.name, shape=shape))
            if field.is_variable and field.name == EMB:
                self.length = field.shape[0]
                columns.append(Column(name=mask, kind="uint8", member=MASK, shape=(self.length,)))
        self.settings, self.arrays = settings, tuple(dataset.fields)
        self.columns = sorted(columns, key=lambda column: column.name)

    # --- a shard
    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        waiting: list[tuple[Buffer, ...]] = []
        nbytes = 0
        for sample in samples:
            pieces = self.encode_sample(sample)
            size = nbytes_of(pieces) + 4
            if waiting and nbytes + size > FILE_NBYTES:
                self._write_file(out, unit, waiting)
                waiting, nbytes = [], 0
            waiting.append(pieces)
            nbytes += size
            yield
        if waiting:
            self._write_file(out, unit, waiting)

    def _write_file(self, out: Output, unit: str, samples: Sequence[tuple[Buffer, ...]]) -> None:
        config = canonical_json(self._config())
        start = 4 * (len(samples) + 2) + len(config)
        offsets = [start]
        for sample in samples:
            offsets.append(offsets[-1] + nbytes_of(sample))
        head = struct.pack(f"<I{len(offsets)}I", len(samples), *offsets)
        digest = hashlib.new(HASH)
        with out.open(f"{unit}.{len(out.files):05d}.mds") as file:
            for part in chain((head, config), *samples):
                digest.update(part)
                file.write(part)
            file.samples, file.digests = len(samples), {HASH: digest.hexdigest()}

    def _config(self) -> dict[str, Any]:
        return {
            "column_encodings": [column.encoding for column in self.columns],
            "column_names": [column.name for column in self.columns],
            "column_sizes": [column.size for column in self.columns],
            "compression": None,
            "format": "mds",
            "hashes": [HASH],
            "size_limit": FILE_NBYTES,
        }

    def encode_sample(self, sample: ExportSample) -> tuple[Buffer, ...]:
        """Encode a sample in few pieces. Large arrays are not copied."""
        parts = [self._value(column, sample) for column in self.columns]
        varying = [
            nbytes_of(part)
            for part, column in zip(parts, self.columns, strict=True)
            if not column.size
        ]
        head = struct.pack(f"<{len(varying)}I", *varying)
        return tuple(join_small(chain([head], *map(pieces_of, parts))))

    def _value(self, column: Column, sample: ExportSample) -> Data:
        """Return the bytes of a sample in a column.

        A latent becomes a mean and a standard deviation, as the VAE gives them. If one latent was
        kept, it is unscaled and taken for the mean, and the deviation is 0.
        """
        if column.kind == INT:
            return struct.pack("<q", sample.number(column.name))
        if column.kind == TEXT:
            return (sample.caption if column.name == "caption" else sample.key).encode()
        if column.kind == BYTES:
            return sample.image[1]
        if column.member == MASK and self.length:
            is_token = np.arange(self.length) < len(sample.stored(EMB))
            return column.encode(is_token.astype("u1"))
        array = sample.values(column.member)
        if column.member in IMAGES:
            values = array.astype("<f4")
            if self.settings.get("latents") == "moments":
                mean, logvar = np.split(values, 2)
                array = np.concatenate([mean, np.exp(0.5 * logvar)])
            else:
                mean = denormalise(values, self.settings)
                array = np.zeros((2 * len(mean), *mean.shape[1:]), "<f2")
                array[: len(mean)] = mean
        return column.encode(array)

    def index(self, files: Sequence[ExportedFile]) -> Mapping[str, bytes]:
        shards = []
        for file in files:
            data = {"basename": file.name, "bytes": file.nbytes, "hashes": dict(file.digests)}
            about = {"raw_data": data, "samples": file.samples, "version": 2, "zip_data": None}
            shards.append(self._config() | about)
        return {INDEX: json_line({"shards": shards, "version": 2})}
