"""Several images a sample: what edits began with, masks, references, from every kind of source."""

import hashlib
import io
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

import wdsprep
from tests.kit.corpus import turned
from tests.kit.damaged import rewrite
from tests.kit.encodes import encode_here
from tests.kit.mds import write_mds
from tests.kit.packs import (
    check_dataset,
    jpeg,
    manifest_of,
    outcome,
    packing_here,
    rejects_of,
    samples_of,
    tar_bytes,
    tree,
    with_text,
    write_files,
    write_table,
)
from tests.kit.webserver import WebServer, ok, status
from wdsprep.cli import main
from wdsprep.errors import FingerprintError, SourceError, UsageError
from wdsprep.sources.base import left_out_among

SIZE = (48, 40)
FETCHING = {"allow_private_hosts": True, "retries": 0, "per_host": 64}


def packed(source: Path | str, out: Path, *roles: str, **options: Any) -> Path:
    with packing_here():
        wdsprep.pack(source, out, role=roles, workers=1, **{"buckets": (32, 64), **options})
    return out


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def lines_of(rows: Iterable[Any]) -> str:
    return "\n".join(map(json.dumps, rows))


def refusals(out: Path) -> dict[str, tuple[str, str]]:
    return {reject["source"]: (reject["code"], reject["detail"]) for reject in rejects_of(out)}


def mask(number: int, size: tuple[int, int] = SIZE, *, mode: str = "L", kind: str = "PNG") -> bytes:
    """A mask with greys, in whatever mode and format it is stored."""
    noise = random.Random(number).randbytes(size[0] * size[1])
    out = io.BytesIO()
    Image.frombytes("L", size, noise).convert(mode).save(out, kind)
    return out.getvalue()


TARGETS = [jpeg(number, SIZE) for number in range(4)]
SOURCES = [[jpeg(10 + number, (50 + number, 33))] for number in range(3)]
SOURCES += [[jpeg(13, (33, 34)), jpeg(23, (64, 65))]]
MASKS = [mask(0), mask(1), b"", mask(3)]
"""Four samples: a target, one or two sources, and of all but one a mask."""


def folders(root: Path) -> tuple[Path, list[str]]:
    for number, target in enumerate(TARGETS):
        files = {f"in/a/{number}.jpg": target, f"in/a/{number}.txt": b"edit %d" % number}
        images = SOURCES[number]
        for place, data in enumerate(images):
            numbered = f"{number}_{place}" if len(images) > 1 else f"{number}"
            files[f"before/a/{numbered}.jpeg"] = data
        if MASKS[number]:
            files[f"where/a/{number}.png"] = MASKS[number]
        write_files(root, dict(files))
    return root / "in", [f"source={root}/before", f"mask={root}/where/"]


def beside(root: Path) -> tuple[Path, list[str]]:
    write_files(root / "in", dict(_members()))
    return root / "in", ["source=.source.jpg", "mask=.mask"]


def _members() -> Iterator[tuple[str, bytes]]:
    for number, target in enumerate(TARGETS):
        for place, data in enumerate(SOURCES[number]):
            yield f"{number}.source{f'_{place}' if place else ''}.jpg", data
        yield f"{number}.jpg", target
        if MASKS[number]:
            yield f"{number}.mask.png", MASKS[number]
        yield f"{number}.txt", b"edit %d" % number


def tars(root: Path) -> tuple[Path, list[str]]:
    write_files(root, {"in/a.tar": tar_bytes(_members())})
    return root / "in", ["source=source.jpg", "mask=.mask"]


def metadata(root: Path) -> tuple[Path, list[str]]:
    """As the imagefolder of Hugging Face has them, the images in one folder."""
    files: dict[str, bytes | str] = {}
    rows: list[dict[str, Any]] = []
    for number, target in enumerate(TARGETS):
        media = {f"from/{number}-{place}.jpg": data for place, data in enumerate(SOURCES[number])}
        files |= {f"in/{name}": data for name, data in media.items()} | {f"in/{number}.jpg": target}
        named: list[dict[str, str]] = [{"file_name": name} for name in media]
        named.append({"file_name": f"{number}.jpg", "role": "target"})
        rows.append({"file_name": f"{number}.jpg", "text": f"edit {number}", "media": named})
        if MASKS[number]:
            files[f"in/masks/{number}.png"] = MASKS[number]
            rows[-1]["mask_file_name"] = f"masks/{number}.png"
    write_files(root, {**files, "in/metadata.jsonl": lines_of(rows)})
    return root / "in", ["source=media", "mask=mask_file_name"]


