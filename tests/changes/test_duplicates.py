"""`duplicates`: what looks the same is found, nothing else is, and nothing is looked at twice."""

import io
import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageDraw

import wdsprep
from tests.kit.command_lines import CommandLine, python
from tests.kit.latent_sets import write_latents
from tests.kit.packs import manifest_of, pack, samples_of, tree, write_files
from wdsprep.changes.near_duplicates import choose_kept, find_near_pairs
from wdsprep.changes.options import DISTANCE
from wdsprep.errors import UsageError, WdsprepError
from wdsprep.images.perceptual_hash import hash_image
from wdsprep.runners.job import JobListener

SIDE = 192


def picture(number: int, size: tuple[int, int] = (256, SIDE)) -> Image.Image:
    """Shapes at places that no other number gives."""
    chance = Random(number)
    image = Image.new("RGB", size, chance.randbytes(3).hex().join(["#", ""]))
    draw = ImageDraw.Draw(image)
    for _ in range(30):
        x, y = chance.randrange(size[0]), chance.randrange(size[1])
        box = (x, y, x + chance.randrange(20, 90), y + chance.randrange(20, 90))
        draw.ellipse(box, fill=chance.randbytes(3).hex().join(["#", ""]))
    return image


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def half(image: Image.Image) -> Image.Image:
    return image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC)


def cropped(image: Image.Image, share: float = 0.02) -> Image.Image:
    x, y = round(image.width * share / 2), round(image.height * share / 2)
    return image.crop((x, y, image.width - x, image.height - y))


def distance(one: bytes, other: bytes) -> int:
    return (hash_image(one)[0] ^ hash_image(other)[0]).bit_count()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures in `in`, and what pack made of them in `images`."""
    root = tmp_path_factory.mktemp("made")
    files: dict[str, bytes | str] = {f"{n}.jpg": encoded(picture(n)) for n in range(10)}
    files["a0.jpg"] = files["0.jpg"]
    files["a1.jpg"] = encoded(picture(1), quality=40)
    files["b1.png"] = encoded(half(picture(1)), "PNG")
    files["c1.jpg"] = encoded(picture(1).resize((512, 2 * SIDE)))
    files["white.png"] = encoded(Image.new("RGB", (200, 200), "white"), "PNG")
    files["black.png"] = encoded(Image.new("RGB", (200, 200), "black"), "PNG")
    pack(write_files(root / "in", files), root / "images", "--samples-per-shard", "6")
    return root


@pytest.fixture
def images(made: Path, tmp_path: Path) -> Path:
    """Ten pictures; of 0 the same bytes again, of 1 three near copies, of which the largest is the
    last, and two that are flat."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "images"


