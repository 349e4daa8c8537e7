"""What was removed is in no file any more, all else is as before, and nothing brings it back."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pyarrow import parquet as pq

import wdsprep
from tests.kit.damaged import check, findings, flip, restore
from tests.kit.encodes import Here, encode_here, members, positions_in, samples_in
from tests.kit.kills import Cut, CutError
from tests.kit.packs import (
    check_tables,
    jpeg,
    manifest_of,
    pack,
    rejects_of,
    tree,
    upload,
    write_files,
    write_table,
)
from tests.kit.sealed_files import receipt_of_images
from tests.kit.sites import FAST, open_site, table_of
from wdsprep.changes import copy_samples, find_samples
from wdsprep.changes.find_samples import SampleFinder
from wdsprep.changes.options import RemoveOptions
from wdsprep.changes.remove import Removal
from wdsprep.checks.findings import Kind
from wdsprep.checks.repair import do_repair, plan_repair
from wdsprep.cli import main
from wdsprep.dataset.draft import Draft
from wdsprep.dataset.file_names import MANIFEST, MANIFEST_HOLD, is_table, table_name, unit_of_file
from wdsprep.dataset.removed_samples import NONE_REMOVED, removed_from, write_removed
from wdsprep.dataset.stored_dataset import write_rebuilt
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import (
    BusyError,
    DamageError,
    FingerprintError,
    FormatError,
    FullError,
    NotFoundError,
    UsageError,
    WdsprepError,
)
from wdsprep.runners.make_runner import InProcessRunner
from wdsprep.store import open_store

pytestmark = pytest.mark.usefixtures("no_models")
SIZES = ((64, 80), (100, 90), (200, 136))  # two of bucket 64, one of 128
WEB = (*FAST, "--buckets", "32", "--ignore-robots")
SLICES = ("--buckets", "64,128", "--samples-per-shard", "6")
GONE = ["000000000001", "000001000003", "000001000004"]
Pair = tuple[Path, Path, Path]
Once = tuple[Pair, dict[Path, dict[str, bytes]]]


def photo(number: int) -> bytes:
    return jpeg(number, SIZES[number % 3])


def source(root: Path, count: int = 18) -> Path:
    """Photos, of which each has a caption of its own; two are none."""
    files: dict[str, bytes | str] = {}
    for number in range(count):
        files[f"photo-{number:04d}.jpg"] = photo(number)
        files[f"photo-{number:04d}.txt"] = f"the caption of number {number:04d} alone"
    return write_files(root, {**files, "photo-0005.jpg": b"none", "photo-0011.jpg": b"none"})


def packed(root: Path, out: Path, *options: str) -> Path:
    return pack(root, out, *SLICES, *options)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    root = tmp_path_factory.mktemp("once")
    pair = source(root / "in"), root / "images", root / "latents"
    packed(*pair[:2])
    encode_here(*pair[1:])
    return pair, {place: tree(place) for place in pair}


@pytest.fixture
def pair(once: Once) -> Pair:
    """A source of 18 photos, their images in three slices and two buckets, and their latents."""
    for place, files in once[1].items():
        restore(place, files)
    return once[0]


@pytest.fixture
def with_shard(pair: Pair) -> list[str]:
    """Some keys, and all of a shard."""
    return [*GONE, *members(pair[1] / "128/000001.tar")]


def remove(*datasets: Path | str, **asked: Any) -> Removal:
    return wdsprep.remove(*datasets, yes=True, **asked)


def removed_keys(root: Path) -> list[str]:
    return [reject["key"] for reject in rejects_of(root) if reject["code"] == "removed"]


def sources_of(root: Path) -> set[str]:
    return {json.loads(fields["json"])["source"] for fields in samples_in(root).values()}


def traces(gone: dict[str, dict[str, bytes]]) -> list[bytes]:
    """What nobody may find any more: images, captions and sources, arrays."""
    found = []
    for fields in gone.values():
        facts = json.loads(fields["json"])
        found += [facts["source"].encode(), facts["caption"].encode()]
        found += [data for name, data in fields.items() if name.endswith(("jpg", "npy"))]
    return found


def in_files(root: Path, bits: list[bytes]) -> list[str]:
    """But in the lists of inputs: names of files stand there, which the source has still."""
    files = {name: data for name, data in tree(root).items() if not name.startswith("inputs/")}
    for name in [name for name in files if is_table(name)]:  # whose bytes are compressed
        files[name] += repr(pq.read_table(BytesIO(files[name])).to_pylist()).encode()
    return [name for name, data in files.items() if any(bit in data for bit in bits)]


def test_no_byte_of_it_is_left_and_all_others_are_as_before(
    pair: Pair, with_shard: list[str]
) -> None:
    """And neither `pack` nor `encode` finds anything to do after it."""
    root, images, latents = pair
    before = {place: samples_in(place) for place in (images, latents)}
    files = {place: tree(place) for place in (images, latents)}
    gone = {place: {key: before[place].pop(key) for key in with_shard} for place in before}
    done = remove(images, latents, keys=with_shard)
    assert [(p.samples, p.rejects) for p in done.places] == [(len(with_shard), 0)] * 2
    assert {place: samples_in(place) for place in before} == before
    for place in before:
        assert list(samples_in(place)) == list(before[place])
        assert in_files(place, traces(gone[place])) == []
        assert not list(place.rglob("128/000001*"))  # a shard that loses all
        check_tables(place)
        assert manifest_of(place).complete
    assert check(images, latents).findings == check(images, latents).notes == ()
    assert sorted(removed_keys(images)) == sorted(with_shard)
    removed = [reject for reject in rejects_of(images) if reject["code"] == "removed"]
    assert {(r["source"], r["detail"], "url" in r) for r in removed} == {("", "", False)}
    touched = {"000000", "000001"}
    for place in before:
        others = {
            n: d for n, d in files[place].items() if Path(n).stem.split(".")[0] not in touched
        }
        now = tree(place)
        assert {n for n, d in others.items() if now.get(n) != d} == {"wdsprep.json"}
    after = {place: tree(place) for place in before}
    packed(root, images)
    assert encode_here(images, latents).samples == 0
    assert remove(images, latents, keys=with_shard).is_needed is False
    assert {place: tree(place) for place in before} == after


def test_what_a_repair_has_packed_again_and_an_overwrite_leave_it_out(pair: Pair) -> None:
    root, images, _ = pair
    remove(images, keys=GONE)
    after = tree(images)
    flip(images / "64/000001.tar", 5_000)
    do_repair(plan_repair(check(images).surveys[0]))
    packed(root, images)
    assert tree(images) == after
    packed(root, images, "--overwrite")
    assert tree(images).keys() - after.keys() == {"edition"}
    same = {"edition", "removed"}
    assert {n: d for n, d in tree(images).items() if n not in same} == {
        n: d for n, d in after.items() if n not in same
    }


@pytest.mark.parametrize("keep_copies", [False, True])
def test_an_append_leaves_out_the_same_picture_under_another_name(
    pair: Pair, keep_copies: bool
) -> None:
    """Unless copies may come."""
    root, images, _ = pair
    remove(images, keys=GONE[0], keep_copies=keep_copies)
    shutil.copy(root / "photo-0001.jpg", root / "zzz.jpg")
    shutil.copy(root / "photo-0002.jpg", root / "zzy.jpg")
    packed(root, images, "--append")
    removed = GONE[:1] if keep_copies else [GONE[0], "000003000001"]
    assert removed_keys(images) == removed
    assert {"zzy.jpg", *["zzz.jpg"] * keep_copies} <= sources_of(images)


def test_digests_and_sources_are_found_in_images_and_go_out_of_their_latents(
    pair: Pair, tmp_path: Path
) -> None:
    _, images, latents = pair
    digests = tmp_path / "digests.txt"
    digests.write_text(f"{hashlib.sha256(photo(1)).hexdigest().upper()}\n\n{'0' * 64}\n")
    done = remove(images, latents, sha256=digests, sources=["photo-0009.jpg", "photo-0011.jpg"])
    assert [(p.samples, p.rejects) for p in done.places] == [(2, 1), (2, 0)]
    assert done.unmatched == 1
    assert removed_keys(images) == ["000000000001", "000001000003", "000001000005"]
    assert check(images, latents).findings == ()
    with pytest.raises(UsageError, match="give the images"):
        remove(latents, sources=["photo-0002.jpg"])
    with pytest.raises(UsageError, match="is not a SHA-256 digest"):
        remove(images, sha256=["abc"])


@pytest.mark.parametrize("harmed", ["lost", "cut", "of other samples"])
def test_a_table_that_is_not_the_one_of_its_tar_hides_no_sample(pair: Pair, harmed: str) -> None:
    """The tar is asked then. The table of a shard that loses samples is a sound one again."""
    _, images, latents = pair
    table = images / "64/000001.parquet"
    if harmed == "of other samples":
        table.write_bytes((images / "64/000000.parquet").read_bytes())
    elif harmed == "cut":
        table.write_bytes(table.read_bytes()[:-1])
    else:
        table.unlink()
    gone = {key: fields for key, fields in samples_in(images).items() if key in GONE[1:]}
    sources = [json.loads(fields["json"])["source"] for fields in gone.values()]
    assert remove(images, latents, sources=sources).unmatched == 0
    assert in_files(images, traces(gone)) == []
    assert check(images, latents).findings == ()


def test_digests_of_what_came_are_asked_of_the_tables_where_it_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of images that were converted, those of the stored bytes are asked for as well."""
    tiff, hashed = BytesIO(), "--compute-hash=sha256"
    Image.effect_noise((80, 80), 64).convert("CMYK").save(tiff, "TIFF")
    kept, converted = {"a.jpg": photo(1), "b.jpg": photo(2)}, {"c.tif": tiff.getvalue()}
    images, other = (
        packed(write_files(tmp_path / name, files), tmp_path / f"{name}-out", hashed)
        for name, files in (("kept", kept), ("converted", converted))
    )
    (stored,) = (fields["png"] for fields in samples_in(other).values())
    digests = [hashlib.sha256(data).hexdigest() for data in (photo(2), stored)]
    removal = wdsprep.remove(images, other, sha256=digests)
    assert [place.samples for place in removal.places] == [1, 1]
    monkeypatch.setattr(find_samples, "open_tape", None)  # no tar is read
    assert remove(images, sha256=digests).places[0].samples == 1


