"""What the pictures of a dataset look like, kept in a file for each image shard.

    shards/images-hashes/256/000000.0123456789abcdef.v1.parquet
    shards/images-hashes/256/000000.0123456789abcdef.source.v1.parquet

The name says which shard, of which bytes, of which image in a role unless it is the target, and by
which definition of the hash: a shard that was packed anew has no file, and the one of the old shard
goes. So a listing tells what is left to do,
and two runs at once do no harm. In a file are, by sample in the order of the shard, its `key`, its
`hash` (a signed number of 64 bits, 0 where there is none), its `width` and `height` (0 where the
image cannot be read) and `content`, 64 bits of the BLAKE3 of the image's bytes. Of `WHOLE` samples
these are the target's, and `hash.source_1` and `content.source_1` are of the image of that name: 0
in a sample without it.

`select_and_rank` finds the samples that `duplicates` compares, and their ranks, by which it chooses
between copies. Both may come from columns of scores and tables, which are laid out in the order of
the samples, so no image shard is read for them.
"""

import io
import re
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3
from numpy.typing import NDArray

from wdsprep.changes.merged_datasets import match_places, numbers_by_shard, select_samples
from wdsprep.dataset.manifest import Shard
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.removed_samples import ShardRemoval
from wdsprep.dataset.samples import ROLE_IMAGE, STORED_FORMATS, roles_of
from wdsprep.dataset.shard_reader import HashedTape
from wdsprep.dataset.stored_dataset import check_of_images, open_current_dataset, read_shard
from wdsprep.dataset.tar.read import read_samples
from wdsprep.dataset.thread_map import read_each
from wdsprep.errors import AccessError, NotFoundError, UsageError
from wdsprep.images import perceptual_hash
from wdsprep.images.options import check_has_image
from wdsprep.images.perceptual_hash import NO_HASH
from wdsprep.runners.base import PROGRESS_S
from wdsprep.store import open_store, shared_store
from wdsprep.store.base import is_hidden, write_bytes
from wdsprep.text import command, examples

_OURS = re.compile(rf"(\d+/\d{{6,}}(?:_\d+)?\.[0-9a-f]{{16}})(\.{ROLE_IMAGE})?\.v\d+\.parquet")
_ENDING = f".v{perceptual_hash.VERSION}.parquet"
WHOLE = "all"
"""What stands for all images of a sample, in place of the name of one."""
_KINDS = {
    "key": pa.string(), "hash": pa.int64(), "content": pa.int64(),
    "width": pa.int32(), "height": pa.int32(),
}  # fmt: skip


def hashes_folder(images: str) -> str:
    """Return the folder beside a dataset of images in which its hashes are kept."""
    return f"{images}-hashes"


def _start_of_name(shard: Shard | ShardRemoval) -> str:
    """Return what the files with hashes of a shard, as it is now, begin with."""
    return f"{shard.name.removesuffix('.tar')}.{shard.digest[:16]}"


