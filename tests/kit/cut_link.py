"""Two machines and the cable between them, which is cut while `pack` is at work on both.

Run by house/test_chaos.py in a network namespace of its own. The far machine is a namespace inside
that; neither sees any other network, and both are gone when this process is.
"""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.kit import chaos
from tests.kit.chaos import Scene, Stage, Waiting, at_work, processes_of
from tests.kit.packs import tree, wait_gone

NEAR, FAR = "10.77.0.1", "10.77.0.2"
TRIALS = 3
"""How often the link is cut at most, until the far machine has something in hand."""


def main(source: str, whole: str, out: str, per_shard: str) -> None:
    for words in ("link set lo up", "link add near type veth peer name far"):
        ip(words)
    with far_machine() as namespace:
        ip(f"link set far netns {namespace}")
        ip(f"addr add {NEAR}/24 dev near")
        ip("link set near up")
        with contextlib.closing(Stage(ip=NEAR)) as stage:
            stage.add()
            with far_node(stage, namespace) as node:
                job = chaos.pack_job(source, per_shard=int(per_shard), pause_s=0.03)
                result = job.run(stage, out, partial(link_is_cut, node=node))
    sys.stdout.write("\n".join(result.log))
    assert (chaos.faults_of(result, out, tree(whole)), result.struck) == ([], 1)


def link_is_cut(scene: Scene, node: Any) -> Waiting:
    """Both sides live on. What the far one has in hand is done there, and by another here too."""
    for _ in range(TRIALS):
        pids = yield from at_work(scene, node)
        scene.strike(pids)
        ip("link set near down")
        late = set().union(*(scene.diary.in_hand(pid) for pid in pids)) - scene.last
        if late:
            break
        ip("link set near up")  # what was in hand there has ended just before
        yield
    scene.stage.add()
    while not late <= scene.done:
        yield
    ip("link set near up")


@contextlib.contextmanager
def far_machine() -> Iterator[int]:
    """A process in a network namespace, which lives as long as somebody is in it."""
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
    try:
        mine = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == mine:
            pass
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


@contextlib.contextmanager
def far_node(stage: Stage, namespace: int) -> Iterator[Any]:
    """What a `Stage` knows of a node, there."""
    inside = ["nsenter", f"--net=/proc/{namespace}/ns/net"]
    for words in ("link set lo up", f"addr add {FAR}/24 dev far", "link set far up"):
        subprocess.run([*inside, "ip", *words.split()], check=True)
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--num-cpus=1", "--block"]
    places = [f"--address={stage.cluster.address}", f"--node-ip-address={FAR}"]
    start = subprocess.Popen([*inside, *ray, *places], stdout=subprocess.DEVNULL)
    node = SimpleNamespace(all_processes={"raylet": [SimpleNamespace(process=start)]})
    try:
        stage.wait_for(3, start)
        yield node
    finally:
        everything = processes_of(node)
        chaos.send(everything, signal.SIGKILL)
        start.wait()
        wait_gone(everything)


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
