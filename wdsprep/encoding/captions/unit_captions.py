"""The captions that a table has for the samples of one image shard, in a file beside its unit.

The rows of `captions/256/000000.parquet` are the samples of the image shard in their order: the
key, and the caption, or null if the table has none. The metadata of the file say for which state of
the shard and of the table it was made.
"""

from collections.abc import Callable, Iterator
from io import BytesIO

import pyarrow as pa

from wdsprep.dataset.damage import DELETE_STEP
from wdsprep.dataset.file_names import captions_name
from wdsprep.dataset.sample_table import GROUP_ROWS, KEY, MARK, open_writer, table_schema
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.settings import TEXT
from wdsprep.encoding.captions.options import replace_surrogates
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.errors import DamageError, NotFoundError, SourceError
from wdsprep.runners.base import HopelessError
from wdsprep.sources.tables.parquet import OpenParquet
from wdsprep.store.base import Store

CAPTION = "caption"
SCHEMA = table_schema({KEY: TEXT, CAPTION: TEXT})


def encode_captions(rows: pa.Table, digest: str, shard: ImageShard) -> bytes:
    """Return the file of a shard's captions, which the table with this digest has."""
    out = BytesIO()
    with open_writer(out, SCHEMA, _metadata(digest, shard)) as writer:
        writer.write_table(rows, row_group_size=GROUP_ROWS)
    return out.getvalue()


def open_captions(
    store: Store, shard: ImageShard, digest: str
) -> Callable[[str, Sample], str | None]:
    """Open the captions of an image shard that are of the table with this digest.

    The finder returns the caption of a sample, or None if the table has none for it. It raises
    HopelessError if the file has no such sample behind the one that was found before.
    """
    name = captions_name(shard.name)
    place = f"{store.url}/{name}"

    def damage(cause: str) -> HopelessError:
        return HopelessError(str(DamageError(place, cause).with_next_step(DELETE_STEP)))

    try:
        file = OpenParquet(store, name, store.read(name))
    except NotFoundError as error:
        raise HopelessError(f"{place} is not there: run the same command again") from error
    except SourceError as error:
        raise damage("it is no sound Parquet file") from error
    schema = SCHEMA.with_metadata(_metadata(digest, shard))
    if not file.schema.equals(schema, check_metadata=True):
        raise damage(f"it is not of this table and of {shard.item.name} as it is")
    rows: Iterator[tuple[str, str | None]] = (
        row
        for batch in file.batches(GROUP_ROWS)
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    )

    def find(key: str, _sample: Sample) -> str | None:
        wanted = replace_surrogates(key)
        try:
            for row_key, caption in rows:
                if row_key == wanted:
                    return caption
        except SourceError as error:
            raise damage("it is no sound Parquet file") from error
        raise damage(f"it has other samples than the image shard, such as no {wanted}")

    return find


def _metadata(digest: str, shard: ImageShard) -> dict[str, str]:
    return {**MARK, "captions": digest, "made_of": shard.input}
