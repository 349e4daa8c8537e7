"""Latents of several shapes: each image in the one that its size says, those of one together."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import wdsprep
from tests.kit.batches import assert_same
from tests.kit.encodes import TOY, encode_here, latents_of, members, rejected, run, samples_in
from tests.kit.packs import jpeg, manifest_of, pack, tree, write_files
from tests.kit.paths import format_recipe
from wdsprep.cli import main
from wdsprep.dataset.npy_arrays import OF_SIZES, Field
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.shapes import Size
from wdsprep.encoding.image_shards import find_image_shards
from wdsprep.encoding.latent_shard import facts_of, members_of
from wdsprep.encoding.models.base import Tokens
from wdsprep.encoding.sample_chain import EncodedSample
from wdsprep.encoding.shape_lists import SDXL_LACKS, check_shapes_option, sizes_of
from wdsprep.errors import FingerprintError, SourceError, UsageError
from wdsprep.images.crop import crop
from wdsprep.images.nearest_shape import Shapes

NEAREST = "nearest:8,3"
MAX_CROP = 0.3
COUNT = 220


pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of random sizes, those at the ends of what fits among them, in buckets of 24, 64 and 128."""
    root, chance = tmp_path_factory.mktemp("images"), random.Random(27)
    sizes = [(round(2 ** chance.uniform(4.8, 8)), round(2 ** chance.uniform(4.8, 8)))
             for _ in range(COUNT - 6)]  # fmt: skip
    sizes += [(900, 30), (30, 900), (64, 64), (40, 96), (39, 96), (64, 63)]
    files: dict[str, bytes | str] = {}
    for number, size in enumerate(sizes):
        files[f"{number:04d}.png"] = jpeg(number, size, "PNG")
        files[f"{number:04d}.txt"] = f"photo {number}" * (number % 7 != 0)
    options = ("--buckets", "24,64,128", "--samples-per-shard", "50")
    return pack(write_files(root / "in", files), root / "out", *options)


