"""Whatever a stranger has written into the folder of a model, it is one line, and soon."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.fuzz.judge import MOST_NBYTES, limited_memory
from tests.kit.fuzz.models import copied, load
from wdsprep.encoding.models.config_files import MOST, MOST_LAYERS, MOST_WIDTH

Family = Callable[[str], Path]
# Libraries warn of what they find odd before they fail:
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("text", ["emb", "tokens"])
@pytest.mark.parametrize(
    ("name", "file", "changed"),
    [
        ("StableDiffusion", "text_encoder/config.json", {"num_hidden_layers": MOST_LAYERS}),
        ("StableDiffusion", "text_encoder/config.json", {"max_position_embeddings": MOST}),
        ("StableDiffusion", "text_encoder/config.json", {"hidden_size": MOST_WIDTH}),
        ("StableDiffusion", "vae/config.json", {"layers_per_block": MOST_LAYERS}),
        ("StableDiffusion", "vae/config.json", {"block_out_channels": [8, MOST]}),
        ("Flux", "text_encoder_2/config.json", {"d_model": MOST_WIDTH, "num_layers": 3000}),
        ("Flux", "text_encoder_2/config.json", {"d_ff": MOST}),
        ("Flux", "text_encoder_2/config.json", {"vocab_size": MOST}),
        ("Flux", "text_encoder/config.json", {"max_position_embeddings": MOST}),
    ],
)
def test_a_network_larger_than_its_weights_is_not_built(
    name: str, file: str, changed: dict[str, Any], text: str, family: Family, tmp_path: Path
) -> None:
    folder = copied(family(name), tmp_path / "model")
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changed))
    with limited_memory(MOST_NBYTES):
        line = load(folder, text)
    assert line or (text == "tokens" and "vae" not in file)  # of whose towers nothing is built
    if line and text == "emb":
        assert str(folder / file.partition("/")[0]) in line


@pytest.mark.parametrize(
    "named", ["stranger/kernel", {"": "stranger/kernel"}, {"vision": "paged|stranger/kernel"}]
)
def test_code_of_another_repository_is_refused_however_it_is_named(
    named: Any, family: Family, tmp_path: Path
) -> None:
    for name in ("attn_implementation", "_attn_implementation_internal"):
        folder = copied(family("ZImage"), tmp_path / "model")
        path = folder / "text_encoder/config.json"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {name: named}))
        assert "wants to run code of another repository" in load(folder, "emb")


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("vae/config.json", {"_class_name": "x" * 10**6}),
        ("vae/config.json", {"in_channels": "x" * 10**6}),
        ("model_index.json", {"_class_name": "x" * 10**6}),
        ("model_index.json", {"_class_name": ["x" * 10**6, "y"]}),
        ("model_index.json", {"tokenizer": ["transformers", "x" * 10**6]}),
        ("model_index.json", {"tokenizer": ["x" * 10**6, "y"]}),
    ],
)
def test_no_line_is_as_long_as_what_a_stranger_wrote(
    file: str, changed: dict[str, Any], family: Family, tmp_path: Path
) -> None:
    folder = copied(family("Flux"), tmp_path / "model")
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changed))
    assert 0 < len(load(folder, "emb")) < 1000


@pytest.mark.parametrize("factor", [4, 16])
def test_a_vae_that_makes_other_latents_than_its_config_says_is_refused(
    factor: int, tmp_path: Path
) -> None:
    import diffusers

    numbers = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = diffusers.AutoencoderKLWan(base_dim=8, z_dim=4, num_res_blocks=1, **numbers)
    vae.save_pretrained(tmp_path)
    assert load(tmp_path, "none") == ""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"scale_factor_spatial": factor}))
    assert "where its config.json says" in load(tmp_path, "none")


@pytest.mark.parametrize("name", ["StableDiffusionXL", "Flux"])
def test_a_tokenizer_that_pads_without_end_is_one_line(
    name: str, family: Family, tmp_path: Path
) -> None:
    for length in (10**7, 10**9, 10**12):
        folder = copied(family(name), tmp_path / "model")
        path = folder / "tokenizer/tokenizer_config.json"
        own = json.loads(path.read_bytes()) | {"model_max_length": length}
        path.write_text(json.dumps(own))
        with limited_memory(MOST_NBYTES):
            assert f"{name}Pipeline cannot be used for text" in load(folder, "emb")


@pytest.mark.parametrize("name", ["StableDiffusion", "Flux"])
def test_a_pipeline_in_the_place_of_a_tokenizer_runs_nothing(
    name: str, family: Family, tmp_path: Path
) -> None:
    folder = copied(family(name), tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_bytes())
    index["tokenizer"] = ["diffusers", "DiffusionPipeline"]
    (folder / "model_index.json").write_text(json.dumps(index))
    inner = {"_class_name": ["mine", "Mine"], "_diffusers_version": "0.36.0"}
    (folder / "tokenizer/model_index.json").write_text(json.dumps(inner))
    (folder / "tokenizer/mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for text in ("emb", "tokens"):
        assert "wants to run code that comes with it" in load(folder, text)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["Flux", "QwenImage"])
def test_no_question_is_asked_for_code_in_a_tokenizer(
    name: str, family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the check before it does not look."""
    monkeypatch.setattr("wdsprep.encoding.models.find_model.check_part", lambda *_, **__: None)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    folder = copied(family(name), tmp_path / "model")
    for path in folder.glob("*/*config.json"):
        code = {"auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"], "AutoModel": "mine.Mine"}}
        path.write_text(json.dumps(json.loads(path.read_bytes()) | code))
        (path.parent / "mine.py").write_text("raise SystemExit")
    load(folder, "emb")


def test_what_a_pipeline_lacks_is_told_before_the_inner_cause(
    family: Family, tmp_path: Path
) -> None:
    folder = copied(family("Flux"), tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_bytes())
    kept = {"text_encoder": index.pop("text_encoder_2"), "tokenizer": index.pop("tokenizer_2")}
    (folder / "text_encoder").rename(tmp_path / "aside")
    (folder / "text_encoder_2").rename(folder / "text_encoder")
    (folder / "tokenizer").rename(tmp_path / "aside too")
    (folder / "tokenizer_2").rename(folder / "tokenizer")

    def line(kind: str) -> str:
        named = index | kept | {"_class_name": kind}
        (folder / "model_index.json").write_text(json.dumps(named))
        return load(folder, "emb")

    bria = line("BriaPipeline")
    assert "its code needs the vae of the whole pipeline, which is not loaded" in bria
    assert "--text none" in bria
    assert bria.endswith("(AttributeError: 'NoneType' object has no attribute 'config')")
    kandinsky = line("Kandinsky5T2IPipeline")
    assert "its denoiser wants prompt_cu_seqlens beside embeddings" in kandinsky
    assert "--text none" in kandinsky
