"""`index`: give tars of others the files that a loader needs, and make lost ones again.

A tar that something else made gets its index and the table of its samples. Latents get
lost rows again (`wdsprep.dataset.image_positions`), which a join needs.
"""

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from wdsprep.dataset.damage import naming_repair, repair_step
from wdsprep.dataset.digests import hex_digest
from wdsprep.dataset.file_names import (
    MANIFEST,
    foreign_table_name,
    index_name,
    is_index,
    is_table,
    receipt_name,
    rows_name,
    table_name,
)
from wdsprep.dataset.image_positions import (
    ImagePositions,
    keys_may_tell,
    positions_from_keys,
)
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.receipts import Receipt
from wdsprep.dataset.rejects import rejects_in
from wdsprep.dataset.sample_table import IMAGE_COLUMNS, TableWriter
from wdsprep.dataset.samples import parse_object
from wdsprep.dataset.shard_reader import NamedShard, ShardReader
from wdsprep.dataset.stored_dataset import read_manifest, read_receipt
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import index_tar, open_tape
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import DamageError, NotFoundError, SourceError, UsageError
from wdsprep.store import open_store
from wdsprep.store.base import Entry, Store, write_bytes
from wdsprep.text import Counting, command, ignore_count

UNTOLD = "no keys tell which images its samples are of"
"""The reason why rows of tars that pack did not make cannot be told."""


def encode_step(url: str) -> str:
    """Return the next step for a damaged file of latents that a receipt names."""
    return repair_step(url, 'the same "wdsprep encode"')


def index(
    folder: str,
    heard: Counting = ignore_count,
    told: Callable[[str], None] = lambda _line: None,
) -> dict[str, int]:
    """Write the index of each tar below `folder` that has none, or a cut or an older one.

    Also write the table of each tar of images that has none or got an index, and the rows of each
    tar of latents that lacks them and needs them. Return the number of samples of each tar that was
    indexed, and of each table and each file of rows, by name. `heard` gets how many files are done,
    and how many there are to do, for indexes, for tables and for rows. `told` gets a line about
    what cannot be made.
    """
    store = open_store(folder)
    there = {
        entry.name: entry
        for entry in store.list()
        if entry.name.endswith((".tar", ".rows"))
        or entry.name == MANIFEST
        or is_index(entry.name)
        or is_table(entry.name)
    }
    tars = sorted(name for name in there if name.endswith(".tar"))
    if not tars:
        raise SourceError(f"{folder} holds no .tar to index: give the folder that the tars are in")
    indexes = {name: there.get(index_name(name)) for name in tars}
    missing = [n for n in tars if not is_whole(indexes[n]) or is_older(indexes[n], there[n])]
    done: dict[str, int] = {}
    for name in missing:
        heard(len(done), len(missing))
        try:
            done[name] = write_index(store, name)
        except BadSampleError as error:
            error.with_next_step(f"{_tar_step(error)}, then index again")
            raise
    manifest = read_manifest(store) if MANIFEST in there else None
    if manifest is None:
        bare = [name for name in tars if name in done or foreign_table_name(name) not in there]
        done |= _write_foreign_tables(store, bare, heard)
    else:
        with naming_repair(store):
            done |= _write_tables(store, manifest, there.keys(), heard)
            done |= _write_rows(store, manifest, there.keys(), heard, told)
    return done


def _tar_step(error: BadSampleError) -> str:
    if error.code == "scattered":
        return "make the tar again with its names in order (tar --sort=name)"
    return "fetch or make the tar again"


def _write_foreign_tables(store: Store, tars: Sequence[str], heard: Counting) -> dict[str, int]:
    """Write the tables of tars that another program packed; return their samples, by table."""
    done: dict[str, int] = {}
    for number, tar in enumerate(tars):
        heard(number, len(tars))
        table = make_table(store, tar, is_foreign=True)
        write_bytes(store, name := foreign_table_name(tar), table.data)
        done[name] = table.samples
    return done


def _write_tables(
    store: Store, manifest: Manifest, there: Collection[str], heard: Counting
) -> dict[str, int]:
    """Write the missing tables of a dataset of images; return their samples, by table."""
    edition, done = Edition.from_store(store), dict[str, int]()
    lacking = [
        (receipt.unit, shard)
        for receipt in (manifest.receipts if manifest.dataset == "images" else ())
        for shard in receipt.shards
        if table_name(shard.name) not in there and shard.name in there
    ]
    for number, (unit, shard) in enumerate(lacking):
        heard(number, len(lacking))
        with edition.holding(unit):
            write_table(store, read_receipt(store, unit), shard.name)
        done[table_name(shard.name)] = shard.samples
    return done


class MadeTable(NamedTuple):
    """The bytes of a table, and the number of its rows."""

    data: bytes
    samples: int


