"""All tables of a dataset as one table, for whoever asks DuckDB, Arrow or pandas himself."""

import os
from collections.abc import Sequence

import duckdb
import pyarrow as pa
from pyarrow import dataset as arrow_dataset
from pyarrow import fs

from wdsprep.dataset.file_names import table_name
from wdsprep.dataset.sample_table import KEY, ROW, table_columns, table_schema
from wdsprep.dataset.stored_dataset import open_dataset
from wdsprep.errors import UsageError
from wdsprep.sources.tables.parquet import StoreFile
from wdsprep.store.base import Store
from wdsprep.tables.query import NO_THREADS
from wdsprep.tables.stored_tables import ShardTables


def table(
    dataset: str | os.PathLike[str], *, join: Sequence[str | os.PathLike[str]] = ()
) -> duckdb.DuckDBPyRelation:
    """Return what is known of the samples of a dataset, a row for each, as a relation of DuckDB.

        rows = wdsprep.table("shards/images", join=["shards/scores"])
        rows.filter("width >= 512 and aesthetic > 6").project("key, caption").df()

    Nothing is read before it is asked for, and then only the columns that are needed. `join` names
    scores, latents or text of the same images. They give the columns that the datasets before them
    lack, and nulls for the samples that they lack. `rows.fetch_arrow_reader()` gives Arrow,
    `rows.df()` pandas, and `rows.columns` the names.

    Conditions are those of SQL here, which differ from those of `where=`: NULL meets none.
    """
    connection = duckdb.connect(":memory:", config=NO_THREADS)
    rows = connection.from_arrow(_open(os.fspath(dataset)))
    for place in join:
        other = connection.from_arrow(_open(os.fspath(place)))
        new = [name for name in other.columns if name not in rows.columns and name != ROW]
        if not new:
            raise UsageError(
                f"{place} has no column that the datasets before it lack: leave it out"
            )
        columns = ", ".join(f'"{name.replace(chr(34), chr(34) * 2)}"' for name in (KEY, *new))
        rows = rows.join(other.project(columns), KEY, how="left")
    return rows


def _open(place: str) -> arrow_dataset.Dataset:
    store, manifest = open_dataset(place)
    tables = ShardTables(store, manifest.shards, manifest)
    return arrow_dataset.dataset(
        [table_name(shard.name) for shard in tables.shards],
        schema=table_schema(table_columns(manifest.dataset, manifest.settings)),
        format="parquet",
        filesystem=fs.PyFileSystem(_StoreFiles(store)),
    )


class _StoreFiles(fs.FileSystemHandler):  # type: ignore[misc]
    """The files of a store, as Arrow opens them. It only reads files whose names it is given."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def get_type_name(self) -> str:
        return "wdsprep"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[fs.FileInfo]:
        return [fs.FileInfo(path, fs.FileType.File) for path in paths]

    def open_input_file(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(StoreFile(self._store, path), mode="r")

    def _refuse(self, *_arguments: object, **_options: object) -> None:
        raise NotImplementedError

    get_file_info_selector = open_input_stream = open_output_stream = open_append_stream = _refuse
    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _refuse
    delete_file = move = copy_file = _refuse
