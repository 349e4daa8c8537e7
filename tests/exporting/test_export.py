"""An export goes on where it was killed, says what does not fit, and carries no damage on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import wdsprep
from tests.exporting.test_roles import IMAGES, edits
from tests.importing.test_import import floats_of
from tests.kit.encodes import encode_here, packed, pictures
from tests.kit.joined_sets import LATENTS, TEXT, VARIED, Images, caption, write_part
from tests.kit.latent_sets import array_of, field, npy
from tests.kit.packs import Loud, jpeg, pack, tree, write_files
from tests.kit.shape_sets import SHAPES
from wdsprep.cli import cli
from wdsprep.dataset.npy_arrays import denormalise, patchify
from wdsprep.errors import FingerprintError, TarError, UsageError
from wdsprep.exporting import LAYOUTS
from wdsprep.exporting.tars import path_between

FLUX = (*LATENTS, *TEXT)


def latents(url: Path | str, sizes: tuple[int, ...] = (5, 4, 6), **options: Any) -> str:
    options = {"images": Images(sizes=sizes), "fields": FLUX, **options}
    return write_part(str(url), **options)


def rows_of(root: Path) -> dict[str, dict[str, Any]]:
    tables = [pq.read_table(path) for path in sorted(root.rglob("*.parquet"))]
    return {row["key"]: row for table in tables for row in table.to_pylist()}


def test_what_has_changed_is_done_again_and_what_is_gone_leaves(tmp_path: Path) -> None:
    source, out = tmp_path / "latents", tmp_path / "out"
    latents(source)
    wdsprep.export(source, out, to="primus")
    before = tree(out)
    (out / "256/000001.tar").write_bytes(b"cut")
    assert wdsprep.export(source, out, to="primus").units_before == 2
    assert tree(out) == before
    latents(source, sizes=(5, 3, 6, 2))
    appended = wdsprep.export(source, out, to="primus")
    assert (appended.units_before, appended.units, appended.samples) == (1, 4, 16)
    latents(source, sizes=(5, 3))
    cut = wdsprep.export(source, out, to="primus")
    assert (cut.units_before, cut.units, cut.samples) == (2, 2, 8)
    wdsprep.export(source, tmp_path / "fresh", to="primus")
    assert tree(out) == tree(tmp_path / "fresh")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Images, and latents of them."""
    root = tmp_path_factory.mktemp("pair")
    images = packed(pictures(root / "in", range(4)), root / "images")
    encode_here(images, root / "latents")
    return images, root / "latents"


