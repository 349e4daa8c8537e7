"""`wdsprep.table`: all tables of a dataset as a relation of DuckDB, for questions of any kind."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

import wdsprep
from tests.kit.encode_work import Making
from tests.kit.encodes import encode_here
from tests.kit.packs import jpeg, pack, samples_of, write_files
from wdsprep.errors import UsageError


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("relation")
    files: dict[str, bytes | str] = {}
    for number in range(12):
        files[f"{number:02d}.jpg"] = jpeg(number, (64 + 9 * number, 80))
        files[f"{number:02d}.txt"] = f"picture {number}"
    pack(write_files(home / "photos", files), home / "images", "--buckets", "64,100")
    return home


def test_sql_finds_in_tables_what_the_json_of_samples_says(home: Path) -> None:
    facts = [sample["json"] for sample in samples_of(home / "images")]
    rows = wdsprep.table(home / "images")
    assert len(rows) == 12
    large = rows.filter("width >= 100").project("key, caption").order("key").fetchall()
    assert large == sorted((f["key"], f["caption"]) for f in facts if f["width"] >= 100)
    arrow = wdsprep.table(home / "images").arrow().read_all()
    assert arrow.column("width").to_pylist() == [f["width"] for f in facts]
    assert "width" in wdsprep.table(home / "images").df().columns


FORKING = """
import os, sys, pyarrow as pa, wdsprep
from wdsprep.dataset.condition_syntax import Condition
from wdsprep.tables.query import Query, open_engine
table = pa.table({"a": pa.array(range(3_000)), "meta": ['{"b": "x"}'] * 3_000})
before = set(os.listdir("/proc/self/task"))
def ask():
    with open_engine() as engine:
        (mask,) = Query(Condition("a >= 7 and b == 'x'"), engine).masks([[table]])
        assert int(mask.sum()) == 2_993
        assert set(os.listdir("/proc/self/task")) == before
ask()
engine = open_engine()  # one that stays open
(mask,) = Query(Condition("a < 7 or b > 5"), engine).masks([[table]])
assert int(mask.sum()) == 7
assert wdsprep.table(sys.argv[1]).aggregate("max(width)").fetchall() == [(163,)]
child = os.fork()
if not child:
    before = set(os.listdir("/proc/self/task"))
    ask()
    raise SystemExit
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.system
def test_asking_starts_no_threads_and_a_forked_child_asks_and_ends_cleanly(home: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKING, str(home / "images")], check=True, timeout=60)


def test_joined_datasets_give_the_columns_that_are_lacking(home: Path) -> None:
    with patch("wdsprep.encoding.encode.make_encoder", Making()):
        encode_here(home / "images", home / "latents-64")
    rows = wdsprep.table(home / "images", join=[home / "latents-64"])
    assert {"md5", "tokens", "crop"} <= {*rows.columns}
    assert (rows.columns.count("width"), rows.columns.count("row")) == (1, 0)
    assert len(rows) == 12
    with pytest.raises(UsageError, match="has no column that the datasets before it lack"):
        wdsprep.table(home / "images", join=[home / "images"])
