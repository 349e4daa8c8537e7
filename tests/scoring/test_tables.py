"""Scores on the disk: a table for each image shard, beside a tar if embeddings are kept."""

import io
import re
import shutil
import statistics
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blake3 import blake3

import wdsprep
from tests.kit.damaged import check, findings, restore
from tests.kit.encodes import samples_in
from tests.kit.kills import Cut, CutError
from tests.kit.packs import manifest_of, tree
from tests.kit.paths import ROOT, blocks, format_recipe
from tests.kit.scores import arrays_in, columns_in, score_here
from tests.kit.sealed_files import resealed
from wdsprep.cli import main
from wdsprep.dataset.file_names import is_table
from wdsprep.dataset.sample_table import TableWriter, read_table, table_columns
from wdsprep.dataset.settings import NUMBER, TEXT, columns_of
from wdsprep.errors import NotFoundError, UsageError, WdsprepError

Score = Callable[..., Any]
KINDS = {"tables": {"language": True}, "embeddings": {"model": "clip", "embedding": "fp16"}}
SETTINGS: dict[str, Any] = {
    "scores": {"columns": {"similarity": "number", "aesthetic": "number"}},
    "layout": [],
}


@pytest.fixture(scope="module", params=KINDS)
def once(
    request: pytest.FixtureRequest, images: Path, models: Path, tmp_path_factory: Any
) -> tuple[Path, dict[str, bytes], Score]:
    """Images and their scores; the files of both; how they are scored."""
    root = tmp_path_factory.mktemp("tables")
    options = dict(KINDS[request.param])
    if "model" in options:
        options["model"] = str(models / str(options["model"]))
    shutil.copytree(images, root / "images")

    def score(out: Path, **more: Any) -> Any:
        return score_here(root / "images", out, **options, **more)

    score(root / "scores")
    return root, tree(root), score


KINDS_OF_CUTS = pytest.mark.parametrize(
    "once", ["tables", pytest.param("embeddings", marks=pytest.mark.system)],
    indirect=True, scope="module",
)  # fmt: skip
"""For tests that score or remove again and again."""


@pytest.fixture
def root(once: tuple[Path, dict[str, bytes], Score]) -> Path:
    restore(once[0], once[1])
    return once[0]


@pytest.fixture
def score(once: tuple[Path, dict[str, bytes], Score]) -> Score:
    return once[2]


def shard_names(scores: Path) -> list[str]:
    return [shard.name for shard in manifest_of(scores).shards]


def table_of(scores: Path, name: str) -> pa.Table:
    columns = table_columns("latents", manifest_of(scores).settings)
    return read_table((scores / name).read_bytes(), columns, what=name)


def number_in(scores: Path) -> str:
    """A column of numbers."""
    return next(n for n, kind in columns_of(manifest_of(scores).settings).items() if kind != TEXT)


# --- what lies there
def test_a_shard_is_a_table_alone_or_a_tar_of_arrays_beside_it(root: Path) -> None:
    scores = root / "scores"
    has_tars = bool([*scores.glob("*/*.tar")])
    beside = (".tar", ".tar.idx", ".parquet") if has_tars else (".parquet",)
    units = [receipt.unit for receipt in manifest_of(scores).receipts]
    assert {name for name in tree(scores) if name[0].isdigit()} == {
        f"{unit}{end}" for unit in units for end in beside
    }
    for receipt in manifest_of(scores).receipts:
        (shard,) = receipt.shards
        assert shard.name == f"{receipt.unit}{beside[0]}"
        data = (scores / shard.name).read_bytes()
        assert (shard.nbytes, shard.digest) == (len(data), blake3(data).hexdigest())
        table = (scores / f"{receipt.unit}.parquet").read_bytes()
        assert receipt.table_digest(shard) == blake3(table).hexdigest()
        assert pq.read_metadata(io.BytesIO(table)).num_rows == shard.samples
    for name in map("{}.parquet".format, units):
        rows = table_of(scores, name)
        images = pq.read_table(root / "images" / name)
        assert rows["key"].to_pylist() == images["key"].to_pylist()
        assert rows["source"].to_pylist() == images["source"].to_pylist()
        assert rows["row"].to_pylist() == [*range(len(images))]


