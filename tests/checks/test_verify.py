"""Whatever happens to a byte of a dataset is found, and said of the right file."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from tests.kit.damaged import (
    check,
    check_flips,
    findings,
    flip,
    pack_here,
    restore,
    rewrite,
    source_of_photos,
    state,
)
from tests.kit.packs import photos, tree
from wdsprep.cli import main
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.sample_table import IMAGE_COLUMNS, read_table
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.stored_dataset import read_receipt
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A dataset of four slices, and every byte of it."""
    root = tmp_path_factory.mktemp("packed")
    images = pack_here(source_of_photos(root / "photos"), root / "images")
    return images, tree(images)


@pytest.fixture
def images(packed: tuple[Path, dict[str, bytes]]) -> Path:
    restore(*packed)
    return packed[0]


def test_what_pack_made_is_sound(images: Path) -> None:
    verified = check(images)
    assert not verified.findings
    assert not verified.notes
    assert findings(images, quick=True) == []


def test_one_flipped_bit_anywhere_is_found_in_the_right_file(
    images: Path, packed: tuple[Path, dict[str, bytes]]
) -> None:
    names = check_flips(images, packed[1], "images", rounds=40)
    kinds = {name.rpartition(".")[2] for name in names}
    assert kinds == {"tar", "idx", "json", "jsonl", "parquet"}


TABLE = "32/000001.parquet"


def put_table(images: Path, table: pa.Table, **options: Any) -> None:
    """Write a table, and its digest where the dataset states it."""
    pq.write_table(table, images / TABLE, **options)
    receipt = read_receipt(open_store(str(images)), "000001")
    files = {**receipt.files, TABLE: hex_digest((images / TABLE).read_bytes())}
    state(images, replace(receipt, files=files))


def test_a_table_of_other_rows_is_found_though_its_receipt_states_it(images: Path) -> None:
    table = read_table((images / TABLE).read_bytes(), IMAGE_COLUMNS, what=TABLE)
    place = table.schema.get_field_index("caption")
    captions = pa.array(["another", *table["caption"].to_pylist()[1:]])
    for other, why in (
        (
            table.set_column(place, table.schema.field(place), captions),
            "its rows are not what the json in its tar says",
        ),
        (table.slice(1), "it has 0 rows, and its shard 1 samples"),
        (table.drop_columns("url"), "its columns are not those of a table of samples"),
    ):
        put_table(images, other)
        (finding,) = check(images).findings
        assert str(finding).startswith(f"{images}/{TABLE}: {why}: run ")
    put_table(images, table, compression="gzip")  # the same rows in other bytes
    assert findings(images) == []


def test_a_file_that_is_gone_is_found_without_reading_a_shard(
    images: Path, packed: tuple[Path, dict[str, bytes]]
) -> None:
    for name, data in packed[1].items():
        (images / name).unlink()
        kind = "index" if name.endswith((".idx", ".parquet")) else "missing"
        if name == MANIFEST:
            kind = "manifest"
        assert findings(images, quick=True) == [f"{name} {kind}"]
        (images / name).write_bytes(data)


def test_a_truncated_shard_is_found_without_reading_it(images: Path) -> None:
    shard = images / "32/000001.tar"
    shard.write_bytes(shard.read_bytes()[:-1024])
    found = check(images, quick=True).findings
    assert [finding.name for finding in found] == ["32/000001.tar"]
    assert "it is truncated (" in str(found[0])


def test_the_receipt_of_another_slice_is_found(images: Path) -> None:
    receipt = images / "receipts/000001.json"
    receipt.write_bytes((images / "receipts/000000.json").read_bytes())
    found = check(images).findings
    assert [str(finding).partition(": run")[0] for finding in found] == [
        f"{receipt}: it is the receipt of 000000"
    ]


def test_what_no_receipt_speaks_of_is_found(images: Path) -> None:
    for name in ("32/000099.tar", "notes.txt", "64/000000_01.tar.idx", "inputs/000050.jsonl"):
        (images / name).write_bytes(b"x")
    (images / ".nv-meta").mkdir()
    (images / ".nv-meta/split.yaml").write_text("of another tool\n")
    (images / f"32/.wdsprep-host.{'0' * 16}.tmp").write_bytes(b"x")
    verified = check(images, quick=True)
    assert {finding.name for finding in verified.findings} == {
        *("32/000099.tar", "notes.txt", "64/000000_01.tar.idx", "inputs/000050.jsonl")
    }
    assert all("move it out" in finding.next_step for finding in verified.findings)
    assert len(verified.notes) == 2
    (images / f"32/.wdsprep-host.{'0' * 16}.tmp").unlink()
    (images / ".nv-meta/split.yaml").unlink()
    (images / ".nv-meta").rmdir()


