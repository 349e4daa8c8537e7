"""`score`: columns and embeddings of images, however the run goes, and columns of captions."""

import json
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import wdsprep
from tests.kit.encodes import Here, packed, pictures, samples_in
from tests.kit.packs import jpeg, pack, write_files
from tests.kit.scores import arrays_in, columns_in, pictures_in, score_here
from tests.kit.scoring_models import KINDS, LABELS, alone, small
from tools.tiny.drawings import draw
from wdsprep.cli import main
from wdsprep.cli.demo import KINDS as PICTURES
from wdsprep.errors import FingerprintError, UsageError
from wdsprep.scoring.languages import share_of_letters
from wdsprep.scoring.score import example_condition

CLOSE = 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_what_transformers_gives_of_that_image_alone(
    kind: str, scores: Path, images: Path, models: Path
) -> None:
    columns, there = columns_in(scores), pictures_in(images)
    assert columns.keys() == there.keys()
    kept = {f"{name}_image_emb.npy" for name in KINDS if name not in LABELS}
    assert all(members.keys() == kept for members in samples_in(scores).values())
    embeddings = arrays_in(scores, f"{kind}_image_emb") if kind not in LABELS else {}
    for key, (image, caption) in there.items():
        for name, wanted in alone(models / kind, image, caption).items():
            if name == "image_emb":
                assert np.abs(embeddings[key] - wanted.numpy()).max() < CLOSE
            else:
                assert abs(columns[key][f"{kind}_{name}"] - float(wanted)) < CLOSE


def test_a_head_gives_what_its_layer_makes_of_the_embedding(scores: Path, models: Path) -> None:
    from safetensors.numpy import load_file

    layer = load_file(models / "head.safetensors")
    embeddings = arrays_in(scores, "clip_image_emb")
    for key, facts in columns_in(scores).items():
        wanted = float(layer["weight"][0] @ embeddings[key] + layer["bias"][0])
        assert abs(facts["aesthetic"] - wanted) < CLOSE


def test_scores_of_a_role_are_those_of_its_images_as_targets(tmp_path: Path, models: Path) -> None:
    """In columns of other names than those of targets. A sample without one is a reject."""
    images: dict[str, bytes | str] = {f"in/{name}.jpg": jpeg(ord(name)) for name in "abcd"}
    images |= {f"in/{name}.txt": f"edit {name}" for name in "abcd"}
    images |= {f"in/{name}.source.png": jpeg(ord(name) + 9, kind="PNG") for name in "acd"}
    images |= {f"s/{name[3:].replace('.source', '')}": data for name, data in images.items()
               if name.endswith(("source.png", "a.txt", "c.txt", "d.txt"))}  # fmt: skip
    write_files(tmp_path, images)
    roles = ("--role", "source=.source", "--optional-role", "source", "--buckets", "32")
    pairs = pack(tmp_path / "in", tmp_path / "pairs", *roles)
    singles = pack(tmp_path / "s", tmp_path / "singles", "--buckets", "32")
    options: dict[str, Any] = {
        "model": [str(models / "clip"), f"v={models / 'vit'}"],
        "embedding": "fp32",
    }
    options |= {"head": f"good={models / 'head.safetensors'}", "label": f"{LABELS['vit'][0]}=cat"}
    score_here(singles, tmp_path / "wanted", **options)
    done = score_here(pairs, tmp_path / "scores", role="source", **options)
    assert done.manifest.rejects == {"no_image": 1}
    found, wanted = [columns_in(tmp_path / name) for name in ("scores", "wanted")]
    assert [*found] == [f"{number:012}" for number in (0, 2, 3)]
    for facts, own in zip(found.values(), wanted.values(), strict=True):
        assert {*facts} - {"key", "source"} == {
            "source_similarity", "source_good", "source_v_cat",
        }  # fmt: skip
        assert all(facts[f"source_{name}"] == own[name] for name in ("similarity", "good", "v_cat"))
    arrays = arrays_in(tmp_path / "scores", "source_image_emb").values()
    for array, own in zip(
        arrays, arrays_in(tmp_path / "wanted", "image_emb").values(), strict=True
    ):
        assert (array == own).all()
    score_here(pairs, tmp_path / "targets", **options)
    both = [str(tmp_path / name) for name in ("scores", "targets")]
    where = "source_similarity is not None and similarity is not None"
    selected = wdsprep.select(pairs, tmp_path / "selected", join=both, where=where)
    assert selected.outcomes[str(tmp_path / "selected")].manifest.samples == 3
    with pytest.raises(FingerprintError, match="role"):
        score_here(pairs, tmp_path / "scores", **options)


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("mask", "--role mask: .* has no such images, it has source"),
        ("source_0", "give the name of an image"),
        ("Source", "give the name of an image"),
    ],
)
def test_a_role_that_images_lack_is_refused(tmp_path: Path, role: str, said: str) -> None:
    files = {"a.jpg": jpeg(1), "a.source.jpg": jpeg(2)}
    roles = ("--role", "source=.source", "--buckets", "32")
    pairs = pack(write_files(tmp_path / "in", {**files}), tmp_path / "out", *roles)
    with pytest.raises(UsageError, match=said):
        score_here(pairs, tmp_path / "scores", role=role, language=True)
    with pytest.raises(UsageError, match=said):
        wdsprep.duplicates(pairs, role=role)


def test_columns_do_not_depend_on_companions_nor_on_which_models_are_in_the_pass(
    scores: Path, images: Path, models: Path, tmp_path: Path
) -> None:
    both, head = columns_in(scores), f"aesthetic={models / 'head.safetensors'}"
    for kind in ("clip", "vit"):
        score_here(images, tmp_path / kind, model=f"{kind}={models / kind}")
        for key, facts in columns_in(tmp_path / kind).items():
            assert facts == {name: both[key][name] for name in facts}
    given = {"model": f"clip={models / 'clip'}", "head": head}
    score_here(images, tmp_path / "ones", batch_size=1, **given)
    for key, facts in columns_in(tmp_path / "ones").items():
        for name in ("clip_similarity", "aesthetic"):
            assert abs(facts[name] - both[key][name]) < CLOSE


