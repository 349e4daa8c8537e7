"""Caches with files of their own for each sample become datasets of latents in roles: those that
the trainers write, and those that somebody broke. Those that `export` writes are imported in
`exporting/test_roles`."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import wdsprep
from tests.exporting.test_roles import EMB, LATENT, SHAPES, SOURCE, edits
from tests.importing.test_strangers import Code
from tests.kit.edit_trainers import musubi_batches
from tests.kit.encodes import latents_of
from tests.kit.packs import tars, tree, write_files
from wdsprep.errors import SourceError, UsageError

CONTROL = "latents_control_0_1x8x8_bfloat16"


def import_here(cache: Path, out: Path, **options: Any) -> Any:
    """Import a cache, and let `verify` and the loader read the result."""
    imported = wdsprep.import_(cache, out, resolution=64, **options)
    assert not wdsprep.verify(str(out)).findings
    loaded = [
        key for batch in wdsprep.load(str(out), global_batch=1, epochs=1) for key in batch["key"]
    ]
    assert sorted(loaded) == sorted(latents_of(out))
    return imported


def rejects_of(out: Path) -> dict[str, tuple[str, str]]:
    """The file that each reject names, with its code and what is wrong."""
    texts = (path.read_text() for path in (out / "rejects").rglob("*.jsonl"))
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return {line["source"]: (line["code"], line["detail"]) for line in lines}


def test_references_in_several_roles_become_those_of_one(tmp_path: Path) -> None:
    """A cache does not say the roles of its references."""
    fields = (LATENT, SOURCE, replace(SOURCE, name="style.npy"), EMB)
    sizes = {"source": (64, 64), "style": (96, 64)}
    source = edits(tmp_path / "in", "QwenImageEdit", fields, roles=lambda _: sizes)
    wdsprep.export(source, tmp_path / "cache", to="musubi")
    import_here(tmp_path / "cache", tmp_path / "out", shapes=SHAPES, text_length=7)
    theirs = latents_of(tmp_path / "out")
    for key, sample in latents_of(Path(source)).items():
        assert np.array_equal(sample["source.npy"], theirs[key]["source.npy"])
        assert np.array_equal(sample["style.npy"], theirs[key]["source_1.npy"])


# --- what the trainers write
def tensor(number: float, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float(number)).to(dtype)


def write_musubi(
    folder: Path,
    name: str,
    latents: dict[str, torch.Tensor],
    *,
    arch: str = "qie",
    size: str = "0640x0480",
    text: dict[str, torch.Tensor] | None = None,
) -> Path:
    """What `save_latent_cache_...` and `save_text_encoder_output_cache_...` write of an image of
    any size."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"architecture": arch, "format_version": "1.0.1"}
    width, height = size.split("x")
    path = folder / f"{name}_{size}_{arch}.safetensors"
    save_file(latents, path, {**facts, "width": str(int(width)), "height": str(int(height))})
    text = {"varlen_vl_embed_bfloat16": tensor(3, 5, 16)} if text is None else text
    if text:
        caption = {"caption1": "007" if name == "a.7" else f"make {name} blue"}
        save_file(text, folder / f"{name}_{arch}_te.safetensors", {**facts, **caption})
    return path


def qie(number: int, references: int = 1) -> dict[str, torch.Tensor]:
    controls = {
        f"latents_control_{n}_1x8x{8 + 4 * n}_bfloat16": tensor(number + n, 16, 1, 8, 8 + 4 * n)
        for n in range(references)
    }
    return {"latents_1x8x8_bfloat16": tensor(number, 16, 1, 8, 8), **controls}


def test_caches_of_musubi_are_read_as_its_scripts_write_them(tmp_path: Path) -> None:
    """With frames behind channels, and the size of the image that came in the name of its file."""
    for number in range(12):
        write_musubi(tmp_path / "c", f"a.{number}", qie(number, number % 3))
    imported = import_here(tmp_path / "c", tmp_path / "out")
    assert imported.manifest.settings["pipeline"] == "QwenImageEditPlusPipeline"
    assert imported.manifest.settings["layout"][0]["dtype"] == "bfloat16"
    samples = latents_of(tmp_path / "out")
    assert samples.keys() == {f"a_{number}" for number in range(12)}
    sample = samples["a_5"]
    assert sample["source_1.npy"].shape == (16, 8, 12)
    assert sample["json"]["source_1_width"] == 96
    assert sample["json"]["meta"]["width"] == 640
    assert (sample["txt"], samples["a_7"]["txt"]) == ("make a.5 blue", "007")
    assert [*samples["a_3"]] == ["latent.npy", "emb.npy", "json", "txt"]
    batches = musubi_batches(tmp_path / "back", "qie")
    wdsprep.export(tmp_path / "out", tmp_path / "back", to="musubi")
    assert sum(len(keys) for keys, _ in batches) == 12


