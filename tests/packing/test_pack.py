"""Pack: every input comes out once, the same for every worker, and a resume never mixes."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit.corpus import CASES, LIMITS
from tests.kit.packs import (
    command,
    jpeg,
    manifest_of,
    outcome,
    pack,
    photos,
    rejects_of,
    run,
    run_pack,
    samples_of,
    tar_bytes,
    temporaries,
    tree,
    write_files,
)
from wdsprep.errors import FingerprintError, UsageError
from wdsprep.sources import Item, slices
from wdsprep.tar.read import file_tape, index_tar

LIMIT_OPTIONS = ("--max-area", str(LIMITS.max_area), "--max-aspect-ratio", "10")
TWENTY = ("--samples-per-shard", "20")


def check_dataset(root: Path) -> None:
    """What holds for every dataset, whatever it was made of."""
    manifest = manifest_of(root)
    keys: list[str] = []
    for shard in manifest.shards:
        path = root / shard.name
        data = path.read_bytes()
        assert (shard.nbytes, shard.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert shard.samples > 0
        with file_tape(path) as tape:
            assert index_tar(tape, shard.name) == Path(f"{path}.idx").read_bytes()
    for sample in samples_of(root):
        keys.append(sample["__key__"])
        assert sample["json"]["key"] == sample["__key__"]
        assert sample["json"]["caption"] == sample["txt"]
    assert len(set(keys)) == len(keys) == sum(shard.samples for shard in manifest.shards)
    assert all(re.fullmatch(r"\d{12}", key) for key in keys)
    for bucket in manifest.settings["buckets"]:
        of_bucket = [s["__key__"] for s in samples_of(root) if s["json"]["bucket"] == bucket]
        assert of_bucket == sorted(of_bucket)
    rejects = rejects_of(root)
    assert not {reject["key"] for reject in rejects} & set(keys)
    assert len(rejects) == sum(manifest.rejects.values())
    assert sum(receipt.inputs for receipt in manifest.receipts) == len(keys) + len(rejects)
    names = {shard.name + end for shard in manifest.shards for end in ("", ".idx")}
    names |= {
        f"{kind}/{receipt.unit}.json{'l' * (kind != 'receipts')}"
        for receipt in manifest.receipts
        for kind in ("receipts", "rejects", "inputs")
    }
    assert set(tree(root)) == {*names, "wdsprep.json"}


# --- the whole of it


def test_a_folder_of_photos_packs_with_no_option_at_all(tmp_path: Path) -> None:
    files = {f"holiday {n}/IMG_{n:04d}.JPG": jpeg(n, (300 + 100 * n, 400)) for n in range(4)}
    write_files(tmp_path / "downloads", {**files, "holiday 1/IMG_0001.txt": "the sea"})
    done = run("pack", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 images in a folder, 1 with captions" in done.stderr
    assert "phase 256: 4 samples in 1 shard" in done.stdout
    check_dataset(tmp_path / "shards/images")
    captions = [sample["txt"] for sample in samples_of(tmp_path / "shards/images")]
    assert captions == ["", "the sea", "", ""]


def test_a_sample_holds_its_image_facts_and_captions(tmp_path: Path) -> None:
    facts = {
        "captions": ["a 👩🏽‍🚀", "שלום\nline"],
        "aesthetic": 5.5,
        "bad": "x\ud800y",
        "no": None,
    }
    write_files(
        tmp_path / "in",
        {"a/b c.jpg": jpeg(1, (70, 64)), "a/b c.json": json.dumps(facts),
         "n.jpg": jpeg(2, (40, 48)), "n.txt": "nul \0 here"},
    )  # fmt: skip
    out = pack(tmp_path / "in", tmp_path / "out")
    small, large = sorted(samples_of(out), key=lambda sample: sample["json"]["bucket"])
    assert large["jpg"] == jpeg(1, (70, 64))
    assert large["txt"] == "a 👩🏽‍🚀"
    assert large["json"] == {
        "bucket": 64, "caption": "a 👩🏽‍🚀", "captions": ["a 👩🏽‍🚀", "שלום\nline"], "changes": [],
        "height": 64, "key": "000000000000", "source": "a/b c.jpg", "source_height": 64,
        "source_width": 70, "width": 70,
        "meta": {"captions": facts["captions"], "aesthetic": 5.5, "bad": "x?y"},
    }  # fmt: skip
    assert (small["txt"], small["json"]["caption"]) == ("nul \0 here", "nul \0 here")
    check_dataset(out)


def test_filter_and_caption_lengths_reject_by_code(tmp_path: Path) -> None:
    files: dict[str, bytes | str] = {}
    for number, (caption, score) in enumerate([("fine", 5), ("x", 5), ("x" * 30, 5), ("fine", 4)]):
        files[f"{number}.jpg"] = jpeg(number)
        files[f"{number}.json"] = json.dumps({"caption": caption, "aesthetic": score})
    options = ["--min-caption", "2", "--max-caption", "10"]
    options += ["--filter", "aesthetic >= 4.5 and 'i' in caption"]
    out = pack(write_files(tmp_path / "in", files), tmp_path / "out", *options)
    assert outcome(out) == {
        "0.jpg": "packed",
        "1.jpg": "caption_too_short",
        "2.jpg": "caption_too_long",
        "3.jpg": "filtered",
    }
    check_dataset(out)


def test_a_filter_reads_a_csv_table_as_numbers(tmp_path: Path) -> None:
    table = "file_name,text,aesthetic\na.jpg,one,5.5\nb.jpg,two,4\nc.jpg,three,\n"
    files = {f"{name}.jpg": jpeg(number) for number, name in enumerate("abc")}
    write_files(tmp_path / "in", {**files, "metadata.csv": table})
    out = pack(tmp_path / "in", tmp_path / "out", "--filter", "aesthetic > 5")
    assert outcome(out) == {"a.jpg": "packed", "b.jpg": "filtered", "c.jpg": "filtered"}


def test_reencode_writes_every_image_as_jpeg_of_the_size_asked_for(tmp_path: Path) -> None:
    write_files(tmp_path / "in", {"a.png": jpeg(1, (200, 100), "PNG"), "b.jpg": jpeg(2, (40, 40))})
    out = pack(tmp_path / "in", tmp_path / "out", "--reencode", "jpg:80", "--max-side", "128")
    found = {sample["json"]["source"]: sample["json"] for sample in samples_of(out)}
    assert (found["a.png"]["width"], found["a.png"]["source_width"]) == (128, 200)
    assert (found["b.jpg"]["width"], found["b.jpg"]["changes"]) == (40, ["recode"])
    check_dataset(out)


# --- bad input


def corpus_files() -> dict[str, bytes | str]:
    files: dict[str, bytes | str] = {}
    for name, case in CASES.items():
        files[f"{name}.img.jpg"] = case.data
        files[f"{name}.img.txt"] = f"caption of {name}"
    return files


def check_corpus(out: Path, sources: dict[str, str]) -> None:
    """All that came of the corpus; `sources` says where each of its files was put."""
    found = outcome(out)
    expected = {n: c.code.value if c.code else "packed" for n, c in CASES.items()}
    assert found == {sources[name]: code for name, code in expected.items()}
    names = {source: name for name, source in sources.items()}
    for sample in samples_of(out):
        name = names[sample["json"]["source"]]
        assert sample["txt"] == f"caption of {name}"
        assert CASES[name].extension in sample
        assert tuple(sample["json"]["changes"]) == CASES[name].changes
        assert (sample["json"]["width"], sample["json"]["height"]) == CASES[name].size
        if not CASES[name].changes:
            assert sample[CASES[name].extension] == CASES[name].data
    check_dataset(out)


def test_every_bad_file_of_a_folder_is_a_sample_or_a_reject_never_both(tmp_path: Path) -> None:
    write_files(tmp_path / "in", corpus_files())
    out = pack(tmp_path / "in", tmp_path / "out", *LIMIT_OPTIONS)
    check_corpus(out, {name: f"{name}.img.jpg" for name in CASES})


def test_every_bad_file_of_a_tar_is_a_sample_or_a_reject_never_both(tmp_path: Path) -> None:
    files = []
    for number, (name, case) in enumerate(CASES.items()):
        files += [(f"{number}.jpg", case.data), (f"{number}.txt", f"caption of {name}".encode())]
    write_files(tmp_path / "in", {"a.tar": tar_bytes(files)})
    out = pack(tmp_path / "in", tmp_path / "out", *LIMIT_OPTIONS)
    check_corpus(out, {name: f"a.tar/{number}" for number, name in enumerate(CASES)})


def test_every_bad_file_of_a_table_is_a_sample_or_a_reject_never_both(tmp_path: Path) -> None:
    rows = [{"jpg": case.data, "text": f"caption of {name}"} for name, case in CASES.items()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    out = pack(tmp_path / "t.parquet", tmp_path / "out", *LIMIT_OPTIONS)
    codes = [c.code.value if c.code else "packed" for c in CASES.values()]
    assert outcome(out) == {f"t.parquet#{n}": code for n, code in enumerate(codes)}
    check_dataset(out)


def test_a_decompression_bomb_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    names = [name for name in CASES if name.endswith("-bomb")]
    assert len(names) > 3
    files = {f"{name}.jpg": CASES[name].data for name in names}
    write_files(tmp_path / "in", {**files, "good.jpg": jpeg(1)})
    program = (
        "import resource, sys; from wdsprep.cli import main; main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)"
    )
    words = command(tmp_path / "in", tmp_path / "out", *LIMIT_OPTIONS)[1:]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.splitlines()[-1]) < 300
    found = outcome(tmp_path / "out")
    assert found.pop("good.jpg") == "packed"
    assert "packed" not in found.values()
    assert len(found) == len(names)


def test_a_file_that_vanishes_while_packing_is_a_reject(tmp_path: Path) -> None:
    """Listed by the driver, gone when a worker comes to it."""
    source = photos(tmp_path / "in", 6)
    lost = source / "0/photo-00003.jpg"
    program = """