@pytest.fixture(scope="module")
def made_of_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of pictures by their numbers; those of `c` are near `a`, and `d` has no source."""
    numbers = {"a": (1, 2), "b": (1, 3), "e": (4, 2), "f": (1, 2), "g": (5, 6)}
    files: dict[str, bytes | str] = {}
    for name, (target, source) in numbers.items():
        files[f"{name}.jpg"] = encoded(picture(target))
        files[f"{name}.source.jpg"] = encoded(picture(source))
    files["c.jpg"] = encoded(half(picture(1)), quality=90)
    files["c.source.jpg"] = encoded(half(picture(2)), quality=90)
    files["d.jpg"] = encoded(picture(7))
    root = tmp_path_factory.mktemp("pairs")
    roles = ("--role", "source=.source", "--optional-role", "source")
    return pack(write_files(root / "in", files), root / "images", "--buckets", "32", *roles)


@pytest.fixture
def pairs(made_of_pairs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_of_pairs, tmp_path / "images"))


def sources(images: Path) -> dict[str, str]:
    """The file that each key comes from."""
    return {one["__key__"]: Path(one["json"]["source"]).name for one in samples_of(images)}


def find_copies(images: Path, **options: Any) -> tuple[Any, list[str], dict[str, dict[str, Any]]]:
    """The result, the files of the copies, and the rows of the table by their files."""
    names, keys = sources(images), images.parent / "copies.txt"
    table = images.parent / "copies.parquet"
    found = wdsprep.duplicates(images, output=keys, table=table, workers=1, **options)
    rows = {names[row["key"]]: row for row in pq.read_table(table).to_pylist()}
    return found, [names[key] for key in keys.read_text().split()], rows


@pytest.mark.parametrize(
    ("role", "copies", "compared"),
    [
        ("", "bcf", "abcdefg"),
        ("target", "bcf", "abcdefg"),
        ("source", "cef", "abcefg"),
        ("all", "cf", "abcdefg"),
    ],
)
def test_copies_are_those_of_the_images_in_a_role_or_of_whole_samples(
    pairs: Path, role: str, copies: str, compared: str
) -> None:
    """A sample without an image in the role is a copy of none."""
    found, names, rows = find_copies(pairs, role=role)
    assert "".join(name[0] for name in names) == copies
    assert "".join(name[0] for name in rows) == compared
    assert (found.samples, found.flat, found.damaged) == (len(compared), 0, 0)


def test_whole_samples_are_near_if_each_image_is_near_that_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many targets of one hash are compared in parts, flat masks by their bytes, and a sample with
    fewer images is a copy of none."""
    monkeypatch.setattr("wdsprep.changes.duplicates.PAIRS_AT_ONCE", 4)
    grey, black = (Image.new("L", (256, SIDE), level) for level in (90, 0))
    samples: dict[str, tuple[Image.Image, ...]] = {
        "a": (picture(1), grey, picture(2), picture(3)),
        "b": (picture(1), grey, half(picture(2)), picture(3).crop((3, 3, 253, 189))),  # near a
        "c": (picture(1), black, picture(2), picture(3)),  # another mask
        "d": (picture(1), grey, picture(3), picture(2)),  # sources exchanged
        "e": (picture(1), grey, picture(2)),  # one source fewer
        "f": (picture(1), grey, picture(2), picture(3)),  # a
        "g": (half(picture(1)).resize((256, SIDE)), grey, half(picture(2)), picture(3)),  # near a
        "h": (picture(4), grey, picture(2), picture(3)),  # another target
        "i": (picture(1), black, picture(2), half(picture(3))),  # near c
    }
    files: dict[str, bytes | str] = {}
    for name, (target, mask, *rest) in samples.items():
        files[f"{name}.jpg"] = encoded(target, quality=90)
        files[f"{name}.mask.png"] = encoded(mask, "PNG")
        for number, image in enumerate(rest):
            files[f"{name}.source_{number}.jpg"] = encoded(image, quality=90)
    write_files(tmp_path / "in", files)
    images, roles = tmp_path / "images", ["source=.source", "mask=.mask.png"]
    wdsprep.pack(tmp_path / "in", images, buckets=[32], role=roles)
    found, names, _ = find_copies(images, role="all")
    assert ([name[0] for name in names], found.equal, found.near) == ([*"bfgi"], 1, 3)
    assert 0 < max(copy.distance for group in found.largest for copy in group.copies) <= 6


def test_hashes_of_each_role_are_kept_until_their_shard_is_gone(
    tmp_path: Path, pairs: Path
) -> None:
    roles = ("", "source", "all")
    for role in roles:
        wdsprep.duplicates(pairs, role=role)
    kept = {path.name.partition(".")[2] for path in (tmp_path / "images-hashes").glob("*/*")}
    digest = manifest_of(pairs).shards[0].digest[:16]
    assert kept == {f"{digest}{role and f'.{role}'}.v1.parquet" for role in roles}
    before = tree(tmp_path / "images-hashes")
    for role in roles:
        wdsprep.duplicates(pairs, role=role)
    assert tree(tmp_path / "images-hashes") == before
    wdsprep.remove(pairs, keys=["000000000000"], yes=True)
    assert not tree(tmp_path / "images-hashes")


# --- the hash
@pytest.mark.parametrize("number", range(6))
def test_a_picture_is_known_again_and_another_one_is_not(number: int) -> None:
    image = picture(number)
    made = encoded(image, quality=90)
    for copy in (
        encoded(image, quality=40),
        encoded(image, "PNG"),
        encoded(image, "WEBP"),
        encoded(half(image)),
        encoded(cropped(image)),
    ):
        assert distance(made, copy) <= DISTANCE
    assert distance(made, encoded(picture(number + 100))) > 2 * DISTANCE


