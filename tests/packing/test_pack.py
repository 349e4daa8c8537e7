"""Pack: every input comes out once, the same for every worker, and a resume never mixes."""

import json
import re
import subprocess
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from blake3 import blake3
from PIL import Image

import wdsprep
from tests.kit.command_lines import CommandLine
from tests.kit.encode_work import Making
from tests.kit.encodes import encode_here
from tests.kit.packs import (
    BUCKETS,
    TWENTY,
    check_dataset,
    jpeg,
    manifest_of,
    outcome,
    pack,
    packing_here,
    photos,
    run,
    run_pack,
    samples_of,
    temporaries,
    tree,
    write_files,
    write_table,
)
from tests.kit.packs import command as command_words
from tests.kit.paths import format_recipe
from wdsprep.cli import main
from wdsprep.dataset.draft import Draft
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import DamageError, FingerprintError, FormatError, UsageError
from wdsprep.fetch.options import FetchRules
from wdsprep.packing.options import PackOptions
from wdsprep.packing.pack import plan_workers
from wdsprep.runners.base import RunnerSettings
from wdsprep.runners.job import JobListener
from wdsprep.store import open_store

# --- the whole of it


def test_a_folder_of_photos_packs_with_no_option_at_all(
    tmp_path: Path, command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        f"holiday {n}/IMG_{n:04d}.JPG": jpeg(n, (300 + 100 * n, 400 + 50 * n)) for n in range(4)
    }
    more = {"holiday 1/IMG_0001.txt": "the sea", "small.jpg": jpeg(9, (100, 100))}
    write_files(tmp_path / "downloads", {**files, **more})
    done = run("pack", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "downloads: 5 images in a folder, 1 with captions" in done.stderr
    assert "is done" not in done.stderr, "which --verbose tells"
    large = "images large enough to encode: 4 at 256, 1 at 512, 0 at 768, 0 at 1024"
    assert large in done.stdout
    assert "1 reject (too_small 1)" in done.stdout
    assert "next: " in done.stdout
    before = tree(tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    assert "nothing left to do: 1 slice packed before" in command("pack").out
    assert tree(tmp_path / "shards") == before
    check_dataset(tmp_path / "shards/images")
    captions = [sample["txt"] for sample in samples_of(tmp_path / "shards/images")]
    assert captions == ["", "the sea", "", ""]
    page: dict[str, Any] = {}
    exec(format_recipe("read_tables"), page)
    rows = page["read_tables"](tmp_path / "shards/images")
    assert rows[rows.width >= 500][["caption", "source"]].values.tolist() == [
        ["", "holiday 2/IMG_0002.JPG"],
        ["", "holiday 3/IMG_0003.JPG"],
    ]


@pytest.mark.parametrize("place", ["https://example.org/images", "hf://datasets/owner/name"])
def test_a_place_that_is_only_read_is_refused_before_the_source_is_looked_at(place: str) -> None:
    with pytest.raises(UsageError, match=f"^{place}: .* is only read: "):
        wdsprep.pack("/nowhere", place)


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
        "height": 64, "key": "000000000000", "original_height": 64, "original_width": 70,
        "source": "a/b c.jpg", "width": 70,
        "meta": {"captions": facts["captions"], "aesthetic": 5.5, "bad": "x?y"},
    }  # fmt: skip
    assert (small["txt"], small["json"]["caption"]) == ("nul \0 here", "nul \0 here")
    check_dataset(out)


def test_filter_and_caption_lengths_reject_by_code(tmp_path: Path) -> None:
    files: dict[str, bytes | str] = {}
    for number, (caption, score) in enumerate(
        [("fine", 5), ("x", 5), ("x" * 30, 5), ("fine", 4), ("fine", None)]
    ):
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
        "4.jpg": "no_field",
    }
    check_dataset(out)


