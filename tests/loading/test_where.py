"""Conditions on the json: what meets one is served, in an order of its own, and nothing else."""

import json
import logging
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import wdsprep
from tests.kit.conditions import a_condition, a_row
from tests.kit.latent_sets import field, flat, keys, npy, write_latents
from tests.kit.packs import TWENTY, jpeg, pack, samples_of, upload, write_files
from wdsprep.changes.image_hashes import HashedImages, select_and_rank
from wdsprep.dataset.condition_syntax import Condition
from wdsprep.dataset.reindex import index
from wdsprep.dataset.samples import facts_bytes, value_at_path
from wdsprep.errors import DamageError, FingerprintError, NotFoundError, StoreError, UsageError
from wdsprep.reporting.inspect import MatchingSamples

SIZES = (60, 0, 45, 3)
Facts = dict[str, Any]


def facts_of(number: int) -> Facts:
    chance = np.random.default_rng(number)
    meta = {"aesthetic": round(float(chance.uniform(0, 10)), 2), "lang": ["en", "de"][number % 2]}
    if number % 11 == 0:
        del meta["aesthetic"]
    return {"width": 256 + number, "meta": meta, "note": "x" * (number % 7 * 900)}


def write_with_facts(
    url: str,
    sizes: tuple[int, ...] = SIZES,
    facts: Callable[[int], Facts] = facts_of,
    **options: Any,
) -> str:
    """A dataset whose samples have such json, as an image's may be: the longest is beyond what is
    read of a sample's end."""

    def members(key: str, fields: Any) -> Any:
        made = [(item.name, npy(np.full(item.shape, int(key) % 99, "<f2"))) for item in fields]
        text = b"caption " * (int(key) % 3 * 40)
        return [*made, ("json", facts_bytes(facts(int(key)) | {"key": key})), ("txt", text)]

    with patch("tests.kit.latent_sets.members", members):
        return write_latents(url, sizes, **options)


def write_facts(url: str, each: Sequence[Facts]) -> str:
    """A dataset whose samples have these json, by their keys."""

    fields = (field("latent", (2, 2, 2)),)
    return write_with_facts(url, (len(each),), facts=each.__getitem__, fields=fields)


def wanted(holds: Callable[[Facts], bool], count: int = sum(SIZES)) -> set[str]:
    return {f"{number:012d}" for number in range(count) if holds(facts_of(number))}


def is_fine(facts: Facts) -> bool:
    return facts["meta"].get("aesthetic", 0) >= 4 and facts["width"] < 350


FINE = "aesthetic >= 4 and width < 350"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_with_facts(str(tmp_path_factory.mktemp("facts")))


def load(url: Any, **options: Any) -> Any:
    return wdsprep.load(url, **({"global_batch": 4, "rank": 0, "world_size": 1} | options))


def served(url: Any, **options: Any) -> list[str]:
    """The keys of one pass."""
    return flat(keys(load(url, global_batch=1, **options)))


def test_what_meets_a_condition_is_served_once_a_pass(data: str) -> None:
    right = wanted(is_fine)
    assert 30 < len(right) < 80
    assert sorted(served(data, where=FINE)) == sorted(right)
    stream = wdsprep.Stream(data, where="aesthetic >= 4")
    assert sorted(served(stream, where="width < 350")) == sorted(right)
    assert "where='aesthetic >= 4'" in repr(stream)
    raw = load(data, global_batch=1, where=FINE, raw=True)
    assert [sample["__key__"] for sample in raw] == served(data, where=FINE)


