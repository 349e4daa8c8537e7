"""Where an image is cut, and that its pixels are those of Pillow's own resize."""

import math
import random
from collections.abc import Callable
from functools import cache, partial
from io import BytesIO
from math import inf, log10

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from tests.kit import corpus
from tests.kit.corpus import CASES, DEEP
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.shapes import buckets_encoded, least_side_of
from wdsprep.images import pixel_rule as images
from wdsprep.images.crop import Crop, crop, crops, reduction_factor
from wdsprep.images.nearest_shape import OVERSAMPLING, Fit, Shapes, covering_size, cut_of
from wdsprep.images.options import Limits

R = 64
ANY_SHAPE = Limits(min_side=R, max_area=100_000_000, max_aspect_ratio=0.0)
STORED = [name for name, case in CASES.items() if case.code is None]


@pytest.fixture(autouse=True)
def _nothing_on_stderr(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]):
    """libtiff's errors apart, which Pillow cannot turn off, nobody below writes there."""
    yield
    assert "tiff" in request.node.name or capfd.readouterr().err == ""


def noise(size: tuple[int, int], seed: int = 0) -> Image.Image:
    raw = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(raw)


def smooth(size: tuple[int, int]) -> Image.Image:
    return noise((7, 5)).resize(size, Image.Resampling.BICUBIC)


@cache
def photo(size: tuple[int, int]) -> Image.Image:
    rough = noise(size).filter(ImageFilter.GaussianBlur(2))
    return Image.blend(smooth(size), Image.blend(rough, noise(size, 1), 0.1), 0.3)


KINDS = {"noise": noise, "smooth": smooth, "photo": photo}


def by_pillow(image: Image.Image, resolution: int) -> np.ndarray:
    image = image.convert("RGB")
    width, height = covering_size(*image.size, (resolution, resolution))
    if image.size != (width, height):
        # Pillow may take the columns of a tall image first; between the two, levels are clipped.
        image = image.resize((width, image.height), Image.Resampling.BICUBIC)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - resolution) // 2, (height - resolution) // 2
    square = image.crop((left, top, left + resolution, top + resolution))
    return np.asarray(square).transpose(2, 0, 1)


def psnr(found: Crop, wanted: np.ndarray) -> float:
    error = ((found.pixels.numpy().astype(float) - wanted) ** 2).mean()
    return 10 * log10(255**2 / error) if error else inf


TO_SQUARE = partial(crop, shapes=R)


def code_of(data: bytes, make: Callable[[bytes], object] = TO_SQUARE) -> Code | None:
    try:
        make(data)
    except RejectedError as error:
        return error.code
    return None


def check(data: bytes) -> images.Picture:
    return images.prepare(data, limits=ANY_SHAPE, full=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "size", [(512, 512), (65, 64), (64, 65), (333, 97), (97, 485), (640, 481), (66, 131)]
)
def test_square_is_what_pillow_makes(kind: str, size: tuple[int, int]):
    image = KINDS[kind](size)
    found = crop(corpus.saved(image, "PNG"), R)
    wanted = by_pillow(image, R)
    assert abs(found.pixels.numpy().astype(int) - wanted).max() <= 1
    assert psnr(found, wanted) > 65
    assert (found.pixels.shape, found.pixels.dtype) == ((3, R, R), torch.uint8)
    assert found.pixels.is_contiguous()


@pytest.mark.parametrize("name", STORED)
def test_image_of_any_kind_is_what_pack_would_have_stored(name: str):
    packed = check(CASES[name].data)
    image = Image.open(BytesIO(packed.data))
    found = crop(CASES[name].data, R)
    assert psnr(found, by_pillow(image, R)) > 65
    assert (found.width, found.height) == image.size == CASES[name].size
    assert torch.equal(found.pixels, crop(packed.data, R).pixels)


@pytest.mark.parametrize(
    ("size", "scaled", "box"),
    [
        ((64, 200), (64, 200), (0, 68)),
        ((65, 64), (65, 64), (0, 0)),
        ((320, 64), (320, 64), (128, 0)),
        ((131, 129), (65, 64), (0, 0)),
        ((256, 129), (127, 64), (31, 0)),
        ((256, 386), (64, 97), (0, 16)),
    ],
)
def test_crop_box_is_the_centre(
    size: tuple[int, int], scaled: tuple[int, int], box: tuple[int, int]
):
    found = crop(corpus.png(size=size), R)
    assert (found.width, found.height) == size
    assert (found.fit.scaled_width, found.fit.scaled_height) == scaled
    assert (found.fit.left, found.fit.top) == box


def test_image_of_the_right_size_keeps_every_pixel():
    for size, box in (((64, 64), (0, 0)), ((200, 64), (68, 0)), ((64, 71), (0, 3))):
        image = noise(size)
        wanted = np.asarray(image.crop((*box, box[0] + R, box[1] + R))).transpose(2, 0, 1)
        assert np.array_equal(crop(corpus.saved(image, "PNG"), R).pixels.numpy(), wanted)