@pytest.mark.parametrize(
    ("field", "value", "other"),
    [("url", "http://host/ü/{}", "http://host"), ("sha256", "{:064X}", f"{9:064x}")],
)
def test_what_another_program_noted_of_an_image_is_found_in_the_json(
    tmp_path: Path, field: str, value: str, other: str
) -> None:
    files: dict[str, bytes | str] = {f"{n}.jpg": photo(n) for n in range(3)}
    files |= {f"{n}.json": json.dumps({field: value.format(n)}) for n in range(3)}
    images = packed(write_files(tmp_path / "in", files), tmp_path / "images")
    removal = remove(images, **{field.replace("url", "urls"): [value.format(1), other]})
    assert [place.samples for place in removal.places] == [1]
    assert sorted(samples_in(images)) == ["000000000000", "000000000002"]
    assert check(images).findings == ()


def shard_of(root: Path, key: str) -> str:
    return next(s.name for s in manifest_of(root).shards if key in members(root / s.name))


def test_latents_alone_keep_a_reject_and_the_numbers_of_those_that_stay(pair: Pair) -> None:
    _, images, latents = pair
    shard = shard_of(latents, GONE[1])
    keys = list(members(latents / shard))
    remove(latents, keys=GONE[1])
    assert check(images, latents).findings == ()
    path = latents / f"rejects/{shard.removesuffix('.tar')}.jsonl"
    removed = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [r["key"] for r in removed if r["code"] == "removed"] == [GONE[1]]
    kept = [number for number, key in enumerate(keys) if key != GONE[1]]
    assert positions_in(latents, shard) == kept
    assert encode_here(images, latents).samples == 0
    (latents / f"receipts/{shard.removesuffix('.tar')}.json").unlink()
    encode_here(images, latents)
    assert manifest_of(latents).rejects == {"removed": 1}
    assert GONE[1] not in samples_in(latents)
    assert positions_in(latents, shard) == kept
    remove(images, latents, keys=keys[0])
    assert positions_in(latents, shard) == [n - 1 for n in kept if n]
    assert check(images, latents).findings == ()
    flip(latents / table_name(shard), 99)
    assert findings(latents) == [f"{table_name(shard)} index"]
    do_repair(plan_repair(check(latents).surveys[0]))
    assert positions_in(latents, shard) == [n - 1 for n in kept if n]


