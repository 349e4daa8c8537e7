"""Ray on this machine: clusters of several nodes, and what lies in the object store."""

import contextlib
from collections.abc import Iterator
from typing import Any

LEAN: dict[str, Any] = {
    "include_dashboard": False,
    "_system_config": {"prestart_worker_first_driver": False},
}
"""What keeps a Ray from starting processes that no test uses: a dashboard, and a worker for each
core before anybody asks for one."""
LEAN_HEAD: dict[str, Any] = {**LEAN, "no_monitor": True, "include_log_monitor": False}
"""The same of the head of a cluster, which has no need of an autoscaler or of logs either."""


@contextlib.contextmanager
def ray_cluster(*, cpus: int) -> Iterator[Any]:
    """A head with so many cores, to which this process is connected."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, **LEAN_HEAD})
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def object_store() -> Any:
    """Of a Ray with one node: what is there, and what has become of all that was."""
    import ray
    from ray._private.internal_api import get_memory_info_reply

    (node,) = ray.nodes()
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    return get_memory_info_reply(None, *address).store_stats