@pytest.fixture(scope="module")
def latents(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shaped") / "out"
    encode_here(images, out, shapes=NEAREST, max_crop=MAX_CROP)
    return out


def image_sizes(images: Path) -> dict[str, Size]:
    facts = {key: json.loads(fields["json"]) for key, fields in samples_in(images).items()}
    return {key: (one["width"], one["height"]) for key, one in facts.items()}


def named(sizes: Any) -> list[str]:
    return ["x".join(map(str, size)) for size in sizes]


# --- which shape (`tests/images` has the rule of one image)


def placed(size: Size, shapes: Shapes) -> dict[str, Any]:
    """What the json of an image of this size says of its crop, or why there is none."""
    try:
        fit = shapes.fit(*size)
    except RejectedError as refused:
        return {"rejected": refused.code.value}
    crop = [fit.left, fit.top, fit.left + fit.width, fit.top + fit.height]
    return {"crop": crop, "scaled_width": fit.scaled_width, "scaled_height": fit.scaled_height}


def test_each_image_is_cut_to_its_shape(images: Path, latents: Path) -> None:
    shapes = Shapes(tuple(sizes_of(NEAREST, 64)), MAX_CROP)
    wanted = {key: placed(size, shapes) for key, size in image_sizes(images).items()}
    assert len(wanted) == COUNT
    found, lost = latents_of(latents), rejected(latents)
    assert {*found, *lost} == {*wanted}
    for key, sample in found.items():
        facts = {name: sample["json"][name] for name in ("crop", "scaled_width", "scaled_height")}
        assert facts == wanted[key], key
        left, top, right, bottom = facts["crop"]
        assert sample["latent.npy"].shape == (4, (bottom - top) // 8, (right - left) // 8)
    assert lost == {key: line["rejected"] for key, line in wanted.items() if "rejected" in line}
    assert {*lost.values()} == {"too_small", "aspect_ratio"}
    assert len(found) > COUNT / 3


def test_what_a_denoiser_is_told_of_sizes_is_that_of_the_shape() -> None:
    """Heights before widths, of the image as it came, of the crop's corner, and of the shape."""
    fields = [Field(name=name, dtype="<i4", shape=(6 if name == "time_ids.npy" else 2,))
              for name in OF_SIZES]  # fmt: skip
    shapes = Shapes(tuple(sizes_of(NEAREST, 64)))
    for size in ((200, 90), (90, 200), (100, 100)):
        cut = crop(jpeg(1, size), shapes)
        sample = Sample(
            source="a", image=b"", facts={"original_width": 999, "original_height": 777}
        )
        encoded = EncodedSample(key="1", sample=sample, crop=cut, tokens=Tokens(""), arrays={})
        made = members_of(fields, facts_of(encoded, is_packed=True), encoded)
        arrays = {name: torch.frombuffer(bytearray(b"".join(data)[128:]), dtype=torch.int32)
                  for name, data in made if name.endswith("npy")}  # fmt: skip
        left, top, right, bottom = placed(size, shapes)["crop"]
        original, corner, target = [777, 999], [top, left], [bottom - top, right - left]
        assert {name: array.tolist() for name, array in arrays.items()} == {
            "time_ids.npy": original + corner + target, "original_size.npy": original,
            "target_size.npy": target, "crop_coords.npy": corner,
        }  # fmt: skip


# --- how they lie


def test_samples_of_a_shape_stand_together_in_the_order_of_the_list(
    images: Path, latents: Path
) -> None:
    manifest, samples = manifest_of(latents), latents_of(latents)
    names = named(manifest.settings["shapes"])
    ratios = [width / height for width, height in manifest.settings["shapes"]]
    assert ratios == sorted(ratios)
    assert names == named(sizes_of(NEAREST, 64))
    for receipt in manifest.receipts:
        if not receipt.shards:
            continue
        keys = [*members(latents / receipt.shards[0].name)]
        expected = [name for name in names for _ in range(receipt.counts.get(name, 0))]
        boxes = [samples[key]["json"]["crop"] for key in keys]
        assert named((r - le, b - t) for le, t, r, b in boxes) == expected
        inside = [key for key in members(images / receipt.shards[0].name) if key in samples]
        assert sorted(keys) == inside
        for (one, key), (other, after) in pairwise(zip(expected, keys, strict=True)):
            assert one != other or key < after
    assert sum(manifest.counts[name] for name in names if name in manifest.counts) == len(samples)
    assert "crop" in manifest.settings
    assert (manifest.settings["max_crop"], manifest.settings["resolution"]) == (MAX_CROP, 64)
    assert manifest.settings["layout"][0]["shape"] == [4, 8, 8]


def test_images_come_from_each_bucket_that_may_hold_one_large_enough(
    images: Path, tmp_path: Path
) -> None:
    encode_here(images, tmp_path / "out", shapes=[(64, 64), (72, 64), (64, 72)])
    assert {shard.bucket for shard in manifest_of(tmp_path / "out").shards} == {64, 128}
    encode_here(images, tmp_path / "low", shapes=[(64, 64), (72, 56), (56, 72)])
    assert {receipt.unit[:2] for receipt in manifest_of(tmp_path / "low").receipts} == {
        "24", "64", "12",
    }  # fmt: skip


def test_the_page_of_the_format_finds_each_shape_and_each_key(latents: Path) -> None:
    recipe: dict[str, Any] = {}
    exec(format_recipe("find_key"), recipe)
    samples = latents_of(latents)
    receipt = max(manifest_of(latents).receipts, key=lambda one: one.inputs)
    ranges = recipe["shape_ranges"](latents, receipt.unit)
    for number, key in enumerate(members(latents / f"{receipt.unit}.tar")):
        left, top, right, bottom = samples[key]["json"]["crop"]
        shape = f"{right - left}x{bottom - top}"
        assert number in ranges[shape]
        assert recipe["find_key"](latents, receipt.unit, key) == (shape, number)
    assert recipe["find_key"](latents, receipt.unit, "000000999999") is None


# --- what cannot be


def refusal(given: Any, resolution: int = 64) -> str:
    with pytest.raises(UsageError) as refused:
        sizes_of(check_shapes_option(given), resolution)
    (line,) = str(refused.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("# none\n\n", "lacks 64x64, the square"),
        ("64x64\n64 by 80", "'64 by 80' is not a width and a height, as 832x1216 is"),
        ("64x64\n0x80", "'0x80' is not a width and a height"),
        ("64x80\n80x64", "lacks 64x64, the square of --resolution 64: add it"),
        ("64x64\n72x48\n48x32\n", "48x32: give shapes of at most 16 to 1, with 0.5 to 1.3 of"),
        ("64x64 # a\n72X48\n60x40", "has one ratio twice, 72x48 and 60x40: leave one out"),
        ("64x64\n96x64", "has 96x64: give shapes of"),
        ("64x64\n272x16", "has 272x16: give shapes of at most 16 to 1"),
        ("64x64\n64x64", "has one ratio twice, 64x64 and 64x64: leave one out"),
        ("64x64\n" + "".join(f"{64 + n}x64\n" for n in range(600)), "has 601 shapes: give 512"),
    ],
)
def test_a_list_that_no_trainer_can_use_is_refused(tmp_path: Path, lines: str, words: str) -> None:
    (tmp_path / "list").write_text(lines)
    assert words in refusal(str(tmp_path / "list")), words


def test_lists_that_are_named_are_those_that_they_say() -> None:
    sdxl = sizes_of("sdxl", 1024)
    assert len(sdxl) == 40
    assert (sdxl[0], sdxl[-1], SDXL_LACKS in sdxl) == ((512, 2048), (2048, 512), False)
    assert all(side % 64 == 0 for size in sdxl for side in size)
    assert all(0.9 < width * height / 1024**2 <= 1 for width, height in sdxl)
    nearest = sizes_of("nearest:64,4", 1024)
    assert {*nearest} < {*sdxl}
    for width, height in sizes_of("nearest:16,2.5", 256):
        short, long = sorted((width, height))
        assert long * short <= 256**2 < long * (short + 16)
        assert long <= 2.5 * short
    assert named(sizes_of("nearest:32,1", 64)) == ["64x64"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("sdxl", "sdxl lacks 64x64, the square of --resolution 64: add it, or give"),
        ("nearest:8", "write nearest:STEP,MAX, such as nearest:64,4"),
        ("nearest:8,x", "write nearest:STEP,MAX"),
        ("nearest:0,2", "write nearest:STEP,MAX"),
        ("nearest:48,2", "the square of --resolution 64: add it, or give nearest:STEP,MAX with a"),
        ("nearest:8,0.5", "write nearest:STEP,MAX"),
        ("nearest:8,999", "write nearest:STEP,MAX"),
        ("sdlx", "cannot be read (No such file or directory): give sdxl, nearest:STEP,MAX, or a"),
        ([(64, 64), (1, 2, 3)], "(1, 2, 3) is not a width and a height"),
        ([(64, 64), (64.0, 80)], "(64.0, 80) is not a width and a height"),
        (7, "--shapes 7: give sdxl"),
    ],
)
def test_what_names_no_list_is_refused(given: Any, words: str) -> None:
    assert words in refusal(given), words