def test_folders_of_kohya_tell_repeats_and_captions_that_a_loader_takes_over(
    tmp_path: Path, command: CommandLine
) -> None:
    files: dict[str, bytes | str] = {}
    for number, name in enumerate(["10_dog/a", "10_dog/more/b", "3_cat/2_x/c", "plain/d", "4_e"]):
        files[f"{name}.jpg"] = jpeg(number)
        files[f"{name}.caption"] = name
    del files["plain/d.caption"]
    source, out = write_files(tmp_path / "in", files), tmp_path / "out"
    with packing_here():
        said = command("pack", source, tmp_path / "bare", *BUCKETS).out
    assert "no sample has a caption: --caption-ext .caption takes those of 4 .caption files" in said
    assert "repeats" not in samples_of(tmp_path / "bare")[0]["json"]
    for named, remedy in {
        ".foo": "--caption-ext .txt takes those of 1 .txt file",
        ".foo,.txt": "no text beside an image ends in .foo or .txt: give another --caption-ext",
    }.items():
        other = write_files(tmp_path / named, {"a.jpg": jpeg(1), "a.txt": " " * (".txt" in named)})
        with packing_here():
            said = command(
                "pack", other, tmp_path / f"{named}-out", *BUCKETS, "--caption-ext", named
            ).out
        assert f"no sample has a caption: {remedy}" in said
    options = ["--caption-ext", "caption,.txt", "--repeats-from-folders"]
    with packing_here():
        said = command("pack", source, out, *BUCKETS, *options).out
    assert "1 of 5 images has no caption\n" in said
    assert "repeats: 2 images x 1, 1 image x 2, 2 images x 10\n" in said
    packed = {sample["json"]["source"]: sample["json"] for sample in samples_of(out)}
    repeats = {name[:-4]: facts["repeats"] for name, facts in packed.items()}
    assert repeats == {
        "10_dog/a": 10, "10_dog/more/b": 10, "3_cat/2_x/c": 2, "plain/d": 1, "4_e": 1,
    }  # fmt: skip
    assert packed["10_dog/a.jpg"]["caption"] == "10_dog/a"
    settings = manifest_of(out).settings
    assert settings["caption_ext"] == [".caption", ".txt"]
    check_dataset(out)
    latents = tmp_path / "latents"
    with patch("wdsprep.encoding.encode.make_encoder", Making()):
        encode_here(out, latents, resolution=32)
    streams = [wdsprep.Stream(latents, where=f"repeats == {n}", repeat=n) for n in (1, 2, 10)]
    served = Counter(key for batch in wdsprep.load(streams, global_batch=4) for key in batch["key"])
    assert served == {facts["key"]: facts["repeats"] for facts in packed.values()}
    for to, place, join in (("imagefolder", out, []), ("kohya", latents, [out])):
        wdsprep.export(place, tmp_path / to, to=to, join=join)
        folders = {path.stem: path.parent.name for path in (tmp_path / to).rglob("*.jpg")}
        assert {key: int(name.partition("_")[0]) for key, name in folders.items()} == served


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"caption_ext": ".jpg"}, "--caption-ext .*give extensions of caption files"),
        ({"caption_ext": ""}, "--caption-ext .*give extensions of caption files"),
        ({"caption_ext": ".caption"}, "give their captions by --caption-col"),
        ({"repeats_from_folders": True}, "leave --repeats-from-folders out"),
    ],
)
def test_what_folders_tell_is_asked_of_folders_alone(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    (tmp_path / "in").mkdir()
    write_table(tmp_path / "in" / "a.parquet", [{"image": jpeg(1)}])
    with pytest.raises(UsageError, match=said):
        wdsprep.pack(tmp_path / "in", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_run_says_that_another_is_at_work_on_the_dataset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = photos(tmp_path / "photos", 3), tmp_path / "out"
    with Draft(Edition(store=open_store(str(out))), "000000"):
        pack(source, out)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{out}: another run seems to be at work on it now: ")
    pack(source, out)
    assert caplog.records == [record]
    check_dataset(out)


def test_max_alpha_rejects_what_shows_too_little_and_is_a_setting(tmp_path: Path) -> None:
    clear = BytesIO()
    Image.new("RGBA", (80, 80), (0, 0, 0, 60)).save(clear, "PNG")
    files: dict[str, bytes | str] = {"a.jpg": jpeg(1), "b.png": clear.getvalue()}
    source, out = write_files(tmp_path / "in", files), tmp_path / "out"
    pack(source, out, "--max-alpha", "0.5")
    assert outcome(out) == {"a.jpg": "packed", "b.png": "transparent"}
    assert manifest_of(out).settings["max_alpha"] == 0.5
    with pytest.raises(FingerprintError, match=r"max-alpha: 0\.5, now none"):
        pack(source, out)
    pack(source, out, "--overwrite")
    assert outcome(out) == {"a.jpg": "packed", "b.png": "packed"}
    assert "max_alpha" not in manifest_of(out).settings  # as in datasets that never heard of it


def test_reencode_writes_every_image_as_jpeg_of_the_size_asked_for(tmp_path: Path) -> None:
    write_files(tmp_path / "in", {"a.png": jpeg(1, (200, 100), "PNG"), "b.jpg": jpeg(2, (40, 40))})
    out = pack(tmp_path / "in", tmp_path / "out", "--reencode", "jpg:80", "--max-side", "128")
    facts = [sample["json"] for sample in samples_of(out)]
    assert sorted((f["source"], f["width"], f["original_width"], f["changes"]) for f in facts) == [
        ("a.png", 128, 200, ["resize", "recode"]),
        ("b.jpg", 40, 40, ["recode"]),
    ]
    check_dataset(out)


# --- determinism


def test_the_number_of_workers_changes_no_byte(
    album: Path, packed_album: Path, tmp_path: Path
) -> None:
    """Nor does the runner: tests/house/test_chaos.py."""
    assert tree(pack(album, tmp_path / "out", *TWENTY, workers=2)) == tree(packed_album)


def test_threads_in_one_slice_change_no_byte(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 40)
    one, four = pack(source, tmp_path / "one"), pack(source, tmp_path / "four", workers=4)
    assert len(manifest_of(one).receipts) == 1
    assert tree(one) == tree(four)


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


def test_the_manifest_is_made_again_from_the_receipts(album: Path, tmp_path: Path) -> None:
    out = pack(album, tmp_path / "out", *TWENTY)
    before, manifest = tree(out), out / "wdsprep.json"
    assert main(["rebuild", str(out)]) == 0
    assert tree(out) == before
    for damaged in (b"", before["wdsprep.json"][:-9] + b"oh no!\n"):
        manifest.write_bytes(damaged)
        with pytest.raises(FormatError, match=f'run "wdsprep rebuild {out}"'):
            pack(album, out, *TWENTY)
        assert main(["rebuild", str(out)]) == 0
        pack(album, out, *TWENTY)
        assert tree(out) == before
    manifest.unlink()
    assert main(["rebuild", str(out)]) == 0
    pack(album, out, *TWENTY)
    assert tree(out) == before
    (out / "receipts/000003.json").write_bytes(b"damaged")
    again = f'run "wdsprep repair {out}", then the same command again'
    with pytest.raises(DamageError, match=rf"receipts/000003.json is damaged.*{again}"):
        pack(album, out, *TWENTY)


# --- two at once


@pytest.mark.system
def test_two_different_runs_at_once_never_mix(album: Path, tmp_path: Path) -> None:
    other = photos(tmp_path / "other", 100, first=500)
    out = tmp_path / "out"
    words = [command_words(source, out, *TWENTY, "--workers", "1") for source in (album, other)]
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    both = [subprocess.Popen(line, **pipes) for line in words]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert any(process.returncode == 1 for process in both)
    for process, error in zip(both, errors, strict=True):
        assert process.returncode == 0 or re.search(
            "another run is writing|another run has taken|has changed since", error
        ), error
    assert not temporaries(out)
    for source in (album, other):  # one of them is what the dataset was left as, or neither is
        if run_pack(source, out, *TWENTY).returncode == 0:
            assert tree(out) == tree(pack(source, tmp_path / "alone", *TWENTY))
            return
    for shard in manifest_of(out).shards:
        assert blake3((out / shard.name).read_bytes()).hexdigest() == shard.digest


# --- a full disk


def test_a_full_disk_is_one_clear_line_and_can_be_resumed(
    album: Path, packed_album: Path, small_disk: Path, command: CommandLine
) -> None:
    out = small_disk / "out"
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(600_000))
    with packing_here():
        said = command("pack", album, out, *BUCKETS, *TWENTY, code=1).err.strip()
    assert len(said.splitlines()) == 2, said
    assert "the disk is full: free some space and run the same again" in said.splitlines()[1]
    assert not temporaries(out)
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert tree(pack(album, out, *TWENTY)) == tree(packed_album)


def test_options_of_downloads_are_named_where_nothing_is_downloaded(tmp_path: Path) -> None:
    told: list[str] = []
    source = photos(tmp_path / "photos", 2)
    options = {"buckets": (32,), "workers": 1, "listener": JobListener(on_message=told.append)}
    with packing_here():
        wdsprep.pack(source, tmp_path / "images", timeout=5, retries=0, **options)
    (line,) = [line for line in told if "changes nothing" in line]
    assert line == f"{source} holds no URLs to fetch: --timeout, --retries changes nothing here"
    told.clear()
    wdsprep.pack(source, tmp_path / "images", **options)
    assert not [line for line in told if "changes nothing" in line]


def test_fields_and_extensions_that_nothing_has_are_told(tmp_path: Path) -> None:
    told: list[str] = []
    source, listener = photos(tmp_path / "photos", 2), JobListener(on_message=told.append)
    write_files(source, {"0/photo-00000.json": '{"score": 1}'})
    with packing_here():
        for number, options in enumerate(
            (
                {"caption_ext": ".foo,.txt", "save_additional_columns": "score"},
                {"caption_ext": ".txt,.foo", "save_additional_columns": "scoer"},
                {"filter": "scoer > 1"},
            )
        ):
            out = tmp_path / f"out-{number}"
            wdsprep.pack(source, out, buckets=(32,), workers=1, listener=listener, **options)
    assert told == [
        "no file beside an image ends in .foo: check --caption-ext",
        "none of the first 2 samples has scoer, but score: check --save-additional-columns",
        "none of the first 2 samples has scoer, but score: check --filter",
    ]


RULES = FetchRules(requests=256, per_host=8)


def plan(workers: int, *, cpus: int = 0, slices: int = 1_000) -> tuple[RunnerSettings, list[int]]:
    """The plan for this machine, or for Ray's if they have so many cores, and a worker's share.

    The latter is its threads, requests and those at one host.
    """
    options = PackOptions(workers=workers or "auto")
    settings, threads, fetch = plan_workers(options, node_cpus=cpus, slices=slices, fetch=RULES)
    assert fetch is not None
    return settings, [threads, fetch.requests, fetch.per_host]


@pytest.mark.parametrize("workers", [1, 3, 8, 9, 16, 64, 200])
@pytest.mark.parametrize("cpus", [1, 2, 7, 8, 9, 16, 64, 192])
def test_no_machine_asks_for_more_than_it_may(workers: int, cpus: int) -> None:
    here, (threads, _, per_host) = plan(workers)
    assert here.workers * per_host <= RULES.per_host
    assert here.workers * threads <= workers
    for wanted in (0, workers):
        there, (_, requests, per_host) = plan(wanted, cpus=cpus)
        count = min(cpus // there.cpus_per_worker, wanted or cpus)
        assert there.workers == wanted
        assert count * per_host <= RULES.per_host
        assert count * requests <= RULES.requests