@pytest.mark.system
def test_only_conditions_load_pyarrow_and_duckdb_and_none_loads_pandas(
    data: str, cache_home: Path
) -> None:
    script = f"""
import sys, wdsprep
def loaded(**options):
    next(iter(wdsprep.load({data!r}, global_batch=4, rank=0, world_size=1, **options)))
    return {{"duckdb", "pandas", "pyarrow"}} & sys.modules.keys()
assert not loaded()
assert "wdsprep.loading.encoded_batches" not in sys.modules
assert loaded(where={FINE!r}) == {{"duckdb", "pyarrow"}}
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert len(list(cache_home.glob("*.arrays"))) == 1


IDS: list[Facts] = [{"id": 2**53 + number} for number in range(4)]


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_facts(str(tmp_path_factory.mktemp("ids")), IDS)


def test_what_another_evaluator_has_kept_is_not_used(ids: str, cache_home: Path) -> None:
    text = "id == 9007199254740992"
    with taking_wholes_for_floats():
        assert len(served(ids, where=text)) == 2
    assert served(ids, where=text) == ["000000000000"]
    assert len([*cache_home.glob("*.arrays")]) == 2


def taking_wholes_for_floats() -> ExitStack:
    """As an evaluator that compares whole numbers as floats."""
    holds = Condition.holds

    def of_floats(self: Condition, values: Sequence[Any]) -> bool:
        return holds(self, [float(v) if type(v) is int and abs(v) < 10**300 else v for v in values])

    stack = ExitStack()
    stack.enter_context(patch.object(Condition, "holds", of_floats))
    stack.enter_context(patch("wdsprep.loading.subsets.EVALUATOR", 0))
    return stack


def test_a_state_of_another_selection_is_refused(ids: str) -> None:
    """That of the same selection goes on, whatever has evaluated it."""
    texts = ("id > 9007199254740992", "id > 1")
    with taking_wholes_for_floats():
        loaders = [load(ids, where=text, global_batch=1, step=2, epochs=3) for text in texts]
        other, same = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        right = keys(loaders[1])
    with pytest.raises(FingerprintError, match=r"(?s)stream 0 .* at its step 2"):
        load(ids, where=texts[0], global_batch=1).load_state_dict(other)
    again = load(ids, where=texts[1], global_batch=1, epochs=3)
    again.load_state_dict(same)
    assert keys(again) == right


def test_the_pass_is_made_once_and_kept_until_the_dataset_changes(
    data: str, tmp_path: Path, cache_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "wdsprep")
    copy = str(shutil.copytree(data, tmp_path / "copy"))
    first = keys(load(data, where=FINE))
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.search(r"asking the tables of 108 samples .* is kept in " + str(cache_home), line)
    with patch("wdsprep.loading.dataset_tables.SampleSearch.run", side_effect=AssertionError):
        assert keys(load(copy, where=" aesthetic>=4  and (width < 350)")) == first
        cached = {"cache": tmp_path / "cache", "cache_nbytes": 1 << 30}
        with pytest.raises(AssertionError):
            load(data, where=FINE, **cached)
    other = write_with_facts(str(tmp_path / "other"), (60, 0, 45, 4))
    assert len(served(other, where="width > 0")) == 109


@pytest.mark.parametrize("harm", ["cut", "changed", "empty"])
def test_a_kept_file_that_is_not_whole_is_made_again(
    harm: str, data: str, cache_home: Path
) -> None:
    first = keys(load(data, where=FINE))
    (kept,) = cache_home.glob("*.arrays")
    whole = kept.read_bytes()
    middle = len(whole) // 2
    broken = {"cut": whole[:-9], "changed": whole[:7] + b"\xff" + whole[8:], "empty": b""}
    kept.write_bytes(broken[harm])
    assert middle
    assert keys(load(data, where=FINE)) == first
    assert kept.read_bytes() == whole


def test_a_home_is_asked_for_where_something_is_kept_alone(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    with patch.object(Path, "home", side_effect=RuntimeError):
        assert len(served(data)) == sum(SIZES)
        with pytest.raises(UsageError, match=r"no home folder.*: set XDG_CACHE_HOME, or give"):
            load(data, where=FINE)


def test_whose_error_it_is(data: str, cache_home: Path) -> None:
    """A disk that is full is told with the folder, what reading meets without."""

    def no_table(path: Path, *options: Any) -> int:
        if str(path).endswith(".parquet"):
            raise PermissionError(13, "Permission denied")
        return opened(path, *options)

    opened = os.open
    with (
        patch("os.open", no_table),
        pytest.raises(
            StoreError, match=r"256/00000\d\.parquet: permission denied: change its mode"
        ),
    ):
        load(data, where=FINE)
    full = OSError(28, "No space left on device")
    with (
        patch("wdsprep.dataset.kept_file.os.fsync", side_effect=full),
        pytest.raises(StoreError, match=rf"cached in {cache_home}.* \(No space left on device\)"),
    ):
        load(data, where=FINE)
    assert not [*cache_home.glob("*.arrays"), *cache_home.glob("*.begun")]


def test_states_of_other_conditions_are_refused(data: str) -> None:
    options = {"global_batch": 8, "epochs": 3, "where": FINE}
    state = load(data, step=3, **options).state_dict()
    for other in (None, "aesthetic >= 5"):
        with pytest.raises(FingerprintError, match=f"where: {re.escape(FINE)} -> "):
            load(data, **(options | {"where": other})).load_state_dict(state)
    long = " and ".join([FINE] * 200)
    assert len(json.dumps(load(data, where=long).state_dict())) < 1024


def test_a_mixture_may_have_a_condition_for_each(data: str, tmp_path: Path) -> None:
    other = write_with_facts(str(tmp_path / "other"), (40,), base=1000)
    both = [wdsprep.Stream(data, where="lang == 'en'"), wdsprep.Stream(other, where="width < 1270")]
    right = wanted(lambda facts: facts["meta"]["lang"] == "en")
    assert set(served(both)) == right | {f"{1000 + n:012d}" for n in range(14)}


def test_what_no_sample_has_or_meets_is_one_line(data: str, cache_home: Path) -> None:
    with pytest.raises(
        UsageError, match=r"no sample has meta\.score, .* join a table that has them"
    ):
        load(data, where="width > 3 or meta.score > 3")
    assert not list(cache_home.glob("*.arrays"))
    for text, near in [("widht > 3", "width"), ("meta.lng == 'en'", "lang"), ("lange[0]", "lang")]:
        with pytest.raises(UsageError, match=rf"asks for; did you mean {near}\?$"):
            load(data, where=text)
    with pytest.raises(UsageError, match=r"meets where='width < 3': ask for less"):
        load(data, where="width < 3")
    with pytest.raises(UsageError, match="give a condition"):
        load(data, where=" ")


@pytest.mark.parametrize("damage", ["cut", "lost", "of another shard"])
def test_damage_of_a_dataset_is_an_error_and_nothing_is_kept(
    damage: str, data: str, tmp_path: Path, cache_home: Path
) -> None:
    """Else the order would be this machine's, and the whole copy of another would find it kept."""
    url = str(shutil.copytree(data, tmp_path / "copy"))
    table, other = (Path(url, f"256/00000{number}.parquet") for number in (0, 2))
    if damage == "lost":
        table.unlink()
    else:
        table.write_bytes(table.read_bytes()[:-9] if damage == "cut" else other.read_bytes())
    step = "index" if damage == "lost" else "repair"
    with pytest.raises((DamageError, NotFoundError), match=rf"000000\.parquet .*wdsprep {step} "):
        load(url, where="width > 0")
    assert not list(cache_home.glob("*.arrays"))