def test_the_hash_of_pixels_is_the_same_wherever_it_is_worked_out() -> None:
    """Frozen: other numbers here need another VERSION."""
    size = (320, 200)
    rising = bytes((x * x // 350 + y) % 256 for y in range(size[1]) for x in range(size[0]))
    image = Image.frombytes("L", size, rising)
    assert hash_image(encoded(image, "PNG"))[0] == 0x86FF3E1EE7304E00
    noise = Image.frombytes("L", (131, 67), Random(1).randbytes(131 * 67))
    assert hash_image(encoded(noise, "PNG"))[0] == 0xDAB90CACBB9801ED


# --- the search
@pytest.mark.parametrize("distance", [1, 4, 6, 9])
def test_the_search_finds_each_near_pair_once_and_no_other(distance: int) -> None:
    chance = np.random.default_rng(distance)
    some = chance.integers(0, 1 << 63, 100, dtype=np.uint64)
    flips = np.uint64(1) << chance.integers(0, 64, (8, 100)).astype(np.uint64)
    near = [some ^ np.bitwise_xor.reduce(flips[:n], axis=0) for n in range(9)]
    hashes = np.unique(np.concatenate(near))
    one, other = find_near_pairs(hashes, distance)
    found = [tuple(sorted(pair)) for pair in zip(one.tolist(), other.tolist(), strict=True)]
    apart = np.bitwise_count(hashes[:, None] ^ hashes[None])
    wanted = np.argwhere(np.triu(apart <= distance, 1)).tolist()
    assert sorted(found) == sorted(map(tuple, wanted))
    assert len(wanted) > 700


@pytest.mark.parametrize(
    ("better", "worse", "kept"),
    [
        ([0, 1, 2, 3], [1, 2, 3, 4], [0, 0, 2, 2, 4, 5]),  # of a chain every second one stays
        ([1, 0, 2], [3, 3, 3], [0, 1, 2, 0]),  # a copy of two that stay goes with the better one
    ],
)
def test_a_group_is_what_is_near_the_one_that_stays_not_what_is_near_each_other(
    better: list[int], worse: list[int], kept: list[int]
) -> None:
    assert choose_kept(np.array(better), np.array(worse), len(kept)).tolist() == kept


# --- datasets
def test_copies_are_found_and_the_largest_stays(images: Path) -> None:
    before, names = tree(images), sources(images)
    found, gone, rows = find_copies(images)
    assert tree(images) == before
    assert (found.samples, found.equal, found.near, found.groups, found.flat) == (16, 1, 3, 2, 2)
    assert sorted(gone) == ["1.jpg", "a0.jpg", "a1.jpg", "b1.png"]
    group = found.largest[0]
    assert (names[group.stays.key], group.count) == ("c1.jpg", 3)
    assert (group.stays.width, group.stays.height) == (512, 2 * SIDE)
    assert [one.is_equal for one in found.largest[1].copies] == [True]
    assert len(rows) == 16
    assert {name for name, row in rows.items() if row["duplicate"]} == set(gone)
    assert [rows[name]["duplicate"] for name in ("0.jpg", "a0.jpg", "a1.jpg")] == [0, 2, 1]
    assert rows["c1.jpg"]["group"] == rows["a1.jpg"]["group"] != rows["a0.jpg"]["group"] > 0
    assert rows["2.jpg"]["group"] == rows["white.png"]["hash"] == 0
    assert repr(found) == f"<Duplicates {str(images)!r}: 1 equal and 3 near of 16 samples>"
    same = wdsprep.duplicates(images, distance=0, workers=1)
    assert same.equal == 1
    assert {copy.distance for group in same.largest for copy in group.copies} == {0}


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_numbers_by_which_copies_are_kept_are_compared_exactly(
    images: Path, tmp_path: Path, kind: str
) -> None:
    """And a sample whose value is the lowest of all still comes before one that has none."""
    keys = {name: key for key, name in sources(images).items()}
    table = tmp_path / f"t.{kind}"

    def stays(name: str, values: dict[str, Any]) -> bool:
        columns = {
            "key": [keys[name] for name in values],
            "rank": [*values.values()],
            "other": [None] * len(values),
        }
        if kind == "csv":
            rows = zip(*columns.values(), strict=True)
            lines = [",".join("" if cell is None else str(cell) for cell in row) for row in rows]
            table.write_text("".join(f"{line}\n" for line in [",".join(columns), *lines]))
        else:
            columns["other"] = pa.array([2**64 - 1] * len(values), pa.uint64())
            pq.write_table(pa.table(columns), table)
        return name not in find_copies(images, join=table, keep="rank")[1]

    large = {"c1.jpg": 2**53, "a1.jpg": 2**53 + 1, "b1.png": 2**53}
    assert stays("a1.jpg", large)
    assert stays("a1.jpg", {**large, "2.jpg": None})
    assert stays("b1.png", {"b1.png": -np.inf})
    with pytest.raises(UsageError, match=r"no column of numbers beauty for .*, but key, other, ra"):
        wdsprep.duplicates(images, keep="beauty", join=table, hashes=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_samples_that_do_not_meet_a_condition_are_not_compared(images: Path) -> None:
    found, gone, rows = find_copies(images, where="width <= 256 and height > 100")
    assert {*gone} == {"a1.jpg", max("0.jpg", "a0.jpg")}
    assert rows.keys() == {*sources(images).values()} - {"b1.png", "c1.jpg"}
    assert (found.samples, found.flat, found.damaged) == (len(rows), 2, 0)


@pytest.mark.system
def test_no_thread_of_arrow_outlives_the_search(images: Path, tmp_path: Path) -> None:
    """One that holds bytes of ours when Python ends ends the process with a signal.

    The kernel may list a thread of Python for a moment after it was joined; one of Arrow stays.
    """
    wdsprep.duplicates(images, workers=1)
    code = f"""
import os, time, pyarrow.parquet, wdsprep
from wdsprep.changes.duplicates import duplicates
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
duplicates({str(images)!r}, output="copies.txt", table="copies.parquet")
patience = time.monotonic() + 10
while threads() > before and time.monotonic() < patience:
    time.sleep(0.01)
print(threads() - before)
"""
    assert python(code, cwd=tmp_path).stdout == "0\n"


def test_a_shard_is_looked_at_once_until_it_is_another_or_loses_samples(
    images: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "images-hashes"
    first = wdsprep.duplicates(images, workers=1)
    files = tree(kept)
    assert len(files) == len(manifest_of(images).shards) == 3
    name = min(files)
    (kept / name).unlink()
    looked: list[int] = []
    listener = JobListener(on_status=lambda status: looked.append(status().units))
    assert wdsprep.duplicates(images, workers=1, listener=listener) == first
    assert set(looked) == {1}
    assert tree(kept) == files
    write_files(kept, {"mine.parquet": b"precious"})
    write_files(tmp_path / "in", {"9.jpg": encoded(picture(77))})
    pack(tmp_path / "in", images, "--samples-per-shard", "6", "--overwrite")
    wdsprep.duplicates(images, workers=1)
    assert len(files.keys() - tree(kept).keys()) == 1
    assert len(tree(kept)) == 4
    assert (kept / "mine.parquet").read_bytes() == b"precious"
    before = {path: pq.read_table(path)["key"].to_pylist() for path in kept.glob("*/*")}
    gone = min(before)
    wdsprep.remove(images, keys=before[gone][:1], yes=True)
    assert {path for path in before if not path.exists()} == {gone}


def test_copies_are_found_across_datasets(images: Path, tmp_path: Path) -> None:
    """Of equal ones that of the dataset named first stays."""
    write_files(tmp_path / "more", {"x5.jpg": encoded(picture(5)), "y.jpg": encoded(picture(60))})
    more = pack(tmp_path / "more", tmp_path / "others")
    lists = tmp_path / "{number}.txt"
    found = wdsprep.duplicates(more, images, output=lists, workers=1, hashes=tmp_path / "kept")
    assert (tmp_path / "1.txt").read_text() == ""
    keys = (tmp_path / "2.txt").read_text().splitlines()
    assert "5.jpg" in {sources(images)[key] for key in keys}
    assert found.equal == 2
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"others", "images"}


def test_a_damaged_image_is_a_copy_only_of_the_same_bytes(tmp_path: Path) -> None:
    whole = encoded(picture(3), "PNG")
    cut = whole[:400] + bytes(200) + whole[600:]
    write_files(tmp_path / "in", {"a.png": cut, "b.png": cut, "c.png": whole})
    images = pack(tmp_path / "in", tmp_path / "images", "--check", "header")
    found = wdsprep.duplicates(images, workers=1)
    assert (found.damaged, found.equal, found.near) == (2, 1, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"distance": 13}, "give 12 or less"),
        ({"distance": -1}, "give 0 or more"),
        ({"table": "copies.csv"}, "give names such as copies.txt"),
        ({"output": "images/copies.txt"}, "lies in"),
        ({"hashes": "."}, "as it is inside a dataset"),
        ({"output": "a.parquet", "table": "a.parquet"}, "give names such as copies.txt"),
        ({"keep": "aesthetic"}, "is a column of"),
        ({"join": "scores.parquet"}, "give one of them"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    options: dict[str, Any], said: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(images.parent)
    with pytest.raises(UsageError, match=said):
        wdsprep.duplicates(images, **options)
    assert not (images.parent / "images-hashes").exists()


@pytest.mark.parametrize(("option", "name"), [("output", "x.txt"), ("table", "x.parquet")])
def test_a_file_that_is_no_list_of_copies_is_not_replaced(
    option: str, name: str, images: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {option: tmp_path / name, "workers": 1}
    (tmp_path / name).write_text("a red car\n")
    with pytest.raises(UsageError, match="is no list of copies: give another name"):
        wdsprep.duplicates(images, **options)
    assert (tmp_path / name).read_text() == "a red car\n"
    (tmp_path / name).unlink()
    for _ in range(2):
        wdsprep.duplicates(images, **options)


def test_places_that_are_no_images_are_refused_in_one_line(images: Path, tmp_path: Path) -> None:
    latents = write_latents(str(tmp_path / "latents"), [3])
    write_files(tmp_path / "more", {"x5.jpg": encoded(picture(5))})
    more = pack(tmp_path / "more", tmp_path / "others/images")
    cases: list[tuple[list[Any], dict[str, Any], str]] = [
        ([], {}, "give a dataset"),
        ([tmp_path / "none"], {}, "holds no dataset"),
        ([latents], {}, "give the images that it was made of"),
        ([images, images], {}, "given twice"),
        ([images, more], {"hashes": tmp_path / "kept"}, "same last name"),
        ([images, more], {"output": tmp_path / "copies.txt"}, r"put \{number\} into the name"),
    ]
    for places, options, said in cases:
        with pytest.raises(WdsprepError, match=said):
            wdsprep.duplicates(*places, **options)


def test_the_command_shows_groups_and_what_to_do_next(
    images: Path, command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(images.parent)
    lines = command("duplicates", "images", "-o", "copies.txt", "--workers", 1).lines
    first, second, summary, flat, last = lines
    assert re.fullmatch(r"\d+ \(512 x 384\) stays: (\d+ \(\d+ x \d+\) \d bits?(; )?){3}", first)
    assert second.endswith(" equal")
    assert summary.startswith("4 copies in 2 groups: 1 equal to the byte, 3 within 6 bits; 16 sam")
    assert flat == "2 with too little detail, compared by their bytes alone"
    assert last == "next: wdsprep remove images --keys copies.txt --keep-copies"
    assert command("duplicates", "images", "--json").facts["near"] == 3


def test_a_report_shows_groups_side_by_side(images: Path, tmp_path: Path) -> None:
    table, page = tmp_path / "copies.parquet", tmp_path / "report.html"
    wdsprep.duplicates(images, table=table)
    shown = {"output": page, "samples": 0, "duplicates": table}
    wdsprep.report(images, **shown)
    section = page.read_text().partition('id="copies"')[2].partition('id="settings"')[0]
    assert "2 groups of 2" in section
    first, second = sorted(section.split("<h3>")[1:], key=len)
    assert ("and 1 copy<" in first, "and 3 copies<" in second) == (True, True)
    assert (first.count("it stays"), first.count("equal to the byte")) == (1, 1)
    assert (second.count("it stays"), second.count("of 64 bits differ")) == (1, 3)
    data = pq.read_table(table)
    pq.write_table(data.slice(1), table)
    with pytest.raises(UsageError, match=r"other samples.*run .wdsprep duplicates"):
        wdsprep.report(images, **shown)
    pq.write_table(data.append_column("k", data["key"]).drop_columns(["key"]), table)
    with pytest.raises(WdsprepError, match="is not a table of copies"):
        wdsprep.report(images, **shown)
    pq.write_table(data.set_column(0, "key", [["000000000099"] * len(data)]), table)
    with pytest.raises(UsageError, match="other samples"):
        wdsprep.report(images, **shown)
