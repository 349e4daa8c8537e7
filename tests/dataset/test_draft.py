"""How a unit gives its files their names all at once."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.packs import temporaries
from tests.kit.sealed_files import receipt_of_images
from wdsprep.dataset import stored_dataset
from wdsprep.dataset.draft import Draft
from wdsprep.dataset.file_names import receipt_name
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.stored_dataset import find_claim, take_claim
from wdsprep.dataset.tar.write import TarWriter
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import FingerprintError
from wdsprep.store.base import Store, write_bytes
from wdsprep.store.local import LocalStore


def test_a_stop_in_the_middle_of_a_failure_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ends a draft, and SIGTERM comes while that waits for the tar's thread."""

    def stopped(_writer: TarWriter, *_error: object) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(TarWriter, "__exit__", stopped)

    def fill(draft: Draft) -> None:
        with draft:
            draft.shard("64/000000.tar").add("000000000", [("txt", b"a barn")])
            draft.shard("32/000000.tar")
            raise OSError("the disk is full")

    with pytest.raises(SystemExit):
        fill(Draft(Edition(store=LocalStore(tmp_path)), "000000"))
    assert not temporaries(tmp_path)


def test_who_comes_second_drops_its_files_and_says_once_that_the_work_was_done_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edition = Edition(store=LocalStore(tmp_path))
    for unit in ("000000", "000001"):
        receipt = receipt_of_images(unit=unit)
        with Draft(edition, unit) as quick, Draft(edition, unit) as slow:
            finished = quick.finish(receipt, {"beside": b"quick"})
            assert finished == replace(receipt, files={"beside": hex_digest(b"quick")})
            assert not caplog.records or unit == "000001"
            assert slow.finish(receipt, {"beside": b"slow"}) == finished
        assert edition.store.read("beside") == b"quick"
    (record,) = caplog.records
    assert "another run or worker has finished 000000 first" in record.getMessage()
    assert not temporaries(tmp_path)


def test_a_dataset_that_another_run_has_just_begun_is_no_other_thing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, settings = LocalStore(tmp_path), {"buckets": [64]}

    def begin_another(_store: Store) -> None:
        monkeypatch.undo()
        take_claim(find_claim(store, "images", settings, overwrite=False))

    monkeypatch.setattr(stored_dataset, "rebuild", begin_another)  # where there was no manifest
    claim = find_claim(store, "images", settings, overwrite=False)
    assert not claim.is_there
    assert take_claim(claim).is_there
    with pytest.raises(FingerprintError, match="made with other settings: buckets: 64, now 32"):
        take_claim(replace(claim, manifest=replace(claim.manifest, settings={"buckets": [32]})))


def test_a_run_that_begins_while_an_overwrite_deletes_ends_and_what_it_wrote_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, settings = LocalStore(tmp_path), {"buckets": [64]}
    unit, delete, early = "000000", LocalStore.delete, list[Edition]()
    take_claim(find_claim(store, "images", settings, overwrite=False))
    write_bytes(store, receipt_name(unit), receipt_of_images(unit=unit).to_bytes())

    def begin_first(of: LocalStore, name: str) -> None:
        monkeypatch.undo()
        early.append(Edition.from_store(of))
        receipt = of.read(name)
        delete(of, name)
        with early[0].holding(unit):
            write_bytes(of, name, receipt)

    monkeypatch.setattr(LocalStore, "delete", begin_first)
    claim = take_claim(find_claim(store, "images", settings, overwrite=True))
    assert [entry.name for entry in store.list("receipts/")] == []
    with pytest.raises(FingerprintError, match="started over"), early[0].holding(unit):
        pass
    with claim.edition.holding(unit):
        pass