def delete_hashes(images: str, shards: Iterable[ShardRemoval]) -> None:
    """Delete the hashes of these shards from the folder beside the dataset `images`.

    Do nothing if there is no such folder, or if access to it is refused.
    """
    with suppress(NotFoundError, AccessError):  # a bucket of that name that belongs to others
        kept = open_store(hashes_folder(images))
        starts = {*map(_start_of_name, shards)}
        for entry in list(kept.list()):
            if (match := _OURS.fullmatch(entry.name)) and match[1] in starts:
                kept.delete(entry.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class HashUnit:
    """An image shard to hash, and the folder in which its hashes are kept.

    `role` is the name of the image of each sample that counts: "" for the target, or WHOLE for all.
    """

    images: str
    shard: Shard
    kept: str
    role: str

    @property
    def name(self) -> str:
        return f"{self.images}/{self.shard.name}"

    @property
    def nbytes(self) -> int:
        return self.shard.nbytes

    @property
    def file(self) -> str:
        return f"{_start_of_name(self.shard)}{self.role and f'.{self.role}'}{_ENDING}"


def hash_shard(unit: HashUnit) -> Generator[int, None, None]:
    """Hash the pictures of a shard, and write the file of its hashes at the end.

    Now and then yield about how many bytes of the shard have been read so far.
    """
    rows: list[dict[str, Any]] = []
    reported = time.monotonic()
    for row in read_shard(shared_store(unit.images), unit.shard, _rows(unit)):
        rows.append(row)
        if time.monotonic() - reported > PROGRESS_S:
            reported = time.monotonic()
            yield unit.nbytes * len(rows) // unit.shard.samples
    columns = {
        name: pa.array([row.get(name, 0) for row in rows], _KINDS[name.partition(".")[0]])
        for name in dict.fromkeys(chain.from_iterable(rows))
    }
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    write_bytes(shared_store(unit.kept), unit.file, out.getvalue())


def _rows(unit: HashUnit) -> Iterator[dict[str, Any]]:
    """Yield the row of each sample of a shard: its key, and what its images that count look like.

    Raise DamageError after the last if the shard has another digest than its receipt says.
    """
    with HashedTape(shared_store(unit.images), unit.shard) as tape:
        for sample in read_samples(tape.at, unit.name):
            parts = [(*name.rpartition("."), data) for name, data in sample.fields.items()]
            images = {name: data for name, _, kind, data in parts if kind in STORED_FORMATS}
            row = _look(images.pop("" if unit.role == WHOLE else unit.role, b""))
            if unit.role == WHOLE:
                for name, image in images.items():
                    look = _look(image)
                    row |= {f"{part}.{name}": look[part] for part in ("hash", "content")}
            yield {"key": sample.key, **row}
        tape.check(unit.shard.digest)


def _look(image: bytes) -> dict[str, int]:
    """Return the hash, width, height and content digest of an image.

    Of an image that cannot be read all but the last are 0.
    """
    content = int.from_bytes(blake3(image).digest(8), "little", signed=True)
    try:
        hashed, width, height = perceptual_hash.hash_image(image)
    except RejectedError:
        hashed, width, height = NO_HASH, 0, 0
    hashed -= hashed >> 63 << 64  # as a signed number
    return {"hash": hashed, "content": content, "width": width, "height": height}


class HashedImages:
    """A dataset of images, and the folder in which the hashes of its shards are kept."""

    def __init__(self, url: str, shown: str, kept: str, role: str) -> None:
        """Open the images at `url`, whose hashes are kept at `kept`.

        `role` says which image counts. Raise UsageError if the dataset is not one of images, or has
        no shard or no such image.
        """
        store, self.manifest = open_current_dataset(url, shown)
        check_of_images(shown, self.manifest)
        if not self.manifest.shards:
            raise UsageError(f"{shown} holds no image: {command('inspect', shown)} says why")
        if role != WHOLE:
            check_has_image(shown, roles_of(self.manifest.settings), role)
        self.place, self.shown, self.role, self.kept = store.url, shown, role, open_store(kept)
        self.units = tuple(
            HashUnit(images=store.url, shard=shard, kept=kept, role=role)
            for shard in self.manifest.shards
        )

    @property
    def may_lack_image(self) -> bool:
        """Return whether samples may be without the image that counts."""
        settings = self.manifest.settings
        needed = {*roles_of(settings)} - {*settings.get("optional_roles", ())}
        return self.role not in ("", WHOLE, *needed)

    def missing(self) -> tuple[HashUnit, ...]:
        """Return the shards without hashes, and delete the hashes of shards that are gone."""
        kept_files = {entry.name for entry in self.kept.list() if not is_hidden(entry.name)}
        starts = {_start_of_name(unit.shard) for unit in self.units}
        for name in kept_files:
            match = _OURS.fullmatch(name)
            if match and not (match[1] in starts and name.endswith(_ENDING)):
                self.kept.delete(name)
        return tuple(unit for unit in self.units if unit.file not in kept_files)

    def columns(self, unit: HashUnit, *names: str) -> pa.Table:
        """Return the columns `names` of the table of hashes that is kept of one shard.

        Those of further images of whole samples come with them: `hash.source` with `hash`. No
        thread of Arrow takes part: one that still held these bytes when Python ends would end the
        process with "terminate called without an active exception".
        """
        data = pa.BufferReader(self.kept.read(unit.file))
        file = pq.ParquetFile(data, pre_buffer=False)
        columns = [name for name in file.schema_arrow.names if name.partition(".")[0] in names]
        return file.read(columns=columns, use_threads=False)

    def each(self, *names: str) -> list[pa.Table]:
        """Return the columns `names` of the table of each shard, in order. Read them in threads."""
        return read_each(lambda unit: self.columns(unit, *names), self.units, self.kept.readers)


def select_and_rank(
    images: Sequence[HashedImages], join: Sequence[str], where: str, keep: str
) -> tuple[NDArray[np.bool_] | None, NDArray[np.int64] | None]:
    """Return which samples have the image that counts and meet `where`, and the rank of each.

    That is the rank of the value in the joined column `keep`.

    Samples are in the order of all datasets. Either is None if it was not asked for. Equal values
    have equal ranks, a higher value a higher rank, and no value has rank 0. Raise UsageError if a
    dataset has no joined table with the column `keep`.
    """
    if any(dataset.may_lack_image for dataset in images):
        has_image = f"{images[0].role}_width is not None"
        where = f"({where}) and {has_image}" if where else has_image
    if not (where or keep):
        return None, None
    places = match_places([(dataset.place, dataset.manifest) for dataset in images], join)
    pairs = [*zip(images, places, strict=True)]
    is_compared = ranks = None
    if keep:
        columns = [_find_values(keep, dataset, joined) for dataset, joined in pairs]
        has_value = np.concatenate([has_row for has_row, _ in columns])
        values = [values for _, values in columns]
        if len({column.dtype for column in values}) > 1:  # Python compares them without rounding
            values = [column.astype(object) for column in values]
        ranks = np.zeros(len(has_value), np.int64)
        ranks[has_value] = np.unique(np.concatenate(values), return_inverse=True)[1] + 1
    if where:
        masks: list[NDArray[np.bool_]] = []
        for dataset, joined in pairs:
            numbers = numbers_by_shard(select_samples(dataset.place, joined, where))
            for unit in dataset.units:
                mask = np.zeros(unit.shard.samples, np.bool_)
                mask[numbers[unit.shard.name]] = True
                masks.append(mask)
        is_compared = np.concatenate(masks)
    return is_compared, ranks


def _find_values(
    column: str, images: HashedImages, places: Sequence[str]
) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    """Return which samples have a value in a column of a joined table, and these values."""
    subset = select_samples(images.place, places, "", columns=[column])
    table = next((table for table in subset.tables if column in table.numbers), None)
    if table is None:
        offered = examples([name for table in subset.tables for name in table.offered]) or "none"
        raise UsageError(
            f"--join has no column of numbers {column} for {images.shown}, but {offered}: give "
            "--keep one of numbers, or --join another place"
        )
    shards = {name: shard for shard, name in enumerate(subset.whole.files.names)}
    rows = [table.rows_of(shards[unit.shard.name]) for unit in images.units]
    has_row = np.concatenate([table.has_row[numbers] for numbers in rows])
    values = np.concatenate([table.column(column)[numbers] for numbers in rows])
    return has_row, values[has_row]
