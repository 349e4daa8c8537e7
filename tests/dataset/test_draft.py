from pathlib import Path

import pytest

from tests.kit.packs import temporaries
from wdsprep.dataset.draft import Draft
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