def test_two_columns_of_numbers_take_40_bytes_a_sample_at_most() -> None:
    chance, count = np.random.default_rng(7), 10_000
    table = TableWriter(table_columns("latents", SETTINGS))
    scores = chance.normal((0.25, 5), (0.05, 0.7), (count, 2)).astype(np.float32)
    for number, both in enumerate(scores):
        facts = {
            "row": number,
            "source": f"{chance.integers(1 << 62):016x}.jpg",
            **dict(zip(("similarity", "aesthetic"), map(float, map(str, both)), strict=True)),
        }
        table.add(f"{7:06d}{number:06d}", facts)
    assert len(table.finish()) <= 40 * count


def test_plain_pandas_and_duckdb_read_them_as_the_pages_say(
    scores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known: dict[str, Any] = {}
    exec(format_recipe("read_scores"), known)
    rows = known["read_scores"](scores).drop(columns="row").to_dict("records")
    assert {row["key"]: row for row in rows} == columns_in(scores)
    page = ROOT / "wdsprep/scoring/README.md"
    (code,) = (code for _kind, code in blocks(page, "py") if "duckdb" in code)
    code = code.replace("shards/scores", str(scores)).replace("language", "vit_nsfw > 0.5")
    exec(code, {})
    assert "count_star()" in capsys.readouterr().out


# --- what harms them
@pytest.mark.parametrize("harm", ["cut", "lost", "another"])
def test_a_table_that_is_not_as_it_was_costs_its_unit_which_is_scored_again(
    root: Path, score: Score, harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is kept of the sound ones
    scores, before = root / "scores", tree(root / "scores")
    path = scores / "64/000001.parquet"
    changed = {"cut": path.read_bytes()[:-1], "another": before["64/000000.parquet"]}
    path.unlink() if harm == "lost" else path.write_bytes(changed[harm])
    assert findings(scores) == [f"64/000001.parquet {'missing' if harm == 'lost' else 'damaged'}"]
    asked = {"join": scores, "where": f"{number_in(scores)} > -1"}
    if harm != "another" or is_table(shard_names(scores)[0]):
        with pytest.raises(WdsprepError, match=r"64/000001\.parquet"):
            wdsprep.select(root / "images", tmp_path / "out", **asked)
    assert wdsprep.repair(scores, yes=True).done
    assert not [name for name in tree(scores) if "64/000001" in name]
    assert score(scores).samples == 4
    assert tree(scores) == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"row": 2}, "its positions are not those of its samples"),
        ({"row": 99}, "its positions are not those of its samples"),
        ({"key": "000000000000"}, "it has a key twice"),
        ({"": None}, "it lacks values"),
        ({"": float("nan")}, "it lacks values"),
        ({"text": "of another type"}, "its columns are not those of a table of samples"),
    ],
)
def test_verify_names_a_sealed_table_that_cannot_be(
    root: Path, changed: dict[str, Any], said: str
) -> None:
    scores, name = root / "scores", "64/000000.parquet"
    columns = dict(table_columns("latents", manifest_of(scores).settings))
    number = next(name for name, kind in columns.items() if kind == NUMBER)
    rows = table_of(scores, name).to_pylist()
    rows[1] |= {name or number: value for name, value in changed.items()}
    table = TableWriter(columns | ({"text": TEXT} if "text" in changed else {}))
    for row in rows:
        table.add(row["key"], row)
    (scores / name).write_bytes(data := table.finish())
    reseal(scores, name, data)
    assert [str(one.what) for one in check(scores).findings if one.name == name] == [said]