def test_a_manifest_that_does_not_say_what_the_receipts_say_is_found(images: Path) -> None:
    path = images / MANIFEST
    manifest = Manifest.from_bytes(path.read_bytes(), "manifest")
    for changed in (
        replace(manifest, receipts=[*manifest.receipts][1:]),
        replace(manifest, receipts=(replace(next(iter(manifest.receipts)), inputs=9),)),
    ):
        path.write_bytes(changed.to_bytes())
        assert f"{MANIFEST} manifest" in findings(images, quick=True)


def test_a_dataset_that_is_still_packed_is_sound_so_far(tmp_path: Path) -> None:
    images = pack_here(photos(tmp_path / "photos", 9), tmp_path / "images", "--limit", "8")
    write_bytes(open_store(str(images)), "32/000002.tar", b"half of it")
    verified = check(images)
    assert not verified.findings
    assert [note.name for note in verified.notes] == ["", "32/000002.tar"]
    assert "it is not complete: 2 units finished so far" in str(verified.notes[0])


@pytest.mark.parametrize("nbytes", [700, 5_000])
def test_members_that_lie_across_what_is_read_at_once_are_checked_alike(
    images: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr("wdsprep.dataset.chunks.LOCAL_CHUNK_NBYTES", nbytes)
    assert findings(images) == []
    flip(images / "64/000002.tar", 8 * 3_000)
    assert findings(images) == ["64/000002.tar damaged"]


def test_worker_processes_find_what_this_process_finds(
    images: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(images), "--workers", "1"]) == 0
    assert "sound: 12 samples in 7 shards" in capfd.readouterr().out
    monkeypatch.setattr("wdsprep.runners.make_runner.HERE_NBYTES", 0)
    flip(images / "64/000002.tar", 8 * 3_000)
    (images / "32/000001.tar.idx").unlink()
    assert main(["verify", str(images), "--workers", "2", "--json"]) == 3
    found = json.loads(capfd.readouterr().out)["findings"]
    assert [finding["name"] for finding in found] == ["32/000001.tar.idx", "64/000002.tar"]
    assert main(["verify", str(images), "--workers", "1"]) == 3
    lines = capfd.readouterr().out.splitlines()
    again = f'run "wdsprep repair {images}", then the same "wdsprep pack" again'
    assert lines[0] == f'{images}/32/000001.tar.idx: it is missing: run "wdsprep repair {images}"'
    assert lines[1].startswith(f"{images}/64/000002.tar: its BLAKE3 is not what its receipt says")
    assert lines[1].endswith(again)
    assert lines[2].startswith(f"{images}: 2 findings: 12 samples in 7 shards")


# --- shards that are what they were written as, and yet not as the format has it

Members = list[tuple[str, bytes]]


def facts_with(**changed: object) -> Callable[[Members], Members]:
    def change(fields: Members) -> Members:
        facts = json.loads(fields[1][1]) | changed
        facts = {name: value for name, value in facts.items() if value != "left out"}
        return [fields[0], ("json", json.dumps(facts).encode()), fields[2]]

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda fields: fields[:2], "its members are jpg, json, not jpg, json, txt"),
        (lambda fields: [fields[1], fields[0], fields[2]], "members are json, jpg, txt, not jpg"),
        (lambda fields: [("gif", fields[0][1]), *fields[1:]], "members are gif, json, txt, not"),
        (lambda fields: [*fields, ("cls", b"1")], "members are jpg, json, txt, cls, not jpg"),
        (lambda fields: [("jpg", b"GIF89a"), *fields[1:]], "jpg is not an image of that format"),
        (lambda fields: [fields[0], ("json", b"{"), fields[2]], "json cannot be read"),
        (lambda fields: [*fields[:2], ("txt", b"\xff")], "txt cannot be read"),
        (lambda fields: [fields[0], ("json", b"[]"), fields[2]], "json is not an object"),
        (lambda fields: [*fields[:2], ("txt", b"other")], "txt is not the caption of the json"),
        (facts_with(key="000000000009"), "json states the key 000000000009"),
        (facts_with(width="40"), "json lacks width, or its type is not int"),
        (facts_with(width=True), "json lacks width, or its type is not int"),
        (facts_with(source="left out"), "json lacks source, or its type is not str"),
        (facts_with(meta={"a": [None]}), "json has a null"),
        (facts_with(width=300, height=300), "300 x 300 pixels do not belong in this bucket"),
        (facts_with(width=3), "pixels do not belong in this bucket"),
        (facts_with(bucket=64), "json states another bucket"),
    ],
)
def test_a_sample_that_breaks_the_format_is_found_although_its_hash_is_right(
    images: Path, change: Callable[[Members], Members], problem: str
) -> None:
    rewrite(images, "000000", lambda samples: [(k, dict(change([*f.items()]))) for k, f in samples])
    found = check(images).findings
    assert [finding.name for finding in found] == ["32/000000.tar"]
    assert problem in found[0].what


def test_keys_that_do_not_rise_or_miss_an_input_are_found(images: Path) -> None:
    rewrite(
        images, "000000", lambda samples: [(f"{9 - n:012d}", f) for n, (_, f) in enumerate(samples)]
    )
    assert "json states the key" in check(images).findings[0].what
