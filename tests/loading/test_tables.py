"""Tables beside the shards: columns in batches and conditions, and samples without a row."""

import csv
import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import wdsprep
from tests.kit.latent_sets import flat, keys, write_latents
from tests.kit.packs import upload
from tests.kit.shape_sets import write_shapes
from tests.kit.small_runs import sort_in_runs
from wdsprep.errors import FingerprintError, NotFoundError, UsageError
from wdsprep.loading import sorted_table, table_rows
from wdsprep.loading.shard_access.sample_cache import CacheDir
from wdsprep.loading.table_keys import LACKING
from wdsprep.loading.tables import open_keyed_table

COUNT = 90


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_latents(str(tmp_path_factory.mktemp("set")), (40, 50))


def key(number: int) -> str:
    return f"{number:012d}"


def rows_of(numbers: Any = range(COUNT)) -> dict[str, list[Any]]:
    chance = np.random.default_rng(0)
    order = chance.permutation([*numbers]).tolist()
    return {
        "key": [key(n) for n in order],
        "score": [n / 8 for n in order],
        "hash": [(n << 50) + 1 for n in order],
        "good": [n % 3 == 0 for n in order],
        "license": [["nc", "by", "cc0"][n % 3] for n in order],
    }


def write_table(path: Path, rows: dict[str, list[Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(rows), path, row_group_size=17)
        return str(path)
    lines = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    with path.open("w", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(line) + "\n" for line in lines)
        else:
            cells = csv.DictWriter(file, list(rows))
            cells.writeheader()
            cells.writerows(lines)
    return str(path)


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_table(tmp_path_factory.mktemp("table") / "scores.parquet", rows_of())


def load(url: Any, **options: Any) -> Any:
    return wdsprep.load(url, **({"global_batch": 5, "rank": 0, "world_size": 1} | options))


def assert_right(batch: dict[str, Any]) -> None:
    numbers = [int(one) for one in batch["key"]]
    assert batch["score"].dtype == torch.float32
    assert batch["score"].tolist() == [n / 8 for n in numbers]
    assert batch["hash"].dtype == torch.int64
    assert batch["hash"].tolist() == [(n << 50) + 1 for n in numbers]


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_batches_have_each_column_of_numbers_as_a_tensor(
    data: str, tmp_path: Path, kind: str
) -> None:
    table = write_table(tmp_path / f"scores.{kind}", rows_of())
    for batch in load(data, join=[table], epochs=2):
        assert list(batch)[:3] == ["latent", "emb", "key"]
        assert "license" not in batch
        assert_right(batch)
        if kind != "csv":
            assert batch["good"].dtype == torch.bool
            assert batch["good"].tolist() == [int(one) % 3 == 0 for one in batch["key"]]
    some = next(iter(load(data, join=[table], fields=("score", "key"))))
    assert list(some) == ["score", "key"]
    raw = next(iter(load(data, join=[table], raw=True)))
    assert raw["score"] == int(raw["__key__"]) / 8


def test_samples_without_a_row_leave_the_order(
    data: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So do those whose row lacks a number; and of two rows the first holds."""
    rows = rows_of(range(10, 70))
    rows = {name: values + values[:1] for name, values in rows.items()}
    rows["score"][3] = None
    rows["score"][5] = float("nan")
    rows["score"][-1] = 99.0
    table = write_table(tmp_path / "some.parquet", rows)
    served = flat(keys(load(data, join=table, global_batch=1)))
    assert sorted(served) == sorted({*rows["key"]} - {rows["key"][3], rows["key"][5]})
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "left out 2 rows without a key or a number" in told
    assert "left out 1 row with a key that an earlier row has" in told
    assert "left out 32 samples without a row in" in told
    for batch in load(data, join=table):
        assert_right(batch)


def test_a_condition_may_ask_for_columns_texts_too(data: str, scores: str) -> None:
    where = "score >= 5 and license not in ('nc', 'nd') and good == False and key != 'x'"
    served = flat(keys(load(data, join=[scores], where=where, global_batch=1)))
    assert sorted(served) == [key(n) for n in range(40, COUNT) if n % 3]
    stream = wdsprep.Stream(data, join=[scores], where=f"hash == {(7 << 50) + 1}")
    assert flat(keys(load(stream, global_batch=1))) == [key(7)]
    with pytest.raises(UsageError, match=r"no sample has scored, .* did you mean score\?"):
        load(data, join=[scores], where="scored > 1")


def test_shapes_worlds_and_states(tmp_path: Path) -> None:
    made = write_shapes(str(tmp_path / "set"))
    count = len(made.shape_of)
    table = write_table(tmp_path / "scores.parquet", rows_of(range(0, count, 2)))
    options = {"join": table, "global_batch": 8, "epochs": 3}
    whole = []
    for batch in load(made.url, **options):
        assert_right(batch)
        assert len({made.shape_of[one] for one in batch["key"]}) == 1
        whole.append(batch["key"])
    ranks = [load(made.url, rank=rank, world_size=4, **options) for rank in range(4)]
    assert [flat(parts) for parts in zip(*map(keys, ranks), strict=True)] == whole
    state = load(made.url, step=2, **options).state_dict()
    assert len(json.dumps(state)) < 1024
    again = load(made.url, **options)
    again.load_state_dict(state)
    assert keys(again) == whole[2:]
    rows = rows_of(range(0, count, 2))
    rows["score"][0] += 1
    other = write_table(tmp_path / "other.parquet", rows)
    with pytest.raises(FingerprintError, match="table 0"):
        load(made.url, **(options | {"join": other})).load_state_dict(state)


def test_a_table_is_read_once(
    data: str, scores: str, cache_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "wdsprep")
    for _ in range(2):
        load(data, join=[scores])
    told = [record.getMessage() for record in caplog.records]
    assert sum("reading the table" in line for line in told) == 1
    assert sum("reading the keys of 90 samples" in line for line in told) == 1
    assert len(list(cache_home.glob("*.arrays"))) == 2


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ({"score": [1.0]}, "has no column key"),
        ({"key": [1, 2], "score": [1.0, 2.0]}, "holds int: write keys as texts"),
        ({"key": ["x"], "score": [1.0]}, "no sample has a row in each of the joined tables"),
        ({"key": ["x"], "score": [None]}, "has no row with a key and numbers"),
        (
            {"key": ["x"], "big": pa.array([2**63], pa.uint64())},
            "column big of .* has numbers beyond 2\\^63",
        ),
        *(
            ({"key": ["x"], name: [1.0]}, f"has a column {name}, which batches use")
            for name in ("latent", "latent.npy", "samples", "made", "__key__")
        ),
    ],
)
def test_a_table_that_will_not_do_is_one_line(
    data: str, tmp_path: Path, rows: dict[str, Any], wrong: str
) -> None:
    if "which batches use" in wrong:
        rows = rows | {"key": [key(0)]}
    if rows.get("score") == [None]:
        rows = rows | {"score": pa.array([None], pa.float32())}  # type: ignore[dict-item]
    table = write_table(tmp_path / "t.parquet", rows)
    with pytest.raises(UsageError, match=wrong):
        load(data, join=table, raw="__key__" in rows or "latent.npy" in rows)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_that_cannot_be_of_a_sample_are_passed_over_and_counted(
    data: str, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    odd: list[Any] = ["a" * 3_000_000, None]
    rows = {"key": [*map(key, range(COUNT)), *odd], "views": [*range(COUNT + 2)]}
    table = write_table(tmp_path / f"t.{kind}", rows)
    if kind == "jsonl":
        with Path(table).open("a") as file:
            file.write('{"key": "\\ud800", "views": 3}\n[1]\nnothing\n')
    batches = list(load(data, join=table))
    assert sum(len(batch["key"]) for batch in batches) == COUNT
    for batch in batches:
        assert batch["views"].tolist() == [int(one) for one in batch["key"]]
    count = {"parquet": 2, "jsonl": 3}[kind]
    assert f"{count} rows without a key or a number" in caplog.text
    assert ("2 rows that cannot be read" in caplog.text) == (kind == "jsonl")


def test_two_tables_and_one_that_is_not_there(data: str, scores: str, tmp_path: Path) -> None:
    own = rows_of()
    more = write_table(tmp_path / "more.parquet", {"key": own["key"], "views": own["hash"]})
    batch = next(iter(load(data, join=[scores, more])))
    assert torch.equal(batch["views"], batch["hash"])
    with pytest.raises(UsageError, match="two joined tables have a column hash"):
        load(data, join=[scores, write_table(tmp_path / "twice.csv", own)])
    with pytest.raises(NotFoundError, match=r"gone\.parquet does not exist"):
        load(data, join=[str(tmp_path / "gone.parquet")])
    for nothing in (5, "", [""], {1: 2}):
        with pytest.raises(UsageError, match="is not a dataset: give paths or URLs"):
            load(data, join=nothing)
    assert len(load(data, join=None)) == COUNT // 5


def test_a_table_on_s3(data: str, scores: str, bucket: str) -> None:
    upload(Path(scores).parent, f"s3://{bucket}/tables")
    for batch in load(data, join=[f"s3://{bucket}/tables/scores.parquet"]):
        assert_right(batch)


ODD = ["a\0", "a", "\0", "é", "b\0c", "\uffff", "😀", "", "9" * 4097, "7" * 4096]


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize("odd", [[], ODD])
@pytest.mark.parametrize(("at_once", "run", "block"), [(7, 1, 1), (7, 900, 120), (100, 9000, 500)])
def test_a_table_sorted_in_small_runs_is_the_one_sorted_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    odd: list[str],
    at_once: int,
    run: int,
    block: int,
) -> None:
    rows = rows_of([*range(60), *range(40)])
    rows = {name: values[: len(odd)] + values for name, values in rows.items()}
    rows["key"][: len(odd)] = [name.replace("\0", "" if kind == "csv" else "\0") for name in odd]
    rows["hash"] = [*range(len(rows["key"]))]
    rows["score"][30] = None
    table = write_table(tmp_path / f"t.{kind}", rows)
    open_keyed_table(table, CacheDir(folder=tmp_path / "whole", nbytes=1 << 30), named=["license"])
    sort_in_runs(monkeypatch, run, block)
    monkeypatch.setattr(table_rows, "ROWS_AT_ONCE", at_once)
    monkeypatch.setattr(sorted_table, "WIDE_NBYTES", 10 * run)
    found = open_keyed_table(
        table, CacheDir(folder=tmp_path / "runs", nbytes=1 << 30), named=["license"]
    )
    (whole,), (runs,) = (tmp_path.glob(f"{at}/**/*.arrays") for at in ("whole", "runs"))
    assert runs.read_bytes() == whole.read_bytes()
    good = [(key, place) for place, key in enumerate(rows["key"]) if place != 30]
    first = {key: place for key, place in reversed(good) if key.isdecimal() and len(key) == 12}
    assert len(first) >= 55
    assert found.values_for([*first])["hash"].tolist() == [*first.values()]


def test_digests_that_states_have_stay(tmp_path: Path) -> None:
    """These are what tables had that were sorted in memory as a whole."""
    of_truths = "8f05d74595e232242732d2ca9b891661c339070ef4d708af90a5cb2c8410a5be"
    of_cells = "052a9b934125f891aed0fb0ba17dcf9ebb4c264d8dc924d693d8fe7fae93d804"
    digests = {"parquet": of_truths, "csv": of_cells, "jsonl": of_truths}
    for kind, digest in digests.items():
        rows = rows_of([*range(60), *range(40)])
        rows["key"][0], rows["key"][1] = "é", "a/b"
        table = write_table(tmp_path / f"t.{kind}", rows)
        assert open_keyed_table(table, None, named=["license"]).digest == digest


def test_sorting_a_table_takes_less_memory_than_its_columns_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_rows, "ROWS_AT_ONCE", 1000)
    sort_in_runs(monkeypatch, 100_000, 2_000)
    count, row_nbytes = 40_000, 12 + 8 + 10
    table = {
        "key": [f"{number:012d}" for number in np.random.default_rng(0).permutation(count)],
        "score": [*range(count)],
        "text": ["some words"] * count,
    }
    place = write_table(tmp_path / "t.parquet", table)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        assert open_keyed_table(place, None, named=["text"]).rows == count
        peak = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert peak < count * row_nbytes


def test_keys_that_are_no_numbers_of_one_length_are_found_too(tmp_path: Path) -> None:
    names = ["a/b", "10", "9", "", "ä", "010"]
    table = write_table(tmp_path / "t.parquet", {"key": names, "score": [*range(6)]})
    found = open_keyed_table(table, None)
    assert found.values_for(["ä", "010", "10", "a/b", "9"])["score"].tolist() == [4, 5, 1, 0, 2]
    assert found.find_rows(["", "0010", "zz", "1"]).tolist() == [LACKING] * 4
    table = write_table(tmp_path / "digits.parquet", {"key": ["10", "09"], "score": [1, 2]})
    found = open_keyed_table(table, None)
    assert found.values_for(["09", "10"])["score"].tolist() == [2, 1]
    assert found.find_rows(["9", "010", "", "xx", "1\u0663"]).tolist() == [LACKING] * 5
