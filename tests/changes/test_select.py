"""Selections: which samples, in which shards, and that they are datasets like all others."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import wdsprep
from tests.kit.damaged import findings, flip, state
from tests.kit.encodes import encode_here, packed, pictures, samples_in
from tests.kit.packs import manifest_of, tars, tree
from wdsprep.changes.options import read_lines
from wdsprep.cli import main
from wdsprep.dataset.stored_dataset import read_receipt
from wdsprep.errors import FingerprintError, NotFoundError, UsageError, WdsprepError
from wdsprep.runners.job import JobListener
from wdsprep.store import open_store
from wdsprep.tables.query import WantedTexts

pytestmark = pytest.mark.usefixtures("no_models")
OPTIONS: dict[str, dict[str, Any]] = {"latents": {}, "shaped": {"shapes": "nearest:16,2"}}


def is_fifth(key: str) -> bool:
    return int(key) % 5 == 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, latents of most of them, and latents in shapes."""
    root = tmp_path_factory.mktemp("made")
    packed(pictures(root / "in", range(42)), root / "images")
    for name, options in OPTIONS.items():
        encode_here(root / "images", root / name, **options)
        wdsprep.remove(root / name, keys=filter(is_fifth, samples_in(root / name)), yes=True)
    return root


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def sound(*datasets: Path | str) -> bool:
    return findings(*datasets) == []


def all_keys(made: Path) -> list[str]:
    return sorted(samples_in(made / "images"))


# --- what it gives


@pytest.mark.parametrize("latents", OPTIONS)
def test_images_and_what_was_made_of_them_are_a_pair_again(made: Path, latents: str) -> None:
    selected = wdsprep.select(
        [made / "images", made / latents], "sub/{name}", count=30, seed=3, samples_per_shard=8
    )
    assert [one.manifest.complete for one in selected.outcomes.values()] == [True, True]
    images, of = samples_in("sub/images"), samples_in(f"sub/{latents}")
    assert len(images) == 30
    assert images.items() <= samples_in(made / "images").items()
    assert of.items() <= samples_in(made / latents).items()
    assert images.keys() - of.keys() == set(filter(is_fifth, images)) != set()
    assert sound("sub/images", f"sub/{latents}")
    shards = manifest_of(Path("sub/images")).shards
    assert max(shard.samples for shard in shards) == 8
    settings = manifest_of(made / latents).settings
    assert manifest_of(Path(f"sub/{latents}")).settings == settings
    assert manifest_of(Path(f"sub/{latents}")).extra["model"] == "tiny"
    assert encode_here("sub/images", f"sub/{latents}", **OPTIONS[latents]).samples == 0


def test_a_reshard_has_the_bytes_of_a_pack_in_such_shards(made: Path, tmp_path: Path) -> None:
    packed(made / "in", tmp_path / "large", "--samples-per-shard", "100")
    wdsprep.select(tmp_path / "large", "small", samples_per_shard=5)
    wdsprep.select("small", "again", samples_per_shard=100)
    sizes = [shard.samples for shard in manifest_of(Path("small")).shards]
    assert sizes == [5, 5, 5, 5, 5, 3, 5, 5, 4]
    both = [sorted(tars(root).values()) for root in ("again", tmp_path / "large")]
    assert both[0] == both[1]
    assert manifest_of(Path("again")).counts == manifest_of(tmp_path / "large").counts
    wdsprep.select(tmp_path / "large", "light", max_shard_size="30kB")
    assert max(shard.nbytes for shard in manifest_of(Path("light")).shards) < 32_000


