"""Where samples stand in the image shard that they were made of."""

import pytest

from wdsprep.dataset.image_positions import NOWHERE, ImagePositions
from wdsprep.errors import FormatError


def test_what_did_not_move_needs_no_file() -> None:
    assert ImagePositions.plain(3).is_plain
    assert ImagePositions.from_numbers([0, 1, 2]).is_plain
    assert ImagePositions.from_numbers([]).is_plain
    assert not ImagePositions.from_numbers([0, 2]).is_plain


def test_a_file_holds_what_was_written() -> None:
    found = ImagePositions.from_bytes(ImagePositions.from_numbers([4, 0, 2]).to_bytes())
    assert found.positions.tolist() == [4, 0, 2]
    with pytest.raises(FormatError, match="damaged: 5 bytes"):
        ImagePositions.from_bytes(b"12345")


def test_each_sample_has_a_position_of_its_own_inside_the_shard() -> None:
    assert ImagePositions.from_numbers([4, 0, 2]).is_sound(3, 5)
    assert ImagePositions.from_numbers([]).is_sound(0, 0)
    assert not ImagePositions.from_numbers([4, 0, 2]).is_sound(3, 4)
    assert not ImagePositions.from_numbers([4, 0, 2]).is_sound(2, 5)
    assert not ImagePositions.from_numbers([4, 0, 0]).is_sound(3, 5)


def test_samples_are_found_by_their_positions() -> None:
    found = ImagePositions.from_numbers([4, 0, 2])
    assert found.numbers(5).tolist() == [1, NOWHERE, 2, NOWHERE, 0]
    assert found.numbers(3).tolist() == [1, NOWHERE, 2]
    assert found.others(5).tolist() == [1, 3]


def test_what_goes_from_the_image_shard_moves_what_stays() -> None:
    found = ImagePositions.from_numbers([4, 0, 2])
    assert found.without([1]).positions.tolist() == [4, 2]
    assert found.without([2], lost=[2, 3]).positions.tolist() == [2, 0]
    assert found.without([]).positions.tolist() == [4, 0, 2]