def test_nothing_is_enlarged_and_the_area_is_checked_before_decoding():
    assert code_of(corpus.jpeg(size=(63, 500))) is Code.TOO_SMALL
    assert code_of(corpus.png_bomb()) is Code.TOO_LARGE
    with pytest.raises(RejectedError, match="64 x 64"):
        crop(corpus.jpeg(size=(64, 64)), R, max_area=64 * 64 - 1)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.code])
def test_damaged_image_is_rejected_as_pack_rejects_it(name: str):
    case = CASES[name]
    assert code_of(case.data) is code_of(case.data, check) is not None
    assert name not in DEEP or code_of(case.data) is case.code


SEVERAL = [
    Shapes.square(R),
    Shapes.square(2 * R),
    Shapes(((R, R), (48, 80), (80, 48)), max_crop=0.1),
    Shapes(((3 * R, 3 * R), (144, 240), (240, 144))),
]


def test_a_small_image_is_scaled_up_by_a_bicubic_filter() -> None:
    upscaled, small = Shapes(((64, 64),), upscale=1.5), noise((50, 60))
    cut = crop(corpus.saved(small, "PNG"), upscaled)
    assert (cut.width, cut.height, cut.scale) == (50, 60, 64 / 50)
    assert psnr(cut, by_pillow(small, 64)) > 45
    large = crop(corpus.saved(noise((80, 90)), "PNG"), upscaled)
    assert large.scale == 64 / 80
    assert told(lambda: large) == told(lambda: crop(corpus.saved(noise((80, 90)), "PNG"), 64))
    with pytest.raises(RejectedError):
        crop(corpus.saved(small, "PNG"), Shapes(((64, 64),), upscale=1.25))


def told(act: Callable[[], Crop | RejectedError]) -> tuple[object, ...]:
    """All that there is to a cut, or to why there is none."""
    try:
        cut = act()
    except RejectedError as refused:
        cut = refused
    if isinstance(cut, RejectedError):
        return cut.code, cut.detail
    return cut.fit, cut.width, cut.height, cut.pixels.numpy().tobytes()


@pytest.mark.parametrize("name", CASES)
def test_several_cuts_with_one_decoding_are_those_of_each_alone(name: str):
    data = CASES[name].data
    for shapes, cut in zip(SEVERAL, crops(data, SEVERAL), strict=True):
        assert told(lambda cut=cut: cut) == told(partial(crop, data, shapes))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damage_is_found_where_a_full_check_finds_it(kind: str):
    """A JPEG is checked in draft, which may see less, never more: what decodes there with its last
    bytes missing can be cut off for a full decode."""
    chance, more = random.Random(5), {"progressive" if kind == "JPEG" else "lossless": True}
    images = [photo((200, 150)).convert(mode) for mode in ("RGB", "L")]
    files = [corpus.saved(image, kind, **options) for image in images for options in ({}, more)]
    found = 0
    for turn in range(80):
        data = corpus.damaged(files[turn % len(files)], turn, chance)
        assert code_of(data) is code_of(data, check), turn
        found += code_of(data, check) is not None
    assert found > 20


# --- at a reduced scale


def fast(data: bytes, side: int) -> Crop:
    return crop(data, Shapes.square(side, OVERSAMPLING))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("size", [(1024, 1024), (1023, 769), (517, 2001)])
def test_large_jpeg_is_nearly_the_same_at_a_reduced_scale(
    mode: str, progressive: bool, size: tuple[int, int]
):
    data = corpus.saved(photo(size).convert(mode), "JPEG", quality=90, progressive=progressive)
    whole, found = crop(data, 128), fast(data, 128)
    assert not torch.equal(found.pixels, whole.pixels)
    assert psnr(found, whole.pixels.numpy()) > 42
    assert (found.width, found.height, found.fit) == (*size, whole.fit)


@pytest.mark.parametrize(
    ("size", "side", "reduction"),
    [((974, 974), 256, 2), ((972, 972), 256, 1), ((3000, 2000), 512, 2), ((1947, 1946), 256, 4),
     ((8000, 512), 32, 8), ((63, 8000), 32, 1), ((99_999, 99_999), 32, 8)],
)  # fmt: skip
def test_what_is_decoded_leaves_about_twice_the_pixels(
    size: tuple[int, int], side: int, reduction: int
):
    width, height = size
    picture = images.Picture(
        data=b"", extension="jpg", width=width, height=height, original_width=width,
        original_height=height, changes=(),
    )  # fmt: skip
    shapes = Shapes.square(side, OVERSAMPLING)
    if min(size) < side * 2:
        assert reduction_factor(picture, shapes.fit(*size), shapes) == 1
    assert reduction_factor(picture, shapes.fit(*size), shapes) == reduction
    assert reduction_factor(picture, shapes.fit(*size), Shapes.square(side)) == 1
    png = picture._replace(extension="png")
    assert reduction_factor(png, shapes.fit(*size), shapes) == 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_what_is_small_or_no_jpeg_stays_to_the_bit(kind: str):
    data = corpus.saved(photo((480, 480)).convert("RGB"), kind)
    assert torch.equal(fast(data, 128).pixels, crop(data, 128).pixels)
    if kind != "JPEG":
        assert torch.equal(fast(data, 32).pixels, crop(data, 32).pixels)


