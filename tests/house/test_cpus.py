"""A limit of a container counts, in both versions of control groups."""

import os
from pathlib import Path

import pytest

from wdsprep import cpus


@pytest.mark.parametrize(
    ("own", "files", "count"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "6400000 100000"}, 8),
        ("0::/pod/box", {"pod/cpu.max": "300000 100000", "pod/box/cpu.max": "max 100000"}, 3),
        ("0::/../of/the/host", {"cpu.max": "300000 100000"}, 3),
        ("4:cpu,cpuacct:/pod", {"cpu,cpuacct/pod/cpu.cfs_quota_us": "400000"}, 4),
        ("4:cpu,cpuacct:/of/the/host", {"cpu,cpuacct/cpu.cfs_quota_us": "400000"}, 4),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1"}, 8),
        ("4:memory:/", {"memory/cpu.cfs_quota_us": "400000"}, 8),
        ("", {}, 8),
    ],
)
def test_a_quota_counts_and_no_limit_does_not(
    own: str, files: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, said = tmp_path / "groups", tmp_path / "own"
    said.write_text(own)
    for name, text in files.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        if name.endswith("quota_us"):
            path.with_name("cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(cpus, "GROUPS", groups)
    monkeypatch.setattr(cpus, "OWN_GROUPS", said)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert cpus.usable_cpus() == count