import sys
from pathlib import Path
from wdsprep import pack, resume
from wdsprep.cli import main
survey = pack.survey
def then_lose(*arguments):
    seen = survey(*arguments)
    for name in sys.argv[1].split(":"):
        Path(name).unlink()
    return seen
pack.survey = then_lose
sys.exit(main(sys.argv[2:]))
"""
    names = f"{lost}:{source / '1/photo-00001.txt'}"
    words = [sys.executable, "-c", program, names, *command(source, tmp_path / "out")[1:]]
    subprocess.run(words, check=True, capture_output=True)
    found = outcome(tmp_path / "out")
    gone = [name for name, code in found.items() if code == "vanished"]
    assert sorted(gone) == ["0/photo-00003.jpg", "1/photo-00001.jpg"]
    assert list(found.values()).count("packed") == 4
    check_dataset(tmp_path / "out")


# --- determinism


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """130 photos and some that are none: seven slices of twenty."""
    root = photos(tmp_path_factory.mktemp("album"), 130)
    return write_files(root, {"1/bad.jpg": b"<html>", "2/lone.txt": "x", "2/cut.jpg": jpeg(5)[:99]})


@pytest.fixture(scope="module")
def packed_album(album: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(album, tmp_path_factory.mktemp("packed") / "out", *TWENTY)


def test_small_slices_are_a_sound_dataset(packed_album: Path) -> None:
    check_dataset(packed_album)
    assert len(manifest_of(packed_album).receipts) == 7
    assert manifest_of(packed_album).complete
    assert list(outcome(packed_album).values()).count("packed") == 130


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_no_byte(
    album: Path, packed_album: Path, tmp_path: Path, workers: int
) -> None:
    out = pack(album, tmp_path / "out", *TWENTY, workers=workers)
    assert tree(out) == tree(packed_album)


def test_threads_in_one_slice_change_no_byte(album: Path, tmp_path: Path) -> None:
    one = pack(album, tmp_path / "one")
    four = pack(album, tmp_path / "four", workers=4)
    assert len(manifest_of(one).receipts) == 1
    assert tree(one) == tree(four)


def test_ray_changes_no_byte(album: Path, packed_album: Path, tmp_path: Path) -> None:
    words = [*TWENTY, "--runner", "ray", "--workers", "2"]
    done = run_pack(album, tmp_path / "out", *words)
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "out") == tree(packed_album)


def test_a_second_run_does_nothing_and_changes_nothing(album: Path, tmp_path: Path) -> None:
    out = pack(album, tmp_path / "out", *TWENTY)
    before = tree(out)
    done = run_pack(album, out, *TWENTY)
    assert done.returncode == 0
    assert "nothing left to do: 7 slices packed before" in done.stdout
    assert tree(out) == before


def test_shards_roll_over_by_size_and_no_sample_is_lost(album: Path, tmp_path: Path) -> None:
    out = pack(album, tmp_path / "out", "--max-shard-size", "200kB")
    check_dataset(out)
    manifest = manifest_of(out)
    assert len(manifest.receipts) == 1
    assert len(manifest.shards) > 4
    assert max(shard.nbytes for shard in manifest.shards) <= 210_000
    names = [shard.name for shard in manifest.shards if shard.bucket == 32]
    assert names[:2] == ["32/000000.tar", "32/000000_01.tar"]
    assert list(outcome(out).values()).count("packed") == 130


def test_shards_roll_over_by_count_where_a_slice_holds_more(tmp_path: Path) -> None:
    """One row group, one tar: what is a slice is not up to us, how long a shard is, is."""
    rows = [{"jpg": jpeg(n, (40, 40)), "text": str(n)} for n in range(25)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    files = [(f"{n:02d}.{kind}", jpeg(n, (40, 40))) for n in range(25) for kind in ("jpg",)]
    write_files(tmp_path / "tars", {"a.tar": tar_bytes(files)})
    for source in ("t.parquet", "tars"):
        out = pack(tmp_path / source, tmp_path / f"out-{source}", "--samples-per-shard", "10")
        check_dataset(out)
        assert [shard.samples for shard in manifest_of(out).shards] == [10, 10, 5]


def test_tars_and_tables_are_cut_into_slices(tmp_path: Path) -> None:
    for shard in range(3):
        files = [(f"{n}.jpg", jpeg(n)) for n in range(4)]
        write_files(tmp_path / "tars", {f"{shard}.tar": tar_bytes(files)})
    assert len(manifest_of(pack(tmp_path / "tars", tmp_path / "a")).receipts) == 3
    rows = [{"jpg": jpeg(n), "text": str(n)} for n in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet", row_group_size=5)
    out = pack(tmp_path / "t.parquet", tmp_path / "b", "--samples-per-shard", "10")
    assert [receipt.inputs for receipt in manifest_of(out).receipts] == [10, 10, 10]
    check_dataset(tmp_path / "a")
    check_dataset(out)


def test_the_manifest_is_made_again_from_the_receipts(album: Path, tmp_path: Path) -> None:
    out = pack(album, tmp_path / "out", *TWENTY)
    before = tree(out)
    assert run("rebuild", out).returncode == 0
    assert tree(out) == before
    (out / "wdsprep.json").unlink()
    assert run("rebuild", out).returncode == 0
    assert manifest_of(out).shards == manifest_of(out).shards
    pack(album, out, *TWENTY)
    assert tree(out) == before
    (out / "wdsprep.json").write_bytes(before["wdsprep.json"][:-9] + b"oh no!\n")
    done = run_pack(album, out, *TWENTY)
    assert done.returncode == 1
    assert f'run "wdsprep rebuild {out}"' in done.stderr
    assert run("rebuild", out).returncode == 0
    pack(album, out, *TWENTY)
    assert tree(out) == before


def test_rebuild_keeps_what_receipts_cannot_say(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 30)
    out = pack(source, tmp_path / "out", *TWENTY)
    pack(photos(source, 5, first=30), out, *TWENTY, "--append")
    before = tree(out)
    assert run("rebuild", out).returncode == 0
    assert tree(out) == before


# --- a source or settings that changed


def refused(source: Path, out: Path, *options: str) -> str:
    """The message of a run that must end in a FingerprintError and write nothing."""
    before = tree(out)
    with pytest.raises(FingerprintError) as caught:
        pack(source, out, *options)
    assert tree(out) == before
    return str(caught.value)


def test_a_changed_source_is_an_error_that_names_what_changed(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 45)
    out = pack(source, tmp_path / "out", *TWENTY)
    photos(source, 1, first=99)
    message = refused(source, out, *TWENTY)
    assert "1 added (0/photo-00099.jpg)" in message
    assert "--append" in message
    (source / "0/photo-00099.jpg").unlink()
    (source / "0/photo-00099.txt").unlink()
    (source / "1/photo-00004.txt").write_text("another caption")
    (source / "2/photo-00005.jpg").rename(tmp_path / "aside.jpg")
    (source / "2/photo-00005.txt").rename(tmp_path / "aside.txt")
    message = refused(source, out, *TWENTY)
    assert "1 changed (1/photo-00004.jpg), 1 removed (2/photo-00005.jpg)" in message
    assert "--append" not in message
    assert "1 changed" in refused(source, out, *TWENTY, "--append")


NO_UTF8 = os.fsdecode(b"caf\xe9")


def test_files_whose_names_are_no_utf8_are_told_and_appended(tmp_path: Path) -> None:
    source = write_files(tmp_path / "in", {"a.jpg": jpeg(1), f"{NO_UTF8}.jpg": jpeg(2)})
    out = pack(source, tmp_path / "out")
    write_files(source, {f"new {NO_UTF8}.jpg": jpeg(3)})
    assert "1 added (new caf\ufffd.jpg)" in refused(source, out)
    pack(source, out, "--append")
    sources = [sample["json"]["source"] for sample in samples_of(out)]
    assert sorted(sources) == ["a.jpg", "caf\ufffd.jpg", "new caf\ufffd.jpg"]


def test_the_locale_changes_no_byte(tmp_path: Path) -> None:
    """Of inputs, receipts and all else, so a run goes on in another one."""
    names = ("ü/雪.jpg", f"{NO_UTF8}.jpg", "plain.jpg")
    source = write_files(tmp_path / "ö", {name: jpeg(n) for n, name in enumerate(names)})
    out = pack(source, tmp_path / "out")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = command(source, tmp_path / "ø")[1:]
    done = run(*words, env={**os.environ, **ascii_only}, encoding="utf-8")
    assert (done.returncode, len(samples_of(tmp_path / "ø"))) == (0, 3), done.stderr
    assert "--resolution" in done.stdout
    assert tree(tmp_path / "ø") == tree(out)


def test_many_changes_are_counted_and_a_few_shown(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 5)
    out = pack(source, tmp_path / "out")
    message = refused(photos(source, 1500, first=10), out)
    assert "1,500 added (0/photo-00012.jpg, 0/photo-00015.jpg, 0/photo-00018.jpg, ...)" in message


def test_other_settings_are_an_error_that_names_them(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 3)
    out = pack(source, tmp_path / "out", "--min-caption", "1")
    assert "min-caption: 1 -> 0" in refused(source, out)
    message = refused(source, out, "--min-caption", "1", "--buckets", "16", "--filter", "number")
    assert "buckets: 32,64 -> 16" in message
    assert "number" in message
    assert "--overwrite" in message
    write_files(tmp_path / "tars", {"a.tar": tar_bytes([("a.jpg", jpeg(1))])})
    assert "source: folder -> tars" in refused(tmp_path / "tars", out, "--min-caption", "1")


def test_another_folder_is_another_source(tmp_path: Path) -> None:
    out = pack(photos(tmp_path / "a", 3), tmp_path / "out")
    message = refused(photos(tmp_path / "b", 3, first=50), out, "--append")
    assert "3 added" in message
    assert "3 removed" in message


def test_a_folder_that_moved_is_the_same_source(tmp_path: Path) -> None:
    source = photos(tmp_path / "a", 3)
    out = pack(source, tmp_path / "out")
    before = tree(out)
    source.rename(tmp_path / "b")
    pack(tmp_path / "b", out)
    assert tree(out) == before


def test_append_packs_what_is_new_and_touches_nothing_else(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 45)
    out = pack(source, tmp_path / "out", *TWENTY)
    before = tree(out)
    photos(source, 30, first=45)  # they lie between the old ones
    pack(source, out, *TWENTY, "--append")
    after = tree(out)
    assert {name: after[name] for name in before if name != "wdsprep.json"} == {
        name: data for name, data in before.items() if name != "wdsprep.json"
    }
    check_dataset(out)
    assert list(outcome(out).values()).count("packed") == 75
    assert manifest_of(out).generations == (0, 3)
    assert "nothing left to do" in run_pack(source, out, *TWENTY).stdout
    assert "nothing left to do" in run_pack(source, out, *TWENTY, "--append").stdout
    photos(source, 5, first=75)
    assert "5 added" in refused(source, out, *TWENTY)
    pack(source, out, *TWENTY, "--append")
    assert manifest_of(out).generations == (0, 3, 5)
    assert list(outcome(out).values()).count("packed") == 80
    check_dataset(out)


def test_appended_tars_and_tables_become_new_slices(tmp_path: Path) -> None:
    for kind in ("tar", "parquet"):
        root = tmp_path / kind
        root.mkdir()
        out = tmp_path / f"out-{kind}"
        for name in ("b", "d", "a"):
            number = ord(name)
            rows = [{"jpg": jpeg(number), "text": name}]
            if kind == "tar":
                write_files(root, {f"{name}.tar": tar_bytes([("x.jpg", jpeg(number))])})
            else:
                pq.write_table(pa.Table.from_pylist(rows), root / f"{name}.parquet")
            pack(root, out, "--append")
        assert [receipt.inputs for receipt in manifest_of(out).receipts] == [1, 1, 1]
        assert sorted(source[0] for source in outcome(out)) == ["a", "b", "d"]
        check_dataset(out)


def test_append_to_nothing_is_a_first_run(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 5)
    one, two = pack(source, tmp_path / "one"), pack(source, tmp_path / "two", "--append")
    assert tree(one) == tree(two)


def test_overwrite_starts_over_and_removes_its_own_files_alone(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 45)
    out = pack(source, tmp_path / "out", *TWENTY)
    foreign = {
        "README.md": b"mine", "32/notes.txt": b"mine", "receipts/2024/shop.pdf": b"mine",
        "32/mine.tar": b"mine", "other/000000.tar": b"mine", "rejects/list.jsonl": b"mine",
    }  # fmt: skip
    write_files(out, dict(foreign))
    (source / "0/photo-00000.jpg").unlink()
    pack(source, out, "--buckets", "16,48", "--overwrite")
    after = tree(out)
    assert {name: after.pop(name) for name in foreign} == foreign
    fresh = pack(source, tmp_path / "fresh", "--buckets", "16,48")
    assert len(after.pop("edition")) == 17  # a mark that no other beginning has
    assert after == tree(fresh)


def test_more_slices_than_keys_have_digits_for_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="more than 1,000,000 slices"):
        list(slices([Item(name="a", parts=()), Item(name="b", parts=())], size=1, first=999_999))
    source = photos(tmp_path / "in", 40)
    out = pack(source, tmp_path / "out", *TWENTY)
    whole = tree(out)
    monkeypatch.setattr("wdsprep.sources.MOST_SLICES", 2)
    photos(source, 1, first=99)
    for option in ("--append", "--overwrite"):
        with pytest.raises(UsageError, match="raise --samples-per-shard"):
            pack(source, out, *TWENTY, option)
        assert tree(out) == whole


def test_overwrite_of_what_is_no_dataset_removes_nothing(tmp_path: Path) -> None:
    foreign: dict[str, bytes | str] = {"0/000000.tar": b"x", "rejects/000000.txt": b"mine"}
    out = write_files(tmp_path / "out", {**foreign, "rejects/000001.jsonl": b"mine"})
    source = photos(tmp_path / "in", 5)
    before = tree(out)
    with pytest.raises(Exception, match="empty or not there"):
        pack(tmp_path / "none", out, "--overwrite")
    assert tree(out) == before
    pack(source, out, "--overwrite")
    assert (out / "0/000000.tar").read_bytes() == b"x"


def test_a_limit_takes_the_first_samples_and_can_be_lifted(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 50)
    out = pack(source, tmp_path / "out", *TWENTY, "--limit", "40")
    assert len(samples_of(out)) == 40
    assert not manifest_of(out).complete
    pack(source, out, *TWENTY)
    assert tree(out) == tree(pack(source, tmp_path / "fresh", *TWENTY))
    small = pack(source, tmp_path / "small", *TWENTY, "--limit", "7")
    assert len(samples_of(small)) == 7
    message = refused(source, small, *TWENTY)
    assert "with --limit 7: 43 added" in message
    assert "--append" in message
    pack(source, small, *TWENTY, "--append")
    assert len(samples_of(small)) == 50
    check_dataset(small)


def test_a_limit_cuts_a_tar_and_a_table(tmp_path: Path) -> None:
    for shard in range(3):
        files = [(f"{n}.jpg", jpeg(n)) for n in range(4)]
        write_files(tmp_path / "tars", {f"{shard}.tar": tar_bytes(files)})
    rows = [{"jpg": jpeg(n), "text": str(n)} for n in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet", row_group_size=4)
    for source in ("tars", "t.parquet"):
        out = pack(tmp_path / source, tmp_path / f"out-{source}", "--limit", "6")
        assert len(samples_of(out)) == 6
        check_dataset(out)


def test_output_and_source_must_lie_apart(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 3)
    tar = tar_bytes([("a.jpg", jpeg(1))])
    write_files(tmp_path, {"t/a.tar": tar, "in/deep/a.jpg": jpeg(1)})
    (tmp_path / "link").symlink_to(source)
    before = tree(tmp_path)
    pairs = ["in in", "in in/out", "in/deep in", "link in/out", "in link/x", "t/*.tar t/out"]
    for inner, outer in map(str.split, [*pairs, "t/../in in/x", "t/a.tar t"]):
        with pytest.raises(UsageError, match="write the shards somewhere else"):
            pack(tmp_path / inner, tmp_path / outer, "--overwrite")
    assert tree(tmp_path) == before
    check_dataset(pack(tmp_path / "t/a.tar", tmp_path / "t/out"))
    check_dataset(pack(source, tmp_path / "in-out"))


# --- two at once


def start_two(first: list[str], second: list[str]) -> list[tuple[int, str]]:
    """Run two commands at the same time."""
    both = [
        subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for words in (first, second)
    ]
    errors = [process.communicate(timeout=60)[1] for process in both]
    return [(process.returncode, error) for process, error in zip(both, errors, strict=True)]


def test_the_same_run_twice_at_once_does_no_harm(
    album: Path, packed_album: Path, tmp_path: Path
) -> None:
    words = command(album, tmp_path / "out", *TWENTY, "--workers", "1")
    assert [code for code, _ in start_two(words, words)] == [0, 0]
    assert tree(tmp_path / "out") == tree(packed_album)


def test_two_different_runs_at_once_never_mix(album: Path, tmp_path: Path) -> None:
    other = photos(tmp_path / "other", 100, first=500)
    out = tmp_path / "out"
    words = [command(source, out, *TWENTY, "--workers", "1") for source in (album, other)]
    results = start_two(*words)
    assert any(code == 1 for code, _ in results)
    for code, error in results:
        assert code == 0 or re.search(
            "another run is writing|another run has taken|has changed since", error
        ), error
    assert not temporaries(out)
    for source in (album, other):  # one of them is what the dataset was left as, or neither is
        done = run_pack(source, out, *TWENTY)
        if done.returncode == 0:
            alone = pack(source, tmp_path / "alone", *TWENTY)
            assert tree(out) == tree(alone)
            break
    else:
        check_shards_match_receipts(out)


def check_shards_match_receipts(out: Path) -> None:
    for shard in manifest_of(out).shards:
        assert hashlib.sha256((out / shard.name).read_bytes()).hexdigest() == shard.sha256


def test_other_settings_at_once_are_refused(album: Path, tmp_path: Path) -> None:
    words = [command(album, tmp_path / "out", *TWENTY, "--min-caption", n) for n in ("0", "1")]
    results = start_two(*words)
    assert sorted(code for code, _ in results) == [0, 1]
    assert any("min-caption" in error for _, error in results)
    check_dataset(tmp_path / "out")


# --- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MB; skipped where mounting is not allowed."""
    root = tmp_path / "disk"
    root.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(root)]
    if os.geteuid() or subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield root
    subprocess.run(["umount", "-l", str(root)], check=True)


