"""Parquet tables for Hugging Face `datasets` and other readers: one for each shard.

Images are in a column `image` of the kind that `datasets` decodes, beside the caption, all
captions, the size and the json. Arrays are `.npy` files in columns with their names. The moments of
Flux latents, if both embeddings are there, get the columns of MLPerf's dataset instead:
`t5_encodings`, `clip_encodings`, `mean` and `logvar`, `.npy` files with the bits of bfloat16. Other
moments become `mean` and `logvar` too, beside the other arrays.

Nothing is compressed: images and arrays would hardly become smaller, at the cost of speed.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetWriter

from wdsprep.dataset.npy_arrays import EMB, FLIPPED, LATENT, POOLED, field_of
from wdsprep.dataset.samples import facts_bytes
from wdsprep.dataset.sealed_json import canonical_json
from wdsprep.dataset.settings import NUMBER, TEXT, WHOLE
from wdsprep.exporting.layout import Exportable, ExportSample, Layout, Output, Writing
from wdsprep.importing.column_names import MLPERF

GROUP_NBYTES = 64 << 20
"""The bytes of the rows that are kept in memory and written together."""
GROUP_ROWS = 1000
BATCH_ROWS = 8
"""The number of rows after which a page may end. Pages then have 1 MB: a page as large as a group
would be copied again and again while it grows."""
SMALL = ("key", "__key__", "width", "height")
"""The columns with statistics. The least and the greatest value of images would be whole images."""
FLUX = {LATENT, EMB, POOLED}
_STRING, _INT64 = ({"_type": "Value", "dtype": kind} for kind in ("string", "int64"))
FEATURES = {
    "image": {"_type": "Image"},
    **dict.fromkeys(("key", "caption", "json"), _STRING),
    "captions": {"_type": "List", "feature": _STRING},
    **dict.fromkeys(("width", "height"), _INT64),
}
"""The types of the columns of images as `datasets` writes them."""
MOMENTS = {LATENT: ("mean", "logvar"), FLIPPED: ("mean_flipped", "logvar_flipped")}


class ParquetLayout(Layout):
    """The layout of Parquet tables."""

    def __init__(self, dataset: Exportable) -> None:
        super().__init__(dataset)
        self.arrays = tuple(dataset.fields)
        is_flux = dataset.has_moments and {*self.arrays} == FLUX
        of_arrays = "mlperf" if is_flux else "moments" if dataset.has_moments else "arrays"
        self.kind = "images" if dataset.kind == "images" else of_arrays
        """What rows hold: images, arrays, moments or mlperf."""
        self.scores = {} if is_flux else dataset.columns
        """The columns of scores, with the kind of value that each holds."""

    def _columns(self, name: str) -> tuple[str, ...]:
        """Return the columns of an array.

        Moments become two columns, so that nobody takes them for latents.
        """
        if self.kind == "moments" and name in MOMENTS:
            return MOMENTS[name]
        return (name.removesuffix(".npy"),)

    def _schema(self) -> pa.Schema:
        if self.kind == "mlperf":
            arrays = ((name, pa.binary()) for name in MLPERF.values())
            return pa.schema([("__key__", pa.string()), *arrays])
        texts = [("key", pa.string()), ("caption", pa.string()), ("json", pa.string())]
        kinds = {NUMBER: pa.float64(), WHOLE: pa.int64(), TEXT: pa.string()}
        texts += [(name, kinds[holds]) for name, holds in self.scores.items()]
        if self.kind != "images":
            names = chain.from_iterable(map(self._columns, self.arrays))
            return pa.schema([*texts, *((name, pa.binary()) for name in names)])
        image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        sizes = [("width", pa.int64()), ("height", pa.int64())]
        several = ("captions", pa.list_(pa.string()))
        known = canonical_json({"info": {"features": FEATURES}})
        return pa.schema([("image", image), *texts, several, *sizes], {"huggingface": known})

    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        name, schema = f"{unit}.parquet", self._schema()
        rows: list[dict[str, Any]] = []
        nbytes = count = 0
        with out.open(name) as written:
            with ParquetWriter(
                written,
                schema,
                compression="NONE",
                use_dictionary=False,
                write_batch_size=BATCH_ROWS,
                write_statistics=[name for name in SMALL if name in schema.names],
            ) as file:
                for sample in samples:
                    if nbytes > GROUP_NBYTES or len(rows) >= GROUP_ROWS:
                        file.write_table(_table(rows, schema))
                        rows, nbytes = [], 0
                    rows.append(self.row(sample))
                    nbytes += sum(map(len, sample.members.values()))
                    count += 1
                    yield
                file.write_table(_table(rows, schema))
            written.samples = count

    def row(self, sample: ExportSample) -> dict[str, Any]:
        row: dict[str, Any] = {"__key__": sample.key}
        if self.kind == "mlperf":
            latent = sample.bits(LATENT)
            moments = latent.reshape(2, -1, *latent.shape[1:])
            arrays = sample.bits(EMB), sample.bits(POOLED), *moments
            for name, array in zip(MLPERF.values(), arrays, strict=True):
                out = io.BytesIO()
                np.save(out, np.ascontiguousarray(array))
                row[name] = out.getvalue()
            return row
        row = {
            "key": sample.key,
            "caption": sample.caption,
            "json": facts_bytes(sample.facts).decode(),
            **{name: sample.facts.get(name) for name in self.scores},
        }
        if self.kind != "images":
            for name in self.arrays:
                columns, data = self._columns(name), sample.members[name]
                parts = [data]
                if len(columns) > 1:  # a file of each half of the moments
                    moments = sample.stored(name)
                    half = replace(
                        field_of(name, data), shape=(len(moments) // 2, *moments.shape[1:])
                    )
                    parts = [half.header + moment.tobytes() for moment in np.split(moments, 2)]
                row |= zip(columns, parts, strict=True)
            return row
        kind, data = sample.image
        return row | {
            "image": {"bytes": data, "path": f"{sample.key}.{kind}"},
            "captions": sample.facts.get("captions") or [sample.caption],
            "width": sample.number("width"),
            "height": sample.number("height"),
        }


def _table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    columns = [_column([row[field.name] for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return an Arrow array of values.

    Large values are copied once. Arrow's own way grows a buffer step by step, and so a worker takes
    200 MB more.
    """
    if pa.types.is_struct(kind):
        parts = [_column([value[field.name] for value in values], field.type) for field in kind]
        return pa.StructArray.from_arrays(parts, fields=list(kind))
    if not pa.types.is_binary(kind):
        return pa.array(values, kind)
    ends = np.cumsum([0, *map(len, values)], dtype="<i4")
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(kind, len(values), buffers)
