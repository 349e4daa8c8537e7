"""The captions and facts of an image shard that pack made, without its images.

If only parts of a shard are read, its digest cannot be compared with its receipt. Its size is
compared instead, and its index with its headers (`ShardReader.walk`).
"""

from collections.abc import Iterator

from wdsprep.dataset.file_names import index_name
from wdsprep.dataset.rejects import Refusal
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.shard_reader import LARGE_NBYTES, ShardReader
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.errors import DamageError, FormatError, NotFoundError
from wdsprep.sources.tars import TarsSource
from wdsprep.store.base import Store


def is_read_in_parts(store: Store, shard: ImageShard) -> bool:
    """Return whether to skip the images of a shard when only its captions are needed.

    They are skipped if pack made the shard and it lies on a local disk or its images are large.
    """
    item = shard.item
    is_large = item.nbytes >= LARGE_NBYTES * max(1, item.samples)
    return not shard.is_foreign and (store.root is not None or is_large)


def read_texts(
    source: TarsSource, store: Store, shard: ImageShard
) -> Iterator[tuple[str, Sample | Refusal]]:
    """Yield the samples of an image shard with their keys, in order and with empty images.

    Raise FormatError if the shard differs from its index or has another size, and NotFoundError if
    one of them is missing.
    """
    name = shard.item.name
    sizes = {entry.name: entry.nbytes for entry in store.list(name)}
    if not sizes.keys() >= {name, index_name(name)}:
        raise NotFoundError(name)
    if sizes[name] != shard.item.nbytes:
        raise FormatError("another size")
    with ShardReader(store, shard.item) as reader:
        try:
            for sample in reader.walk(source.wants):
                for row in source.rows(sample, name):
                    yield sample.key, row
        except DamageError as error:
            raise FormatError(error.cause) from error
