"""Buckets and shapes, and what receipts count of samples."""

from collections import Counter
from typing import Any

import pytest

from wdsprep.dataset.coarse_histograms import count_sample
from wdsprep.dataset.npy_arrays import Field, fields_of, layout, text_fields
from wdsprep.dataset.sample_table import table_columns
from wdsprep.dataset.shapes import (
    batch_that_fits,
    bucket_of,
    buckets_encoded,
    buckets_of_phase,
    fields_in_shape,
    parse_buckets,
    shape_name,
    shapes_of,
)
from wdsprep.errors import FormatError, UsageError

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


def test_images_in_roles_have_arrays_of_their_own_sizes_and_none_is_of_text() -> None:
    source = Field(name="source.npy", dtype="<f2", shape=(4, 32, 32), is_of_role=True)
    mask = Field(name="mask.npy", dtype="|u1", shape=(32, 32), is_of_role=True)
    record = layout((FIELDS[0], source, mask, FIELDS[1]))
    assert fields_of(record) == (FIELDS[0], source, mask, FIELDS[1])
    assert text_fields(fields_of(record)) == FIELDS[1:]
    settings = {**SETTINGS, "layout": record, "roles": ["target", "source", "mask"]}
    sizes = {"source": (320, 192), "source_1": (64, 64), "mask": (192, 320)}
    shapes = {f.name: f.shape for f in fields_in_shape(settings, (192, 320), sizes)}
    assert shapes == {
        "latent.npy": (4, 40, 24),
        "source.npy": (4, 24, 40),
        "source_1.npy": (4, 8, 8),
        "mask.npy": (40, 24),
        "emb.npy": (77, 16),
    }
    assert fields_in_shape(settings, None, {}) == FIELDS
    columns = [*table_columns("latents", settings)]
    assert columns[-4:] == ["source_width", "source_height", "mask_width", "mask_height"]


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


@pytest.mark.parametrize(
    ("width", "height", "bucket"),
    [(256, 256, 256), (4000, 256, 256), (511, 900, 256), (512, 512, 512), (9999, 513, 512)],
)
def test_a_bucket_holds_shorter_sides_from_its_name_up_to_the_next(
    width: int, height: int, bucket: int
) -> None:
    assert bucket_of(width, height, (256, 512)) == bucket


def test_a_phase_uses_every_bucket_that_is_large_enough() -> None:
    assert buckets_of_phase(256, (256, 512)) == (256, 512)
    assert buckets_of_phase(512, (256, 512)) == (512,)
    assert buckets_of_phase(300, (256, 512, 1024)) == (512, 1024)


def test_squares_are_made_of_every_bucket_that_may_hold_a_large_enough_image() -> None:
    def encoded(resolution: int) -> tuple[int, ...]:
        return buckets_encoded({"resolution": resolution}, (256, 512))

    assert encoded(256) == (256, 512)
    assert encoded(384) == (256, 512)
    assert encoded(512) == encoded(768) == encoded(1024) == (512,)
    assert encoded(64) == (256, 512)


@pytest.mark.parametrize("text", ["", "512,256", "256,256", "a", "0,256", "256;512"])
def test_buckets_must_rise(text: str) -> None:
    with pytest.raises(UsageError, match="give rising sizes"):
        parse_buckets(text)


def counted(dataset: str, facts: dict[str, Any], shape: str = "") -> dict[str, int]:
    counts: Counter[str] = Counter()
    count_sample(counts, dataset, facts, shape)
    return dict(counts)


def test_an_image_counts_by_its_caption_and_its_shorter_side() -> None:
    facts = {"caption": "a cat", "width": 300, "height": 200, "source": "cat.jpg"}
    assert counted("images", facts) == {"caption<6": 1, "side<256": 1}


def test_latents_count_what_was_cut_or_empty_and_their_shape() -> None:
    cut = {"caption": "a cat", "cut": True}
    assert counted("latents", cut) == {"cut": 1, "empty_caption": 0}
    assert counted("latents", {}, "64x32") == {"cut": 0, "empty_caption": 1, "64x32": 1}