def bytes_in_a_table(root: Path) -> tuple[Path, list[str]]:
    rows = [
        {
            "before": [{"bytes": data, "path": "a.jpg"} for data in SOURCES[number]],
            "image": target,
            "where": MASKS[number] or None,
            "edit_prompt": f"edit {number}",
        }
        for number, target in enumerate(TARGETS)
    ]
    write_table(root / "in" / "t.parquet", rows)
    return root / "in", ["source=before", "mask=where"]


def mds(root: Path) -> tuple[Path, list[str]]:
    """MDS has no lists: each image has a column, and one that a sample lacks is empty."""
    columns = {"caption": "str", "image": "jpeg", "mask": "png", "ref_0": "jpeg", "ref_1": "bytes"}
    rows = [(b"edit %d" % n, TARGETS[n], MASKS[n], *[*SOURCES[n], b""][:2]) for n in range(4)]
    write_mds(root / "in", columns, rows)
    return root / "in", ["source=ref_0", "mask=mask"]


MAKERS = [folders, beside, tars, metadata, bytes_in_a_table, mds]


def check_pairs(out: Path, *, url: str = "") -> None:
    """What is in the dataset, as plain webdataset reads it, is what the source had."""
    samples = samples_of(out)
    assert [sample["txt"] for sample in samples] == [f"edit {n}" for n in range(4)]
    for number, sample in enumerate(samples):
        facts, images = sample["json"], SOURCES[number]
        names = ["jpg", "source.jpg", "source_1.jpg"][: 1 + len(images)]
        names += ["mask.png"] if MASKS[number] else []
        assert [name for name in sample if not name.startswith("__")] == [*names, "json", "txt"]
        stored = [TARGETS[number], *images, *filter(None, [MASKS[number]])]
        for name, data in zip(names, stored, strict=True):
            assert sample[name] == data
            prefix = f"{name.partition('.')[0]}_" if "." in name else ""
            size = opened(data).size
            assert (facts[f"{prefix}width"], facts[f"{prefix}height"]) == size
            assert facts[f"{prefix}original_width"] == size[0]
            assert facts[f"{prefix}original_height"] == size[1]
            assert facts[f"{prefix}changes"] == []
            assert facts[f"{prefix}sha256"] == hashlib.sha256(data).hexdigest()
            assert facts.get(f"{prefix}url", "").startswith(url)
        widths = [f"{name.partition('.')[0]}_width" for name in names[1:]]
        stated = [name for name in facts if name.endswith("_width") and "original" not in name]
        assert sorted(stated) == sorted(widths)
    assert not wdsprep.verify(out).findings


