"""The recipes for clusters and for trainers that were not written for these shards."""

import gc
import importlib.util
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml

from tests.kit.command_lines import ran
from tests.kit.damaged import check
from tests.kit.encodes import pictures
from tests.kit.latent_sets import field, write_latents
from tests.kit.packs import jpeg, manifest_of, pack, write_files
from tests.kit.paths import EXAMPLES, LOADING_PAGE, blocks
from wdsprep.cli import cli

RECIPES = EXAMPLES / "cluster"
BIN = Path(sys.executable).parent


def recipe(name: str) -> Any:
    return yaml.safe_load((RECIPES / name).read_text())


def options_of(command: str) -> dict[str, Any]:
    """What wdsprep understands, or a usage error."""
    program, name, *arguments = shlex.split(command)
    assert program == "wdsprep"
    parent = click.Context(cli, info_name=program, **cli.context_settings)
    return dict(cli.commands[name].make_context(name, arguments, parent=parent).params)


def check_command(options: dict[str, Any], *, workers: int, cpus: int) -> None:
    """Where machines start on demand, nothing can be found out by looking at them."""
    assert options["workers"] == (1, workers)
    assert options["cpus_per_worker"] == cpus
    assert (options["device"], options["ray_address"]) == ("cuda", "auto")
    assert options["images"].startswith("s3://")