def make_table(store: Store, tar: str, *, is_foreign: bool = False) -> MadeTable:
    """Make the table of a tar from the keys and the json of its samples.

    The tar has an index. A sample that cannot be read is damage, or in a tar of another program a
    row without a key.
    """
    table = TableWriter(IMAGE_COLUMNS)
    samples = len(store.read(index_name(tar))) // 8 - 1
    with ShardReader(store, NamedShard(tar, samples), is_foreign=is_foreign) as reader:
        for block in reader.json():
            for key, data in zip(block.keys, block.json, strict=True):
                if data is None and not is_foreign:
                    raise DamageError(reader.place, "it has a sample that cannot be read")
                table.add(key, parse_object(data or b"") or {})
    return MadeTable(table.finish(), samples)


def write_table(store: Store, receipt: Receipt, tar: str) -> Receipt:
    """Write the table of a tar of images again, and return the receipt with its digest.

    The receipt is written too if its digest is another: another pyarrow writes other bytes. The
    caller holds the unit.
    """
    name, data = table_name(tar), make_table(store, tar).data
    write_bytes(store, name, data)
    if receipt.files.get(name) == (digest := hex_digest(data)):
        return receipt
    after = replace(receipt, files={**receipt.files, name: digest})
    write_bytes(store, receipt_name(receipt.unit), after.to_bytes())
    return after


def _write_rows(
    store: Store,
    manifest: Manifest,
    there: Set[str],
    heard: Counting,
    told: Callable[[str], None],
) -> dict[str, int]:
    """Write the missing files of positions; return the samples of each file written, by its name.

    `told` gets a line about files that cannot be made.
    """
    missing = [
        (rows_name(shard.name), receipt)
        for receipt in manifest.receipts
        for shard in receipt.shards
        if rows_name(shard.name) in receipt.files.keys() - there
    ]
    done: dict[str, int] = {}
    for number, (name, receipt) in enumerate(missing):
        heard(number, len(missing))
        if write_rows(store, receipt):
            done[name] = receipt.shards[0].samples
    if lost := [name for name, _receipt in missing if name not in done]:
        more = f" and {len(lost) - 1:,} more" if len(lost) > 1 else ""
        told(f"{store.url}/{lost[0]}{more} cannot be made: {UNTOLD}: {encode_step(store.url)}")
    return done


def write_rows(store: Store, receipt: Receipt) -> bool:
    """Write the lost positions of a latent shard's samples in their image shard.

    Return whether they could be made: keys must tell them, and the receipt have their digest.
    Positions in tars that pack did not make are known only while the tars are encoded.
    """
    (shard,) = receipt.shards
    name = rows_name(shard.name)
    if not keys_may_tell(receipt):
        return False
    with ShardReader(store, shard) as reader:
        rejected = [reject.key for reject in rejects_in(store, receipt.unit)]
        positions = positions_from_keys(receipt, [*reader.keys()], rejected)
    data = positions.to_bytes() if positions else b""
    if hex_digest(data) != receipt.files[name]:
        return False
    write_bytes(store, name, data)
    return True


def read_positions(store: Store, receipt: Receipt) -> ImagePositions:
    """Return for each sample of a latent shard which sample of the image shard it was made of.

    If samples have moved, this is read from the file beside the shard, which the receipt lists.
    """
    (shard,) = receipt.shards
    if (name := rows_name(shard.name)) not in receipt.files:
        return ImagePositions.plain(shard.samples)
    positions = read_rows(store, shard.name, shard.samples, receipt.inputs)
    if positions is None and keys_may_tell(receipt):
        raise UsageError(f"{store.url}/{name} is missing: run {command('index', store.url)}")
    if positions is None:
        next_step = encode_step(store.url)
        raise UsageError(f"{store.url}/{name} is missing, and {UNTOLD}: {next_step}")
    return positions


def read_rows(store: Store, tar: str, samples: int, inputs: int) -> ImagePositions | None:
    """Return the positions in the file beside a tar of latents, or None if there is no file."""
    what = f"{store.url}/{rows_name(tar)}"
    try:
        found = ImagePositions.from_bytes(store.read(rows_name(tar)), what)
    except NotFoundError:
        return None
    if not found.is_sound(samples, inputs):
        raise DamageError(what, "its numbers cannot be those of its samples")
    return found


def is_whole(idx: Entry | None) -> bool:
    """Return whether an index is there and whole: 8 bytes for each sample, and 8 for the end."""
    return idx is not None and idx.nbytes >= 8 and idx.nbytes % 8 == 0


def is_older(idx: Entry | None, tar: Entry) -> bool:
    """Return whether a tar was written after its index, and may hold other samples."""
    return idx is not None and idx.written_s < tar.written_s


def make_index(store: Store, tar: str) -> bytes:
    """Make the index of a tar from its headers."""
    with open_tape(store, tar) as tape:
        return index_tar(tape, f"{store.url}/{tar}")


def write_index(store: Store, tar: str) -> int:
    """Write the index of a tar, whether it has one or not. Return how many samples it has."""
    offsets = make_index(store, tar)
    write_bytes(store, index_name(tar), offsets)
    return len(offsets) // 8 - 1
