"""The pixel rule on real files of every kind; `corpus` says what must become of each."""

import random
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.kit import corpus
from tests.kit.corpus import CASES, DEEP, LIMITS, Case
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.images import colour, headers
from wdsprep.images.options import Limits
from wdsprep.images.pixel_rule import Picture, prepare

STORED = {name: case for name, case in CASES.items() if case.code is None}
REJECTED = {name: case for name, case in CASES.items() if case.code is not None}


@pytest.fixture(autouse=True)
def _nothing_on_stderr(capfd: pytest.CaptureFixture[str]):
    """Nothing of what goes on below may reach the user's progress line."""
    yield
    assert capfd.readouterr().err == ""


def code_of(data: bytes, *, full: bool = True, limits: Limits = LIMITS) -> Code:
    with pytest.raises(RejectedError) as caught:
        prepare(data, limits=limits, full=full)
    return caught.value.code


def opened(picture: Picture) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a kept file's metadata
        image = Image.open(BytesIO(picture.data))
        image.load()
    return image


def means(image: Image.Image) -> list[tuple[float, ...]]:
    """The mean of the middle of each quarter, and of the black square."""
    image = image.convert("RGB")
    width, height = image.size
    boxes = [(x / 2 + 0.16, y / 2 + 0.16, x / 2 + 0.42, y / 2 + 0.42) for x, y in corpus.PIECES]
    found = []
    for left, top, right, bottom in [*boxes, (0.0, 0.0, 0.1, 0.1)]:
        box = round(left * width), round(top * height), round(right * width), round(bottom * height)
        raw = image.crop(box).tobytes()
        found.append(tuple(sum(raw[i::3]) * 3 / len(raw) for i in range(3)))
    return found


def expected(case: Case) -> list[tuple[float, ...]]:
    image = corpus.picture()
    found = means(image.convert("L") if case.grey else image)
    if case.clear:
        found[list(corpus.PIECES).index(corpus.CLEAR)] = (255.0, 255.0, 255.0)
    return found


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("name", STORED)
def test_stored_picture_is_upright_with_the_right_colours(name: str, full: bool):
    case = CASES[name]
    picture = prepare(case.data, limits=LIMITS, full=full)
    assert (picture.extension, picture.changes) == (case.extension, case.changes)
    assert (picture.width, picture.height) == case.size
    assert (picture.original_width, picture.original_height) == case.size
    image = opened(picture)
    assert image.size == case.size
    for found, wanted in zip(means(image), expected(case), strict=True):
        assert found == pytest.approx(wanted, abs=case.tolerance)
    if not case.changes:
        assert picture.data is case.data


@pytest.mark.parametrize("name", [name for name, case in STORED.items() if case.changes])
def test_converted_picture_is_plain_and_would_be_kept_as_it_is(name: str):
    picture = prepare(CASES[name].data, limits=LIMITS, full=True)
    image = opened(picture)
    assert image.mode == ("L" if CASES[name].grey else "RGB")
    assert not {"exif", "icc_profile", "transparency", "comment", "xmp"} & set(image.info)
    again = prepare(picture.data, limits=LIMITS, full=True)
    assert (again.data, again.changes) == (picture.data, ())
    assert prepare(CASES[name].data, limits=LIMITS, full=False) == picture


@pytest.mark.parametrize("name", REJECTED)
def test_bad_file_is_rejected_with_its_code(name: str):
    case = CASES[name]
    assert code_of(case.data) is case.code
    if name in DEEP:
        assert prepare(case.data, limits=LIMITS, full=False).data is case.data
    else:
        assert code_of(case.data, full=False) is case.code


