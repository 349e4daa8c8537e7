"""After a repair, pack or encode gives the bytes of a run to which nothing happened."""

import json
import os
import pty
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow import parquet as pq

import wdsprep
from tests.kit.damaged import check, findings, flip, pack_here, restore, source_of_photos
from tests.kit.encodes import in_this_process
from tests.kit.packs import BUCKETS, SCRIPT, check_tables, manifest_of, packing_here, photos, tree
from wdsprep.checks.findings import Kind
from wdsprep.checks.repair import Repair, do_repair, plan_repair
from wdsprep.cli import main
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.errors import FingerprintError

Packed = tuple[Path, Path, dict[str, bytes]]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    root = tmp_path_factory.mktemp("packed")
    source = source_of_photos(root / "photos")
    images = pack_here(source, root / "images")
    return source, images, tree(images)


@pytest.fixture
def packed(once: Packed) -> Packed:
    restore(once[1], once[2])
    return once


@pytest.fixture(scope="module")
def appended_once(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """A dataset of three generations. What was added sorts in between."""
    root = tmp_path_factory.mktemp("appended")
    source = photos(root / "photos", 6)
    images = pack_here(source, root / "images")
    for first in (6, 10):
        photos(source, 4, first=first)
        pack_here(source, images, "--append")
    assert manifest_of(images).generations == (0, 2, 3)
    return source, images, tree(images)


@pytest.fixture
def appended(appended_once: Packed) -> Packed:
    restore(appended_once[1], appended_once[2])
    return appended_once


def repair(dataset: Path) -> Repair:
    found = plan_repair(check(dataset).surveys[0])
    do_repair(found)
    return found


def damage(dataset: Path, name: str) -> None:
    """Flip a bit in the middle of a file."""
    flip(dataset / name, (dataset / name).stat().st_size * 4)


def test_repair_and_pack_bring_back_every_kind_of_file_damaged_or_deleted(packed: Packed) -> None:
    source, images, whole = packed
    reject = next(name for name, data in whole.items() if name.startswith("rejects/") and data)
    for names in (
        ["32/000001.tar"],
        ["64/000000.tar.idx"],
        ["64/000000.parquet", "64/000000.tar.idx"],
        ["receipts/000002.json"],
        ["inputs/000001.jsonl", "32/000000.tar.idx"],
        [reject, "64/000003.tar"],
        [MANIFEST],
        [MANIFEST, "32/000000.tar", "receipts/000001.json"],
    ):
        for name in names:
            damage(images, name)
        repair(images)
        assert not check(images).findings
        pack_here(source, images)
        assert tree(images) == whole, names
    for name in ("32/000001.tar", "64/000000.tar.idx", "receipts/000002.json", MANIFEST):
        (images / name).unlink()
        repair(images)
        pack_here(source, images)
        assert tree(images) == whole, name


def test_a_table_that_another_pyarrow_makes_again_is_that_of_its_receipt(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    _source, images, whole = packed
    real = pq.ParquetWriter
    monkeypatch.setattr(
        pq, "ParquetWriter", lambda *args, **more: real(*args, **{**more, "compression": "gzip"})
    )
    (images / "32/000001.parquet").unlink()
    assert repair(images).remade == ("32/000001.parquet",)
    changed = {name for name, data in tree(images).items() if whole.get(name) != data}
    assert changed == {"32/000001.parquet", "receipts/000001.json", MANIFEST}
    monkeypatch.undo()
    assert not check(images).findings
    check_tables(images)


def test_an_index_is_made_again_from_its_tar_without_the_source(packed: Packed) -> None:
    _source, images, whole = packed
    damage(images, "32/000001.tar.idx")
    (images / "64/000000.tar.idx").unlink()
    found = repair(images)
    assert not found.names
    assert not found.writes_manifest
    assert tree(images) == whole


def test_a_repair_that_is_killed_anywhere_can_be_done_again(packed: Packed) -> None:
    source, images, whole = packed
    damage(images, "32/000001.tar")
    damage(images, "receipts/000002.json")
    damaged = tree(images)
    count = len(plan_repair(check(images).surveys[0]).names)
    assert count > 6
    for deleted in range(count):
        restore(images, damaged)
        with pytest.raises(KeyboardInterrupt):
            do_repair(plan_repair(check(images).surveys[0]), on_count=_kill_at(deleted + 1))
        repair(images)
        assert not check(images).findings
    pack_here(source, images)
    assert tree(images) == whole


def _kill_at(count: int) -> Callable[[int], None]:
    def heard(done: int) -> None:
        if done == count:
            raise KeyboardInterrupt

    return heard


@pytest.mark.parametrize("unit", ["000000", "000001", "000002", "000003"])
def test_a_slice_of_an_earlier_append_comes_back_as_it_was(appended: Packed, unit: str) -> None:
    source, images, whole = appended
    damage(images, f"receipts/{unit}.json")
    repair(images)
    assert (images / f"inputs/{unit}.jsonl").exists() is (unit != "000003")
    pack_here(source, images)
    assert tree(images) == whole


def test_slices_of_several_appends_come_back_while_more_is_appended(appended: Packed) -> None:
    source, images, whole = appended
    for name in ("receipts/000000.json", "64/000002.tar"):
        damage(images, name)
    repair(images)
    photos(source, 1, first=14)
    pack_here(source, images, "--append")
    for path in source.rglob("photo-00014.*"):
        path.unlink()
    now = tree(images)
    assert {name: now[name] for name in whole if name != MANIFEST} == {
        name: data for name, data in whole.items() if name != MANIFEST
    }


def test_a_slice_whose_source_is_gone_is_an_error_that_says_so(appended: Packed) -> None:
    source, images, _whole = appended
    damage(images, "receipts/000000.json")
    repair(images)
    photo = source / "0/photo-00000.jpg"
    data, times = photo.read_bytes(), photo.stat()
    photo.unlink()
    with pytest.raises(FingerprintError, match="has changed since it was packed"):
        pack_here(source, images)
    photo.write_bytes(data)
    os.utime(photo, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_foreign_files_are_named_and_left_alone(packed: Packed) -> None:
    _source, images, _whole = packed
    for name in ("32/000099.tar", "1024/000001.tar", "notes.txt"):
        (images / name).parent.mkdir(exist_ok=True)
        (images / name).write_bytes(b"x")
    damage(images, "32/000001.tar")
    found = repair(images)
    assert {finding.kind for finding in found.beyond} == {Kind.FOREIGN}
    assert all((images / name).exists() for name in ("32/000099.tar", "1024/000001.tar"))
    (images / "1024/000001.tar").unlink()
    (images / "1024").rmdir()


def test_a_receipt_of_latents_costs_images_nothing(
    packed: Packed, capfd: pytest.CaptureFixture[str]
) -> None:
    _source, images, whole = packed
    (images / "receipts/32").mkdir()
    for name in ("000001.json", "000002.json"):
        shutil.copy(images / "receipts" / name, images / "receipts/32" / name)
    assert main(["repair", str(images), "--yes"]) == 0
    said = capfd.readouterr().out
    assert "remove files of no slice here (receipts/32/000001.json: it is" in said
    assert said.endswith(f"repaired: {images} lacks nothing\n")
    assert "another run" not in said
    assert tree(images) == whole


def test_a_receipt_of_images_costs_latents_nothing(
    packed: Packed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor does one in the place of another make two units of one."""
    latents = tmp_path / "latents"
    with in_this_process():
        wdsprep.encode(packed[1], latents, resolution=32, model="tiny")
    whole = tree(latents)
    for name in ("receipts/000001.json", "receipts/32/000001.json"):
        shutil.copy(packed[1] / "receipts/000001.json", latents / name)
    assert main(["repair", str(latents), "--yes"]) == 0
    said = capfd.readouterr().out
    assert "another run" not in said
    assert "remove shard 32/000001, to be made again" in said
    gone = {name for name in whole if "32/000001" in name}
    assert tree(latents).keys() == whole.keys() - gone


# --- the command


def test_the_command_shows_and_asks_and_does_nothing_unasked(
    packed: Packed, capfd: pytest.CaptureFixture[str]
) -> None:
    source, images, whole = packed
    damage(images, "32/000001.tar")
    damaged = tree(images)
    assert main(["repair", str(images)]) == 3
    said = capfd.readouterr().out
    assert "remove slice 000001, to be made again (32/000001.tar: its BLAKE3 is not" in said
    assert "nothing was done: give --yes" in said
    assert tree(images) == damaged != whole
    assert main(["repair", str(images), "--yes", "--json"]) == 0
    done = json.loads(capfd.readouterr().out)
    assert done["done"]
    assert list(done["units"]) == ["000001"]
    with packing_here():
        assert main(["pack", str(source), str(images), *BUCKETS, "--samples-per-shard", "4"]) == 0
    assert tree(images) == whole
    assert main(["repair", str(images)]) == 0
    assert capfd.readouterr().out.endswith(f"{images}: nothing to repair\n")
    assert main(["repair", str(images), "--quick"]) == 0
    assert "nothing to repair by receipts and sizes alone" in capfd.readouterr().out


@pytest.mark.system
@pytest.mark.parametrize(("answer", "code"), [("n\n", 3), ("y\n", 0)])
def test_at_a_terminal_the_answer_decides(packed: Packed, answer: str, code: int) -> None:
    _source, images, _whole = packed
    damage(images, "32/000001.tar")
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    done = subprocess.run(
        [SCRIPT, "repair", images], stdin=theirs, capture_output=True, timeout=120, check=False
    )
    os.close(ours)
    os.close(theirs)
    assert done.returncode == code, done.stderr
    assert (images / "receipts/000001.json").exists() == (code == 3)


def test_what_is_left_of_a_dataset_without_a_sound_receipt_is_begun_anew(packed: Packed) -> None:
    source, images, whole = packed
    for unit in range(4):
        damage(images, f"receipts/{unit:06d}.json")
    repair(images)
    assert findings(images) == []
    pack_here(source, images)
    assert tree(images) == whole
