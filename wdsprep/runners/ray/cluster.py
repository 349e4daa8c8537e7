"""The connection to a Ray cluster: the one of this process, a named one, or one of our own.

Ray's processes end with a driver that is killed, but for two agents. They try to report that to a
server which has ended as well, and give up after a minute, which no setting changes (2.60). They
disturb nobody: what is run next starts its own.

A cluster may ask for a token, as one does that `ray start` of 2.60 began where `~/.ray/auth_token`
is. Ray sends one to an address that is named only where RAY_AUTH_MODE says so, and else tries for
20 s, so the address is asked first. That is not for us to set: who holds the token is to say where
it goes.

How many workers a cluster may have at a time, while machines join it and leave (`worker_count`):

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
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import ray
from ray.exceptions import AuthenticationError, RayError

from wdsprep.cpus import usable_cpus
from wdsprep.errors import UsageError, WorkError, without_secrets
from wdsprep.runners.base import RunnerSettings
from wdsprep.runners.schedule import Allowed, all_at_once
from wdsprep.text import human_time, plural

LOCAL = "local"
"""The address for which Ray is started on this machine."""
CONNECT_S = 5.0
STARTS = 2
"""Attempts to start Ray: on a busy machine its processes may come too late for each other."""

_log = logging.getLogger("wdsprep")


@contextmanager
def connect_to_ray(address: str | None, *, cpus: int) -> Iterator[bool]:
    """Connect to Ray while the block lasts, and yield whether Ray was started here for it.

    Without an `address`, which `ray_in_use` finds, Ray is started here: with room for `cpus`, and
    until the block ends. A connection that this process has already is used, and stays.
    Raise WorkError if Ray cannot be used.
    """
    if ray.is_initialized():
        yield False
        return
    address = address or LOCAL
    is_own = address == LOCAL
    if address not in (LOCAL, "auto"):  # for which Ray itself sees to the token
        _check_reachable(address)
        _check_token(address)
    with without_death_notices(), entrypoint_without_secrets():
        try:
            options = {
                "num_cpus": max(cpus, usable_cpus()) if cpus else None,
                "include_dashboard": False,
                # Else Ray starts a worker process for each core, and waits for all of them: those
                # that no actor needs would be started for nothing.
                "_system_config": {"prestart_worker_first_driver": False},
            }
            _init(address, **(options if is_own else {}))
            yield is_own
        finally:
            # Ray itself ends the autoscaler after the server to which that reports its end, and
            # then waits a second for it in vain (2.60).
            node = getattr(_module_of_ray("worker"), "_global_node", None)
            if is_own and (end := getattr(node, "kill_monitor", None)):
                end(check_alive=False)
            ray.shutdown()


def cluster_resources(address: str | None) -> list[dict[str, float]] | None:
    """Return the resources of each live machine of a cluster; None if Ray would be started here."""
    if address in (None, "", LOCAL):
        return None
    with connect_to_ray(address, cpus=0):
        return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def _init(address: str, **options: Any) -> None:
    for left in reversed(range(STARTS if address == LOCAL else 1)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # tips of Ray before 2.60
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as error:  # Ray raises of all kinds, plain ones too
            ray.shutdown()
            if not left:
                raise WorkError(_failure(address, error)) from error
            _log.warning("Ray did not start (%s): trying once more", _line(error))
        else:
            return


def _failure(address: str, error: Exception) -> str:
    if address != LOCAL:
        return f"Ray at {address!r} cannot be used: {_line(error)}"
    return (
        f"Ray does not start on this machine ({_line(error)}): run the same again when the machine "
        "has cores and memory to spare, or do without Ray (--runner local)"
    )


def _check_token(address: str) -> None:
    """Raise WorkError if Ray fails, or its cluster asks for a token that is not sent."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled

    try:
        with _without_stderr():
            GcsClient(address=address)
    except AuthenticationError as error:
        advice = (
            '"export RAY_AUTH_MODE=token" sends the one in ~/.ray/auth_token, which has to be that '
            'of the cluster (there, "ray get-auth-token" prints it)'
        )
        if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
            advice = (
                "the one here is another: put its own into ~/.ray/auth_token, or RAY_AUTH_TOKEN"
            )
        raise WorkError(f"the Ray cluster at {address} asks for a token: {advice}") from error
    except RayError as error:
        raise WorkError(_failure(address, error)) from error


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Silence what Ray's compiled code prints of a connection that fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  a device
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def node_share(gpus: float) -> float:
    """Return the CPU cores of this node that go with a number of its GPUs, in proportion."""
    node_id = ray.get_runtime_context().get_node_id()
    (has,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
    return float(has.get("CPU", 0)) * gpus / (has.get("GPU") or gpus)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


def _module_of_ray(name: str) -> Any:
    """Return a module from within Ray, or None if this version has it elsewhere."""
    return getattr(getattr(ray, "_private", None), name, None)


@contextmanager
def _changed_in_ray(module: str, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Change an attribute of a module of Ray, if this version has it, while the block lasts."""
    place = _module_of_ray(module)
    before = getattr(place, name, None)
    if before is None:
        yield
        return
    setattr(place, name, change(before))
    try:
        yield
    finally:
        setattr(place, name, before)


def entrypoint_without_secrets() -> AbstractContextManager[None]:
    """Let Ray record the command line of this process without URL secrets, while a block lasts.

    Ray shows the command line in its list of jobs (2.60).
    """
    return _changed_in_ray(
        "utils", "get_entrypoint_name", lambda name: lambda: without_secrets(name())
    )


def without_death_notices() -> AbstractContextManager[None]:
    """Keep Ray from printing the death of workers while a block lasts.

    Ray 2.60 prints it to stdout, with `log_to_driver` or without, and looks at this one switch.
    Deaths are the driver's business, and stdout is the command's.
    """
    return _changed_in_ray("worker", "_worker_logs_enabled", lambda _enabled: False)


def _check_reachable(address: str) -> None:
    """Raise WorkError if the address of a cluster is not HOST:PORT, or does not answer within 5 s.

    Ray itself tries for minutes, and floods stderr on the way.
    """
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdigit():
        raise WorkError(
            f"{address!r} is not the address of a Ray cluster: give HOST:PORT of its head node, "
            "such as head:6379, or run inside the cluster with `ray job submit`"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise WorkError(
            f"no Ray cluster answers at {address} ({error}): check the address, or leave it out "
            "to run on this machine"
        ) from error


# --- how many workers there may be
AHEAD, AHEAD_SHARE = 8, 4
"""The workers that may wait for a place, or one for each `AHEAD_SHARE` open, if that is more."""
LOOK_S = 5.0
MOST = 100_000
"""The most workers, where nobody says how many there may be."""
SILENT_S, AGAIN_S = 60.0, 900.0
"""The seconds that a run waits for workers before it says so, and before it says so again."""


def _needs(settings: RunnerSettings) -> str:
    """Return in words what a worker needs of its machine."""
    kind = f" of type {settings.accelerator_type}" if settings.accelerator_type else ""
    return f"{settings.cpus_per_worker:g} CPU and {settings.gpus_per_worker:g} GPU{kind}"


def room_for(settings: RunnerSettings) -> int:
    """Count the workers that the machines of the cluster can hold in all."""
    needs = {"CPU": settings.cpus_per_worker, "GPU": settings.gpus_per_worker}
    needs = {name: share for name, share in needs.items() if share} or {"CPU": 1}
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if kind := settings.accelerator_type:
        machines = [has for has in machines if f"accelerator_type:{kind}" in has]
    return sum(int(min(has.get(name, 0) / needs[name] for name in needs)) for has in machines)


def room_now(settings: RunnerSettings, room: int) -> Allowed:
    """Return a rule that lets as many more workers start as the cluster has room for by then.

    `room` is how many it has room for now.
    """
    looked = time.monotonic()

    def allowed(opened: int, starting: int) -> int:
        nonlocal room, looked
        if time.monotonic() - looked > LOOK_S:
            room, looked = room_for(settings), time.monotonic()
        return room - opened - starting

    return allowed


def ahead_of_open(least: int, opened: int, starting: int) -> int:
    """Return how many more workers may start: the least at once, and then a few at a time.

    At most 8 workers are then starting, or a quarter of the number of open ones if that is more.
    """
    missing = least - opened
    return (missing if missing > 0 else max(AHEAD, opened // AHEAD_SHARE)) - starting


def worker_count(settings: RunnerSettings, *, is_own: bool) -> tuple[int, Allowed]:
    """Return how many workers there may ever be, and the function that says how many may start.

    `is_own` means a Ray that was started on this machine, which does not grow: a range for it
    raises UsageError. Raise WorkError if there is no room for a worker, unless a cluster is asked
    for a number of workers: then the run waits for room.
    """
    least, most = settings.workers, settings.max_workers
    if (is_own or not least) and not (room := room_for(settings)):
        raise WorkError(
            f"no node of the Ray cluster has the {_needs(settings)} that one worker needs: lower "
            "what each takes, or add such nodes (if they start on demand, give the number of "
            "workers)"
        )
    if most and is_own:
        raise UsageError(
            f"{least}:{most} workers are for a cluster that grows, and Ray would be started on "
            "this machine alone: give the cluster with --ray-address, or give one number"
        )
    if most > least:
        return most, partial(ahead_of_open, least)
    if least or is_own:
        return least or room, all_at_once
    return MOST, room_now(settings, room)


def wait_warning(settings: RunnerSettings) -> Callable[[bool], None]:
    """Return a function that warns if there has been no worker for a long time.

    It has to be called from time to time, with whether there is a worker.
    """
    since = time.monotonic()
    due = since + SILENT_S

    def look(has_workers: bool) -> None:
        nonlocal since, due
        now = time.monotonic()
        if has_workers:
            since, due = now, now + SILENT_S
        elif now >= due:
            due = now + AGAIN_S
            why = f", and none with {_needs(settings)}: waiting for one to join"
            if room := room_for(settings):
                why = f" with room for {room:,}: they are starting, or others use it"
            _log.warning(
                "no worker for %s: the Ray cluster has %s%s (Ctrl-C ends the run, and the same "
                "command goes on later)",
                human_time(now - since),
                plural(sum(node["Alive"] for node in ray.nodes()), "node"),
                why,
            )

    return look