@pytest.mark.parametrize("then", ["latents", "both", "latents again", "no key"])
def test_latents_that_were_forgotten_follow_their_images_later(
    pair: Pair, then: str, with_shard: list[str]
) -> None:
    """By two removals, of which the second has other numbers; one shard loses all it has."""
    (_, images, latents), lost = pair, with_shard
    before = {place: samples_in(place) for place in (images, latents)}
    if then == "latents again":
        remove(latents, keys=lost[1])
    first = wdsprep.remove(images, keys=lost[:2])
    assert first.beside == (str(latents),)
    assert remove(images, keys=lost[:2]).done
    remove(images, keys=lost[2:])
    assert kinds(images, latents) == {Kind.BEHIND}
    later = ["000002000000"] if then == "both" else []
    given = {"keys": [*lost, *later]} if then != "no key" else {}
    removal = remove(*([images, latents] if then == "both" else [latents]), **given)
    assert (removal.done, removal.nowhere, removal.beside) == (True, 0, ())
    assert check(images, latents).findings == check(images, latents).notes == ()
    for place, there in before.items():
        left = {key: each for key, each in there.items() if key not in (*lost, *later)}
        assert samples_in(place) == left
        assert list(samples_in(place)) == list(left)
    assert encode_here(images, latents).samples == 0
    assert not remove(images, latents, keys=lost).is_needed


def test_all_takes_along_the_latents_beside(pair: Pair, tmp_path: Path) -> None:
    _, images, latents = pair
    other = tmp_path / "elsewhere"
    shutil.copytree(latents, other)
    removal = remove(images, keys=GONE, all=True)
    assert [(place.shown, place.samples) for place in removal.places] == [
        (str(images), 3),
        (str(latents), 3),
    ]
    assert removal.beside == ()
    assert check(images, latents).findings == ()
    assert encode_here(images, latents).samples == 0
    assert GONE[0] in samples_in(other)
    remove(other, keys=GONE)  # though its images are not beside it
    assert not {*GONE} & samples_in(other).keys()
    assert findings(other) == []


