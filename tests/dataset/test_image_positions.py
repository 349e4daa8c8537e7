"""Where samples stand in the image shard that they were made of."""

from wdsprep.dataset.image_positions import NOWHERE, ImagePositions


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
