from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.packs import temporaries
from wdsprep.dataset.digests import hex_digest
from wdsprep.dataset.draft import Draft
from wdsprep.dataset.receipts import Receipt
from wdsprep.dataset.tar.write import TarWriter
from wdsprep.dataset.unit_locks import Edition
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
            draft.tar("64/000000.tar").add("000000000", [("txt", b"a barn")])
            draft.tar("32/000000.tar")
            raise OSError("the disk is full")

    with pytest.raises(SystemExit):
        fill(Draft(Edition(store=LocalStore(tmp_path)), "000000"))
    assert not temporaries(tmp_path)


def test_who_comes_second_drops_its_files_and_says_once_that_the_work_was_done_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edition = Edition(store=LocalStore(tmp_path))
    for unit in ("000000", "000001"):
        receipt = Receipt(
            dataset="images",
            unit=unit,
            generation=0,
            settings={"buckets": [64]},
            input="",
            inputs=0,
            shards=(),
            rejects={},
            counts={},
            files={},
        )
        with Draft(edition, unit) as quick, Draft(edition, unit) as slow:
            finished = quick.finish(receipt, {"beside": b"quick"})
            assert finished == replace(receipt, files={"beside": hex_digest(b"quick")})
            assert not caplog.records or unit == "000001"
            assert slow.finish(receipt, {"beside": b"slow"}) == finished
        assert edition.store.read("beside") == b"quick"
    (record,) = caplog.records
    assert "another run or worker has finished 000000 first" in record.getMessage()
    assert not temporaries(tmp_path)