def test_limits_are_checked_in_order_and_on_the_upright_size():
    tall = Limits(min_side=64, max_area=96 * 64, max_aspect_ratio=1.5)
    assert prepare(corpus.turned(6), limits=tall, full=True).width == 96
    assert code_of(corpus.jpeg(size=(97, 64)), limits=tall) is Code.TOO_LARGE
    assert code_of(corpus.jpeg(size=(90, 63)), limits=tall) is Code.TOO_SMALL
    tighter = Limits(min_side=1, max_area=96 * 64, max_aspect_ratio=1.49)
    assert code_of(corpus.jpeg(), limits=tighter) is Code.ASPECT_RATIO
    free = Limits(min_side=1, max_area=10**6, max_aspect_ratio=0)
    assert prepare(corpus.jpeg(size=(500, 4)), limits=free, full=True).height == 4


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_an_image_of_which_too_much_is_transparent_is_rejected(kind: str) -> None:
    """Half of a half-transparent pixel counts: 3 of 4 columns are clear, the last by a half."""
    image = Image.new("RGBA", (80, 80), (200, 30, 30, 255))
    image.paste((0, 0, 0, 0), (0, 0, 60, 80))
    image.paste((0, 0, 0, 127), (60, 0, 80, 80))
    out = BytesIO()
    image.save(out, kind, **({"lossless": True} if kind == "WEBP" else {}))
    for most, code in ((0.87, Code.TRANSPARENT), (0.88, None), (1.0, None)):
        limits = replace(LIMITS, max_alpha=most)
        for full in (False, True):
            if code:
                assert code_of(out.getvalue(), limits=limits, full=full) is code
            else:
                assert "alpha" in prepare(out.getvalue(), limits=limits, full=full).changes


BOMBS = ["png-bomb", "gif-bomb", "webp-bomb", "tiff-bomb", "tiff-tile-bomb", "png-icc-bomb"]


def test_bombs_are_refused_in_bounded_memory(tmp_path: Path):
    files = [tmp_path / name for name in BOMBS]
    for file in files:
        file.write_bytes(CASES[file.name].data)
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from wdsprep.images.options import Limits; from wdsprep.images.pixel_rule import prepare\n"
        "from wdsprep.dataset.rejects import RejectedError\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "limits = Limits(min_side=32, max_area=50_000_000, max_aspect_ratio=10)\n"
        "for name in sys.argv[1:]:\n"
        "    data, before = Path(name).read_bytes(), peak()\n"
        "    try: prepare(data, limits=limits, full=True)\n"
        "    except RejectedError as error: print(error.code, peak() - before)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *files], capture_output=True, text=True
    )
    assert ran.stderr == ""
    for name, line in zip(BOMBS, ran.stdout.splitlines(), strict=True):
        code, grown_kib = line.split()
        assert code == str(CASES[name].code)
        assert int(grown_kib) < 16 * 1024


def test_recode_writes_jpeg_of_that_quality_and_shrinks():
    limits = replace(LIMITS, quality=90, max_side=48)
    for name in ("jpeg", "png-alpha", "webp", "jpeg-orientation-6", "png-16-grey"):
        picture = prepare(CASES[name].data, limits=limits, full=True)
        assert (picture.extension, picture.width, picture.height) == ("jpg", 48, 32)
        assert (picture.original_width, picture.original_height) == corpus.SIZE
        assert picture.changes[-2:] == ("resize", "recode")
        for found, wanted in zip(means(opened(picture)), expected(CASES[name]), strict=True):
            assert found[:1] == pytest.approx(wanted[:1], abs=25)


def test_shrinking_stops_at_the_smallest_side_that_is_allowed():
    data = corpus.jpeg(size=(400, 100))
    picture = prepare(data, limits=replace(LIMITS, quality=95, max_side=40), full=True)
    assert (picture.width, picture.height) == (128, 32)
    as_it_is = prepare(data, limits=replace(LIMITS, quality=95), full=True)
    assert (as_it_is.width, as_it_is.changes) == (400, ("recode",))


def test_profile_is_judged_by_what_it_does():
    srgb, p3 = (corpus.rgb_profile(p, corpus.srgb_curve) for p in (corpus.SRGB, corpus.P3))
    assert not colour.needs_transform(srgb, "RGB")
    assert colour.needs_transform(p3, "RGB")
    assert colour.needs_transform(p3.replace(b"made for a test", b"sRGB IEC61966-2"), "RGB")
    assert not colour.needs_transform(p3, "L")  # its curve is sRGB's, so grey stays
    adobe = corpus.rgb_profile(corpus.ADOBE, corpus.adobe_curve)
    assert colour.needs_transform(adobe, "L")
    assert not colour.needs_transform(p3[:200], "RGB")


def test_full_check_finds_what_a_full_load_finds():
    """The draft of a JPEG decodes every byte that a full load does."""
    chance, missed, found = random.Random(3), [], 0
    noise = Image.effect_noise((320, 240), 60)
    noisy = Image.merge("RGB", (noise, noise.transpose(Image.Transpose.ROTATE_180), noise))
    kinds = [(progressive, sampling) for progressive in (False, True) for sampling in (0, 2)]
    files = [
        corpus.saved(noisy, "JPEG", quality=70, progressive=progressive, subsampling=sampling)
        for progressive, sampling in kinds
    ]
    for turn in range(120):
        data = corpus.damaged(files[turn % 4], turn, chance)
        with suppress(OSError, SyntaxError, ValueError):
            Image.open(BytesIO(data)).load()
            continue
        found += 1
        with suppress(RejectedError):
            prepare(data, limits=LIMITS, full=True)
            missed.append(turn)
    assert (found > 40, missed) == (True, [])


