"""The workflows run the scripts that people run, on the Pythons that the package names."""

import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
SCRIPT = re.compile(r"(?:^|\s)((?:\.ci|tools)/[\w-]+)")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps(workflow: Any) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_scripts_that_are_here(path: Path) -> None:
    workflow = read(path)
    named = {name for step in steps(workflow) for name in SCRIPT.findall(step.get("run", ""))}
    assert named
    for name in named:
        assert (ROOT / name).stat().st_mode & stat.S_IXUSR, name
    assert workflow["permissions"] == {"contents": "read"}
    assert all(
        "timeout-minutes" in job or "environment" in job for job in workflow["jobs"].values()
    )


def test_quick_tests_run_on_each_python_that_the_package_names() -> None:
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    matrix = read(ROOT / ".github/workflows/test.yml")["jobs"]["pythons"]["strategy"]["matrix"]
    assert matrix["python"] == named