def test_a_tracker_is_told_of_the_workers_too(
    images: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, float]] = []
    tracker = "nowhere", lambda _at, figures: told.append(dict(figures)), lambda: None
    monkeypatch.setattr("wdsprep.runners.track.open_tensorboard", lambda *_: tracker)
    score_here(images, tmp_path / "out", model=str(models / "vit"), track="tensorboard")
    assert told[-1].items() >= {"done": 1, "workers": 1}.items()
    assert 0 < told[-1]["busy"] <= 1


def test_a_resume_with_other_weights_or_images_is_refused_in_words(
    images: Path, models: Path, tmp_path: Path
) -> None:
    out, vit = tmp_path / "scores", str(models / "vit")
    score_here(images, out, model=vit, limit=4)
    small("vit", tmp_path / "other", hidden_act="relu")
    with pytest.raises(FingerprintError, match=r"scores\.models: other.*wdsprep score"):
        score_here(images, out, model=str(tmp_path / "other"))
    with pytest.raises(FingerprintError, match=r"scores\.columns\.neutral: number, now none;"):
        score_here(images, out, model=str(models / "clip"))
    other = packed(pictures(tmp_path / "others", range(30, 45)), tmp_path / "other-images")
    again = r"changed or gone since .* was made .* wdsprep score --redo-changed does"
    with pytest.raises(FingerprintError, match=again):
        score_here(other, out, model=vit)


def test_images_of_every_kind_are_scored_as_they_were_packed(models: Path, tmp_path: Path) -> None:
    files = {
        f"{kind}{suffix}": encode(draw(kind, (160, 120)).image)
        for kind, (suffix, encode) in PICTURES.items()
    }
    images = packed(write_files(tmp_path / "in", dict(files)), tmp_path / "images")
    score_here(images, tmp_path / "scores", model=str(models / "vit"))
    columns, there = columns_in(tmp_path / "scores"), pictures_in(images)
    assert columns.keys() == there.keys()
    assert len(columns) == len(files)
    for key, (image, _) in there.items():
        wanted = alone(models / "vit", image)["nsfw"]
        assert abs(columns[key]["nsfw"] - float(wanted)) < CLOSE


def test_embeddings_are_kept_in_half_precision_if_asked(
    images: Path, models: Path, scores: Path, tmp_path: Path
) -> None:
    given = {"model": f"clip={models / 'clip'}", "embedding": "fp16"}
    score_here(images, tmp_path / "scores", **given)
    full = arrays_in(scores, "clip_image_emb")
    for key, half in arrays_in(tmp_path / "scores", "clip_image_emb").items():
        assert half.dtype == np.float16
        assert np.abs(half - full[key]).max() < 1e-3


def test_the_command_says_what_it_gives_and_a_condition_that_half_of_the_samples_meet(
    images: Path, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["score", str(images), str(tmp_path / "s"), "--model", str(models / "clip")]
    words += ["--head", f"aesthetic={models}/head.safetensors", "--device", "cpu"]
    with patch("wdsprep.encoding.run_plan.make_runner", lambda *_args, **_options: Here()):
        assert main(words) == 0
        out, err = capsys.readouterr()
        assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    columns = {"similarity": "number", "aesthetic": "number"}
    assert (said["columns"], said["samples"]) == (columns, 15)
    assert err.startswith("scoring with local processes: the CPU alone here")
    assert "CLIPImageProcessor (fast)" in err
    following = shlex.split(out.splitlines()[-1].removeprefix("next: wdsprep "))
    assert main([word.replace("OUT", str(tmp_path / "good")) for word in following]) == 0
    assert 4 <= len(pictures_in(tmp_path / "good")) <= 11


CAPTIONS = (
    "a dog on a beach",
    "ein Hund am Strand",
    "un chien sur la plage",
    "A  dog on a beach",
    "",
)


def test_share_of_letters_leaves_out_white_space() -> None:
    assert share_of_letters("ab 12") == 0.5
    assert share_of_letters("") == 0.0
    assert share_of_letters("雪 🐕") == 0.5


def test_without_the_library_a_line_says_how_to_get_it(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.scoring.languages.LIBRARY", "no-such-library")
    with pytest.raises(UsageError, match=r"pip install '\.\[language\]'"):
        score_here(images, tmp_path / "scores", language=True)


def test_languages_are_told_without_a_look_at_images(tmp_path: Path) -> None:
    pytest.importorskip("py3langid")
    files: dict[str, bytes | str] = {}
    for number, caption in enumerate(CAPTIONS):
        files |= {f"{number}.jpg": jpeg(number, (64, 64)), f"{number}.txt": caption}
    images = pack(write_files(tmp_path / "in", files), tmp_path / "images", "--buckets", "64")
    outcome = score_here(images, tmp_path / "scores", language=True)
    assert example_condition(str(tmp_path / "scores"), outcome.manifest) == 'language == "en"'
    found = list(columns_in(tmp_path / "scores").values())
    assert [each["language"] for each in found] == ["en", "de", "fr", "en", "und"]
    assert [each["caption_repeats"] for each in found] == [2, 1, 1, 2, 1]
    assert [each["caption_length"] for each in found] == [*map(len, CAPTIONS)]
    assert all(0 < each["language_probability"] <= 1 for each in found[:4])
    assert not wdsprep.verify(str(images), str(tmp_path / "scores")).findings
