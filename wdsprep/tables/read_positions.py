"""Read one column of the table of a shard: the positions of its samples, or their keys.

A position is the place of a sample in its image shard, in the column `row`. It is not read where
the receipt tells that no sample moved. A table of up to `WHOLE_ROWS` rows is read whole, by one
request; of a larger one that column alone. What is read is checked by the sums of its pages, not by
the digest of the table, so it may be newer than the manifest.
"""

from contextlib import closing

import numpy as np
import pyarrow as pa

from wdsprep.dataset.file_names import table_name
from wdsprep.dataset.image_positions import DTYPE, ImagePositions, may_have_moved
from wdsprep.dataset.receipts import Receipt, Shard
from wdsprep.dataset.reindex import table_step
from wdsprep.dataset.sample_table import KEY, ROW, is_marked
from wdsprep.dataset.settings import Settings
from wdsprep.errors import DamageError, NotFoundError, SourceError, UsageError
from wdsprep.sources.tables.parquet import OpenParquet
from wdsprep.store.base import Store

WHOLE_ROWS = 10_000
"""The rows of a table that takes about a megabyte, with captions of usual length."""


def read_positions(store: Store, receipt: Receipt) -> ImagePositions:
    """Return for each sample of a latent shard which sample of the image shard it was made of."""
    (shard,) = receipt.shards
    if not may_have_moved(receipt):
        return ImagePositions.plain(shard.samples)
    return read_rows(
        store, shard.name, receipt.settings, samples=shard.samples, inputs=receipt.inputs
    )


def read_rows(
    store: Store, tar: str, settings: Settings, *, samples: int, inputs: int
) -> ImagePositions:
    """Return the positions in the table of a tar with so many samples of so many inputs.

    Raise UsageError if there is no table, and DamageError if the positions cannot be those.
    """
    field = pa.field(ROW, pa.int64(), False)
    rows = _read_column(store, table_name(tar), field, settings, samples=samples).to_numpy()
    positions = ImagePositions(rows.astype(DTYPE))
    if not np.array_equal(positions.positions, rows) or not positions.is_sound(samples, inputs):
        place = f"{store.url}/{table_name(tar)}"
        raise DamageError(place, "its positions cannot be those of its samples")
    return positions


def read_keys(store: Store, shard: Shard, settings: Settings) -> pa.ChunkedArray:
    """Return the keys of the samples of a shard, from its table.

    Raise UsageError if there is no table, and DamageError if it is damaged.
    """
    field = pa.field(KEY, pa.string(), False)
    return _read_column(store, table_name(shard.name), field, settings, samples=shard.samples)


def _read_column(
    store: Store, name: str, field: pa.Field, settings: Settings, *, samples: int
) -> pa.ChunkedArray:
    place, is_small = f"{store.url}/{name}", samples <= WHOLE_ROWS
    try:
        content = store.read(name, nbytes=None if is_small else 1)  # or learns that it is missing
        with closing(OpenParquet(store, name, content if is_small else None)) as file:
            if not is_marked(file.schema.metadata) or field not in list(file.schema):
                raise DamageError(place, f"it is no table of samples with a column {field.name}")
            return file.read((field.name,)).column(field.name)
    except NotFoundError:
        step = table_step(store.url, "latents", settings)
        raise UsageError(f"{place} is missing: {step}") from None
    except SourceError as error:
        raise DamageError(place, "it is no sound Parquet file") from error