def test_a_full_disk_is_one_clear_line_and_can_be_resumed(
    album: Path, packed_album: Path, small_disk: Path
) -> None:
    out = small_disk / "out"
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(600_000))
    done = run_pack(album, out, *TWENTY)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 2, done.stderr
    assert "the disk is full: free some space and run the same again" in lines[1]
    assert not temporaries(out)
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert run_pack(album, out, *TWENTY).returncode == 0
    assert tree(out) == tree(packed_album)


def test_a_receipt_of_other_settings_is_never_adopted(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 20)
    one, two = tmp_path / "one", tmp_path / "two"
    pack(source, one, "--samples-per-shard", "10")
    pack(source, two, "--samples-per-shard", "10", "--check", "header")
    (two / "receipts/000001.json").replace(one / "receipts/000001.json")
    (one / "wdsprep.json").unlink()
    with pytest.raises(FingerprintError, match="by another run: check: full -> header"):
        pack(source, one, "--samples-per-shard", "10")


def test_generations_come_back_from_the_receipts_alone(tmp_path: Path) -> None:
    source, out = photos(tmp_path / "in", 30), tmp_path / "out"
    pack(source, out, *TWENTY)
    photos(source, 10, first=100)
    pack(source, out, *TWENTY, "--append")
    assert manifest_of(out).generations == (0, 2)
    (out / "wdsprep.json").unlink()
    assert run("rebuild", out).returncode == 0
    assert manifest_of(out).generations == (0, 2)