def test_only_what_was_made_of_shards_that_lose_samples_is_named_beside(
    pair: Pair, tmp_path: Path
) -> None:
    images, latents = Path(shutil.copytree(pair[1], tmp_path / "images")), tmp_path / "latents"
    for size, root in ((64, latents), (128, tmp_path / "large")):
        encode_here(images, root, resolution=size)
    assert wdsprep.remove(images, keys=GONE).beside == (str(latents),)
    assert wdsprep.remove(images, keys="900000000000").beside == ()
    assert remove(images, keys=GONE).beside == (str(latents),)
    assert wdsprep.remove(images, keys=GONE).beside == (str(latents),)  # it still has them


def test_latents_of_a_limit_follow_their_images(pair: Pair, tmp_path: Path) -> None:
    images, first = pair[1], tmp_path / "first"
    encode_here(images, first, limit=3)
    before = samples_in(first)
    remove(images, first, keys=GONE)
    assert check(images, first).findings == ()
    assert samples_in(first) == {key: each for key, each in before.items() if key not in GONE}
    assert encode_here(images, first, limit=2).samples == 0


def test_a_state_from_before_says_why_it_does_not_fit(pair: Pair) -> None:
    _, images, latents = pair
    loader = wdsprep.load(str(latents), global_batch=4)
    state = next(iter(loader)) and loader.state_dict()
    remove(images, latents, keys=GONE)
    with pytest.raises(FingerprintError, match=rf"samples were removed from {latents}: the state"):
        wdsprep.load(str(latents), global_batch=4).load_state_dict(state)
    later = wdsprep.load(str(latents), global_batch=4).state_dict()
    with pytest.raises(FingerprintError, match=r"^the state belongs to another .*\n  seed: 0"):
        wdsprep.load(str(latents), global_batch=4, seed=3).load_state_dict(later)


def test_text_follows_its_images_and_captions_of_its_table_go(pair: Pair, tmp_path: Path) -> None:
    """What is made of the images after it has the same numbers as what was made before."""
    _, images, latents = pair
    text, later = tmp_path / "text", tmp_path / "later"
    lines = (f"{key},told by a table: {key}" for key in samples_in(images))
    (table := tmp_path / "captions.csv").write_text("\n".join(["key,caption", *lines]))
    told = {"latents": "none", "resolution": 0, "captions": str(table)}
    encode_here(images, text, **told)
    remove(latents, keys="000000000003")
    gone = samples_in(text)[GONE[0]]
    waiting = Path(shutil.copytree(text, tmp_path / "waiting"))
    for path in (*waiting.glob("*/000000.tar*"), *waiting.glob("r*/*/000000.*")):
        path.unlink()  # as a run leaves it that is killed before it makes these units
    write_rebuilt(str(waiting))
    told_of_gone = gone["txt"].decode()
    assert in_files(text, [gone["txt"]])
    assert all(told_of_gone in captions_laid_out(place) for place in (text, waiting))
    remove(images, latents, text, waiting, keys=GONE)
    assert in_files(text, [gone["txt"], gone["emb.npy"]]) == []
    assert not any(told_of_gone in captions_laid_out(place) for place in (text, waiting))
    assert manifest_of(text).counts["named"] == manifest_of(text).samples == len(samples_in(images))
    assert encode_here(images, text, **told).samples == 0
    encode_here(images, later, latents="none", resolution=0)
    assert check(images, latents, text, later).findings == ()
    for shard in manifest_of(text).shards:
        assert positions_in(text, shard.name) == positions_in(later, shard.name)
    for join in (text, later):
        left = sorted(samples_in(latents))
        batch = next(iter(wdsprep.load(str(latents), join=[str(join)], global_batch=len(left))))
        assert sorted(batch["key"]) == left