def test_the_ray_launcher_takes_the_aws_recipe() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    found = prepare_config(recipe("aws.yaml"))
    validate_config({**found, "cluster_synced_files": []})
    head, gpu = (found["available_node_types"][name] for name in ("head", "gpu"))
    assert head["resources"] == {"CPU": 0}
    assert gpu["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert gpu["node_config"]["ImageId"] == head["node_config"]["ImageId"]
    assert (gpu["min_workers"], gpu["max_workers"]) == (0, found["max_workers"])


def test_the_command_of_the_aws_recipe() -> None:
    text = re.sub(r"\\\n# *", "", (RECIPES / "aws.yaml").read_text())
    (command,) = re.findall(r'"(wdsprep [^"]*)"', text)
    check_command(options_of(command), workers=recipe("aws.yaml")["max_workers"], cpus=4)


FIELDS = {
    "spec": "entrypoint submissionMode shutdownAfterJobFinishes ttlSecondsAfterFinished"
    " backoffLimit rayClusterSpec",
    "rayClusterSpec": "rayVersion enableInTreeAutoscaling headGroupSpec workerGroupSpecs",
    "headGroupSpec": "rayStartParams template",
    "workerGroupSpecs": "groupName replicas minReplicas maxReplicas rayStartParams template",
}


def test_the_kuberay_recipe_has_the_fields_of_a_ray_job() -> None:
    job = recipe("kuberay.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    cluster = spec["rayClusterSpec"]
    head, (gpu,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    groups = {"spec": spec, "rayClusterSpec": cluster, "headGroupSpec": head}
    for name, found in {**groups, "workerGroupSpecs": gpu}.items():
        assert found.keys() == set(FIELDS[name].split()), name
    for group in (head, gpu):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == "REGISTRY/wdsprep:latest"
        assert container["envFrom"] == [{"secretRef": {"name": "wdsprep-s3"}}]
        assert container["resources"]["requests"] == container["resources"]["limits"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert f"rayproject/ray:{cluster['rayVersion']}-py" in (RECIPES / "kuberay.yaml").read_text()


def test_the_command_of_the_kuberay_recipe_asks_for_what_a_pod_has() -> None:
    spec = recipe("kuberay.yaml")["spec"]
    (gpu,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    limits = gpu["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"
    check_command(
        options_of(spec["entrypoint"]), workers=gpu["maxReplicas"], cpus=int(limits["cpu"])
    )
    assert gpu["replicas"] == gpu["maxReplicas"]


SRUN = """#!/usr/bin/env bash
echo "$*" >> "$STEPS"
while [[ $1 == --* ]]; do shift; done
case $1 in hostname) echo 127.0.0.1 ;; *) exec "$@" ;; esac
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames gpu[1-2]" ] && printf 'gpu1\\ngpu2\\n'
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on two nodes, which are both this machine."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    job = {
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "gpu[1-2]",
        "STEPS": str(tmp_path / "steps"),
        "PATH": f"{tmp_path / 'bin'}:{BIN}:{os.environ['PATH']}",
    }
    return {**os.environ, **job}


@pytest.mark.system
def test_the_slurm_script_starts_ray_on_all_nodes_encodes_and_leaves_none_running(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    images = pack(
        pictures(tmp_path / "in", range(12)), tmp_path / "images", "--samples-per-shard", "6"
    )
    out = tmp_path / "latents"
    options = ["--resolution", "64", "--model", "tiny", "--device", "cpu", "--json"]
    ran(RECIPES / "slurm.sh", "encode", images, out, *options, env=slurm)
    head, steps = steps_of(Path(slurm["STEPS"]))
    assert "ray start --head" in head["gpu1"]
    assert f"ray start --address=127.0.0.1:{20000 + os.getpid() % 10000}" in steps["gpu2"]
    assert manifest_of(out).complete
    assert not check(images, out).findings
    assert f":{20000 + os.getpid() % 10000}" not in running()


def steps_of(log: Path) -> tuple[dict[str, str], dict[str, str]]:
    rows = [line.split(" --nodelist=")[1].split(" ", 1) for line in log.read_text().splitlines()]
    ray = [(node, words) for node, words in rows if "ray start" in words]
    return dict(ray[:1]), dict(ray[1:])


def running() -> str:
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return b"\n".join(lines).replace(b"\0", b" ").decode(errors="replace")


SIZES = (20, 12)
TRAINER_RECIPES = blocks(LOADING_PAGE, "py", section="Train with something else")
TRAINER, BEHIND, AUGMENTED, WEBDATASET, DATASETS, ENERGON = (
    code for _kind, code in TRAINER_RECIPES
)
HAS_ENERGON = all(importlib.util.find_spec(name) for name in ("megatron", "multistorageclient"))


@pytest.fixture
def latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards where the recipes look for them: latents and embeddings of `tiny`'s shapes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fields = (field("latent", (4, 8, 8)), field("emb", (77, 64)))
    return Path(write_latents("shards/latents-256", SIZES, fields=fields))


def train(recipe: str) -> tuple[list[tuple[Any, Any]], list[float]]:
    """Run a recipe; what its trainer was fed, and the losses."""
    scope: dict[str, Any] = {}
    fed: list[tuple[Any, Any]] = []
    losses: list[float] = []
    torch.manual_seed(0)
    exec(TRAINER, scope)
    step: Callable[[Any, Any], float] = scope["train_step"]

    def observed(latent: Any, emb: Any) -> None:
        fed.append((latent, emb))
        losses.append(step(latent, emb))

    scope["train_step"] = observed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries: files left open, tensors copied
        exec(recipe, scope)
        scope.clear()
        gc.collect()
    return fed, losses


def stored(latents: Path) -> set[bytes]:
    import wdsprep

    batches = wdsprep.load(str(latents), global_batch=1)
    return {batch["latent"].float().numpy().tobytes() for batch in batches}


@pytest.mark.system
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(BEHIND, id="webdataset-behind-load"),
        pytest.param(WEBDATASET, id="webdataset"),
        pytest.param(DATASETS, id="datasets"),
    ],
)
def test_a_recipe_of_the_page_trains_on_every_sample_once(recipe: str, latents: Path) -> None:
    fed, losses = train(recipe)
    rows = [row.numpy().tobytes() for latent, _emb in fed for row in latent]
    assert len(rows) == sum(SIZES)
    assert set(rows) == stored(latents)
    assert fed[0][1].shape == (8, 77, 64)
    assert min(losses[1:]) < losses[0]


@pytest.mark.system
def test_torchvision_brings_images_of_any_size_into_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = {0: ("jpg", "JPEG"), 1: ("png", "PNG"), 2: ("webp", "WEBP")}
    files: dict[str, bytes | str] = {}
    for number in range(16):
        name, kind = kinds[number % 3]
        files[f"{number}.{name}"] = jpeg(number, (64 + number, 90), kind)
        files[f"{number}.txt"] = f"photo {number}"
    pack(write_files(tmp_path / "in", files), "shards/images")
    capsys.readouterr()
    scope: dict[str, Any] = {}
    exec(TRAINER, scope)
    exec(AUGMENTED, scope)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("torch.Size([8, 3, 64, 64]) photo ") for line in lines)


@pytest.mark.system
@pytest.mark.skipif(not HAS_ENERGON, reason="needs pip install megatron-energon, dependencies too")
def test_energon_trains_with_our_indexes_as_they_are(latents: Path) -> None:
    from click.testing import CliRunner
    from megatron.energon.cli.main import main

    indexes = {path: path.read_bytes() for path in latents.rglob("*.idx")}
    latents.rename("energon-latents")
    words = "energon-latents --non-interactive --split-parts train:256/.*\\.tar --sample-type"
    done = CliRunner().invoke(main, ["prepare", *words.split(), "CrudeWebdataset"])
    assert done.exit_code == 0, done.output
    fed, _losses = train(ENERGON)
    assert all(
        Path("energon-latents", *path.parts[-2:]).read_bytes() == indexes[path] for path in indexes
    )
    assert [latent.shape for latent, _emb in fed] == [(8, 4, 8, 8)] * 4


@pytest.mark.system
def test_images_of_several_formats_reach_datasets_as_jpegs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the page says."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    kinds = {"a.jpg": "JPEG", "b.png": "PNG", "c.webp": "WEBP"}
    files: dict[str, bytes | str] = {n: jpeg(1, (80, 70), kind) for n, kind in kinds.items()}
    source = write_files(tmp_path / "in", files)
    as_they_came = pack(source, tmp_path / "mixed")
    with pytest.raises(ValueError, match="same types"):
        streamed(as_they_came)
    anew = pack(source, tmp_path / "jpeg", "--reencode", "jpg:95")
    assert len(streamed(anew)) == 3


def streamed(images: Path) -> list[Any]:
    import datasets

    tars = [str(images / shard.name) for shard in manifest_of(images).shards]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries: files left open
        found = datasets.load_dataset("webdataset", data_files=tars, split="train", streaming=True)
        samples = list(found)
        gc.collect()
    return samples
