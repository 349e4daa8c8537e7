"""How many workers a Ray cluster may have at a time, while machines join it and leave.

- A number is asked for at once, whether there is room for it or not: Ray keeps the workers that it
  cannot place, and places them when machines join.
- Without a number there are as many as the cluster's machines could hold. That is looked at again
  and again, so machines that join are used.
- Of a range the least are asked for at once, the others a few at a time. Workers without a place
  are what makes an autoscaler add machines, so it does, up to the most; and where none are to be
  had, few wait in vain.

Where all machines have left, a run waits for others, and says so.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import ray

from wdsprep.errors import UsageError, WorkError
from wdsprep.runners.schedule import Allowed, all_at_once
from wdsprep.text import human_time, plural

AHEAD, AHEAD_SHARE = 8, 4
"""The workers that may wait for a place, or one for each `AHEAD_SHARE` open, if that is more."""
LOOK_S = 5.0
MOST = 100_000
"""The most workers, where nobody says how many there may be."""
SILENT_S, AGAIN_S = 60.0, 900.0
"""The seconds that a run waits for workers before it says so, and before it says so again."""

_log = logging.getLogger("wdsprep")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The resources that a worker needs of its machine."""

    cpus: float
    gpus: float
    accelerator_type: str | None

    def __str__(self) -> str:
        kind = f" of type {self.accelerator_type}" if self.accelerator_type else ""
        return f"{self.cpus:g} CPU and {self.gpus:g} GPU{kind}"

    def room(self) -> int:
        """Count the workers that the machines of the cluster can hold in all."""
        return sum(self.room_on(node["Resources"]) for node in ray.nodes() if node["Alive"])

    def room_on(self, resources: dict[str, float]) -> int:
        if self.accelerator_type and f"accelerator_type:{self.accelerator_type}" not in resources:
            return 0
        shares = {"CPU": self.cpus, "GPU": self.gpus}
        if not any(shares.values()):
            shares["CPU"] = 1
        return int(min(resources.get(kind, 0) / share for kind, share in shares.items() if share))


@dataclass(slots=True)
class RoomNow:
    """A rule that lets as many more workers start as the cluster has room for at the moment.

    It is called with the numbers of open and of starting workers.
    """

    share: Share
    room: int
    looked: float = field(default_factory=time.monotonic)

    def __call__(self, opened: int, starting: int) -> int:
        if time.monotonic() - self.looked > LOOK_S:
            self.room, self.looked = self.share.room(), time.monotonic()
        return self.room - opened - starting


@dataclass(frozen=True, slots=True)
class AheadOfOpen:
    """A rule that lets the least number of workers start at once, and then a few at a time.

    At most 8 workers are then starting, or a quarter of the number of open ones if that is more.
    """

    least: int

    def __call__(self, opened: int, starting: int) -> int:
        missing = self.least - opened
        return (missing if missing > 0 else max(AHEAD, opened // AHEAD_SHARE)) - starting


def worker_count(share: Share, *, least: int, most: int, is_own: bool) -> tuple[int, Allowed]:
    """Return how many workers there may ever be, and the function that says how many may start.

    `is_own` means a Ray that was started on this machine, which does not grow: a range for it
    raises UsageError. Raise WorkError if there is no room for a worker, unless a cluster is asked
    for a number of workers: then the run waits for room.
    """
    if (is_own or not least) and not (room := share.room()):
        raise WorkError(
            f"no node of the Ray cluster has the {share} that one worker needs: lower what each "
            "takes, or add such nodes (if they start on demand, give the number of workers)"
        )
    if most and is_own:
        raise UsageError(
            f"{least}:{most} workers are for a cluster that grows, and Ray would be started on "
            "this machine alone: give the cluster with --ray-address, or give one number"
        )
    if most > least:
        return most, AheadOfOpen(least)
    if least or is_own:
        return least or room, all_at_once
    return MOST, RoomNow(share, room)


class WaitWarning:
    """A warning that tells now and then what a run without any worker waits for."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._since = time.monotonic()
        self._next = self._since + SILENT_S

    def look(self, *, has_workers: bool) -> None:
        """Warn if there has been no worker for a long time. Call this from time to time."""
        now = time.monotonic()
        if has_workers:
            self._since, self._next = now, now + SILENT_S
        elif now >= self._next:
            self._next = now + AGAIN_S
            _log.warning(
                "no worker for %s: %s (Ctrl-C ends the run, and the same command goes on later)",
                human_time(now - self._since),
                self._reason(),
            )

    def _reason(self) -> str:
        nodes = sum(node["Alive"] for node in ray.nodes())
        cluster = f"the Ray cluster has {plural(nodes, 'node')}"
        if room := self._share.room():
            return f"{cluster} with room for {room:,}: they are starting, or others use it"
        return f"{cluster}, and none with {self._share}: waiting for one to join"