def test_scale_is_that_of_the_true_size():
    """Of 1,025 columns an eighth is 128.1, for which libjpeg gives 129. A ramp shows each shift."""
    ramp = np.linspace(0, 255, 1025).round().astype(np.uint8)
    for image in (np.tile(ramp, (1025, 1)), np.tile(ramp[:, None], (1, 1025))):
        data = corpus.saved(Image.fromarray(image), "JPEG", quality=100)
        found, whole = fast(data, 64).pixels.float(), crop(data, 64).pixels.float()
        assert (found - whole).abs()[:, 1:-1, 1:-1].max() <= 1
        assert abs((found - whole).mean()) < 0.3


@pytest.mark.parametrize("turn", range(1, 9))
def test_turned_image_is_upright_at_a_reduced_scale(turn: int):
    exif = Image.Exif()
    exif[0x0112] = turn
    data = corpus.saved(photo((640, 480)), "JPEG", quality=90, exif=exif)
    whole, found = crop(data, 64), fast(data, 64)
    assert psnr(found, whole.pixels.numpy()) > 40
    assert (found.width, found.height) == ((640, 480) if turn < 5 else (480, 640))


def test_photo_of_a_camera_is_taken_where_it_lies(monkeypatch: pytest.MonkeyPatch):
    """Pillow's `set_block_size`, which is no public name: without it images over 16 MB come in
    pieces, and are copied twice."""
    monkeypatch.setattr(Image.Image, "tobytes", lambda *_: pytest.fail("it is copied"))
    before = Image.core.get_block_size()
    data = corpus.saved(smooth((2600, 2000)), "JPEG")
    assert crop(data, 256).pixels.shape == (3, 256, 256)
    assert Image.core.get_block_size() == before


SIZES = np.random.default_rng(1).integers(128, 4_000, (2_000, 2)).tolist()
LIST = [(64, 64), (48, 80), (80, 48), (32, 128), (128, 32), (56, 72), (72, 56)]


def test_the_shape_is_that_of_the_nearest_ratio() -> None:
    """Half way between two it is the one nearer to the square."""
    shapes = Shapes(tuple(LIST))
    for width, height in SIZES:

        def apart(size: tuple[int, int], ratio: float = width / height) -> float:
            return abs(math.log(size[0] / size[1] / ratio))

        assert apart(shapes.nearest(width, height)) <= min(map(apart, LIST)) + 1e-12
    shapes = Shapes(((64, 64), (32, 128), (128, 32)))
    assert shapes.nearest(200, 100) == shapes.nearest(100, 200) == (64, 64)
    assert shapes.nearest(201, 100) == (128, 32)
    assert shapes.nearest(100, 201) == (32, 128)


def test_the_image_just_covers_its_shape_and_the_middle_is_taken() -> None:
    shapes = Shapes(tuple(LIST))
    assert shapes.fit(300, 200) == Fit(80, 48, 80, 53)
    assert (shapes.fit(300, 200).left, shapes.fit(300, 200).top) == (0, 2)
    for width, height in SIZES:
        fit = shapes.fit(width, height)
        assert fit.scaled_width == fit.width or fit.scaled_height == fit.height
        assert fit.scaled_width >= fit.width
        assert fit.scaled_height >= fit.height
        assert abs(fit.scaled_width / width * height - fit.scaled_height) <= 0.5 * max(
            1, height / width, width / height
        )
        assert 0 <= fit.left <= fit.scaled_width - fit.width - fit.left <= fit.left + 1
        assert 0 <= fit.top <= fit.scaled_height - fit.height - fit.top <= fit.top + 1


def test_what_is_scaled_up_is_so_by_no_more_than_was_asked_for() -> None:
    shapes = Shapes(tuple(LIST), upscale=1.1)
    assert shapes.fit(64, 60) == Fit(64, 64, 68, 64)
    assert shapes.fit(59, 64) == Fit(64, 64, 64, 69)
    with pytest.raises(RejectedError, match=r"^too_small: "):
        shapes.fit(58, 64)  # 64 / 58 is just over 1.1
    settings = {"resolution": 110, "upscale": 1.1}
    assert cut_of(settings).fit(100, 300) == Fit(110, 110, 110, 330)  # 1.1 times to the pixel
    assert least_side_of(settings) == cut_of(settings).least_side == 100
    assert buckets_encoded(settings, (64, 96, 110)) == (96, 110)
    assert buckets_encoded({"resolution": 110}, (64, 96, 110)) == (110,)


def test_what_would_lose_too_much_is_rejected() -> None:
    shapes = Shapes(tuple(LIST), max_crop=0.5)
    assert shapes.fit(128, 256) == Fit(48, 80, 48, 96)  # loses a sixth
    assert shapes.fit(1_000, 125) == Fit(128, 32, 256, 32)  # loses half
    said = r"^aspect_ratio: 3000 x 100, 87% of it outside 128x32$"
    with pytest.raises(RejectedError, match=said):
        shapes.fit(3_000, 100)
