"""Models that score: found by what their files say, or refused before the first image."""

import json
import shutil
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kit.hub import Hub, set_constants
from tests.kit.scores import columns_in, score_here
from tests.kit.scoring_models import head, small
from wdsprep.errors import UsageError, WdsprepError
from wdsprep.scoring.models import find_score_model

PROCESSOR, OTHER = "preprocessor_config.json", "processor_config.json"
Spoil = Callable[[Path], object]


@pytest.fixture
def copied(models: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A model of one's own, to spoil."""
    return lambda kind: Path(shutil.copytree(models / kind, tmp_path / kind))


def refused(images: Path, out: Path, words: str, **options: Any) -> None:
    """One line before anything is written."""
    with pytest.raises(WdsprepError, match=words) as said:
        score_here(images, out, **options)
    assert "\n" not in str(said.value)
    assert not out.exists()


def change(path: Path, **more: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def weights_changed(change_tensors: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    def spoil(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, model / "model.safetensors", {"format": "pt"})

    return spoil


def pickle_weights(model: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


def changed(file: str, **more: Any) -> Spoil:
    return lambda model: change(model / file, **more)


STRANGE = {"model_type": "strange", "architectures": ["StrangeModel"]}


@pytest.mark.parametrize(
    ("kind", "spoil", "words"),
    [
        ("vit", shutil.rmtree, "is not a folder here"),
        ("vit", lambda model: (model / PROCESSOR).unlink(), f"lacks {PROCESSOR}: choose another"),
        ("vit", lambda model: (model / PROCESSOR).rename(model / OTHER), f"processor in {OTHER}"),
        ("vit", pickle_weights, "has only pickled weights"),
        ("vit", weights_changed(lambda t: t.pop("classifier.weight")), "lacks 1 tensor"),
        ("vit", weights_changed(lambda t: t["classifier.bias"].fill_(nan)), "are not finite"),
        ("vit", changed("config.json", **STRANGE), "does not know as a clas"),
        ("dinov2", changed(PROCESSOR, do_center_crop=False), "makes images of different sizes"),
        # What libraries say of a file is in the line of the file; several make a tokenizer.
        ("vit", changed(PROCESSOR, size=-5), f"/{PROCESSOR} .*says size -5"),
        ("vit", changed(PROCESSOR, size={"height": 20_000, "width": 20_000}),
         f"/{PROCESSOR} .*says width 20000"),
        ("clip", changed(PROCESSOR, size={"shortest_edge": 60_000}),
         f"/{PROCESSOR} .*says shortest_edge 60000"),
        ("vit", changed(PROCESSOR, image_mean=[0.5] * 4), f"/{PROCESSOR} .*as an image processor"),
        ("vit", changed(PROCESSOR, resample=99), f"/{PROCESSOR} .*as an image processor"),
        ("vit", changed(PROCESSOR, rescale_factor="a"), f"/{PROCESSOR} .*as an image processor"),
        ("vit", changed("config.json", id2label=7), "/config.json .*as a config"),
        ("dinov2", changed("config.json", model_type=["dinov2"]), "/config.json .*as a config"),
        ("clip", changed("tokenizer_config.json", model_max_length="long"), "/clip .*AutoTok"),
        ("clip", changed("tokenizer_config.json", pad_token=None), "/clip .*as a tokenizer"),
    ],
)  # fmt: skip
def test_a_model_that_lacks_something_is_refused(
    kind: str, spoil: Spoil, words: str, images: Path, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    spoil(model := copied(kind))
    refused(images, tmp_path / "out", words, model=str(model))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label": "cat"}, "no model has the label 'cat'"),
        ({"label": "nsfw=width"}, "cannot be named width"),
        ({"label": "nsfw=SHA256"}, "cannot be named SHA256"),
        ({"head": "aesthetic={}/head.safetensors"}, "and 0 that it may mean have one: give"),
    ],
)
def test_what_a_classifier_does_not_have_is_refused(
    options: dict[str, str], words: str, images: Path, models: Path, tmp_path: Path
) -> None:
    asked = {name: value.format(models) for name, value in options.items()}
    refused(images, tmp_path / "out", words, model=str(models / "vit"), **asked)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_code_that_comes_with_a_model_is_refused(
    name: str, images: Path, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    model = copied("vit")
    change(model / name, auto_map={"AutoModel": "evil.Model"})
    (model / "evil.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'x')!r}).touch()")
    refused(images, tmp_path / "out", "wants to run code", model=str(model))
    assert not (tmp_path / "x").exists()


def test_weights_in_half_precision_are_taken_if_there_are_no_others(
    images: Path, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    model = copied("vit")
    (model / "model.safetensors").rename(model / "model.fp16.safetensors")
    assert score_here(images, tmp_path / "out", model=str(model), limit=3).samples == 3


def test_outputs_that_depend_on_companions_are_refused(
    images: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import ViTForImageClassification

    forward = ViTForImageClassification.forward

    def mixed(self: Any, *args: Any, **options: Any) -> Any:
        found = forward(self, *args, **options)
        found.logits = found.logits - 9 * found.logits.mean(0)
        return found

    monkeypatch.setattr(ViTForImageClassification, "forward", mixed)
    refused(
        images, tmp_path / "out", "depends on the others in its batch", model=str(models / "vit")
    )


def test_two_models_with_the_same_column_are_refused(
    images: Path, models: Path, tmp_path: Path
) -> None:
    both = [str(models / "clip"), str(models / "siglip")]
    refused(images, tmp_path / "out", "two models give the column 'similarity'", model=both)
    both = [str(models / "vit"), str(models / "swin")]
    for same in (["nsfw=bad", "logo=bad"], ["nsfw=bad", "logo=Bad"]):
        out = tmp_path / "out"
        refused(images, out, "two models give the column 'bad'", model=both, label=same)
    both = [str(models / "dinov2"), f"{models}/dinov2/"]
    refused(images, tmp_path / "out", "give the column 'image_emb.npy'", model=both)


def test_labels_that_are_no_names_of_columns_are_refused(images: Path, tmp_path: Path) -> None:
    model = small("vit", tmp_path / "vit", id2label={0: "safe", 1: "not safe for work"})
    words = "has the label 'not safe for work', which cannot be the name of a column"
    refused(images, tmp_path / "out", words, model=str(model))
    score_here(images, tmp_path / "out", model=str(model), label="not safe for work=nsfw")
    assert {"nsfw", "key", "source"} == {*next(iter(columns_in(tmp_path / "out").values()))}


def test_of_a_thousand_labels_the_user_says_which(images: Path, tmp_path: Path) -> None:
    labels = {number: f"thing, {number}" for number in range(1000)}
    model = small("vit", tmp_path / "vit", id2label=labels)
    refused(images, tmp_path / "out", "1,000 labels.*choose some, with", model=str(model))
    wanted = ["thing, 7=seven", "thing, 8=eight"]
    score_here(images, tmp_path / "out", model=str(model), label=wanted, limit=3)
    assert {"seven", "eight"} <= next(iter(columns_in(tmp_path / "out").values())).keys()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: head(path, 25), "embeddings of 25 numbers, and those of .* have 24"),
        (lambda path: head(path, 24, value=float("nan")), "not finite"),
        (lambda path: path.write_bytes(b"junk" * 9), "not a safetensors file of floats"),
        (
            lambda path: save_file({f"{'9' * 5000}.weight": torch.ones(1, 24)}, path),
            "h.safetensors is not a safetensors file of floats",
        ),
        (lambda path: save_file({"weight": torch.ones(2, 24)}, path), "has 2 outputs"),
        (lambda path: save_file({"conv.weight": torch.ones(1, 3, 3)}, path), "not a linear layer"),
        (
            lambda path: save_file({"running_mean": torch.ones(4)}, path),
            "give a head of linear layers",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    spoil: Callable[[Path], object], words: str, images: Path, models: Path, tmp_path: Path
) -> None:
    spoil(tmp_path / "h.safetensors")
    given = {"model": str(models / "clip"), "head": f"aesthetic={tmp_path / 'h.safetensors'}"}
    refused(images, tmp_path / "out", words, **given)


def test_a_head_of_several_layers_is_their_chain(tmp_path: Path) -> None:
    from wdsprep.scoring.heads import load_head, read_head

    first, last = torch.randn(5, 24), torch.randn(1, 5)
    path = tmp_path / "h.safetensors"
    save_file({"layers.10.weight": last, "layers.2.weight": first}, path)
    read = read_head("a", str(path))
    rows = torch.randn(3, 24)
    scores = load_head(read)
    assert torch.allclose(scores(rows), (rows @ first.T @ last.T)[:, 0], atol=1e-4)
    save_file({"0.weight": first, "1.weight": last}, path, {"activation": "relu"})
    read = read_head("a", str(path))
    wanted = ((rows @ first.T).relu() @ last.T)[:, 0]
    scores = load_head(read)
    assert torch.allclose(scores(rows), wanted, atol=1e-4)


def test_the_slow_processor_is_taken_if_asked_and_stands_in_the_settings(
    images: Path, models: Path, tmp_path: Path
) -> None:
    out = score_here(images, tmp_path / "o", model=str(models / "vit"), processor="slow", limit=3)
    (model,) = out.manifest.settings["scores"]["models"]
    assert model["processor"] == "ViTImageProcessorPil (slow)"


def test_a_cache_without_the_weights_is_completed_by_the_hub(
    models: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in (models / "vit").iterdir()}
    commit = hub.make("owner/vit").commit(files)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    cache = {"HF_HUB_CACHE": str(tmp_path / "cache"), "ENDPOINT": hub.url}
    set_constants(monkeypatch, **cache, HUGGINGFACE_CO_URL_TEMPLATE=template)
    found = find_score_model("", f"owner/vit@{commit}")
    Path(found.folder, "model.safetensors").unlink()
    assert find_score_model("", f"owner/vit@{commit}") == found


def test_words_that_are_no_options_are_refused() -> None:
    from wdsprep.scoring.options import ScoreOptions

    for options, words in (
        ({}, "nothing to score by"),
        ({"model": "a b=x"}, "cannot be a name: give NAME=MODEL"),
        ({"model": "x", "label": "a=b c"}, "cannot be a name: give LABEL=COLUMN"),
        ({"model": "x", "head": "head.safetensors"}, "names no column: give COLUMN=FILE"),
        ({"model": "x", "head": "a=h.pth"}, "is not a .safetensors file"),
        ({"language": True, "label": "a"}, "need a model: give one"),
    ):
        with pytest.raises(UsageError, match=words):
            ScoreOptions(**options)  # type: ignore[arg-type]
