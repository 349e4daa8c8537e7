"""The samples of an image shard, with a check that the shard is what was packed.

A shard that pack made is compared with its digest while it is read. If images are not needed, and
lie on a disk of this machine or are large, their bytes are skipped (`read_texts`). Then the digest
cannot be compared. The shard's size is compared instead, and its index with its headers
(`ShardReader.walk`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from blake3 import blake3

from wdsprep.dataset.damage import repair_step
from wdsprep.dataset.file_names import index_name
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Refusal
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.shard_reader import LARGE_NBYTES, ShardReader
from wdsprep.dataset.stored_dataset import check_not_rewritten
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.errors import DamageError, FingerprintError, FormatError, NotFoundError
from wdsprep.runners.base import HopelessError
from wdsprep.sources.base import Content, LeftOut
from wdsprep.sources.tars import TarsSource
from wdsprep.store import shared_store
from wdsprep.store.base import Store
from wdsprep.text import human_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRows:
    """The samples of an image shard, to be read once.

    `content` collects a mark of each sample. Without `has_images` the bytes of images are skipped,
    except in foreign tars, whose marks depend on them.
    """

    source: TarsSource
    shard: ImageShard
    content: Content
    has_images: bool = True
    left_out: LeftOut = field(default_factory=LeftOut)

    def read(self) -> Iterator[tuple[str, Sample | Refusal]]:
        """Yield each sample with its key, and raise HopelessError if the shard is damaged.

        The digest of the shard is compared at the end, unless the shard is foreign or cut to some
        samples. If the shard is read in parts, its size and its headers are checked instead.
        """
        source = self.source
        if not (self.has_images or self.shard.is_foreign):
            source = replace(source, has_images=False)
        store = shared_store(source.url)
        if not source.has_images and is_read_in_parts(store, self.shard):
            yield from self._texts(source, store)
            return
        item, digest = self.shard.item, blake3()
        rows = source.read_keyed(
            item,
            watch=None if self.shard.is_foreign else digest.update,
            left_out=self.left_out.note,
        )
        for key, row in islice(rows, item.take or None):
            if isinstance(row, Refusal) and row.code is Code.TAR_VANISHED:
                raise HopelessError(self._damage_message("is not there"))
            self.content.add(self.content.mark(row))
            yield key, row
        is_known = not (self.shard.is_foreign or item.take)
        if is_known and digest.hexdigest() != self.shard.digest:
            raise HopelessError(self._damage_message(self._describe_damage("another BLAKE3")))

    def _texts(self, source: TarsSource, store: Store) -> Iterator[tuple[str, Sample | Refusal]]:
        """Yield each sample without its image, and check the size and the headers of the shard.

        Raise HopelessError if the shard or its index is missing, or if a check fails.
        """
        try:
            rows = read_texts(source, store, self.shard)
            yield from islice(rows, self.shard.item.take or None)
        except NotFoundError as error:
            raise HopelessError(
                self._damage_message("is not there, or its index is not")
            ) from error
        except FormatError as error:
            raise HopelessError(self._damage_message(self._describe_damage(str(error)))) from error

    def _describe_damage(self, why: str) -> str:
        """Return a clause that says whether a damaged shard is truncated or was changed.

        If it was changed, the clause has `why` in brackets.
        """
        name, expected = self.shard.item.name, self.shard.item.nbytes
        listed = shared_store(self.source.url).list(name)
        nbytes = next((entry.nbytes for entry in listed if entry.name == name), 0)
        if nbytes < expected:
            return f"is truncated (expected {human_bytes(expected)}, found {human_bytes(nbytes)})"
        return f"is not what was packed ({why})"

    def _damage_message(self, how: str) -> str:
        name = self.shard.item.name
        if self.shard.is_foreign:
            return f"{name} {how}"
        try:
            check_not_rewritten(shared_store(self.source.url), name, self.shard.digest)
        except FingerprintError as error:
            return str(error)
        next_step = repair_step(self.source.url, '"wdsprep pack"')
        return f"{name} {how}: {next_step}"


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