def test_the_parts_of_a_split_are_all_of_it_and_become_one_again(made: Path) -> None:
    for name in ("one", "other"):
        wdsprep.select(made / "images", f"{name}/{{split}}", split="train=0.7,val=0.2,test=0.1")
    train, val, test = (samples_in(f"one/{part}") for part in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (29, 8, 5)
    assert train | val | test == samples_in(made / "images")
    assert tree("one") == tree("other")
    assert train.keys() != set(all_keys(made)[:29])
    wdsprep.select(["one/val", "one/test", "one/train"], "whole")
    assert samples_in("whole") == samples_in(made / "images")
    assert sound("whole", "one/val")


def test_a_condition_asks_of_a_table_only_the_columns_that_it_names(
    made: Path, tmp_path: Path
) -> None:
    keys = all_keys(made)
    some = {"key": keys, "a": [*range(len(keys))], "empty": pa.nulls(len(keys), pa.float64())}
    huge = {"huge": pa.array([2**64 - 1 - n for n in range(len(keys))], pa.uint64())}
    pq.write_table(pa.table({**some, **huge}), tmp_path / "t.parquet")
    for number, where in enumerate(["a >= 5", f"huge <= {2**64 - 6}", "width > 0"]):
        out = f"out-{number}"
        wdsprep.select(made / "images", out, join=tmp_path / "t.parquet", where=where)
        assert samples_in(out).keys() == {*(keys if number == 2 else keys[5:])}


def test_a_condition_and_keys_are_both_met(made: Path) -> None:
    keys = all_keys(made)[3:33]
    Path("keys.txt").write_text("\n".join(keys))
    wdsprep.select(made / "images", "sub", keys="keys.txt", where="width >= 100")
    images = samples_in(made / "images")
    wide = [k for k in keys if json.loads(images[k]["json"])["width"] >= 100]
    assert sorted(samples_in("sub")) == wide != []
    wdsprep.select(made / "shaped", "of-latents", keys=[k for k in keys if not is_fifth(k)])
    assert sorted(samples_in("of-latents")) == [k for k in keys if not is_fifth(k)]
    assert sound("of-latents")
    assert sound("sub")


def test_equal_keys_are_refused_and_latents_that_are_given_twice(made: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(made / "images", f"{name}/images")
    shutil.copytree(made / "latents", "b/latents")
    latents = str(made / "latents")
    for datasets, said in (
        (["a/images", "b/images"], "b/images have the key 0+ more than once: give --prefix"),
        (["a/images", latents, "b/latents"], "are not the latents of .*, one of each: give"),
        (["a/images", "b/images", latents], "are not the latents of a/images and b/images, one"),
    ):
        with pytest.raises(UsageError, match=said):
            wdsprep.select(datasets, "both/{name}", prefix=latents in datasets)


def test_other_datasets_with_the_same_keys_get_a_prefix(made: Path, tmp_path: Path) -> None:
    packed(pictures(tmp_path / "in", range(50, 62)), tmp_path / "more/images")
    encode_here(tmp_path / "more/images", tmp_path / "more/latents")
    pairs = [root / name for name in ("images", "latents") for root in (made, tmp_path / "more")]
    wdsprep.select(pairs[::-1], "both/{name}", prefix=True)
    images, latents = samples_in("both/images"), samples_in("both/latents")
    assert {key[0] for key in images} == {"0", "1"}
    assert len(images) == 54
    for key, sample in images.items():
        before = samples_in((tmp_path / "more", made)[int(key[0])] / "images")[key[1:]]
        assert sample["jpg"] == before["jpg"]
        assert json.loads(sample["json"]) == {**json.loads(before["json"]), "key": key}
    assert images.keys() - latents.keys() == {k for k in images if k[0] == "1" and is_fifth(k[1:])}
    assert sound("both/images", "both/latents")


def test_a_receipt_that_claims_many_inputs_is_refused_and_takes_no_memory(
    made: Path, tmp_path: Path
) -> None:
    latents = Path(shutil.copytree(made / "latents", tmp_path / "latents"))
    receipt, *_ = manifest_of(latents).receipts
    state(latents, replace(receipt, inputs=20_000_000))
    tracemalloc.start()
    with pytest.raises(WdsprepError, match="is damaged"):
        wdsprep.select([made / "images", latents], "sub/{name}", workers=1)
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()


def test_a_selection_is_inspected_reported_and_loaded(made: Path) -> None:
    wdsprep.select([made / "images", made / "latents"], "sub/{name}", count=30)
    for key in samples_in("sub/images"):
        assert wdsprep.inspect("sub/images", key).key == key
        assert wdsprep.inspect("sub/latents", key).key == key
    with pytest.raises(NotFoundError):
        wdsprep.inspect("sub/images", "999999000000")
    page = wdsprep.report("sub/images", "sub/latents", output="page.html", samples=1, model="none")
    assert page.nbytes
    batches = wdsprep.load("sub/latents", global_batch=4, epochs=1, seed=1)
    served = [key for batch in batches for key in batch["key"]]
    assert set(served) <= samples_in("sub/latents").keys()


# --- runs


def test_a_second_run_does_nothing(made: Path) -> None:
    datasets = [made / "images", made / "shaped"]
    wdsprep.select(datasets, "sub/{name}", count=40, samples_per_shard=7)
    whole, before = tree("sub"), {path: path.stat().st_ino for path in Path("sub").rglob("*.*")}
    again = wdsprep.select(datasets, "sub/{name}", count=40, samples_per_shard=7)
    assert [outcome.samples for outcome in again.outcomes.values()] == [0, 0]
    same = {path: path.stat().st_ino for path in Path("sub").rglob("*.*")}
    assert {p for p in before if before[p] != same[p]} <= {*Path("sub").rglob("wdsprep.json")}
    assert tree("sub") == whole


def test_what_was_damaged_is_copied_again(made: Path) -> None:
    wdsprep.select(made / "images", "sub", samples_per_shard=9)
    before = tree("sub")
    flip(Path("sub") / manifest_of(Path("sub")).shards[1].name, 40_000)
    (finding,) = wdsprep.verify("sub").findings
    assert 'then the same "wdsprep select" again' in str(finding)
    wdsprep.repair("sub", yes=True)
    again = wdsprep.select(made / "images", "sub", samples_per_shard=9)
    assert again.outcomes["sub"].samples == 9
    assert tree("sub") == before


def test_a_dataset_that_changes_meanwhile_is_not_copied(made: Path) -> None:
    shutil.copytree(made / "images", "images")
    receipt = Path("images/receipts/000003.json")

    def change(_status: Any) -> None:
        other = read_receipt(open_store(str(made / "images")), "000002")
        receipt.write_bytes(other.to_bytes())

    with pytest.raises(FingerprintError, match="images has changed while samples were copied"):
        wdsprep.select("images", "sub", listener=JobListener(on_status=change))
    assert not list(Path("sub").rglob("*.tar"))


def test_what_was_removed_from_a_selection_stays_away(made: Path) -> None:
    datasets = [made / "images", made / "latents"]
    wdsprep.select(datasets, "sub/{name}", count=30, samples_per_shard=8)
    gone = sorted(samples_in("sub/latents"))[:2]
    removed = wdsprep.remove("sub/images", "sub/latents", keys=gone, yes=True)
    assert removed.is_whole
    assert not samples_in("sub/images").keys() & {*gone}
    assert sound("sub/images", "sub/latents")
    before = samples_in("sub/images"), samples_in("sub/latents")
    shutil.rmtree("sub/images/receipts")
    shutil.rmtree("sub/latents")
    wdsprep.select(datasets, "sub/{name}", count=30, samples_per_shard=8)
    assert (samples_in("sub/images"), samples_in("sub/latents")) == before
    assert manifest_of(Path("sub/images")).rejects == {"removed": 2}
    assert sound("sub/images", "sub/latents")


# --- what is refused

Asks = Callable[[Path], Any]


def select_of(*names: str, out: str = "sub", **options: Any) -> Asks:
    return lambda made: wdsprep.select([made / name for name in names], out, **options)


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        (
            select_of("images", "latents"),
            r"cannot become one.*\(kind: images and latents\).*OUT/\{name\}",
        ),
        (select_of("images", keys=["1", "000000000000"]), r"1 key that no sample.*\(1\)"),
        (select_of("images", where="width > 10000"), "nothing is selected"),
        (select_of("images", count=43), "--count 43 is more than the 42 samples"),
        (select_of("images", split="a=0.5"), r"--split and \{split\} in OUT go together"),
        (select_of("images", out="{split}"), r"--split and \{split\} in OUT go together"),
        (select_of("images", out="{spilt}/{name}", split="a=0.5"), r"has \{spilt\} in it, which"),
        (select_of("images", out="{split}", split="a=0.5,a=0.1"), "train=0.9,val=0.1"),
        (select_of("images", out="{split}", split="a=0.5,b=0.6"), "1 or less together"),
        (select_of("images", out="{split}", split="a=0.9,b=0.001"), "leaves none of .* for b"),
        (select_of("latents", "shaped"), r"cannot become one dataset \(.*shapes"),
        (select_of("latents", "shaped", out="sub/{name}"), "give these too"),
        (select_of("images", "images"), "given twice"),
        (select_of("in"), "holds no dataset"),
        (select_of("images", samples_per_shard=0), "give 1 or more"),
        (select_of("images", keys=[]), "nothing is selected"),
    ],
)
def test_one_line_says_what_is_wrong(made: Path, asks: Asks, said: str) -> None:
    with pytest.raises(WdsprepError, match=said) as raised:
        asks(made)
    assert "\n" not in str(raised.value)
    assert not Path("sub").exists()


