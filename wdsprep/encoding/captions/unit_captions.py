"""The captions that a table has for the samples of one image shard, in a file beside its unit.

The rows of `captions/256/000000.parquet` are the samples of the image shard in their order: the
key, and the caption, or null if the table has none. The metadata of the file say for which state of
the shard and of the table it was made.
"""

from collections.abc import Iterator
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


class LaidOutCaptions:
    """The captions that a table has for the samples of an image shard."""

    def __init__(self, store: Store, shard: ImageShard, digest: str) -> None:
        """Open the captions of a shard that are of the table with this digest."""
        name = captions_name(shard.name)
        self._place = f"{store.url}/{name}"
        try:
            file = OpenParquet(store, name, store.read(name))
        except NotFoundError as error:
            gone = f"{self._place} is not there: run the same command again"
            raise HopelessError(gone) from error
        except SourceError as error:
            raise self._damage("it is no sound Parquet file") from error
        schema = SCHEMA.with_metadata(_metadata(digest, shard))
        if not file.schema.equals(schema, check_metadata=True):
            raise self._damage(f"it is not of this table and of {shard.item.name} as it is")
        self._rows = _read_rows(file)

    def find(self, key: str, sample: Sample) -> str | None:
        """Return the caption of a sample, or None if the table has none for it.

        Raise HopelessError if the file has no such sample behind the one that was found before.
        """
        del sample
        wanted = replace_surrogates(key)
        try:
            for own, caption in self._rows:
                if own == wanted:
                    return caption
        except SourceError as error:
            raise self._damage("it is no sound Parquet file") from error
        raise self._damage(f"it has other samples than the image shard, such as no {wanted}")

    def _damage(self, cause: str) -> HopelessError:
        return HopelessError(str(DamageError(self._place, cause).with_next_step(DELETE_STEP)))


def _read_rows(file: OpenParquet) -> Iterator[tuple[str, str | None]]:
    for batch in file.batches(GROUP_ROWS):
        keys, captions = batch.columns
        yield from zip(keys.to_pylist(), captions.to_pylist(), strict=True)


def _metadata(digest: str, shard: ImageShard) -> dict[str, str]:
    return {**MARK, "captions": digest, "made_of": shard.input}
