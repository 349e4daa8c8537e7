"""A model that cannot serve is refused in one line, whatever a stranger wrote into its folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.fuzz.judge import MOST_NBYTES, limited_memory
from tests.kit.fuzz.strangers import copied, load
from tests.kit.model_files import (
    FLUX_INDEX,
    FLUX_VAE,
    INDEX,
    VAE,
    changed,
    flux_files,
    sd_files,
    with_changes,
)
from tests.kit.packs import write_files
from wdsprep.encoding.models.config_files import MOST, MOST_LAYERS, MOST_WIDTH
from wdsprep.encoding.models.encode_prompt import explain_pipeline_errors
from wdsprep.encoding.models.find_model import Component, class_of, find_model
from wdsprep.errors import UsageError, WdsprepError, WorkError

Family = Callable[[str], Path]
# Libraries warn of what they find odd before they fail:
pytestmark = pytest.mark.filterwarnings("ignore")

VAE_FILE = "vae/diffusion_pytorch_model"
TOWER = "text_encoder_2/config.json"
CODE = {"auto_map": {"AutoModel": "mine.Mine", "AutoTokenizer": ["mine.Mine", None]}}
AUTO = "wants to run code that comes with the model (auto_map"
COMES = "wants to run code that comes with it"
OUTSIDE = "names a file outside of the model (vocab_file"


INDEX_FILE, TOKENIZER = "model_index.json", "tokenizer/tokenizer_config.json"
T5 = {"architectures": ["T5EncoderModel"]}
DIT = {"_class_name": "DiTPipeline", "transformer": ["diffusers", "DiTTransformer2DModel"]}


def flux_index(**changed: Any) -> dict[str, Any]:
    return {INDEX_FILE: {**FLUX_INDEX, **changed}}


def without_weights(stem: str) -> dict[str, Any]:
    return {f"{stem}.safetensors": None, f"{stem}.fp16.safetensors": None}


Cases = dict[str, list[tuple[dict[str, Any], str]]]
"""By kind of text: what is in place of which file (JSON, bytes, or nothing), and what is said."""
OF_SD: Cases = {
    "emb": [
        ({"vae/config.json": None}, "lacks vae/config.json"),
        ({"text_encoder/config.json": None}, "lacks text_encoder/config.json"),
        ({INDEX_FILE: None, "text_encoder/config.json": T5}, "lacks model_index.json, which says"),
        ({INDEX_FILE: DIT}, "(DiTPipeline) has no text encoder: add --text none"),
        ({INDEX_FILE: None, "modular_model_index.json": b"{}"}, "lacks model_index.json, which"),
    ],
    "tokens": [
        ({"tokenizer/merges.txt": None}, "lacks tokenizer/merges.txt"),
        ({INDEX_FILE: None, TOWER: {}}, "lacks model_index.json, which says"),
    ],
    "none": [
        (without_weights(VAE_FILE), f"only pickled weights ({VAE_FILE}.bin"),
        ({"vae/config.json": {"_class_name": "AutoencoderTiny"}}, "AutoencoderTiny; wdsprep enc"),
        ({"vae/config.json": {**VAE, "in_channels": 4}}, "4 channels, not RGB"),
        ({"vae/config.json": {**VAE, "latents_mean": [0.0]}}, "lacks latents_std"),
        ({"vae/config.json": {"_class_name": "AutoencoderKLWan"}}, "lacks z_dim"),
        ({"vae/config.json": []}, "vae/config.json is not a JSON object"),
    ],
}
PARTS_OF_TOWER = [f"text_encoder_2/model-0000{n}-of-00002.safetensors" for n in (1, 2)]
OF_CODE: list[tuple[dict[str, Any], str]] = [
    ({file: {**(FLUX_VAE if file[0] == "v" else {}), **named}}, f"{file} {AUTO}")
    for named in (CODE, {"tokenizer": [CODE]})
    for file in (
        TOWER,
        "text_encoder/config.json",
        TOKENIZER,
        "tokenizer_2/processor_config.json",
        "tokenizer_2/preprocessor_config.json",
        "vae/config.json",
    )
]
OF_FLUX: Cases = {
    "tokens": [
        ({TOWER: None}, f"lacks {TOWER}:"),
        ({"tokenizer_2/spiece.model": None}, "lacks tokenizer_2/tokenizer.json:"),
        *OF_CODE,
    ],
    "emb": [
        ({TOWER: None}, f"lacks {TOWER}:"),
        ({PARTS_OF_TOWER[1]: None}, f"lacks {PARTS_OF_TOWER[1]}:"),
        ({"tokenizer/merges.txt": None}, "lacks tokenizer/merges.txt:"),
        (without_weights("text_encoder/model"), "only pickled weights (text_encoder/pytorch_model"),
        (
            {
                **dict.fromkeys(PARTS_OF_TOWER),
                "text_encoder_2/model-00001-of-99999999999.safetensors": b"weights",
            },
            "lacks text_encoder_2/model-00002-of-99999999999.safetensors:",
        ),
        (flux_index(_class_name=["pipeline", "Mine"]), "trust_remote_code: model_index.json names"),
        (flux_index(text_encoder_2=["my", "Model"]), "trust_remote_code: my.Model"),
        (flux_index(_class_name="NoSuch"), "NoSuch, which the diffusers here does not"),
        (flux_index(_class_name=7), "names 7"),
        *OF_CODE,
        *(
            (flux_index(**{part: [library, kind]}), COMES)
            for part, library, kind in (
                ("tokenizer", "diffusers", "DiffusionPipeline"),
                ("tokenizer_2", "diffusers", "AutoencoderKL"),
                ("text_encoder", "diffusers", "UNet2DConditionModel"),
                ("text_encoder_2", "kolors", "KolorsPipeline"),
                ("tokenizer", "transformers", "AutoTokenizer"),
                ("text_encoder", "transformers", "pipelines.Pipeline"),
                ("text_encoder", "pipeline_utils.py", "Model"),
                ("text_encoder_9/../..", "transformers", "CLIPTextModel"),
            )
        ),
        ({"tokenizer_2/tokenizer_config.json": {"vocab_file": "/etc/hostname"}}, OUTSIDE),
        ({"tokenizer_2/tokenizer_config.json": {"vocab_file": "../../a.json"}}, OUTSIDE),
        (
            {"text_encoder_2/model.safetensors.index.json": {"weight_map": {"a": "../../b"}}},
            "not among the weights beside it",
        ),
        ({"text_encoder_2/adapter_config.json": b"{}"}, "has text_encoder_2/adapter_config.json"),
        *(
            ({"vae/config.json": {**FLUX_VAE, **changed}}, said)
            for changed, said in (
                ({"scaling_factor": float("nan")}, "says scaling_factor nan"),
                ({"scaling_factor": 0}, "has to be a number above 0"),
                ({"latents_mean": [0], "latents_std": [0]}, "says latents_std 0, which has to be"),
                ({"latent_channels": 10**9}, "says latent_channels 1000000000"),
                ({"latent_channels": -4}, "says latent_channels -4"),
                ({"block_out_channels": [8] * 5000}, "has to be a list of 1 to 8"),
                ({"block_out_channels": 7}, "says block_out_channels 7"),
                ({"_class_name": ["AutoencoderKL"]}, "the VAE of"),
            )
        ),
        ({TOWER: {"d_model": 10**9}}, "says d_model 1000000000, and no network has"),
        ({TOWER: {"sub": [{"num_layers": 10**5}]}}, "says num_layers 100000"),
    ],
}


@pytest.mark.parametrize(
    ("files", "changes", "said", "text"),
    [
        (files, *case, text)
        for files, cases in ((sd_files, OF_SD), (flux_files, OF_FLUX))
        for text, of_text in cases.items()
        for case in of_text
    ],
)
def test_a_model_that_will_not_do_is_named_in_one_line(
    files: Callable[[], dict[str, bytes]],
    changes: dict[str, Any],
    said: str,
    text: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "a.json").write_text("{}")  # which one of them names from within
    folder = write_files(tmp_path / "model", with_changes(files(), changes))
    with pytest.raises((UsageError, WorkError)) as caught:
        find_model(str(folder), text=text)
    assert said in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    if not any(name.startswith("vae") for name in changes):
        assert find_model(str(folder), text="none").channels in (4, 16)


def test_an_adapter_beside_the_index_is_none_of_a_part(tmp_path: Path) -> None:
    folder = write_files(tmp_path, with_changes(sd_files(), {"adapter_config.json": b"{}"}))
    assert find_model(str(folder), text="emb").files


def test_a_part_left_out_is_no_second_tower_and_kolors_has_its_classes_in_diffusers(
    tmp_path: Path,
) -> None:
    index = {**INDEX, "text_encoder_2": [None, None]}
    folder = write_files(tmp_path / "sd", with_changes(sd_files(), {"model_index.json": index}))
    assert find_model(str(folder), text="emb").components == ()
    kolors = {
        "_class_name": "KolorsPipeline",
        "text_encoder": ["kolors", "ChatGLMModel"],
        "tokenizer": ["kolors", "ChatGLMTokenizer"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    changes = {"model_index.json": kolors, "tokenizer/tokenizer_config.json": CODE}
    folder = write_files(tmp_path / "kolors", with_changes(flux_files(), changes))
    assert find_model(str(folder), text="tokens").components


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("tokenizer", "CLIPTextModel"),
        ("tokenizer", "CLIPTextConfig"),
        ("text_encoder", "GenerationConfig"),
        ("text_encoder", "logging"),
        ("processor", "CLIPTextModel"),
    ],
)
def test_a_class_of_another_role_is_not_loaded(part: str, kind: str) -> None:
    with pytest.raises(UsageError, match=f"{part} is a {kind}, not a PreTrained"):
        class_of(Component(part, "transformers", kind))
    for name, known in (
        ("text_encoder", "T5EncoderModel"),
        ("tokenizer", "T5TokenizerFast"),
        ("tokenizer", "PixtralProcessor"),
        ("processor", "Qwen2VLProcessor"),
    ):
        assert class_of(Component(name, "transformers", known)).__name__


@pytest.mark.parametrize("is_named", [False, True])
def test_what_hidream_leaves_out_is_told_with_the_commands_that_bring_it(
    is_named: bool, tmp_path: Path
) -> None:
    parts = {
        "text_encoder_4": ["transformers", "LlamaForCausalLM"],
        "tokenizer_4": ["transformers", "PreTrainedTokenizerFast"],
    }
    named = parts if is_named else {}
    hidream = {**FLUX_INDEX, "_class_name": "HiDreamImagePipeline", **named}
    folder = write_files(tmp_path, flux_files(hidream))
    said = refusal(folder)
    assert "leaves out text_encoder_4 and tokenizer_4" in said
    assert "`hf download meta-llama/Llama-3.1-8B-Instruct" in said
    llama = {
        "text_encoder_4/config.json": b"{}",
        "text_encoder_4/model.safetensors": b"llama",
        "tokenizer_4/tokenizer.json": b"{}",
    }
    model = find_model(str(write_files(folder, llama)), text="emb")
    assert [part.name for part in model.components][-2:] == [*parts]
    assert llama.keys() <= set(model.files)


# Whole pipelines, whose code is called


def refusal(folder: Path, **recipe: str) -> str:
    said = load(folder, **{"text": "emb", **recipe})
    assert said
    assert "\n" not in said
    assert len(said) < 1000
    return said


CODE_ELSEWHERE = "wants to run code of another repository"
UNUSABLE = "FluxPipeline cannot be used for text"
WITHOUT_T5 = {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
INDEXES: list[tuple[str, dict[str, Any], str]] = [
    ("Flux", {"_class_name": "DDPMPipeline"}, "as it has no code that makes"),
    ("Flux", {"_class_name": "x" * 10**6}, ""),
    ("Flux", {"_class_name": ["x" * 10**6, "y"]}, ""),
    ("Flux", {"tokenizer": ["transformers", "x" * 10**6]}, ""),
    ("QwenImage", {"_class_name": "QwenImageEditPipeline"}, "no images of text alone (it wan"),
    ("StableDiffusionXL", {"_class_name": "HunyuanDiTPipeline"}, "gives no prompt_embeds_2"),
    ("StableDiffusion3", {"_class_name": "AmusedPipeline"}, "has no code that makes embed"),
    ("StableDiffusion3", WITHOUT_T5, "StableDiffusion3Pipeline cannot be used for text"),
]
KERNELS = [
    {name: named}
    for name in ("attn_implementation", "_attn_implementation_internal")
    for named in ("stranger/kernel", {"": "stranger/kernel"}, {"vision": "paged|stranger/kernel"})
]


@pytest.mark.parametrize(
    ("name", "file", "values", "said"),
    [
        *((name, INDEX_FILE, values, said) for name, values, said in INDEXES),
        ("Flux", TOKENIZER, {"model_max_length": 10**7}, UNUSABLE),  # to which it would pad
        ("Flux", TOKENIZER, {"model_max_length": 10**12}, UNUSABLE),
        *(("ZImage", "text_encoder/config.json", values, CODE_ELSEWHERE) for values in KERNELS),
    ],
)
def test_a_pipeline_that_cannot_make_embeddings_is_one_line(
    name: str, file: str, values: dict[str, Any], said: str, family: Family, tmp_path: Path
) -> None:
    folder = changed(family(name), tmp_path / "model", file, **values)
    with limited_memory(MOST_NBYTES):
        assert said in refusal(folder)


@pytest.mark.parametrize("text", ["emb", pytest.param("tokens", marks=pytest.mark.system)])
@pytest.mark.parametrize(
    ("name", "file", "values"),
    [
        ("StableDiffusion", "text_encoder", {"num_hidden_layers": MOST_LAYERS}),
        ("StableDiffusion", "text_encoder", {"max_position_embeddings": MOST}),
        ("StableDiffusion", "text_encoder", {"hidden_size": MOST_WIDTH}),
        ("StableDiffusion", "vae", {"block_out_channels": [8, MOST]}),
        ("Flux", "text_encoder_2", {"d_model": MOST_WIDTH, "num_layers": 3000}),
        ("Flux", "text_encoder_2", {"d_model": 48}),
        ("Flux", "text_encoder_2", {"vocab_size": MOST}),
        ("Flux", "vae", {"in_channels": "x" * 10**6}),
    ],
)
def test_a_network_of_other_sizes_than_its_weights_is_not_built(
    name: str, file: str, values: dict[str, Any], text: str, family: Family, tmp_path: Path
) -> None:
    folder = changed(family(name), tmp_path / "model", f"{file}/config.json", **values)
    with limited_memory(MOST_NBYTES):
        line = load(folder, text)
    assert len(line) < 1000
    assert line or (text == "tokens" and file != "vae")  # of whose towers nothing is built
    if line and text == "emb":
        assert str(folder) in line


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
    assert "where its config.json says" in refusal(tmp_path, text="none")


def test_a_pipeline_in_the_place_of_a_tokenizer_runs_nothing(
    family: Family, tmp_path: Path
) -> None:
    named = {"tokenizer": ["diffusers", "DiffusionPipeline"]}
    folder = changed(family("Flux"), tmp_path / "model", **named)
    inner = {"_class_name": ["mine", "Mine"], "_diffusers_version": "0.36.0"}
    (folder / "tokenizer/model_index.json").write_text(json.dumps(inner))
    (folder / "tokenizer/mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for text in ("emb", "tokens"):
        assert COMES in refusal(folder, text=text)
    assert not (tmp_path / "ran").exists()


def test_no_question_is_asked_for_code_in_a_tokenizer(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the check before it does not look."""
    monkeypatch.setattr("wdsprep.encoding.models.config_files.check_part", lambda *_, **__: None)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    folder = copied(family("QwenImage"), tmp_path / "model")
    for path in folder.glob("*/*config.json"):
        code = {"auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"], "AutoModel": "mine.Mine"}}
        path.write_text(json.dumps(json.loads(path.read_bytes()) | code))
        (path.parent / "mine.py").write_text("raise SystemExit")
    load(folder, "emb")


def test_code_that_needs_the_whole_pipeline_is_one_line(family: Family, tmp_path: Path) -> None:
    folder = copied(family("Flux"), tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_bytes())
    kept = {name: index.pop(f"{name}_2") for name in ("text_encoder", "tokenizer")}
    for name in kept:
        shutil.rmtree(folder / name)
        (folder / f"{name}_2").rename(folder / name)
    named = index | kept | {"_class_name": "BriaPipeline"}
    (folder / "model_index.json").write_text(json.dumps(named))
    said = refusal(folder)
    assert "cannot encode a caption with the parts that are there for text" in said
    assert said.endswith("(AttributeError: 'NoneType' object has no attribute 'config')")


def test_a_chat_template_that_is_missing_is_one_line(family: Family, tmp_path: Path) -> None:
    folder = changed(family("ZImage"), tmp_path / "model", TOKENIZER, chat_template=None)
    for path in (folder / "tokenizer").glob("chat_template*"):
        path.unlink()
    assert "chat_template" in refusal(folder)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("can't start new thread"),
    ],
)
def test_what_a_device_lacks_is_not_said_of_the_pipeline(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_pipeline_errors("FluxPipeline"):
        raise error
    assert not isinstance(caught.value, WdsprepError)