@pytest.mark.parametrize("to", sorted({*LAYOUTS} - {"energon"}))
def test_each_damaged_file_is_written_anew(
    to: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Though it has its size; `energon` writes its few files each time."""
    images, made = pair
    source: Path | str = {"kohya": made}.get(to, images)
    if to == "primus":
        source = latents(tmp_path / "latents")
    if to in ("musubi", "automodel"):
        few = Images(sizes=(3, 2), shapes=IMAGES.shapes)
        source = edits(tmp_path / "latents", "QwenImageEditPlus", images=few)
    out, joined = tmp_path / "out", [images] if to == "kohya" else []
    wdsprep.export(source, out, to=to, join=joined)
    before = tree(out)
    files = [name for name in before if not name.startswith(".wdsprep")]
    assert len(files) > 1
    for name in files:
        data = bytearray(before[name])
        data[len(data) // 2] ^= 1
        (out / name).write_bytes(data)
        again = wdsprep.export(source, out, to=to, join=joined)
        assert tree(out) == before
        assert again.units - again.units_before <= 1


def test_damage_ends_the_export_and_leaves_no_index(tmp_path: Path) -> None:
    source, out = tmp_path / "latents", tmp_path / "out"
    latents(source)
    wdsprep.export(source, out, to="primus")
    (out / ".wdsprep/256/000001.json").unlink()
    tar = source / "256/000001.tar"
    data = bytearray(tar.read_bytes())
    data[700] ^= 1
    tar.write_bytes(data)
    with pytest.raises(TarError, match=r"256/000001\.tar is damaged.*wdsprep repair"):
        wdsprep.export(source, out, to="primus")
    assert not (out / ".nv-meta/.info.json").exists()
    assert not (out / ".wdsprep/256/000001.json").exists()


# --- what is joined
def test_joined_text_takes_the_place_of_text_and_of_the_caption(tmp_path: Path) -> None:
    """By position: of each dataset other samples are missing, and one has shapes."""
    images = Images(sizes=(9, 8), shapes=SHAPES)
    first = latents(tmp_path / "latents", images=images, rejects={0: (2,)})
    text = latents(
        tmp_path / "text", images=images, fields=VARIED, rejects={0: (0, 3), 1: (7,)}, tag="long"
    )
    done = wdsprep.export(first, tmp_path / "out", to="parquet", join=text)
    rows = rows_of(tmp_path / "out")
    assert (done.samples, done.left_out) == (len(rows), 3) == (13, 3)
    assert {*rows} == {images.key(0, n) for n in (1, 4, 5, 6, 7, 8)} | {
        images.key(1, n) for n in range(7)
    }
    for key, row in rows.items():
        assert row["caption"] == caption(key, "long")
        assert row["emb"] == npy(array_of(f"{key}long", VARIED[1]))
    assert (tmp_path / "out/empty.emb.npy").read_bytes() == (
        tmp_path / "text/empty.emb.npy"
    ).read_bytes()


def test_what_is_made_of_other_images_is_not_joined(tmp_path: Path) -> None:
    first = latents(tmp_path / "latents")
    other = latents(tmp_path / "text", images=Images(sizes=(5, 4, 6), version="2"), fields=TEXT)
    with pytest.raises(UsageError, match="made of different images"):
        wdsprep.export(first, tmp_path / "out", to="parquet", join=[other])
    assert not (tmp_path / "out").exists()


# --- what does not fit
SQUARE = (field("latent", (4, 8, 8)), field("emb", (7, 16)))
SDXL, KONTEXT = ({"pipeline": f"{n}Pipeline"} for n in ("StableDiffusionXL", "FluxKontext"))


@pytest.mark.parametrize(
    ("to", "make", "said"),
    [
        ("primus", {"fields": SQUARE}, r"has no pooled\.npy, which --to primus needs"),
        ("primus", {"fields": TEXT}, "is a dataset of text, and --to primus takes latents"),
        ("primus", {"images": Images(shapes=SHAPES)}, "latents of several shapes"),
        ("webshart", {}, "is a dataset of latents, and --to webshart takes images"),
        ("wids", {"fields": TEXT}, "takes images or latents"),
        ("wids", {"more": {"latents": "moments"}}, "--latents sample or mean"),
        ("imagefolder", {}, "is a dataset of latents, and --to imagefolder takes images"),
        ("kohya", {"fields": TEXT}, "is a dataset of text, and --to kohya takes latents"),
        ("kohya", {}, "has no images, .* --join the images that it was made of"),
        ("mds", {"more": {"latents": "given"}}, "imported latents of unknown scale"),
        ("musubi", {"fields": SQUARE[:1], "more": SDXL}, "takes latents of FluxKontext, Flux2,"),
        ("musubi", {"fields": SQUARE, "more": KONTEXT}, r"has no pooled\.npy"),
        ("musubi", {"more": KONTEXT}, "has 0 roles of references, .* one for flux_kontext"),
        ("automodel", {"fields": SQUARE}, "has no references.*--roles target,source"),
        ("automodel", {"fields": SQUARE[:1]}, r"has no emb\.npy"),
    ],
)
def test_what_a_layout_does_not_take_is_one_line(
    to: str, make: dict[str, Any], said: str, tmp_path: Path
) -> None:
    source = latents(tmp_path / "latents", **make)
    with pytest.raises(UsageError, match=said) as caught:
        wdsprep.export(source, tmp_path / "out", to=to)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_images_are_joined_to_latents_of_theirs_that_sd_scripts_finds(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """And by layouts alone that have a place for them."""
    images, made = pair
    others = packed(pictures(tmp_path / "other", range(1, 5)), tmp_path / "others")
    encode_here(images, tmp_path / "moments", latents="moments")
    encode_here(images, tmp_path / "shaped", shapes=((64, 64), (64, 48)))
    moments = "has moments, or latents of an unknown.*--latents sample or mean"
    for source, to, joined, said in (
        (made, "kohya", others, "made of different images"),
        (made, "parquet", images, "is a dataset of images"),
        (made, "kohya", [images, images], "is a dataset of images"),
        (tmp_path / "moments", "kohya", images, moments),
        (tmp_path / "shaped", "kohya", images, "has the shape 64x48, for which sd-scripts has no"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            wdsprep.export(source, tmp_path / "out", to=to, join=joined)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_has_a_line_for_each_caption_and_no_empty_file(tmp_path: Path) -> None:
    """sd-scripts fails on an empty file, and takes further lines for other captions."""
    files = {f"{name}.jpg": jpeg(n, (64, 64)) for n, name in enumerate("abc")}
    texts = {"a.txt": "one\ntwo", "b.txt": ""}
    pack(write_files(tmp_path / "in", {**files, **texts}), tmp_path / "images")
    done = wdsprep.export(tmp_path / "images", tmp_path / "out", to="imagefolder")
    assert (done.samples, done.files) == (3, 7)
    captions = [path.read_text() for path in sorted((tmp_path / "out").glob("*/*.txt"))]
    assert captions == ["one two\n", "\n", "\n"]
    (metadata_file,) = (tmp_path / "out").glob("*/metadata.jsonl")
    rows = [json.loads(line) for line in metadata_file.read_text().splitlines()]
    assert [row["text"] for row in rows] == ["one two", "", ""]


def test_a_place_is_of_one_export(tmp_path: Path) -> None:
    source = latents(tmp_path / "latents")
    wdsprep.export(source, tmp_path / "out", to="parquet")
    with pytest.raises(FingerprintError, match="layout, to differ"):
        wdsprep.export(source, tmp_path / "out", to="primus")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("precious")
    for out, said in (
        (tmp_path / "mine", r"holds other files \(notes\.txt\)"),
        (tmp_path / "latents/out", "lies in the source"),
        ("", "needs a folder to write to"),
    ):
        with pytest.raises(UsageError, match=said):
            wdsprep.export(source, out, to="parquet")
    with pytest.raises(UsageError, match="give one of energon, primus"):
        wdsprep.export(source, tmp_path / "other", to="lmdb")


def test_arrow_copies_no_images_of_the_rows_that_are_written_together(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffers grow step by step, and are kept: a worker would take 200 MB more."""
    usual_write, allocated = pq.ParquetWriter.write_table, list[int]()

    def write_table(writer: pq.ParquetWriter, table: pa.Table) -> None:
        allocated.append(pa.total_allocated_bytes() - before)
        assert table.nbytes > 10_000
        usual_write(writer, table)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", write_table)
    monkeypatch.setattr("wdsprep.runners.make_runner.make_runner", lambda *_: Loud(1))
    before = pa.total_allocated_bytes()
    wdsprep.export(pair[0], tmp_path / "out", to="parquet")
    assert allocated
    assert max(allocated) < 10_000


def test_webp_is_no_image_for_wids(tmp_path: Path) -> None:
    source = pack(write_files(tmp_path / "in", {"a.webp": jpeg(1, kind="WEBP")}), tmp_path / "im")
    with pytest.raises(UsageError, match=r"is a webp, which wids does not decode.*--reencode"):
        wdsprep.export(source, tmp_path / "out", to="wids")
    assert not (tmp_path / "out/wids-meta.json").exists()


# --- the rest
def test_the_command_says_what_is_there_and_how_it_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = latents(tmp_path / "latents"), str(tmp_path / "out")

    def said(*words: str) -> str:
        cli.main(["export", source, out, *words], prog_name="wdsprep", standalone_mode=False)
        return capsys.readouterr().out

    first = said("--to", "parquet")
    assert first.startswith(f"{out}: parquet: 15 samples in 3 shards, 3 files, ")
    assert first.endswith(f"next: datasets.load_dataset({out!r})\n")
    assert "3 shards exported before" in said("--to", "parquet")
    facts = json.loads(said("--to", "parquet", "--json"))
    assert (facts["samples"], facts["units"], facts["left_out"]) == (15, 3, 0)


@pytest.mark.parametrize("patch", [1, 2])
def test_latents_become_what_the_vae_gave(patch: int) -> None:
    raw = np.random.default_rng(0).standard_normal((4, 6, 8)).astype("f4")
    count = 4 * patch**2
    for shift, scale in (
        (0.1, 0.3),
        ([0.1 * n for n in range(count)], [1.0 + n for n in range(count)]),
    ):
        folded = patchify(raw, patch)
        stored = ((folded.T - np.asarray(shift)) * np.asarray(scale)).T
        settings = {"patch": patch, "scale": scale, "shift": shift}
        assert np.allclose(denormalise(stored, settings), raw, atol=1e-5)


@pytest.mark.parametrize(
    ("out", "dataset", "way"),
    [
        ("/a/b", "/a/b", ""),
        ("/a/meta", "/a/b", "../b/"),
        ("s3://bucket/x/meta", "s3://bucket/y", "../../y/"),
        ("/a", "hf://datasets/me/b", None),
        ("/a", "s3://bucket/y", None),
        ("s3://other/y", "s3://bucket/y", None),
    ],
)
def test_energon_is_told_of_tars_by_their_way_from_its_metadata(
    out: str, dataset: str, way: str | None
) -> None:
    if way is None:
        with pytest.raises(UsageError, match="none leads from"):
            path_between(out, dataset)
    else:
        assert path_between(out, dataset) == way


VAE = {"scale": 0.3611, "shift": 0.1159}
MIXED = (*LATENTS, *VARIED)


def there_and_back(root: Path, to: str, fields: Any, kind: str, **options: Any) -> list[Any]:
    """Each sample as it was and as it comes back."""
    images, more = Images(sizes=(5, 4)), {**VAE, "latents": kind}
    ours = write_part(str(root / "ours"), images, fields, more=more)
    wdsprep.export(ours, root / "out", to=to)
    back = wdsprep.import_(root / "out", root / "back", resolution=256, **options)
    assert back.samples == 9
    assert {Path(shard.name).parent.name for shard in back.manifest.shards} == {"256"}
    assert not wdsprep.verify(str(root / "back")).findings
    before, after = floats_of(ours), floats_of(root / "back")
    has_captions = (to, kind, fields) != ("parquet", "moments", FLUX)  # as MLPerf's have not
    assert all(after[key]["txt"] == s["txt"].strip() * has_captions for key, s in before.items())
    return [(sample, after[key]) for key, sample in before.items()]


@pytest.mark.parametrize(
    ("to", "fields", "kind", "options", "exact", "near"),
    [
        ("mds", MIXED, "moments", VAE, ("pooled", "emb"), ("latent",)),
        ("parquet", FLUX, "sample", {}, ("latent", "emb", "pooled"), ()),
        ("parquet", FLUX, "moments", {}, (), ("latent", "emb", "pooled")),
        ("primus", FLUX, "moments", VAE, (), ("latent", "emb", "pooled")),
        ("primus", FLUX, "sample", {}, (), ("latent", "emb", "pooled")),
        ("primus", MIXED, "sample", {}, ("emb",), ()),
        ("wids", FLUX, "sample", {}, ("latent",), ()),
    ],
)
def test_import_brings_back_what_was_exported(
    to: str, fields: Any, kind: str, options: Any, exact: Any, near: Any, tmp_path: Path
) -> None:
    """To the bit, or rounded to bfloat16 or float16. Primus pads embeddings with zeros."""
    for ours, back in there_and_back(tmp_path, to, fields, kind, **options):
        for name in exact:
            before, after = ours[f"{name}.npy"], back[f"{name}.npy"]
            assert np.array_equal(after[: len(before)], before)
            assert not after[len(before) :].any()
        for name in near:
            before, after = ours[f"{name}.npy"], back[f"{name}.npy"]
            assert np.allclose(before, after, rtol=2**-8, atol=4e-3)


def test_mds_brings_back_a_latent_as_the_vae_gave_it(tmp_path: Path) -> None:
    """And goes out once more, to what it was."""
    for ours, back in there_and_back(tmp_path, "mds", LATENTS, "sample", **VAE):
        mean, logvar = np.split(back["latent.npy"], 2)
        assert np.allclose((mean - VAE["shift"]) * VAE["scale"], ours["latent.npy"], atol=4e-3)
        assert logvar.max() < -40
    again = wdsprep.export(tmp_path / "back", tmp_path / "again", to="mds", tower="t")
    assert again.samples == 9