def test_nothing_is_written_into_a_source_or_over_another_selection(made: Path) -> None:
    shutil.copytree(made / "images", "images")
    shutil.copytree(made / "latents", "latents")
    for out in ("images", "images/sub", "."):
        with pytest.raises(UsageError, match="lies in"):
            wdsprep.select("images", out)
    wdsprep.select(["images", "latents"], "sub/{name}", count=9)
    with pytest.raises(FingerprintError, match=r"count: 9, now 8.*wdsprep select"):
        wdsprep.select(["images", "latents"], "sub/{name}", count=8)
    with pytest.raises(FingerprintError, match="holds another selection, or one of other images"):
        wdsprep.select("latents", "sub/latents", count=8)
    with pytest.raises(FingerprintError, match="source: selection, now folder"):
        packed(made / "in", Path("sub/images"))
    wdsprep.select(["images", "latents"], "sub/{name}", count=8, overwrite=True)
    assert len(samples_in("sub/latents")) <= len(samples_in("sub/images")) == 8
    assert sound("sub/images", "sub/latents")


def test_a_dataset_that_is_not_whole_or_not_a_pair_is_refused(made: Path) -> None:
    shutil.copytree(made / "images", "images")
    Path("images/receipts/000001.json").unlink()
    with pytest.raises(UsageError, match=r'not complete: run the same "wdsprep pack" again'):
        wdsprep.select("images", "sub")
    wdsprep.select(made / "images", "half", count=20)
    with pytest.raises(UsageError, match="was not made of half as it is now"):
        wdsprep.select(["half", made / "latents"], "sub/{name}")
    assert not Path("sub").exists()


# --- the command, and S3


def test_the_command_tells_what_came_of_it(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["select", str(made / "images"), str(made / "latents"), "sub/{name}", "--count", "30"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "sub/images: 30 samples in 2 shards" in out
    assert "next: wdsprep verify sub/images sub/latents" in out
    assert main([*words, "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["dataset"], first["copied"], first["samples"]) == ("sub/images", 0, 30)
    assert (second["kind"], second["complete"]) == ("latents", True)


def test_a_list_of_keys_is_the_same_in_any_order_and_however_often_a_key_comes(
    tmp_path: Path,
) -> None:
    keys = [f"{number:012d}" for number in range(300)]
    (tmp_path / "keys").write_text(" \r\n\n".join(keys[:200] + keys[100:]))
    lists = (tmp_path / "keys", keys[::-1], keys[1:])
    marks = [WantedTexts("key", read_lines("keys", given)).marks for given in lists]
    assert marks[0] == marks[1] != marks[2]
