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


def test_a_tag_is_held_against_the_version_in_its_file() -> None:
    (step,) = [s for s in steps(read(ROOT / ".github/workflows/publish.yml")) if "name" in s]
    pattern = re.search(r"sed -n 's/(.+)/\\1/p' (\S+)\)", step["run"])
    assert pattern is not None
    found = re.search(
        pattern[1].replace(r"\(", "(").replace(r"\)", ")"), (ROOT / pattern[2]).read_text(), re.M
    )
    assert found is not None


@pytest.mark.parametrize(
    "path", [form for form in FORMS if form.stem != "config"], ids=lambda p: p.stem
)
def test_a_form_asks_for_something(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    assert any(part.get("validations", {}).get("required") for part in form["body"])