@pytest.mark.parametrize(
    ("arch", "latent", "control", "text"),
    [
        (
            *("fk", ("1x4x4", (16, 4, 4)), ("_1x6x4", (16, 6, 4))),
            {"t5_vec": (6, 8), "clip_l_pooler": (4,)},
        ),
        ("f2k9b", ("4x4", (128, 4, 4)), ("_0_6x4", (128, 6, 4)), {"ctx_vec": (6, 8)}),
    ],
)
def test_each_family_of_musubi_has_its_names_and_files_may_hold_more(
    arch: str, latent: Any, control: Any, text: Any, tmp_path: Path
) -> None:
    for number in range(2):
        texts = {f"{n}_bfloat16": tensor(number, *shape) for n, shape in text.items()}
        texts["scale_float8"] = torch.ones(4).to(torch.float8_e4m3fn)
        arrays = {
            f"{name}{sides}_float32": tensor(number, *shape).float()
            for name, (sides, shape) in (("latents_", latent), ("latents_control", control))
        }
        write_musubi(tmp_path / "c", f"{number}", arrays, arch=arch, text=texts)
    assert import_here(tmp_path / "c", tmp_path / "out").samples == 2
    for key, sample in latents_of(tmp_path / "out").items():
        assert all((sample[f"{name}.npy"] == int(key)).all() for name in ("latent", "source"))
        assert ("pooled.npy" in sample) == (arch == "fk")


def write_automodel(place: Path, samples: dict[str, Any], lists: int = 1) -> Path:
    """What `QwenImageEditCacheEncoder` writes: files of samples, and lists of them."""
    (place / "samples").mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for name, saved in samples.items():
        torch.save(saved, place / f"samples/{name}.pt")
        rows.append({"cache_file": f"samples/{name}.pt", "row_index": len(rows)})
    names = [f"metadata_shard_{number:04d}.json" for number in range(lists)]
    for number, name in enumerate(names):
        (place / name).write_text(json.dumps(rows[number::lists]))
    (place / "metadata.json").write_text(json.dumps({"shards": names, "row_limit": len(rows)}))
    return place


def saved_edit(number: int, *, references: int = 1, tokens: int = 6, **more: Any) -> dict[str, Any]:
    mask = torch.ones(6, dtype=torch.long)
    mask[tokens:] = 0
    return {
        "target_latent": tensor(number, 16, 8, 8),
        "context_latents": [tensor(number + n, 16, 8, 8 + 4 * n) for n in range(references)],
        "prompt_embeddings": tensor(number, 6, 8),
        "prompt_attention_mask": mask,
        "conditioning_tensors": {},
        "metadata": {
            "original_ids": {"id": f"x{number}", "row_index": number},
            "manifest_metadata": {"dataset_name": "edits", "deep": [[]]},
            "compound_bucket_signature": {"target": [16, 8, 8], "contexts": [[16, 8, 8]]},
            "text_token_length": tokens,
        },
        **more,
    }


def test_caches_of_automodel_are_read_as_it_writes_them(tmp_path: Path) -> None:
    """Masks are of long numbers, and it keeps no captions."""
    saved = {f"sample_{n:08d}": saved_edit(n, references=1 + n % 2, tokens=3 + n) for n in range(4)}
    imported = import_here(write_automodel(tmp_path / "c", saved, lists=2), tmp_path / "out")
    assert (imported.samples, len(imported.manifest.receipts)) == (4, 2)
    for key, sample in latents_of(tmp_path / "out").items():
        number = int(key.removeprefix("sample_"))
        assert sample["emb_mask.npy"].tolist() == [1] * (3 + number) + [0] * (3 - number)
        assert ("source_1.npy" in sample) == bool(number % 2)
        assert sample["json"]["meta"] == {
            "dataset_name": "edits",
            "id": f"x{number}",
            "row_index": number,
            "text_token_length": 3 + number,
        }


def test_text_of_several_lengths_ends_where_its_mask_does(tmp_path: Path) -> None:
    saved = {f"s{n}": saved_edit(n, tokens=4) for n in range(3)}
    mask = torch.ones(4, dtype=torch.long)
    saved["s3"] = saved_edit(3, prompt_embeddings=tensor(3, 4, 8), prompt_attention_mask=mask)
    saved["s4"] = saved_edit(4)
    saved["s4"]["prompt_attention_mask"][0] = 0
    cache, out = write_automodel(tmp_path / "c", saved), tmp_path / "out"
    with pytest.raises(UsageError, match="is 4 to 6 tokens long: give --text-length"):
        wdsprep.import_(cache, out, resolution=64)
    import_here(cache, out, text_length=6)
    assert {len(sample["emb.npy"]) for sample in latents_of(out).values()} == {4}
    assert rejects_of(out)["samples/s4.pt"][0] == "other_shape"


