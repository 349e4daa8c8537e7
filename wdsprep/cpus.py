"""The number of cores that this process may use: those of the machine, within its limits.

In a container the quota of its control group is such a limit. Kubernetes makes the quota from the
limit of a pod, while the system still reports all cores.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """Return the number of cores that this process may use. A part of a core counts as one."""
    all_cores = os.cpu_count() or 1
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else all_cores
    return max(1, min(here, *(ceil(quota) for quota in _quotas()), all_cores))


def _quotas() -> Iterator[float]:
    """Yield the number of cores that each control group around this process may use.

    Groups without a limit are left out.
    """
    for top, innermost in control_groups("cpu"):
        for group in (innermost, *innermost.parents):
            if group.is_relative_to(top):
                with suppress(OSError, ValueError):  # no such file, or no limit
                    yield _quota(group)


def control_groups(controller: str) -> Iterator[tuple[Path, Path]]:
    """Yield the root and the path of each control group of this process that has a controller.

    Control groups of versions 1 and 2 are found. In a container the path may be the one on the
    host, which does not exist here. The root is then the group of the container.
    """
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds or controller in kinds.split(","):
                top = GROUPS / kinds
                yield top, top / path.lstrip("/")


def _quota(group: Path) -> float:
    """Return the cores that a control group may use. Raise ValueError if it sets no limit."""
    if (both := group / "cpu.max").exists():
        allowed, period = both.read_text().split()
        return int(allowed) / int(period)
    allowed_us = int((group / "cpu.cfs_quota_us").read_text())
    if allowed_us <= 0:
        raise ValueError(allowed_us)
    return allowed_us / int((group / "cpu.cfs_period_us").read_text())
