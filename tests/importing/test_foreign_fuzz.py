"""Whatever is changed in a stranger's file, it is one line or rejects: with a few of the seeds that
`python -m tests.kit.foreign_fuzz` runs.
"""

import subprocess
import sys
from pathlib import Path

from tests.kit.paths import ROOT

SEEDS = 2


def test_mutated_files_of_strangers_are_one_line_or_rejects(foreign_sets: Path) -> None:
    """Each in little memory, in a process of its own, which a library could end."""
    words = [sys.executable, "-W", "ignore", "-m", "tests.kit.foreign_fuzz", str(foreign_sets)]
    run = subprocess.run(
        [*words, "0", str(SEEDS)],
        check=False,
        cwd=ROOT,
        timeout=300,
        capture_output=True,
        text=True,
    )
    told = [line for line in run.stdout.splitlines() if not line.startswith(">")]
    assert run.returncode == 0, "\n".join([*told, run.stdout[-200:], run.stderr[-2000:]])
    assert told[-1].startswith("0 faults")