def damaged_copy(data: str, folder: Path) -> str:
    """With three samples whose json is none."""
    url = str(shutil.copytree(data, folder, ignore=shutil.ignore_patterns("*.parquet")))
    tar = Path(url, "256/000000.tar")
    offsets = np.fromfile(f"{tar}.idx", "<u8").astype(int).tolist()
    whole = bytearray(tar.read_bytes())
    for number in (0, 5, 7):
        at = whole.index(b'{"key"', offsets[number])
        whole[at] = ord("[")
    tar.write_bytes(whole)
    return url


@pytest.mark.parametrize("has_tables", [False, True])
def test_tars_without_a_manifest_are_what_they_hold(
    has_tables: bool, data: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = damaged_copy(data, tmp_path / "copy")
    Path(url, "wdsprep.json").unlink()
    if has_tables:
        index(url)
    left = {f"{number:012d}" for number in range(sum(SIZES))} - {f"{n:012d}" for n in (0, 5, 7)}
    options = {"where": "width > 0 or not width > 0", "raw": True}
    assert {sample["__key__"] for sample in load(url, global_batch=1, **options)} == left
    assert "left out 3 samples whose json is damaged or missing" in caplog.text


def test_images_and_their_crops(tmp_path: Path) -> None:
    sizes = [(64, 80), (100, 90), (200, 136), (130, 300)] * 4
    files: Mapping[str, bytes | str] = {
        f"{n:02d}.jpg": jpeg(n, size) for n, size in enumerate(sizes)
    }
    images = pack(write_files(tmp_path / "photos", dict(files)), tmp_path / "images",
                  "--buckets", "64,128", "--samples-per-shard", "6")  # fmt: skip
    found = list(load(images, global_batch=1, where="width > height", fields=("json", "key")))
    assert len(found) == 8
    assert all(batch["json"][0]["width"] > batch["json"][0]["height"] for batch in found)
    crops = list(load(images, global_batch=1, where="width > height", pixels=128))
    assert len(crops) == 4


def test_every_command_finds_what_the_closures_find_in_the_json(
    tmp_path: Path, bucket: str
) -> None:
    rng = random.Random(11)
    files: dict[str, bytes | str] = {}
    for number in range(40):
        meta = a_row(rng)["meta"]
        facts = {
            **(meta if isinstance(meta, dict) else {"marks": meta}),
            "caption": f"car {number}",
        }
        files[f"{number:02d}.json"] = facts_bytes(facts).decode()
        files[f"{number:02d}.jpg"] = jpeg(number, (64 + number, 64))
    images = pack(write_files(tmp_path / "photos", files), tmp_path / "images", *TWENTY)
    each = {sample["json"]["key"]: sample["json"] for sample in samples_of(images)}
    upload(images, url := f"s3://{bucket}/commands")
    tried = 0
    while tried < 16:
        text = a_condition(rng)
        where, found = Condition(text), list[str]()
        seen = [False] * len(where.names)
        for key, facts in each.items():
            values = [value_at_path(facts, path) for path in where.names]
            seen = [was or value is not None for was, value in zip(seen, values, strict=True)]
            found += [key] * where.holds(values)
        if not all(seen) or not found:
            continue
        tried += 1
        inspected = wdsprep.inspect(images, where=text, limit=99)
        assert isinstance(inspected, MatchingSamples)
        assert [row["key"] for row in inspected.first] == found, text
        raw = load(images, where=text, global_batch=1, raw=True)
        assert sorted(sample["__key__"] for sample in raw) == found, text
        compared = select_and_rank([looked_at(images)], (), text, "")[0]
        assert compared is not None
        assert [key for key, is_in in zip(each, compared, strict=True) if is_in] == found, text
        if tried % 8 == 0:
            wdsprep.select(images, out := tmp_path / f"{tried}", where=text, workers=1)
            assert [sample["json"]["key"] for sample in samples_of(out)] == found, text
            there = load(url, where=text, global_batch=1, raw=True)
            assert sorted(sample["__key__"] for sample in there) == found, text


def looked_at(images: Path) -> HashedImages:
    return HashedImages(str(images), str(images), f"{images}-hashes", "")


def test_a_process_that_is_started_maps_positions_again(tmp_path: Path, cache_home: Path) -> None:
    """Where their file is gone it is sent them, as another machine is."""
    url = write_latents(str(tmp_path / "set"), (400,), fields=(field("latent", (2, 2, 2)),))
    loader = load(url, where="key != '000000000007'", global_batch=1)

    def came(data: Any) -> list[str]:
        return flat(keys(ForkingPickler.loads(data)))

    small, whole = ForkingPickler.dumps(loader), pickle.dumps(loader)
    every = sorted(flat(keys(load(url, where="key != '000000000007'", global_batch=1))))
    assert len(every) == 399
    assert len(small) + 4 * len(every) < len(whole) < len(small) + 5 * len(every)
    assert sorted(came(small)) == sorted(came(whole)) == every
    (file,) = cache_home.glob("*.arrays")
    file.unlink()
    with pytest.raises(StoreError, match=r"arrays was deleted just now"):
        came(small)
    assert sorted(came(ForkingPickler.dumps(loader))) == every
