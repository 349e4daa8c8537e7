"""Files that keep what a look at all samples found: when they are deleted, and when not."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from wdsprep.dataset.kept_file import KeptFile, KeptWriter, open_or_make, release_pages
from wdsprep.errors import StoreError

MONTHS_S = 100 * 24 * 3600


def numbers(count: int) -> Callable[[KeptWriter, Path], None]:
    def make(writer: KeptWriter, _path: Path) -> None:
        writer.add("numbers", "<i8", [np.arange(count)])

    return make


def keep(cache: Path, what: str, *, count: int = 1000) -> KeptFile:
    return open_or_make(cache, [what], numbers(count))


def age(file: Path) -> None:
    os.utime(file, (time.time() - MONTHS_S,) * 2)


def test_a_file_that_nobody_has_opened_for_months_is_deleted_with_all_that_belongs_to_it(
    tmp_path: Path,
) -> None:
    old, used = keep(tmp_path, "old").path, keep(tmp_path, "used").path
    broken_off = old.with_suffix(".begun")
    broken_off.write_bytes(b"half")
    for path in (old, used, broken_off):
        age(path)
    keep(tmp_path, "used")  # which counts as opened
    new = keep(tmp_path, "new").path
    left = {path.name for path in new.parent.iterdir()}
    assert left == {f"{path.stem}.{end}" for path in (used, new) for end in ("arrays", "lock")}


def test_what_a_killed_process_began_months_ago_is_deleted(tmp_path: Path) -> None:
    begun = keep(tmp_path, "new").path.with_name("0123456789abcdef.begun")
    begun.write_bytes(b"half")
    age(begun)
    keep(tmp_path, "newer")
    assert not begun.exists()


def test_the_files_opened_longest_ago_give_way_where_all_take_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [keep(tmp_path, str(number)).path for number in range(4)]
    for days, path in enumerate(paths):
        os.utime(path, (time.time() - 3600 * days,) * 2)
    room = 3 * paths[0].stat().st_size + 100
    monkeypatch.setattr("wdsprep.dataset.kept_file.MOST_NBYTES", room)
    made = keep(tmp_path, "new").path
    assert [path.exists() for path in [made, *paths]] == [True, True, True, False, False]


def test_a_file_stays_while_an_array_of_it_is_in_use_here(tmp_path: Path) -> None:
    part = keep(tmp_path, "used").arrays["numbers"][5:9]
    path = keep(tmp_path, "used").path
    age(path)
    keep(tmp_path, "second")
    assert path.exists()
    assert part.tolist() == [5, 6, 7, 8]
    del part
    age(path)
    keep(tmp_path, "third")
    assert not path.exists()


def test_arrays_that_are_written_in_any_order_stand_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(writer: KeptWriter, _path: Path) -> None:
        later = writer.reserve("later", "<i4", 70_000)
        writer.reserve("none", "<f8", 0)
        writer.add("numbers", "<i8", [np.arange(3), np.arange(3)])
        writer.reserve("zeros", "|b1", 5)
        later[[69_999, 1]] = 7, 8

    kept = open_or_make(tmp_path, ["reserved"], make)
    assert np.flatnonzero(kept.arrays["later"]).tolist() == [1, 69_999]
    assert kept.arrays["later"][[1, 69_999]].tolist() == [8, 7]
    assert kept.arrays["none"].dtype == np.float64
    sizes = {name: len(array) for name, array in kept.arrays.items()}
    assert sizes == {"later": 70_000, "none": 0, "numbers": 6, "zeros": 5}
    assert kept.arrays["numbers"].tolist() == [0, 1, 2] * 2
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("wdsprep.dataset.kept_file.os.posix_fallocate", Mock(side_effect=full))
    with pytest.raises(StoreError, match=rf"cached in {tmp_path}.* \(No space left on device\)"):
        open_or_make(tmp_path, ["too large"], make)


def test_a_file_takes_memory_only_from_its_use_to_its_release(tmp_path: Path) -> None:
    def resident_kb() -> int:
        _, _, own = Path("/proc/self/smaps").read_text().partition(f" {kept.path}\n")
        return int(own.split("Rss:")[1].split()[0])

    keep(tmp_path, "large", count=1 << 20)
    kept = keep(tmp_path, "large", count=1 << 20)
    array = kept.arrays["numbers"]
    assert resident_kb() < 1000
    assert int(array.sum()) == (1 << 19) * ((1 << 20) - 1)
    assert resident_kb() > 8000
    release_pages(array)
    assert resident_kb() == 0
    assert array[-3:].tolist() == [1048573, 1048574, 1048575]
    release_pages(np.arange(3))
