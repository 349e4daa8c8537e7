"""Images in roles become arrays beside the target's: references, control images and masks."""

import io
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageOps

import wdsprep
from tests.encoding.test_references import FAMILIES, QWEN_21, SEVERAL, by_pipeline, picture
from tests.kit.encodes import encode_here, latents_of
from tests.kit.families.reference import whole_pipeline
from tests.kit.packs import manifest_of, packing_here, tree, with_text, write_files
from wdsprep.dataset.samples import is_mask
from wdsprep.errors import NotFoundError, UsageError

Family = Callable[[str], Path]
pytestmark = pytest.mark.usefixtures("small_references")
SIZES = ((96, 64), (70, 90), (64, 64), (120, 70), (66, 64))
CAPTIONS = ("make it red", "", "a dog by the sea", "two cats", "snow")


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def mask(number: int, size: tuple[int, int]) -> Image.Image:
    return Image.frombytes("L", size, random.Random(number).randbytes(size[0] * size[1]))


def scaled(size: tuple[int, int], share: float) -> tuple[int, int]:
    return round(size[0] * share), round(size[1] * share)


Images = Mapping[str, Iterable[Image.Image | list[Image.Image] | None]]


def pack_images(root: Path, images: Images, *optional: str) -> Path:
    """Pack samples whose images in each role, `target` among them, are these, as PNG.

    A list has several images in a role."""
    files: dict[str, bytes | str] = {}
    for role, pictures in images.items():
        for number, image in enumerate(pictures):
            if isinstance(image, list):
                files |= {f"{role}/{number}_{n}.png": png(part) for n, part in enumerate(image)}
            elif image is not None:
                files[f"{role}/{number}.png"] = png(image)
    for number, caption in enumerate(CAPTIONS):
        files[f"target/{number}.txt"] = caption
    write_files(root / "in", files)
    roles = [f"{role}={root}/in/{role}" for role in images if role != "target"]
    with packing_here():
        wdsprep.pack(
            root / "in/target", root / "images", role=roles, optional_role=optional, workers=1,
            buckets=(64,), samples_per_shard=3,
        )  # fmt: skip
    return root / "images"