def reseal(scores: Path, name: str, data: bytes) -> None:
    """State the digest of a table wherever it is stated."""
    digest = blake3(data).hexdigest()

    def change(body: dict[str, Any]) -> None:
        for unit in body.get("units", [body]):
            unit["files"] |= {name: digest} if name in unit["files"] else {}
            for shard in unit["shards"]:
                if shard["name"] == name:
                    shard |= {"blake3": digest, "nbytes": len(data)}

    for path in (scores / "wdsprep.json", *scores.glob("receipts/*/*.json")):
        path.write_bytes(resealed(path.read_bytes(), change))


def test_index_rebuild_and_a_run_with_nothing_left_to_do_leave_every_byte(
    root: Path, score: Score
) -> None:
    scores, before = root / "scores", tree(root / "scores")
    assert main(["index", str(scores)]) == 0
    assert tree(scores) == before
    (scores / "wdsprep.json").unlink()
    assert main(["rebuild", str(scores)]) == 0
    assert score(scores).samples == 0
    assert tree(scores) == before


def test_a_lost_table_leads_to_repair_and_index_makes_none_up(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = root / "scores"
    (scores / "64/000001.parquet").unlink()
    before = tree(scores)
    assert main(["index", str(scores)]) == 0
    assert re.search(r"000001.parquet cannot be made: .*wdsprep score", capsys.readouterr().err)
    assert tree(scores) == before
    with pytest.raises(NotFoundError, match=r'000001.parquet is missing: run "wdsprep repair'):
        wdsprep.select(scores, tmp_path / "out", count=3)
    with pytest.raises(UsageError, match=r'000001.parquet is missing: run "wdsprep repair'):
        wdsprep.inspect(scores, "000001000002")


def test_scores_where_images_are_asked_for_are_called_scores(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="is a dataset of scores: give the images"):
        wdsprep.duplicates(root / "scores")
    assert main(["plan", str(root / "scores")]) == 2
    assert "is a dataset of scores: give the images that it was made of" in capsys.readouterr().err


# --- kills, and samples that go
@KINDS_OF_CUTS
def test_cut_off_at_any_write_the_next_run_gives_the_same_bytes(
    score: Score, tmp_path: Path
) -> None:
    with Cut(1_000) as cut:
        score(tmp_path / "whole", limit=4)
    whole = tree(tmp_path / "whole")
    steps = cut.before - cut.left
    assert steps > 4
    for step in range(steps):
        out = tmp_path / str(step)
        with pytest.raises(CutError), Cut(step):
            score(out, limit=4)
        score(out, limit=4)
        assert tree(out) == whole, step


def in_rows(scores: Path, bits: Collection[str]) -> list[str]:
    """The files that have one of these texts, in their bytes or in the rows of a table."""
    files = {name: data for name, data in tree(scores).items() if name != "removed"}
    for name in filter(is_table, [*files]):
        files[name] += repr(table_of(scores, name).to_pylist()).encode()
    return [name for name, data in files.items() if any(bit.encode() in data for bit in bits)]


@pytest.mark.parametrize("alone", [False, True])
def test_no_row_of_a_removed_sample_is_left_and_the_others_stay(
    root: Path, score: Score, alone: bool
) -> None:
    """Out of scores alone it is a reject, and no run scores it again."""
    images, scores = root / "images", root / "scores"
    before = columns_in(scores)
    whole = table_of(scores, "128/000001.parquet")["key"].to_pylist()
    keys = ["000000000001", *whole]
    gone = {key: before.pop(key) for key in keys}
    arrays = [name.removesuffix(".npy") for own in samples_in(scores).values() for name in own][:1]
    kept = {name: arrays_in(scores, name) for name in arrays}
    wdsprep.remove(*([] if alone else [images]), scores, keys=keys, yes=True)
    assert columns_in(scores) == before
    for name, own in kept.items():
        now = arrays_in(scores, name)
        assert all((now[key] == own[key]).all() for key in now)
        assert now.keys() == before.keys()
    assert in_rows(scores, [row["source"] for row in gone.values()]) == []
    assert check(*([] if alone else [images]), scores).findings == ()
    assert score(scores).samples == 0
    if alone:
        wdsprep.repair(scores, yes=True)
        score_again = columns_in(scores)
        assert score_again == before
        wdsprep.remove(images, scores, keys=keys, yes=True)  # the shard of images is another then
        assert columns_in(scores) == before
        assert check(images, scores).findings == ()
        assert score(scores).samples == 0


@KINDS_OF_CUTS
def test_a_removal_that_is_cut_off_at_any_write_ends_with_the_same_files(
    once: tuple[Path, dict[str, bytes], Score], root: Path
) -> None:
    images, scores, key = root / "images", root / "scores", "000000000001"
    with Cut(1_000) as cut:
        wdsprep.remove(images, scores, keys=[key, "000000000000"], yes=True)
    after = {name: data for name, data in tree(root).items() if not name.endswith("removed")}
    for step in range(cut.before - cut.left):
        restore(root, once[1])
        with pytest.raises(CutError), Cut(step):
            wdsprep.remove(images, scores, keys=[key, "000000000000"], yes=True)
        wdsprep.remove(images, scores, keys=[key, "000000000000"], yes=True)
        now = {name: data for name, data in tree(root).items() if not name.endswith("removed")}
        assert now == after, step


# --- samples that are selected, looked at and served
@pytest.mark.parametrize("prefix", [False, True])
def test_scores_follow_the_images_that_are_selected_into_other_shards(
    root: Path, tmp_path: Path, prefix: bool
) -> None:
    scores, start = root / "scores", "0" * prefix
    wdsprep.select(
        [root / "images", scores],
        tmp_path / "{name}",
        where="width > 80",
        samples_per_shard=3,
        prefix=prefix,
    )
    chosen, before = columns_in(tmp_path / "scores"), columns_in(scores)
    assert 3 < len(chosen) < len(before)
    for key, row in chosen.items():
        assert {**row, "key": key.removeprefix(start)} == before[key.removeprefix(start)]
    assert check(tmp_path / "images", tmp_path / "scores").findings == ()
    assert {*samples_in(tmp_path / "scores")} in ({*chosen}, set())


def test_scores_alone_are_selected_by_their_columns(root: Path, tmp_path: Path) -> None:
    scores, before = root / "scores", columns_in(root / "scores")
    name = number_in(scores)
    least = statistics.median(row[name] for row in before.values())
    wdsprep.select(scores, tmp_path / "out", where=f"{name} > {least}", samples_per_shard=4)
    wanted = {key: row for key, row in before.items() if row[name] > least}
    assert 0 < len(wanted) < len(before)
    assert columns_in(tmp_path / "out") == wanted
    assert check(tmp_path / "out").findings == ()


def test_a_column_of_the_images_is_asked_of_the_images(root: Path) -> None:
    with pytest.raises(UsageError, match="for columns of the images, ask these, or join"):
        wdsprep.inspect(root / "scores", where="width > 1")
    found = wdsprep.inspect(root / "images", where="width > 1", join=[root / "scores"])
    assert found.matching == 15


def test_a_sample_is_found_by_its_key_with_its_row_as_json(root: Path) -> None:
    scores = root / "scores"
    for key, row in columns_in(scores).items():
        assert wdsprep.inspect(scores, key).facts["json"] == row


def test_scores_without_embeddings_are_neither_batches_of_their_own_nor_tars_for_energon(
    root: Path, tmp_path: Path
) -> None:
    scores, out = root / "scores", tmp_path / "out"
    if [*scores.glob("*/*.tar")]:
        (batch, *_) = wdsprep.load(scores, global_batch=2)
        assert batch["image_emb"].shape == (2, 24)
        assert wdsprep.export(scores, out, to="energon").samples == 15
        return
    with pytest.raises(UsageError, match="give it to join="):
        wdsprep.load(scores, global_batch=2)
    with pytest.raises(UsageError, match="no tars for Energon: give --to mds"):
        wdsprep.export(scores, out, to="energon")
    assert not out.exists()
