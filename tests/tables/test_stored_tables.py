"""Tables of shards are read in order, whoever packed the tars and whether they have tables."""

import os
import shutil
from operator import methodcaller
from pathlib import Path

import pytest

from tests.kit.packs import jpeg, manifest_of, pack, write_files
from wdsprep.dataset.manifest import Shard
from wdsprep.dataset.reindex import index
from wdsprep.errors import DamageError
from wdsprep.store import open_store
from wdsprep.tables.stored_tables import ShardTables

READ = methodcaller("read", ("key", "width", "caption"))
Rows = list[dict[str, object]]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stored")
    files: dict[str, bytes | str] = {f"{n}.jpg": jpeg(n, (64 + n, 64)) for n in range(9)}
    files |= {f"{n}.txt": f"caption {n}" for n in range(9)}
    return pack(write_files(root / "photos", files), root / "images", "--samples-per-shard", "3")


def stored_rows(images: Path) -> list[Rows]:
    manifest = manifest_of(images)
    tables = ShardTables(open_store(str(images)), manifest.shards, manifest)
    return [table.to_pylist() for table in tables.read(READ)]


def foreign_rows(tars: Path) -> list[Rows]:
    names = sorted(path.name for path in tars.glob("*.tar"))
    tables = ShardTables(open_store(str(tars)), [Shard(name, 3) for name in names])
    return [table.to_pylist() for table in tables.read(READ)]


def test_shards_of_a_dataset_may_be_chosen_in_any_order(images: Path) -> None:
    store, manifest = open_store(str(images)), manifest_of(images)
    whole = stored_rows(images)
    assert [len(rows) for rows in whole] == [3, 3, 3]
    assert whole[1][0] == {"key": "000001000000", "width": 67, "caption": "caption 3"}
    some = ShardTables(store, manifest.shards[::-2], manifest)
    assert [table.to_pylist() for table in some.read(READ)] == whole[::-2]
    first = some.read(READ, some.shards[:1])
    assert [table.to_pylist() for table in first] == [whole[2]]


def test_tars_of_others_have_the_same_rows_with_and_without_tables(
    images: Path, tmp_path: Path
) -> None:
    (folder,) = images.glob("[0-9]*")
    tars = Path(shutil.copytree(folder, tmp_path / "tars"))
    expected = stored_rows(images)
    assert foreign_rows(tars) == expected
    index(str(tars))
    table = tars / "000001.tar.parquet"
    assert table.exists()
    (tars / "000001.tar.idx").unlink()  # the rows are read of the table alone
    assert foreign_rows(tars) == expected
    index(str(tars))
    shutil.copy(tars / "000000.tar.parquet", table)
    assert foreign_rows(tars) == [expected[0], expected[0], expected[2]]
    later = table.stat().st_mtime_ns + 10_000_000
    os.utime(tars / "000001.tar", ns=(later, later))  # then the table is older than the tar
    assert foreign_rows(tars) == expected


def test_a_foreign_table_that_cannot_be_used_is_one_line(images: Path, tmp_path: Path) -> None:
    (folder,) = images.glob("[0-9]*")
    tars = Path(shutil.copytree(folder, tmp_path / "tars"))
    index(str(tars))
    table = tars / "000002.tar.parquet"
    table.write_bytes(table.read_bytes()[:-9])
    with pytest.raises(DamageError, match=r'002.tar.parquet is damaged.*delete.*"wdsprep index '):
        foreign_rows(tars)