@pytest.mark.parametrize("make", MAKERS)
def test_images_in_roles_come_from_each_kind_of_source(
    tmp_path: Path, make: Callable[[Path], tuple[Path, list[str]]]
) -> None:
    source, roles = make(tmp_path)
    options = {"compute_hash": "sha256", "optional_role": "mask"}
    out = packed(source, tmp_path / "out", *roles, **options)
    assert not rejects_of(out)
    check_pairs(out)
    check_dataset(out)
    before = tree(out)
    assert tree(packed(source, out, *roles, **options)) == before
    assert manifest_of(out).settings["roles"] == ["source", "mask"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_images_in_roles_are_fetched_and_failures_named_and_fetched_again(
    tmp_path: Path, kind: str
) -> None:
    pages = {}
    for number, target in enumerate(TARGETS):
        pages[f"/t/{number}"] = ok(target)
        for place, data in enumerate(SOURCES[number]):
            pages[f"/s/{number}-{place}"] = ok(data)
        pages[f"/m/{number}"] = ok(MASKS[number])
    with WebServer({**pages, "/s/3-1": status(503)}) as server:
        rows: list[dict[str, Any]] = [
            {
                "url": f"{server.url}/t/{number}",
                "text": f"edit {number}",
                "control_0": f"{server.url}/s/{number}-0",
                "control_1": f"{server.url}/s/{number}-1" if number == 3 else None,
                "masks": [f"{server.url}/m/{number}"] if MASKS[number] else [],
            }
            for number in range(4)
        ]
        write_table(tmp_path / "t.parquet", rows)
        write_files(tmp_path, {"t.jsonl": lines_of(rows)})
        roles = ["source=control_0", "mask=masks"]
        options = {**FETCHING, "optional_role": ["mask"], "compute_hash": "sha256"}
        table, out = tmp_path / f"t.{kind}", tmp_path / "out"
        packed(table, out, *roles, **options)
        (reject,) = rejects_of(out)
        assert (reject["code"], reject["url"]) == ("http_5xx", f"{server.url}/s/3-1")
        assert reject["detail"].startswith("source_1: ")
    with WebServer(pages, port=server.port) as server:
        packed(table, out, *roles, **options, retry_rejected=True)
        assert not rejects_of(out)
        check_pairs(out, url=f"{server.url}/")
        wdsprep.remove(out, urls=[f"{server.url}/s/3-1", f"{server.url}/m/0"], yes=True)
        assert [sample["txt"] for sample in samples_of(out)] == ["edit 1", "edit 2"]
        others = [{**row, "url": f"{server.url}/t/1"} for row in rows[::-1]]
        write_table(tmp_path / "moved.parquet", others)
        write_files(tmp_path, {"moved.jsonl": lines_of(others)})
        asked = len(server.paths())
        packed(tmp_path / f"moved.{kind}", out, *roles, **options, overwrite=True)
        assert not {"/s/3-0", "/s/3-1", "/m/0"} & {*server.paths()[asked:]}
        assert [sample["txt"] for sample in samples_of(out)] == ["edit 2", "edit 1"]


def test_a_sample_without_an_image_or_with_a_damaged_one_is_a_reject_that_names_its_role(
    tmp_path: Path,
) -> None:
    bad = ("mask", "size", "colours", "clear")
    write_files(
        tmp_path,
        {
            **{f"in/{name}.jpg": jpeg(1, SIZE) for name in ("good", "lacks", "cut", "small", *bad)},
            **{f"s/{name}.png": jpeg(3, (70, 70), "PNG") for name in ("good", *bad)},
            "s/cut.jpg": jpeg(4, (70, 70))[:900],
            "s/small.jpg": jpeg(5, (63, 70)),
            **{f"m/{name}.png": mask(1) for name in ("good", "lacks", "cut", "small")},
            "m/mask.png": b"<html>",
            "m/size.png": mask(1, (40, 48)),
            "m/colours.png": jpeg(6, SIZE, "PNG"),
        },
    )
    Image.new("LA", SIZE, (9, 0)).save(tmp_path / "m/clear.png")
    roles = [f"source={tmp_path}/s", f"facemask={tmp_path}/m"]
    out = packed(tmp_path / "in", tmp_path / "out", *roles, min_size="0,source=64")
    found = {name: (code, said.partition(":")[0]) for name, (code, said) in refusals(out).items()}
    assert found == {
        "lacks.jpg": ("no_role", "source"),
        "cut.jpg": ("truncated", "source"),
        "small.jpg": ("too_small", "source"),
        "mask.jpg": ("not_an_image", "facemask"),
        "size.jpg": ("other_size", "facemask"),
        "colours.jpg": ("unsupported", "facemask"),
        "clear.jpg": ("unsupported", "facemask"),
    }
    assert [sample["json"]["source"] for sample in samples_of(out)] == ["good.jpg"]
    assert manifest_of(out).settings["role_limits"] == {"source": {"min_size": 64}}


def test_an_image_that_metadata_names_and_that_is_not_there_makes_its_sample_a_reject(
    tmp_path: Path,
) -> None:
    """No image takes the number of another, and an optional role does not lose one unseen."""
    named = {"a": ["s/a.jpg", "s/b.jpg"], "b": ["s/none.jpg", "s/b.jpg"], "c": ["../c.jpg"]}
    rows = [{"file_name": f"{name}.jpg", "media": named.get(name, [])} for name in "abcd"]
    files: dict[str, bytes | str] = {f"in/{name}.jpg": jpeg(1, SIZE) for name in "abcd"}
    files |= {"in/s/a.jpg": jpeg(2), "in/s/b.jpg": jpeg(3), "in/metadata.jsonl": lines_of(rows)}
    write_files(tmp_path, {**files, "c.jpg": jpeg(4)})
    out = packed(tmp_path / "in", tmp_path / "out", "source=media", optional_role="source")
    assert refusals(out) == {
        "b.jpg": ("no_image", "source: s/none.jpg is no image of the folder"),
        "c.jpg": ("no_image", "source: ../c.jpg is no image of the folder"),
    }
    assert [sample["json"]["source"] for sample in samples_of(out)] == ["a.jpg", "d.jpg"]


def test_metadata_may_name_its_targets_in_another_field_and_chain_edits(tmp_path: Path) -> None:
    """As the JSON lines of musubi-tuner do. Images in roles are no targets, unless they have a row
    of their own: where one edit begins with what another made."""
    rows = [
        {"image_path": f"{n}.jpg", "caption": f"edit {n}", "control_path_0": f"{n - 1}.jpg"}
        for n in (1, 2)
    ]
    files: dict[str, bytes | str] = {f"in/{number}.jpg": TARGETS[number] for number in range(3)}
    write_files(tmp_path, {**files, "in/metadata.jsonl": lines_of(rows)})
    role, options = "source=control_path_0", {"image_col": "image_path"}
    out = packed(tmp_path / "in", tmp_path / "out", role, **options)
    stored = [(sample["txt"], sample["jpg"], sample["source.jpg"]) for sample in samples_of(out)]
    assert stored == [(f"edit {n}", TARGETS[n], TARGETS[n - 1]) for n in (1, 2)]
    assert not rejects_of(out)
    with pytest.raises(SourceError, match=r"no file_name .* by --image-col"):
        packed(tmp_path / "in", tmp_path / "other", role)


TOO_MANY = "more than 12 images in one role"
NUMBERED = {
    "0 1": ("source", "source_1"),
    "1 2": ("source", "source_1"),
    "00 01": ("source", "source_1"),
    "- 1 2": ("source", "source_1", "source_2"),
    "- 0 10": ("role_gap", "source_2 is missing before source_11"),
    "0 2": ("role_gap", "source_1 is missing before source_2"),
    "2 3": ("role_gap", "source is missing before source_1"),
    "0 00": ("unreadable", "source: two images have its name and number"),
    " ".join(map(str, range(13))): ("unreadable", f"source_12: {TOO_MANY}"),
}
"""The numbers in the names of images in a role, and the names of these or the reject."""


@pytest.mark.parametrize("kind", ["folder", "beside", "tars"])
def test_numbers_of_images_in_a_role_may_begin_at_0_or_1_and_have_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("wdsprep.sources.base.MOST_IMAGES", 12)
    roles = {"folder": f"{tmp_path}/s", "beside": ".source", "tars": "source.jpg"}
    infix, images = ".source" if kind != "folder" else "", dict[str, bytes]()
    targets = {f"t{number}": numbers for number, numbers in enumerate(NUMBERED)}
    if kind == "folder":  # where t_1 may be the image of a target t_1, and t is there
        targets = {name: numbers for name, numbers in targets.items() if "-" not in numbers}
    for target, numbers in targets.items():
        for place, number in enumerate(numbers.split()):
            ending = "" if number == "-" else f"_{number}"
            images[f"{target}{infix}{ending}.jpg"] = jpeg(place)
    files = {f"{target}.jpg": jpeg(9, SIZE) for target in targets}
    if kind == "tars":
        write_files(tmp_path, {"in/a.tar": tar_bytes(sorted({**files, **images}.items()))})
    else:
        write_files(tmp_path / "in", files)
        write_files(tmp_path / ("in" if kind == "beside" else "s"), dict(images))
    out = packed(tmp_path / "in", tmp_path / "out", f"source={roles[kind]}", optional_role="source")
    found: dict[str, tuple[str, ...]] = {**refusals(out)}
    for sample in samples_of(out):
        names = [name.removesuffix(".jpg") for name in sample if name.startswith("source")]
        assert [sample[f"{name}.jpg"] for name in names] == [*map(jpeg, range(len(names)))]
        found[sample["json"]["source"]] = (*names,)
    stems = {name.rpartition("/")[2].removesuffix(".jpg"): is_ for name, is_ in found.items()}
    assert stems == {target: NUMBERED[numbers] for target, numbers in targets.items()}


def test_an_image_in_a_role_has_the_extension_of_its_target_if_several_have_its_name(
    tmp_path: Path,
) -> None:
    """Those of a role's folder that belong to no target are counted."""
    files = {"in/a.jpg": jpeg(1, SIZE), "in/a.png": jpeg(2, SIZE, "PNG")}
    files |= {"s/a.jpg": jpeg(3), "s/a.png": jpeg(4, kind="PNG"), "s/a_1.png": jpeg(5, kind="PNG")}
    write_files(tmp_path, {**files, "s/b.jpg": jpeg(6)})
    out = packed(tmp_path / "in", tmp_path / "out", f"source={tmp_path}/s")
    first, second = samples_of(out)
    assert first["source.jpg"] == files["s/a.jpg"]
    assert second["source.png"] == files["s/a.png"]
    assert manifest_of(out).extra["left_out"] == {"in source": 2}


@pytest.mark.parametrize("kind", ["metadata", "urls", "table"])
def test_values_of_a_field_that_name_no_image_are_rejects_that_show_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A null between images is a gap in their numbers, and one behind all images counts as none."""
    monkeypatch.setattr("wdsprep.sources.base.MOST_IMAGES", 12)
    with WebServer({"/a.jpg": ok(jpeg(1, SIZE)), "/s.jpg": ok(jpeg(2))}) as server:
        there: Any = {"metadata": "s.jpg", "urls": f"{server.url}/s.jpg", "table": jpeg(2)}[kind]
        values: list[tuple[Any, str]] = [
            ([there] * 12 + [None], ""),
            ([there] * 13, f"source_12: {TOO_MANY}"),
            ([there, None, there], "source_1 is missing before source_2"),
            ([None, there], "source is missing before source_1"),
            ([there, "", there], "source_1 is missing before source_2"),
            ([there, 5], "source_1: "),
            ([{"image": "s.jpg"}], "source: "),
        ]
        values = values[:4] if kind == "table" else values
        rows = [
            {"file_name": f"{n}.jpg", "url": f"{server.url}/a.jpg", "image": jpeg(1, SIZE), "s": v}
            for n, (v, _) in enumerate(values)
        ]
        if kind == "table":
            write_table(tmp_path / "t/t.parquet", rows)
        else:
            lines = lines_of({**row, "image": None} for row in rows)
            files = {f"m/{n}.jpg": jpeg(1, SIZE) for n in range(len(rows))}
            write_files(tmp_path, {**files, "m/s.jpg": jpeg(2), "m/metadata.jsonl": lines})
            write_files(tmp_path, {"t.jsonl": lines})
        source = {"metadata": tmp_path / "m", "urls": tmp_path / "t.jsonl", "table": tmp_path / "t"}
        fetching = FETCHING if kind == "urls" else {}
        out = packed(source[kind], tmp_path / "out", "source=s", optional_role="source", **fetching)
    details = [said for _, said in refusals(out).values()]
    assert len(samples_of(out)) == 1
    for detail, (_, said) in zip(details, values[1:], strict=True):
        assert detail.startswith(said)
    if kind == "metadata":
        assert details[4:] == [
            "source_1: 5 is no image of the folder",
            "source: {'image': 's.jpg'} is no image of the folder",
        ]


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_mask_has_the_size_of_its_upright_image_and_is_not_turned(
    tmp_path: Path, orientation: int
) -> None:
    upright, greys = turned(orientation), opened(turned(1)).size
    write_files(tmp_path, {"in/a.jpg": upright, "in/b.jpg": upright})
    masks = {"m/a.png": mask(1, greys), "m/b.png": mask(1, greys[::-1])}
    write_files(tmp_path, {**masks})
    out = packed(tmp_path / "in", tmp_path / "out", f"mask={tmp_path}/m", buckets=(8,))
    (sample,) = samples_of(out)
    assert sample["mask.png"] == masks["m/a.png"]
    assert outcome(out)["b.jpg"] == "other_size"


def test_images_in_roles_are_converted_as_targets_are_and_masks_keep_their_greys(
    tmp_path: Path,
) -> None:
    files = {"in/a.jpg": jpeg(1, (96, 80)), "s/a.bmp": jpeg(2, (90, 40), "BMP")}
    write_files(tmp_path, {**files, "m/a.bmp": mask(3, (96, 80), mode="RGB", kind="BMP")})
    roles = [f"source={tmp_path}/s", f"mask={tmp_path}/m"]
    (plain,) = samples_of(packed(tmp_path / "in", tmp_path / "out", *roles))
    assert plain["json"]["source_changes"] == ["format"]
    assert plain["json"]["mask_changes"] == ["format", "grey"]
    assert opened(plain["source.png"]).tobytes() == opened(files["s/a.bmp"]).tobytes()
    stored = opened(plain["mask.png"])
    assert (stored.mode, stored.tobytes()) == ("L", opened(mask(3, (96, 80))).tobytes())
    small = packed(tmp_path / "in", tmp_path / "less", *roles, reencode="jpg:90", max_side=48)
    (sample,) = samples_of(small)
    facts = sample["json"]
    assert (facts["width"], facts["height"], facts["source_width"]) == (48, 40, 48)
    halves = stored.resize((48, 40), Image.Resampling.BOX)
    assert opened(sample["mask.png"]).tobytes() == halves.tobytes()
    assert (facts["mask_width"], facts["mask_original_width"]) == (48, 96)
    assert not wdsprep.verify(small).findings


@pytest.mark.parametrize(
    ("roles", "options", "said"),
    [
        (["source"], {}, "write NAME=WHERE"),
        (["So=x"], {}, "write NAME=WHERE"),
        (["jpg=x"], {}, "jpg is the name of something else"),
        (["source={home}/s", "source={home}/m"], {}, "--role source is given twice"),
        (["source={home}/s", "mask={home}/s/"], {}, "--role mask and --role source both take"),
        (["source=.b", "mask=b"], {}, "--role mask and --role source both take b"),
        (["source=.a.jpg"], {"image_col": "a.jpg"}, "--role source and --image-col both take"),
        (["source=link"], {"url_col": "link"}, "--role source and --url-col both take link"),
        (["source={home}/s"], {"optional_role": "mask"}, "--optional-role names mask"),
        (["source={home}/s"], {"min_size": {"mask": 9}}, "--min-size names mask"),
        (["source={home}/s"], {"max_area": "9,source=x"}, "ROLE=N"),
        (["source={home}/m"], {}, "such as a.jpg, has a source in .*, which has b.png: give"),
        (["source={home}/in/x"], {}, "lies in .* of which all images are targets"),
        (["source={home}/befor"], {}, "in .*/befor .did you mean .*/before.*: give a folder"),
        (["source={home}/s/a.jpg"], {}, "s/a.jpg is a file: give its folder"),
        (["all={home}/s"], {}, "all is the name of something else"),
        (["source=nothing"], {}, "has a source in nothing: .*, or a field of metadata"),
        (["source=x"], {"place": "t.parquet"}, "has no column 'x'"),
        (["source=n"], {"place": "t.parquet"}, "column 'n' holds no image bytes"),
        (["source=some/folder"], {"place": "a.tar"}, "give their ending"),
    ],
)
def test_roles_that_cannot_be_meant_are_refused_in_one_line(
    tmp_path: Path, roles: list[str], options: dict[str, Any], said: str
) -> None:
    write_files(tmp_path, {"in/a.jpg": jpeg(1), "s/a.jpg": jpeg(2), "m/b.png": jpeg(2, kind="PNG")})
    write_files(tmp_path, {"before/a.jpg": jpeg(2)})
    write_table(tmp_path / "t.parquet", [{"image": jpeg(1), "text": "a", "n": 5}])
    write_files(tmp_path, {"a.tar": tar_bytes([("a.jpg", jpeg(1))])})
    roles = [role.format(home=tmp_path) for role in roles]
    place = tmp_path / options.get("place", "in")
    with pytest.raises((UsageError, SourceError), match=said) as caught:
        packed(place, tmp_path / "out", *roles, **{n: options[n] for n in options if n != "place"})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out/wdsprep.json").exists()


def test_a_role_that_the_first_samples_lack_is_found_before_the_work(tmp_path: Path) -> None:
    """By names of members or fields. One that some of them have is no matter for the whole run."""
    members = [("a.jpg", jpeg(1)), ("a.edit.jpg", jpeg(2)), ("b.jpg", jpeg(3))]
    row = {"url": "https://example.org/a.jpg", "edit": "https://example.org/b.jpg", "n": 5}
    write_files(tmp_path, {"tars/a.tar": tar_bytes(members), "rows.jsonl": lines_of([row])})
    said = "of the first {} has a source, but {}: check --role source=.*, or give --optional-role"
    for place, samples, there in (
        ("tars", "2 samples", ".edit.jpg"),
        ("rows.jsonl", "1 sample", "edit, n, url"),
    ):
        with pytest.raises(SourceError, match=said.format(samples, there)):
            packed(tmp_path / place, tmp_path / "out", "source=sorce")
        assert not (tmp_path / "out").exists()
    out = packed(tmp_path / "tars", tmp_path / "out", "source=edit")
    assert outcome(out)["a.tar/b"] == "no_role"


def test_texts_beside_sources_and_images_without_a_row_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So folders that were exchanged are seen, and images that metadata forgot."""
    write_files(
        tmp_path, {"in/a.jpg": jpeg(1), "in/b.jpg": jpeg(1), "s/a.txt": "x", "s/b.txt": "y"}
    )
    write_files(tmp_path, {"s/a.jpg": jpeg(2), "s/b.jpg": jpeg(2)})
    words = ["--role", f"source={tmp_path}/s", "--buckets=32"]
    with packing_here():
        assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out"), *words]) == 0
    said = capsys.readouterr().out
    assert (
        "left out, neither images nor captions of samples by their names: 2 .txt in source" in said
    )
    assert "2 .txt files lie beside images in source: if those are the targets, exchange" in said
    write_files(tmp_path, {"in/metadata.jsonl": '{"file_name": "a.jpg", "score": 1}'})
    with packing_here():
        assert main(["pack", str(tmp_path / "in"), str(tmp_path / "new"), *words]) == 0
    assert "2 images in a folder, 0 with captions, 1 in no row" in capsys.readouterr().err


def test_a_run_says_how_many_samples_have_a_role_and_what_helps_against_gaps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And before it begins, which optional role no sample has."""
    members = [
        ("a.jpg", jpeg(1)),
        ("a.source.jpg", jpeg(2)),
        ("b.jpg", jpeg(3)),
        ("c.jpg", jpeg(4)),
    ]
    members += [(f"c.source_{number}.jpg", jpeg(number)) for number in (0, 2)]
    write_files(tmp_path, {"in/a.tar": tar_bytes(members)})
    words = ["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--workers", "1", "--buckets=32"]
    words += ["--role", "mask=.msak", "--role", "source=.source"]
    words += ["--optional-role", "source", "--optional-role", "mask"]
    with packing_here():
        assert main(words) == 0
    said, before = capsys.readouterr()
    assert "none of the first 2 samples has a mask: check --role mask=.msak" in before
    assert "has a source" not in before
    assert "roles: 0 samples with mask, 1 sample with source\n" in said
    assert (
        "1 of 3 was rejected, all of them as role_gap: number the images of a role without" in said
    )
    assert "--optional-role" not in said


def test_targets_and_roles_are_told_apart_by_what_the_user_names(tmp_path: Path) -> None:
    """Also where the role comes first, and where its fields follow `meta` in the json."""
    facts = {"n": {"m": 1}, "instruction": "edit"}
    members = [("a.after.jpg", jpeg(1)), ("a.before.jpg", jpeg(2))]
    members += [("a.json", json.dumps(facts).encode())]
    write_files(tmp_path, {"tars/a.tar": tar_bytes(members)})
    write_table(tmp_path / "t/t.parquet", [{"before": jpeg(2), "after": jpeg(1), **facts}])
    for place, target, before in (
        ("tars", "after.jpg", "before.jpg"),
        ("tars", "after", "before"),
        ("t", "after", "before"),
    ):
        out, options = tmp_path / f"out {place} {target}", {"image_col": target, "limit": 1}
        packed(tmp_path / place, out, f"net={before}", **options)
        (sample,) = samples_of(out)
        assert (sample["jpg"], sample["net.jpg"]) == (jpeg(1), jpeg(2))
        assert (sample["json"]["meta"], sample["txt"]) == (facts, "edit")
        check_dataset(out)


def test_other_roles_and_images_are_another_dataset_and_new_pairs_are_appended(
    tmp_path: Path,
) -> None:
    source, roles = folders(tmp_path)
    out = packed(source, tmp_path / "out", *roles, optional_role="mask")
    with pytest.raises(FingerprintError, match="roles: source,mask, now source"):
        packed(source, out, roles[0])
    write_files(tmp_path, {"in/a/9.jpg": jpeg(1, SIZE), "before/a/9.jpg": jpeg(2)})
    packed(source, out, *roles, optional_role="mask", append=True)
    check_dataset(out)
    assert samples_of(out)[-1]["source.jpg"] == jpeg(2)
    write_files(tmp_path, {"before/a/0.jpeg": jpeg(99, (50, 33))})
    with pytest.raises(FingerprintError, match="changed"):
        packed(source, out, *roles, optional_role="mask")


@pytest.mark.parametrize("by", ["keys", "sha256"])
def test_removal_takes_all_images_of_a_sample_and_keeps_it_away(tmp_path: Path, by: str) -> None:
    source, roles = folders(tmp_path)
    out = packed(source, tmp_path / "out", *roles, optional_role="mask")
    wanted = {"keys": "000000000003", "sha256": hashlib.sha256(SOURCES[3][1]).hexdigest()}
    wdsprep.remove(out, yes=True, **{by: [wanted[by]]})
    assert len(samples_of(out)) == 3
    assert {n: c for n, c in manifest_of(out).counts.items() if n.startswith("role:")} == {
        "role:source": 3, "role:mask": 2,
    }  # fmt: skip
    left = b"".join(tree(out).values())
    assert all(image not in left for image in (TARGETS[3], *SOURCES[3]))
    assert not wdsprep.verify(out).findings
    (tmp_path / "out/receipts/000000.json").unlink()
    wdsprep.repair(out, yes=True)
    packed(source, out, *roles, optional_role="mask")
    assert [reject["code"] for reject in rejects_of(out)] == ["removed"]
    assert len(samples_of(out)) == 3


def test_tables_have_columns_of_roles_that_conditions_may_name(tmp_path: Path) -> None:
    source, roles = folders(tmp_path)
    out = packed(source, tmp_path / "out", *roles, optional_role="mask")
    wdsprep.select(out, tmp_path / "wide", where="source_width >= 51 and mask_width is None")
    assert [sample["txt"] for sample in samples_of(tmp_path / "wide")] == ["edit 2"]
    wdsprep.select(out, tmp_path / "two", where="source_1_width == 64 or source_width == 50")
    assert [sample["txt"] for sample in samples_of(tmp_path / "two")] == ["edit 0", "edit 3"]
    assert manifest_of(tmp_path / "wide").counts["role:source"] == 1
    assert "role:mask" not in manifest_of(tmp_path / "wide").counts
    assert samples_of(tmp_path / "two")[1]["source_1.jpg"] == SOURCES[3][1]
    assert manifest_of(tmp_path / "two").settings["roles"] == ["source", "mask"]
    assert not wdsprep.verify(tmp_path / "two").findings
    table = next(out.glob("*/*.parquet"))
    table.unlink()
    assert wdsprep.verify(out).findings
    wdsprep.repair(out, yes=True)
    check_dataset(out)


def test_exports_have_the_targets_and_image_folders_all_images(tmp_path: Path) -> None:
    source, roles = folders(tmp_path)
    out = packed(source, tmp_path / "out", *roles, optional_role="mask")
    for to in ("mds", "parquet", "webshart", "wids"):
        wdsprep.export(out, tmp_path / to, to=to)
    index = json.loads((tmp_path / "webshart/32/000000.json").read_bytes())["files"]
    images = [name for name in index if not name.endswith("json")]
    assert images == [f"{n:012}.jpg" for n in range(4)]
    rows = pq.read_table(tmp_path / "parquet").to_pylist()
    assert [row["image"]["bytes"] for row in rows] == TARGETS
    wdsprep.export(out, tmp_path / "folders", to="imagefolder")
    names = ["source=source_file_name", "more=source_1_file_name", "mask=mask_file_name"]
    again = packed(tmp_path / "folders", tmp_path / "again", *names, optional_role=["more", "mask"])
    assert not rejects_of(again)
    first, *_, last = samples_of(again)
    assert (first["jpg"], first["source.jpg"]) == (TARGETS[0], SOURCES[0][0])
    assert (last["more.jpg"], last["mask.png"]) == (SOURCES[3][1], MASKS[3])


def test_latents_are_those_of_the_targets_alone(tmp_path: Path) -> None:
    source, roles = folders(tmp_path)
    pairs = packed(source, tmp_path / "pairs", *roles, optional_role="mask")
    singles = packed(source, tmp_path / "singles")
    latents = [tmp_path / "latents", tmp_path / "of singles"]
    for images, out in zip((pairs, singles), latents, strict=True):
        encode_here(images, out, resolution=32)
    assert not left_out_among(manifest_of(latents[0]).counts)
    tars = [{n: data for n, data in tree(out).items() if ".tar" in n} for out in latents]
    assert tars[0] == tars[1]


def test_verify_finds_images_that_the_json_does_not_state(tmp_path: Path) -> None:
    source, roles = folders(tmp_path)
    out = packed(source, tmp_path / "out", *roles, optional_role="mask", compute_hash="sha256")
    (tar,) = out.glob("*/*.tar")
    whole = tar.read_bytes()
    for old, new, said in [
        ("3.source_1.jpg", "3.source_2.jpg", "source_2.jpg, mask.png, json, txt, not"),
        ("3.source_1.jpg", "3.source_1.npy", "source_1.npy, mask.png, json, txt, not"),
        ("3.mask.png", "3.mask.jpg", "mask.jpg, json, txt, not"),
        ('"source_1_width"', '"source_2_width"', "json states source_2_width, of an image"),
        ('"sha256"', '"net_width":5,"sha256"', "json states net_width, of an image that is not"),
        ('"mask_width":48', '"mask_width":49', "mask has another size than the image"),
    ]:
        tar.write_bytes(with_text(whole, old, new))
        findings = wdsprep.verify(out).findings
        assert any(said in str(finding) for finding in findings), (said, findings)
    tar.write_bytes(whole)
    many = {
        f"source_{number}.jpg": b"\xff\xd8\xff" for number in range(1, 99)
    }  # which is said in few words
    rewrite(out, "000000", lambda samples: [(key, many) for key, _ in samples])
    (finding,) = (f for f in wdsprep.verify(out).findings if f.name.endswith(".tar"))
    assert "its members are source_1.jpg" in finding.what
    assert len(finding.what) < 1_500
