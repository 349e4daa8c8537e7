"""The shapes of a dataset, as its settings have them."""

import pytest

from wdsprep.dataset.npy_arrays import Field, layout
from wdsprep.dataset.shapes import batch_that_fits, fields_in_shape, shape_name, shapes_of
from wdsprep.errors import FormatError

FIELDS = (
    Field(name="latent.npy", dtype="<f2", shape=(4, 32, 32)),
    Field(name="emb.npy", dtype="<f2", shape=(77, 16)),
)
SETTINGS = {
    "resolution": 256,
    "layout": layout(FIELDS),
    "shapes": [[192, 320], [256, 256], [320, 192]],
}


def test_a_list_has_widths_before_heights_and_latents_have_heights_first() -> None:
    assert [shape_name(size) for size in shapes_of(SETTINGS)] == ["192x320", "256x256", "320x192"]
    tall, square, wide = (fields_in_shape(SETTINGS, size) for size in shapes_of(SETTINGS))
    assert square == FIELDS
    assert tall[0].shape == (4, 40, 24)
    assert wide[0].shape == (4, 24, 40)
    assert tall[1:] == wide[1:] == FIELDS[1:]


def test_a_dataset_of_squares_has_no_list() -> None:
    assert shapes_of({"resolution": 256, "layout": layout(FIELDS)}) == ()


@pytest.mark.parametrize(
    ("samples", "batch"),
    [(0, 1), (3, 1), (20, 4), (38, 4), (60, 8), (319, 32), (320, 64), (10**6, 64)],
)
def test_the_batch_of_an_example_is_one_that_people_take(samples: int, batch: int) -> None:
    assert batch_that_fits({}, {}, samples) == batch
    counts = {"192x320": 5, "256x256": 2}
    assert batch_that_fits(SETTINGS, counts, samples) == min(batch, 4)


@pytest.mark.parametrize("size", [(190, 320), (320, 190), (0, 256)])
def test_a_shape_whose_latents_have_no_whole_sides_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(FormatError, match="no whole number of cells a side"):
        fields_in_shape(SETTINGS, size)
