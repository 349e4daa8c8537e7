"""Samples of several images are exported to the programs that read them, each by a reader of its
layout, and imported again; what a layout has no place for is said before anything is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import wdsprep
from tests.encoding.test_references import picture
from tests.encoding.test_roles import SIZES, mask, pack_images, targets
from tests.importing.test_import import floats_of
from tests.kit.edit_trainers import automodel_batches, musubi_batches
from tests.kit.encodes import encode_here, latents_of
from tests.kit.joined_sets import Images, caption, write_part
from tests.kit.latent_sets import field
from tests.kit.packs import tree
from tests.kit.sd_scripts import conditioning_images
from tests.packing.test_roles import SOURCES, folders
from tests.packing.test_roles import packed as packed_with_roles
from wdsprep.dataset.npy_arrays import Field
from wdsprep.dataset.shapes import Size
from wdsprep.errors import UsageError
from wdsprep.runners.job import JobListener

SHAPES = ((64, 64), (96, 48))
IMAGES = Images(sizes=(9, 8), shapes=SHAPES)
LATENT = field("latent", (4, 8, 8))
SOURCE = Field(name="source.npy", dtype="<f2", shape=(4, 8, 8), is_of_role=True)
MASK = Field(name="mask.npy", dtype="|u1", shape=(8, 8), is_of_role=True)
EMB = field("emb", (7, 16), "bfloat16", is_variable=True)
POOLED = field("pooled", (6,))
FIXED = field("emb", EMB.shape, EMB.dtype)
TEXT_MASK = field("emb_mask", (7,), "|u1")


def one_each(key: str) -> dict[str, Size]:
    """A reference of a size of its own."""
    return {"source": (96, 64) if int(key) % 3 else (64, 64)}


def several(key: str) -> dict[str, Size]:
    """One to three references, of which the second has another shape, and of some a mask."""
    count = 1 + int(key) % 3
    sizes = {f"source_{n}" if n else "source": ((64, 64), (128, 32))[n % 2] for n in range(count)}
    return sizes | ({"mask": IMAGES.shapes[IMAGES.shape(key)]} if int(key) % 2 else {})


def edits(
    out: Path | str,
    pipeline: str,
    fields: tuple[Field, ...] = (LATENT, SOURCE, EMB),
    **options: Any,
) -> str:
    """Latents with references, as `encode --roles target,source` makes them."""
    roles = [f.name.removesuffix(".npy").replace("latent", "target") for f in fields[:-1]]
    stated = {"pipeline": f"{pipeline}Pipeline", "roles": [r for r in roles if r != "pooled"]}
    options = {"images": IMAGES, "roles": one_each, "more": stated, **options}
    return write_part(str(out), fields=fields, **options)


def same(ours: Any, theirs: torch.Tensor) -> bool:
    return np.array_equal(ours.reshape(theirs.shape), theirs.float().numpy())


def check_import(source: str, cache: Path, to: str, names: set[str]) -> None:
    """Import a cache that was made of a dataset, and compare the two, which have these arrays."""
    out = cache.with_name("back")
    imported = wdsprep.import_(cache, out, resolution=64, shapes=SHAPES, text_length=7)
    assert (imported.samples, imported.manifest.rejects) == (17, {})
    assert not wdsprep.verify(str(out)).findings
    settings = imported.manifest.settings
    roles = ["target", "source"] if "source.npy" in names else None
    assert (settings.get("roles"), settings["source"]) == (roles, to)
    assert {line["name"] for line in settings["layout"]} == names
    theirs = latents_of(out)
    for key, ours in latents_of(Path(source)).items():
        facts, own = ours.pop("json"), theirs[key]
        said = own.pop("json")
        assert ours.pop("txt").strip() == own.pop("txt") == said["caption"]
        sides = {n: v for n, v in facts.items() if n.startswith("source_") or n == "crop"}
        assert sides == {n: v for n, v in said.items() if n in sides}
        if (mask := ours.get("emb_mask.npy")) is not None:  # the first tokens count, as many
            ours["emb_mask.npy"] = np.arange(len(mask)) < np.count_nonzero(mask)
            if "emb_mask.npy" not in names:  # text ends with them
                ours["emb.npy"] = ours["emb.npy"][ours.pop("emb_mask.npy")]
        assert ours.keys() == own.keys()
        assert all(np.array_equal(array, own[name]) for name, array in ours.items())


# --- musubi-tuner
@pytest.mark.parametrize(
    ("pipeline", "short", "fields", "roles", "texts"),
    [
        ("QwenImageEditPlus", "qie", (LATENT, SOURCE, EMB), several, {"vl_embed": "emb"}),
        ("Flux2Klein", "f2k4b", (LATENT, SOURCE, FIXED), several, {"ctx_vec": "emb"}),
        (
            *("FluxKontext", "fk", (LATENT, SOURCE, POOLED, FIXED), one_each),
            {"t5_vec": "emb", "clip_l_pooler": "pooled"},
        ),
        ("ZImage", "zi", (LATENT, TEXT_MASK, FIXED), lambda _: {}, {"llm_embed": "emb"}),
    ],
)
def test_musubi_reads_latents_references_and_text(
    pipeline: str, short: str, fields: Any, roles: Any, texts: dict[str, str], tmp_path: Path
) -> None:
    """In batches of one shape and one number of references; text ends where its mask does."""
    more = {"pipeline": f"{pipeline}Pipeline", "roles": ["target", "source"]}
    source = edits(tmp_path / "in", pipeline, fields, roles=roles, more=more)
    done = wdsprep.export(source, tmp_path / "out", to="musubi")
    assert (done.samples, done.index) == (17, ("dataset.toml",))
    samples, keys = floats_of(source), []
    for batch_keys, batch in musubi_batches(tmp_path / "out", short):
        keys += batch_keys
        controls = [name for name in batch if name.startswith("latents_control")]
        assert batch["latents"].ndim == (5 if short == "qie" else 4)
        for number, key in enumerate(batch_keys):
            ours = samples[key]
            assert same(ours["latent.npy"], batch["latents"][number])
            mask = ours.get("emb_mask.npy")
            for name, role in texts.items():
                length = None if mask is None else np.count_nonzero(mask)
                assert same(ours[f"{role}.npy"][:length], batch[name][number])
            references = [name for name in ours if name.startswith("source")]
            for control, name in zip(controls, references, strict=True):
                place = "" if short == "fk" else f"_{references.index(name)}"
                assert control == f"latents_control{place}"
                assert same(ours[name], batch[control][number])
    assert sorted(keys) == sorted(samples)
    (te_file,) = (tmp_path / "out").glob(f"*/000000000003_{short}_te.safetensors")
    with safe_open(te_file, "pt") as file:
        assert file.metadata()["caption1"] == caption("000000000003", "")
    check_import(source, tmp_path / "out", "musubi", {f.name for f in fields} - {TEXT_MASK.name})


# --- NeMo Automodel
@pytest.mark.parametrize("texts", [(EMB,), (TEXT_MASK, FIXED)])
def test_automodel_reads_references_and_text(texts: tuple[Field, ...], tmp_path: Path) -> None:
    fields = (LATENT, SOURCE, *texts)
    more = {"pipeline": "QwenImageEditPlusPipeline", "roles": ["target", "source"]}
    source = edits(tmp_path / "in", "", fields, roles=several, more=more)
    done = wdsprep.export(source, tmp_path / "out", to="automodel")
    assert (done.samples, done.index) == (17, ("metadata.json",))
    samples, keys = floats_of(source), []
    for batch_keys, batch in automodel_batches(tmp_path / "out"):
        keys += batch_keys
        for number, key in enumerate(batch_keys):
            ours = samples[key]
            assert same(ours["latent.npy"], batch["image_latents"][number])
            references = [data for name, data in ours.items() if name.startswith("source")]
            for mine, theirs in zip(references, batch["context_latents"], strict=True):
                assert same(mine, theirs[number])
            emb = ours["emb.npy"]
            mask = ours.get("emb_mask.npy", np.ones(len(emb)))
            assert batch["lengths"][number] == np.count_nonzero(mask)
            assert same(emb, batch["text_embeddings"][number][: len(emb)])
    assert sorted(keys) == sorted(samples)
    check_import(source, tmp_path / "out", "automodel", {field.name for field in fields})


# --- sd-scripts, and folders of images
def test_folders_have_the_images_of_a_role_by_the_names_of_targets(tmp_path: Path) -> None:
    """As sd-scripts takes conditioning images, and musubi-tuner those to be edited: with latents
    of the targets, and without."""
    source, (from_folder, _) = folders(tmp_path)
    images = packed_with_roles(source, tmp_path / "images", from_folder)
    encode_here(images, tmp_path / "latents", resolution=32)
    wdsprep.export(tmp_path / "latents", tmp_path / "kohya", to="kohya", join=images)
    wdsprep.export(images, tmp_path / "folders", to="imagefolder")
    for out in (tmp_path / "kohya", tmp_path / "folders"):
        (folder,) = out.glob("1_*")
        beside = conditioning_images(folder, folder / "source")
        kept = [beside[key].read_bytes() for key in sorted(beside)]
        assert kept == [images_of_role[0] for images_of_role in SOURCES]
        (second,) = (folder / "source_1").iterdir()
        assert second.read_bytes() == SOURCES[3][1]


def test_sd_scripts_finds_masks_beside_latents(tmp_path: Path) -> None:
    """From 0 to 1 for each cell; all of an image counts that has no mask."""
    masks = [None if n == 2 else mask(n, size) for n, size in enumerate(SIZES)]
    images = pack_images(tmp_path, {"target": targets(), "mask": masks}, "mask")
    encode_here(images, tmp_path / "latents", roles="target,mask")
    wdsprep.export(tmp_path / "latents", tmp_path / "out", to="kohya", join=images)
    files = sorted((tmp_path / "out").glob("*/*.npz"))
    samples = latents_of(tmp_path / "latents")
    for (key, sample), file in zip(sorted(samples.items()), files, strict=True):
        ours = sample.get("mask.npy", np.full((8, 8), 255)) / 255
        assert np.allclose(np.load(file)["alpha_mask"], ours)
        assert file.name.startswith(key)
    assert sum("mask.npy" not in sample for sample in samples.values()) == 1


# --- from pairs to what a trainer reads
@pytest.mark.system
@pytest.mark.usefixtures("small_references")
def test_pairs_that_were_encoded_are_read(family: Callable[[str], Path], tmp_path: Path) -> None:
    """By a pipeline of random weights, whose text depends on the image to be edited."""
    sources = [picture(size[::-1], 10 + n) for n, size in enumerate(SIZES)]
    images = pack_images(tmp_path, {"target": targets(), "source": sources})
    model = str(family("QwenImageEditPlus"))
    shapes = [(64, 64), (96, 48)]
    encode_here(images, tmp_path / "latents", model=model, roles="target,source", shapes=shapes)
    samples = floats_of(tmp_path / "latents")
    for to in ("musubi", "automodel"):
        wdsprep.export(tmp_path / "latents", out := tmp_path / to, to=to)
        read = musubi_batches(out, "qie") if to == "musubi" else automodel_batches(out)
        seen = []
        for keys, batch in read:
            seen += keys
            for number, key in enumerate(keys):
                target = batch["latents" if to == "musubi" else "image_latents"][number]
                assert same(samples[key]["latent.npy"], target)
                references = batch.get("context_latents") or [batch["latents_control_0"]]
                assert same(samples[key]["source.npy"], references[0][number])
        assert len(seen) == len(SIZES)


# --- what all have in common
@pytest.mark.parametrize("to", ["musubi", "automodel"])
def test_references_that_were_encoded_alone_make_the_same_caches(to: str, tmp_path: Path) -> None:
    source = edits(tmp_path / "in", "QwenImageEditPlus", roles=several)
    wdsprep.export(source, tmp_path / "out", to=to)
    plain = {"pipeline": "QwenImageEditPlusPipeline"}
    parts = [
        edits(tmp_path / "targets", "", (LATENT, EMB), more=plain, roles=lambda _: {}),
        edits(tmp_path / "sources", "", (SOURCE,), more={"roles": ["source"]}, roles=several),
    ]
    wdsprep.export(parts[0], tmp_path / "joined", to=to, join=parts[1])
    whole, joined = tree(tmp_path / "out"), tree(tmp_path / "joined")
    assert whole.keys() == joined.keys()
    assert all(data == joined[name] for name, data in whole.items() if name[0] != ".")


@pytest.mark.parametrize(
    ("to", "workers"), [("musubi", 2), pytest.param("automodel", 1, marks=pytest.mark.system)]
)
def test_workers_make_the_same_caches(
    to: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = edits(tmp_path / "in", "QwenImageEditPlus", roles=several)
    wdsprep.export(source, tmp_path / "here", to=to)
    monkeypatch.setattr("wdsprep.runners.make_runner.HERE_NBYTES", 0)
    wdsprep.export(source, tmp_path / "there", to=to, workers=workers, runner="local")
    assert tree(tmp_path / "there") == tree(tmp_path / "here")


def test_masks_that_a_layout_has_no_place_for_are_named_first(tmp_path: Path) -> None:
    source = edits(tmp_path / "in", "QwenImageEdit", (LATENT, SOURCE, MASK, EMB), roles=several)
    lines: list[str] = []
    listener = JobListener(on_message=lines.append)
    wdsprep.export(source, tmp_path / "out", to="musubi", listener=listener)
    assert lines[0].endswith("those in mask are left behind")


def test_samples_without_a_reference_are_named(tmp_path: Path) -> None:
    def some(key: str) -> dict[str, Size]:
        return one_each(key) if int(key) else {}

    for to, pipeline in (("automodel", "QwenImageEdit"), ("musubi", "FluxKontext")):
        fields = (LATENT, SOURCE, POOLED, EMB)
        source = edits(tmp_path / f"in-{to}", pipeline, fields, roles=some)
        with pytest.raises(UsageError, match=r"000000000000 has (no|0) reference"):
            wdsprep.export(source, tmp_path / f"out-{to}", to=to)