def targets() -> list[Image.Image]:
    return [picture(size, number) for number, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five samples with a target, a source of its ratio, and of all but one a mask."""
    sources = [picture(scaled(size, 1.5), 10 + n) for n, size in enumerate(SIZES)]
    masks = [None if n == 2 else mask(n, size) for n, size in enumerate(SIZES)]
    images = {"target": targets(), "source": sources, "mask": masks}
    return pack_images(tmp_path_factory.mktemp("pairs"), images, "mask")


def test_two_roles_in_one_pass_are_what_each_is_alone(pairs: Path, tmp_path: Path) -> None:
    both = encode_here(pairs, tmp_path / "both", roles="target,source,mask")
    assert both.samples == 5
    settings = manifest_of(tmp_path / "both").settings
    assert settings["roles"] == ["target", "source", "mask"]
    assert settings["role_sizes"] == {"source": "aligned", "mask": "latent"}
    encode_here(pairs, tmp_path / "targets")
    encode_here(pairs, tmp_path / "sources", roles="source", text="none")
    encode_here(pairs, tmp_path / "again", roles=("target", "source", "mask"))
    assert tree(tmp_path / "again") == tree(tmp_path / "both")
    alone = {name: latents_of(tmp_path / name) for name in ("both", "targets", "sources")}
    for key, sample in alone["both"].items():
        facts = sample["json"]
        assert (facts["source_width"], facts["source_height"]) == (64, 64)
        names = ["latent.npy", "source.npy", *(["mask.npy"] if "mask.npy" in sample else [])]
        assert [*sample] == [*names, "emb.npy", "json", "txt"]
        for name, array in alone["targets"][key].items():
            if name.endswith("npy"):
                assert np.array_equal(sample[name], array)
        source = alone["sources"][key]["source.npy"]
        assert np.array_equal(sample["source.npy"], source)
        assert source.dtype == np.float16
        assert source.shape == sample["latent.npy"].shape
    assert not any("latent.npy" in sample for sample in alone["sources"].values())
    rows = pq.read_table(min((tmp_path / "both").glob("*/*.parquet"))).to_pydict()
    assert rows["source_width"] == [64, 64, 64]
    assert rows["mask_width"] == [64, 64, None]


def test_verify_and_repair_know_arrays_of_roles(pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "all"
    options: dict[str, Any] = {"roles": "target,source,mask", "shapes": [(64, 64), (80, 48)]}
    encode_here(pairs, out, **options)
    assert not wdsprep.verify(out).findings
    whole = tree(out)
    changes = (
        ('"source_width":64', '"source_width":80', "source has another size than the target"),
        ('"mask_width"', '"mask_1_width"', "json states mask_1_width, of an image that is not"),
        (".mask.npy", ".mask_1.npy", "mask_1.npy, emb.npy, json, txt, not latent.npy"),
        (".source.npy", ".control.npy", "its members are latent.npy, control.npy"),
    )
    tar = next(out.glob("*/*.tar"))
    data = tar.read_bytes()
    for old, new, why in changes:  # the last one stays
        tar.write_bytes(with_text(data, old, new))
        findings = wdsprep.verify(out).findings
        assert any(why in str(finding) for finding in findings), (why, findings)
    wdsprep.repair(out, yes=True)
    encode_here(pairs, out, **options)
    assert tree(out) == whole
    assert not wdsprep.verify(out).findings


def mean_levels(image: Image.Image, fit: dict[str, Any], cell: int) -> np.ndarray:
    """The mean level of a mask in each cell of a crop: pixels by their shares of its area."""
    left, top, right, bottom = fit["crop"]

    def shares(start: int, end: int, scaled: int, whole: int) -> np.ndarray:
        """How much of each cell each pixel of the mask is, along a side."""
        edges, pixels = np.arange(start, end + 1, cell) * whole / scaled, np.arange(whole)
        first, last = edges[:-1, None], edges[1:, None]
        parts = (np.minimum(last, pixels + 1) - np.maximum(first, pixels)).clip(0)
        return parts / (last - first)

    rows = shares(top, bottom, fit["scaled_height"], image.height)
    columns = shares(left, right, fit["scaled_width"], image.width)
    return rows @ np.asarray(image) @ columns.T


@pytest.mark.parametrize(("rule", "cell"), [("latent", 8), ("full", 1)])
def test_a_mask_is_the_mean_over_areas_of_what_its_target_was_cut_to(
    rule: str, cell: int, pairs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options: dict[str, Any] = {"roles": "target,mask", "role_size": f"mask={rule}"}
    encode_here(pairs, out, shapes=[(64, 64), (80, 48)], text="none", **options)
    stored = {sample["txt"]: sample for sample in latents_of(out).values()}
    for number, size in enumerate(SIZES):
        sample = stored[CAPTIONS[number]]
        if number == 2:
            assert "mask.npy" not in sample
            continue
        wanted = mean_levels(mask(number, size), sample["json"], cell)
        assert sample["mask.npy"].dtype == np.uint8
        assert sample["mask.npy"].shape == wanted.shape
        if rule == "latent":
            assert sample["mask.npy"].shape == sample["latent.npy"].shape[1:]
        assert np.abs(sample["mask.npy"] - wanted).max() <= 0.5 + 1e-6


def test_a_control_image_is_kept_as_the_pixels_of_the_crop(pairs: Path, tmp_path: Path) -> None:
    encode_here(pairs, tmp_path / "out", roles=["source"], role_size=["source=pixels"])
    encode_here(pairs, tmp_path / "latents", roles=["source"])
    kept = [sample["source.npy"] for sample in latents_of(tmp_path / "out").values()]
    for pixels, sample in zip(kept, latents_of(tmp_path / "latents").values(), strict=True):
        assert (pixels.shape, pixels.dtype) == ((3, 64, 64), np.uint8)
        assert sample["source.npy"].shape == (4, 8, 8)
    assert not wdsprep.verify(tmp_path / "out").findings


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiny", {"role_size": ("source=nearest:16,2",), "shapes": [(64, 64), (80, 48)]}),
        *(
            pytest.param(name, options, marks=pytest.mark.system)
            for name, options in (
                ("tiny", {"roles": "source,mask"}),
                ("tiny", {"latents": "moments", "role_size": ("source=pixels", "mask=full")}),
                ("Flux2Klein", {}),
            )
        ),
    ],
)
def test_flips_are_the_latents_of_mirrored_images_in_all_roles(
    name: str, options: dict[str, Any], family: Family, tmp_path: Path
) -> None:
    """Latents are those of a dataset of mirrored images, at equal bits; masks are kept once."""
    model, roles = name if name == "tiny" else str(family(name)), "target,source"
    both = []
    for turned in (lambda image: image, ImageOps.mirror):
        root = tmp_path / str(len(both))
        if name != "tiny":
            both.append(edits(root, 2, turned)[0])
            continue
        roles = "target,source,mask"
        sources = [[turned(picture(scaled(size, 1.5), 9))] for size in SIZES]
        sources[0].append(turned(picture(scaled(SIZES[0], 2), 11)))
        masks = [turned(mask(number, size)) for number, size in enumerate(SIZES)]
        images = {"target": [*map(turned, targets())], "source": sources, "mask": masks}
        both.append(pack_images(root, images))
    how = {"roles": roles, "latents": "mean", "text": "none", "model": model, **options}
    out = tmp_path / "out"
    encode_here(both[0], out, flip=True, **how)
    encode_here(both[0], tmp_path / "plain", **how)
    encode_here(both[1], tmp_path / "mirrored", **how)
    assert not wdsprep.verify(out).findings
    plain, mirrored = (latents_of(tmp_path / name) for name in ("plain", "mirrored"))
    compared = 0
    for key, sample in latents_of(out).items():
        arrays = [n.removesuffix(".npy") for n in plain[key] if n.endswith(".npy")]
        names = [n for n in sample if n.endswith(".npy")]
        kept_once = {n for n in arrays if is_mask(n) or sample[f"{n}.npy"].dtype == np.uint8}
        assert names == [
            f"{n}{end}.npy" for n in arrays for end in ("", "_flipped")[: 1 + (n not in kept_once)]
        ]
        for array in arrays:
            assert np.array_equal(sample[f"{array}.npy"], plain[key][f"{array}.npy"])
            if array in kept_once:
                turned_here = sample[f"{array}.npy"][..., ::-1]
            else:
                turned_here = sample[f"{array}_flipped.npy"]
                assert not np.array_equal(turned_here, sample[f"{array}.npy"])
            wanted = mirrored[key][f"{array}.npy"]
            if is_mask(array):  # of a mean half way between two levels a sum decides
                assert np.abs(turned_here.astype(int) - wanted).max() <= 1
            else:
                assert np.array_equal(turned_here, wanted), array
            compared += 1
    assert compared >= 2 * len(plain)


def test_a_list_of_shapes_cuts_references_by_their_own_ratio(tmp_path: Path) -> None:
    sources = [picture(size, 3) for size in ((128, 64), (64, 100), (80, 80), (300, 200), (64, 70))]
    images = pack_images(tmp_path, {"target": targets(), "source": sources})
    encode_here(
        images, tmp_path / "out", roles="target,source", role_size="source=nearest:16,2",
        shapes=[(64, 64), (80, 48)],
    )  # fmt: skip
    found = {
        sample["txt"]: (sample["json"]["source_width"], sample["json"]["source_height"])
        for sample in latents_of(tmp_path / "out").values()
    }
    assert [found[text] for text in CAPTIONS] == [(80, 48), (48, 80), (64, 64), (80, 48), (64, 64)]
    settings = manifest_of(tmp_path / "out").settings
    assert settings["role_sizes"] == {"source": "shapes"}
    assert [64, 64] in settings["role_shapes"]["source"]
    for sample in latents_of(tmp_path / "out").values():
        width, height = found[sample["txt"]]
        assert sample["source.npy"].shape == (4, height // 8, width // 8)
    assert not wdsprep.verify(tmp_path / "out").findings


def rejects_in(out: Path) -> dict[str, str]:
    """The detail of each reject by its code."""
    lines = b"".join(path.read_bytes() for path in sorted(out.glob("rejects/*/*.jsonl")))
    rejects = [json.loads(line) for line in lines.splitlines()]
    return {reject["code"]: reject["detail"] for reject in rejects}


def test_what_cannot_be_cut_is_a_reject_that_names_the_image(tmp_path: Path) -> None:
    sources: list[Image.Image | None] = [picture(size, 9) for size in SIZES]
    sources[0], sources[1], sources[2] = picture((64, 96)), picture((35, 45)), None
    images = pack_images(tmp_path, {"target": targets(), "source": sources}, "source")
    tar = next(images.glob("*/*1.tar"))
    assert encode_here(images, tmp_path / "out", roles="target,source").samples == 3
    assert rejects_in(tmp_path / "out") == {
        "aspect_ratio": "source: 64 x 96, and its target 96 x 64",
        "too_small": "source: 35 x 45",
    }
    names = [[*sample] for sample in latents_of(tmp_path / "out").values()]
    assert [name for name in names if "source.npy" not in name] == [
        ["latent.npy", "emb.npy", "json", "txt"]
    ]
    assert encode_here(images, tmp_path / "alone", roles="source").samples == 2
    assert rejects_in(tmp_path / "alone")["no_role"] == "source"
    assert tar.is_file()


def test_tars_of_others_have_images_in_roles_as_members(pairs: Path, tmp_path: Path) -> None:
    """No manifest says which roles are optional: a sample that lacks one is a reject."""
    tars = tmp_path / "tars"
    tars.mkdir()
    for tar in pairs.glob("*/*.tar"):
        shutil.copy(tar, tars / tar.name)
    out = tmp_path / "out"
    assert encode_here(tars, out, roles="target,source,mask").samples == 4
    assert rejects_in(out) == {"no_role": "mask"}
    encode_here(pairs, tmp_path / "known", roles="target,source,mask")
    known = {sample["txt"]: sample for sample in latents_of(tmp_path / "known").values()}
    for sample in latents_of(out).values():
        for name in ("latent.npy", "source.npy", "mask.npy"):
            assert np.array_equal(sample[name], known[sample["txt"]][name])
    assert encode_here(tars, out, roles="target,source,mask").samples == 0  # it is all there


EMPTY = {"latents": "none", "empty": "per-sample"}
SOURCE, PIXELS = {"roles": "source"}, "source=pixels"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roles": "target,control"}, "in the role control, only in target, source"),
        ({"roles": "source,source"}, "--roles source,source: give each role once, by its name"),
        ({"roles": "Source"}, "--roles Source: give each role once, by its name"),
        ({"roles": "mask", "flip": True}, "--flip is for latents, and --roles mask makes none"),
        ({"role_size": "source=aligned"}, "--role-size source: give one rule for each"),
        (
            {"roles": "mask", "role_size": "mask=aligned"},
            "--role-size mask=aligned: a mask is cut where its target is, so give latent or full",
        ),
        ({**SOURCE, "role_size": [PIXELS, "source=aligned"]}, "--role-size source: give one rule"),
        ({**SOURCE, "role_size": "source"}, "--role-size source: write ROLE=RULE"),
        ({**SOURCE, "role_size": "source=near"}, "=near cannot be read (No such file or dir"),
        ({**SOURCE, "role_size": "source=nearest:7,2"}, "nearest:7,2 lacks 64x64"),
        (
            {**SOURCE, "role_size": "source=nearest:4,2"},
            "--role-size source: 44 of 44x88 is not a multiple of 8, as tiny needs",
        ),
        (
            {**SOURCE, "role_size": "source=pipeline"},
            "--role-size source=pipeline: tiny takes no reference images: give source=aligned",
        ),
        ({**SOURCE, "latents": "none"}, "--roles with --latents none is for text that depends on"),
        # an empty caption for each sample is for text that depends on images
        (EMPTY, "--empty with --latents none is for text that depends on images, and that of tiny"),
        ({"empty": "per-sample"}, "--empty makes text datasets: give --latents none"),
        ({**EMPTY, "caption_name": "x"}, "name their captions: leave --caption-name out"),
        ({**EMPTY, "caption_field": "x"}, "--caption-field and --empty per-sample both choose c"),
        ({"latents": "none", "caption_name": "empty"}, "captions cannot be named 'empty': give"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    options: dict[str, Any], message: str, pairs: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        encode_here(pairs, tmp_path / "out", **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_dataset_of_single_images_has_no_roles(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no images in the role source, only in target: give"):
        encode_here(images, tmp_path / "out", roles="target,source")
    for name, roles in (("none", ""), ("out", "target")):
        encode_here(images, tmp_path / name, roles=roles, limit=1)
        assert "roles" not in manifest_of(tmp_path / name).settings


SOURCES = ((300, 200), (162, 640), (300, 200), (90, 128))


def edits(
    root: Path, count: int = 1, turned: Callable[[Image.Image], Image.Image] = lambda image: image
) -> tuple[Path, dict[str, list[Image.Image]]]:
    """Pairs for a pipeline; the first has so many references: two sources, and one in `more`.

    These come by caption, too."""
    sources = [[turned(picture(size, 20 + n))] for n, size in enumerate(SOURCES)]
    more = [turned(picture((128, 96), 30))] if count > 2 else []
    if count > 1:
        sources[0].append(turned(picture((100, 140), 40)))
    images: dict[str, list[Image.Image | list[Image.Image] | None]] = {
        "target": [turned(picture((64, 80), number)) for number in range(len(SOURCES))],
        "source": [*sources],
    }
    if more:
        images["more"] = [*more, *[None] * (len(SOURCES) - 1)]
    by_caption = dict(zip(CAPTIONS, [sources[0] + more, *sources[1:]], strict=False))
    return pack_images(root, images, *["more"] * len(more)), by_caption


def as_floats(array: Any) -> torch.Tensor:
    """An array as it is stored, of which NumPy has only the bits if it is bfloat16."""
    tensor = torch.from_numpy(array.astype("<i2") if array.dtype == np.uint16 else array)
    return (tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor).float()


@pytest.mark.parametrize("name", FAMILIES)
def test_references_and_text_are_what_the_pipeline_makes_of_that_sample(
    name: str, family: Family, tmp_path: Path
) -> None:
    count = 3 if name == "Flux2Klein" else 2 if name in SEVERAL else 1
    images, by_caption = edits(tmp_path, count)
    out, roles = tmp_path / "out", "target,source,more" if count > 2 else "target,source"
    assert encode_here(images, out, roles=roles, model=str(family(name))).samples == len(SOURCES)
    settings = manifest_of(out).settings
    assert {*settings["role_sizes"].values()} == {"pipeline"}
    takes_images = not name.startswith("Flux")
    assert ("text_roles" in settings) is takes_images
    assert any(out.glob("empty.*")) is not takes_images
    assert not wdsprep.verify(out).findings
    if takes_images:
        with pytest.raises(NotFoundError, match="on the images of each sample, join the text"):
            wdsprep.load(str(out), global_batch=1, drop_text=0.5)
    for sample in latents_of(out).values():
        pictures = by_caption[sample["txt"]]
        outputs, latents = by_pipeline(family(name), pictures, sample["txt"])
        names = ("source.npy", "source_1.npy", "more.npy")
        stored = [sample[name] for name in names if name in sample]
        for array, wanted in zip(stored, latents, strict=True):
            wanted = wanted.reshape(wanted.shape[1], *wanted.shape[-2:])
            most = 5e-4 * max(1.0, float(wanted.abs().max()))
            assert (as_floats(array) - wanted).abs().max() <= most
        embeddings = outputs[0][0]
        kept = as_floats(sample["emb.npy"])
        assert kept.shape == embeddings.shape
        is_bfloat16 = sample["emb.npy"].dtype == np.uint16
        assert torch.equal(kept, embeddings.to(torch.bfloat16 if is_bfloat16 else torch.half))


@pytest.mark.system
def test_a_dropped_text_is_the_empty_caption_with_the_images_of_that_sample(
    family: Family, tmp_path: Path
) -> None:
    images, by_caption = edits(tmp_path)
    folder = family("QwenImageEditPlus")
    model = {"model": str(folder), "roles": "target,source"}
    encode_here(images, tmp_path / "edits", **model)
    out = tmp_path / "empty"
    encode_here(images, out, latents="none", empty="per-sample", **{**model, "roles": "source"})
    assert manifest_of(out).settings["caption_name"] == "empty"
    assert not wdsprep.verify(out).findings
    assert {sample["txt"] for sample in latents_of(out).values()} == {""}
    names = ("latent", "emb", "emb_mask", "txt", "key")
    options: dict[str, Any] = {"join": str(out), "global_batch": 1, "epochs": 6, "fields": names}
    whole = {batch["key"][0]: batch for batch in wdsprep.load(tmp_path / "edits", **options)}
    dropped = set()
    loader = wdsprep.load(tmp_path / "edits", drop_text=0.5, **options)
    batches = [*itertools.islice(loader, 7)]
    again = wdsprep.load(tmp_path / "edits", drop_text=0.5, **options)
    again.load_state_dict(loader.state_dict())
    for batch in (*batches, *again):
        ((key,), (text,)) = batch["key"], batch["txt"]
        caption = whole[key]["txt"][0]
        assert torch.equal(batch["latent"], whole[key]["latent"])
        if text == caption != "":
            assert torch.equal(batch["emb"], whole[key]["emb"])
            continue
        outputs, _ = by_pipeline(folder, by_caption[caption], "")
        embeddings = outputs[0][0]
        kept = batch["emb"][0][batch["emb_mask"][0].bool()]
        assert torch.equal(kept, embeddings.to(kept.dtype))
        dropped.add(key)
    assert len(dropped) == len(SOURCES)


@pytest.mark.system
def test_text_of_images_is_the_same_alone_apart_and_beside_latents(
    family: Family, tmp_path: Path
) -> None:
    images, _ = edits(tmp_path)
    model = {"model": str(family("QwenImageEditPlus")), "roles": "target,source"}
    encode_here(images, tmp_path / "whole", **model)
    encode_here(images, tmp_path / "bare", text_out=tmp_path / "apart", **model)
    encode_here(images, tmp_path / "alone", latents="none", **{**model, "roles": "source"})
    entire = latents_of(tmp_path / "whole")
    for name in ("apart", "alone"):
        assert manifest_of(tmp_path / name).settings["text_roles"] == ["source"]
        assert not wdsprep.verify(tmp_path / name).findings
        for key, sample in latents_of(tmp_path / name).items():
            assert [*sample] == ["emb.npy", "json", "txt"]
            assert np.array_equal(sample["emb.npy"], entire[key]["emb.npy"])
    for key, sample in latents_of(tmp_path / "bare").items():
        assert [*sample] == ["latent.npy", "source.npy", "json", "txt"]
        assert np.array_equal(sample["source.npy"], entire[key]["source.npy"])
    # There is no text of mirror images:
    small = {"role_size": "source=nearest:16,2", "text": "none"}
    encode_here(images, tmp_path / "turned", flip=True, **small, **model)
    load = {"global_batch": 1, "flip": 0.5, "join": tmp_path / "alone"}
    with pytest.raises(UsageError, match="none of their mirror images: leave out flip"):
        wdsprep.load(tmp_path / "turned", **load)
    wdsprep.load(tmp_path / "turned", fields=("latent", "source"), **load)


def test_references_that_a_pipeline_refuses_are_rejects(family: Family, tmp_path: Path) -> None:
    images = pack_images(
        tmp_path, {"target": targets(), "source": [picture((60, 200)), *[picture((128, 96))] * 4]}
    )
    out, model = tmp_path / "out", str(family("Flux2Klein"))
    assert encode_here(images, out, roles="source", text="none", model=model).samples == 4
    assert "source: Flux2KleinPipeline cannot take" in rejects_in(out)["unsupported"]


@pytest.mark.system
def test_an_edit_model_without_references_says_how_to_give_them(
    pairs: Path, family: Family, tmp_path: Path
) -> None:
    model = str(family("QwenImageEditPlus"))
    with pytest.raises(UsageError, match="wants image too, as by --roles target,source"):
        encode_here(pairs, tmp_path / "out", model=model)
    with pytest.raises(UsageError, match="none of their mirror images: leave --flip out, or give"):
        encode_here(pairs, tmp_path / "out", model=model, roles="target,source", flip=True)


@pytest.mark.system
def test_sizes_by_other_rules_leave_text_as_the_pipeline_makes_it(
    family: Family, tmp_path: Path
) -> None:
    images, by_caption = edits(tmp_path, 3)
    folder = family("QwenImageEditPlus")
    rules = ("source=nearest:16,2", "more=pixels")
    how = {"roles": "target,source,more", "model": str(folder), "role_size": rules}
    encode_here(images, tmp_path / "out", **how)
    settings = manifest_of(tmp_path / "out").settings
    assert settings["role_sizes"] == {"source": "shapes", "more": "pixels"}
    assert settings["text_roles"] == ["source"]
    assert not wdsprep.verify(tmp_path / "out").findings
    shapes = set()
    for sample in latents_of(tmp_path / "out").values():
        pictures = by_caption[sample["txt"]]
        shown = pictures[:-1] if "more.npy" in sample else pictures
        outputs, _ = by_pipeline(folder, shown, sample["txt"])
        embeddings = outputs[0][0]
        kept = as_floats(sample["emb.npy"])
        assert torch.equal(kept, embeddings.to(torch.bfloat16))
        shapes |= {
            sample[f"{n}.npy"].shape[1:] for n in ("source", "source_1") if f"{n}.npy" in sample
        }
    assert len(shapes) > 1
    assert max(map(max, shapes)) <= 12


@pytest.mark.parametrize("name", [QWEN_21])
def test_a_pipeline_that_may_take_images_makes_text_without_them(
    name: str, images: Path, family: Family, tmp_path: Path
) -> None:
    encode_here(images, tmp_path / "out", model=str(family(name)), limit=6)
    assert "text_roles" not in manifest_of(tmp_path / "out").settings
    assert any((tmp_path / "out").glob("empty.*"))
    pipeline = whole_pipeline(family(name))
    for sample in latents_of(tmp_path / "out").values():
        embeddings, mask, *_ = pipeline.encode_prompt(sample["txt"], device=torch.device("cpu"))
        assert mask is None or bool(mask.all())
        kept = as_floats(sample["emb.npy"])
        assert torch.equal(kept, embeddings[0].to(torch.bfloat16))