# --- on the way to a trainer


def on_the_way(images: Path, **options: Any) -> Any:
    how = {"shapes": NEAREST, "max_crop": MAX_CROP} | options.pop("how", {})
    how = {"resolution": 64} | how
    encode = wdsprep.Encode(model="tiny", device="cpu", **how)
    return wdsprep.load(images, encode=encode, **({"global_batch": 8} | options))


BETWEEN_BUCKETS = {"resolution": 96, "shapes": (), "max_crop": 1.0}
ABOVE_BUCKETS = {"resolution": 136, "shapes": (), "max_crop": 1.0}
ENLARGED = {"upscale": 1.5}
ENLARGED_SQUARES = {"resolution": 96, "shapes": (), "max_crop": 1.0, "upscale": 2}


@pytest.mark.parametrize(
    "how",
    [
        {},
        ABOVE_BUCKETS,
        *(
            pytest.param(how, marks=pytest.mark.system)
            for how in (
                *({"max_crop": 1.0}, {"shapes": ()}),
                *(ENLARGED, BETWEEN_BUCKETS, ENLARGED_SQUARES),
            )
        ),
    ],
)
def test_batches_made_on_the_way_are_those_of_stored_shapes_bit_for_bit(
    images: Path, latents: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    """And so are the states. What no shape takes has left the order, as it leaves the shards."""
    stored = latents
    if how:
        stored = tmp_path / "stored"
        encode_here(images, stored, **({"shapes": NEAREST, "max_crop": MAX_CROP} | how))
    fields = ("latent", "emb", "key", "json", *(() if "shapes" in how else ("shape",)))
    options = {"epochs": 2, "global_batch": 4, "drop_text": 0.2, "fields": fields}
    loader, wanted = on_the_way(images, how=how, **options), wdsprep.load(stored, **options)
    assert loader.state_dict() == wanted.state_dict()
    assert_same(loader, wanted)
    share = {"rank": 1, "world_size": 2, "global_batch": 16, "shape_batch": 8}
    if not how:
        assert_same(on_the_way(images, **share), wdsprep.load(stored, **share))


@pytest.mark.parametrize(
    "how", [BETWEEN_BUCKETS, pytest.param(ABOVE_BUCKETS, marks=pytest.mark.system)]
)
def test_squares_of_any_resolution_are_made_of_the_images_that_are_large_enough(
    images: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    """Each of those is a latent, each other one of their buckets is a reject."""
    side = how["resolution"]
    encode_here(images, tmp_path / "out", resolution=side)
    sizes = image_sizes(images)
    large = {key for key, size in sizes.items() if min(size) >= side}
    assert latents_of(tmp_path / "out").keys() == large
    floor = max(bucket for bucket in (24, 64, 128) if bucket <= side)
    small = {key for key, size in sizes.items() if floor <= min(size) < side}
    assert rejected(tmp_path / "out") == dict.fromkeys(small, "too_small")
    assert large
    assert small
    assert main(["verify", str(images), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    "how", [ENLARGED, pytest.param(ENLARGED_SQUARES, marks=pytest.mark.system)]
)
def test_small_images_are_scaled_up_where_asked_and_all_say_so(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: dict[str, Any]
) -> None:
    how = {"resolution": 64, "shapes": NEAREST} | how
    text, out = tmp_path / "text", tmp_path / "out"
    encode_here(images, out, text_out=str(text), **how)
    most, small = how["upscale"], 0
    sizes = manifest_of(out).settings.get("shapes", [[how["resolution"]] * 2])
    for key, sample in latents_of(out).items():
        facts = sample["json"]
        left, top, right, bottom = facts["crop"]
        times = max((right - left) / facts["width"], (bottom - top) / facts["height"])
        small += times > 1
        assert facts.get("upscaled") == (round(times, 4) if times > 1 else None), key
        assert times <= most
    manifest = manifest_of(out)
    assert manifest.counts["upscaled"] == small > 1
    assert manifest.settings["upscale"] == most
    assert min(map(min, sizes)) > 30  # so that images of the lowest bucket are scaled up
    assert latents_of(text).keys() >= latents_of(out).keys()
    assert main(["verify", str(images), str(out), str(text)]) == 0
    words = ["--resolution", str(how["resolution"]), "--text-out", str(text), f"--upscale={most}"]
    assert run(images, out, *words, *(["--shapes", NEAREST] if how["shapes"] else [])) == 0
    assert f"{small} images scaled up, by at most {most} times" in capsys.readouterr().out
    other = {**how, "upscale": 1.25}
    with pytest.raises(FingerprintError, match=f"upscale: {most}, now 1.25"):
        encode_here(images, out, text_out=str(text), **other)
    key = next(key for key, sample in latents_of(out).items() if "upscaled" in sample["json"])
    wdsprep.remove(out, keys=[key], yes=True)
    assert manifest_of(out).counts["upscaled"] == small - 1


@pytest.mark.parametrize(("side", "upscale"), [(512, 1.0), (512, 1.1), (8192, 1.0)])
def test_a_resolution_that_no_image_reaches_is_refused_with_the_factor_that_would_do(
    images: Path, side: int, upscale: float
) -> None:
    said = r"holds no image of [0-9]+ pixels or more: choose a lower --resolution"
    said += "$" if side == 8192 else ", or --upscale 2.7$"
    with pytest.raises(SourceError, match=said):
        find_image_shards(str(images), side, upscale=upscale)
    assert find_image_shards(str(images), 512, upscale=2.7).shards


def test_shards_of_shapes_are_kept_as_encode_writes_them(
    images: Path, latents: Path, tmp_path: Path
) -> None:
    """With what was rejected, and all of it after an encode has made the rest: a shard of which
    every image is."""
    kept = tmp_path / "kept"
    wanted = sum(1 for _ in latents.rglob("*.tar"))
    for _ in on_the_way(images, tee=str(kept), epochs=40):
        if sum(1 for _ in kept.rglob("*.tar")) == wanted:
            break
    there = manifest_of(kept).shards
    assert len(there) == len(manifest_of(latents).shards)
    assert len(rejected(kept)) > COUNT / 10
    for shard in there:
        assert (kept / shard.name).read_bytes() == (latents / shard.name).read_bytes()
    encode_here(images, kept, shapes=NEAREST, max_crop=MAX_CROP)
    assert tree(kept) == tree(latents)


def test_a_condition_leaves_the_same_samples_in_the_same_order(images: Path, latents: Path) -> None:
    """On the way as of what is stored, though they lie elsewhere."""
    options = {"where": "width > height", "epochs": 5, "global_batch": 8}
    wide = wdsprep.load(latents, **options)
    loader = on_the_way(images, **options)
    assert loader.state_dict() == wide.state_dict()
    assert_same(loader, wide)
    facts = {key: sample["json"] for key, sample in latents_of(latents).items()}
    served = {key for batch in wdsprep.load(latents, **options) for key in batch["key"]}
    assert served == {key for key, one in facts.items() if one["width"] > one["height"]}


def test_the_summary_tells_the_shapes(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--resolution", "64", "--shapes", NEAREST, "--limit", "40")
    assert run(images, tmp_path / "out", *words) == 0
    told = capsys.readouterr()
    assert "for resolution 64 in 9 shapes; model tiny" in told.err
    assert "shapes, width x height (batches have the height first): " in told.out
    assert run(images, tmp_path / "out", *words, "--json") == 0
    shapes = json.loads(capsys.readouterr().out)["shapes"]
    assert sum(shapes.values()) == manifest_of(tmp_path / "out").samples


def test_the_option_takes_a_number_or_none(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--resolution", "96", "--limit", "9"]
    for given in (["--upscale"], ["--upscale", "1.5"], ["--upscale=1.5"]):  # the same each time
        assert run(images, tmp_path / "out", *given, *words) == 0
        assert manifest_of(tmp_path / "out").settings["upscale"] == 1.5
    for wrong in ("0.5", "17", "big"):
        assert run(images, f"--upscale={wrong}", *words) == 2
    capsys.readouterr()
    assert main(["encode", "--upscale", "images", *words, *TOY]) == 2
    said = "wdsprep: --upscale 'images': give a number, or put the option last, without one\n"
    assert capsys.readouterr().err == said
