"""The tools: benchmarks, and what the workflows run."""

import json
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.benches import ROOT, Group, Rival, Role, figures, tables
from tools.benches.turns import Measured, Taken, in_turns

ALLOCATE = "import time; block = bytearray(60_000_000); time.sleep(1); print('took 2.5')"
BURN = "import time\nwhile time.process_time() < 0.3: pass"


def rival(name: str, code: str, role: Role = Role.RIVAL) -> Rival:
    return Rival(name=name, command=[sys.executable, "-c", code], role=role)


@pytest.mark.system
def test_time_processor_time_memory_and_what_a_rival_says_are_measured() -> None:
    rivals = [
        rival("holds", ALLOCATE, Role.OURS),
        rival("burns", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"),
        rival("says", "print('note so it is'); print('took 5')"),
    ]
    group = Group(name="x-y", title="things", rivals=rivals, count=100, targets={"says": 2.0})
    measured = in_turns(group, 2, lambda _: None)
    assert measured.median("holds") == 2.5  # as it says itself
    assert measured.median("holds", "peak_mb") > 60
    assert measured.median("burns", "cpu_s") > 0.3  # of its child
    assert measured.ratio("says") == 2.0
    assert list(tables.notes(measured)) == ["says: so it is"]
    assert list(tables.verdicts(measured)) == ["things: 2.00 x says, target 2 x: met"]
    assert tables.facts(tables.from_facts(tables.facts(measured))) == tables.facts(measured)


def test_a_rival_that_fails_ends_the_benchmark() -> None:
    group = Group(name="x", title="x", rivals=[rival("fails", "raise SystemExit('no data')")])
    with pytest.raises(SystemExit, match="no data"):
        in_turns(group, 1, lambda _: None)


def test_a_name_that_no_group_has_is_told_with_those_that_there_are() -> None:
    command = [sys.executable, str(ROOT / "tools/bench"), "cli", "--only", "x\n"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "bench: no group has 'x\\n' in its name: --only takes a part of one of these: cli\n"
    )


def test_figures_are_kept_by_group_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n")
    for name, file in {"PAGE": page, "RECORD": "figures.json", "TABLES": "figures.md"}.items():
        monkeypatch.setattr(figures, name, tmp_path / file)
    machine = {"date": "2026-11-21", "cores": 2, "cpu": "a CPU"}
    for name, seconds in (("load-0", 2.0), ("pack-tar", 1.0), ("load-0", 4.0)):
        figures.record(timed(name, ours=1.0, theirs=seconds), ("pack", "load"), machine)
    assert list(json.loads((tmp_path / "figures.json").read_text())) == ["pack-tar", "load-0"]
    assert page.read_text().splitlines()[4:] == [
        "| title of pack-tar | 10/s | they | 10/s | 1.00 |  |",
        "| title of load-0 | 10/s | they | 2.5/s | 4.00 | 3 |",
        "",
        "Measured on",
        "",
        "- 2026-11-21, 2 cores of a CPU",
        figures.END,
        "after",
    ]
    every = (tmp_path / "figures.md").read_text()
    assert "2026-11-21, 2 cores of a CPU" in every
    assert "| they | 2.5/s | 2.5..2.5 | 4.00 | 1.0 | 50 |" in every


def timed(name: str, *, ours: float, theirs: float) -> Measured:
    rivals = [
        Rival(name="we", command=(), role=Role.OURS),
        Rival(name="they", command=()),
        Rival(name="a disk", command=(), role=Role.LIMIT),
    ]
    targets = {"they": 3.0} if name == "load-0" else {}
    group = Group(name=name, title=f"title of {name}", rivals=rivals, count=10, targets=targets)
    seconds = {"we": ours, "they": theirs, "a disk": 0.1}
    runs = {one: [Taken(seconds=s, cpu_s=1.0, peak_mb=50.0)] for one, s in seconds.items()}
    return Measured(group=group, runs=runs)


def test_the_page_and_the_tables_show_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {name: getattr(figures, name).read_text() for name in ("PAGE", "TABLES")}
    for name, text in shown.items():
        monkeypatch.setattr(figures, name, tmp_path / name)
        (tmp_path / name).write_text(text)
    figures.show(json.loads(figures.RECORD.read_text()))
    assert {name: (tmp_path / name).read_text() for name in shown} == shown


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
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
