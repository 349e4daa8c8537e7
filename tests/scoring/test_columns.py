"""Columns of scores, where samples are chosen by them."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import wdsprep
from tests.kit.encode_work import Making
from tests.kit.encodes import encode_here, packed, pictures
from tests.kit.packs import write_files
from tests.kit.scores import columns_in, pictures_in, score_here
from tests.kit.sealed_files import resealed
from wdsprep.cli import main
from wdsprep.errors import FingerprintError, FormatError, UsageError
from wdsprep.reporting.inspect import MatchingSamples


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def least(scores: Path) -> float:
    """What half of the pictures reach."""
    return sorted(each["aesthetic"] for each in columns_in(scores).values())[8]


def wanted(scores: Path, least: float) -> set[str]:
    return {key for key, each in columns_in(scores).items() if each["aesthetic"] >= least}


def test_a_condition_on_scores_leaves_the_same_samples_wherever_it_is_asked(
    scores: Path, images: Path, least: float, tmp_path: Path
) -> None:
    where, keys, columns = f"aesthetic >= {least!r}", wanted(scores, least), columns_in(scores)
    options: dict[str, Any] = {"join": scores, "where": where, "global_batch": 1}
    served = {batch["key"][0]: batch for batch in wdsprep.load(images, pixels=64, **options)}
    assert served.keys() == keys
    for key, batch in served.items():
        assert batch["aesthetic"].dtype == torch.float32
        assert batch["aesthetic"].item() == pytest.approx(columns[key]["aesthetic"])
        assert batch["clip_image_emb"].shape == (1, 24)
    with patch("wdsprep.encoding.encode.make_encoder", Making()):
        encode_here(images, tmp_path / "latents")
    assert {batch["key"][0] for batch in wdsprep.load(tmp_path / "latents", **options)} == keys
    rows = wdsprep.table(images, join=[scores]).filter(where)
    assert {key for key, _ in rows.project("key, caption").fetchall()} == keys
    for place, joined in ((scores, ()), (images, scores)):
        found = wdsprep.inspect(place, where=where, join=joined)
        assert isinstance(found, MatchingSamples)
        assert {row["key"] for row in found.first} == keys
    every = wdsprep.select(images, tmp_path / "all", join=scores, where="width > 0")
    assert every.outcomes[str(tmp_path / "all")].manifest.samples == len(columns)
    wdsprep.select([images, scores], tmp_path / "{name}", where=where)
    chosen = columns_in(tmp_path / "scores")
    assert chosen.keys() == keys
    assert chosen.items() <= columns.items()
    assert not wdsprep.verify(tmp_path / "images", tmp_path / "scores").findings


def test_a_list_of_scores_has_no_sizes_and_captions(
    scores: Path, least: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(scores), "--where", f"aesthetic >= {least}", "--limit", "2"]) == 0
    _, *rows, more = capsys.readouterr().out.splitlines()
    assert ([len(row.split()) for row in rows], more[:4]) == ([4, 4], "and ")


def test_another_selection_by_other_scores_into_the_same_place_is_refused(
    images: Path, models: Path, tmp_path: Path
) -> None:
    asked = {"where": "nsfw >= 0"}
    score_here(images, tmp_path / "vit", model=str(models / "vit"))
    score_here(images, tmp_path / "swin", model=str(models / "swin"), label="logo=nsfw")
    wdsprep.select(str(images), str(tmp_path / "out"), join=str(tmp_path / "vit"), **asked)
    with pytest.raises(FingerprintError, match="join: other"):
        wdsprep.select(str(images), str(tmp_path / "out"), join=str(tmp_path / "swin"), **asked)


def test_scores_of_other_images_are_refused(
    scores: Path, images: Path, models: Path, tmp_path: Path
) -> None:
    """Of fewer ones, too."""
    other = packed(pictures(tmp_path / "in", range(30, 45)), tmp_path / "images")
    few = packed(pictures(tmp_path / "few-in", range(30, 34)), tmp_path / "few")
    score_here(few, tmp_path / "scores", model=str(models / "vit"))
    for place, joined in ((other, scores), (images, tmp_path / "scores")):
        with pytest.raises(UsageError, match="were made from different images"):
            wdsprep.load(place, join=joined, pixels=64, global_batch=1)
    with pytest.raises(UsageError, match="were made from different images"):
        wdsprep.select(other, tmp_path / "o", join=scores, where="aesthetic > 1")
    assert not (tmp_path / "o").exists()


def test_scores_that_lack_images_are_refused_by_the_command_that_scores_these(
    models: Path, tmp_path: Path
) -> None:
    """Those of an append, or those that a limit left."""
    images, scores, out = tmp_path / "images", tmp_path / "scores", tmp_path / "out"
    score = partial(score_here, images, scores, model=str(models / "vit"))
    again = 'run the same "wdsprep score" again'
    packed(pictures(tmp_path / "in", range(6)), images)
    score()
    packed(pictures(tmp_path / "in", range(12)), images, "--append")
    for limit in (0, 8):
        if limit:
            score(limit=limit)
        with pytest.raises(UsageError, match=again):
            wdsprep.load(images, join=scores, pixels=64, global_batch=1)
        with pytest.raises(UsageError, match=again):
            wdsprep.select(images, out, join=scores, where="nsfw > 0")
    with pytest.raises(UsageError, match=f"{again}.* and then export"):
        wdsprep.export(images, out, to="parquet", join=[scores])
    done = score()
    assert (done.manifest.samples, done.manifest.complete) == (12, True)


def test_scores_of_images_that_changed_are_not_selected_along(
    images: Path, models: Path, tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(images, tmp_path / "images"))
    score_here(changed, tmp_path / "scores", model=str(models / "vit"))
    wdsprep.remove(str(changed), keys=[next(iter(columns_in(tmp_path / "scores")))], yes=True)
    with pytest.raises(UsageError, match='run the same "wdsprep score" with --redo-changed'):
        wdsprep.select([str(changed), str(tmp_path / "scores")], str(tmp_path / "{name}-half"))


def test_a_column_that_there_is_not_and_a_joined_place_without_a_condition_are_refused(
    scores: Path, images: Path
) -> None:
    for where, said in (("beauty > 0", "no sample has beauty"), ("", "--join adds columns for")):
        with pytest.raises(UsageError, match=said):
            wdsprep.select(images, "out", join=scores, where=where)


def test_scores_made_again_choose_anew(images: Path, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores"
    for label in ("nsfw=bad", "neutral=bad"):
        score_here(images, out, model=str(models / "vit"), label=label, overwrite=True)
        wanted = {key for key, row in columns_in(out).items() if row["bad"] > 0.5}
        options: dict[str, Any] = {"where": "bad > 0.5", "pixels": 64, "global_batch": 1}
        loader = wdsprep.load(images, join=out, **options) if wanted else []
        assert {batch["key"][0] for batch in loader} == wanted


def test_copies_in_several_datasets_are_chosen_by_the_scores_of_each(
    models: Path, tmp_path: Path
) -> None:
    source = pictures(tmp_path / "in", range(6))
    for photo in sorted(source.glob("*.jpg")):
        Image.open(photo).save(tmp_path / "again.jpg", quality=60)
        shutil.copy(tmp_path / "again.jpg", tmp_path / f"in-{photo.name}")
    write_files(tmp_path / "other-in", {p.name: p.read_bytes() for p in tmp_path.glob("in-*.jpg")})
    places = [packed(source, tmp_path / "one"), packed(tmp_path / "other-in", tmp_path / "two")]
    scored = [tmp_path / f"{place.name}-scores" for place in places]
    for place, out in zip(places, scored, strict=True):
        score_here(place, out, model=str(models / "vit"))
    copies = str(tmp_path / "{number}.txt")
    given = [str(out) for out in reversed(scored)]
    found = wdsprep.duplicates(*places, join=given, keep="nsfw", output=copies, workers=1)
    assert found.near >= 4
    values = [{k: each["nsfw"] for k, each in columns_in(out).items()} for out in scored]
    gone = [(tmp_path / f"{number}.txt").read_text().split() for number in (1, 2)]
    assert all(gone)
    for own, other, keys in zip(values, reversed(values), gone, strict=True):
        assert all(own[key] <= other[key] for key in keys)
    out, least = str(tmp_path / "chosen"), sorted(v for own in values for v in own.values())[5]
    wdsprep.select(places, out, join=given, where=f"nsfw >= {least}", prefix=True)
    assert {*pictures_in(Path(out))} == {
        f"{number}{key}"
        for number, own in enumerate(values)
        for key, value in own.items()
        if value >= least
    }
    third = packed(pictures(tmp_path / "third-in", range(30, 36)), tmp_path / "third")
    with pytest.raises(UsageError, match="two-scores is of other images than"):
        wdsprep.duplicates(places[0], third, join=given, keep="nsfw", workers=1)


def test_scores_are_exported_alone_or_with_images_and_a_loader_joins_their_table(
    scores: Path, images: Path, least: float, tmp_path: Path
) -> None:
    columns = {key: row["aesthetic"] for key, row in columns_in(scores).items()}
    wdsprep.export(images, tmp_path / "images", to="parquet", join=[scores])
    rows = pq.read_table(tmp_path / "images").to_pylist()
    assert {row["key"]: row["aesthetic"] for row in rows} == columns
    assert all(row["image"]["bytes"] for row in rows)
    wdsprep.export(scores, tmp_path / "table", to="parquet")
    table = pq.read_table(tmp_path / "table").select(["key", "aesthetic"])
    assert dict(zip(*table.to_pydict().values(), strict=True)) == columns
    pq.write_table(table, tmp_path / "scores.parquet")
    options: dict[str, Any] = {"where": f"aesthetic >= {least}", "pixels": 64, "global_batch": 1}
    loader = wdsprep.load(images, join=tmp_path / "scores.parquet", **options)
    assert {batch["key"][0] for batch in loader} == wanted(scores, least)


def test_a_report_shows_each_column_and_both_ends(
    scores: Path, images: Path, tmp_path: Path
) -> None:
    wdsprep.report(str(images), str(scores), output=str(tmp_path / "r.html"), samples=2)
    page = (tmp_path / "r.html").read_text()
    assert 'id="scores"' in page
    assert f"{scores}, aesthetic" in page
    assert f"{scores}, Caption length" not in page
    assert "Of 15 samples, picked by chance." in page
    by_score = sorted(columns_in(scores).items(), key=lambda pair: pair[1]["aesthetic"])
    part = page.partition('aria-label="Lowest aesthetic"')[2].partition("</section>")[0]
    assert all(key in part for key, _ in by_score[:4])
    assert not any(key in part for key, _ in by_score[4:])


def test_columns_that_do_not_hold_what_settings_say_are_one_line(
    images: Path, models: Path, tmp_path: Path
) -> None:
    """A stranger may seal settings again that call a column of texts one of numbers."""
    own = tmp_path / "scores"
    score_here(images, own, model=str(models / "vit"))
    for path in (own / "wdsprep.json", *own.glob("receipts/**/*.json")):
        path.write_bytes(resealed(path.read_bytes(), _declare_source_a_number))
    said = "scores/64/000000.parquet is damaged: its columns are not those of a table of samples"
    with pytest.raises(FormatError, match=said):
        wdsprep.duplicates(images, join=own, keep="source", hashes=tmp_path / "hashes", workers=1)
    with pytest.raises(FormatError, match=said):
        wdsprep.select(images, tmp_path / "out", join=own, where="source > 1")
    with pytest.raises(FormatError, match=said):
        wdsprep.load(images, join=own, pixels=64, global_batch=1)


def _declare_source_a_number(body: dict[str, Any]) -> None:
    body["settings"]["scores"]["columns"]["source"] = "number"
