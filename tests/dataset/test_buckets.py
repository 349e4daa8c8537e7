import pytest

from wdsprep.dataset.buckets import bucket_of, buckets_encoded, buckets_of_phase, parse_buckets
from wdsprep.errors import UsageError


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