def test_a_cache_of_automodel_may_be_of_images_alone(tmp_path: Path) -> None:
    """Its lists of these have whole paths."""
    saved = {"latent": tensor(1, 4, 8, 8), "prompt_embeds": tensor(2, 5, 8), "prompt": "a cat"}
    cache = write_automodel(tmp_path / "c", {"a": saved, "b": saved})
    rows = [{"cache_file": f"{cache}/samples/{name}.pt"} for name in "ab"]
    (cache / "metadata_shard_0000.json").write_text(json.dumps(rows))
    imported = import_here(cache, tmp_path / "out")
    assert "roles" not in imported.manifest.settings
    assert latents_of(tmp_path / "out")["b"]["txt"] == "a cat"


# --- what has no plain answer
def test_units_stay_when_folders_are_added_and_each_has_a_number_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.importing.sample_files.UNIT_SAMPLES", 2)
    for name in "abc":
        write_musubi(tmp_path / "c/m", name, qie(1))
    import_here(tmp_path / "c", tmp_path / "out")
    write_musubi(tmp_path / "c/l", "a", qie(2))
    again = wdsprep.import_(tmp_path / "c", tmp_path / "out", resolution=64)
    assert (again.units_before, again.manifest.samples) == (2, 4)
    names = [name.removesuffix(".idx") for name in tars(tmp_path / "out")]
    assert {*names} == {"64/l/000000.tar", "64/m/000000.tar", "64/m/000001.tar"}


def test_text_that_only_later_samples_have_is_not_left_out(tmp_path: Path) -> None:
    for number in range(70):
        write_musubi(tmp_path / "c", f"{number:02d}", qie(number), text={} if number < 69 else None)
    with pytest.raises(SourceError, match=r"none of the first rows .* has no varlen_vl_embed"):
        wdsprep.import_(tmp_path / "c", tmp_path / "out", resolution=64)
    imported = wdsprep.import_(
        tmp_path / "c", tmp_path / "out", resolution=64, columns="latent=latents"
    )
    assert imported.samples == 70


