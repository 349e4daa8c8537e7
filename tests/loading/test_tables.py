"""Tables beside the shards: columns in batches and conditions, and samples without a row."""

import io
import logging
import tarfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import wdsprep
from tests.kit.laid_out import COUNT, key, rows_of, write_table
from tests.kit.latent_sets import flat, keys, write_latents
from tests.kit.packs import upload
from tests.kit.shape_sets import write_shapes
from wdsprep.dataset.reindex import index
from wdsprep.errors import FingerprintError, NotFoundError, UsageError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_latents(str(tmp_path_factory.mktemp("set")), (40, 50))


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


def test_columns_of_a_mixture_may_differ_in_precision(data: str, tmp_path: Path) -> None:
    """Also one that is called like what a batch of moments holds for itself."""
    other = write_latents(str(tmp_path / "other"), [30], base=1000)
    kinds = {
        "one": (data, range(90), pa.float32()),
        "two": (other, range(1000, 1030), pa.float64()),
    }
    streams = []
    for name, (url, numbers, kind) in kinds.items():
        columns = {
            "key": [key(number) for number in numbers],
            "sampled latent": pa.array(numbers, kind),
        }
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        streams.append(wdsprep.Stream(url, join=str(tmp_path / f"{name}.parquet")))
    for batch in load(streams, global_batch=24, epochs=1):
        assert batch["sampled latent"].dtype == torch.float32
        assert batch["sampled latent"].tolist() == [int(one) for one in batch["key"]]


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


def test_decimals_of_a_table_are_numbers(data: str, tmp_path: Path) -> None:
    prices = pa.array([Decimal(n) / 4 for n in range(COUNT)], pa.decimal128(9, 2))
    path = tmp_path / "prices.parquet"
    pq.write_table(pa.table({"key": [*map(key, range(COUNT))], "price": prices}), path)
    batches = load(data, join=str(path), where="price >= 10.25 and price < 12", global_batch=1)
    assert sorted(flat(batch["price"].tolist() for batch in batches)) == [
        n / 4 for n in range(41, 48)
    ]


def test_a_condition_on_joined_columns_alone_reads_no_table_of_the_dataset(
    data: str, scores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(data, join=[scores], where="score >= 4")  # which lays them out
    monkeypatch.setattr("wdsprep.tables.stored_tables.ShardTables.read_shard", None)
    served = flat(keys(load(data, join=[scores], where="score >= 5", global_batch=1)))
    assert sorted(served) == [key(n) for n in range(40, COUNT)]


def test_shapes_and_states(tmp_path: Path) -> None:
    made = write_shapes(str(tmp_path / "set"))
    count = len(made.shape_of)
    table = write_table(tmp_path / "scores.parquet", rows_of(range(0, count, 2)))
    options = {"join": table, "global_batch": 8, "epochs": 3}
    for batch in load(made.url, **options):
        assert_right(batch)
        assert len({made.shape_of[one] for one in batch["key"]}) == 1
    state = load(made.url, step=2, **options).state_dict()
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
    assert sum("asking the tables of 90 samples" in line for line in told) == 1
    assert len(list(cache_home.glob("*.arrays"))) == 3  # the columns, which there are, who has some


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ({"score": [1.0]}, "has no column key"),
        ({"key": [1, 2], "score": [1.0, 2.0]}, "holds int: write its values as texts"),
        ({"key": ["x"], "score": [1.0]}, "no sample has a row in each of the joined tables"),
        ({"key": ["x"], "day": [[1]]}, r"column day of .* holds list<.*>, neither numbers nor"),
        ({"key": ["x"], "score": [None]}, "has no row with a key and numbers"),
        (
            {"key": pa.array([], pa.string()), "score": pa.array([], pa.int64())},
            "has no row with a key and numbers",
        ),
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
        load(
            data,
            join=table,
            raw="__key__" in rows or "latent.npy" in rows,
            where="day == 1" if "day" in rows else None,
        )


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_an_empty_file_is_one_line(data: str, tmp_path: Path, kind: str) -> None:
    (table := tmp_path / f"t.{kind}").touch()
    with pytest.raises(UsageError, match=rf"t\.{kind} has no column key.*it has no columns"):
        load(data, join=str(table))


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
    count = {"parquet": "1 row", "jsonl": "2 rows"}[kind]
    assert f"{count} without a key or a number" in caplog.text
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


def test_keys_that_are_not_utf_8_stay_different(tmp_path: Path) -> None:
    names = ["a\udcff", "a\udcfe", "a?", "a"]
    tars = tmp_path / "tars"
    tars.mkdir()
    with tarfile.open(tars / "0.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for name in names:
            member = tarfile.TarInfo(f"{name}.json")
            member.size = 2
            tar.addfile(member, io.BytesIO(b"{}"))
    index(str(tars))
    table = write_table(tmp_path / "t.jsonl", {"key": names[:3], "n": [0, 1, 2]})
    batches = list(load(str(tars), join=table, raw=True, global_batch=1))
    assert sorted((one["__key__"], one["n"]) for one in batches) == [
        (name, names.index(name)) for name in sorted(names[:3])
    ]