SMALL = sorted(name for name, case in CASES.items() if len(case.data) < 60_000)
TIFFS = [name for name in SMALL if name.startswith("tiff")]
PLAIN = [name for name in SMALL if name not in TIFFS]
FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def judge(data: bytes, full: bool) -> None:
    """A Picture whose size is the file's, or a RejectedError; nothing else, and no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            picture = prepare(data, limits=LIMITS, full=full)
        except RejectedError:
            return
    if picture.changes or full:
        assert opened(picture).size == (picture.width, picture.height)


@FUZZ
@given(data=st.binary(max_size=300), full=st.booleans())
def test_random_bytes_are_rejected_or_stored(data: bytes, full: bool):
    judge(data, full)


@settings(FUZZ, max_examples=500)
@given(name=st.sampled_from(PLAIN), seed=st.integers(0, 2**32), full=st.booleans())
def test_damaged_files_are_rejected_or_stored(name: str, seed: int, full: bool):
    judge(damaged(name, seed), full)


@FUZZ
@given(name=st.sampled_from(TIFFS), seed=st.integers(0, 2**32))
def test_damaged_tiffs_are_rejected_or_stored(name: str, seed: int):
    judge(damaged(name, seed), True)


def damaged(name: str, seed: int) -> bytes:
    rng, data = random.Random(seed), bytearray(CASES[name].data or b"\0")
    for _ in range(rng.choice((0, 1, 1, 2, 10))):
        # Half of the damage goes to the header, where most of what is read stands.
        end = len(data) if rng.random() < 0.5 else min(len(data), 200)
        data[rng.randrange(end)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


def test_libtiff_prints_for_others_as_it_did(capfd: pytest.CaptureFixture[str]):
    data = corpus.damaged_strip()
    assert code_of(data) is Code.CORRUPT
    assert capfd.readouterr().err == ""
    with pytest.raises(OSError, match="decoder error"):
        Image.open(BytesIO(data)).load()
    assert "ZIPDecode" in capfd.readouterr().err


def test_threads_leave_warnings_and_pillows_limit_as_they_were():
    before = list(warnings.filters), Image.MAX_IMAGE_PIXELS
    data = [CASES[name].data for name in ("png-alpha", "jpeg", "gif-animated", "tiff")] * 10
    with ThreadPoolExecutor(40) as threads:
        assert all(threads.map(partial(prepare, limits=LIMITS, full=True), data))
    assert (list(warnings.filters), Image.MAX_IMAGE_PIXELS) == before


def test_a_jpeg_that_is_cut_before_its_scan_is_truncated_wherever_that_is():
    data = corpus.jpeg(size=(512, 384))
    scan = data.index(b"\xff\xda")
    codes = {headers.read_jpeg(data[:end]).damage for end in range(scan - 60, scan)}
    assert codes == {(Code.TRUNCATED, "ends before the first scan")}
    for end in range(3, data.index(b"\xff\xc0")):
        assert code_of(data[:end]) is Code.TRUNCATED


def test_a_header_of_many_comments_is_refused_at_once() -> None:
    """A pattern that backtracks would take longer than anyone waits."""
    with pytest.raises(RejectedError):
        prepare(b"P5 " + b"# " * 5_000 + b"x", limits=LIMITS, full=True)


def test_a_transparent_level_of_sixteen_bits_is_compared_by_all_of_them() -> None:
    levels = [0x1234, 0x1235, 0x1334, 0x0034]
    rows = [b"".join(level.to_bytes(2, "big") for level in levels)] * 2
    data = corpus.raw_png(
        rows, size=(4, 2), depth=16, kind=0, extra=corpus.chunk(b"tRNS", b"\x12\x34")
    )
    anything = Limits(min_side=1, max_area=100, max_aspect_ratio=0)
    picture = prepare(data, limits=anything, full=True)
    assert {"alpha", "depth"} <= set(picture.changes)
    with Image.open(BytesIO(picture.data)) as image:
        assert list(image.convert("L").tobytes()) == [255, 0x12, 0x13, 0x00] * 2
