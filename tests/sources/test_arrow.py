"""What `datasets` has saved: all splits come out, and what is missing is one line."""

import shutil
from pathlib import Path

import pytest

from tests.kit.packs import jpeg, rows_of, source_of
from wdsprep.dataset.samples import Sample
from wdsprep.errors import SourceError, UsageError


@pytest.fixture
def place(foreign_sets: Path, tmp_path: Path) -> Path:
    return shutil.copytree(foreign_sets / "images/datasets", tmp_path / "saved")


def test_all_splits_are_read_by_their_names(place: Path) -> None:
    (place / "train/cache-0123.arrow").write_bytes(b"of a map that was kept")
    items = list(source_of(place).items())
    assert [item.name for item in items] == [
        "test/data-00000-of-00001.arrow",
        "train/data-00000-of-00002.arrow",
        "train/data-00001-of-00002.arrow",
    ]
    found = rows_of(place)
    numbers = [*range(8, 12), *range(8)]
    assert [row.source for row in found][:5] == [
        *(f"test/data-00000-of-00001.arrow#{n}" for n in range(4)),
        "train/data-00000-of-00002.arrow#0",
    ]
    for number, row in zip(numbers, found, strict=True):
        assert isinstance(row, Sample)
        assert (row.image, row.caption) == (jpeg(number), f"picture {number}")
        assert row.facts == {"n": number, "text": f"picture {number}"}
    assert source_of(place).count(items[0]) == 4


def test_one_split_is_a_dataset(place: Path) -> None:
    assert len(rows_of(place / "train")) == 8


def test_a_file_that_the_state_names_has_to_be_there_and_sound(place: Path) -> None:
    file = place / "train/data-00001-of-00002.arrow"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match=r"data-00001-of-00002.arrow is not a valid Arrow stream"):
        rows_of(place)
    file.write_bytes(b"not Arrow")
    with pytest.raises(SourceError, match=r"data-00001-of-00002.arrow is not a valid Arrow stream"):
        list(source_of(place).items())
    file.unlink()
    with pytest.raises(
        SourceError, match=r"train/state.json lists train/data-00001.* does not exist"
    ):
        list(source_of(place).items())
    (place / "train/state.json").write_text("{}")
    with pytest.raises(SourceError, match="does not name its Arrow files"):
        list(source_of(place).items())


def test_a_missing_column_names_those_that_are_there(place: Path) -> None:
    with pytest.raises(UsageError, match=r"has no column 'alt' .*it has image, text, n"):
        rows_of(place, caption="alt")
    with pytest.raises(UsageError, match="'text' holds no image bytes"):
        rows_of(place, image="text")