def test_texts_of_a_joined_table_leave_the_cache_of_this_machine(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, images, _ = pair
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines = [f"{key},{n},told of {key}" for n, key in enumerate(samples_in(images))]
    (table := tmp_path / "t.csv").write_text("\n".join(["key,n,text", *lines]))
    for where in ("like(text, 'told%')", "width > 0"):
        assert main(["inspect", str(images), "--join", str(table), "--where", where]) == 0
    told = f"told of {GONE[0]}".encode()
    assert in_files(tmp_path / "cache", [told])
    remove(images, keys=GONE)
    assert in_files(tmp_path / "cache", [told]) == []
    assert [*tmp_path.glob("cache/wdsprep/kept/*.arrays")]  # those without texts


def captions_laid_out(place: Path) -> set[str]:
    files = (place / "captions").glob("*/*.parquet")
    return {text for path in files for text in pq.read_table(path)["caption"].to_pylist()}


def test_captions_that_a_table_has_told_leave_the_list_of_inputs(tmp_path: Path) -> None:
    root, images = tmp_path / "in", tmp_path / "images"
    rows = [{"file_name": f"{n}.jpg", "text": f"told of {n} alone"} for n in range(6)]
    files: dict[str, bytes | str] = {f"{n}.jpg": photo(n) for n in range(6)}
    write_files(root, {**files, "metadata.jsonl": "".join(json.dumps(r) + "\n" for r in rows)})
    packed(root, images)
    assert in_files(images, [b"told of 2 alone"])
    remove(images, keys="000000000002")
    assert not [name for name, data in tree(images).items() if b"told of 2 alone" in data]
    assert check(images).findings == ()
    after = tree(images)
    packed(root, images)
    assert tree(images) == after
    shutil.copy(root / "1.jpg", root / "9.jpg")
    packed(root, images, "--append")
    assert manifest_of(images).samples == 6


def test_what_a_url_has_not_brought_yet_is_not_fetched_again(tmp_path: Path) -> None:
    with open_site() as (site, server):
        table = table_of(tmp_path, server, ["ok", "busy", "ok", "busy"])
        out = packed(table, tmp_path / "out", *WEB)
        urls = tmp_path / "urls.txt"
        urls.write_text(f"{server.url}/ok/0\n{server.url}/busy/1\n{server.url}/never\n")
        done = remove(out, urls=urls)
        assert [(p.samples, p.rejects) for p in done.places] == [(1, 1)]
        assert not [n for n, data in tree(out).items() if b"/ok/0" in data or b"/busy/1" in data]
        asked, site.is_mended = len(server.paths()), True
        packed(table, out, *WEB, "--retry-rejected")
        assert server.paths()[asked:] == ["/busy/3"]
        assert [r["code"] for r in rejects_of(out)] == ["removed", "removed"]
        assert findings(out) == []
        rows = [{"url": f"{server.url}/{kind}", "caption": "c"} for kind in ("ok/0", "ok/7")]
        write_table(tmp_path / "more.parquet", rows)
        other = packed(tmp_path / "more.parquet", tmp_path / "other", *WEB)
        assert manifest_of(other).samples == 2
        shutil.copy(out / "removed", other)
        asked = len(server.paths())
        packed(tmp_path / "more.parquet", other, *WEB, "--overwrite")
        assert server.paths()[asked:] == ["/ok/7"]


# --- what cannot be meant


def test_each_refusal_is_one_line_and_changes_nothing(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, images, latents = pair
    before = tree(images)

    def said(*words: object, code: int) -> str:
        assert main(["remove", *map(str, words)]) == code
        out, err = capsys.readouterr()
        return out + err.strip()

    assert "with one of the keys on each line" in said(images, "--keys", "keys.txt", code=2)
    assert "give --keys" in said(images, code=2)
    assert "given twice" in said(images, images, "--keys", GONE[0], code=2)
    assert "holds no dataset" in said(tmp_path, "--keys", GONE[0], code=1)
    unknown = said(images, "--keys", f"900000000000,{GONE[0][:-1]},strange", code=2)
    assert "3 keys in none of these datasets (900000000000, 00000000000, strange)" in unknown
    assert "nothing was removed: none of these datasets has these keys" in unknown
    assert "--sources" not in unknown
    (tmp_path / "names.txt").write_text("photo.jpg")
    for names in ("photo.jpg", tmp_path / "names.txt"):
        assert "--sources" in said(images, "--keys", names, code=2)
    for given in ([GONE[0]], [GONE[0], "--keys", GONE[1]]):
        told = said(images, *given, code=1)
        assert f"{GONE[0]} is no dataset: give samples with an option, as --keys {GONE[0]}" in told
    listed = write_list(tmp_path, GONE[0])
    assert f"{listed} is no dataset: give samples with an option" in said(images, listed, code=1)
    asks = said(images, latents, "--keys", GONE[0], code=3)
    assert "1 sample" in asks
    assert "give --yes" in asks
    assert tree(images) == before
    some = said(images, latents, "--keys", f"{GONE[1]},900000000000", "--yes", code=3)
    assert "removed: 2 samples" in some
    packed_anew = tmp_path / "other"
    shutil.copytree(latents, packed_anew)
    remove(images, keys=GONE[0])
    (images / "removed").unlink()  # so that nobody knows what became of the shard
    assert "--redo-changed" in said(
        images, packed_anew, "--sources", write_list(tmp_path, "photo-0000.jpg"), "--yes", code=1
    )


def write_list(root: Path, *lines: str) -> Path:
    return write_files(root, {"list.txt": "\n".join(lines)}) / "list.txt"


def test_a_damaged_shard_is_named_and_nothing_is_lost(pair: Pair) -> None:
    _, images, _ = pair
    flip(images / "64/000000.tar", (images / "64/000000.tar").stat().st_size * 4)
    before = {name: data for name, data in tree(images).items() if name.endswith(".tar")}
    with pytest.raises(FormatError, match=r"000000.tar is damaged.*repair"):
        remove(images, keys=GONE[0])
    assert {name: data for name, data in tree(images).items() if name.endswith(".tar")} == before


@pytest.mark.parametrize("reads", ["encode", "duplicates", "export", "select"])
def test_a_shard_that_loses_samples_while_a_run_reads_it_is_not_called_damaged(
    pair: Pair, tmp_path: Path, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, images, _ = pair
    out = tmp_path / "out"
    owner: Any = {"encode": Here, "select": copy_samples}.get(reads, InProcessRunner)
    name = "order_sources" if reads == "select" else "run"
    begin = getattr(owner, name)

    def begin_after_a_removal(*given: Any) -> Any:
        remove(images, keys=GONE)
        return begin(*given)

    def read() -> str:
        if reads == "encode":
            return ", ".join(one.reason for one in encode_here(images, out).quarantined)
        given = {"hashes": out} if reads == "duplicates" else {"out": out}
        given |= {"export": {"to": "parquet"}, "select": {"overwrite": True}}.get(reads, {})
        try:
            getattr(wdsprep, reads)(images, workers=1, **given)
        except WdsprepError as error:
            return str(error)
        return ""

    monkeypatch.setattr(owner, name, begin_after_a_removal)
    said = read()
    assert "let the run that changes it finish, then run the same command again" in said
    assert "repair" not in said
    monkeypatch.setattr(owner, name, begin)
    assert read() == ""


def test_a_damaged_list_is_found_and_stops_what_would_bring_things_back(pair: Pair) -> None:
    root, images, latents = pair
    remove(images, latents, keys=GONE[0])
    flip(images / "removed", 8 * 100)
    assert findings(images, latents) == ["removed removed"]
    with pytest.raises(FormatError, match="put it back from a copy"):
        packed(root, images)


def test_a_dataset_that_is_not_complete_loses_what_it_has(tmp_path: Path) -> None:
    root, images = source(tmp_path / "in"), tmp_path / "images"
    packed(root, images, "--limit", "6")
    remove(images, keys=GONE[0], sources=["photo-0013.jpg"])
    assert findings(images) == []
    assert not manifest_of(images).complete
    packed(root, images, "--append")
    assert removed_keys(images) == [GONE[0], "000002000001"]


def test_what_was_under_way_is_made_again_without_it(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with Draft(Edition(store=store), "000000") as draft:
        tar = draft.shard("32/000000.tar")
        tar.add("000000000000", [("txt", b"mine")])
        receipt = receipt_of_images(input="x", inputs=1, shards=(tar.finish(),))
        write_removed(store, NONE_REMOVED)
        with pytest.raises(BusyError, match="done again"):
            draft.finish(receipt, {})
    assert set(tree(tmp_path)) == {"removed"}


def test_a_key_is_looked_for_in_each_slice_that_it_may_be_of() -> None:
    keys = ["000000000001", "0000001000000", "1000000000000", "photo"]
    wanted = SampleFinder(RemoveOptions(keys=keys))
    units = ["000000", "256/000000_1", "1000000", "256/1000000_1", "000001", "200000"]
    assert [unit for unit in units if wanted.may_be_in(unit)] == units[:4]
    assert not wanted.are_own
    wanted.texts["key"].find(["photo", "000000000001", "000000000002"])
    assert wanted.unseen_keys() == (2, ("0000001000000", "1000000000000"))


# --- kills, and what comes in between


def contents(*places: Path) -> dict[str, bytes]:
    return {f"{place.name}/{name}": data for place in places for name, data in tree(place).items()}


def contents_but_history(*places: Path) -> dict[str, bytes]:
    """Of what was removed the marks alone: not how often, nor what shards were before."""
    lists = {f"{place.name}/removed": removed_from(open_store(str(place))) for place in places}
    return contents(*places) | {name: bool(removed.units).to_bytes(1, "big") + removed.marks.data
                                for name, removed in lists.items()}  # fmt: skip


def kinds(*places: Path) -> set[Kind]:
    return {finding.kind for finding in check(*places).findings}


def test_a_manifest_that_is_lost_in_an_unfinished_removal_is_written_by_repair(pair: Pair) -> None:
    """Then `remove` finishes it, as `repair` says."""
    _, images, latents = pair
    with contextlib.suppress(CutError), Cut(8):
        remove(images, latents, keys=GONE)
    for name in (images, latents):
        (name / MANIFEST).unlink()
        assert kinds(name) == {Kind.REMOVING, Kind.MANIFEST}
        plan = wdsprep.repair(name)
        assert plan.writes_manifest
        assert [finding.kind for finding in plan.beyond] == [Kind.REMOVING]
        wdsprep.repair(name, yes=True)
    remove(images, latents)
    assert check(images, latents).findings == ()
    assert samples_in(images).keys() == samples_in(latents).keys()
    assert not samples_in(images).keys() & {*GONE}


def count_steps(keys: list[str], *given: Path) -> int:
    """Remove samples, and return how many changes of files that took."""
    with Cut(10_000) as whole:
        remove(*given, keys=keys)
    return whole.before - whole.left


def cut_off(once: Once, step: int, keys: list[str], *given: Path) -> None:
    """Cut a removal off at a step, from datasets as they were."""
    for place, files in once[1].items():
        restore(place, files)
    with Cut(step), pytest.raises(CutError):
        remove(*given, keys=keys)


@pytest.mark.parametrize("gives_images", [False, pytest.param(True, marks=pytest.mark.system)])
def test_latents_that_follow_later_do_so_after_a_kill(pair: Pair, gives_images: bool) -> None:
    _, images, latents = pair
    given = [images, latents] if gives_images else [latents]
    keys = [GONE[1], "000000000002"] if gives_images else GONE[1:2]
    remove(images, keys=GONE[1])
    forgotten = pair, {place: tree(place) for place in (images, latents)}
    steps, after = count_steps(keys, *given), contents(images, latents)
    assert steps > 6
    for step in range(steps):
        cut_off(forgotten, step, keys, *given)
        remove(*given, keys=keys)
        assert contents(images, latents) == after, step
    assert check(images, latents).findings == ()


@pytest.mark.system
def test_cut_off_at_any_moment_it_is_told_and_the_next_ends_it(
    pair: Pair, once: Once, with_shard: list[str]
) -> None:
    root, images, latents = pair
    before, steps = contents(images, latents), count_steps(with_shard, images, latents)
    after, told = contents(images, latents), 0
    assert before != after
    for step in range(steps):
        cut_off(once, step, with_shard, images, latents)
        marked = [
            place for place in (images, latents) if removed_from(open_store(str(place))).units
        ]
        for place in marked:
            told += 1
            assert kinds(place) == {Kind.REMOVING}
            assert plan_repair(check(place).surveys[0]).units == {}
        if not marked:
            assert kinds(images, latents) == set()
            assert step in (0, steps - 1)
        if images in marked:
            for options in ((), ("--append",)):
                with pytest.raises(BusyError, match="wdsprep remove"):
                    packed(root, images, *options)
        if images in marked and step % 2:  # it need not be told what again
            remove(latents if latents in marked else images)
            if removed_from(open_store(str(images))).units:
                remove(images)
        else:
            remove(images, latents, keys=with_shard)
        assert contents(images, latents) == after, step
    assert told > steps > 20


@pytest.mark.parametrize("then", ["nothing", "no answer"])
def test_marks_of_latents_alone_are_dropped_where_no_removal_follows(pair: Pair, then: str) -> None:
    _, images, latents = pair
    before = contents(images, latents)
    with Cut(1), pytest.raises(CutError):
        remove(images, latents, keys=GONE)
    assert kinds(images, latents) == {Kind.REMOVING}
    wdsprep.remove(latents, keys="" if then == "nothing" else GONE[0])
    assert kinds(images, latents) == set()
    after = contents(images, latents)
    assert after.keys() - before.keys() == {"latents/removed"}
    assert before.items() <= after.items()


@pytest.mark.system
@pytest.mark.parametrize("dataset", ["images", "latents"])
def test_what_is_damaged_while_it_goes_on_is_repaired_and_it_ends(
    pair: Pair, once: Once, dataset: str, with_shard: list[str]
) -> None:
    """A file that no longer is what a cut removal left can be repaired, whenever it was cut: of
    the images after every other step, of the latents after those between."""
    root, images, latents = pair
    harmed = {"images": images, "latents": latents}[dataset]
    steps = count_steps(with_shard, images, latents)
    after, said = contents_but_history(images, latents), []
    for step in range(1 + (dataset == "latents"), steps - 1, 2):
        cut_off(once, step, with_shard, images, latents)
        listed = {unit.unit for unit in removed_from(open_store(str(harmed))).units}
        harmable = [
            path
            for path in sorted(harmed.rglob("*.*"))
            if unit_of_file(path.relative_to(harmed).as_posix(), dataset) in listed
            and not path.name.startswith(".")
        ]
        # mostly one that a removal reads: threads decide which units are left by then
        if step // 2 % 3:
            harmable = [path for path in harmable if path.suffix in (".tar", ".json")]
        if not harmable:
            continue
        harm(harmable[step % len(harmable)], step)
        try:
            remove(images, latents, keys=with_shard)
        except (DamageError, NotFoundError) as error:
            said.append(str(error))
            repaired = do_repair(plan_repair(check(harmed).surveys[0]))
            assert {finding.kind for finding in repaired.beyond} <= {Kind.REMOVING}
            remove(images, latents, keys=with_shard)
        do_repair(plan_repair(check(harmed).surveys[0]))
        packed(root, images)
        encode_here(images, latents, redo_changed=True)
        assert check(images, latents).findings == ()
        assert contents_but_history(images, latents) == after, step
    assert len(said) > 2
    assert all("wdsprep repair" in line for line in said)


@pytest.mark.system
def test_latents_whose_images_are_packed_over_meanwhile_are_not_said_to_be_of_the_new_ones(
    pair: Pair, once: Once, with_shard: list[str], tmp_path: Path
) -> None:
    root, images, latents = pair
    changed = 0
    for step in range(2, count_steps(with_shard, images, latents) - 1, 3):
        cut_off(once, step, with_shard, images, latents)
        for number in range(3):
            (root / f"photo-{number:04d}.jpg").write_bytes(photo(number + 30))
        packed(root, images, "--overwrite")
        remove(images, latents, keys=with_shard)
        changed += kinds(images, latents) == {Kind.CHANGED}
        encode_here(images, latents, redo_changed=True)
        encode_here(images, tmp_path / "fresh", overwrite=True)
        assert kinds(images, latents) == set(), step
        stored, fresh = samples_in(latents), samples_in(tmp_path / "fresh")
        assert stored.keys() == fresh.keys()
        assert all(stored[key]["latent.npy"] == fresh[key]["latent.npy"] for key in fresh)
    assert changed > 5


@pytest.mark.parametrize(
    ("paths", "cut", "left"),
    [
        (["missing/3"], 1, ["record_lost"]),
        (["missing/3"], 2, ["record_lost"]),
        (["ok/0", "missing/3"], 1, ["removed", "record_lost"]),
    ],
)
def test_a_reject_whose_record_is_lost_while_it_is_removed_stays_one_reject(
    tmp_path: Path, paths: list[str], cut: int, left: list[str]
) -> None:
    """The images beside it stay, and another row of their slice has been tried again by then."""
    with open_site() as (site, server):
        table = table_of(tmp_path, server, ["ok", "busy", "ok", "missing"])
        out = packed(table, tmp_path / "out", *WEB)
        site.is_mended = True
        packed(table, out, *WEB, "--retry-rejected")
        (tmp_path / "urls.txt").write_text("".join(f"{server.url}/{path}\n" for path in paths))
        with Cut(cut), pytest.raises(CutError):
            remove(out, urls=tmp_path / "urls.txt")
        (out / "rejects/000000.jsonl").unlink()
        with pytest.raises(DamageError, match="wdsprep repair"):
            remove(out)
        do_repair(plan_repair(check(out).surveys[0]))
        remove(out)
        assert findings(out) == []
        assert [reject["code"] for reject in rejects_of(out)] == left
        assert manifest_of(out).samples + len(left) == 4


def harm(path: Path, number: int) -> None:
    """Flip a bit of a file, cut it, or delete it."""
    data = path.read_bytes()
    if number % 3 == 2 or not data:
        path.unlink()
    elif number % 3 == 1:
        path.write_bytes(data[:-1])
    else:
        flip(path, bit=4 * len(data))


@pytest.mark.parametrize("place", ["local", "s3"])
def test_a_lock_of_a_run_that_was_killed_at_its_very_end_goes(pair: Pair, out_url: str) -> None:
    """All is removed by then, so the same command finds nothing to do."""
    _, images, _ = pair
    upload(images, out_url)
    remove(out_url, keys=GONE)
    before = tree(out_url)
    killed = subprocess.run([sys.executable, "-c", KILLED_HOLDER, out_url], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert tree(out_url).keys() - before.keys() == {MANIFEST_HOLD}
    assert not remove(out_url, keys=GONE).is_needed
    assert tree(out_url) == before


KILLED_HOLDER = """
import os, signal, sys
from wdsprep.dataset.unit_locks import Edition
from wdsprep.store import open_store
with Edition.from_store(open_store(sys.argv[1])).holding_manifest():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_full_disk_is_one_line_and_loses_nothing(pair: Pair, small_disk: Path) -> None:
    _, images, _ = pair
    subprocess.run(["mount", "-o", "remount,size=600k", str(small_disk)], check=True)
    out = shutil.copytree(images, small_disk / "images")
    before = contents(out)
    ballast(small_disk, 1_000)
    with pytest.raises(FullError, match="the disk is full: free some space and run the same"):
        remove(out, keys=GONE)
    lost = {name for name, data in before.items() if contents(out).get(name) != data}
    assert lost <= {"images/removed"}
    (small_disk / "ballast").unlink()
    remove(out, keys=GONE)
    assert findings(out) == []
    assert not set(GONE) & samples_in(out).keys()


def ballast(root: Path, left: int) -> None:
    """Fill a disk but for so many bytes."""
    free = os.statvfs(root)
    (root / "ballast").write_bytes(bytes(free.f_bavail * free.f_bsize - left))
