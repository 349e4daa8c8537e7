"""`index`: give tars of others the files that a loader needs, and make lost ones again.

A tar gets its index and the table of its samples.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from wdsprep.dataset.damage import naming_repair, repair_step
from wdsprep.dataset.file_names import (
    MANIFEST,
    foreign_table_name,
    index_name,
    is_table,
    maker_of,
    receipt_name,
    table_name,
)
from wdsprep.dataset.image_positions import (
    Positions,
    keys_may_tell,
    may_have_moved,
    plain_positions,
    positions_from_keys,
)
from wdsprep.dataset.manifest import Manifest, Receipt, Shard
from wdsprep.dataset.rejects import rejects_in
from wdsprep.dataset.sample_table import IMAGE_COLUMNS, ROW, Columns, TableWriter, table_columns
from wdsprep.dataset.samples import parse_object
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.settings import Settings, is_scored
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.dataset.stored_dataset import read_manifest, read_receipt
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import index_tar, open_tape
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import SourceError
from wdsprep.store import open_store
from wdsprep.store.base import Entry, Store, write_bytes
from wdsprep.text import Counting, command, examples, ignore_count

UNTOLD = "no keys tell which images its samples are of"
"""The reason why a table of samples of tars that pack did not make cannot be made."""
SCORES_ALONE = "no other file has its scores"
"""The reason why a table of scores cannot be made."""


def make_step(url: str, dataset: str, settings: Settings) -> str:
    """Return the next step for a damaged file of a dataset, given its kind and its settings."""
    return repair_step(url, f'the same "{maker_of(dataset, settings)}"')


def table_step(url: str, dataset: str, settings: Settings) -> str:
    """Return the next step for a missing table."""
    if is_scored(settings):
        return make_step(url, dataset, settings)
    return f"run {command('index', url)}, which makes tables"


def index(
    folder: str,
    on_count: Counting = ignore_count,
    on_message: Callable[[str], None] = lambda _line: None,
) -> dict[str, int]:
    """Write the index of each tar below `folder` that has none, or a cut or an older one.

    Also write the table of each tar that has none, or that another program packed and that got an
    index. Return the number of samples of each tar that was indexed, and of each table, by name.
    `on_count` gets how many files are done, and how many there are to do, for indexes and for
    tables. `on_message` gets a line about tables that cannot be made.
    """
    store = open_store(folder)
    ours = (".tar", ".idx", ".parquet", MANIFEST)
    listed = {entry.name: entry for entry in store.list() if entry.name.endswith(ours)}
    tars = sorted(name for name in listed if name.endswith(".tar"))
    if not tars and MANIFEST not in listed:
        raise SourceError(f"{folder} holds no .tar to index: give the folder that the tars are in")
    indexes = {name: listed.get(index_name(name)) for name in tars}
    missing = [n for n in tars if not is_whole(indexes[n]) or is_older(indexes[n], listed[n])]
    done: dict[str, int] = {}
    for name in missing:
        on_count(len(done), len(missing))
        try:
            done[name] = write_index(store, name)
        except BadSampleError as error:
            step = "fetch or make the tar again"
            if error.code == "scattered":
                step = "make the tar again with its names in order (tar --sort=name)"
            error.with_next_step(f"{step}, then index again")
            raise
    manifest = read_manifest(store) if MANIFEST in listed else None
    if manifest is None:
        bare = [name for name in tars if name in done or foreign_table_name(name) not in listed]
        for number, tar in enumerate(bare):
            on_count(number, len(bare))
            name = foreign_table_name(tar)
            table, done[name] = make_table(store, tar, is_foreign=True)
            write_bytes(store, name, table)
    else:
        with naming_repair(store):
            done |= _write_tables(store, manifest, listed.keys(), on_count, on_message)
    return done


def _write_tables(
    store: Store,
    manifest: Manifest,
    listed: Collection[str],
    on_count: Counting,
    on_message: Callable[[str], None],
) -> dict[str, int]:
    """Write the missing tables of a dataset; return their samples, by table.

    `on_message` gets a line about those that cannot be made.
    """
    edition, done, lost = Edition.from_store(store), dict[str, int](), list[str]()
    lacking = [
        (receipt.unit, shard)
        for receipt in manifest.receipts
        for shard in receipt.shards
        if table_name(shard.name) not in listed and (shard.name in listed or is_table(shard.name))
    ]
    for number, (unit, shard) in enumerate(lacking):
        on_count(number, len(lacking))
        name = table_name(shard.name)
        with edition.holding(unit):
            if write_table(store, read_receipt(store, unit), shard.name):
                done[name] = shard.samples
            else:
                lost.append(name)
    if lost:
        why = SCORES_ALONE if manifest.is_scored else UNTOLD
        step = make_step(store.url, manifest.dataset, manifest.settings)
        on_message(f"{store.url}/{examples(lost)} cannot be made: {why}: {step}")
    return done


def make_table(
    store: Store,
    tar: str,
    *,
    columns: Columns = IMAGE_COLUMNS,
    positions: Positions | None = None,
    is_foreign: bool = False,
) -> tuple[bytes, int]:
    """Make the table of a tar that has an index, and return it with the number of its rows.

    It is made from the keys and the json of the samples. `positions` are those of its samples in
    the image shard, if the table has them. Raise DamageError for a sample that cannot be read. One
    with a field twice, in a tar of another program, becomes a row without a key.
    """
    table = TableWriter(columns)
    samples = len(store.read(index_name(tar))) // 8 - 1
    rows = () if positions is None else positions.tolist()
    with ShardReader(store, Shard(tar, samples), is_foreign=is_foreign) as reader:
        for number, (key, data) in enumerate(reader.json()):
            facts = parse_object(data or b"")
            table.add(key, {**(facts or {}), ROW: rows[number]} if rows else facts)
    return table.finish(), samples


def write_table(store: Store, receipt: Receipt, tar: str) -> Receipt | None:
    """Write the table of a tar again, and return the receipt with its digest.

    The receipt is written too if its digest is another: another pyarrow writes other bytes. The
    caller holds the unit. Return None, and write nothing, if the table says what nothing else does:
    positions or scores.
    """
    if not can_make_table(receipt):
        return None
    columns = table_columns(receipt.dataset, receipt.settings)
    positions: Positions | None = None
    if ROW in columns:
        (shard,) = (shard for shard in receipt.shards if shard.name == tar)
        positions = plain_positions(shard.samples)
        if may_have_moved(receipt):
            with ShardReader(store, shard) as reader:
                rejected = [reject.key for reject in rejects_in(store, receipt.unit)]
                positions = positions_from_keys(receipt, [*reader.keys()], rejected)
        if positions is None:
            return None
    name = table_name(tar)
    data, _ = make_table(store, tar, columns=columns, positions=positions)
    write_bytes(store, name, data)
    if receipt.files.get(name) == (digest := hex_digest(data)):
        return receipt
    after = replace(receipt, files={**receipt.files, name: digest})
    write_bytes(store, receipt_name(receipt.unit), after.to_bytes())
    return after


def can_make_table(receipt: Receipt) -> bool:
    """Return whether the tables of a unit may be made again: other files tell all that is in them.

    If positions have to be told by keys, these are still to be read.
    """
    return not is_scored(receipt.settings) and (
        not may_have_moved(receipt) or keys_may_tell(receipt)
    )


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