@pytest.mark.parametrize("has_workers", [False, pytest.param(True, marks=pytest.mark.system)])
@pytest.mark.parametrize("of", ["musubi", "automodel"])
def test_workers_and_a_limit_make_the_same_bytes(
    of: str, has_workers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.importing.sample_files.UNIT_SAMPLES", 3)
    cache, out, there = (tmp_path / name for name in ("cache", "here", "there"))
    if of == "automodel":
        write_automodel(cache, {f"s{n}": saved_edit(n) for n in range(8)}, lists=3)
    for number in range(8 * (of == "musubi")):
        write_musubi(cache, f"{number}", qie(number, number % 3))
    assert import_here(cache, out, limit=4).manifest.samples == 4
    import_here(cache, out)
    if has_workers:
        monkeypatch.setattr("wdsprep.runners.make_runner.HERE_NBYTES", 0)
    count = 2 if of == "musubi" else 1
    wdsprep.import_(cache, there, resolution=64, workers=count, runner="local")
    assert tree(out) == tree(there)


def test_an_image_that_was_cached_in_two_sizes_is_two_samples(tmp_path: Path) -> None:
    for size in ("0640x0480", "0320x0320"):
        write_musubi(tmp_path / "c", "a", qie(int(size[1:4])), size=size)
    write_musubi(tmp_path / "c", "x.y", qie(1))
    write_musubi(tmp_path / "c", "x_y", qie(2))
    import_here(tmp_path / "c", tmp_path / "out")
    assert latents_of(tmp_path / "out").keys() == {"a_0640x0480", "a_0320x0320", "x_y"}
    ((source, (code, detail)),) = rejects_of(tmp_path / "out").items()
    assert (source, code) == ("x_y_0640x0480_qie.safetensors", "bad_key")
    assert detail.endswith("has the key x_y")


def test_references_after_samples_without_any_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.importing.import_plan.LOOKED_AT", 2)
    for number in range(3):
        write_musubi(tmp_path / "c", f"{number}", qie(number, number // 2))
    imported = import_here(tmp_path / "c", tmp_path / "out")
    assert imported.manifest.rejects == {"other_shape": 1}
    assert (
        "name all columns, as --columns latent=NAME,source"
        in rejects_of(tmp_path / "out")["2_0640x0480_qie.safetensors"][1]
    )
    columns = "latent=latents,source=latents_control,emb=varlen_vl_embed"
    imported = import_here(tmp_path / "c", tmp_path / "all", columns=columns)
    assert imported.manifest.settings["roles"] == ["target", "source"]
    assert "source.npy" in latents_of(tmp_path / "all")["2"]
    import_here(tmp_path / "c", tmp_path / "targets", columns="latent=latents")
    assert [*latents_of(tmp_path / "targets")["2"]] == ["latent.npy", "json", "txt"]


INDEX = '{"shards": ["m.json"]}'


@pytest.mark.parametrize(
    ("index", "samples", "said"),
    [
        (INDEX, "", "m.json is not there, as metadata.json says"),
        (INDEX, '[{"cache_file": "a', "m.json is no list of samples"),
        (INDEX, '[{"cache_file": "a"}, {"cache_file": "./a"}]', "m.json lists a file twice"),
        ('{"shards": []}', "", "lists no samples"),
    ],
)
def test_a_cache_that_cannot_be_taken_is_one_line(
    index: str, samples: str, said: str, tmp_path: Path
) -> None:
    write_musubi(tmp_path / "c", "a", qie(1))
    write_files(
        tmp_path / "c", {"metadata.json": index, **({"m.json": samples} if samples else {})}
    )
    with pytest.raises(SourceError, match=said) as caught:
        wdsprep.import_(tmp_path / "c", tmp_path / "out", resolution=64)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_one_of_two_architectures_is_chosen_by_a_pattern(tmp_path: Path) -> None:
    write_musubi(tmp_path / "c", "a", qie(1))
    write_musubi(tmp_path / "c", "b", qie(2), arch="qil")
    said = r"has caches of qi[le] and of qi[le]: give one, as '.*/\*_qi[le]\*.safetensors'"
    with pytest.raises(UsageError, match=said):
        wdsprep.import_(tmp_path / "c", tmp_path / "out", resolution=64)
    import_here(Path(f"{tmp_path}/c/*_qie*.safetensors"), tmp_path / "out")
    assert latents_of(tmp_path / "out").keys() == {"a"}


# --- what somebody broke
def with_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Change the header of a file, and keep the bytes of its tensors."""

    def rewrite(path: Path) -> None:
        data = path.read_bytes()
        (nbytes,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + nbytes])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + nbytes :])

    return rewrite


def put(name: str, **facts: Any) -> Callable[[Path], Any]:
    return with_header(lambda header: header[name].update(facts))


def stored(latents: dict[str, torch.Tensor]) -> Callable[[Path], Any]:
    return lambda path: save_file(latents, path)


def also(name: str, *shape: int, number: float = 1) -> Callable[[Path], Any]:
    return stored({**qie(1), name: tensor(number, *shape)})


LATENTS, UNREAD, SHAPE = "latents_1x8x8_bfloat16", "unreadable", "other_shape"
DEEP = struct.pack("<Q", 90_000) + b"[" * 90_000
nine_more = with_header(lambda header: header.update({f"{n}0": header[CONTROL] for n in range(9)}))
BROKEN_MUSUBI: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:-9]), UNREAD, "larger than its bytes"),
    "empty": (lambda p: p.write_bytes(b""), UNREAD, "is empty, or not there"),
    "a-huge-header": (lambda p: p.write_bytes(b"\xff" * 400), UNREAD, "longer than the file"),
    "deep": (lambda p: p.write_bytes(DEEP), UNREAD, "its header is invalid"),
    "negative-sides": (put(LATENTS, shape=[-16, 1, -8, 8]), UNREAD, "not a whole number"),
    "more-sides": (put(LATENTS, shape=[16, 2, 8, 8]), UNREAD, "cannot reshape array of size 1024"),
    "overlapping": (put(CONTROL, data_offsets=[0, 2048]), "", ""),
    "all-twice": (nine_more, UNREAD, "tensors overlap"),
    "no-texts": (put("__metadata__", a=[]), UNREAD, "other values than texts"),
    "another-kind": (put(LATENTS, dtype="F8_E4M3"), SHAPE, "F8_E4M3 is no dtype"),
    "no-latents": (stored({"x": tensor(1, 4)}), "no_array", "it has no latents"),
    "another-dtype": (stored({n: t.half() for n, t in qie(1).items()}), SHAPE, "latent.npy is <f2"),
    "other-channels": (also(CONTROL, 8, 1, 8, 8), SHAPE, "source.npy is bfloat16 (8, 8, 8)"),
    "frames": (stored({LATENTS: tensor(1, 16, 2, 8, 8)}), SHAPE, "(16, 2, 8, 8)"),
    "a-gap": (also(CONTROL.replace("0", "2"), 16, 1, 8, 8), "role_gap", "source_1 is missing"),
    "twice": (also("latents_1x8x8_float16", 16, 1, 8, 8), UNREAD, "has latents twice"),
    "infinite": (also(CONTROL, 16, 1, 8, 8, number=np.inf), "not_finite", "source.npy has values"),
    "no-text": (
        lambda p: p.with_name("no-text_qie_te.safetensors").unlink(),
        *("no_array", "it has no varlen_vl_embed"),
    ),
    "text-alone": (lambda p: p.unlink(), "no_array", "it has no latents"),
}
"""What is done to a file, the code of its reject, and a part of what that says."""


def test_a_broken_file_of_musubi_is_a_reject_that_names_it(tmp_path: Path) -> None:
    for name in ("0", "1", *BROKEN_MUSUBI):
        path = write_musubi(tmp_path / "c", name, qie(1))
        if name in BROKEN_MUSUBI:
            BROKEN_MUSUBI[name][0](path)
    import_here(tmp_path / "c", tmp_path / "out")
    check_rejects(tmp_path / "out", {name: row[1:] for name, row in BROKEN_MUSUBI.items()})


def check_rejects(out: Path, wanted: dict[str, tuple[str, str]]) -> None:
    """Every file that somebody broke is a reject with this code, or else a sample."""
    found = {Path(source).stem.partition("_")[0]: why for source, why in rejects_of(out).items()}
    assert {name: code for name, (code, _) in found.items()} == {
        name: code for name, (code, _) in wanted.items() if code
    }
    for name, (_, detail) in found.items():
        assert wanted[name][1] in detail
        assert len(detail) < 300
    assert latents_of(out).keys() == {"0", "1", *wanted} - found.keys()


REPEATED = [torch.zeros(1).expand(16, 800, 800)] * 3
"""Each asks for 40 MB, of a file of a few kB."""
MANY, TWOS = [tensor(1, 16, 1, 1)] * 200, torch.full((6,), 2)
BROKEN_AUTOMODEL: dict[str, tuple[Any, str, str]] = {
    "code": (saved_edit(1, metadata=Code()), UNREAD, "it could run code"),
    "a-list": ([tensor(1, 16, 8, 8)], UNREAD, "it is list, not a dict"),
    "no-target": ({"context_latents": []}, "no_array", "it has no target_latent"),
    "no-references": (saved_edit(1, references=0), "", ""),
    "nothing-for-references": (saved_edit(1, context_latents=None), UNREAD, "NoneType"),
    "words": (saved_edit(1, context_latents=["a"]), UNREAD, "it is str, not a tensor"),
    "odd-names": (saved_edit(1, metadata={1: 2, "n": 1 << 2000, "deep": {}}), "", ""),
    "expanded": (saved_edit(1, context_latents=REPEATED), UNREAD, "of which the file holds"),
    "many": (saved_edit(1, context_latents=MANY), UNREAD, "more than 100 images"),
    "another-mask": (saved_edit(1, prompt_attention_mask=TWOS), SHAPE, "other than 0 and 1"),
    "wide-text": (saved_edit(1, prompt_embeddings=tensor(1, 6, 9)), SHAPE, "emb.npy is"),
}


def test_a_broken_file_of_automodel_is_a_reject_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = {name: row[0] for name, row in BROKEN_AUTOMODEL.items()}
    cache = write_automodel(tmp_path / "c", {"0": saved_edit(0), "1": saved_edit(2), **saved})
    import_here(cache, tmp_path / "out")
    check_rejects(tmp_path / "out", {name: row[1:] for name, row in BROKEN_AUTOMODEL.items()})
    assert "this ran" not in capsys.readouterr().out


def test_a_file_that_is_not_in_the_cache_is_a_reject(tmp_path: Path) -> None:
    torch.save(saved_edit(1), tmp_path / "secret.pt")
    cache = write_automodel(tmp_path / "c", {"a": saved_edit(0), "c": saved_edit(2)})
    path, listed = cache / "metadata_shard_0000.json", ("samples/x.pt", "../secret.pt", "/etc/motd")
    rows = [*json.loads(path.read_text()), *({"cache_file": name} for name in listed)]
    path.write_text(json.dumps(rows))
    import_here(cache, tmp_path / "out")
    why = {name: ("unreadable", f"{name} is empty, or not there") for name in listed}
    assert rejects_of(tmp_path / "out") == why
