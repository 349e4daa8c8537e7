"""Flame graphs of what wdsprep does in a group, by py-spy: where its time goes, line by line.

They are taken apart from what is measured: a profiled process is slowed down.
"""

import os
import shutil
import subprocess
from pathlib import Path

from tools.benches import Group, Role, peers

A_SECOND = 200  # looks at each thread


def flame_graphs(group: Group, folder: Path) -> list[Path]:
    """One SVG for each of our commands: threads that wait are left out, workers are in it."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = [rival for rival in group.rivals if rival.role is Role.OURS]
    made = [folder / f"{group.name}{f'-{n}' if n else ''}.svg" for n in range(len(ours))]
    spy = [peers.program("profile", "py-spy"), "record", "--subprocesses", "--nonblocking"]
    for rival, path in zip(ours, made, strict=True):
        words = [*spy, "--rate", str(A_SECOND), "--output", path, "--", *rival.command]
        environment = {**os.environ, **rival.env}
        subprocess.run(words, check=True, capture_output=True, env=environment)
        if rival.leaves is not None:
            shutil.rmtree(rival.leaves, ignore_errors=True)
    return made
