"""The recipes for clusters, as far as a machine without a cloud can tell: their form, and the
commands that they run. The script for Slurm runs as a whole."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests.kit.chaos import photos
from tests.kit.damaged import check
from tests.kit.packs import manifest_of, pack
from tests.kit.paths import EXAMPLES
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
    "spec": {
        *("entrypoint", "submissionMode", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"),
        *("backoffLimit", "rayClusterSpec"),
    },
    "rayClusterSpec": {
        *("rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs")
    },
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpecs": {
        *("groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template")
    },
}


def test_the_kuberay_recipe_has_the_fields_of_a_ray_job() -> None:
    job = recipe("kuberay.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    cluster = spec["rayClusterSpec"]
    head, (gpu,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    groups = {"spec": spec, "rayClusterSpec": cluster, "headGroupSpec": head}
    for name, found in {**groups, "workerGroupSpecs": gpu}.items():
        assert found.keys() == FIELDS[name], name
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
    images = pack(photos(tmp_path / "in", 12), tmp_path / "images", "--samples-per-shard", "6")
    out = tmp_path / "latents"
    options = ["--resolution", "64", "--model", "tiny", "--device", "cpu", "--json"]
    done = subprocess.run(
        [RECIPES / "slurm.sh", "encode", images, out, *options],
        env=slurm,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
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
