"""Lost workers on Ray: whether the node or the worker is at fault, and the reason that is told.

A node that is drained, preempted or dead costs its unit no attempt. A worker that died by itself
does.
"""

import re

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from wdsprep.runners.schedule import Lost
from wdsprep.runners.stuck_workers import FEWER, OUT_OF_MEMORY

LOW = re.compile("low on memory|out of memory issue")  # where Ray itself has killed a worker
FACT = re.compile(r"\t\w+: ")  # as Ray lists them of a dead actor: its class, its id, its address


def is_node_gone(error: RayError, node: str) -> bool:
    """Return whether the worker was lost because its node was drained, preempted or died.

    `node` is its id, or "" if the worker died before it could tell; then only the error says so.
    """
    if isinstance(error, RayActorError) and error.preempted:
        return True
    if not node:
        return "node has died" in str(error)
    return any(known["NodeID"] == node and not known["Alive"] for known in ray.nodes())


def lost_worker(error: RayError | None, node: str) -> Lost:
    """Return what the schedule is told of a worker that is lost.

    `error` is None if the connection to the worker broke and Ray does not call it dead: this costs
    no attempt.
    """
    if error is None:
        return Lost(reason="the connection to the worker broke", trace="", costs=False)
    costs = not is_node_gone(error, node)
    return Lost(reason=death_reason(error), trace=str(error), costs=costs)


def death_reason(error: Exception) -> str:
    """Return, in one short line, why Ray says that a worker died."""
    if isinstance(error, RayActorError) and error.preempted:
        return "worker died: its machine was taken back"
    if isinstance(error, OutOfMemoryError) or LOW.search(str(error)):
        return OUT_OF_MEMORY
    text = str(error).strip().split("Worker exit detail: ")[-1].split(" Some common causes")[0]
    said = [line.strip() for line in text.splitlines() if not FACT.match(line)]
    perhaps = f": it may have lacked memory: {FEWER}" if "OOM killer" in str(error) else ""
    return f"worker died: {said[-1].rstrip('.')}"[:300] + perhaps
